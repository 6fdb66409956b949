"""A layer of a user: an MLP whose use each token decides, like a mixture of depths (arXiv:2404.02258).

y = gate * mlp(hidden) for gate = sigmoid(hidden w) > 1/2, else 0
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
from megatrain.config.model_spec.linear import Linear
from megatrain.config.model_spec.mlp import MlpSpec
from megatrain.config.model_spec.part import Part, Role
from megatrain.model.functions import weight_of
from megatrain.model.layer import Mlp
from megatrain.model.layer_context import LayerContext
from megatrain.model.layouts import router_layout
from megatrain.parallel.batch import PassInfo
from megatrain.parallel.layout import Init, ShardedModule


class DepthModule(ShardedModule):
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


def with_depths(model: ModelConfig, layers: tuple[LayerSpec, ...]) -> list[LayerSpec]:
    """Tokens decide whether they use the MLP of every second layer."""
    return [
        layer.with_part(MixtureOfDepths(layer.dense)) if n % 2 and layer.dense else layer
        for n, layer in enumerate(layers)
    ]
