"""The loop around the engine's step: data in, log lines and checkpoints out, evaluation in between.

    resume ─> [ batches ─> step ─> log ─> evaluate? ─> save? ─> stop? ] ... ─> save ─> last evaluation

On a GPU a step's report is read while the next step runs, wherever nothing comes between the two.

Exit codes: 0 the target is reached, 75 stopped early, after saving where --save was given (the same command goes on).
"""

from __future__ import annotations

import dataclasses
import signal
import sys
import time
from pathlib import Path
from typing import Any

import torch

from megatrain.checkpoint.biases import restore_expert_biases
from megatrain.checkpoint.errors import CheckpointError
from megatrain.checkpoint.load import Loaded, load_checkpoint
from megatrain.checkpoint.save import save_checkpoint
from megatrain.config import Plan, StoredRun, render_plan, resolve, to_yaml
from megatrain.config.derive.data_plans import evaluations
from megatrain.config.errors import MegatrainError
from megatrain.config.plan import continues_optimizer
from megatrain.config.rules.training import signal_number
from megatrain.training.batches import EvaluationSet, RunBatches, build_batches
from megatrain.training.debugging.profiling import Profiling
from megatrain.training.engine import Engine, mean_losses
from megatrain.training.garbage import GarbageCollection
from megatrain.training.iterations import Iterations, NotFiniteError, Progress
from megatrain.training.launch.failure import exit_code_of
from megatrain.training.launch.ranks import Ranks
from megatrain.training.logging.model_summary import model_summary
from megatrain.training.logging.run_log import RunLog
from megatrain.training.logging.status_file import StatusFile
from megatrain.training.stopping import StopRequest

REACHED, STOPPED_EARLY = 0, 75


class Trainer:
    """One run on one rank."""

    def __init__(self, ranks: Ranks) -> None:
        self.ranks = ranks
        self.plan = ranks.plan
        self.config, self.derived = ranks.plan.config, ranks.plan.derived
        self.progress = Progress()
        self.consumed_valid_samples = 0
        self.is_evaluation_left = False
        """Whether a stop came before the evaluation at this iteration was done."""
        self.save_folder = Path(self.config.checkpoint.save) if self.config.checkpoint.save else None
        self._say(render_plan(self.plan))
        self.phases = ranks.phases
        with self.phases.phase("building the model"):
            self.engine = Engine(self.plan, ranks.grid, ranks.device)
        self._say(model_summary(self.engine))
        self._follow(self.plan)
        self.garbage = GarbageCollection(
            is_manual=self.config.training.manual_gc,
            interval=self.config.training.manual_gc_interval,
            around_evaluation=self.config.training.manual_gc_eval,
        )
        self.batches = RunBatches(None, ())
        self.log: RunLog | None = None
        self.status = StatusFile(self.save_folder if ranks.is_main else None, lambda: self.progress.iteration)

    def _follow(self, plan: Plan) -> None:
        """Take over what a plan says about the steps to come."""
        self.plan, self.config, self.derived = plan, plan.config, plan.derived

    def resume(self) -> None:
        """Take the state from `--load`, or draw the initial weights."""
        stored, load = self.ranks.facts.checkpoint, self.config.checkpoint.load
        if stored is None:
            if load is not None:
                self._say(f"> {load} holds no checkpoint yet: starting fresh")
            with self.phases.phase("drawing initial weights"):
                self.engine.initialize()
            return
        with_optimizer = continues_optimizer(self.config, self.ranks.facts)
        with self.phases.phase("loading the checkpoint"):
            loaded = load_checkpoint(
                Path(stored.path).parent,
                self.engine.optimizer,
                self.ranks.grid,
                with_optimizer=with_optimizer,
            )
        restore_expert_biases(self.engine.model, loaded.state, loaded.path)
        for line in loaded.skipped:
            self._say(f"> {line}")
        if str(loaded.path) != stored.path:
            self._check_against(loaded, is_start=stored.is_start)
        if stored.is_start:
            self._say(
                f"> loaded the weights of {loaded.path}, iteration {loaded.iteration}: a run begins with them"
            )
            return
        self.progress.iteration = loaded.iteration
        self.progress.consumed_train_samples = loaded.consumed_train_samples
        self.consumed_valid_samples = loaded.state["consumed_valid_samples"]
        self.is_evaluation_left = loaded.state["is_evaluation_left"]
        if with_optimizer:
            self.progress.scheduled_samples = loaded.state.get(
                "scheduled_samples", self.progress.consumed_train_samples
            )
            self.engine.loss_scaler.restore(loaded.state.get("loss_scale", {}))
        self._say(
            f"> loaded {loaded.path}: iteration {self.progress.iteration}, {self.progress.consumed_train_samples} samples consumed"
        )

    def _check_against(self, loaded: Loaded, *, is_start: bool) -> None:
        """The plan was made for a newer checkpoint, which is damaged: hold it to the one that is used."""
        used = StoredRun.from_state(
            loaded.state,
            path=str(loaded.path),
            iteration=loaded.iteration,
            consumed_train_samples=loaded.consumed_train_samples,
            config=loaded.config,
        )
        used = used.weights_alone if is_start else used
        plan = resolve(self.ranks.request, dataclasses.replace(self.ranks.facts, checkpoint=used))
        for name in ("train_plan", "valid_plan", "test_plan"):
            planned, now = getattr(self.derived, name), getattr(plan.derived, name)
            if planned != now:
                self._say(f"> {name} is {' '.join(map(str, now))} with this checkpoint")
        self._follow(plan)

    def train(self) -> int:
        """Run to the target or until something asks for the end; returns the exit code.

        Raises:
            MegatrainError: the run cannot go on. `status.json` has its exit code then, which is never that of a run
                that was not started.
        """
        self._open_data()
        self._open_outputs()
        if self.ranks.watch is not None:
            self.ranks.watch.before_end = self.status.record_peer_failure
        try:
            with self.phases.phase("opening logs"):
                self.log = RunLog(
                    self.ranks,
                    self.plan,
                    self.engine.timers,
                    iteration=self.progress.iteration,
                    consumed_samples=self.progress.consumed_train_samples,
                )
            self._say(self.log.speed_note())
            exit_code, reason = self._train()
        except BaseException as error:
            reason = f"{type(error).__name__}: {error}"
            if isinstance(error, MegatrainError):
                error.exit_code = 1
                error.is_reported = isinstance(error, CheckpointError | NotFiniteError) and not self.ranks.is_main
                reason = error.problems[0].text
            self.status.record_end(exit_code_of(error), reason)
            raise
        finally:
            self._close()
        self.status.write(exit_code, reason)
        resumable = (
            "" if self._is_last or self.save_folder else "; nothing was saved, as --save was not given"
        )
        self._say(
            f"> ended at iteration {self.progress.iteration} of {self.derived.train_iters}: {reason}{resumable} (exit code {exit_code})"
        )
        return exit_code

    def _train(self) -> tuple[int, str]:
        """The exit code and why."""
        assert self.log is not None
        start = self.progress.iteration
        stop = StopRequest(
            exit_interval=self.config.resilience.exit_interval,
            exit_duration_in_mins=self.config.resilience.exit_duration_in_mins,
            exit_signal=signal_number(self.config.resilience.exit_signal) or signal.SIGTERM,
        )
        reason = None
        with stop.listening(), self.garbage.taken_over():
            if self.config.training.skip_train:
                reason = self._evaluate(("valid", "test"), stop)
                return (
                    (REACHED, "evaluated, with --skip-train") if reason is None else (STOPPED_EARLY, reason)
                )
            if self.config.training.eval_at_start and start == 0:
                self._evaluate(("valid",), stop)
            if self.is_evaluation_left:
                reason = self._evaluate_if_due(stop)
                self._save_if_due(is_stopping=True)
            if reason is None and not self._is_last:
                reason = self._run_iterations(stop)
        is_reached = self._is_last and not self.is_evaluation_left
        if is_reached:
            reason = (
                "the target was reached before"
                if start == self.progress.iteration
                else "the target is reached"
            )
        return (REACHED if is_reached else STOPPED_EARLY), reason or ""

    def _run_iterations(self, stop: StopRequest) -> str | None:
        """To the target, with all that comes between iterations; why to stop before it, if so."""
        assert self.batches.train is not None
        assert self.log is not None
        profiling = Profiling(self.plan, rank=self.ranks.grid.rank, start=self.progress.iteration)
        self._say_if_any(profiling.note())
        self.log.restart_clock()
        iterations = Iterations(
            self.ranks,
            self.plan,
            self.engine,
            self.batches.train,
            log=self.log,
            progress=self.progress,
            stop=stop,
        )
        try:
            reason = self._iterate(iterations, stop, profiling)
        except BaseException as error:
            text = profiling.at_failure(error)
            if text is not None and self.ranks.is_main:
                self._say(text)
            elif text is not None:
                print(f"rank {self.ranks.grid.rank}: {text.removeprefix('> ')}", file=sys.stderr, flush=True)
            raise
        self._say_if_any(profiling.at_end(reason))
        return reason

    def _iterate(self, iterations: Iterations, stop: StopRequest, profiling: Profiling) -> str | None:
        """The loop itself."""
        reason = None
        while not self._is_last and reason is None:
            number = iterations.next_number
            profiling.before_iteration(number)
            is_border = self._is_border(number, stop) or profiling.is_border(number)
            reason = iterations.run_next(waits=is_border)
            self._tell_profile(profiling, is_stopping=reason is not None or self._is_last)
            self.garbage.after_iteration(number)
            if not iterations.underway:
                reason = self._evaluate_if_due(stop) or reason
                self._save_if_due(is_stopping=reason is not None)
        return reason

    def _tell_profile(self, profiling: Profiling, *, is_stopping: bool) -> None:
        text = profiling.after_iteration(self.progress.iteration, is_stopping=is_stopping)
        if text is not None:
            assert self.log is not None
            self._say(text)
            self.log.restart_clock()

    @property
    def _is_last(self) -> bool:
        return self.progress.iteration >= self.derived.train_iters

    def _is_border(self, iteration: int, stop: StopRequest) -> bool:
        """Whether the loop does something behind this iteration that needs its end."""
        return (
            iteration >= self.derived.train_iters
            or self._is_save_due(iteration)
            or evaluations(self.plan).is_due(iteration)
            or stop.is_interval_over(iteration)
        )

    def _evaluate_if_due(self, stop: StopRequest) -> str | None:
        """Evaluate where the interval or the end of training asks for it; why it was left unfinished, if it was."""
        of_run = evaluations(self.plan)
        if not of_run.is_due(self.progress.iteration):
            return None
        assert self.log is not None
        with self.garbage.evaluation():
            reason = self._evaluate(("valid", "test") if self._is_last else ("valid",), stop)
        self.log.restart_clock()
        self.is_evaluation_left = reason is not None
        if reason is None and self.derived.requested_valid_samples is not None:
            self.consumed_valid_samples += of_run.samples
        return reason

    def _evaluate(self, splits: tuple[str, ...], stop: StopRequest) -> str | None:
        """Loss over the next samples of each split, shown when all are done; why to stop, if not."""
        with self.phases.heartbeat("evaluating"):
            return self._evaluate_splits(splits, stop)

    def _evaluate_splits(self, splits: tuple[str, ...], stop: StopRequest) -> str | None:
        losses: dict[EvaluationSet, float] = {}
        for evaluation in self.batches.evaluations:
            if evaluation.split not in splits:
                continue
            reads_on = evaluation.split == "valid" and not evaluation.is_whole
            consumed = self.consumed_valid_samples if reads_on else 0
            sums = torch.zeros(2, dtype=torch.float64, device=self.ranks.device)
            for done in range(0, evaluation.num_microbatches, self.derived.num_eval_microbatches):
                reason = stop.urgent_reason(self.ranks.grid.world, self.ranks.device)
                if reason is not None:
                    return reason
                count = min(self.derived.num_eval_microbatches, evaluation.num_microbatches - done)
                first = consumed + done * self.config.training.micro_batch_size * self.ranks.grid.dp.size
                sums += self.engine.evaluate(evaluation.batches.microbatches(first, count))
            losses[evaluation] = mean_losses(sums).item()
        assert self.log is not None
        for evaluation, loss in losses.items():
            self.log.log_evaluation(
                name=evaluation.name,
                split=evaluation.split,
                dataset=evaluation.dataset,
                loss=loss,
                iteration=self.progress.iteration,
                consumed_samples=self.progress.consumed_train_samples,
            )
        return None

    def _save_if_due(self, *, is_stopping: bool) -> None:
        is_due = self._is_save_due(self.progress.iteration) or is_stopping or self._is_last
        if self.save_folder is not None and is_due:
            self._save()

    def _is_save_due(self, iteration: int) -> bool:
        interval = self.config.checkpoint.save_interval
        return interval is not None and iteration % interval == 0

    def _save(self) -> None:
        assert self.save_folder is not None
        if self.log is not None:
            self.log.flush()
        began = time.perf_counter()
        with self.phases.heartbeat("saving a checkpoint"):
            path = save_checkpoint(
                self.save_folder,
                iteration=self.progress.iteration,
                consumed_train_samples=self.progress.consumed_train_samples,
                optimizer=self.engine.optimizer,
                grid=self.ranks.grid,
                state=self._state(),
                config=self.config.to_dict(),
                with_optimizer=not self.config.checkpoint.no_save_optim,
            )
        if self.log is not None:
            self.log.restart_clock()
        self._say(f"> committed {path} in {time.perf_counter() - began:.1f} s")

    def _state(self) -> dict[str, Any]:
        """What a checkpoint keeps beside tensors and configuration."""
        return {
            "consumed_valid_samples": self.consumed_valid_samples,
            "scheduled_samples": self.progress.scheduled_samples,
            "schedule": self.derived.schedule.to_dict(),
            "loss_scale": self.engine.loss_scaler.state(),
            "expert_biases": self.engine.model.expert_biases.state(),
            "has_optimizer": not self.config.checkpoint.no_save_optim,
            "is_evaluation_left": self.is_evaluation_left,
            "tokenizer_fingerprint": self.ranks.facts.tokenizer_fingerprint,
            "data_plans": {
                "train": self.derived.train_plan,
                "valid": self.derived.valid_plan,
                "test": self.derived.test_plan,
            },
            "pass_size": self.config.training.micro_batch_size * self.ranks.grid.dp.size,
            "datasets": [vars(dataset) for dataset in self.ranks.facts.datasets],
        }

    def _open_data(self) -> None:
        try:
            with self.phases.phase("preparing the data"):
                self.batches = build_batches(self.ranks, self.plan, self._say)
        except MegatrainError as error:  # nothing was started: the exit code stays that of wrong input
            self.status.write(error.exit_code, error.problems[0].text)
            raise

    def _open_outputs(self) -> None:
        if not self.ranks.is_main:
            return
        if self.save_folder is not None:
            self.save_folder.mkdir(parents=True, exist_ok=True)
            if not self.config.training.skip_train:  # which says nothing about the run that trained
                text = to_yaml(self.config, self.plan.origins)
                (self.save_folder / "config.yaml").write_text(text, encoding="utf-8")
            self.status.write(None, "running")

    def _close(self) -> None:
        self.batches.close()
        if self.log is not None:
            self.log.close()

    def _say(self, text: str) -> None:
        self.ranks.console.print(text)

    def _say_if_any(self, text: str | None) -> None:
        if text is not None:
            self._say(text)
