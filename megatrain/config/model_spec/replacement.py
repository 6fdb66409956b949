"""A linear layer in place of attention or an MLP, as in models of NVIDIA's Puzzle (arXiv:2411.19146)."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import ClassVar

from megatrain.config.model_spec.linear import Linear, Piece
from megatrain.config.model_spec.part import Part, Role


@dataclass(frozen=True, kw_only=True)
class ReplacementSpec(Part):
    """One GEMM after the norm of the branch: each tensor rank holds it whole, and computes its rows."""

    role: ClassVar[Role] = "mlp"
    replaced: ClassVar[str]
    """Megatron-LM's name of the module in whose place it is."""

    has_bias: bool = False

    def linears(self, hidden_size: int) -> Iterator[Linear]:
        yield Linear(
            part=self.name, pieces=(Piece("linear", hidden_size),), inputs=hidden_size, split="none",
            flags="--hidden-size", modules=(self.replaced,),
        )  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class AttentionReplacementSpec(ReplacementSpec):
    """A linear layer in place of attention."""

    name: ClassVar[str] = "attention"
    replaced: ClassVar[str] = "self_attention"


@dataclass(frozen=True, kw_only=True)
class MlpReplacementSpec(ReplacementSpec):
    """A linear layer in place of an MLP."""

    name: ClassVar[str] = "mlp"
    replaced: ClassVar[str] = "mlp"
