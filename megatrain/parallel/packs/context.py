"""Context parallelism whose group changes from pack to pack.

    PackBatch, with the size of its group ─> `shard_batch`: this rank's rows ─> `enter`, before each pass of a segment
                                                                              ─> attention, RoPE, dropout of that pack

Modules hold one `PackContext` and read its group when they compute: that of the last `enter`, which `PackExecutor` calls.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from megatrain.parallel.batch import Batch, PassInfo
from megatrain.parallel.context.context_attention import ContextAttention
from megatrain.parallel.context_parallel import ContextParallel
from megatrain.parallel.grid import RankGrid, RankGroup


@dataclass(frozen=True, kw_only=True)
class StepWork:
    """The documents of a global batch, as far as its FLOPs depend on them."""

    num_tokens: int
    sum_of_squared_lengths: int


@dataclass(frozen=True, kw_only=True)
class PackBatch(Batch):
    """A pack: one sample of all its documents, filled up with tokens without loss."""

    group_size: int
    """Ranks that share it."""
    num_tokens: int
    """Tokens of its documents, which are its first ones."""
    token_ids: Tensor
    """An index for each token, unique in the run and the same in any schedule, int64 [1, s]; dropout is keyed by it."""
    work: StepWork
    """That of the whole step."""

    def mapped(self, function: Callable[[Tensor], Tensor]) -> PackBatch:
        found = super().mapped(function)
        assert isinstance(found, PackBatch)
        return replace(found, token_ids=function(self.token_ids), denominator=found.loss_denominator)


class PackContext(ContextParallel):
    """The split of the current pack over its ranks; before the first one, over the largest group."""

    def __init__(self, grid: RankGrid) -> None:
        own = grid.replicas.ranks[grid.replicas.rank]
        alone = ContextParallel(RankGroup("alone", (own,), 0))
        self._by_size = {1: alone, **{group.size: ContextParallel(group) for group in grid.contexts}}
        self._set(self._by_size[max(self._by_size)], None)

    def _set(self, current: ContextParallel, batch: PackBatch | None) -> None:
        object.__setattr__(self, "current", current)  # the base class is frozen
        object.__setattr__(self, "batch", batch)

    current: ContextParallel
    batch: PackBatch | None
    """This rank's rows of the current pack."""

    @property
    def group(self) -> RankGroup:
        return self.current.group

    def positions(self, rows: int, device: torch.device) -> Tensor:
        """Return the index in the run of each of this rank's tokens: int64 [s/cp]."""
        if self.batch is None:
            return super().positions(rows, device)
        return self.batch.token_ids[0]

    def shard_batch(self, batch: Batch, *, has_chunk_means: bool = False) -> Batch:
        """Return this rank's rows of a pack."""
        assert isinstance(batch, PackBatch), "a loader of packs"
        cp = self._by_size[batch.group_size]
        sharded: Any = cp.shard_batch(batch, has_chunk_means=has_chunk_means)
        own: PackBatch = replace(
            sharded, token_ids=cp.shard(batch.token_ids, 1), denominator=sharded.loss_denominator
        )
        return own

    def num_tokens(self, batch: Batch) -> int:
        """See `ContextParallel`; tokens that fill a pack up do not count."""
        assert isinstance(batch, PackBatch), "a loader of packs"
        return batch.num_tokens

    @property
    def num_document_rows(self) -> int:
        """This rank's rows of the current pack that are tokens of documents: the first ones."""
        assert self.batch is not None, "a pass of a pack has begun"
        ranges = self.current.position_ranges(self.batch.tokens.shape[1])
        return sum(max(min(part.stop, self.batch.num_tokens) - part.start, 0) for part in ranges)

    def enter(self, batch: PackBatch, info: PassInfo) -> None:
        """Begin a pass of a pack."""
        self._set(self._by_size[batch.group_size], batch)
        info.first_sample = 0  # tokens have indices of their own


class PackAttention(ContextAttention):
    """Attention over the ranks of the current pack: heads are exchanged, or keys and values are gathered."""

    def __init__(self, cp: PackContext, *, gathers: bool) -> None:
        object.__setattr__(self, "cp", cp)
        object.__setattr__(self, "gathers", gathers)
        object.__setattr__(self, "_alone", cp._by_size[1])  # noqa: SLF001 (of the same file)

    cp: PackContext
    _alone: ContextParallel

    @property
    def heads(self) -> RankGroup:
        return (self._alone if self.gathers else self.cp.current).group

    @property
    def ring(self) -> ContextParallel:
        return self.cp.current if self.gathers else self._alone
