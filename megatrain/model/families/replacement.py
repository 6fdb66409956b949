"""A linear layer in place of attention or an MLP, from the norm to the output of the branch."""

from __future__ import annotations

from torch import Tensor, nn

from megatrain.config.model_spec.mlp import ReplacementSpec
from megatrain.model.layer import branch_output
from megatrain.model.layer_context import LayerContext
from megatrain.parallel.batch import PassInfo


class Replacement(nn.Module):
    """Every tensor rank computes its rows: there is no communication."""

    def __init__(self, spec: ReplacementSpec, context: LayerContext) -> None:
        super().__init__()
        (linear,) = spec.linears(context.model.hidden_size)
        self.linear = context.replicated_linear(linear, context.branch_norm(spec), has_bias=spec.has_bias)
        self.output = branch_output(spec, context)

    def forward(self, residual: Tensor, delta: Tensor | None, info: PassInfo) -> tuple[Tensor, Tensor | None]:
        residual, x = self.linear(residual, delta, info)
        return self.output.add_to(residual, x, info)
