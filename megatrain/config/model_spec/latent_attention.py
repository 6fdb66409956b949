"""Multi-latent attention (MLA): queries, keys and values are projected down to latents, and up to heads.

Source: DeepSeek-V2, arXiv:2405.04434, section 2.1.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from megatrain.config.model_spec.linear import Linear, Piece

_FLAGS = "--q-lora-rank, --kv-lora-rank, --num-attention-heads, --qk-head-dim, --qk-pos-emb-head-dim, --v-head-dim, --tensor-model-parallel-size"


@dataclass(frozen=True, kw_only=True)
class LatentSizes:
    """Sizes of multi-latent attention (MLA). Channels are those of a head."""

    query_rank: int | None
    """Channels of the latent of queries; None: queries are projected from the hidden states."""
    kv_rank: int
    """Channels of the latent of keys and values."""
    qk_nope_head_dim: int
    """Channels of queries and keys without RoPE."""
    qk_rope_head_dim: int
    """Channels of queries and keys with RoPE; all heads of keys share them."""
    v_head_dim: int
    norm_epsilon: float | None = None
    """Epsilon of the norms of latents; None: that of the model's norms."""

    @property
    def head_dim(self) -> int:
        """Channels of a head of queries and keys."""
        return self.qk_nope_head_dim + self.qk_rope_head_dim

    @property
    def norm_weights(self) -> int:
        """Weights of the norms of the latents, which Megatron-LM counts with the matrices."""
        return (self.query_rank or 0) + self.kv_rank

    def linears(self, hidden_size: int, num_heads: int) -> Iterator[Linear]:
        """Yield the GEMMs: both down projections are one if queries have a latent, with a copy on each tensor rank."""
        q, keys = self.query_rank, Piece("kv_down", self.kv_rank + self.qk_rope_head_dim)
        queries = num_heads * self.head_dim
        up = num_heads * (self.qk_nope_head_dim + self.v_head_dim)
        q_down, kv_down = "self_attention.linear_q_down_proj", "self_attention.linear_kv_down_proj"
        if q is None:
            yield Linear(
                part="attention", pieces=(_heads("q", queries, num_heads),), inputs=hidden_size, split="outputs",
                reads="hidden states", writes="queries", flags=_FLAGS, modules=("self_attention.linear_q_proj",),
            )  # fmt: skip
            yield Linear(
                part="attention", pieces=(keys,), inputs=hidden_size, split="none",
                reads="hidden states", writes="latents", flags=_FLAGS, modules=(kv_down,),
            )  # fmt: skip
        else:
            yield Linear(
                part="attention", pieces=(Piece("q_down", q), keys), inputs=hidden_size, split="none",
                reads="hidden states", writes="latents", flags=_FLAGS, modules=(q_down, kv_down),
            )  # fmt: skip
            yield Linear(
                part="attention", pieces=(_heads("q_up", queries, num_heads),), inputs=q, split="outputs",
                reads="the latent of queries", writes="queries", flags=_FLAGS, modules=("self_attention.linear_q_up_proj",),
            )  # fmt: skip
        yield Linear(
            part="attention", pieces=(_heads("kv_up", up, num_heads),), inputs=self.kv_rank, split="outputs",
            reads="the latent of keys and values", writes="keys and values", flags=_FLAGS,
            modules=("self_attention.linear_kv_up_proj",),
        )  # fmt: skip
        yield Linear(
            part="attention", pieces=(Piece("proj", hidden_size),), inputs=num_heads * self.v_head_dim,
            split="inputs", reads="the heads", writes="hidden states", flags=_FLAGS, modules=("self_attention.linear_proj",),
        )  # fmt: skip


def _heads(name: str, size: int, num_heads: int) -> Piece:
    return Piece(name, size, num_heads, path="model.num_attention_heads")
