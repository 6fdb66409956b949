"""Self-attention with grouped queries, or with latents (multi-latent attention): causal, or to all tokens of a sample."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import ClassVar, Literal

from megatrain.config.model_spec.latent_attention import LatentSizes
from megatrain.config.model_spec.linear import Linear, Piece
from megatrain.config.model_spec.part import CacheSizes, Part, Role
from megatrain.config.model_spec.relative_positions import RelativePositionSpec
from megatrain.config.model_spec.rotary import RotarySpec

_HEADS = "--num-attention-heads, --kv-channels, --num-query-groups, --tensor-model-parallel-size"


@dataclass(frozen=True, kw_only=True)
class AttentionSpec(Part):
    """Self-attention with grouped queries."""

    name: ClassVar[str] = "attention"
    role: ClassVar[Role] = "mixer"

    num_heads: int
    num_query_groups: int
    head_dim: int
    """Channels of a head of queries and keys."""
    latent: LatentSizes | None = None
    """Latents of queries, keys and values (multi-latent attention); None: one projection."""
    mask: Literal["causal", "padding"] = "causal"
    """Tokens that a query attends to: those up to its own, or all that are no padding."""
    rotary: RotarySpec | None = None
    """RoPE; None: none is applied."""
    relative: RelativePositionSpec | None = None
    """Relative position bias, a table that the layers of a stack share; None: none is added."""
    window: int | None = None
    """Number of earlier tokens that a query attends to; None: all."""
    scale: float | None = None
    """Factor of the scores; None: 1 / sqrt(head channels)."""
    softcap: float | None = None
    """Limit of the scores: cap * tanh(score / cap); None: no limit."""
    sink: Literal["none", "zero", "learned"] = "none"
    """Sink logit of each head, in the softmax denominator: 0 or learned."""
    dropout: float = 0.0
    """Probability that training drops an attention probability."""
    qk_norm: Literal["none", "head", "l2", "all_heads", "latent"] = "none"
    """Norm of queries and keys, over the channels of a head, without weights (l2), or of all heads; or of the latents."""
    qk_norm_decays: bool = False
    """Weight decay applies to these norms."""
    has_output_gate: bool = False
    """The output of each head is multiplied by the sigmoid of a projection of the layer's input."""
    has_qkv_bias: bool = False
    has_bias: bool = False
    """The output projection has a bias."""

    @property
    def v_head_dim(self) -> int:
        """Channels of a head of values."""
        return self.head_dim if self.latent is None else self.latent.v_head_dim

    @property
    def rope_dim(self) -> int:
        """Channels of a head that RoPE receives; it may leave some unchanged."""
        return self.head_dim if self.latent is None else self.latent.qk_rope_head_dim

    def other_weights(self, hidden_size: int) -> int:  # noqa: ARG002
        return 0 if self.latent is None else self.latent.norm_weights

    @property
    def pair_channels(self) -> int:
        """With a causal mask the half of all pairs; see `Part`."""
        return self.num_heads * (self.head_dim + self.v_head_dim) * (1 if self.mask == "causal" else 2)

    def cache_sizes(self, num_ranks: int) -> CacheSizes | None:
        """With latents, one row for all heads: the latent and the rotary channels of keys. An encoder keeps nothing."""
        if self.mask == "padding":
            return CacheSizes()
        if self.latent is not None:
            return CacheSizes(
                window=self.window, rows=((1, self.latent.kv_rank + self.latent.qk_rope_head_dim),)
            )
        groups = max(1, self.num_query_groups // num_ranks)
        return CacheSizes(window=self.window, rows=((groups, self.head_dim), (groups, self.v_head_dim)))

    def linears(self, hidden_size: int) -> Iterator[Linear]:
        """Yield the GEMMs: one projection to queries, keys and values, or those of latents, and the output projection."""
        if self.latent is not None:
            yield from self.latent.linears(hidden_size, self.num_heads)
            return
        heads, groups, d = self.num_heads, self.num_query_groups, self.head_dim
        gate = (_of_heads("gate", heads, d, "the output gate"),) if self.has_output_gate else ()
        pieces = (
            _of_heads("q", heads, d, "queries"),
            *(self._of_groups(name, groups, d, what) for name, what in (("k", "keys"), ("v", "values"))),
            *gate,
        )
        yield Linear(
            part="attention", pieces=pieces, inputs=hidden_size, split="outputs", reads="hidden states",
            writes="queries, keys and values", flags=_HEADS, modules=("self_attention.linear_qkv",),
        )  # fmt: skip
        yield Linear(
            part="attention", pieces=(Piece("proj", hidden_size),), inputs=heads * d, split="inputs", reads="the heads",
            writes="hidden states", flags=_HEADS, modules=("self_attention.linear_proj",),
        )  # fmt: skip

    def _of_groups(self, name: str, groups: int, head_dim: int, what: str) -> Piece:
        if groups == self.num_heads:
            return _of_heads(name, groups, head_dim, what)
        return Piece(
            name, groups * head_dim, groups, what, is_copied=True, unit="query groups", path="model.num_query_groups"
        )  # fmt: skip


def _of_heads(name: str, heads: int, head_dim: int, what: str) -> Piece:
    return Piece(name, heads * head_dim, heads, what, path="model.num_attention_heads")
