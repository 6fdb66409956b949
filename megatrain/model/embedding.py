"""The first segment of the model: token embedding, learned positions, token types, scale, dtype of the residual stream, dropout.

token ids [b, s] ─ word embedding ─ + ─ output modules ─> hidden [s/tp, b, h]
position ids     ─ learned positions ┤
token types      ─ type embedding ───┘
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from megatrain.model.embedding_parts import LearnedPositions, TokenTypes
from megatrain.parallel.batch import Batch, EncoderTokens, PassInfo
from megatrain.parallel.layout import ParamLayout, ShardedModule
from megatrain.parallel.tensor_parallel import TensorParallel, vocab_parallel_embedding


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
