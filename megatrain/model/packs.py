"""Modules of a model that reads packs: RoPE by the positions in documents, and the call that tells all modules of a pack."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from megatrain.config.model_spec.rotary import RotarySpec
from megatrain.model import functions
from megatrain.model.layer import RotaryEmbedding
from megatrain.parallel.batch import PassInfo
from megatrain.parallel.packs.context import PackBatch, PackContext


class PackRotary(RotaryEmbedding):
    """RoPE at the positions of the current pack, which restart with each document.

    Args:
        seq_length: most tokens of a document.
    """

    def __init__(
        self, seq_length: int, device: torch.device, cp: PackContext, spec: RotarySpec, head_dim: int, dtype: torch.dtype
    ) -> None:
        super().__init__(spec, head_dim, torch.arange(seq_length, device=device), dtype)
        self.cp = cp
        self._tables_of: tuple[PackBatch | None, Any] = (None, None)

    def forward(self, x: Tensor, info: PassInfo) -> Tensor:  # noqa: ARG002 (the signature of a pointwise module)
        return functions.apply_rope(x, *self._of_pack(), is_interleaved=self.is_interleaved)

    def split_qkv(self, qkv: Tensor, sizes: Sequence[int]) -> tuple[Tensor, ...]:
        """See `RotaryEmbedding`."""
        return functions.apply_rope_to_qkv(qkv, sizes, *self._of_pack(), is_interleaved=self.is_interleaved)

    def _of_pack(self) -> Any:
        """Return the rows of the tables for this rank's rows of the pack; layers share them."""
        batch = self.cp.batch
        assert batch is not None, "a pass of a pack has begun"
        if self._tables_of[0] is not batch:
            self._tables_of = (batch, tuple(table[batch.position_ids[0]] for table in self.tables))
        return self._tables_of[1]


def follow_packs(segments: Sequence[nn.Module], cp: PackContext) -> None:
    """Make each segment's forward pass begin that of its pack."""

    def enter(_: nn.Module, arguments: tuple[Any, ...]) -> None:
        _, batch, info = arguments
        cp.enter(batch, info)

    for segment in segments:
        segment.register_forward_pre_hook(enter)
