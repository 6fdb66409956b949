"""Core attention with padding masks and relative position bias: an encoder's, and cross-attention to its output.

    encoder            keys of its tokens                             relative bias of both directions
    decoder            keys up to the query (with relative bias)      relative bias of one direction
    cross-attention    keys of the encoder's tokens                   none

A query of padding attends to tokens too, or, without the Triton kernel and a bias, to all keys alike, as in Megatron-LM's local
layers. It reaches the loss of BERT alone, where chance replaces a masked word by [PAD].
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from megatrain.config.model_spec.attention import AttentionSpec
from megatrain.config.model_spec.cross_attention import CrossAttentionSpec
from megatrain.kernels.attention.dropout import Dropout
from megatrain.kernels.attention.interface import MaskSpec
from megatrain.kernels.attention.masked import (
    eager_masked_attention,
    fused_masked_attention,
    masked_attention,
)
from megatrain.kernels.random import stream_key
from megatrain.kernels.sums import ColumnSums
from megatrain.model.families.relative_positions import RelativePositions
from megatrain.model.layer_context import LayerContext
from megatrain.parallel.batch import PassInfo
from megatrain.parallel.layout import ShardedModule


class MaskedAttention(ShardedModule):
    """Attention of this rank's heads: q [sq, b, n/tp, d], k and v [sk, b, g/tp, d] -> [sq, b, n/tp * d]."""

    def __init__(self, spec: AttentionSpec | CrossAttentionSpec, context: LayerContext) -> None:
        super().__init__()
        self.tp, self.cp = context.tp, context.ranks.split.cp
        self.num_heads, self.p = spec.num_heads, spec.dropout
        self.scale = 1 / math.sqrt(spec.head_dim) if spec.scale is None else spec.scale
        self.dropout_key = stream_key(context.ranks.seed, f"{context.name(spec)}.dropout")
        self.kernel = context.builder.attention
        self.is_causal = isinstance(spec, AttentionSpec) and spec.mask == "causal"
        self.reads_itself = isinstance(spec, AttentionSpec)
        self.dx_sums: tuple[ColumnSums, ...] = ()
        """Sums of the gradients of q, k and v, see `fused_masked_attention`."""
        self.has_bias = isinstance(spec, AttentionSpec) and spec.relative is not None
        if isinstance(spec, AttentionSpec) and spec.relative is not None:
            self.tied_to = (context.relative_positions,)

    def forward(self, q: Tensor, k: Tensor, v: Tensor, info: PassInfo) -> Tensor:
        is_token, dropout = None if self.is_causal else info.is_token, self.dropout(q, k, info)
        if self.kernel == "triton":
            spec = MaskSpec(is_causal=self.is_causal, is_token=is_token, dropout=dropout)
            by_distance = self.positions.bias_of_distances(q.shape[0], k.shape[0]) if self.has_bias else None
            out = fused_masked_attention(q, k, v, spec, bias=by_distance, scale=self.scale, sums=self.dx_sums)
            return out.flatten(2)
        mask = None if is_token is None else is_token[:, None, None]
        if is_token is not None and self.reads_itself and not self.has_bias:
            q, mask = self._without_padding(q, is_token)
        if self.is_causal:
            mask = torch.ones(1, 1, q.shape[0], q.shape[0], dtype=torch.bool, device=q.device).tril()
        bias = self.positions.bias(q.shape[0], k.shape[0]) if self.has_bias else None
        if dropout is not None or self.kernel == "math":
            kept = (
                None if dropout is None else dropout.mask(q.shape[1], q.shape[2], q.device) * dropout.factor
            )
            out = eager_masked_attention(q, k, v, mask=mask, bias=bias, scale=self.scale, kept=kept)
        else:
            out = masked_attention(q, k, v, mask=mask, bias=bias, scale=self.scale)
        return out.flatten(2)

    def _without_padding(self, q: Tensor, is_token: Tensor) -> tuple[Tensor, Tensor]:
        """Return queries that are 0 where they are padding, and a mask by which these attend to all keys."""
        is_query = is_token[:, self.cp.positions(q.shape[0], q.device)]
        return q * is_query.mT[..., None, None], is_token[:, None, None] | ~is_query[:, None, :, None]

    @property
    def positions(self) -> RelativePositions:
        """The relative position bias of the stack."""
        (relative_positions,) = self.tied_to
        assert isinstance(relative_positions, RelativePositions)
        return relative_positions

    def dropout(self, q: Tensor, k: Tensor, info: PassInfo) -> Dropout | None:
        """Return the dropout rule of this rank's heads; None: no dropout."""
        if not self.p or not info.is_training:
            return None
        return Dropout(
            p=self.p,
            key=self.dropout_key,
            num_heads=self.num_heads,
            first_sample=info.first_sample,
            first_head=self.tp.rank * q.shape[2],
            queries=self.cp.position_ranges(q.shape[0]),
            keys=(range(k.shape[0]),),
        )
