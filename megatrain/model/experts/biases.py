"""Expert biases: state of the model that balances the loads of experts without a loss and without gradients.

    loads of the global batch [L, E]      ─> bias += rate * sign(mean load - load)      after every step that is not skipped
    mean quantiles of micro-batches [L, E] ─> bias = ema * bias - (1 - ema) * quantile, minus its mean over experts

The second rule is quantile balancing, whose biases are added to logits (`kernels.moe.routing.load_quantiles`); Megatron-LM
stores them with the other sign. Every rank holds the biases of all layers and applies the same update, since loads and
quantiles are summed over all ranks. So biases do not depend on the layout, and a checkpoint stores them with its scalars,
which any layout reads.

Source: Wang et al., arXiv:2408.15664; Megatron-LM has the same updates. As there, loads count no dropped assignments, and
biases stay where every expert is padded to its capacity, since padded loads are equal.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

import torch
from torch import Tensor, nn

from megatrain.config.model_spec.experts import RouterSpec
from megatrain.model.experts.router import Router


class ExpertBiases:
    """Biases of all layers.

    Args:
        routers: routers of the whole model, by layer number.
        names: prefixes of their canonical names, in the same order.
        dtype, device: properties of the biases.
    """

    def __init__(
        self,
        routers: Mapping[int, RouterSpec],
        names: Iterable[str],
        *,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        self.routers = dict(routers)
        kinds = (
            "expert_bias" if router.quantile_ema is None else "quantile_bias" for router in routers.values()
        )
        self._names = {
            layer: f"{name}.{kind}" for layer, name, kind in zip(routers, names, kinds, strict=True)
        }
        max_experts = max((router.num_experts for router in routers.values()), default=0)
        self.values = torch.zeros(len(routers), max_experts, dtype=dtype, device=device)
        """[L, E]; 0 in rows of routers without biases and in columns beyond a router's experts."""
        rates = [[router.bias_update_rate if router.has_expert_bias else 0.0] for router in routers.values()]
        self._rates = torch.tensor(rates, dtype=dtype, device=device).view(-1, 1)
        emas = [1.0 if router.quantile_ema is None else router.quantile_ema for router in routers.values()]
        self._emas = torch.tensor(emas, dtype=dtype, device=device).view(-1, 1)
        self.have_quantiles = any(router.quantile_ema is not None for router in routers.values())
        sizes = torch.tensor([[router.num_experts] for router in routers.values()]).view(-1, 1)
        self._sizes = sizes.to(device)
        self._is_expert = (torch.arange(max_experts) < sizes).to(device)

    def attach_to(self, segments: Sequence[nn.Module]) -> None:
        """Set the biases of the routers in this rank's segments."""
        for module in (module for segment in segments for module in segment.modules()):
            if isinstance(module, Router):
                module.bias = self.of(module.layer)

    def of(self, layer: int) -> Tensor | None:
        """Return a view of one router's biases, [E]; None if it has none."""
        router = self.routers[layer]
        row = list(self.routers).index(layer)
        return self.values[row, : router.num_experts] if router.has_selection_bias else None

    def update(self, loads: Tensor, is_finite: Tensor, quantiles: Tensor | None = None) -> None:
        """Update the biases if the step was finite.

        Args:
            loads: integer loads of the global batch without dropped assignments, [L, E] in any dtype; not read with quantile
                balancing.
            quantiles: means of the load quantiles of its micro-batches, [L, E]; required with quantile balancing.
        """
        means = loads.sum(-1, keepdim=True) / self._sizes
        updates = (means - loads).sign().to(self.values.dtype) * self._rates
        if self.have_quantiles:
            assert quantiles is not None
            moved = (self._emas - 1) * (self.values + quantiles.to(self.values.dtype))
            total = ((self.values + moved) * self._is_expert).sum(-1, keepdim=True)
            updates += torch.where(self._emas < 1, moved - total / self._sizes, 0)
        self.values += updates.masked_fill(~(self._is_expert & is_finite), 0)

    def state(self) -> dict[str, list[float]]:
        """Return the biases by canonical name; `restore` restores them bit for bit."""
        found = {layer: self.of(layer) for layer in self.routers}
        return {self._names[layer]: bias.tolist() for layer, bias in found.items() if bias is not None}

    def restore(self, state: Mapping[str, Sequence[float]]) -> None:
        """Restore the biases from a checkpoint.

        Raises:
            ValueError: the checkpoint belongs to another model.
        """
        expected = {name: len(values) for name, values in self.state().items()}
        found = {name: len(values) for name, values in state.items()}
        if expected != found:
            name = min(expected.items() ^ found.items())[0]
            raise ValueError(
                f"{name}: the checkpoint has {found.get(name, 'no')} biases, the model {expected.get(name, 'none')}"
            )
        for layer in self.routers:
            bias = self.of(layer)
            if bias is not None:
                bias.copy_(torch.tensor(state[self._names[layer]], dtype=bias.dtype))
