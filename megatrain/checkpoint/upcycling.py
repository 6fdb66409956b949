"""Upcycling: initial weights of a model with experts from a dense model's checkpoint.

    experts.e.up [f, h]      <─ part e % g of up [g f, h], times the scale        down is cut along its columns
    router [E, h]            <─ g times each of its first E / g initial rows, so that all parts of a copy get the same logit
    shared expert, its gate  <─ initial values
    all else                 <─ the same tensor

With a granularity g of 1 every expert is a copy of the MLP. The scale makes up for the probabilities of a copy's parts.

Source: He et al., arXiv:2410.07524 (virtual groups, scaling); granularity and scales are Megatron-LM's.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, replace

from torch import Tensor

from megatrain.checkpoint.reader import TensorReader
from megatrain.config.schema.experts import ExpertsConfig
from megatrain.optim.sharded import TensorSource
from megatrain.parallel.initialize import InitialWeights
from megatrain.parallel.layout import Box, BoxRange, ParamLayout, Piece

_OF_EXPERT = re.compile(r"(.*\.mlp)\.experts\.(\d+)\.((?:gate|up|down)\.(?:weight|bias))")
_WITHOUT_ORIGIN = re.compile(r".*\.mlp\.(router|shared|shared_gate)\..*")


@dataclass(frozen=True)
class Upcycling:
    """Relation of the tensors of a model with experts to the tensors of a dense model."""

    granularity: int
    """Experts that a copy of the MLP is cut into."""
    scale: float
    """Factor of the experts' weights, and of the bias of their first layer."""
    seed: int
    """Seed of initial values."""

    def origin(self, piece: Piece, box: Box) -> BoxRange | None:
        """Return the dense model's box with these values, or None if they are initial ones."""
        if _WITHOUT_ORIGIN.fullmatch(piece.name):
            return None
        match = _OF_EXPERT.fullmatch(piece.name)
        if match is None:
            return BoxRange(piece, box, 0)
        prefix, expert, tensor = match.groups()
        shape = list(piece.shape)
        edges = list(box)
        if tensor != "down.bias":
            dim = 1 if tensor == "down.weight" else 0
            first = int(expert) % self.granularity * shape[dim]
            start, stop = edges[dim]
            edges[dim] = (first + start, first + stop)
            shape[dim] *= self.granularity
        return BoxRange(replace(piece, name=f"{prefix}.{tensor}", shape=tuple(shape)), tuple(edges), 0)

    def factor(self, name: str) -> float:
        """Return the factor of a tensor's values."""
        match = _OF_EXPERT.fullmatch(name)
        return 1.0 if match is None or match[3] == "down.bias" else self.scale

    def stored(self, piece: Piece) -> Piece | None:
        """Return the whole dense tensor with the values of a piece, or None."""
        found = self.origin(piece, tuple((0, size) for size in piece.shape))
        return None if found is None else found.piece


@dataclass(frozen=True)
class UpcycledSource:
    """A TensorSource: the weights of a model with experts."""

    dense: TensorSource
    """The weights of the dense model."""
    reader: TensorReader
    """The reader of its checkpoint."""
    upcycling: Upcycling

    def fill(self, out: Tensor, layout: ParamLayout, box: BoxRange) -> None:
        origin, initial = self.upcycling.origin(box.piece, box.box), InitialWeights(self.upcycling.seed)
        if origin is not None:
            self.dense.fill(out, layout, origin)
            self.reader.finish()
            out.mul_(self.upcycling.factor(box.piece.name))
        elif ".mlp.router." in box.piece.name:
            first, stop = box.box[0]
            for number, row in enumerate(range(first, stop)):
                copy = row // self.upcycling.granularity
                initial.fill(
                    out[number : number + 1], layout, BoxRange(box.piece, ((copy, copy + 1), *box.box[1:]), 0)
                )
        else:
            initial.fill(out, layout, box)


def upcycling_of(experts: ExpertsConfig, *, has_cubic_mlp: bool, seed: int) -> Upcycling:
    """Return the upcycling of a resolved configuration.

    Args:
        has_cubic_mlp: the MLP is a product of three factors of its input: gated, or with a squared activation.
    """
    granularity, num_experts = experts.moe_upcycling_granularity, experts.num_experts
    assert num_experts is not None, "a rule requires it"
    is_over_all = experts.moe_router_pre_softmax and experts.moe_router_score_function == "softmax"
    share = num_experts * granularity / experts.moe_router_topk if is_over_all else granularity
    return Upcycling(granularity, float(share) ** (1 / 3 if has_cubic_mlp else 1 / 2), seed)
