"""The iterations of a run: each is begun, and read where the device has work without the host.

    begin n ─> begin n + 1 ─> read n: not finite? spikes, log, why to stop ─> begin n + 2 ─> read n + 1 ...

Where the next iteration depends on how this one was, or something comes between them, this one is read first
(`Engine.max_pending`, `waits`). What is counted, `Progress`, is what was read.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass

from megatrain.config import Plan
from megatrain.config.derive.batch_sizes import batch_sizes
from megatrain.config.errors import MegatrainError
from megatrain.parallel.batch import Batch
from megatrain.parallel.process_groups import limit_collectives
from megatrain.training.batches import Batches
from megatrain.training.build import build_schedules
from megatrain.training.debugging.not_finite import explain
from megatrain.training.debugging.spikes import SpikeDetector
from megatrain.training.engine import Engine
from megatrain.training.launch.ranks import Ranks
from megatrain.training.logging.run_log import RunLog
from megatrain.training.progress import Progress
from megatrain.training.step_report import PendingStep, StepReport
from megatrain.training.stopping import StopRequest


class NotFiniteError(MegatrainError):
    """A loss or a gradient norm that is infinite or no number, on all ranks alike."""


@dataclass(frozen=True, kw_only=True)
class Iteration:
    """One that is under way."""

    number: int
    first_sample: int
    batch: int
    """Samples."""
    lr: float
    batches: Sequence[Batch]
    step: PendingStep


class Iterations:
    """What one rank does in each iteration; all ranks do it alike.

    Args:
        ranks: this process among its peers.
        plan: what is run.
        engine: which computes.
        batches: of the training data.
        log: which shows iterations.
        progress: where to begin; kept up to date.
        stop: what may ask for the end.
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
    ) -> None:
        self.ranks, self.plan, self.engine = ranks, plan, engine
        self.batches, self.log, self.progress, self.stop = batches, log, progress, stop
        self.schedules = build_schedules(plan)
        self.batch_sizes = batch_sizes(plan.config, data_parallel_size=plan.derived.data_parallel_size)
        training = plan.config.training
        self.spikes = {"grad_norm": SpikeDetector("gradient norm")} if training.check_for_large_grads else {}
        self.spikes |= {"lm_loss": SpikeDetector("lm loss")} if training.check_for_spiky_loss else {}
        self.start = progress.iteration
        self.pending: deque[Iteration] = deque()
        """Begun and not read."""

    @property
    def next_number(self) -> int:
        """Of the iteration that is begun next."""
        return self.progress.iteration + len(self.pending) + 1

    def run_next(self, *, waits: bool) -> str | None:
        """Begin an iteration, and read those that are due; why to stop, if any says so: then all are read.

        Args:
            waits: whether all are read, as is the first of a run. Alike on all ranks.

        Raises:
            NotFiniteError: an iteration was not finite, and is not to be skipped.
        """
        number, reason = self.next_number, None
        is_first = number == self.start + 1
        with self._watched(number, is_first=is_first):
            self._begin(number)
            while len(self.pending) > (0 if waits or is_first or reason else self.engine.max_pending):
                reason = self._read_oldest(is_first=is_first) or reason
        return reason

    def _watched(self, number: int, *, is_first: bool) -> AbstractContextManager[None]:
        """An iteration that lasts much longer than those before may hang: that shall be seen."""
        if is_first:
            return self.ranks.phases.phase("the first iteration")
        patience = 5 * self.log.seconds_of_last_iteration
        return self.ranks.phases.heartbeat(f"iteration {number}", min_seconds=patience)

    def _begin(self, number: int) -> None:
        """Give the device an iteration's work. Those under way are finite, or else end the run."""
        ahead = sum(iteration.batch for iteration in self.pending)
        consumed = self.progress.consumed_train_samples + ahead
        hyperparams = self.schedules.at(self.progress.scheduled_samples + ahead)
        with self.engine.timers.span("batch-generator"):
            batches = self.batches.microbatches(consumed, self.batch_sizes.num_microbatches(consumed))
        step = self.engine.begin_step(batches, hyperparams, first_sample=consumed, flags=self.stop.flags)
        self.pending.append(
            Iteration(
                number=number,
                first_sample=consumed,
                batch=self.batch_sizes.at(consumed),
                lr=hyperparams.lr,
                batches=batches,
                step=step,
            )
        )

    def _read_oldest(self, *, is_first: bool) -> str | None:
        """Take in what an iteration did, and show it; why to stop after it, if so."""
        iteration, progress = self.pending.popleft(), self.progress
        report = iteration.step.read()
        if is_first:
            self.ranks.console.print(self.ranks.phases.start_summary())
            limit_collectives(self.ranks.grid, seconds=self.plan.derived.collective_timeout_seconds)
        progress.iteration = iteration.number
        progress.consumed_train_samples += iteration.batch
        if report.is_finite:
            progress.scheduled_samples += iteration.batch
        elif not self.engine.loss_scaler.skips(report.lm_loss):
            raise self._not_finite(iteration, report)
        for spike in (detector.check(getattr(report, name)) for name, detector in self.spikes.items()):
            if spike is not None:
                self.ranks.console.print(f"> iteration {iteration.number}: {spike}")
        for sentence in () if report.routers is None else report.routers.starved:
            self.ranks.console.print(f"> WARNING: iteration {iteration.number}: {sentence}")
        self.log.log_iteration(
            report,
            end=iteration.step.end,
            iteration=iteration.number,
            consumed_samples=progress.consumed_train_samples,
            batch=iteration.batch,
            lr=iteration.lr,
            is_line_due=is_first or iteration.number >= self.plan.derived.train_iters,
        )
        return self.stop.reason(iteration.number, report.flags)

    def _not_finite(self, iteration: Iteration, report: StepReport) -> NotFiniteError:
        """With the place where it began. No step after it has changed a weight, so that it can be computed again."""
        where, fix = explain(self.engine, iteration.batches, first_sample=iteration.first_sample)
        stuck = self.engine.loss_scaler.stuck_steps
        if stuck > 1:
            where = (
                f"the last of {stuck} such steps in a row with a loss scale of {report.loss_scale:g}; {where}"
            )
            if self.plan.config.precision.loss_scale is not None:
                fix = f"use a smaller --loss-scale, or none, with which it adapts itself; {fix}"
        return NotFiniteError(
            f"iteration {iteration.number}: lm loss is {report.lm_loss}, gradient norm {report.grad_norm}; {where}",
            fix=fix,
        )
