"""The training loop around the engine's step.

    resume ─> [ batches ─> step ─> log ─> evaluate? ─> save? ─> stop? ] ... ─> save ─> last evaluation

On a GPU the report of a step is read while the next step runs, except where an evaluation, a save or a profile comes between.

Exit codes: 0 target reached; 1 the last save failed; 16, 17 see `faults/reruns.py`; 75 stopped before it, after a save if --save is set: the same command resumes the run.
"""

from __future__ import annotations

import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from megatrain.checkpoint.errors import CheckpointError
from megatrain.config import Request, render_plan, to_yaml
from megatrain.config.environment import read_environment
from megatrain.config.errors import ConfigError, MegatrainError
from megatrain.config.subjects.run import signal_number
from megatrain.parallel.pipeline.graphed_passes import GraphedPasses
from megatrain.process.signals import Signals
from megatrain.process.streams import output_failure
from megatrain.storage.files import describe_write_error, replace_file
from megatrain.training.batches import RunBatches, build_batches
from megatrain.training.callbacks import RunCallbacks
from megatrain.training.checkpoints import Progress, load_teacher, require_space, resume_run, rewind_run
from megatrain.training.debugging.profiling import Profiling
from megatrain.training.debugging.replicas import check_replicas
from megatrain.training.engine import Engine
from megatrain.training.evaluation import Evaluation
from megatrain.training.faults.bad_steps import MOST_REWINDS, NotFiniteError, RewindError
from megatrain.training.faults.reruns import RejectedResultError
from megatrain.training.garbage import GarbageCollection
from megatrain.training.iterations import Iterations
from megatrain.training.launch.out_of_memory import allocation_errors
from megatrain.training.launch.ranks import Ranks, join_store, joined_ranks
from megatrain.training.liveness.failure import exit_code_of
from megatrain.training.liveness.late_ranks import COLLECTIVES_FOLDER, write_collectives
from megatrain.training.logging.console import Console, Phases
from megatrain.training.logging.metrics_file import LogError
from megatrain.training.logging.status_file import StatusFile
from megatrain.training.planning.memory_check import check_memory
from megatrain.training.planning.model_summary import model_summary
from megatrain.training.run_log import RunLog
from megatrain.training.saving import RunSaves, SaveTimes
from megatrain.training.stopping import StopRequest
from megatrain.training.training_run import TrainingRun

if TYPE_CHECKING:
    from megatrain.training.restarts.member import Member

REACHED, FAILED, STOPPED_EARLY = 0, 1, 75


class Trainer:
    """One training run on one rank."""

    def __init__(self, ranks: Ranks) -> None:
        self.ranks, self.plan, self.phases = ranks, ranks.plan, ranks.phases
        config = ranks.plan.config
        self.progress = Progress()
        self.save_folder = Path(config.checkpoint.save) if config.checkpoint.save else None
        self._print(render_plan(self.plan))
        with self.phases.phase("building the model"):
            self.engine = Engine(self.plan, ranks.grid, ranks.device)
        self._print(model_summary(self.engine))
        self.garbage = GarbageCollection(
            is_manual=config.training.manual_gc,
            interval=config.training.manual_gc_interval,
            around_evaluation=config.training.manual_gc_eval,
        )
        self.callbacks = RunCallbacks(ranks)
        self.batches = RunBatches(None, ())
        self.log: RunLog | None = None
        self.passed_over = set[int]()
        """Iterations whose samples are skipped after a rewind."""
        self.last_save: dict[str, Any] | None = None
        """Size and times of the last save that was committed, as in `metrics.jsonl`."""
        self.status = StatusFile(
            self.save_folder if ranks.is_main else None,
            iteration=lambda: self.progress.iteration,
            last_save=lambda: self.last_save,
        )

    def resume(self) -> None:
        """Load the checkpoint of `--load`, or draw the initial weights."""
        self._print(require_space(self.ranks, self.plan, self.engine))
        self.plan = resume_run(self.ranks, self.engine, self.progress)
        self._print(load_teacher(self.ranks, self.engine))

    @cached_property
    def saves(self) -> RunSaves:
        """The saves of the run; used once it has resumed, if it resumes."""
        return RunSaves(self.ranks, self.plan, self.engine, self.progress, on_commit=self._record_save)

    def train(self) -> int:
        """Train up to the target or until a stop request; return the exit code.

        Raises:
            MegatrainError: the run cannot continue. `status.json` has its exit code, which is 1 from here on: other codes
                say that nothing was started.
        """
        self.open_data()
        self._open_outputs()
        self._record_signals()
        self.callbacks.call("on_start", self.progress.iteration)
        if self.ranks.watch is not None:
            self.ranks.watch.on_peer_failure = self.status.record_peer_failure
            self.ranks.watch.on_late_ranks = self._write_collectives
        try:
            with allocation_errors(
                self.plan,
                lambda: f"iteration {self.progress.iteration + 1}",
                planned_bytes=self.ranks.planned_bytes,
            ):
                exit_code, reason, log = self._train_with_rewinds()
            self._require_logs(log)
            if self.saves.failure is not None:
                exit_code, reason = FAILED, f"{reason}; the last save failed: {self.saves.failure}"
            self.callbacks.call("on_end", exit_code, reason)
        except BaseException as error:
            reason = f"{type(error).__name__}: {error}"
            if isinstance(error, MegatrainError):
                if not isinstance(error, RejectedResultError):
                    error.exit_code = 1
                is_on_all_ranks = isinstance(error, CheckpointError | LogError | NotFiniteError)
                error.is_reported = is_on_all_ranks and not self.ranks.is_main
                reason = error.problems[0].text
            self.status.record_end(exit_code_of(error), reason)
            raise
        finally:
            self._close()
        self.status.write(exit_code, reason)
        is_trained = not self.plan.config.training.only_evaluates
        is_lost = is_trained and not self._is_done and self.save_folder is None
        self._print(
            f"> ended at iteration {self.progress.iteration} of {self.plan.derived.train_iters}: {reason}"
            f"{'; nothing was saved: --save is not set' if is_lost else ''} (exit code {exit_code})"
        )
        return exit_code

    def _train_with_rewinds(self) -> tuple[int, str, RunLog]:
        """Train, and return to an earlier checkpoint where --on-nan or --on-spike says so; also return the log."""
        while True:
            self.log = self._open_log()
            try:
                return *self._train(self.log), self.log
            except RewindError as error:
                self._rewind(error)
                self.log.close()

    def _rewind(self, error: RewindError) -> None:
        """Load an earlier checkpoint. Raises the error's cause if there is none, or after many rewinds."""
        assert self.save_folder is not None
        self._print(f"> {error.problems[0].text}")
        target, path = error.iteration - error.distance, None
        if len(self.passed_over) < MOST_REWINDS:
            path = rewind_run(self.ranks, self.engine, self.progress, self.save_folder, at_most=target)
        if path is None:
            many = len(self.passed_over) >= MOST_REWINDS
            why = (
                f"the run was rewound {MOST_REWINDS} times"
                if many
                else f"no checkpoint of iteration {target} or earlier"
            )
            self._print(f"> cannot rewind: {why}")
            raise error.cause
        self.passed_over.add(error.iteration)
        self._print(f"> rewound to {path}; iteration {error.iteration} will be skipped")

    def _train(self, log: RunLog) -> tuple[int, str]:
        """Evaluate and train as configured; return the exit code and the reason for the end."""
        config, start = self.plan.config, self.progress.iteration
        exit_file = config.resilience.exit_file
        stop = StopRequest(
            self.ranks.signals,
            exit_interval=config.resilience.exit_interval,
            phase_ends=self.plan.derived.phase_transitions,
            exit_duration_in_mins=config.resilience.exit_duration_in_mins,
            began=self.phases.began,
            exit_signal=signal_number(config.resilience.exit_signal) or signal.SIGTERM,
            exit_file=Path(exit_file) if exit_file is not None and self.ranks.is_main else None,
            has_log_failed=lambda: log.failure is not None,
            has_console_failed=self._has_console_failed,
            report=self.ranks.console.print,
            before_kill=self.status.record_end,
        )
        run = TrainingRun(
            ranks=self.ranks,
            plan=self.plan,
            engine=self.engine,
            progress=self.progress,
            log=log,
            saves=self.saves,
            stop=stop,
        )
        evaluation = Evaluation(run, self.batches.evaluations, garbage=self.garbage)
        reason = None
        with stop.listening(), self.garbage.manual_collection(), self._saving():
            if config.training.only_evaluates:
                reason = evaluation.run(("valid", "test"))
                return (STOPPED_EARLY, reason) if reason else (REACHED, "evaluated only")
            if config.training.eval_at_start and start == 0:
                evaluation.run(("valid",))
            if self.progress.is_evaluation_pending:
                reason = self._evaluate_if_due(evaluation)
                self._save_if_due(is_stopping=True)
            if reason is None and not self._is_done:
                reason = self._run_iterations(run, evaluation)
        if not self._is_done or self.progress.is_evaluation_pending:
            return STOPPED_EARLY, reason or ""
        is_resumed_at_target = start == self.progress.iteration
        return REACHED, f"the target {'was reached before' if is_resumed_at_target else 'is reached'}"

    def _run_iterations(self, run: TrainingRun, evaluation: Evaluation) -> str | None:
        """Run iterations up to the target; return the reason to stop before it, if there is one."""
        assert self.batches.train is not None
        profiling = Profiling(
            self.plan,
            rank=self.ranks.grid.rank,
            start=self.progress.iteration,
            waits_after=lambda iteration: self._is_boundary(iteration, run.stop, evaluation),
        )
        self._print(profiling.start_message())
        run.log.restart_clock()
        iterations = Iterations(run, self.batches.train, passed_over=self.passed_over)
        reason = None
        with self._trace_on_failure(profiling):
            while reason is None and not self._is_done:
                number = iterations.next_number
                profiling.before_iteration(number)
                is_boundary = self._is_boundary(number, run.stop, evaluation) or profiling.is_boundary(number)
                reason = iterations.run_next(waits=is_boundary)
                self._update_profile(profiling, run.log, is_stopping=reason is not None or self._is_done)
                self.garbage.after_iteration(number)
                if not iterations.pending:
                    self._check_replicas_if_due()
                    reason = self._evaluate_if_due(evaluation) or reason
                    self._save_if_due(is_stopping=reason is not None)
        self._print(profiling.at_end(reason))
        return reason

    def _check_replicas_if_due(self) -> None:
        """Compare weights before they are saved."""
        interval = self.plan.config.training.check_weight_hash_across_dp_replicas_interval
        if _divides(interval, self.progress.iteration):
            check_replicas(self.engine, self.progress.iteration)

    def _evaluate_if_due(self, evaluation: Evaluation) -> str | None:
        """Evaluate if it is due; return the reason to stop. After a loss that is not finite, save before the run ends."""
        try:
            return evaluation.run_if_due()
        except NotFiniteError:
            self._save_if_due(is_stopping=True)  # fails if the weights are not finite either
            raise

    @property
    def _is_done(self) -> bool:
        """The target is reached."""
        return self.progress.iteration >= self.plan.derived.train_iters

    def _is_boundary(self, iteration: int, stop: StopRequest, evaluation: Evaluation) -> bool:
        """Return True if work after this iteration needs its result: no other step may begin before."""
        return (
            iteration >= self.plan.derived.train_iters
            or self._is_save_due(iteration)
            or _divides(self.plan.config.training.check_weight_hash_across_dp_replicas_interval, iteration)
            or evaluation.is_due(iteration)
            or stop.is_interval_over(iteration)
        )

    def _save_if_due(self, *, is_stopping: bool) -> None:
        checkpoint, iteration = self.plan.config.checkpoint, self.progress.iteration
        if self.save_folder is None:
            return
        if is_stopping or self._is_done:
            self.save(self.save_folder)
        elif _divides(checkpoint.save_interval, iteration):
            self._begin_save(self.save_folder)
        elif _divides(checkpoint.non_persistent_save_interval, iteration):
            assert checkpoint.non_persistent_folder is not None
            self._begin_save(Path(checkpoint.non_persistent_folder))

    def _is_save_due(self, iteration: int) -> bool:
        checkpoint = self.plan.config.checkpoint
        intervals = (checkpoint.save_interval, checkpoint.non_persistent_save_interval)
        return any(_divides(interval, iteration) for interval in intervals)

    def save(self, folder: Path) -> None:
        """Save a checkpoint of this iteration in `folder`, and return once it is committed; all ranks call it."""
        self._begin_save(folder)
        self.saves.finish()

    def _begin_save(self, folder: Path) -> None:
        if self.log is not None:
            self.log.flush()
        self.saves.begin(folder)
        if self.log is not None:
            self.log.restart_clock()

    def _record_save(self, times: SaveTimes) -> None:
        self.last_save = asdict(times)
        if self.log is not None:
            self.log.record_save(self.last_save)
        self.status.record_save()
        self.callbacks.call("on_save", self.last_save)

    @contextmanager
    def _saving(self) -> Iterator[None]:
        """Save in the background with --async-save. A step that is not finite ends the run on all ranks, after a pending save."""
        with self.saves.in_background():
            try:
                yield
            except NotFiniteError:
                with suppress(CheckpointError):
                    self.saves.finish()
                raise

    @contextmanager
    def _trace_on_failure(self, profiling: Profiling) -> Iterator[None]:
        """Write the trace of an unfinished profile if the run fails."""
        try:
            yield
        except BaseException as error:
            text = profiling.at_failure(error)
            if text is not None and not self.ranks.is_main:
                print(f"rank {self.ranks.grid.rank}: {text.removeprefix('> ')}", file=sys.stderr, flush=True)
            self._print(text)
            raise

    def _update_profile(self, profiling: Profiling, log: RunLog, *, is_stopping: bool) -> None:
        text = profiling.after_iteration(self.progress.iteration, is_stopping=is_stopping)
        if text is not None:
            self._print(text)
            log.restart_clock()

    def open_data(self) -> None:
        """Build or read the sample indices and start the loaders."""
        try:
            with self.phases.phase("preparing the data"):
                self.batches = build_batches(self.ranks, self.plan, self._print)
        except MegatrainError as error:  # nothing was started: the exit code stays the code of wrong input
            self.status.record_refused_start(error.exit_code, error.problems[0].text)
            raise

    def _open_outputs(self) -> None:
        if not self.ranks.is_main:
            return
        if self.save_folder is not None:
            # An evaluation does not replace the training run's settings.
            if not self.plan.config.training.only_evaluates:
                path, text = self.save_folder / "config.yaml", to_yaml(self.plan.config, self.plan.origins)
                try:
                    replace_file(path, [text.encode()])
                except OSError as error:
                    raise ConfigError(
                        f"--save cannot be written: {describe_write_error(error, path, needed_bytes=len(text))}",
                        fix="make the folder writable and free some space, or give --save another folder",
                    ) from error
            self.status.write(None, "running")

    def _record_signals(self) -> None:
        """Record the end of the run in its status if a signal ends it before it trains."""
        if self.ranks.signals is None:
            return
        before = self.ranks.signals.before_exit

        def record(exit_code: int, reason: str) -> None:
            self.status.record_end(exit_code, reason)
            before(exit_code, reason)

        self.ranks.signals.before_exit = record

    def _has_console_failed(self) -> bool:
        """Return whether the run stops because its output is closed or cannot be written."""
        is_needed = self.ranks.is_main and self.plan.config.logging.on_log_failure == "stop"
        return is_needed and output_failure() is not None

    def _write_collectives(self) -> None:
        """Write what this rank's collectives are, for a run that hangs."""
        if self.save_folder is not None and self.save_folder.is_dir():
            write_collectives(self.save_folder / COLLECTIVES_FOLDER, self.ranks.grid.rank)

    def _open_log(self) -> RunLog:
        with self.phases.phase("opening logs"):
            log = RunLog(
                self.ranks,
                self.plan,
                self.engine.timers,
                self.callbacks,
                iteration=self.progress.iteration,
                consumed_samples=self.progress.consumed_train_samples,
            )
        self._print(log.speed_note())
        return log

    def _require_logs(self, log: RunLog) -> None:
        """Raise LogError on all ranks if a log could not be written: the run has saved and stopped."""
        log.flush()
        failure = log.failure and log.failure.problems[0].text
        failure = self.ranks.grid.messages.broadcast(failure)
        if failure is not None:
            is_saved = self.save_folder is not None and not self.plan.config.training.only_evaluates
            raise LogError(failure + f"; iteration {self.progress.iteration} is saved" * is_saved)

    def _close(self) -> None:
        self.batches.close()
        if self.log is not None:
            self.log.close()
        if isinstance(self.engine.training_passes, GraphedPasses):
            self.engine.training_passes.close()

    def _print(self, text: str | None) -> None:
        """Print text on the main rank, if there is any."""
        if text is not None:
            self.ranks.console.print(text)


def train_run(request: Request, phases: Phases, signals: Signals) -> int:
    """Join the other ranks, resume and train; return the exit code. With --inprocess-restart, again after failures of others."""

    def train(phases: Phases, member: Member | None = None) -> int:
        options = {} if member is None else {"follow": member.follow}
        with joined_ranks(request, phases, signals=signals, check_memory=check_memory, **options) as ranks:
            trainer = Trainer(ranks)
            if member is not None:
                member.bound_launches(trainer.engine.executor)
            trainer.resume()
            return trainer.train()

    if read_environment().supervisor is None:
        return train(phases)
    from megatrain.training.restarts.member import run_generations  # noqa: PLC0415 (most runs need none of it)

    def train_again(member: Member) -> int:
        console = Console(is_quiet=read_environment().rank != 0)  # the rank may be another one
        return train(Phases(console, began=phases.began), member)

    return run_generations(request, signals, train_again, join_store)


def _divides(interval: int | None, iteration: int) -> bool:
    return interval is not None and iteration % interval == 0
