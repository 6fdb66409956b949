"""The context-parallel parts of a model: attention over ranks, and RoPE at the positions of this rank's rows.

SampleContexts   samples of one length, split over the ranks of cp
PackContexts     packs of documents, each split over a group of its own (`parallel/packs/context.py`)
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from megatrain.config.model_spec.attention import AttentionSpec
from megatrain.config.model_spec.rotary import RotarySpec
from megatrain.kernels.dtypes import accumulation_dtype
from megatrain.kernels.rotary import cos_sin_tables
from megatrain.model.layer import RotaryEmbedding
from megatrain.parallel.context.context_attention import ContextAttention
from megatrain.parallel.context_parallel import ContextParallel
from megatrain.parallel.grid import RankGrid
from megatrain.parallel.packs.context import PackAttention, PackBatch, PackContext


class SampleContexts:
    """Contexts that are whole samples.

    Args:
        seq_length: length of the longest sample; RoPE tables cover it.
        cp_comm_types: values of --cp-comm-type, one for all layers or one per layer.
        dtype: dtype of the weights.
        device: device of the tables.
    """

    def __init__(
        self,
        grid: RankGrid,
        seq_length: int,
        cp_comm_types: Sequence[str],
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        self.grid, self.seq_length, self.cp_comm_types = grid, seq_length, cp_comm_types
        self.dtype, self.device = accumulation_dtype(dtype), device
        self.cp = self._split()
        self._ropes: dict[tuple[RotarySpec, int], RotaryEmbedding] = {}

    def attention(self, layer: int) -> ContextAttention:
        """Return the communication of a layer's attention."""
        return ContextAttention.of(self.cp_comm_types[layer % len(self.cp_comm_types)], self.grid)

    def rope(self, mixer: AttentionSpec) -> RotaryEmbedding | None:
        """Return the module of an attention, if it has RoPE; layers with the same spec share one."""
        if mixer.rotary is None:
            return None
        key = (mixer.rotary, mixer.rope_dim)
        if key not in self._ropes:
            self._ropes[key] = self._rope(*key)
        return self._ropes[key]

    def _split(self) -> ContextParallel:
        return ContextParallel(self.grid.cp)

    def _rope(self, spec: RotarySpec, head_dim: int) -> RotaryEmbedding:
        def positions(rows: int) -> Tensor:
            return self.cp.positions(rows, torch.device("cpu")).to(self.device)

        def tables(rows: int) -> tuple[Tensor, Tensor]:
            return (
                rope.tables
                if rows == whole
                else cos_sin_tables(spec, head_dim, positions(rows), dtype=self.dtype)
            )

        whole = self.seq_length // self.cp.size
        rope = RotaryEmbedding(spec, head_dim, positions(whole), self.dtype)
        rope.tables_of = functools.cache(tables) if self.cp.size > 1 else None
        return rope


class PackContexts(SampleContexts):
    """Contexts that are packs; `seq_length` is the length of the longest document."""

    cp: PackContext

    def attention(self, layer: int) -> ContextAttention:  # noqa: ARG002 (all layers communicate alike)
        return PackAttention(self.cp, gathers=self.cp_comm_types[0] == "all_gather")

    def _split(self) -> PackContext:
        return PackContext(self.grid)

    def _rope(self, spec: RotarySpec, head_dim: int) -> RotaryEmbedding:
        positions = torch.arange(self.seq_length, device=self.device)
        return PackRotary(spec, head_dim, positions, self.dtype, self.cp)


class PackRotary(RotaryEmbedding):
    """RoPE at the positions of the current pack, which restart with each document; the tables have those of any document."""

    def __init__(
        self, spec: RotarySpec, head_dim: int, positions: Tensor, dtype: torch.dtype, cp: PackContext
    ) -> None:
        super().__init__(spec, head_dim, positions, dtype)
        self.cp = cp
        self._of: tuple[PackBatch | None, Any] = (None, None)

    def rows(self, count: int) -> Any:  # noqa: ARG002 (all rows of the pack)
        """See `RotaryEmbedding`; layers share them."""
        batch = self.cp.batch
        assert batch is not None, "a pass of a pack has begun"
        if self._of[0] is not batch:
            self._of = batch, tuple(table[batch.position_ids[0]] for table in self.tables)
        return self._of[1]
