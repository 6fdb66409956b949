"""Times of linear layers on one rank: GEMMs, and the casts of GEMMs in FP8.

    bf16   y = x W^T, dx = dy W, dW += dy^T x
    FP8    the same GEMMs of codes, and kernels that read values and write codes (parallel/fp8/)

A cast reads 2 bytes of a value and writes 1 for each order of codes. Inputs are cast in both passes, since norms and
activations are recomputed; gradients of outputs once, in both orders; weights once a step, and transposed in each backward
pass.
"""

from __future__ import annotations

import operator
from dataclasses import dataclass
from typing import Literal

from megatrain.config.schema.tree import Config
from megatrain.tools.plan.hardware import Cluster
from megatrain.tools.plan.layouts import Layout
from megatrain.tools.plan.network import Group

_ONE_ORDER, _BOTH_ORDERS, _READ, _TRANSPOSED = 3, 4, 2, 2
"""Bytes of an element: casts, a pass for its largest value, and a transposed copy of its code."""


@dataclass(frozen=True)
class Times:
    """Seconds of the passes of one micro-batch through a part of the model."""

    forward: float = 0.0
    backward: float = 0.0
    """Gradients of the inputs, with what is recomputed for them."""
    weight: float = 0.0
    """Weight gradients."""
    sends: float = 0.0
    """Part of both passes in which rows are sent, which a forward and a backward pass that run together overlap."""
    exposed_sends: float = 0.0
    """Cost of overlapped sends all the same, as they share SMs and memory."""

    def __add__(self, other: Times) -> Times:
        return Times(*map(operator.add, vars(self).values(), vars(other).values()))

    def __mul__(self, count: float) -> Times:
        return Times(*(seconds * count for seconds in vars(self).values()))

    @property
    def total(self) -> float:
        return self.forward + self.backward + self.weight

    @property
    def together(self) -> float:
        """Seconds of a forward pass that runs together with a backward pass of another micro-batch: the longer of computing and sends."""
        computing = self.total - self.sends
        return max(computing + self.exposed_sends, self.sends)


@dataclass(frozen=True)
class Fp8:
    """FP8 GEMMs in a layout."""

    recipe: Literal["delayed", "tensorwise", "blockwise", "mxfp8"]
    has_fp8_wgrad: bool
    casts_per_weight: float
    """Casts of a weight for a micro-batch: one a step, if ranks keep codes."""
    gather_size: int
    """Tensor ranks that gather the rows of inputs and gradients as codes."""
    scale_group: Group
    """Ranks that reduce the largest values of `tensorwise`."""

    @classmethod
    def of(cls, config: Config, layout: Layout, cluster: Cluster) -> Fp8 | None:
        """Return the GEMMs of a run with a layout; None: it has none in FP8."""
        precision = config.precision
        if precision.fp8_format is None:
            return None
        count = layout.num_microbatches(config.training.global_batch_size or layout.dp * layout.micro_batch)
        keeps_weights = layout.sharding != "optim_grads_params"
        gathers_codes = layout.sequence_parallel and precision.fp8_recipe in ("delayed", "tensorwise")
        return cls(
            precision.fp8_recipe,
            precision.fp8_wgrad,
            1 / max(count, 1) if keeps_weights else 1.0,
            layout.tp if gathers_codes else 1,
            Group(cluster, layout.tp * layout.cp),
        )

    @property
    def has_blocks(self) -> bool:
        return self.recipe in ("blockwise", "mxfp8")


@dataclass(frozen=True)
class Gemm:
    """A linear layer on one rank: rows [t, inputs] -> [t, outputs], or one for each of several experts."""

    rows: float
    """Rows of all experts."""
    outputs: float
    inputs: float
    num_experts: int = 0
    """Experts of a grouped GEMM; 0: a plain one."""
    is_row_parallel: bool = False

    @property
    def weights(self) -> float:
        return self.outputs * self.inputs * max(self.num_experts, 1)

    def times(self, cluster: Cluster, fp8: Fp8 | None = None) -> Times:
        """Return the times; a weight gradient is also added to its fp32 sum, which half hides in the GEMM."""
        rates = cluster.rates
        gradients = cluster.memory_seconds(4 * self.weights)
        bf16 = self._seconds(cluster, rates.gemms)
        if fp8 is None:
            return Times(bf16, bf16, bf16 + gradients)
        if self.num_experts:
            return self._experts_in_fp8(cluster, fp8) + Times(weight=bf16 + gradients)
        fast, exact = rates.fp8_gemms, rates.fp8_exact_gemms
        if fp8.recipe == "blockwise":
            fast = exact = rates.fp8_block_gemms
            added = 1 - min(fp8.casts_per_weight, 1.0)  # all micro-batches but the first
            gradients += cluster.memory_seconds(12 * self.weights * added)
        weight = self._seconds(cluster, exact) if fp8.has_fp8_wgrad else bf16
        gemms = Times(self._seconds(cluster, fast), self._seconds(cluster, exact), weight + gradients)
        return gemms + self._casts(cluster, fp8) + self._amaxes(cluster, fp8)

    def _seconds(self, cluster: Cluster, fraction: float) -> float:
        """Return the seconds of one GEMM at a fraction of the peak."""
        rates = cluster.rates
        rate = cluster.compute_rate(fraction)
        if self.num_experts:
            per_expert = self.rows / self.num_experts
            rate *= per_expert / (per_expert + rates.grouped_rows * max(fraction / rates.gemms, 1.0))
        return 2 * self.rows * self.outputs * self.inputs / rate + rates.gemm_seconds

    def _casts(self, cluster: Cluster, fp8: Fp8) -> Times:
        """Return the times of casts of inputs, weights and gradients of outputs."""
        x, dy, w, size = self.rows * self.inputs, self.rows * self.outputs, self.weights, fp8.gather_size
        columns = _ONE_ORDER if fp8.has_fp8_wgrad else 0
        forward, backward = _ONE_ORDER * x, columns * x
        of_gradient = (_BOTH_ORDERS if fp8.has_fp8_wgrad else _ONE_ORDER) * dy
        if size > 1:  # a rank casts its rows, and transposes the codes that it gathered
            if self.is_row_parallel:
                of_gradient = _ONE_ORDER * dy / size + _TRANSPOSED * dy
            else:
                forward, backward = forward / size, backward / size + _TRANSPOSED * x
        if fp8.has_blocks:
            weights = _BOTH_ORDERS * w * fp8.casts_per_weight
            transposes = 0.0
        else:
            weights, transposes = _ONE_ORDER * w * fp8.casts_per_weight, _TRANSPOSED * w
        return Times(
            cluster.cast_seconds(forward + weights), cluster.cast_seconds(backward + of_gradient + transposes)
        )

    def _amaxes(self, cluster: Cluster, fp8: Fp8) -> Times:
        """Return the times of the largest values of `tensorwise`, for each tensor a pass of its own."""
        if fp8.recipe != "tensorwise":
            return Times()
        size, reduction = fp8.gather_size, fp8.scale_group.all_reduce(4)
        x = self.rows * self.inputs / (1 if self.is_row_parallel else size)
        dy = self.rows * self.outputs / (size if self.is_row_parallel else 1)
        weights = self.weights * fp8.casts_per_weight
        return Times(
            cluster.cast_seconds(_READ * (x + weights)) + reduction,
            cluster.cast_seconds(_READ * dy) + reduction,
        )

    def _experts_in_fp8(self, cluster: Cluster, fp8: Fp8) -> Times:
        """Return the times of both GEMMs of experts with a scale per row; weight gradients are in bf16."""
        rates = cluster.rates
        weights = (_ONE_ORDER + 2 * _READ + _ONE_ORDER) * self.weights * fp8.casts_per_weight
        x, dy = _ONE_ORDER * self.rows * self.inputs, _ONE_ORDER * self.rows * self.outputs
        return Times(
            self._seconds(cluster, rates.fp8_gemms) + cluster.cast_seconds(x + weights),
            self._seconds(cluster, rates.fp8_exact_gemms) + cluster.cast_seconds(dy),
        )
