"""Layers of a user: a gated short convolution in place of attention, and an MLP whose use each token decides.

short convolution       (b, c, x) = norm(hidden) W;  y = c * conv(b * x)          LFM2, Liquid AI, 2025
mixture of depths       y = gate * mlp(hidden) for gate = sigmoid(hidden w) > 1/2, else 0      after arXiv:2404.02258
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from megatrain.config import ModelConfig
from megatrain.config.model_spec.layer import LayerSpec
from megatrain.config.model_spec.linear import Linear, Piece
from megatrain.config.model_spec.mlp import MlpSpec
from megatrain.config.model_spec.part import Part, Role
from megatrain.kernels.gated_delta import causal_convolution
from megatrain.model.functions import weight_of
from megatrain.model.layer import Mlp, branch_output
from megatrain.model.layer_context import LayerContext
from megatrain.model.layouts import Columns, convolution_layout, router_layout
from megatrain.parallel.batch import PassInfo
from megatrain.parallel.layout import Init, LaidOutModule


class ShortConvolutionModule(LaidOutModule):
    kernel: Tensor

    def __init__(self, spec: ShortConvolution, context: LayerContext) -> None:
        super().__init__()
        linears, h = context.linears(spec), context.model.hidden_size
        self.gates = context.column_linear(linears["b"], context.branch_norm(spec))
        filters = [Columns(f"{context.name(spec)}.kernel", h)]  # tensor ranks split the channels
        self.add_weight(
            "kernel", convolution_layout(filters, spec.kernel_size, context.tp), context.ranks.dtype
        )
        self.proj = context.row_linear(linears["proj"])
        self.output = branch_output(spec, context)

    def forward(self, residual: Tensor, delta: Tensor | None, info: PassInfo) -> tuple[Tensor, Tensor]:
        residual, gates = self.gates(residual, delta, info)
        b, c, x = gates.chunk(3, dim=-1)  # [s, b, h / tp]
        y = c * causal_convolution(b * x, weight_of(self, "kernel"))
        return residual, self.output(self.proj(y, info), info)


@dataclass(frozen=True)
class ShortConvolution(Part):
    """Its sizes, and what computes it."""

    name: ClassVar[str] = "short_convolution"
    role: ClassVar[Role] = "mixer"
    module: ClassVar[type[nn.Module]] = ShortConvolutionModule
    needs_whole_samples: ClassVar[bool] = True

    kernel_size: int = 3

    def linears(self, hidden_size: int) -> Iterator[Linear]:
        pieces = tuple(Piece(name, hidden_size) for name in "bcx")
        yield Linear(part=self.name, pieces=pieces, inputs=hidden_size, split="outputs", writes="gates")
        yield Linear(
            part=self.name,
            pieces=(Piece("proj", hidden_size),),
            inputs=hidden_size,
            split="inputs",
            reads="gates",
        )

    def other_weights(self, hidden_size: int) -> int:
        return self.kernel_size * hidden_size


class DepthModule(LaidOutModule):
    router: Tensor

    def __init__(self, spec: MixtureOfDepths, context: LayerContext) -> None:
        super().__init__()
        self.mlp = Mlp(spec.mlp, context)
        h, std = context.model.hidden_size, Init(std=context.model.init_std)
        layout = router_layout(f"{context.name(spec)}.depth_router", 1, h, std, context.tp)
        self.add_weight("router", layout, context.ranks.dtype)

    def forward(self, residual: Tensor, delta: Tensor | None, info: PassInfo) -> tuple[Tensor, Tensor]:
        residual, output = self.mlp(residual, delta, info)
        gate = F.linear(residual, weight_of(self, "router")).sigmoid()  # [s / tp, b, 1]
        return residual, torch.where(gate > 0.5, gate, 0) * output


@dataclass(frozen=True)
class MixtureOfDepths(Part):
    """An MLP that some tokens use."""

    name: ClassVar[str] = "mlp"
    role: ClassVar[Role] = "mlp"
    module: ClassVar[type[nn.Module]] = DepthModule

    mlp: MlpSpec

    def linears(self, hidden_size: int) -> Iterator[Linear]:
        yield from self.mlp.linears(hidden_size)

    def other_weights(self, hidden_size: int) -> int:
        return hidden_size


def with_convolutions(model: ModelConfig, layers: tuple[LayerSpec, ...]) -> list[LayerSpec]:
    """Every second layer has a short convolution in place of attention."""
    return [layer.with_part(ShortConvolution()) if n % 2 else layer for n, layer in enumerate(layers)]


def with_depths(model: ModelConfig, layers: tuple[LayerSpec, ...]) -> list[LayerSpec]:
    """Tokens decide whether they use the MLP of every second layer."""
    return [
        layer.with_part(MixtureOfDepths(layer.dense)) if n % 2 and layer.dense else layer
        for n, layer in enumerate(layers)
    ]
