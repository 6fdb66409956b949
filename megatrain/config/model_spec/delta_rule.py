"""Linear attention by the gated delta rule.

Source: Gated Delta Networks, arXiv:2412.06464.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from megatrain.config.model_spec.linear import Linear, Piece


@dataclass(frozen=True, kw_only=True)
class LinearSizes:
    """Sizes of linear attention."""

    num_key_heads: int
    num_value_heads: int
    key_head_channels: int
    value_head_channels: int
    convolution_taps: int

    @property
    def key_channels(self) -> int:
        """Channels of all heads of keys, and of queries."""
        return self.num_key_heads * self.key_head_channels

    @property
    def value_channels(self) -> int:
        """Channels of all heads of values."""
        return self.num_value_heads * self.value_head_channels

    @property
    def state_weights(self) -> int:
        """Multiplications per token of the convolution, and of four products with the state of each head."""
        k, v = self.key_channels, self.value_channels
        return self.convolution_taps * (2 * k + v) + 4 * v * self.value_head_channels

    def linears(self, hidden_size: int) -> Iterator[Linear]:
        """Yield the GEMMs: one to queries, keys, values, gate, beta and alpha, and the output projection."""
        k, v, keys, heads = self.key_channels, self.value_channels, self.num_key_heads, self.num_value_heads
        yield Linear(
            part="linear_attention",
            pieces=(
                Piece("q", k, keys, "linear attention's queries"), Piece("k", k, keys, "linear attention's keys"), Piece("v", v, heads, "linear attention's values"), Piece("gate", v, heads, "linear attention's gate"),
                Piece("beta", heads, heads, "beta"), Piece("alpha", heads, heads, "alpha"),
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
