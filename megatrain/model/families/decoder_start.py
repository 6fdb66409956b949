"""The segment between an encoder and a decoder: final norm of the encoder, embedding of the decoder's tokens.

hidden [s_encoder/tp, b, h] ── norm ── memory ─┐
decoder's tokens [b, s] ────── embedding ──────┴─ concatenation ─> [(s + s_encoder)/tp, b, h]
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from megatrain.model.embedding import Embedding
from megatrain.parallel.batch import Batch, PassInfo
from megatrain.parallel.layout import ShardedModule


class DecoderStart(ShardedModule):
    """The segment.

    Args:
        norm: final norm of the encoder.
        embedding: embedding of this rank; both stacks use its tables.
        owns_embedding: it belongs to this segment; else to another one of this rank.
        output: pointwise modules applied to the embedded tokens.
        hidden_dtype: dtype of the residual stream.
    """

    def __init__(
        self,
        norm: nn.Module,
        embedding: Embedding,
        *,
        owns_embedding: bool,
        output: nn.Module,
        hidden_dtype: torch.dtype,
    ) -> None:
        super().__init__()
        self.norm, self.output, self.hidden_dtype = norm, output, hidden_dtype
        self.tied_to = embedding.tables
        if owns_embedding:
            self.embedding = embedding

    def forward(self, hidden: Tensor, batch: Batch, info: PassInfo) -> Tensor:
        memory = self.norm(hidden, info).to(self.hidden_dtype)
        return torch.cat((self.embedded(batch, info), memory))

    def embedded(self, batch: Batch, info: PassInfo) -> Tensor:
        """Return the embedding of the decoder's tokens, [s/tp, b, h]."""
        embedding = self.tied_to[0]
        assert isinstance(embedding, Embedding)
        x: Tensor = self.output(embedding.embed(batch, info), info)
        return x
