"""Attention of a decoder's tokens to the output of another stack, its memory."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import ClassVar

from megatrain.config.model_spec.linear import Linear, Piece
from megatrain.config.model_spec.part import CacheSizes, Part, Role

_HEADS = "--num-attention-heads, --kv-channels, --tensor-model-parallel-size"


@dataclass(frozen=True, kw_only=True)
class CrossAttentionSpec(Part):
    """Queries of the residual stream, keys and values of the memory. Padding of the memory is masked."""

    name: ClassVar[str] = "cross_attention"
    role: ClassVar[Role] = "mixer"

    num_heads: int
    head_dim: int
    scale: float | None = None
    """Factor of the scores; None: 1 / sqrt(head channels)."""
    dropout: float = 0.0
    has_qkv_bias: bool = False
    has_bias: bool = False
    """The output projection has a bias."""

    @property
    def pair_channels(self) -> int:
        """Both products of all pairs; `AttentionSpec` counts the causal half."""
        return 4 * self.num_heads * self.head_dim

    def cache_sizes(self, num_ranks: int) -> CacheSizes:
        """Keys and values of the memory, which are computed once."""
        row = (self.num_heads // num_ranks, self.head_dim)
        return CacheSizes(is_of_memory=True, rows=(row, row))

    def linears(self, hidden_size: int) -> Iterator[Linear]:
        """Yield the GEMMs: queries, keys and values of the memory, and the output projection."""
        size, heads = self.num_heads * self.head_dim, self.num_heads

        def piece(name: str, what: str) -> Piece:
            return Piece(name, size, heads, what, path="model.num_attention_heads")

        yield Linear(
            part=self.name, pieces=(piece("q", "queries"),), inputs=hidden_size, split="outputs",
            writes="queries of cross-attention", flags=_HEADS, modules=("cross_attention.linear_q",),
        )  # fmt: skip
        yield Linear(
            part=self.name, pieces=(piece("k", "keys"), piece("v", "values")), inputs=hidden_size, split="outputs",
            reads="the memory", writes="keys and values of cross-attention", flags=_HEADS,
            modules=("cross_attention.linear_kv",),
        )  # fmt: skip
        yield Linear(
            part=self.name, pieces=(Piece("proj", hidden_size),), inputs=size, split="inputs", reads="the heads",
            flags=_HEADS, modules=("cross_attention.linear_proj",),
        )  # fmt: skip
