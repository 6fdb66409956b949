"""AdamW over flat shards: this rank owns the wide main weights and moments of its shard of every bucket.

    gradients (summed) -> exact norm -> clip -> AdamW on the main weights -> weights in the model's dtype -> gather

With the distributed optimizer (ZeRO-1, arXiv:1910.02054) the shards of the data-parallel ranks are disjoint; without
it every rank owns everything. Where the model's dtype is as wide as the main weights, they are the same memory.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from megatrain.kernels.adamw import AdamwStep, adamw
from megatrain.parallel.buffers import FlatBuffers, Shard
from megatrain.parallel.collectives import all_reduce
from megatrain.parallel.data import DataParallel
from megatrain.parallel.layout import BoxRange, ParamLayout

STATE_KINDS = ("weight", "exp_avg", "exp_avg_sq")
"""What is kept for each element, by the names that checkpoints use. `weight` is the main weight."""


class WeightSource(Protocol):
    """Where values of canonical tensors come from: the initial distribution, a checkpoint, another program's weights."""

    def fill(self, out: Tensor, layout: ParamLayout, box: BoxRange) -> None:
        """Write the values of a box into `out`, which has its shape, any float dtype, and is contiguous."""
        ...


@dataclass(frozen=True, kw_only=True)
class AdamwConfig:
    """The numbers of AdamW that stay the same over a run."""

    beta1: float
    beta2: float
    eps: float
    weight_decay: float
    clip_grad: float
    """Largest norm of all gradients together; 0: no clipping."""


class ShardedAdamw:
    """The optimizer of one rank.

    Args:
        parallel: moves gradients and weights between the replicas.
        config: see there.
        main_dtype: of main weights and moments.
    """

    def __init__(self, parallel: DataParallel, config: AdamwConfig, *, main_dtype: torch.dtype) -> None:
        self.parallel = parallel
        self.buffers = parallel.buffers
        self.config = config
        self.step_count = 0
        shards = self.buffers.shards
        weights = [self.buffers.weights[shard.start : shard.stop] for shard in shards]
        if main_dtype == self.buffers.weights.dtype:
            self.main = weights
        else:
            self.main = [torch.zeros_like(weight, dtype=main_dtype) for weight in weights]
        self.exp_avg = [torch.zeros_like(main) for main in self.main]
        self.exp_avg_sq = [torch.zeros_like(main) for main in self.main]
        self._counted = self._gradients_counted_here()

    def state(self, kind: str) -> list[Tensor]:
        """One flat tensor for each of the buffers' shards; `kind` is one of STATE_KINDS."""
        return {"weight": self.main, "exp_avg": self.exp_avg, "exp_avg_sq": self.exp_avg_sq}[kind]

    def fill(self, kind: str, source: WeightSource) -> None:
        """Take this rank's shards of a kind of state from `source`. After `weight`, call `publish_weights`."""
        fill_shards(self.state(kind), self.buffers, source)

    def publish_weights(self) -> None:
        """Derive the model's weights from the main ones, on all replicas."""
        for shard, main in zip(self.buffers.shards, self.main, strict=True):
            self.buffers.weights[shard.start : shard.stop].copy_(main)
        self.parallel.gather_weights()

    def gradient_norm(self) -> Tensor:
        """L2 norm over every element of the model, each counted once: a number in the widest dtype, equal on all ranks."""
        squares = torch.zeros((), dtype=torch.float64, device=self.buffers.gradients.device)
        if self._counted:
            squares += torch.nn.utils.get_total_norm(self._counted).to(torch.float64).square()
        grid = self.parallel.grid
        group = grid.tp_pp if self.parallel.shard_group.size == 1 else grid.world
        return all_reduce(squares, group).sqrt()

    def step(self, *, lr: float, norm: Tensor) -> None:
        """One update with the gradients in the buffers, clipped by their `norm`; then weights are gathered."""
        self.step_count += 1
        config = self.config
        scale = torch.ones_like(norm)
        if config.clip_grad > 0:
            scale = (config.clip_grad / (norm + 1e-6)).clamp(max=1.0)
        numbers = AdamwStep(
            lr=lr,
            beta1=config.beta1,
            beta2=config.beta2,
            eps=config.eps,
            step=self.step_count,
            grad_scale=scale.to(self.main[0].dtype),
        )
        for number, shard in enumerate(self.buffers.shards):
            cut = min(max(shard.bucket.decay_stop - shard.start, 0), shard.numel)
            self._update(number, shard, slice(0, cut), numbers, config.weight_decay)
            self._update(number, shard, slice(cut, shard.numel), numbers, 0.0)
        self.parallel.gather_weights()

    def _update(
        self, number: int, shard: Shard, part: slice, numbers: AdamwStep, weight_decay: float
    ) -> None:
        buffers = self.buffers
        adamw(
            self.main[number][part],
            self.exp_avg[number][part],
            self.exp_avg_sq[number][part],
            buffers.gradients[shard.start : shard.stop][part],
            buffers.weights[shard.start : shard.stop][part],
            numbers,
            weight_decay,
        )

    def _gradients_counted_here(self) -> list[Tensor]:
        """Views of the gradients whose squares this rank adds: of copies, the first rank's."""
        counted: list[Tensor] = []
        for shard in self.buffers.shards:
            for placed in shard.bucket.placed:
                low, high = max(shard.start, placed.start), min(shard.stop, placed.stop)
                is_first = self.parallel.grid.is_first_of(placed.entry.layout.copies)
                if low < high and is_first:
                    counted.append(self.buffers.gradients[low:high])
        return counted


def fill_shards(state: list[Tensor], buffers: FlatBuffers, source: WeightSource) -> None:
    """Fill one flat tensor a shard from `source`, box by box; padding stays as it is."""
    for shard, flat in zip(buffers.shards, state, strict=True):
        for placed, box, place in shard.owned():
            source.fill(flat[place].view(box.shape), placed.entry.layout, box)
