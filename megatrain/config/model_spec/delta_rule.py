"""Linear attention by the gated delta rule.

Source: Gated Delta Networks, arXiv:2412.06464.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import ClassVar

from megatrain.config.model_spec.activation import Activation
from megatrain.config.model_spec.linear import Linear, Piece
from megatrain.config.model_spec.part import CacheSizes, Part, Role

_HEADS = "linear attention heads"
_KEYS = "model.linear_num_key_heads"


@dataclass(frozen=True, kw_only=True)
class LinearAttentionSpec(Part):
    """Linear attention by the gated delta rule, in place of attention."""

    name: ClassVar[str] = "linear_attention"
    role: ClassVar[Role] = "mixer"

    num_key_heads: int
    num_value_heads: int
    key_head_dim: int
    value_head_dim: int
    kernel_size: int
    has_channel_gates: bool = False
    """Each channel has its decay, and gates of what is erased and written: the second variant."""
    activation: Activation = "swiglu"
    """Its function is that of the convolved queries, keys and values, and of the gate."""

    @property
    def key_dim(self) -> int:
        """Channels of all heads of keys, and of queries."""
        return self.num_key_heads * self.key_head_dim

    @property
    def value_dim(self) -> int:
        """Channels of all heads of values."""
        return self.num_value_heads * self.value_head_dim

    @property
    def exchanged_heads(self) -> tuple[int, int]:
        return self.num_key_heads, self.num_value_heads

    def other_weights(self, hidden_size: int) -> int:  # noqa: ARG002
        """Return the multiplications per token of the convolution, and of four products with the state of each head."""
        k, v = self.key_dim, self.value_dim
        return self.kernel_size * (2 * k + v) + 4 * v * self.value_head_dim

    def cache_sizes(self, num_ranks: int) -> CacheSizes:
        """The inputs of the convolution, and the state of each head."""
        channels = (2 * self.key_dim + self.value_dim) // num_ranks
        state = (self.num_value_heads // num_ranks, self.key_head_dim, self.value_head_dim)
        return CacheSizes(states=((self.kernel_size - 1, channels), state))

    def linears(self, hidden_size: int) -> Iterator[Linear]:
        """Yield the GEMMs; consecutive heads of values share one of keys, with which they are split: one to queries, keys, values, gate and what decays, erases and writes, and the output projection."""
        k, v, keys, heads = self.key_dim, self.value_dim, self.num_key_heads, self.num_value_heads
        strengths: tuple[tuple[str, int], ...] = (("beta", heads), ("alpha", heads))
        if self.has_channel_gates:
            strengths = (("decay", k), ("erase", k), ("write", v))
        yield Linear(
            part="linear_attention",
            pieces=(
                Piece("q", k, keys, "linear attention's queries", unit=_HEADS, path=_KEYS),
                Piece("k", k, keys, "linear attention's keys", unit=_HEADS, path=_KEYS),
                Piece("v", v, keys, "linear attention's values", unit=_HEADS, path=_KEYS),
                Piece("gate", v, keys, "linear attention's gate", unit=_HEADS, path=_KEYS),
                *(Piece(name, size, keys, name, unit=_HEADS, path=_KEYS) for name, size in strengths),
            ),
            inputs=hidden_size, split="outputs", reads="hidden states", writes="linear attention's projection",
            flags="--linear-num-key-heads, --linear-num-value-heads, --linear-key-head-dim, --linear-value-head-dim",
            modules=("self_attention.in_proj",),
        )  # fmt: skip
        yield Linear(
            part="linear_attention", pieces=(Piece("proj", hidden_size),), inputs=v, split="inputs",
            reads="linear attention", writes="hidden states", flags="--linear-num-value-heads, --linear-value-head-dim",
            modules=("self_attention.out_proj",),
        )  # fmt: skip
