"""The optimizer over flat shards: this rank owns the wide master weights and the state of its shard of every bucket.

    gradients (summed) -> exact norm -> clip -> rule (AdamW, SGD) on master weights -> weights in the model's dtype -> gather
                                                (Muon on matrices, where it is asked for)

With the distributed optimizer (ZeRO-1, arXiv:1910.02054) the shards of the data-parallel ranks are disjoint; without
it every rank owns everything. Where the model's dtype is as wide as the master weights, they are the same memory.
State of the last buckets may be in the host's memory, whose CPU updates them then (offload.py).
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping
from typing import Protocol

import torch
from torch import Tensor

from megatrain.kernels.optimizer.shard_update import FlatUpdate, HyperparamRange
from megatrain.kernels.optimizer.sum_of_squares import sum_of_squares
from megatrain.optim.lr_schedule import Hyperparams
from megatrain.optim.muon import Muon
from megatrain.optim.offload import HostUpdates, num_offloaded, zeros_on_host
from megatrain.optim.update_rules import UpdateRule
from megatrain.parallel.buffers import FlatBuffers, Placed, Shard
from megatrain.parallel.data_parallel import DataParallel
from megatrain.parallel.layout import BoxRange, ParamGroup, ParamLayout

WEIGHT = "weight"
"""The kind of state that is the master weight, by the name that checkpoints use."""


class WeightSource(Protocol):
    """Where values of canonical tensors come from: the initial distribution, a checkpoint, another program's weights."""

    def fill(self, out: Tensor, layout: ParamLayout, box: BoxRange) -> None:
        """Write the values of a box into `out`, which has its shape, any float dtype, and is contiguous."""
        ...


class ShardedOptimizer:
    """The optimizer of one rank.

    Args:
        parallel: moves gradients and weights between the replicas.
        rule: how weights move.
        muon: how matrices move instead; None: as all else.
        clip_grad: largest norm of all gradients together; 0: no clipping.
        master_dtype: of master weights.
        kept_dtypes: of what the rule keeps, by kind; like the master weights where nothing is said.
        offload_fraction: of the elements, whose state is in the host's memory, in whole buckets; 0 with `muon`.
    """

    def __init__(
        self,
        parallel: DataParallel,
        rule: UpdateRule,
        *,
        muon: Muon | None = None,
        clip_grad: float,
        master_dtype: torch.dtype,
        kept_dtypes: Mapping[str, torch.dtype] | None = None,
        offload_fraction: float = 0.0,
    ) -> None:
        self.parallel = parallel
        self.buffers = parallel.buffers
        self.rule = rule
        self.muon = muon
        self.clip_grad = clip_grad
        self.step_count = 0
        weights, gradients = self.buffers.weight_shards, self.buffers.gradient_shards
        self.device = weights[0].device
        self.num_on_device = len(weights) - num_offloaded([w.numel() for w in weights], offload_fraction)
        own, offloaded = weights[: self.num_on_device], weights[self.num_on_device :]
        assert muon is None or not offloaded, "a rule refuses it"
        self.master_weights = [w if w.dtype == master_dtype else torch.zeros_like(w, dtype=master_dtype) for w in own]
        self.master_weights += [zeros_on_host(w.numel(), master_dtype, self.device) for w in offloaded]
        self.host = HostUpdates(gradients[self.num_on_device :], offloaded, master_dtype) if offloaded else None
        self._borders = [
            0 if muon is None else min(max(shard.bucket.num_in_matrices - shard.start, 0), shard.numel)
            for shard in self.buffers.shards
        ]
        dtypes = dict.fromkeys(self.kinds, master_dtype) | dict(kept_dtypes or {})
        self.kept = {
            kind: [self._zeros(kind, number, dtypes[kind]) for number in range(len(weights))]
            for kind in self.kinds[1:]
        }
        self._ranges = [list(_group_ranges(shard)) for shard in self.buffers.shards]
        self._counted = self._gradients_counted_here()

    @property
    def kinds(self) -> tuple[str, ...]:
        """All that is kept for elements, by the names that checkpoints use: the master weight comes first."""
        return (WEIGHT, *self.rule.kinds, *(() if self.muon is None else (self.muon.kind,)))

    def kinds_of(self, layout: ParamLayout) -> tuple[str, ...]:
        """What is kept for the elements of a parameter."""
        if self.muon is not None and layout.group.is_matrix:
            return (WEIGHT, self.muon.kind)
        return (WEIGHT, *self.rule.kinds)

    def state(self, kind: str) -> list[Tensor]:
        """One flat tensor for each of the buffers' shards: of the elements that have this kind, one of `kinds`."""
        self.parallel.wait_for_weights()  # master weights may be parts of what is on its way
        return self.master_weights if kind == WEIGHT else self.kept[kind]

    def fill(self, kind: str, source: WeightSource) -> None:
        """Take this rank's shards of a kind of state from `source`. After `weight`, call `publish_weights`."""
        for placed, box, values in self.owned(kind):
            source.fill(values.view(box.shape), placed.entry.layout, box)

    def owned(self, kind: str) -> Iterator[tuple[Placed, BoxRange, Tensor]]:
        """Every box of this rank that has a kind of state, with its parameter and its values, flat."""
        for number, (shard, flat) in enumerate(zip(self.buffers.shards, self.state(kind), strict=True)):
            first = self._region(kind, number).start
            for placed, box, place in shard.owned():
                if kind in self.kinds_of(placed.entry.layout):
                    yield placed, box, flat[place.start - first : place.stop - first]

    def publish_weights(self) -> None:
        """Derive the model's weights from the master ones, on all replicas."""
        for weights, master in zip(self.buffers.weight_shards, self.master_weights, strict=True):
            weights.copy_(master)
        self.parallel.all_gather_all_weights()

    def gradient_norm(self) -> Tensor:
        """L2 norm over every element of the model, each counted once: a number in the widest dtype, equal on all ranks."""
        squares = sum_of_squares(self._counted, self.device)
        return self.parallel.sum_over_ranks(squares).sqrt()

    def step(
        self, hyperparams: Hyperparams, *, norm: Tensor, gradient_scale: float = 1.0, is_finite: Tensor | None = None
    ) -> None:
        """One update with the gradients in the buffers, clipped by their `norm`; each bucket's weights are then published.

        On a GPU the host waits for nothing but gradients that it works on itself, and so counts the step whether it
        was finite or not.

        Args:
            hyperparams: of this step.
            norm: of the gradients, without their scale.
            gradient_scale: how many times too large the gradients in the buffers are.
            is_finite: one truth value, on the device; where it is false, nothing is updated.
        """
        self.parallel.wait_for_weights()  # nobody may have asked for them since the last step
        self.step_count += 1
        scale = torch.full_like(norm, 1.0 / gradient_scale)
        if self.clip_grad > 0:
            scale *= (self.clip_grad / (norm + 1e-6)).clamp(max=1.0)
        scale = scale.to(self.master_weights[0].dtype)
        is_finite = torch.ones_like(norm, dtype=torch.bool) if is_finite is None else is_finite
        flats = zip(
            self.master_weights, self.buffers.gradient_shards, self.buffers.weight_shards, self._ranges, strict=True
        )
        shards = [
            FlatUpdate(
                master=master,
                grad=gradients,
                weight=weights,
                runs=tuple(_run(group, part, hyperparams) for group, part in ranges),
                grad_scale=scale,
                is_finite=is_finite,
            )
            for master, gradients, weights, ranges in flats
        ]
        if self.muon is not None:
            self.muon.step(shards, self.kept[self.muon.kind])
        on_device, offloaded = shards[: self.num_on_device], shards[self.num_on_device :]
        if self.host is not None:
            self.host.begin(offloaded)
        for number, shard in enumerate(on_device):
            self._update(number, shard)
            self.parallel.all_gather_weights(number)
        if self.host is not None:
            for number in range(len(offloaded)):
                self._update(self.num_on_device + number, self.host.arrived(number))
                self.host.send(number)
                self.parallel.all_gather_weights(self.num_on_device + number)

    def _update(self, number: int, shard: FlatUpdate) -> None:
        """By the rule, but for what Muon has moved."""
        kept = {kind: self.kept[kind][number] for kind in self.rule.kinds}
        self.rule.update(shard.behind(self._borders[number]), kept, self.step_count)

    def _zeros(self, kind: str, number: int, dtype: torch.dtype) -> Tensor:
        """A kind of state of a shard, where its master weights are."""
        master = self.master_weights[number][self._region(kind, number)]
        if number >= self.num_on_device:
            return zeros_on_host(master.numel(), dtype, self.device)
        return torch.zeros_like(master, dtype=dtype)

    def _region(self, kind: str, number: int) -> slice:
        """The elements of a shard that have a kind of state: matrices stand first in it."""
        border, size = self._borders[number], self.master_weights[number].numel()
        if kind == WEIGHT:
            return slice(0, size)
        return slice(border, size) if kind in self.rule.kinds else slice(0, border)

    def _gradients_counted_here(self) -> list[Tensor]:
        """Views of the gradients whose squares this rank adds: of copies, the first rank's."""
        counted: list[Tensor] = []
        for shard, gradients in zip(self.buffers.shards, self.buffers.gradient_shards, strict=True):
            for piece, part in shard.pieces():
                if self.parallel.grid.owns(piece.copies, shard.bucket.family):
                    counted.append(gradients[part])
        return counted


def fill_shards(state: list[Tensor], buffers: FlatBuffers, source: WeightSource) -> None:
    """Fill one flat tensor a shard from `source`, box by box; padding stays as it is."""
    for shard, flat in zip(buffers.shards, state, strict=True):
        for placed, box, place in shard.owned():
            source.fill(flat[place].view(box.shape), placed.entry.layout, box)


def _run(group: ParamGroup, part: slice, hyperparams: Hyperparams) -> HyperparamRange:
    """A part of a shard, with the hyperparams of its group."""
    return HyperparamRange(
        part.start,
        part.stop,
        lr=hyperparams.of(group.kind),
        weight_decay=hyperparams.weight_decay if group.decays else 0.0,
        eps_scale=hyperparams.eps_scale_of(group.kind),
    )


def _group_ranges(shard: Shard) -> Iterator[tuple[ParamGroup, slice]]:
    """The parts of a shard whose parameters move alike, counted from its start. Alignment goes with what it follows."""
    runs = [
        (group, next(run).start)
        for group, run in itertools.groupby(shard.bucket.placed, key=lambda placed: placed.entry.layout.group)
    ]
    ends = [*(start for _, start in runs[1:]), shard.bucket.size]
    for (group, start), end in zip(runs, ends, strict=True):
        low, high = max(start, shard.start), min(end, shard.stop)
        if low < high:
            yield group, slice(low - shard.start, high - shard.start)
