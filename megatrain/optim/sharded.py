"""The sharded optimizer: this rank owns the master weights and the optimizer state of its shard of every bucket.

    gradients (summed) -> exact norm -> clip -> rule (AdamW, SGD) on master weights -> cast to weights -> all-gather
                                                (Muon or SOAP on matrices)           └> their average, if enabled

With the distributed optimizer (ZeRO-1, arXiv:1910.02054) the shards of the data-parallel ranks are disjoint; without
it every rank owns everything. If weights and master weights have the same dtype, they share memory. The state of the
last buckets may be in host memory, where the CPU updates it (offload.py).
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Protocol

import torch
from torch import Tensor

from megatrain.kernels.host_copy import zeros_on_host
from megatrain.kernels.optimizer.shard_update import FlatUpdate, HyperparamRange
from megatrain.kernels.optimizer.sum_of_squares import sum_of_squares
from megatrain.optim.lr_schedule import Hyperparams
from megatrain.optim.matrix_update import MatrixUpdate
from megatrain.optim.offload import HostUpdates, num_offloaded
from megatrain.optim.update_rules import EMA, UpdateRule, update_average
from megatrain.parallel.buckets import Shard
from megatrain.parallel.data_parallel import DataParallel, FlatBuffers
from megatrain.parallel.layout import BoxRange, ParamGroup, ParamLayout

WEIGHT = "weight"
"""The kind of state that is the master weight, by its name in checkpoints."""


class TensorSource(Protocol):
    """A source of values of canonical tensors: initial distributions, a checkpoint, another program's weights."""

    def fill(self, out: Tensor, layout: ParamLayout, box: BoxRange) -> None:
        """Write the values of a box into `out`, which has the box's shape and any float dtype, and is contiguous."""
        ...


class LoadTarget(Protocol):
    """A checkpoint is loaded into it: an optimizer, or weights alone."""

    @property
    def buffers(self) -> FlatBuffers:
        """The weights."""

    @property
    def kinds(self) -> Sequence[str]:
        """Kinds of state."""

    step_count: int

    def kinds_of(self, layout: ParamLayout) -> Sequence[str]:
        """Return the kinds of state of a parameter."""

    def fill(self, kind: str, source: TensorSource) -> None:
        """Fill this rank's part of a kind."""

    def sync_model_weights(self) -> None:
        """Derive the model's weights from those that were filled."""


def fill_weights(buffers: FlatBuffers, source: TensorSource) -> None:
    """Fill the model's weights of this rank's shards from `source`, without an optimizer; padding is left as it is."""
    for shard, flat in zip(buffers.shards, buffers.weights.shards, strict=True):
        _fill(((param.entry.layout, box, flat[part]) for param, box, part in shard.owned()), source)


class ShardedOptimizer:
    """The optimizer of one rank.

    Args:
        parallel: reduces gradients and all-gathers weights over the replicas.
        rule: update rule.
        matrices: update of matrices instead of `rule`; None: `rule` updates all.
        clip_grad: largest norm of all gradients together; 0: no clipping.
        master_dtype: dtype of master weights.
        moment_dtypes: dtype of the rule's state by kind; default: `master_dtype`.
        ema_decay: decay of the exponential moving average of master weights; 0: there is none.
        offload_fraction: fraction of the elements whose state is in host memory, in whole buckets; 0 with `matrices`.
    """

    def __init__(
        self,
        parallel: DataParallel,
        rule: UpdateRule,
        *,
        matrices: MatrixUpdate | None = None,
        clip_grad: float,
        master_dtype: torch.dtype,
        moment_dtypes: Mapping[str, torch.dtype] | None = None,
        ema_decay: float = 0.0,
        offload_fraction: float = 0.0,
    ) -> None:
        self.parallel = parallel
        self.buffers = parallel.buffers
        self.rule = rule
        self.matrices = matrices
        self.ema_decay = ema_decay
        self.clip_grad = clip_grad
        self.master_dtype = master_dtype
        self.step_count = 0
        self.state_copied: torch.cuda.Event | None = None
        """Recorded after copies of the state by another stream; the next update waits for it."""
        self.after_update: Callable[[int, FlatUpdate], None] | None = None
        """Called with the number of each shard whose master weights and weights are updated, before they are all-gathered."""
        weights, gradients = self.buffers.weights.shards, self.buffers.gradients.shards
        self.device = weights[0].device
        self.num_on_device = len(weights) - num_offloaded([w.numel() for w in weights], offload_fraction)
        on_device, offloaded = weights[: self.num_on_device], weights[self.num_on_device :]
        assert matrices is None or not offloaded, "a rule refuses it"
        self.master_weights = [
            w
            if w.dtype == master_dtype or not shard.bucket.is_trained
            else torch.zeros(w.shape, dtype=master_dtype, device=w.device)
            for w, shard in zip(on_device, self.buffers.shards, strict=False)
        ]
        self.master_weights += [zeros_on_host(w.numel(), master_dtype, self.device) for w in offloaded]
        self.host_updates = (
            HostUpdates(gradients[self.num_on_device :], offloaded, master_dtype) if offloaded else None
        )
        self._matrix_sizes = [
            0 if matrices is None else min(max(shard.bucket.num_in_matrices - shard.start, 0), shard.numel)
            for shard in self.buffers.shards
        ]
        """Leading elements of each shard that `matrices` updates: they come first in a bucket."""
        dtypes = dict.fromkeys(self.kinds, master_dtype) | dict(moment_dtypes or {})
        self.moments = {
            kind: [self._zeros(kind, number, dtypes[kind]) for number in range(len(weights))]
            for kind in self._kinds_of_elements[1:]
        }
        self._group_ranges = [list(_group_ranges(shard)) for shard in self.buffers.shards]
        self._counted_ranges = [list(self._counted_here(shard)) for shard in self.buffers.shards]

    @property
    def kinds(self) -> tuple[str, ...]:
        """Kinds of state, by their names in checkpoints; the master weight comes first."""
        factors = None if self.matrices is None else self.matrices.factor_kind
        return self._kinds_of_elements if factors is None else (*self._kinds_of_elements, factors)

    @property
    def _kinds_of_elements(self) -> tuple[str, ...]:
        of_matrices = () if self.matrices is None else self.matrices.kinds
        return (WEIGHT, *self.rule.kinds, *of_matrices, *self._averages)

    @property
    def _averages(self) -> tuple[str, ...]:
        return (EMA,) if self.ema_decay > 0 else ()

    def kinds_of(self, layout: ParamLayout) -> tuple[str, ...]:
        """Return the kinds of state of a parameter's elements."""
        if self.matrices is not None and layout.group.is_matrix:
            return (WEIGHT, *self.matrices.kinds, *self._averages)
        return (WEIGHT, *self.rule.kinds, *self._averages) if layout.is_trained else (WEIGHT,)

    def state(self, kind: str) -> list[Tensor]:
        """Return one flat tensor per shard of the buffers, with the elements that have this kind of state; all tensors of matrices."""
        if self.matrices is not None and kind == self.matrices.factor_kind:
            return [values for _, _, values in self.matrices.factors()]
        self.parallel.wait_for_weights()  # master weights may share memory with weights that an all-gather reads
        return self.master_weights if kind == WEIGHT else self.moments[kind]

    def fill(self, kind: str, source: TensorSource) -> None:
        """Fill this rank's shards of a kind of state from `source`. After `weight`, call `sync_model_weights`."""
        _fill(self.owned(kind), source)

    def owned(self, kind: str) -> Iterator[tuple[ParamLayout, BoxRange, Tensor]]:
        """Yield every box of this rank that has a kind of state, with the layout of its tensor and its values, flat."""
        if self.matrices is not None and kind == self.matrices.factor_kind:
            yield from self.matrices.factors()
            return
        for number, (shard, flat) in enumerate(zip(self.buffers.shards, self.state(kind), strict=True)):
            first = self._region(kind, number).start
            for param, box, part in shard.owned():
                if kind in self.kinds_of(param.entry.layout):
                    yield param.entry.layout, box, flat[part.start - first : part.stop - first]

    def sync_model_weights(self) -> None:
        """Cast the master weights to the model's weights and all-gather them."""
        for weights, master in zip(self.buffers.weights.shards, self.master_weights, strict=True):
            weights.copy_(master)
        self.parallel.all_gather_all_weights()

    def gradient_norm(self) -> Tensor:
        """Return the L2 norm over every element of the model, each counted once: fp64 [], equal on all ranks."""
        squares = sum_of_squares(self.counted(self.buffers.gradients.shards), self.device)
        return self.parallel.sum_over_ranks(squares).sqrt()

    def counted(self, flats: Sequence[Tensor]) -> list[Tensor]:
        """Return the parts that this rank counts of one flat tensor per shard: of several ranks that hold an element, the first one."""
        pairs = zip(flats, self._counted_ranges, strict=True)
        return [flat[part] for flat, ranges in pairs for part in ranges if part.start < part.stop]

    def step(
        self,
        hyperparams: Hyperparams,
        *,
        norm: Tensor,
        gradient_scale: float = 1.0,
        is_finite: Tensor | None = None,
    ) -> None:
        """Update with the gradients in the buffers, clipped by their `norm`, and all-gather each bucket's weights.

        On a GPU the host waits only for gradients of offloaded shards; `step_count` therefore also counts steps that
        are not finite.

        Args:
            hyperparams: of this step.
            norm: norm of the unscaled gradients.
            gradient_scale: factor by which the gradients in the buffers are too large.
            is_finite: bool [] on the device; False: nothing is updated.
        """
        self.wait_for_readers()
        self.step_count += 1
        shards = self._updates(hyperparams, norm, gradient_scale, is_finite)
        if self.matrices is not None:
            self.matrices.step(shards, self.moments, self.step_count)
        on_device, offloaded = shards[: self.num_on_device], shards[self.num_on_device :]
        if self.host_updates is not None:
            self.host_updates.begin(offloaded)
        for number, shard in enumerate(on_device):
            if self.buffers.buckets[number].is_trained:
                self._update(number, shard)
                self.parallel.all_gather_weights(number)
        if self.host_updates is not None:
            for number in range(len(offloaded)):
                self._update(self.num_on_device + number, self.host_updates.wait(number))
                self.host_updates.send_weights(number)
                self.parallel.all_gather_weights(self.num_on_device + number)

    def wait_for_readers(self) -> None:
        """Wait for all-gathers of weights and copies of the state, before the state changes."""
        self.parallel.wait_for_weights()
        if self.state_copied is not None:
            torch.cuda.current_stream(self.device).wait_event(self.state_copied)
            self.state_copied = None

    def _updates(
        self, hyperparams: Hyperparams, norm: Tensor, gradient_scale: float, is_finite: Tensor | None
    ) -> list[FlatUpdate]:
        """Return the update of each shard, with the factor that unscales and clips its gradients."""
        scale = torch.full_like(norm, 1.0 / gradient_scale)
        if self.clip_grad > 0:
            scale *= (self.clip_grad / (norm + 1e-6)).clamp(max=1.0)
        scale = scale.to(self.master_dtype)
        is_finite = torch.ones_like(norm, dtype=torch.bool) if is_finite is None else is_finite
        return [
            FlatUpdate(
                master=master,
                grad=gradients,
                weight=weights,
                ranges=tuple(_hyperparam_range(group, part, hyperparams) for group, part in ranges),
                grad_scale=scale,
                is_finite=is_finite,
            )
            for master, gradients, weights, ranges in zip(
                self.master_weights,
                self.buffers.gradients.shards,
                self.buffers.weights.shards,
                self._group_ranges,
                strict=True,
            )
        ]

    def _update(self, number: int, shard: FlatUpdate) -> None:
        """Apply the rule to all elements that `matrices` does not update, and then update the average."""
        moments = {kind: self.moments[kind][number] for kind in self.rule.kinds}
        self.rule.update(shard.from_element(self._matrix_sizes[number]), moments, self.step_count)
        if self.after_update is not None:
            self.after_update(number, shard)
        if self.ema_decay > 0:
            update_average(shard, self.moments[EMA][number], self.ema_decay, self.step_count)

    def _zeros(self, kind: str, number: int, dtype: torch.dtype) -> Tensor:
        """Allocate a kind of state of a shard, in the memory of its master weights."""
        master = self.master_weights[number][self._region(kind, number)]
        if number >= self.num_on_device:
            return zeros_on_host(master.numel(), dtype, self.device)
        return torch.zeros(master.shape, dtype=dtype, device=master.device)

    def _region(self, kind: str, number: int) -> slice:
        """Return the elements of a shard that have a kind of state."""
        of_matrices, size = self._matrix_sizes[number], self.master_weights[number].numel()
        if kind != WEIGHT and not self.buffers.buckets[number].is_trained:
            return slice(0, 0)
        if kind in (WEIGHT, EMA):
            return slice(0, size)
        return slice(of_matrices, size) if kind in self.rule.kinds else slice(0, of_matrices)

    def _counted_here(self, shard: Shard) -> Iterator[slice]:
        """Yield the ranges of a shard that this rank counts; adjacent pieces, thousands in a model of experts, are one range."""
        start, stop = 0, 0
        for piece, part in shard.pieces() if shard.bucket.is_trained else ():
            if not self.parallel.grid.owns(piece.copies, shard.bucket.family):
                continue
            if part.start != stop:
                yield slice(start, stop)
                start = part.start
            stop = part.stop
        yield slice(start, stop)


def parameter_norm(optimizer: ShardedOptimizer) -> Tensor:
    """Return the L2 norm of all master weights, each counted on the first rank that holds it: [] on the device. All ranks call it."""
    squares = sum_of_squares(optimizer.counted(optimizer.state(WEIGHT)), optimizer.device)
    return optimizer.parallel.sum_over_ranks(squares).sqrt()


def num_zero_gradients(optimizer: ShardedOptimizer) -> Tensor:
    """Return the number of zeros in the reduced gradient, each counted on one rank: int64 [] on the device.

    All ranks call it, before gradients are cleared.
    """
    count = torch.zeros((), dtype=torch.int64, device=optimizer.device)
    for part in optimizer.counted(optimizer.buffers.gradients.shards):
        count += part.numel() - part.count_nonzero()
    return optimizer.parallel.sum_over_ranks(count)


def _fill(boxes: Iterable[tuple[ParamLayout, BoxRange, Tensor]], source: TensorSource) -> None:
    for layout, box, values in boxes:
        source.fill(values.view(box.shape), layout, box)


def _hyperparam_range(group: ParamGroup, part: slice, hyperparams: Hyperparams) -> HyperparamRange:
    """Return a part of a shard with the hyperparameters of its group."""
    return HyperparamRange(
        part.start,
        part.stop,
        lr=hyperparams.lr_of(group.kind),
        weight_decay=hyperparams.weight_decay if group.decays else 0.0,
        eps_scale=hyperparams.eps_scale_of(group.kind),
    )


def _group_ranges(shard: Shard) -> Iterator[tuple[ParamGroup, slice]]:
    """Yield each parameter group's range of a shard, counted from its start; padding belongs to the group before it."""
    groups = [
        (group, next(params).start)
        for group, params in itertools.groupby(
            shard.bucket.params, key=lambda param: param.entry.layout.group
        )
    ]
    ends = [*(start for _, start in groups[1:]), shard.bucket.size]
    for (group, start), end in zip(groups, ends, strict=True):
        low, high = max(start, shard.start), min(end, shard.stop)
        if low < high:
            yield group, slice(low - shard.start, high - shard.start)
