"""Iterations of a run: the report of each is read after the next one has begun, so that the device always has work.

    begin n ─> begin n + 1 ─> read n: not finite? spikes, log, reason to stop ─> begin n + 2 ─> read n + 1 ...

If the next iteration depends on this one (`Engine.max_pending`), or other work comes between them (`waits`), this one is read
first. `Progress` counts the iterations that are read.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Collection
from contextlib import AbstractContextManager
from functools import partial

from megatrain.config.derive.batch_sizes import batch_sizes
from megatrain.data.pieces import Batches
from megatrain.parallel.process_groups import limit_collectives
from megatrain.training.build import build_schedules
from megatrain.training.debugging.replicas import check_replicas
from megatrain.training.faults.responses import FaultResponses, scales_of
from megatrain.training.run_log import Iteration
from megatrain.training.training_run import TrainingRun

_SECONDS_TO_REPORT = 10.0
"""Time for a report of late ranks."""


class Iterations:
    """The iterations of one rank; all ranks make the same calls.

    Args:
        run: the run that has these iterations.
        batches: training data.
        passed_over: iterations that a rewind passes over, by number.
    """

    def __init__(self, run: TrainingRun, batches: Batches, *, passed_over: Collection[int]) -> None:
        self.ranks, self.plan, self.engine, self.batches = run.ranks, run.plan, run.engine, batches
        self.log, self.progress, self.saves, self.stop = run.log, run.progress, run.saves, run.stop
        config, data_parallel_size = run.plan.config, run.plan.derived.data_parallel_size
        self.schedules = build_schedules(run.plan)
        self.batch_sizes = batch_sizes(config, data_parallel_size=data_parallel_size)
        self.start, self.skipped = run.progress.iteration, frozenset(config.training.iterations_to_skip)
        self.passed_over = frozenset(passed_over)
        self.pending: deque[Iteration] = deque()
        """Iterations that have begun and are not read, oldest first."""
        self.faults = FaultResponses(
            run,
            batches,
            schedules=self.schedules,
            pending=self.pending,
            flags=self._flags,
            passed_over={*self.passed_over, *(count + 1 for count in self.skipped)},
        )

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
        progress.advance(self.batch_sizes.at(progress.consumed_train_samples), is_updated=False)
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
        hyperparams = self.schedules.at(self.progress.scheduled_samples + pending_samples)
        with self.engine.timers.span("batch-generator"):
            batches = self.batches.microbatches(consumed, self.batch_sizes.num_microbatches(consumed))
        first_results = self.faults.before_step(number, batches, first_sample=consumed)
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
        while self.engine.news:
            self.ranks.console.print(f"> iteration {number} {self.engine.news.pop(0)}")
        self.pending.append(
            Iteration(
                number=number,
                first_sample=consumed,
                batch=self.batch_sizes.at(consumed),
                hyperparams=hyperparams,
                batches=batches,
                step=step,
                restore_scales=restore_scales,
                first_results=first_results,
            )
        )

    def _read_oldest(self, *, is_first: bool) -> str | None:
        """Read and log the oldest iteration; return the reason to stop after it, or None."""
        iteration, progress = self.pending.popleft(), self.progress
        report, spikes = self.faults.read(iteration)
        if is_first:
            self.ranks.console.print(self.ranks.phases.start_summary())
            self._limit_waits(self.plan.derived.collective_timeout_seconds)
        progress.advance(iteration.batch, is_updated=report.is_updated)
        self.faults.respond(iteration, report, spikes)
        for sentence in () if report.routers is None else report.routers.starved:
            self.ranks.console.print(f"> WARNING: iteration {iteration.number}: {sentence}")
        self.log.log_iteration(
            iteration,
            report,
            consumed_samples=progress.consumed_train_samples,
            compute_seconds=None if self.engine.compute_times is None else self.engine.compute_times.take(),
            is_line_due=is_first or iteration.number >= self.plan.derived.train_iters,
        )
        *stop_flags, is_any_rank_writing = report.flags
        self.saves.commit_if_written(is_any_rank_writing=bool(is_any_rank_writing))
        return self.stop.reason(iteration.number, stop_flags)

    def _limit_waits(self, seconds: float) -> None:
        """Set the limits of training; a rank that makes no progress reports it before its collective fails."""
        if self.ranks.watch is not None:
            self.ranks.watch.heartbeat.begin_training(seconds)
        limit_collectives(self.ranks.grid, seconds=seconds + _SECONDS_TO_REPORT)

    def _flags(self) -> tuple[int, ...]:
        """Return what all ranks must know of this rank after a step."""
        return (*self.stop.flags(), int(self.saves.is_writing))
