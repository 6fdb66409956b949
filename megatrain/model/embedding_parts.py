"""Modules that are added to the token embedding: tables of positions and types, a scale, the dtype of the residual stream."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from megatrain.parallel.batch import Batch, EncoderTokens, PassInfo
from megatrain.parallel.layout import ParamLayout, ShardedModule
from megatrain.parallel.tensor_parallel import TensorParallel, replicated_embedding


class _Table(ShardedModule):
    """A table that every rank holds; a row is added for each token."""

    weight: Tensor

    def __init__(self, layout: ParamLayout, tp: TensorParallel, dtype: torch.dtype) -> None:
        super().__init__()
        self.tp = tp
        self.add_weight("weight", layout, dtype)

    def ids(self, batch: Batch | EncoderTokens) -> Tensor:
        """Return the row of each token, [b, s]."""
        raise NotImplementedError

    def forward(self, x: Tensor, batch: Batch | EncoderTokens, info: PassInfo) -> Tensor:
        rows, first = x.shape[0], self.tp.first_row(x.shape[0])
        ids = self.ids(batch).t()[first : first + rows]
        return x + replicated_embedding(ids, self.weight, self.weight_grads.get("weight"), info)


class LearnedPositions(_Table):
    """Learned position embedding: adds a row of the table for each position id of the batch."""

    def ids(self, batch: Batch | EncoderTokens) -> Tensor:
        return batch.position_ids


class TokenTypes(_Table):
    """Embedding of token types (BERT): adds a row for each token's type."""

    def ids(self, batch: Batch | EncoderTokens) -> Tensor:
        assert isinstance(batch, Batch)
        assert batch.types is not None, "the batch of a model with token types"
        return batch.types


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
