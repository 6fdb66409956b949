"""The first segment of the model: token embedding, learned positions, scale, dtype of the residual stream, dropout.

token ids [b, s] ─ word embedding ─ + ─ output modules ─> hidden [s/tp, b, h]
position ids     ─ learned positions ┘
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from megatrain.parallel.batch import Batch, PassInfo
from megatrain.parallel.layout import ParamLayout, ShardedModule
from megatrain.parallel.tensor_parallel import TensorParallel, replicated_embedding, vocab_parallel_embedding


class Embedding(ShardedModule):
    """The embedding segment: token ids [b, s] -> hidden states [s/tp, b, h].

    Args:
        layout: layout of the word embedding table.
        positions: learned position embedding; None: positions enter the model elsewhere.
        output: pointwise modules applied to the sum.
    """

    weight: Tensor

    def __init__(
        self,
        layout: ParamLayout,
        positions: LearnedPositions | None,
        output: nn.Module,
        tp: TensorParallel,
        dtype: torch.dtype,
    ) -> None:
        super().__init__()
        self.tp = tp
        self.positions = positions
        self.output = output
        self.add_weight("weight", layout, dtype)

    def words(self, batch: Batch, info: PassInfo) -> Tensor:
        """Return the rows of the table, [s/tp, b, h]."""
        ids = batch.tokens.t()
        return vocab_parallel_embedding(ids, self.weight, self.weight_grads.get("weight"), self.tp, info)

    def forward(self, hidden: Tensor | None, batch: Batch, info: PassInfo) -> Tensor:  # noqa: ARG002 (the signature of a segment)
        x = self.words(batch, info)
        if self.positions is not None:
            x = self.positions(x, batch, info)
        out: Tensor = self.output(x, info)
        return out


class LearnedPositions(ShardedModule):
    """Learned position embedding: adds a row of the table for each position id of the batch."""

    weight: Tensor

    def __init__(self, layout: ParamLayout, tp: TensorParallel, dtype: torch.dtype) -> None:
        super().__init__()
        self.tp = tp
        self.add_weight("weight", layout, dtype)

    def forward(self, x: Tensor, batch: Batch, info: PassInfo) -> Tensor:
        rows, first = x.shape[0], self.tp.first_row(x.shape[0])
        ids = batch.position_ids.t()[first : first + rows]
        return x + replicated_embedding(ids, self.weight, self.weight_grads.get("weight"), info)


class Scale(nn.Module):
    """Multiplication by a constant."""

    def __init__(self, factor: float) -> None:
        super().__init__()
        self.factor = factor

    def forward(self, x: Tensor, info: PassInfo) -> Tensor:  # noqa: ARG002 (the signature of a pointwise module)
        return x * self.factor


class CastToDtype(nn.Module):
    """Cast to the dtype of the residual stream."""

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        self.dtype = dtype

    def forward(self, x: Tensor, info: PassInfo) -> Tensor:  # noqa: ARG002
        return x.to(self.dtype)
