"""Dense MLP: down(act(up x)), or gated: down(act(gate x) * up x)."""

from __future__ import annotations

from collections.abc import Iterator

from megatrain.config.model_spec.linear import Linear, Piece

WIDTH_FLAGS = "--ffn-hidden-size, --tensor-model-parallel-size and the width of the MLP"


def mlp_linears(
    hidden_size: int,
    width: int,
    *,
    is_gated: bool,
    part: str = "mlp",
    module: str = "mlp",
    names: str = "an MLP",
    flags: str = WIDTH_FLAGS,
    num_experts: int = 0,
    top_k: int = 1,
) -> Iterator[Linear]:
    """Yield the two GEMMs of an MLP, or of the routed experts of a layer, whose FP8 recipe is one."""
    kinds = ("gate", "up") if is_gated else ("up",)
    recipe = f"{part}.down" if num_experts else ""
    yield Linear(
        part=part, pieces=tuple(Piece(kind, width) for kind in kinds), inputs=hidden_size, split="outputs",
        reads="hidden states", writes=names, flags=flags, modules=(f"{module}.linear_fc1",),
        num_experts=num_experts, top_k=top_k, recipe=recipe,
    )  # fmt: skip
    yield Linear(
        part=part, pieces=(Piece("down", hidden_size),), inputs=width, split="inputs",
        reads=names, writes="hidden states", flags=flags, modules=(f"{module}.linear_fc2",),
        num_experts=num_experts, top_k=top_k, recipe=recipe,
    )  # fmt: skip
