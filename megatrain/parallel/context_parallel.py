"""Context parallelism: the rows of each sample that a rank holds.

    a sample in 2 cp chunks, cp 4:   0 1 2 3 4 5 6 7
    rank 0: 0 7    rank 1: 1 6    rank 2: 2 5    rank 3: 3 4        concatenated, s/cp rows

All ranks then have equally many pairs of queries and keys: in causal attention a late row costs more than an early one.
Under sequence parallelism tensor ranks split these rows further (`TokenSplit`). One rank holds the whole sample.

Source: Megatron-LM's split.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from megatrain.parallel.batch import Batch, PassInfo
from megatrain.parallel.collectives import all_gather, all_reduce
from megatrain.parallel.grid import RankGroup
from megatrain.parallel.tensor_parallel import TensorParallel


@dataclass(frozen=True)
class ContextParallel:
    """The split of samples over the ranks of a group. `rows` is the number of a rank's rows of a sample, s/cp."""

    group: RankGroup

    @property
    def size(self) -> int:
        return self.group.size

    @property
    def rank(self) -> int:
        return self.group.rank

    def chunks(self, rows: int, rank: int | None = None) -> tuple[range, range]:
        """Return the positions in the sample of the two chunks of this rank, or of another."""
        length, rest = divmod(rows, 2)
        assert not rest, f"{rows} rows are not two chunks"
        first, second = (number * length for number in self._chunk_numbers(rank))
        return range(first, first + length), range(second, second + length)

    def position_ranges(self, rows: int) -> tuple[range, ...]:
        """Return the positions in the sample of this rank's rows: its two chunks, joined if they are contiguous."""
        if self.size == 1:
            return (range(rows),)  # any number, such as a prompt's
        first, second = self.chunks(rows)
        return (range(first.start, second.stop),) if first.stop == second.start else (first, second)

    def positions(self, rows: int, device: torch.device) -> Tensor:
        """Return the position in the sample of each of this rank's rows: int64 [s/cp]."""
        ranges = [torch.arange(part.start, part.stop, device=device) for part in self.position_ranges(rows)]
        return torch.cat(ranges) if len(ranges) > 1 else ranges[0]

    def shard(self, x: Tensor, dim: int) -> Tensor:
        """Return this rank's rows of samples that are whole along `dim`; no rows of empty samples."""
        if self.size == 1:
            return x
        length, rest = divmod(x.shape[dim], 2 * self.size)
        assert not rest, f"{x.shape[dim]} rows do not divide into {2 * self.size} chunks"
        return torch.cat([x.narrow(dim, number * length, length) for number in self._chunk_numbers()], dim)

    def shard_batch(self, batch: Batch, *, has_chunk_means: bool = False) -> Batch:
        """Return this rank's rows of a micro-batch. Documents and padding stay whole: attention needs all keys.

        Args:
            has_chunk_means: a rank's part of the loss is the mean of its own token losses divided by cp, as in
                Megatron-LM; else token losses are divided by the number of tokens that count in the whole micro-batch.
        """
        if self.size == 1:
            return batch
        names = ("tokens", "labels", "loss_mask", "position_ids", "types")
        rows: dict[str, Any] = {n: self.shard(x, 1) for n in names if (x := getattr(batch, n)) is not None}
        return replace(
            batch, **rows,
            denominator=rows["loss_mask"].sum() * self.size if has_chunk_means else batch.loss_denominator,
            ahead=tuple(self.shard_batch(one, has_chunk_means=has_chunk_means) for one in batch.ahead),
        )  # fmt: skip

    def num_tokens(self, batch: Batch) -> int:
        """Return the tokens of the micro-batch whose rows these are."""
        return batch.loss_mask.numel() * self.size

    def _chunk_numbers(self, rank: int | None = None) -> tuple[int, int]:
        rank = self.rank if rank is None else rank
        return rank, 2 * self.size - 1 - rank


def to_sequence_order(x: Tensor, cp_size: int) -> Tensor:
    """Reorder the ranks' concatenated rows as in the sample: [s, ...] -> [s, ...]."""
    if cp_size == 1:
        return x
    early, late = x.unflatten(0, (cp_size, 2, -1)).unbind(1)
    return torch.cat((early, late.flip(0))).flatten(0, 1)


def to_rank_order(x: Tensor, cp_size: int) -> Tensor:
    """Invert `to_sequence_order`: reorder the rows of a sample as the ranks hold them, concatenated."""
    early, late = x.unflatten(0, (2, cp_size, -1))
    return torch.stack((early, late.flip(0)), dim=1).flatten(0, 2)


@dataclass(frozen=True)
class TokenSplit:
    """The split of a micro-batch's tokens between layers, over cp and with sequence parallelism over tp.

        8 positions, cp 2, tp 2 with sp:    cp 0: 0 1 6 7    cp 1: 2 3 4 5    -> tp 0 of cp 0: 0 1, tp 1: 6 7 ...

    Quantities that Megatron-LM defines over a rank's tokens are defined over the micro-batch here: `sum` and `gather`
    combine its ranks. `rows` is the number of a rank's rows of a sample: s, s/cp or s/(cp tp).
    """

    tp: TensorParallel
    cp: ContextParallel

    @property
    def groups(self) -> tuple[RankGroup, ...]:
        """Groups of ranks with different tokens of the same micro-batch."""
        return (*((self.tp.group,) if self.tp.sequence_parallel else ()), self.cp.group)

    @property
    def num_ranks(self) -> int:
        """Number of ranks that split a micro-batch's tokens."""
        return self.cp.size * (self.tp.size if self.tp.sequence_parallel else 1)

    @property
    def is_first(self) -> bool:
        """This rank is the first of those that split a micro-batch."""
        return all(group.is_first for group in self.groups)

    def positions(self, rows: int, device: torch.device) -> Tensor:
        """Return the position in the sample of each of this rank's rows: int64 [rows]."""
        first = self.tp.first_row(rows)
        return self.cp.positions(self.tp.full_length(rows), device)[first : first + rows]

    def token_indices(self, rows: int, samples: int, info: PassInfo, device: torch.device) -> Tensor:
        """Return an index for each token, unique in the run and the same under every layout: int64 [rows, samples]."""
        sample = torch.arange(samples, device=device) + info.first_sample
        return self.positions(rows, device)[:, None] + sample * (self.tp.full_length(rows) * self.cp.size)

    def shared_token_indices(self, rows: int, samples: int, info: PassInfo, device: torch.device) -> Tensor:
        """Return the same, computed once in a pass: for layers of the main stream."""
        key = rows, samples, self.tp.first_row(rows), self.tp.full_length(rows), self.cp.rank, self.cp.size
        if key not in info.token_indices:
            info.token_indices[key] = self.token_indices(rows, samples, info, device)
        return info.token_indices[key]

    def flat_positions(self, rows: int, samples: int, device: torch.device) -> Tensor:
        """Return the index of each token in the flattened micro-batch [s, b]: int64 [rows * samples]."""
        positions = self.positions(rows, device)[:, None] * samples
        return (positions + torch.arange(samples, device=device)).flatten()

    def sum(self, x: Tensor) -> Tensor:
        """Sum `x` over the ranks, in place."""
        for group in self.groups:
            all_reduce(x, group)
        return x

    def gather(self, x: Tensor, flat_positions: Tensor) -> Tensor:
        """Return the rows of all tokens, in the order of the micro-batch: [t, ...] -> [T, ...].

        Args:
            flat_positions: positions of this rank's tokens.
        """
        if self.num_ranks == 1:
            return x
        for group in self.groups:
            x, flat_positions = all_gather(x, group), all_gather(flat_positions, group)
        whole = torch.empty_like(x)
        whole[flat_positions] = x
        return whole
