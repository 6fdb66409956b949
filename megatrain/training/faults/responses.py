"""Responses of a run to steps that are not finite, spike or are rejected: explain, record, compute again, stop, skip or rewind.

before_step ─> the step runs ─> read ─> spikes? computed again, if --rerun-mode says so ─> respond: --on-nan, --on-spike
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Collection, Sequence
from pathlib import Path
from typing import NoReturn

from torch.profiler import record_function

from megatrain.data.pieces import Batches
from megatrain.optim.lr_schedule import HyperparamSchedules
from megatrain.parallel.batch import Batch
from megatrain.training.debugging.not_finite import Explanation, explain
from megatrain.training.debugging.trace_summary import REPORT
from megatrain.training.engine import Engine
from megatrain.training.faults.bad_steps import (
    FILE_NAME,
    BadStep,
    NotFiniteError,
    RewindError,
    SpikeError,
    record_bad_step,
)
from megatrain.training.faults.reruns import Reruns, recompute
from megatrain.training.run_log import Iteration
from megatrain.training.step_report import StepReport
from megatrain.training.training_run import TrainingRun

REFERENCE_STEPS, FACTOR = 100, 10.0
"""Steps after a start whose largest value is recorded, and the multiple of it that is a spike. The numbers are Megatron-LM's."""
_SAME_SPIKE = 0.01
"""Relative difference of two computations of a spike with the same cause: without --deterministic-mode their sums differ in order."""
_MOST_EXPLANATIONS = 10
"""Searches for the source of values that are not finite, with --on-nan skip; each repeats a step."""


class FaultResponses:
    """The responses of one rank; all ranks make the same calls.

    Args:
        run: its progress returns to the iteration before a rejected one.
        batches: training data, which knows the documents of a sample.
        schedules: hyperparameters of a spike that is updated after all.
        pending: iterations that have begun and are not read.
        flags: returns what all ranks must know of this rank after a step.
        passed_over: iterations that are not computed.
    """

    def __init__(
        self,
        run: TrainingRun,
        batches: Batches,
        *,
        schedules: HyperparamSchedules,
        pending: deque[Iteration],
        flags: Callable[[], tuple[int, ...]],
        passed_over: Collection[int],
    ) -> None:
        self.ranks, self.plan, self.engine, self.batches = run.ranks, run.plan, run.engine, batches
        self.log, self.progress, self.saves = run.log, run.progress, run.saves
        self.schedules, self.pending, self.flags = schedules, pending, flags
        training, save = run.plan.config.training, run.plan.config.checkpoint.save
        self.spikes = {"grad_norm": SpikeDetector("gradient norm")} if training.check_for_large_grads else {}
        self.spikes |= {"lm_loss": SpikeDetector("lm loss")} if training.check_for_spiky_loss else {}
        self.save = None if save is None else Path(save)
        self.reruns = Reruns(
            run.ranks,
            run.plan.config.resilience,
            seed=training.seed,
            save=self.save,
            start=run.progress.iteration,
            passed_over=passed_over,
        )
        self.num_explained = 0
        self.has_accepted = False
        """An iteration of this start was read and not rejected."""

    def before_step(
        self, number: int, batches: Sequence[Batch], *, first_sample: int
    ) -> dict[str, float] | None:
        """Set the limits above which a step updates nothing; return its first results, with --rerun-mode report_stats."""
        if self.plan.config.withholds_spikes:
            limits = {name: detector.limit for name, detector in self.spikes.items()}
            self.engine.spike_limits = limits.get("lm_loss", math.inf), limits.get("grad_norm", math.inf)
        first_results = None
        if self.reruns.reports:
            first_results = recompute(self.engine, batches, first_sample=first_sample)
        if self.reruns.injects(number):
            self.engine.spike_limits = -math.inf, -math.inf
        return first_results

    def read(self, iteration: Iteration) -> tuple[StepReport, list[str]]:
        """Read an iteration; return its report and a sentence for each spike. `progress` is before it.

        Raises:
            RejectedResultError: a spike is another one when it is computed again.
        """
        with record_function(REPORT):
            report = iteration.step.read()
        found = (detector.check(getattr(report, name)) for name, detector in self.spikes.items())
        spikes = [spike for spike in found if spike is not None]
        if spikes and self.reruns.validates and not self.reruns.injects(iteration.number):
            report = self._compute_spike_again(iteration, report, spikes[0])
        return report, spikes

    def respond(self, iteration: Iteration, report: StepReport, spikes: Sequence[str]) -> None:
        """Act on an iteration that is not finite, rejected or a spike. `progress` includes it.

        Raises:
            NotFiniteError: the run stops or rewinds.
        """
        if not report.is_finite:
            self._respond_to_nan(iteration, report)
        elif self.reruns.injects(iteration.number):
            self._validate(iteration)
        self.reruns.check_accepted(iteration.number)
        self._report_differences(iteration, report)
        for spike in spikes:
            self._respond_to_spike(iteration, report, spike)
        self.has_accepted = True

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
            iteration.batches, hyperparams, first_sample=first_sample, flags=self.flags
        ).read()

    def _save_before_diagnosis(self) -> None:
        """Save the iteration before a rejected one, if the run has trained any."""
        if self.save is not None and self.has_accepted:
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
        if self.save is not None and self.ranks.is_main:
            warning = record_bad_step(self.save, step, " ".join(policy), self.batches)
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


class SpikeDetector:
    """Detector of spikes in one value, which can come from bad data or bad hardware. `name`: its name in the report.

    The largest value of the first steps after a start is recorded; a later value is a spike from a multiple of it on.
    """

    def __init__(self, name: str) -> None:
        self.name = name
        self.largest = 0.0
        self._num_seen = 0

    @property
    def limit(self) -> float:
        """The smallest value that is a spike; infinite during the first steps."""
        return FACTOR * self.largest if self._num_seen >= REFERENCE_STEPS else math.inf

    def check(self, value: float) -> str | None:
        """Return a sentence if the value of this step is a spike. Values that are not finite are ignored."""
        if not math.isfinite(value):
            return None
        if self._num_seen < REFERENCE_STEPS:
            self._num_seen += 1
            self.largest = max(self.largest, abs(value))
            return None
        if abs(value) < self.limit:
            return None
        return (
            f"{self.name} {value:.6g} is more than {FACTOR:.0f} times the largest of the first {REFERENCE_STEPS} steps,"
            f" {self.largest:.6g}"
        )
