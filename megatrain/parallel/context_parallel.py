"""Context parallelism: which rows of each sample a rank holds.

    a sample in 2 cp chunks, cp 4:   0 1 2 3 4 5 6 7
    rank 0: 0 7    rank 1: 1 6    rank 2: 2 5    rank 3: 3 4        one behind the other, s/cp rows

So all ranks have as many pairs of queries and keys to work on: causal attention costs a late row more than an early
one. Tensor ranks under sequence parallelism divide these rows further. With one rank they are the whole sample.

Source: the split is Megatron-LM's.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from megatrain.parallel.batch import Batch
from megatrain.parallel.collectives import all_gather, all_reduce
from megatrain.parallel.grid import RankGroup
from megatrain.parallel.tensor_parallel import TensorParallel


@dataclass(frozen=True)
class ContextParallel:
    """How samples are divided over the ranks of a group. `rows` are a rank's of a sample, s/cp, as often as it is asked."""

    group: RankGroup

    @property
    def size(self) -> int:
        return self.group.size

    @property
    def rank(self) -> int:
        return self.group.rank

    def chunks(self, rows: int, rank: int | None = None) -> tuple[range, range]:
        """The places in the sample of this rank's two chunks, or another's, of `rows` together, which are even."""
        length, left_over = divmod(rows, 2)
        assert not left_over, f"{rows} rows are no two chunks"
        first, second = (number * length for number in self._numbers(rank))
        return range(first, first + length), range(second, second + length)

    def position_ranges(self, rows: int) -> tuple[range, ...]:
        """The places in the sample of this rank's rows, in as few runs as can be: its chunks, or both as one."""
        if self.size == 1:
            return (range(rows),)  # any number, such as a prompt's
        first, second = self.chunks(rows)
        return (range(first.start, second.stop),) if first.stop == second.start else (first, second)

    def positions(self, rows: int, device: torch.device) -> Tensor:
        """The place in the sample of each of this rank's rows: int64 [s/cp]."""
        runs = [torch.arange(run.start, run.stop, device=device) for run in self.position_ranges(rows)]
        return torch.cat(runs) if len(runs) > 1 else runs[0]

    def shard(self, x: Tensor, dim: int) -> Tensor:
        """This rank's rows of samples that are whole along `dim`; of empty ones, none."""
        if self.size == 1:
            return x
        length, left_over = divmod(x.shape[dim], 2 * self.size)
        assert not left_over, f"{x.shape[dim]} rows do not divide into {2 * self.size} chunks"
        return torch.cat([x.narrow(dim, number * length, length) for number in self._numbers()], dim)

    def shard_batch(self, batch: Batch, *, has_chunk_means: bool = False) -> Batch:
        """This rank's rows of a micro-batch. Documents stay whole, as attention needs all their borders.

        Args:
            has_chunk_means: whether a rank's share of the loss is the mean of its own token losses, divided by cp, as
                in Megatron-LM; else token losses are divided by how many count in the whole micro-batch.
        """
        if self.size == 1:
            return batch
        tokens, labels, loss_mask, position_ids = (
            self.shard(x, 1) for x in (batch.tokens, batch.labels, batch.loss_mask, batch.position_ids)
        )
        own = replace(batch, tokens=tokens, labels=labels, loss_mask=loss_mask, position_ids=position_ids)
        return replace(own, own_mean_over=own.mean_over * self.size if has_chunk_means else batch.mean_over)

    def _numbers(self, rank: int | None = None) -> tuple[int, int]:
        """Of a rank's chunks."""
        rank = self.rank if rank is None else rank
        return rank, 2 * self.size - 1 - rank


def to_sequence_order(x: Tensor, cp_size: int) -> Tensor:
    """Rows of the ranks, one rank's behind the other's, in the order of the sample: [s, ...] -> [s, ...]."""
    early, late = x.unflatten(0, (cp_size, 2, -1)).unbind(1)
    return torch.cat((early, late.flip(0))).flatten(0, 1)


def to_rank_order(x: Tensor, cp_size: int) -> Tensor:
    """What `to_sequence_order` undoes: rows in the order of the sample, as ranks hold them, one rank's behind the other's."""
    early, late = x.unflatten(0, (2, cp_size, -1))
    return torch.stack((early, late.flip(0)), dim=1).flatten(0, 2)


@dataclass(frozen=True)
class TokenSplit:
    """How the tokens of a micro-batch are split. `rows` are a rank's of a sample: s, s/cp or s/(cp tp)."""

    tp: TensorParallel
    cp: ContextParallel

    @property
    def groups(self) -> tuple[RankGroup, ...]:
        """Ranks that have different tokens of the same micro-batch."""
        return (*((self.tp.group,) if self.tp.sequence_parallel else ()), self.cp.group)

    @property
    def num_ranks(self) -> int:
        """How many share a micro-batch's tokens."""
        return self.cp.size * (self.tp.size if self.tp.sequence_parallel else 1)

    def positions(self, rows: int, device: torch.device) -> Tensor:
        """The place in the sample of each of this rank's rows: int64 [rows]."""
        first = self.tp.first_row(rows)
        return self.cp.positions(self.tp.full_length(rows), device)[first : first + rows]

    def token_indices(self, rows: int, samples: int, *, first_sample: int, device: torch.device) -> Tensor:
        """A number for each token, the same under every layout, that no other token of the run has: int64 [rows, samples].

        Args:
            first_sample: number of the micro-batch's first sample in the run.
        """
        length = self.tp.full_length(rows) * self.cp.size
        sample = torch.arange(samples, device=device) + first_sample
        return self.positions(rows, device)[:, None] + sample * length

    def flat_positions(self, rows: int, samples: int, device: torch.device) -> Tensor:
        """Where each token stands in the micro-batch as [s, b] has it, flat: int64 [rows * samples]."""
        places = self.positions(rows, device)[:, None] * samples
        return (places + torch.arange(samples, device=device)).flatten()

    def sum(self, x: Tensor) -> Tensor:
        """`x` summed over the ranks, in place."""
        for group in self.groups:
            all_reduce(x, group)
        return x

    def gather(self, x: Tensor, order: Tensor) -> Tensor:
        """All tokens' rows of a tensor, in the order of the micro-batch: [t, ...] -> [T, ...].

        Args:
            order: of this rank's tokens.
        """
        if self.num_ranks == 1:
            return x
        for group in self.groups:
            x, order = all_gather(x, group), all_gather(order, group)
        whole = torch.empty_like(x)
        whole[order] = x
        return whole
