"""The first segment of the model: token embedding, learned positions, token types, scale, dtype of the residual stream, dropout.

token ids [b, s] ─ word embedding ─ + ─ output modules ─> hidden [s/tp, b, h]
position ids     ─ learned positions ┤
token types      ─ type embedding ───┘
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from megatrain.parallel.batch import Batch, EncoderTokens, PassInfo
from megatrain.parallel.layout import ParamLayout, ShardedModule
from megatrain.parallel.tensor_parallel import TensorParallel, replicated_embedding, vocab_parallel_embedding


class Embedding(ShardedModule):
    """The embedding segment: token ids [b, s] -> hidden states [s/tp, b, h].

    Args:
        layout: layout of the word embedding table.
        positions: learned position embedding; None: positions enter the model elsewhere.
        types: embedding of token types; None: the model has none.
        output: pointwise modules applied to the sum.
    """

    weight: Tensor

    def __init__(
        self,
        layout: ParamLayout,
        positions: LearnedPositions | None,
        types: TokenTypes | None,
        output: nn.Module,
        tp: TensorParallel,
        dtype: torch.dtype,
    ) -> None:
        super().__init__()
        self.tp = tp
        self.positions, self.types = positions, types
        self.output = output
        self.add_weight("weight", layout, dtype)

    @property
    def tables(self) -> tuple[ShardedModule, ...]:
        """This module and those of its other tables."""
        return (self, *(table for table in (self.positions, self.types) if table is not None))

    def words(self, batch: Batch | EncoderTokens, info: PassInfo) -> Tensor:
        """Return the rows of the table, [s/tp, b, h]."""
        ids = batch.tokens.t()
        return vocab_parallel_embedding(ids, self.weight, self.weight_grads.get("weight"), self.tp, info)

    def embed(self, batch: Batch | EncoderTokens, info: PassInfo) -> Tensor:
        """Return the sum of the rows of all tables, [s/tp, b, h]."""
        x = self.words(batch, info)
        for table in (self.positions, self.types):
            if table is not None:
                x = table(x, batch, info)
        return x

    def forward(self, hidden: Tensor | None, batch: Batch, info: PassInfo) -> Tensor:  # noqa: ARG002 (the signature of a segment)
        out: Tensor = self.output(self.embed(batch.encoder or batch, info), info)
        return out


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
