"""Layers whose branches read the same input, side by side."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor, nn

from megatrain.model.implementations.module_protocols import Pointwise
from megatrain.model.layer import Sequential, TransformerLayer
from megatrain.parallel.batch import Batch, PassInfo


class ParallelLayer(TransformerLayer):
    """A layer whose branches all read its input (GPT-NeoX): hidden + attention(hidden) + MLP(hidden); or its norm (Falcon-H1)."""

    def __init__(self, branches: Sequence[nn.Module], norm: Pointwise | None) -> None:
        super().__init__(branches)
        self.norm = Sequential([] if norm is None else [norm])

    def forward(self, hidden: Tensor, batch: Batch, info: PassInfo) -> Tensor:  # noqa: ARG002 (the signature of a segment)
        residual, outputs = self.norm(hidden, info), []
        for branch in self.branches:
            residual, output = branch(residual, None, info)
            outputs.append(output)
        return sum(outputs, hidden if self.norm.steps else residual)
