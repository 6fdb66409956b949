"""The experts of a rank as one module, which grouped products compute."""

from __future__ import annotations

import torch
from torch import Tensor

from megatrain.kernels.activations import Activation
from megatrain.model.layouts import Weights
from megatrain.parallel.batch import PassInfo
from megatrain.parallel.expert_parallel import (
    DispatchedTokens,
    ExpertParallel,
    GroupedProducts,
    GroupedWeight,
    grouped_mlp,
)
from megatrain.parallel.layout import LaidOutModule
from megatrain.parallel.tensor_parallel import Bias


class LocalGroupedMlp(LaidOutModule):
    """This rank's e experts, stacked by rows: fc1 [e f/etp, h], or gated [e 2 f/etp, h], and fc2 [e h, f/etp]."""

    fc1: Tensor
    fc2: Tensor

    def __init__(
        self,
        activation: Activation,
        fc1: Weights,
        fc2: Weights,
        parallel: ExpertParallel,
        dtype: torch.dtype,
        products: GroupedProducts,
    ) -> None:
        super().__init__()
        self.activation, self.products = activation, products
        self.num_local_experts = fc1.weight.num_matrices
        self.adds_output_bias = parallel.etp.is_first
        for name, weights in (("fc1", fc1), ("fc2", fc2)):
            self.add_weight(name, weights.weight, dtype)
            if weights.bias is not None:
                self.add_weight(f"{name}_bias", weights.bias, dtype)

    def forward(self, dispatched: DispatchedTokens, info: PassInfo) -> Tensor:
        fc1, fc2 = (
            GroupedWeight(*self._stacked(name), self._bias(f"{name}_bias")) for name in ("fc1", "fc2")
        )
        fc2 = fc2 if self.adds_output_bias else fc2._replace(bias=None)
        return grouped_mlp(dispatched, fc1, fc2, self.activation, info, self.products)

    def _bias(self, name: str) -> Bias | None:
        return Bias(*self._stacked(name)) if name in self.layouts else None

    def _stacked(self, name: str) -> tuple[Tensor, Tensor | None]:
        """Return a parameter and its gradient buffer, expert by expert: [e, o, i] or [e, o]."""
        value, grad = getattr(self, name), self.weight_grads.get(name)
        shape = (self.num_local_experts, -1, *value.shape[1:])
        return value.view(shape), None if grad is None else grad.view(shape)
