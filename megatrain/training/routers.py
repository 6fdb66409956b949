"""Routers of all layers in a step: losses, load, dropped assignments, entropy, experts without tokens.

    info.router_metrics of every pass ─> sum over micro-batches and ranks: [layers, metrics and loads], equal on all ranks
        ├─> expert biases, which balance the load
        └─> RouterMetrics ─> copied to the host with the other metrics of the step ─> RouterReport

Losses are logged as Megatron-LM does: without their coefficients, as means over micro-batches and layers.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor
from torch.nn import functional as F

from megatrain.model.experts.router import ROUTER_METRICS
from megatrain.model.gpt import Model
from megatrain.parallel.batch import PassInfo
from megatrain.parallel.collectives import all_reduce
from megatrain.parallel.grid import RankGrid
from megatrain.parallel.packs.context import PackContext

STARVED_ITERATIONS = 20
"""Iterations without a token after which an expert is reported, and again each time their number has doubled. A resumed
run counts from zero."""

_LOSS_NAMES = {
    "z_loss": "z_loss",
    "aux_loss": "load_balancing_loss",
    "seq_aux_loss": "seq_load_balancing_loss",
    "global_aux_loss": "global_load_balancing_loss",
}
"""Losses of routers, by Megatron-LM's names."""


@dataclass(frozen=True, kw_only=True)
class RouterMetrics:
    """Metrics of all routers in a step, as tensors."""

    losses: Tensor
    """[losses], in the order of `Routers.loss_names`: means over layers."""
    layer_losses: Tensor
    """[layers, losses]."""
    max_load: Tensor
    """[layers], as the tensors below."""
    dropped: Tensor
    entropy: Tensor
    num_starved: Tensor
    """Experts to report."""
    starved_expert: Tensor
    """The first of them."""
    starved_iterations: Tensor
    """Iterations that it has had no token."""


@dataclass(frozen=True, kw_only=True)
class LayerRouting:
    """Metrics of one layer's router in a step."""

    layer: int
    max_load: float
    """Largest load of an expert, as a multiple of the mean."""
    dropped: float
    """Fraction of the token-expert assignments that were dropped."""
    entropy: float
    """Entropy of a token's scores over experts, in nats: mean over tokens."""
    losses: Mapping[str, float] = field(default_factory=dict)
    """By Megatron-LM's names."""


@dataclass(frozen=True, kw_only=True)
class RouterReport:
    """Metrics of all routers in a step, on the host."""

    losses: Mapping[str, float]
    """By Megatron-LM's names: means over layers."""
    layers: tuple[LayerRouting, ...]
    starved: tuple[str, ...] = ()
    """Warnings about experts that get no tokens."""


class Routers:
    """The routers of the whole model: their metrics and expert biases, equal on all ranks.

    Args:
        model: this rank's part.
        grid: its ranks.
    """

    def __init__(self, model: Model, grid: RankGrid, device: torch.device) -> None:
        self.specs = model.spec.routers
        self.biases = model.expert_biases
        of_tokens = (model.tp.group,) if model.tp.sequence_parallel else ()
        self._groups = (*of_tokens, grid.replicas, grid.pp)
        # Losses of packs are means.
        self._passes_of_each = 0 if isinstance(model.cp, PackContext) else grid.dp.size
        sizes = [router.num_experts for router in self.specs.values()]
        max_experts = max(sizes, default=0)
        top_ks = [router.top_k for router in self.specs.values()]
        both = torch.tensor([sizes, top_ks], dtype=torch.float64, device=device)
        self._num_experts, self._top_k = both.unbind()
        self._num_rows = 2 if any(router.has_bias_updates for router in self.specs.values()) else 1
        self._sums = torch.zeros(
            len(sizes), len(ROUTER_METRICS) + self._num_rows * max_experts, dtype=torch.float64, device=device
        )
        self._num_passes = 1
        self._idle_iterations = torch.zeros(len(sizes), max_experts, dtype=torch.int64, device=device)
        """Iterations since each expert had a token, [layers, experts]."""
        self._is_expert = torch.arange(max_experts, device=device) < self._num_experts[:, None]
        coefficients = [dict(spec.losses) | {"z_loss": spec.z_loss_coeff} for spec in self.specs.values()]
        self._has_indexers = model.spec.num_trained_indexers > 0
        self.loss_names = [name for name in _LOSS_NAMES if any(layer.get(name) for layer in coefficients)]

    @property
    def have_losses(self) -> bool:
        """Routers, or indexers of sparse attention, add to the loss of the step."""
        return bool(self.loss_names) or self._has_indexers

    def collect(self, infos: Sequence[PassInfo]) -> None:
        """Sum the metrics of a step's passes over micro-batches and ranks; all ranks call it."""
        if not self.specs:
            return
        self._num_passes = len(infos) * self._passes_of_each or 1
        rows = []
        for layer in self.specs:
            passes = [info.router_metrics[layer] for info in infos if layer in info.router_metrics]
            local = torch.stack(passes).sum(0) if passes else self._sums.new_zeros(0)
            rows.append(self._padded(local, self.specs[layer].num_experts))
        self._sums = torch.stack(rows)
        for group in self._groups:
            all_reduce(self._sums, group)

    def _padded(self, row: Tensor, num_experts: int) -> Tensor:
        """Return a router's metrics, or none, in the width of `_sums`; loads are also the numbers that update the bias if it has no others."""
        if not row.numel():
            return self._sums.new_zeros(self._sums.shape[1])
        of_experts = row[len(ROUTER_METRICS) :].view(-1, num_experts)
        if len(of_experts) < self._num_rows:
            of_experts = of_experts.expand(self._num_rows, -1)
        padded = F.pad(of_experts, (0, self._is_expert.shape[1] - num_experts))
        return torch.cat((row[: len(ROUTER_METRICS)], padded.flatten()))

    def finish_step(self, is_finite: Tensor) -> RouterMetrics | None:
        """Update the expert biases if the step is finite; return the step's metrics, or None without routers."""
        if not self.specs:
            return None
        of_experts = self._sums[:, len(ROUTER_METRICS) :].unflatten(1, (self._num_rows, -1))
        loads = of_experts[:, 0]
        self.biases.update(of_experts[:, -1], is_finite, of_experts[:, -1] / self._num_passes)
        self._idle_iterations = torch.where(loads > 0, 0, self._idle_iterations + 1) * self._is_expert
        assignments = loads.sum(-1).clamp(min=1)
        sums = dict(zip(ROUTER_METRICS, self._sums.unbind(-1), strict=False))
        layer_losses = [sums[name] / self._num_passes for name in self.loss_names]
        multiples = self._idle_iterations // STARVED_ITERATIONS
        is_due = (self._idle_iterations % STARVED_ITERATIONS == 0) & (multiples > 0)
        is_starved = is_due & ((multiples & (multiples - 1)) == 0)
        first = is_starved.int().argmax(-1)
        return RouterMetrics(
            losses=torch.stack(layer_losses).mean(1) if layer_losses else self._sums.new_zeros(0),
            layer_losses=torch.stack(layer_losses, 1)
            if layer_losses
            else self._sums.new_zeros(len(self.specs), 0),
            max_load=loads.amax(-1) * self._num_experts / assignments,
            dropped=sums["dropped"] / assignments,
            entropy=sums["entropy"] * self._top_k / assignments,
            num_starved=is_starved.sum(-1),
            starved_expert=first,
            starved_iterations=self._idle_iterations.gather(1, first[:, None]).squeeze(1),
        )

    def report(self, metrics: RouterMetrics) -> RouterReport:
        """Return the report of metrics on the host."""
        names = [_LOSS_NAMES[name] for name in self.loss_names]
        rows = zip(
            self.specs,
            metrics.max_load.tolist(),
            metrics.dropped.tolist(),
            metrics.entropy.tolist(),
            metrics.layer_losses.tolist(),
            strict=True,
        )
        starved = zip(
            self.specs,
            metrics.starved_expert.tolist(),
            metrics.num_starved.tolist(),
            metrics.starved_iterations.tolist(),
            strict=True,
        )
        return RouterReport(
            losses=dict(zip(names, metrics.losses.tolist(), strict=True)),
            layers=tuple(
                LayerRouting(
                    layer=layer,
                    max_load=max_load,
                    dropped=dropped,
                    entropy=entropy,
                    losses=dict(zip(names, losses, strict=True)),
                )
                for layer, max_load, dropped, entropy, losses in rows
            ),
            starved=tuple(
                _starvation_warning(layer, int(expert), num_others=int(count) - 1, iterations=int(iterations))
                for layer, expert, count, iterations in starved
                if count
            ),
        )


def _starvation_warning(layer: int, expert: int, *, num_others: int, iterations: int) -> str:
    also = f" (and {num_others} other{'s' if num_others > 1 else ''})" if num_others else ""
    return (
        f"expert {expert}{also} of layer {layer} has had no token for {iterations} iterations;"
        " to balance the load, increase --moe-aux-loss-coeff or use --moe-router-enable-expert-bias"
    )
