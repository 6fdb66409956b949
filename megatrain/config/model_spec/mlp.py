"""Dense MLP: down(act(up x)), or gated: down(act(gate x) * up x); a linear layer in place of it or of attention (NVIDIA's Puzzle, arXiv:2411.19146)."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import ClassVar

from megatrain.config.model_spec.activation import GATED, Activation, ActivationFunction
from megatrain.config.model_spec.linear import Linear, Piece
from megatrain.config.model_spec.part import Part, Role

WIDTH_FLAGS = "--ffn-hidden-size, --tensor-model-parallel-size and the width of the MLP"


@dataclass(frozen=True, kw_only=True)
class MlpSpec(Part):
    """MLP: down(act(up x)), or gated: down(act(gate x) * (up x + offset))."""

    name: ClassVar[str] = "mlp"
    role: ClassVar[Role] = "mlp"

    ffn_hidden_size: int
    activation: Activation = "swiglu"
    """Activation of the MLP: gate and function."""
    activation_fn: ActivationFunction | None = None
    """Custom activation function that replaces the one of `activation`."""
    clamp: float | None = None
    """Upper limit of gate, and limit of the absolute value of up; None: no limit."""
    offset: float = 0.0
    """Added to up."""
    has_bias: bool = False

    @property
    def is_gated(self) -> bool:
        return self.activation in GATED

    def linears(self, hidden_size: int) -> Iterator[Linear]:
        yield from mlp_linears(hidden_size, self.ffn_hidden_size, is_gated=self.is_gated)


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


def mlp_linears(
    hidden_size: int,
    width: int,
    *,
    is_gated: bool,
    part: str = "mlp",
    module: str = "mlp",
    names: str = "an MLP",
    flags: str = WIDTH_FLAGS,
    path: str = "model.ffn_hidden_size",
    num_experts: int = 0,
    top_k: int = 1,
) -> Iterator[Linear]:
    """Yield the two GEMMs of an MLP, or of the routed experts of a layer, whose FP8 recipe is one."""
    kinds = ("gate", "up") if is_gated else ("up",)
    recipe = f"{part}.down" if num_experts else ""
    yield Linear(
        part=part, pieces=tuple(Piece(kind, width, path=path) for kind in kinds), inputs=hidden_size, split="outputs",
        reads="hidden states", writes=names, flags=flags, modules=(f"{module}.linear_fc1",),
        num_experts=num_experts, top_k=top_k, recipe=recipe,
    )  # fmt: skip
    yield Linear(
        part=part, pieces=(Piece("down", hidden_size),), inputs=width, split="inputs",
        reads=names, writes="hidden states", flags=flags, modules=(f"{module}.linear_fc2",),
        num_experts=num_experts, top_k=top_k, recipe=recipe,
    )  # fmt: skip
