"""Iterations of a run: the report of each is read after the next one has begun, so that the device always has work.

    begin n ─> begin n + 1 ─> read n: not finite? spikes, log, reason to stop ─> begin n + 2 ─> read n + 1 ...

If the next iteration depends on this one (`Engine.max_pending`), or other work comes between them (`waits`), this one is read
first. `Progress` counts the iterations that are read.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Collection, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import NoReturn

from megatrain.config import Plan
from megatrain.config.derive.batch_sizes import batch_sizes
from megatrain.parallel.batch import Batch
from megatrain.parallel.process_groups import limit_collectives
from megatrain.training.batches import Batches
from megatrain.training.build import build_schedules
from megatrain.training.debugging.not_finite import Explanation, explain
from megatrain.training.debugging.replicas import check_replicas
from megatrain.training.debugging.spikes import SpikeDetector
from megatrain.training.engine import Engine
from megatrain.training.faults.bad_steps import (
    FILE_NAME,
    BadStep,
    BadStepLog,
    NotFiniteError,
    RewindError,
    SpikeError,
)
from megatrain.training.faults.reruns import Reruns, recompute
from megatrain.training.launch.ranks import Ranks
from megatrain.training.progress import Progress
from megatrain.training.run_log import RunLog
from megatrain.training.saving import RunSaves
from megatrain.training.step_report import PendingStep, StepReport
from megatrain.training.stopping import StopRequest

_SAME_SPIKE = 0.01
"""Relative difference of two computations of a spike with the same cause: without --deterministic-mode their sums differ in order."""
_MOST_EXPLANATIONS = 10
"""Searches for the source of values that are not finite, with --on-nan skip; each repeats a step."""
_SECONDS_TO_REPORT = 10.0
"""Time for a report of late ranks."""


@dataclass(frozen=True, kw_only=True)
class Iteration:
    """A pending iteration."""

    number: int
    first_sample: int
    batch: int
    """Samples of the global batch."""
    lr: float
    batches: Sequence[Batch]
    step: PendingStep
    restore_scales: Callable[[], None]
    """Restores the scales before the iteration, to compute it again."""
    first_results: dict[str, float] | None = None
    """Loss and gradient norm of the first computation, with --rerun-mode report_stats."""


class Iterations:
    """The iterations of one rank; all ranks make the same calls.

    Args:
        ranks: this process among its peers.
        plan: the resolved configuration.
        engine: runs the steps.
        batches: training data.
        log: logs each iteration.
        progress: position of the run; updated.
        stop: stop requests of this rank.
        saves: saves of the run; those in the background are committed after a step.
        passed_over: iterations that a rewind passes over, by number.
    """

    def __init__(
        self,
        ranks: Ranks,
        plan: Plan,
        engine: Engine,
        batches: Batches,
        *,
        log: RunLog,
        progress: Progress,
        stop: StopRequest,
        saves: RunSaves,
        passed_over: Collection[int] = (),
    ) -> None:
        self.ranks, self.plan, self.engine = ranks, plan, engine
        self.batches, self.log, self.progress = batches, log, progress
        self.stop, self.saves = stop, saves
        self.schedules = build_schedules(plan)
        self.batch_sizes = batch_sizes(plan.config, data_parallel_size=plan.derived.data_parallel_size)
        training = plan.config.training
        self.spikes = {"grad_norm": SpikeDetector("gradient norm")} if training.check_for_large_grads else {}
        self.spikes |= {"lm_loss": SpikeDetector("lm loss")} if training.check_for_spiky_loss else {}
        self.start, self.skipped = progress.iteration, frozenset(training.iterations_to_skip)
        self.passed_over = frozenset(passed_over)
        save = plan.config.checkpoint.save
        self.bad_steps = BadStepLog(Path(save) if save and ranks.is_main else None, batches)
        self.save = None if save is None else Path(save)
        self.reruns = Reruns(
            ranks,
            plan.config.resilience,
            seed=training.seed,
            save=self.save,
            start=progress.iteration,
            passed_over={*self.passed_over, *(count + 1 for count in self.skipped)},
        )
        self.num_explained = 0
        self.pending: deque[Iteration] = deque()
        """Iterations that have begun and are not read, oldest first."""

    @property
    def next_number(self) -> int:
        """Number of the iteration that begins next."""
        return self.progress.iteration + len(self.pending) + 1

    def run_next(self, *, waits: bool) -> str | None:
        """Begin an iteration and read older ones; return the reason to stop, with all iterations read, or None.

        Args:
            waits: read all iterations, as after the first one of a run. Equal on all ranks.

        Raises:
            NotFiniteError: an iteration is not finite and may not be skipped.
        """
        number, reason = self.next_number, None
        if number - 1 in self.skipped or number in self.passed_over:
            return self._skip(number)
        is_first = number == self.start + 1
        with self._heartbeat(number, is_first=is_first):
            self._begin(number)
            while len(self.pending) > (0 if waits or is_first or reason else self.engine.max_pending):
                reason = self._read_oldest(is_first=is_first) or reason
        return reason

    def _skip(self, number: int) -> str | None:
        """Pass over an iteration (--iterations-to-skip): its samples count as consumed, and the schedules stay where they are."""
        while self.pending:
            reason = self._read_oldest(is_first=False)
            if reason is not None:
                return reason
        progress = self.progress
        if number == self.start + 1:
            self.start = number
        progress.iteration = number
        progress.consumed_train_samples += self.batch_sizes.at(progress.consumed_train_samples)
        reason = "rewind" if number in self.passed_over else f"--iterations-to-skip {number - 1}"
        self.ranks.console.print(f"> iteration {number} is skipped ({reason})")
        return self.stop.reason(number, (0,) * len(self.stop.flags()))

    def _heartbeat(self, number: int, *, is_first: bool) -> AbstractContextManager[None]:
        """Print heartbeats during an iteration that takes much longer than the last one: it may hang."""
        if is_first:
            return self.ranks.phases.phase("the first iteration")
        min_seconds = 5 * self.log.seconds_of_last_iteration
        return self.ranks.phases.heartbeat(f"iteration {number}", min_seconds=min_seconds)

    def _begin(self, number: int) -> None:
        """Enqueue an iteration on the assumption that pending ones are finite: otherwise the run stops."""
        if self.ranks.watch is not None:
            self.ranks.watch.heartbeat.iteration = number
        pending_samples = sum(iteration.batch for iteration in self.pending)
        consumed = self.progress.consumed_train_samples + pending_samples
        if self.plan.config.withholds_spikes:
            limits = {name: detector.limit for name, detector in self.spikes.items()}
            self.engine.spike_limits = limits.get("lm_loss", math.inf), limits.get("grad_norm", math.inf)
        hyperparams = self.schedules.at(self.progress.scheduled_samples + pending_samples)
        with self.engine.timers.span("batch-generator"):
            batches = self.batches.microbatches(consumed, self.batch_sizes.num_microbatches(consumed))
        first_results = None
        if self.reruns.reports:
            first_results = recompute(self.engine, batches, first_sample=consumed)
        if self.reruns.injects(number):
            self.engine.spike_limits = -math.inf, -math.inf
        restore_scales = scales_of(self.engine)
        interval = self.plan.config.training.check_weight_hash_across_dp_replicas_interval
        is_checked = interval is not None and number % interval == 0
        step = self.engine.begin_step(
            batches,
            hyperparams,
            first_sample=consumed,
            flags=self._flags,
            # The update replaces weights by the shards of other ranks, and with them a bit that flipped here.
            before_update=partial(check_replicas, self.engine, number) if is_checked else lambda: None,
        )
        self.pending.append(
            Iteration(
                number=number,
                first_sample=consumed,
                batch=self.batch_sizes.at(consumed),
                lr=hyperparams.lr,
                batches=batches,
                step=step,
                restore_scales=restore_scales,
                first_results=first_results,
            )
        )

    def _read_oldest(self, *, is_first: bool) -> str | None:
        """Read and log the oldest iteration; return the reason to stop after it, or None."""
        iteration, progress = self.pending.popleft(), self.progress
        report = iteration.step.read()
        found = (detector.check(getattr(report, name)) for name, detector in self.spikes.items())
        spikes = [spike for spike in found if spike is not None]
        if spikes and self.reruns.validates and not self.reruns.injects(iteration.number):
            report = self._compute_spike_again(iteration, report, spikes[0])
        if is_first:
            self.ranks.console.print(self.ranks.phases.start_summary())
            self._limit_waits(self.plan.derived.collective_timeout_seconds)
        progress.iteration = iteration.number
        progress.consumed_train_samples += iteration.batch
        if report.is_updated:
            progress.scheduled_samples += iteration.batch
        if not report.is_finite:
            self._respond_to_nan(iteration, report)
        elif self.reruns.injects(iteration.number):
            self._validate(iteration)
        self.reruns.check_accepted(iteration.number)
        self._report_differences(iteration, report)
        for spike in spikes:
            self._respond_to_spike(iteration, report, spike)
        for sentence in () if report.routers is None else report.routers.starved:
            self.ranks.console.print(f"> WARNING: iteration {iteration.number}: {sentence}")
        self.log.log_iteration(
            report,
            end=iteration.step.end,
            iteration=iteration.number,
            consumed_samples=progress.consumed_train_samples,
            batch=iteration.batch,
            lr=iteration.lr,
            compute_seconds=None if self.engine.compute_times is None else self.engine.compute_times.take(),
            is_line_due=is_first or iteration.number >= self.plan.derived.train_iters,
        )
        *stop_flags, is_any_rank_writing = report.flags
        self.saves.commit_if_written(is_any_rank_writing=bool(is_any_rank_writing))
        return self.stop.reason(iteration.number, stop_flags)

    def _limit_waits(self, seconds: float) -> None:
        """Set the limits of training; a rank that makes no progress reports it before its collective fails."""
        if self.ranks.watch is not None:
            self.ranks.watch.heartbeat.training_seconds = seconds
        limit_collectives(self.ranks.grid, seconds=seconds + _SECONDS_TO_REPORT)

    def _flags(self) -> tuple[int, ...]:
        """Return what all ranks must know of this rank after a step."""
        return (*self.stop.flags(), int(self.saves.is_writing))

    def _respond_to_nan(self, iteration: Iteration, report: StepReport) -> None:
        """Act on a step that is not finite, by --on-nan; a loss scaler that may recover comes first.

        Raises:
            NotFiniteError: the run stops or rewinds.
        """
        policy = self.plan.config.resilience.on_nan
        if not self.engine.loss_scaler.skips(report.lm_loss):
            error = self._not_finite(iteration, report)
            self._record("nan", iteration, report, error.problems[0].text, policy)
            if self.reruns.validates:
                self.ranks.console.print(f"> {error.problems[0].text}")
                self._validate(iteration)
            self._raise(error, iteration, policy)
        if policy == ("skip",) and self.num_explained < _MOST_EXPLANATIONS:
            self.num_explained += 1
            where = self._explain(iteration).where
            self._record("nan", iteration, report, where, policy)
            self.ranks.console.print(
                f"> iteration {iteration.number} is not finite and updates nothing: {where}"
            )

    def _validate(self, iteration: Iteration) -> NoReturn:
        """Compute a rejected step again, save the iteration before it, and raise the diagnosis. No later step has changed a weight."""
        while self.pending:
            self.pending.popleft().step.read()
        self.progress.iteration -= 1
        self.progress.consumed_train_samples -= iteration.batch
        first_sample = iteration.first_sample
        iteration.restore_scales()
        second = recompute(self.engine, iteration.batches, first_sample=first_sample)
        is_finite = all(map(math.isfinite, second.values()))
        is_rejected_again = self.reruns.is_rejected_again(iteration.number, is_finite=is_finite)
        culprits = () if is_finite else self._explain(iteration).ranks
        iteration.restore_scales()
        self._save_before_diagnosis()
        raise self.reruns.diagnose(iteration.number, is_rejected_again=is_rejected_again, culprits=culprits)

    def _compute_spike_again(self, iteration: Iteration, report: StepReport, spike: str) -> StepReport:
        """Compute a spike, which has updated nothing, again; with --on-spike warn, then make its update. `progress` is before it.

        Returns:
            The report of the step.

        Raises:
            RejectedResultError: the second computation has another result.
        """
        policy = self.plan.config.resilience.on_spike
        restore_later_scales = scales_of(self.engine)
        iteration.restore_scales()
        second = recompute(self.engine, iteration.batches, first_sample=iteration.first_sample)
        results = ((report.lm_loss, second["lm loss"]), (report.grad_norm, second["grad norm"]))
        if not all(math.isclose(*pair, rel_tol=_SAME_SPIKE) for pair in results):
            self._record("spike", iteration, report, spike, policy)
            self.ranks.console.print(f"> iteration {iteration.number}: {spike}")
            self._save_before_diagnosis()
            raise self.reruns.diagnose(iteration.number, is_rejected_again=False, culprits=())
        self.ranks.console.print(
            f"> iteration {iteration.number}: computed again on the same devices, the spike is the same:"
            " the data or the model is the cause, no device"
        )
        if policy != ("warn",):
            restore_later_scales()
            return report
        iteration.restore_scales()
        self.engine.spike_limits = math.inf, math.inf
        hyperparams = self.schedules.at(self.progress.scheduled_samples)
        first_sample = iteration.first_sample
        return self.engine.begin_step(
            iteration.batches, hyperparams, first_sample=first_sample, flags=self._flags
        ).read()

    def _save_before_diagnosis(self) -> None:
        """Save the iteration before a rejected one, if the run has trained any."""
        if self.save is not None and self.progress.iteration > self.start:
            self.log.flush()
            self.saves.save(self.save)

    def _report_differences(self, iteration: Iteration, report: StepReport) -> None:
        """With --rerun-mode report_stats, compare the two computations of a step."""
        if iteration.first_results is None:
            return
        second = {"lm loss": report.lm_loss, "grad norm": report.grad_norm}
        self.reruns.differences.add(iteration.first_results, second)
        if iteration.number % self.plan.config.logging.log_interval == 0:
            self.ranks.console.print(self.reruns.differences.take())

    def _respond_to_spike(self, iteration: Iteration, report: StepReport, spike: str) -> None:
        """Act on a spike, by --on-spike.

        Raises:
            NotFiniteError: the run stops or rewinds.
        """
        policy = self.plan.config.resilience.on_spike
        skipped = "; the step updates nothing" if policy == ("skip",) else ""
        self.ranks.console.print(f"> iteration {iteration.number}: {spike}{skipped}")
        if policy == ("warn",):
            return
        self._record("spike", iteration, report, spike, policy)
        if policy != ("skip",):
            fix = f"inspect the samples in {FILE_NAME}, and resume from the last checkpoint with --iterations-to-skip {iteration.number - 1}"
            self._raise(SpikeError(f"iteration {iteration.number}: {spike}", fix=fix), iteration, policy)

    def _raise(self, error: NotFiniteError, iteration: Iteration, policy: tuple[str, ...]) -> NoReturn:
        if policy[0] == "rewind":
            raise RewindError(error, iteration=iteration.number, distance=int(policy[1]))
        raise error

    def _record(
        self, kind: str, iteration: Iteration, report: StepReport, where: str, policy: tuple[str, ...]
    ) -> None:
        """Record the samples of a bad step."""
        step = BadStep(
            kind=kind,
            iteration=iteration.number,
            lm_loss=report.lm_loss,
            grad_norm=report.grad_norm,
            where=where,
            first_sample=iteration.first_sample,
            num_samples=iteration.batch,
        )
        warning = self.bad_steps.record(step, " ".join(policy))
        if warning is not None:
            self.ranks.console.print(warning)

    def _explain(self, iteration: Iteration) -> Explanation:
        """Compute an iteration that is not finite again, with its scales, to find the source; the present scales stay."""
        restore_later_scales = scales_of(self.engine)
        iteration.restore_scales()
        found = explain(self.engine, iteration.batches, first_sample=iteration.first_sample)
        restore_later_scales()
        return found

    def _not_finite(self, iteration: Iteration, report: StepReport) -> NotFiniteError:
        """Return the error with its cause. No later step has changed a weight, so that the step can be computed again."""
        found = self._explain(iteration)
        where, fix = found.where, found.fix
        stuck = self.engine.loss_scaler.stuck_steps
        if stuck > 1:
            where = (
                f"the last of {stuck} such steps in a row with a loss scale of {report.loss_scale:g}; {where}"
            )
            if self.plan.config.precision.loss_scale is not None:
                fix = f"use a smaller --loss-scale, or remove it for a dynamic scale; {fix}"
        return NotFiniteError(
            f"iteration {iteration.number}: lm loss is {report.lm_loss}, gradient norm {report.grad_norm}; {where}",
            fix=fix,
        )


def scales_of(engine: Engine) -> Callable[[], None]:
    """Return a function that restores the present loss scale and history of delayed FP8 scales."""
    loss_scale = engine.loss_scaler.state()
    history = None if engine.model.fp8 is None else engine.model.fp8.history.snapshot()

    def restore() -> None:
        engine.loss_scaler.restore(loss_scale)
        if history is not None:
            history()
            engine.data_parallel.all_gather_all_weights()  # --fp8-param-gather casts with these scales

    return restore
