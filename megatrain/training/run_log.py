"""Logs iterations and evaluations to files, curves and the terminal.

    StepReport ─> values of the iteration ─┬─> metrics.jsonl                  every iteration
                                           ├─> TensorBoard, trackers          every --tensorboard-log-interval
                                           ├─> the log line, with means       every --log-interval
                                           └─> the progress bar               on a terminal

All ranks call a `RunLog` in the same way; only rank 0 writes and prints.
"""

from __future__ import annotations

import math
import socket
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from megatrain.config import Plan
from megatrain.config.derive.batch_sizes import length_steps, num_pieces
from megatrain.optim.lr_schedule import Hyperparams
from megatrain.parallel.batch import Batch
from megatrain.parallel.packs.context import PackBatch
from megatrain.training.callbacks import RunCallbacks
from megatrain.training.launch.ranks import Ranks
from megatrain.training.logging.console import format_duration
from megatrain.training.logging.curves import (
    CurveWriter,
    TensorBoardCurves,
    evaluation_scalars,
    iteration_scalars,
)
from megatrain.training.logging.energy import EnergyMeter, energy_line
from megatrain.training.logging.metrics import (
    evaluation_line,
    log_line,
    max_memory_bytes,
    peak_tflops,
    router_line,
    router_values,
)
from megatrain.training.logging.metrics_file import LogError, MetricsFile, metrics_path
from megatrain.training.logging.trackers import TrackerCurves, trackers_of
from megatrain.training.step_report import DeviceTime, PendingStep, StepReport
from megatrain.training.stragglers import straggler_line
from megatrain.training.timers import Timers, across_ranks


@dataclass(frozen=True, kw_only=True)
class Iteration:
    """An iteration that has begun, and is logged when its report is read."""

    number: int
    first_sample: int
    batch: int
    """Samples of the global batch."""
    hyperparams: Hyperparams
    batches: Sequence[Batch]
    step: PendingStep
    restore_scales: Callable[[], None]
    """Restores the scales before the iteration, to compute it again."""
    first_results: dict[str, float] | None = None
    """Loss and gradient norm of the first computation, with --rerun-mode report_stats."""


class RunLog:
    """The log of one run.

    Args:
        ranks: this rank and its peers.
        plan: the plan of the run.
        timers: the engine's timers.
        callbacks: the user's object, which gets each iteration and evaluation.
        iteration, consumed_samples: where the run starts or resumes; later lines and points of an earlier attempt are removed.
    """

    def __init__(
        self,
        ranks: Ranks,
        plan: Plan,
        timers: Timers,
        callbacks: RunCallbacks,
        *,
        iteration: int,
        consumed_samples: int,
    ) -> None:
        self._ranks, self._callbacks = ranks, callbacks
        self._config, self._derived = plan.config, plan.derived
        distillation = plan.derived.distillation
        self._lengths = length_steps(self._config)
        self._kd_names = () if distillation is None else distillation.loss_names
        self._timers = timers
        self.failure: LogError | None = None
        """The first log of this rank that could not be written, unless the run continues without it."""
        self._metrics: MetricsFile | None = None
        self._curves: list[CurveWriter] = []
        self._interval: list[dict[str, Any]] = []
        self._save: dict[str, Any] | None = None
        """The save that was committed since the last iteration was logged."""
        self._last_end = DeviceTime(ranks.device)
        self.seconds_of_last_iteration = 0.0
        self._first_iteration = iteration
        self._seconds_of_iterations = 0.0
        self.is_on_gpu = ranks.device.type == "cuda"
        has_energy = self._config.logging.log_energy and self.is_on_gpu
        self._energy = EnergyMeter(ranks.device) if has_energy else None
        self.peak = peak_tflops(ranks.facts.device_name) if self.is_on_gpu else None
        if ranks.is_main:
            self._open(plan, iteration, consumed_samples)

    def _open(self, plan: Plan, iteration: int, consumed_samples: int) -> None:
        logging, save = self._config.logging, self._config.checkpoint.save
        path = metrics_path(save, logging.metrics_file)
        if path is not None:
            with self._log_errors():
                self._metrics = MetricsFile(path, resumed_iteration=iteration)
                if self._metrics.note is not None:
                    self._ranks.console.print(f"> WARNING: {self._metrics.note}")
        if logging.tensorboard_dir is not None:
            with self._log_errors():
                curves = TensorBoardCurves(
                    Path(logging.tensorboard_dir),
                    run=str(Path(save).resolve()) if save is not None else None,
                    queue_size=logging.tensorboard_queue_size,
                    iteration=iteration,
                    consumed_samples=consumed_samples,
                )
                self._curves.append(curves)
        if self.failure is not None:
            raise self.failure
        folder = Path(save) if save is not None else None
        for tracker in trackers_of(logging, folder, plan.config.to_dict()):
            warn = self._ranks.console.print
            self._curves.append(TrackerCurves(tracker, save_folder=folder, warn=warn))

    def speed_note(self) -> str:
        """Return the line that says, once at start, how the speeds in the log are computed."""
        if not self.is_on_gpu:
            return "> speed: in tokens/s; TFLOP/s and MFU are shown on GPUs only"
        flops = f"{self._derived.flops_per_iteration:.4g} FLOPs per iteration (Megatron-LM's formula: GEMMs"
        flops += " of forward and backward, without recomputation)"
        if self.peak is None:
            return f"> speed: TFLOP/s from {flops}; no MFU, because the peak of {self._ranks.facts.device_name} is unknown"
        return f"> speed: MFU = TFLOP/s / {self.peak:g} (dense bf16 peak of {self._ranks.facts.device_name}), from {flops}"

    def restart_clock(self) -> None:
        """Start the time of the next iteration now, so that evaluations and saving do not count."""
        self._last_end = DeviceTime(self._ranks.device)

    def log_iteration(
        self,
        iteration: Iteration,
        report: StepReport,
        *,
        consumed_samples: int,
        compute_seconds: float | None,
        is_line_due: bool,
    ) -> None:
        """Log a completed iteration.

        Args:
            consumed_samples: of the run, with this iteration.
            compute_seconds: time of this rank's forward and backward passes, with --log-straggler.
            is_line_due: print a log line also between log intervals, as for the first and the last iteration.
        """
        # Device time: on a GPU the host may arrive here well after the end of the iteration.
        end, number = iteration.step.end, iteration.number
        seconds, self._last_end = end.seconds_since(self._last_end), end
        self.seconds_of_last_iteration = seconds
        self._seconds_of_iterations += seconds
        values = self._values_of(iteration, report, seconds=seconds, consumed_samples=consumed_samples)
        values["compute_ms"] = None if compute_seconds is None else 1000 * compute_seconds
        self._save = None
        self._interval.append(values)
        logging = self._config.logging
        self._write_metrics(values)
        if number % logging.tensorboard_log_interval == 0 and self._curves:
            scalars = iteration_scalars(values, logging, world_size=self._derived.world_size)
            self._write_curves(scalars, number, consumed_samples)
        if is_line_due or number % logging.log_interval == 0:
            self._print_interval()
        self._show_bar(values)
        self._callbacks.call("on_iteration", values)

    def record_save(self, values: dict[str, Any]) -> None:
        """Log a save that was committed with the next iteration."""
        self._save = values

    def log_evaluation(
        self,
        title: str,
        values: Mapping[str, float],
        *,
        split: str,
        dataset: str | None,
        iteration: int,
        consumed_samples: int,
    ) -> None:
        """Log the values of an evaluation, which are named as in `metrics.jsonl`.

        Args:
            title: start of the printed line.
            split: `task` for a task of --eval-tasks, whose name is `dataset`.
        """
        if "loss" in values:
            values = {"loss": values["loss"], "ppl": math.exp(min(values["loss"], 20.0))} | dict(values)
        metrics = {"iteration": iteration, "validation": split if dataset is None else dataset, **values}
        self._write_metrics(metrics)
        scalars = evaluation_scalars(values, self._config.logging, split=split, dataset=dataset)
        self._write_curves(scalars, iteration, consumed_samples)
        columns = self._ranks.console.columns()
        line = evaluation_line(f"{title} at iteration {iteration}", values, columns=columns)
        rule = "-" * len(line)
        self._ranks.console.print(line if split == "task" else f"{rule}\n{line}\n{rule}")
        self._callbacks.call("on_evaluation", metrics)

    def flush(self) -> None:
        """Write all lines and points to disk. Called before each checkpoint: a run that resumes from it does not write earlier ones again."""
        if self._metrics is not None:
            with self._log_errors(self._metrics):
                self._metrics.flush()
        for curves in tuple(self._curves):
            with self._log_errors(curves):
                curves.flush()

    def close(self) -> None:
        """Remove the progress bar and close all files."""
        self._ranks.console.remove_bar()
        if self._metrics is not None:
            self._metrics.close()
        for curves in tuple(self._curves):
            with self._log_errors(curves):
                curves.close()

    def _values_of(
        self, iteration: Iteration, report: StepReport, *, seconds: float, consumed_samples: int
    ) -> dict[str, Any]:
        """Return the fields of a line of `metrics.jsonl`, which docs/metrics.md describes."""
        derived, device, batch = self._derived, self._ranks.device, iteration.batch
        work = next((one.work for one in iteration.batches if isinstance(one, PackBatch)), None)
        fraction = batch / self._config.training.global_batch_size  # below 1 during batch size ramp-up
        flops, tokens = fraction * derived.flops_per_iteration, fraction * derived.tokens_per_iteration
        pieces = num_pieces(self._lengths, self._config, consumed_samples - batch)
        length = None if work else self._config.data.seq_length // pieces
        if length is not None and pieces > 1:
            count = batch * self._config.data.seq_length
            flops = derived.model_spec.training_flops(num_tokens=count, sum_of_squared_lengths=count * length)
        if work is not None:
            tokens, flops = work.num_tokens, derived.model_spec.training_flops(**vars(work))
        tflops = flops / seconds / derived.world_size / 1e12 if self.is_on_gpu else None
        return {
            "iteration": iteration.number,
            "consumed_samples": consumed_samples,
            "consumed_tokens": None if work else consumed_samples * self._config.data.seq_length,
            "global_batch_size": batch,
            "seq_length": length,
            "lm_loss": report.lm_loss,
            "sop_loss": report.sop_loss,
            "z_loss": report.z_loss,
            "indexer_loss": report.indexer_loss,
            "routers": router_values(report.routers),
            "mtp_losses": {f"mtp_{k} loss": loss for k, loss in enumerate(report.mtp_losses, 1)} or None,
            "kd_losses": dict(zip(self._kd_names, report.distillation_losses, strict=True)) or None,
            "grad_norm": report.grad_norm,
            "params_norm": report.params_norm,
            "num_zeros": report.num_zeros,
            "max_attention_logit": report.max_attention_logit,
            "learning_rate": iteration.hyperparams.lr,
            "decoupled_learning_rate": self._decoupled_lr(iteration.hyperparams),
            "loss_scale": report.loss_scale,
            "iteration_ms": 1000 * seconds,
            "timers": self._timers.take(),
            "tokens_per_second_per_gpu": tokens / seconds / derived.world_size,
            "tflops_per_gpu": tflops,
            "mfu": tflops / self.peak if tflops is not None and self.peak else None,
            "memory_bytes": torch.cuda.memory_allocated(device) if self.is_on_gpu else None,
            "reserved_memory_bytes": torch.cuda.memory_reserved(device) if self.is_on_gpu else None,
            "max_memory_bytes": max_memory_bytes(device),
            "energy_joules": None if self._energy is None else self._energy.take(),
            "skipped": int(not report.is_updated),
            "nan": int(math.isnan(report.lm_loss)),
            "save": self._save,
            "resumed": int(0 < self._first_iteration == iteration.number - 1),
        }

    def _decoupled_lr(self, hyperparams: Hyperparams) -> float | None:
        """Return the learning rate of the embedding and the output layer with --decoupled-lr."""
        is_set = self._config.optimizer.decoupled_lr is not None
        return hyperparams.lr_of("embedding") if is_set else None

    def _write_curves(self, scalars: dict[str, float], iteration: int, consumed_samples: int) -> None:
        for curves in tuple(self._curves):
            with self._log_errors(curves):
                curves.write(scalars, iteration=iteration, consumed_samples=consumed_samples)

    def _write_metrics(self, values: dict[str, Any]) -> None:
        if self._metrics is not None:
            with self._log_errors(self._metrics):
                self._metrics.write(values)

    @contextmanager
    def _log_errors(self, log: MetricsFile | CurveWriter | None = None) -> Iterator[None]:
        """Write nothing more to a log that cannot be written; keep its error, or print it with --on-log-failure warn."""
        try:
            yield
        except LogError as error:
            if self._metrics is not None and log is self._metrics:
                self._metrics.close()
                self._metrics = None
            self._curves = [curves for curves in self._curves if curves is not log]
            if self._config.logging.on_log_failure == "warn":
                self._ranks.console.print(f"> WARNING: no more is written to a log: {error.problems[0].text}")
            else:
                self.failure = self.failure or error

    def _print_interval(self) -> None:
        logging, console = self._config.logging, self._ranks.console
        means = averaged(self._interval)
        line = log_line(
            means,
            train_iters=self._derived.train_iters,
            has_throughput=logging.log_throughput and self.is_on_gpu,
            speed_unit="tokens/s/GPU" if self.is_on_gpu else "tokens/s",
            world_size=1 if self.is_on_gpu else self._derived.world_size,
            columns=console.columns(),
        )
        console.print(line)
        if means["routers"] is not None:
            console.print(router_line(means["routers"]))
        if logging.timing_log_level:
            times = self._ranks.grid.messages.gather(mean_times(self._interval))
            if times:
                console.print(across_ranks(times, logging.timing_log_option))
        if logging.log_straggler:
            self._print_stragglers()
        if self._energy is not None:
            self._print_energy()
        self._interval = []

    def _print_stragglers(self) -> None:
        """Print the slowest and the fastest ranks of the interval."""
        milliseconds = sum(values["compute_ms"] for values in self._interval) / len(self._interval)
        times = self._ranks.grid.messages.gather([socket.gethostname(), milliseconds])
        if times:
            flops = self._derived.flops_per_iteration / self._derived.world_size if self.is_on_gpu else 0.0
            count = self._config.logging.straggler_minmax_count
            self._ranks.console.print(straggler_line(times, flops=flops, count=count))

    def _print_energy(self) -> None:
        """Print the energy of all GPUs in the interval."""
        joules = self._ranks.grid.messages.gather(sum(values["energy_joules"] for values in self._interval))
        if joules:
            seconds = sum(values["iteration_ms"] for values in self._interval) / 1000
            line = energy_line(joules, seconds=seconds, num_iterations=len(self._interval))
            self._ranks.console.print(line)

    def _show_bar(self, values: dict[str, Any]) -> None:
        done, total = values["iteration"], self._derived.train_iters
        seconds_left = self._seconds_of_iterations / (done - self._first_iteration) * (total - done)
        speed = values["tokens_per_second_per_gpu"] * self._derived.world_size
        self._ranks.console.show_bar(
            done=done,
            total=total,
            status=f"loss {values['lm_loss']:.3f} | {speed:,.0f} tokens/s | {format_duration(seconds_left)} left",
        )


def averaged(interval: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Return the values of the last iteration, with losses, times and speeds as means over the interval.

    Losses leave skipped iterations out. `skipped` and `nan` are counts.
    """
    last = dict(interval[-1])
    trained = [values for values in interval if not values["skipped"]] or interval
    for name in ("lm_loss", "sop_loss", "z_loss", "indexer_loss"):
        if last[name] is not None:
            last[name] = sum(values[name] for values in trained) / len(trained)
    if last["routers"] is not None:
        means = _mean_losses([values["routers"]["losses"] for values in trained])
        last["routers"] = last["routers"] | {"losses": means}
    for name in ("mtp_losses", "kd_losses"):
        last[name] = _mean_losses([values[name] for values in trained])
    for name in ("skipped", "nan"):
        last[name] = sum(values[name] for values in interval)
    milliseconds = sum(values["iteration_ms"] for values in interval)
    last["iteration_ms"] = milliseconds / len(interval)
    for name in ("tokens_per_second_per_gpu", "tflops_per_gpu", "mfu"):
        if last[name] is not None:
            last[name] = sum(values[name] * values["iteration_ms"] for values in interval) / milliseconds
    return last


def _mean_losses(losses: Sequence[dict[str, float] | None]) -> dict[str, float] | None:
    known = [one for one in losses if one is not None]
    return {name: sum(one[name] for one in known) / len(known) for name in known[0]} if known else None


def mean_times(interval: Sequence[dict[str, Any]]) -> dict[str, float]:
    """Return the mean milliseconds per iteration of each timer."""
    total: Counter[str] = Counter()
    for values in interval:
        total.update(values["timers"])
    return {name: milliseconds / len(interval) for name, milliseconds in total.items()}
