"""Biases that even the loads of experts without a loss: state of the model that no gradient moves.

    loads of the global batch [L, E] ─> bias += rate * sign(mean load - load)      after every step that was made

Every rank holds those of all layers and moves them alike, as loads are whole numbers that are summed over all ranks. So
they are the same under every layout, and a checkpoint keeps them beside its scalars, which any layout reads.

Source: Wang et al., arXiv:2408.15664; Megatron-LM moves them likewise. Loads are of the experts that were picked, also
of tokens that are dropped later.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor, nn

from megatrain.model.router import Router
from megatrain.model.specs import RouterSpec


def router_name(layer: int) -> str:
    """Begins the canonical names of a layer's router."""
    return f"decoder.layers.{layer}.mlp.router"


class ExpertBiases:
    """The biases of all layers.

    Args:
        routers: of the whole model, by the numbers of their layers.
        dtype, device: of the biases.
    """

    def __init__(
        self, routers: Mapping[int, RouterSpec], *, dtype: torch.dtype, device: torch.device
    ) -> None:
        self.routers = dict(routers)
        most = max((router.num_experts for router in routers.values()), default=0)
        self.values = torch.zeros(len(routers), most, dtype=dtype, device=device)
        """[L, E]; rows of routers without biases stay 0, and so do places past a router's experts."""
        rates = [[router.bias_update_rate if router.has_expert_bias else 0.0] for router in routers.values()]
        self._rates = torch.tensor(rates, dtype=dtype, device=device).view(-1, 1)
        sizes = torch.tensor([[router.num_experts] for router in routers.values()], device=device)
        self._sizes = sizes.view(-1, 1)
        self._is_expert = torch.arange(most, device=device) < self._sizes

    def give_to(self, segments: Sequence[nn.Module]) -> None:
        """Let the routers of this rank's part of the model pick with them."""
        for module in (module for segment in segments for module in segment.modules()):
            if isinstance(module, Router):
                module.bias = self.of(module.layer)

    def of(self, layer: int) -> Tensor | None:
        """A router's, [E], which follow all updates; None where it has none."""
        router = self.routers[layer]
        row = list(self.routers).index(layer)
        return self.values[row, : router.num_experts] if router.has_expert_bias else None

    def update(self, loads: Tensor, is_finite: Tensor) -> None:
        """Move them, if the step was finite: loads [L, E] of the global batch, of whole numbers in any dtype."""
        means = loads.sum(-1, keepdim=True) / self._sizes
        moves = (means - loads).sign().to(self.values.dtype) * self._rates
        self.values += moves.masked_fill(~(self._is_expert & is_finite), 0)

    def state(self) -> dict[str, list[float]]:
        """By canonical name: numbers that `restore` takes back to the last bit."""
        found = {layer: self.of(layer) for layer in self.routers}
        return {_name(layer): bias.tolist() for layer, bias in found.items() if bias is not None}

    def restore(self, state: Mapping[str, Sequence[float]]) -> None:
        """Take them from a checkpoint.

        Raises:
            ValueError: it has those of another model.
        """
        expected = {name: len(values) for name, values in self.state().items()}
        found = {name: len(values) for name, values in state.items()}
        if expected != found:
            name = min(expected.items() ^ found.items())[0]
            raise ValueError(
                f"{name}: {found.get(name, 'no')} biases, should be {expected.get(name, 'none')}"
            )
        for layer in self.routers:
            bias = self.of(layer)
            if bias is not None:
                bias.copy_(torch.tensor(state[_name(layer)], dtype=bias.dtype))


def _name(layer: int) -> str:
    return f"{router_name(layer)}.expert_bias"
