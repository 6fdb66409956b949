"""State-space mixer of Mamba-2.

Source: Dao and Gu, Transformers are SSMs, arXiv:2405.21060; sizes and initial values are Megatron-LM's.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import ClassVar

from megatrain.config.model_spec.linear import Linear, Piece
from megatrain.config.model_spec.part import CacheSizes, Part, Role

_FLAGS = (
    "--mamba-num-heads, --mamba-head-dim, --mamba-num-groups, --mamba-state-dim, --tensor-model-parallel-size"
)


@dataclass(frozen=True, kw_only=True)
class MambaSpec(Part):
    """Mamba-2: a state [head channels, state channels] per head, which decays and takes in each token."""

    name: ClassVar[str] = "mamba"
    role: ClassVar[Role] = "mixer"

    num_heads: int
    head_dim: int
    num_groups: int
    """Groups of consecutive heads that share B and C."""
    state_dim: int
    kernel_size: int = 4
    has_norm: bool = True
    """The gated output of each group is normalized."""

    @property
    def inner_dim(self) -> int:
        """Channels of all heads."""
        return self.num_heads * self.head_dim

    @property
    def group_dim(self) -> int:
        """Channels of B, and of C, of all groups."""
        return self.num_groups * self.state_dim

    @property
    def exchanged_heads(self) -> tuple[int, int]:
        return self.num_groups, self.num_heads

    def other_weights(self, hidden_size: int) -> int:  # noqa: ARG002
        """Return the multiplications per token of the scan: seven operations per channel of the states, as Megatron-LM counts."""
        return 7 * self.inner_dim * self.state_dim // 2

    def cache_sizes(self, num_ranks: int) -> CacheSizes:
        """The inputs of the convolution, and the state of each head."""
        channels = (self.inner_dim + 2 * self.group_dim) // num_ranks
        state = (self.num_heads // num_ranks, self.head_dim, self.state_dim)
        return CacheSizes(states=((self.kernel_size - 1, channels), state))

    def linears(self, hidden_size: int) -> Iterator[Linear]:
        """Yield the GEMMs: one to gate z, input x, B, C and step size dt, and the output projection."""
        inner, group, heads = self.inner_dim, self.group_dim, self.num_heads

        def of_heads(name: str, size: int, what: str) -> Piece:
            return Piece(name, size, heads, what, unit="Mamba heads", path="model.mamba_num_heads")

        def of_groups(name: str, what: str) -> Piece:
            return Piece(
                name, group, self.num_groups, what, unit="Mamba groups", path="model.mamba_num_groups"
            )

        pieces = (
            of_heads("z", inner, "Mamba's gate"),
            of_heads("x", inner, "Mamba's input"),
            of_groups("b", "Mamba's B"),
            of_groups("c", "Mamba's C"),
            of_heads("dt", heads, "Mamba's step size"),
        )
        yield Linear(
            part=self.name, pieces=pieces, inputs=hidden_size, split="outputs", writes="Mamba's projection",
            flags=_FLAGS, modules=("mixer.in_proj",),
        )  # fmt: skip
        yield Linear(
            part=self.name, pieces=(Piece("proj", hidden_size),), inputs=inner, split="inputs", reads="Mamba",
            flags=_FLAGS, modules=("mixer.out_proj",),
        )  # fmt: skip
