"""What stands at the ends of a branch of the residual stream: the norm before its part, and the norm or dropout behind it."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor, nn

from megatrain.model.implementations.leaves import Leaves, Pointwise
from megatrain.model.layouts import Weights, stream_layout
from megatrain.model.specs import GptSpec, NormPosition, NormSpec
from megatrain.parallel.batch import PassInfo
from megatrain.parallel.layout import Init
from megatrain.parallel.tensor import TensorParallel


class Chain(nn.Module):
    """Pointwise parts one after the other; none leave x as it is."""

    def __init__(self, parts: Sequence[Pointwise]) -> None:
        super().__init__()
        self.parts = nn.ModuleList([part for part in parts if isinstance(part, nn.Module)])
        assert len(self.parts) == len(parts)

    def forward(self, x: Tensor, info: PassInfo) -> Tensor:
        for part in self.parts:
            x = part(x, info)
        return x


def norm_weights(name: str, size: int, spec: NormSpec, tp: TensorParallel) -> Weights:
    """Of a norm of the residual stream or of what is added to it."""
    return Weights(
        stream_layout(f"{name}.weight", size, ones(spec), tp),
        stream_layout(f"{name}.bias", size, Init(), tp) if spec.kind == "LayerNorm" else None,
    )


def ones(spec: NormSpec) -> Init:
    return Init(mean=0.0 if spec.is_stored_minus_one else 1.0)


def first_norm(gpt: GptSpec, position: NormPosition, prefix: str, tp: TensorParallel) -> Weights | None:
    if position == "post":
        return None
    return norm_weights(f"{prefix}.norm", gpt.hidden_size, gpt.norm, tp)


def branch_end(
    gpt: GptSpec, position: NormPosition, prefix: str, leaves: Leaves, tp: TensorParallel
) -> Chain:
    parts: list[Pointwise] = []
    if position != "pre":
        parts.append(
            leaves.norm(norm_weights(f"{prefix}.post_norm", gpt.hidden_size, gpt.norm, tp), gpt.norm)
        )
    if gpt.hidden_dropout:
        parts.append(leaves.dropout(gpt.hidden_dropout, f"{prefix}.hidden"))
    return Chain(parts)
