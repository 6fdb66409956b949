"""What the routers of all layers did in a step: named losses, loads, drops, entropy, experts that nobody visits.

    info.router_sums of every pass ─> summed over micro-batches and ranks: [layers, sums and loads], alike on all ranks
        ├─> biases that even loads move
        └─> some numbers for each layer, which travel to the host with the step's others ─> RouterReport

Losses are as Megatron-LM logs them: without their coefficients, as means over micro-batches and layers.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional as F

from megatrain.model.gpt import Model
from megatrain.model.router import ROUTER_SUMS
from megatrain.parallel.batch import PassInfo
from megatrain.parallel.collectives import all_reduce
from megatrain.parallel.grid import RankGrid
from megatrain.parallel.tokens import TokenSplit

STARVED_ITERATIONS = 20
"""An expert without a token for so many iterations is told of, and again whenever their number has doubled. A resumed run
counts anew."""

_LOSS_NAMES = {
    "z_loss": "z_loss",
    "aux_loss": "load_balancing_loss",
    "seq_aux_loss": "seq_load_balancing_loss",
    "global_aux_loss": "global_load_balancing_loss",
}
"""Megatron-LM's names."""


@dataclass(frozen=True, kw_only=True)
class LayerRouting:
    """What the router of a layer did in a step."""

    layer: int
    max_load: float
    """Largest load of an expert, as a multiple of the mean."""
    dropped: float
    """Share of the visits that were dropped."""
    entropy: float
    """Of the shares of experts in a token's scores, in nats: the mean over tokens."""


@dataclass(frozen=True, kw_only=True)
class RouterReport:
    """What all routers did in a step."""

    losses: Mapping[str, float]
    """By Megatron-LM's names."""
    layers: tuple[LayerRouting, ...]
    starved: tuple[str, ...] = ()
    """Sentences on experts that nobody visits."""


class Routers:
    """The routers of the whole model, as each rank keeps account of them.

    Args:
        model: of this rank.
        grid: its ranks.
    """

    def __init__(self, model: Model, grid: RankGrid, device: torch.device) -> None:
        self.specs = model.spec.routers
        self.biases = model.expert_biases
        self._split = TokenSplit(model.tp, model.cp)
        self._grid = grid
        sizes = [router.num_experts for router in self.specs.values()]
        self._most = max(sizes, default=0)
        ks = [router.top_k for router in self.specs.values()]
        both = torch.tensor([sizes, ks], dtype=torch.float64, device=device)
        self._num_experts, self._top_k = both.unbind()
        self._sums = torch.zeros(
            len(sizes), len(ROUTER_SUMS) + self._most, dtype=torch.float64, device=device
        )
        self._num_passes = 1
        self._hungry = torch.zeros(len(sizes), self._most, dtype=torch.int64, device=device)
        """For how many iterations each expert had no token."""
        self._is_expert = torch.arange(self._most, device=device) < self._num_experts[:, None]
        of_specs = [dict(router.losses) | {"z_loss": router.z_loss_coeff} for router in self.specs.values()]
        self._losses = [name for name in _LOSS_NAMES if any(spec.get(name) for spec in of_specs)]

    @property
    def have_losses(self) -> bool:
        """Whether they add anything to the loss."""
        return bool(self._losses)

    def collect(self, infos: Sequence[PassInfo]) -> None:
        """Take the sums of a step's passes; all ranks call it."""
        if not self.specs:
            return
        self._num_passes = len(infos) * self._grid.dp.size
        rows = []
        for layer in self.specs:
            told = [info.router_sums[layer] for info in infos if layer in info.router_sums]
            own = torch.stack(told).sum(0) if told else self._sums.new_zeros(0)
            rows.append(F.pad(own, (0, self._sums.shape[1] - own.numel())))
        sums = self._split.sum(torch.stack(rows))
        self._sums = all_reduce(all_reduce(sums, self._grid.dp), self._grid.pp)

    def follow_step(self, is_good: Tensor) -> dict[str, Tensor]:
        """Move the biases, if the step is to update; returns numbers for `report`, by name."""
        if not self.specs:
            return {}
        loads = self._sums[:, len(ROUTER_SUMS) :]
        self.biases.update(loads, is_good)
        self._hungry = torch.where(loads > 0, 0, self._hungry + 1) * self._is_expert
        visits = loads.sum(-1).clamp(min=1)
        sums = dict(zip(ROUTER_SUMS, self._sums.unbind(-1), strict=False))
        share = 1 / (self._num_passes * len(self.specs))
        found = {name: sums[name].sum() * share for name in self._losses}
        figures = {
            "max_load": loads.amax(-1) * self._num_experts / visits,
            "dropped": sums["dropped"] / visits,
            "entropy": sums["entropy"] * self._top_k / visits,
            **self._starvation(),
        }
        for name, values in figures.items():
            found |= {
                f"{name} {layer}": value for layer, value in zip(self.specs, values.unbind(), strict=True)
            }
        return found

    def _starvation(self) -> dict[str, Tensor]:
        """For each layer, how many experts are to be told of, one of them, and its iterations without a token."""
        times = self._hungry // STARVED_ITERATIONS
        is_told = (self._hungry % STARVED_ITERATIONS == 0) & (times > 0) & ((times & (times - 1)) == 0)
        first = is_told.int().argmax(-1)
        return {
            "starved": is_told.sum(-1),
            "starved expert": first,
            "starved iterations": self._hungry.gather(1, first[:, None]).squeeze(1),
        }

    def report(self, told: Mapping[str, float]) -> RouterReport | None:
        """Of the numbers that `follow_step` gave, among others; None where there are no routers."""
        if not self.specs:
            return None
        return RouterReport(
            losses={_LOSS_NAMES[name]: told[name] for name in self._losses},
            layers=tuple(
                LayerRouting(
                    layer=layer,
                    max_load=told[f"max_load {layer}"],
                    dropped=told[f"dropped {layer}"],
                    entropy=told[f"entropy {layer}"],
                )
                for layer in self.specs
            ),
            starved=tuple(
                _sentence(
                    layer,
                    int(told[f"starved expert {layer}"]),
                    num_others=int(told[f"starved {layer}"]) - 1,
                    iterations=int(told[f"starved iterations {layer}"]),
                )
                for layer in self.specs
                if told[f"starved {layer}"]
            ),
        )


def _sentence(layer: int, expert: int, *, num_others: int, iterations: int) -> str:
    also = f" (and {num_others} other{'s' if num_others > 1 else ''})" if num_others else ""
    return (
        f"expert {expert}{also} of layer {layer} has had no token for {iterations} iterations;"
        " a larger --moe-aux-loss-coeff, or --moe-router-enable-expert-bias, brings it back"
    )
