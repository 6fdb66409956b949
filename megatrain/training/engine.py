"""The engine: model, buffers, optimizer and executor of one rank. Its `step` is one training iteration.

    micro-batches ─> executor: forward, backward, gradients of finished buckets reduced during the rest of backward
                  ─> gradient norm ─> optimizer, weights all-gathered during the next forward ─> StepReport

Every layout runs this step; parity checks it, the training loop repeats it.
"""

from __future__ import annotations

import contextlib
import functools
import math
from collections.abc import Callable, Sequence
from typing import Final

import torch
from torch import Tensor

from megatrain.config import Plan
from megatrain.kernels.fused.launching import enable_fused_kernels
from megatrain.optim.lr_schedule import Hyperparams
from megatrain.optim.sharded import num_zero_gradients, parameter_norm
from megatrain.parallel.batch import Batch, PassInfo
from megatrain.parallel.batches_ahead import with_batches_ahead
from megatrain.parallel.collectives import all_reduce
from megatrain.parallel.grid import RankGrid
from megatrain.parallel.initialize import InitialWeights
from megatrain.parallel.pipeline.executor import Executor
from megatrain.parallel.pipeline.graphed_passes import GraphedPasses
from megatrain.training.build import (
    build_attention_logits,
    build_buffers,
    build_data_parallel,
    build_executor,
    build_loss_scaler,
    build_model_from_plan,
    build_optimizer,
    build_pipeline,
    build_training_passes,
)
from megatrain.training.losses import Losses, loss_names, losses_of, mean_indexer_loss
from megatrain.training.routers import Routers
from megatrain.training.step_report import PendingStep, StepMetrics, StepReport
from megatrain.training.stragglers import ComputeTimes
from megatrain.training.timers import Timers

MORE_MEMORY: Final = "was computed again with more memory for experts: a rank's load was above --moe-expert-rank-capacity-factor"


class Engine:
    """Everything that one rank computes with.

    Args:
        plan: the resolved configuration.
        grid: this rank's process groups.
        device: of weights, gradients and activations.
    """

    def __init__(self, plan: Plan, grid: RankGrid, device: torch.device) -> None:
        self.plan, self.grid, self.device = plan, grid, device
        is_timed = plan.config.logging.log_straggler
        self.compute_times = ComputeTimes(device) if is_timed else None
        self.timers = Timers(plan.config.logging.timing_log_level, device)
        enable_fused_kernels(are_enabled=plan.config.training.compile)
        self.model = build_model_from_plan(plan, grid, device)
        self.loss_names, self.num_depths = loss_names(self.model), self.model.spec.num_depths
        self.buffers = build_buffers(plan, self.model, grid, device)
        self.data_parallel = build_data_parallel(plan, self.buffers, grid)
        self.optimizer = build_optimizer(plan, self.data_parallel, grid)
        self.loss_scaler = build_loss_scaler(plan)
        self.spike_limits = (math.inf, math.inf)
        """With --on-spike skip or --rerun-mode, a step whose loss or gradient norm is not below these updates nothing."""
        self.routers = Routers(self.model, grid, device)
        self.attention_logits = build_attention_logits(plan, self.model, self.optimizer, grid, device)
        self.pipeline = build_pipeline(plan)
        self.executor = build_executor(plan, self.model, self.data_parallel, grid, device, Executor)
        self.news: list[str] = []
        """Events of steps, for the log: each is a predicate of `iteration N`."""
        self.training_passes = build_training_passes(
            plan, self.model, self.executor, self.data_parallel, grid, device, self.news.append
        )
        self._were_finite: Tensor | None = None
        """bool []: all steps so far were finite; None before the first, or where the loss scaler may skip steps."""

    def initialize(self) -> None:
        """Draw the initial weights."""
        self.optimizer.fill("weight", InitialWeights(self.plan.config.training.seed))
        self.optimizer.sync_model_weights()

    @property
    def max_pending(self) -> int:
        """Maximum number of pending steps when another begins: 0 on a CPU, or if the next step depends on the report."""
        return int(self.device.type == "cuda" and not self._may_skip and self.timers.level <= 0)

    @property
    def _may_skip(self) -> bool:
        return self.loss_scaler.may_skip or self.plan.config.withholds_spikes

    def step(
        self, batches: Sequence[Batch], hyperparams: Hyperparams, *, first_sample: int = 0
    ) -> StepReport:
        """Run one optimizer step over this replica's micro-batches of the global batch that starts at `first_sample`."""
        return self.begin_step(batches, hyperparams, first_sample=first_sample).read()

    def begin_step(
        self,
        batches: Sequence[Batch],
        hyperparams: Hyperparams,
        *,
        first_sample: int = 0,
        flags: Callable[[], Sequence[int]] = tuple,
        before_update: Callable[[], None] = lambda: None,
    ) -> PendingStep:
        """Enqueue one optimizer step, like `step`, without waiting for its end. At most `max_pending` others may be pending.

        Args:
            flags: returns numbers of this rank, called at the end of the step; the report has the maximum over all ranks.
            before_update: called when all gradients are computed, and may raise an error on all ranks.
        """
        logging, scale = self.plan.config.logging, self.loss_scaler.scale
        with self.timers.span("forward-backward"):
            losses = self.accumulate_gradients(batches, first_sample=first_sample)
        before_update()
        with self.timers.span("optimizer-clip-main-grad"):
            norm = self.optimizer.gradient_norm() / scale
        num_zeros = num_zero_gradients(self.optimizer) if logging.log_num_zeros_in_grad else None
        may_update = self._may_update(norm, losses.lm_loss)
        logits = self.attention_logits
        largest_logit = None if logits is None else logits.finish_passes(may_update)
        if self.model.fp8 is not None:
            self.model.fp8.history.finish_step()
        with self.timers.span("optimizer"):
            self.optimizer.step(hyperparams, norm=norm, gradient_scale=scale, is_finite=may_update)
        router_metrics = self.routers.finish_step(may_update)
        self.buffers.gradients.zero()
        metrics = StepMetrics(
            losses=losses,
            grad_norm=norm,
            is_updated=may_update,
            num_zeros=num_zeros,
            params_norm=parameter_norm(self.optimizer) if logging.log_params_norm else None,
            max_attention_logit=largest_logit,
            routers=router_metrics,
            flags=self._maximum_over_ranks(flags()),
        )
        return PendingStep(metrics, functools.partial(self._report, scale))

    def _may_update(self, norm: Tensor, lm_loss: Tensor) -> Tensor:
        """Return bool [] on the device: the step is finite, no spike that is skipped, and may update."""
        is_finite = norm.isfinite() & lm_loss.isfinite()
        loss_limit, norm_limit = self.spike_limits
        if min(self.spike_limits) < math.inf:
            is_finite &= (lm_loss < loss_limit) & (norm < norm_limit)
        if self._may_skip:  # else the run ends: steps that begin before the host knows it update nothing
            return is_finite
        self._were_finite = is_finite if self._were_finite is None else is_finite & self._were_finite
        return self._were_finite

    def _maximum_over_ranks(self, flags: Sequence[int]) -> Tensor | None:
        """Return the maximum of each flag over all ranks. Only flags that are not 0 are copied to the device."""
        if not flags:
            return None
        numbers = torch.zeros(len(flags), device=self.device)
        for index, flag in enumerate(flags):
            if flag:
                numbers[index] = flag
        return all_reduce(numbers, self.grid.world, "max")

    def forget_steps(self) -> None:
        """Forget the steps before a checkpoint that was loaded."""
        self._were_finite = None

    def _report(self, scale: float, metrics: StepMetrics) -> StepReport:
        """Return the report of a step with this loss scale, and update the host's state: loss scale and step count."""
        routers = None if metrics.routers is None else self.routers.report(metrics.routers)
        report = StepReport.of(metrics, loss_scale=scale, routers=routers)
        self.optimizer.step_count -= not report.is_updated
        self.loss_scaler.update(is_finite=report.is_finite)
        return report

    def accumulate_gradients(self, batches: Sequence[Batch], *, first_sample: int = 0) -> Losses:
        """Run forward and backward of all micro-batches and reduce gradients over ranks; return the global batch's losses."""
        if self.num_depths:
            batches = [with_batches_ahead(batch, self.num_depths) for batch in batches]
        batches = self.shard_batches(batches)
        restore_history = None if self.model.fp8 is None else self.model.fp8.history.snapshot()
        while (infos := self._compute_gradients(batches, first_sample)) is None:
            self.news.append(MORE_MEMORY)
            self.buffers.gradients.zero()
            if self.attention_logits is not None:
                self.attention_logits.forget()
            if restore_history is not None:
                restore_history()
            if self.compute_times is not None:
                self.compute_times.forget_last()
            if isinstance(self.training_passes, GraphedPasses):
                self.training_passes.forget()
        self.routers.collect(infos)
        of_indexers = mean_indexer_loss(self.model.spec.num_trained_indexers, infos, self.grid, self.device)
        return losses_of(self.loss_names, self.sum_over_ranks(infos, self.loss_names), of_indexers)

    def _compute_gradients(self, batches: Sequence[Batch], first_sample: int) -> list[PassInfo] | None:
        """Run all passes and reduce gradients; return the infos of the passes, or None if experts lacked memory for tokens."""
        infos = self.pass_infos(batches, first_sample=first_sample)
        with self.compute_times or contextlib.nullcontext():
            self.training_passes.run(self.pipeline.training(self.grid.pp.rank, len(batches)), batches, infos)
        capacities = self.model.communication.capacities
        # First, so that gradients are reduced while the host waits for the result.
        check = None if capacities is None else capacities.begin_check(self.grid.world, self.device)
        self.data_parallel.finish_gradients()
        return None if check is not None and check() else infos

    def shard_batches(self, batches: Sequence[Batch]) -> list[Batch]:
        """Return this context-parallel rank's rows of its replica's micro-batches."""
        has_chunk_means = self.plan.config.parallel.context_parallel_chunk_means
        return [self.model.cp.shard_batch(batch, has_chunk_means=has_chunk_means) for batch in batches]

    def pass_infos(self, batches: Sequence[Batch], *, first_sample: int) -> list[PassInfo]:
        """Return the info of each micro-batch's pass. The global batch of these shards starts at `first_sample`."""
        micro, dp = self.plan.config.training.micro_batch_size, self.grid.dp
        scales = self._loss_scales(batches)
        return [
            PassInfo(
                microbatch=number,
                first_sample=(first_sample + (number * dp.size + dp.rank) * micro) * batch.pieces,
                pieces=batch.pieces,
                documents=batch.documents,
                is_token=batch.is_token,
                loss_scale=scale,
                router_loss_scale=router_scale,
            )
            for number, (batch, (scale, router_scale)) in enumerate(zip(batches, scales, strict=True))
        ]

    def _loss_scales(self, batches: Sequence[Batch]) -> list[tuple[float | Tensor, float | Tensor]]:
        """Return the factors on each micro-batch's mean loss and on its routers' losses: weights, times the loss scale.

        Plain sums over micro-batches and replicas then give the mean of the micro-batches' means or, with
        --calculate-per-token-loss, the mean over all tokens that the loss mask keeps. As in Megatron-LM, the weight of a
        micro-batch's routers is then the number of all its tokens, divided by the step's tokens that the loss mask keeps.
        """
        scale = self.loss_scaler.scale
        if not self.plan.config.training.calculate_per_token_loss:
            equal = scale / (len(batches) * self.grid.dp.size)
            return [(equal, equal)] * len(batches)
        has_head = self.pipeline.placement.has_head(self.grid.pp.rank)
        if not has_head and not self.routers.have_losses:
            return [(scale, scale)] * len(batches)  # only the head and routers read them
        factors = torch.zeros(len(batches), 2, dtype=torch.float64, device=self.device)
        if has_head:
            tokens = torch.stack([batch.loss_mask.sum(dtype=torch.float64) for batch in batches]).sum()
            total = all_reduce(tokens, self.grid.replicas).clamp(min=1)
            factors[:, 0] = torch.stack([batch.loss_denominator.double() for batch in batches])
            factors[:, 1] = torch.tensor([self.model.cp.num_tokens(batch) for batch in batches])
            factors *= scale / total
        if self.routers.have_losses:
            all_reduce(factors, self.grid.pp)
        return [(of_tokens, of_routers) for of_tokens, of_routers in map(Tensor.unbind, factors.unbind())]

    def sum_over_ranks(self, infos: Sequence[PassInfo], names: Sequence[str]) -> Tensor:
        """Return named sums over micro-batches and replicas, on all pipeline stages: fp64 [names]."""
        sums = torch.zeros(len(names), dtype=torch.float64, device=self.device)
        for info in infos:
            if info.sums:
                sums += torch.stack([info.sums[name].double() for name in names])
        return all_reduce(all_reduce(sums, self.grid.replicas), self.grid.pp)
