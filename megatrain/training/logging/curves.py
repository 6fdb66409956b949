"""Curves in TensorBoard and W&B, under Megatron-LM's names, computed from the fields of `metrics.jsonl`.

    {"lm_loss": 2.5, "consumed_samples": 40, ...}  ->  {"lm loss": 2.5, "lm loss vs samples": 2.5 at 40, ...}

TensorBoard: a write that fails raises LogError, perhaps some points later. The event files of a run have a hash of its `--save` folder in their names. On resume, points after the
resumed iteration are removed from the run's own files only: several runs may share a folder.
W&B: neither an error nor a call that does not return stops training. The first prints a warning and disables W&B. megatrain passes no credentials:
W&B reads its own environment variables (WANDB_API_KEY, WANDB_MODE, ...).
"""

from __future__ import annotations

import hashlib
import logging
import math
import os
import queue
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

from megatrain.config import LoggingConfig
from megatrain.storage.files import open_regular, read_regular, replace_file
from megatrain.training.logging.metrics_file import report_log_errors

VS_SAMPLES = " vs samples"
"""Suffix of a curve over consumed samples; the curve without it is over iterations."""
_ONLY_OVER_ITERATIONS = ("iteration-time", "throughput", "-time", "mem-", "samples vs steps")
_RUN_ID_FILE = "wandb_run_id.txt"
_MAX_WAITING_POINTS = 10_000
"""Points that wait for W&B; with more it counts as hanging."""
_WANDB_THREAD = "wandb"


class CurveWriter(Protocol):
    """A destination of curves."""

    def write(self, scalars: dict[str, float], *, iteration: int, consumed_samples: int) -> None:
        """Add a point to each curve."""

    def flush(self) -> None:
        """Write buffered points to disk."""

    def close(self) -> None:
        """Write or send buffered points and close."""


def iteration_scalars(
    values: Mapping[str, Any], config: LoggingConfig, *, world_size: int
) -> dict[str, float]:
    """Return the points of one iteration by curve; values that are None or not finite are left out.

    Args:
        values: a line of `metrics.jsonl`.
    """
    found: dict[str, float | None] = {
        "learning-rate": values["learning_rate"],
        "batch-size": values["global_batch_size"],
        "lm loss": values["lm_loss"],
        "sop loss": values["sop_loss"],
        "z loss": values["z_loss"],
        "grad-norm": values["grad_norm"],
        "num-zeros": values["num_zeros"],
        "params-norm": values["params_norm"],
        "max-attention-logit": values["max_attention_logit"],
        "samples vs steps": values["consumed_samples"],
    }
    if values["routers"] is not None:
        found |= values["routers"]["losses"]
        if config.moe_per_layer_logging:
            found |= _of_layers(values["routers"]["layers"])
    found |= (values["mtp_losses"] or {}) | (values["kd_losses"] or {})
    if config.log_loss_scale_to_tensorboard:
        found["loss-scale"] = values["loss_scale"]
    if config.log_world_size_to_tensorboard:
        found["world-size"] = world_size
    if config.log_throughput:
        found["throughput"] = values["tflops_per_gpu"]
    if config.log_timers_to_tensorboard:
        found["iteration-time"] = values["iteration_ms"] / 1000
        found |= {f"{name}-time": milliseconds / 1000 for name, milliseconds in values["timers"].items()}
    if config.log_memory_to_tensorboard:
        found["mem-allocated-bytes"] = values["memory_bytes"]
        found["mem-reserved-bytes"] = values["reserved_memory_bytes"]
        found["mem-max-allocated-bytes"] = values["max_memory_bytes"]
    return _finite(found)


def _of_layers(layers: Sequence[Mapping[str, Any]]) -> dict[str, float | None]:
    """Return the curves of each layer's router; layers are counted from 0, as by Megatron-LM."""
    return {
        f"moe/{name}_layer_{layer['layer']}": value
        for layer in layers
        for name, value in {**layer["losses"], "max_load": layer["max_load"]}.items()
    }


def evaluation_scalars(
    values: Mapping[str, float], config: LoggingConfig, *, split: str, dataset: str | None
) -> dict[str, float]:
    """Return the points of an evaluation: `lm loss validation` ..., followed by `-NAME` for one of several validation sets."""
    place = ("validation" if split == "valid" else split) + ("" if dataset is None else f"-{dataset}")
    names = {"loss": f"lm loss {place}", "ppl": f"lm loss {place} ppl"}
    left_out = () if config.log_validation_ppl_to_tensorboard else ("ppl",)
    return _finite(
        {
            names.get(name, f"{name.replace('_', ' ')} {place}"): value
            for name, value in values.items()
            if name not in left_out
        }
    )


def is_also_over_samples(name: str) -> bool:
    """Return whether TensorBoard gets the curve over consumed samples, too."""
    return not any(part in name for part in _ONLY_OVER_ITERATIONS)


def _finite(found: Mapping[str, float | None]) -> dict[str, float]:
    return {name: value for name, value in found.items() if value is not None and math.isfinite(value)}


class TensorBoardCurves:
    """Curves in TensorBoard's event files. Requires the package tensorboard.

    Args:
        folder: `--tensorboard-dir`.
        run: an identifier that stays the same when the run resumes; None: the run cannot resume.
        queue_size: number of events buffered in memory.
        iteration, consumed_samples: where the run starts or resumes; later points of the same run are removed.
    """

    def __init__(
        self, folder: Path, *, run: str | None, queue_size: int, iteration: int, consumed_samples: int
    ) -> None:
        logging.getLogger("tensorboard").setLevel(logging.ERROR)  # it warns that TensorFlow is missing
        from torch.utils.tensorboard import SummaryWriter  # noqa: PLC0415 (optional package)

        suffix, self._folder = "", folder
        with report_log_errors(folder):
            if run is not None:
                suffix = f".megatrain-{hashlib.sha256(run.encode()).hexdigest()[:12]}"
                for path in sorted(folder.glob(f"events.out.tfevents.*{suffix}")):
                    remove_later_events(path, iteration=iteration, consumed_samples=consumed_samples)
            self._writer = SummaryWriter(str(folder), max_queue=queue_size, filename_suffix=suffix)

    def write(self, scalars: Mapping[str, float], *, iteration: int, consumed_samples: int) -> None:
        """Add a point to each curve over iterations and, for most, to the curve over samples."""
        with report_log_errors(self._folder):
            for name, value in scalars.items():
                self._writer.add_scalar(name, value, iteration)
                if is_also_over_samples(name):
                    self._writer.add_scalar(f"{name}{VS_SAMPLES}", value, consumed_samples)

    def flush(self) -> None:
        """Write buffered points to disk."""
        with report_log_errors(self._folder):
            self._writer.flush()

    def close(self) -> None:
        """Write buffered points and close."""
        with report_log_errors(self._folder):
            self._writer.close()


def remove_later_events(path: Path, *, iteration: int, consumed_samples: int) -> None:
    """Remove the points after this iteration or sample count from an event file, and an incomplete record at its end."""
    kept, is_changed = [], False
    with os.fdopen(open_regular(path), "rb") as file:
        content = file.read()
    for record, event in _records(content):
        points = event.summary.value
        is_late = any(
            event.step > (consumed_samples if value.tag.endswith(VS_SAMPLES) else iteration)
            for value in points
        )
        is_changed |= is_late
        if not is_late:
            kept.append(record)
    shortened = b"".join(kept)
    if is_changed or len(shortened) < len(content):
        temporary = path.with_name(f".{path.name}.tmp")
        temporary.write_bytes(shortened)
        temporary.replace(path)


def _records(content: bytes) -> Iterator[tuple[bytes, Any]]:
    """Yield each complete record with its event. Layout: length (8 bytes), checksum (4), event, checksum (4)."""
    from tensorboard.compat.proto.event_pb2 import Event  # noqa: PLC0415 (optional package)

    start = 0
    while start + 12 <= len(content):
        stop = start + 12 + int.from_bytes(content[start : start + 8], "little") + 4
        if stop > len(content):
            return
        yield content[start:stop], Event.FromString(content[start + 12 : stop - 4])
        start = stop


class WandbCurves:
    """Curves of one W&B run. A run that resumes with the same `--save` folder continues its W&B run.

    A thread of its own calls W&B, which may wait for the network: training never waits for it, and its end only a limited time.

    Args:
        config: the logging section; `wandb_project` is set.
        save_folder: the `--save` folder, if there is one.
        settings: the run's configuration, uploaded to W&B.
        warn: prints a warning; called by the thread that calls the methods.
        seconds_to_finish: limit of `close`.
    """

    def __init__(
        self,
        config: LoggingConfig,
        *,
        save_folder: Path | None,
        settings: Mapping[str, Any],
        warn: Callable[[str], None],
        seconds_to_finish: float = 60.0,
    ) -> None:
        self._config, self._save_folder, self._settings = config, save_folder, settings
        self._warn, self._seconds_to_finish = warn, seconds_to_finish
        self._points: queue.Queue[tuple[int, dict[str, float]] | None] = queue.Queue(_MAX_WAITING_POINTS)
        self._problem: str | None = None
        self._is_on = True
        self._thread = threading.Thread(target=self._send, name=_WANDB_THREAD, daemon=True)
        self._thread.start()

    def write(self, scalars: Mapping[str, float], *, iteration: int, consumed_samples: int) -> None:
        """Add a point to each curve. W&B keeps the first of two points with the same iteration."""
        if self._points.full():
            self._problem = self._problem or f"{_MAX_WAITING_POINTS} points wait for it"
        self._disable_after_a_problem()
        if self._is_on:
            # W&B plots any curve over any other, so `consumed samples` replaces Megatron-LM's `... vs samples` curves.
            self._points.put_nowait((iteration, {**scalars, "consumed samples": consumed_samples}))

    def flush(self) -> None:
        """Do nothing: W&B writes in a process of its own."""

    def close(self) -> None:
        """Send buffered points and finish the W&B run."""
        if self._is_on and not self._points.full():
            self._points.put_nowait(None)
            self._thread.join(self._seconds_to_finish)
        if self._thread.is_alive():
            self._problem = self._problem or f"it did not finish within {self._seconds_to_finish:g} s"
        self._disable_after_a_problem()

    def _send(self) -> None:
        """Start the W&B run, send points and finish it: main function of the thread. An exception of W&B is a problem of it alone."""
        try:
            run = self._start()
            for iteration, scalars in iter(self._points.get, None):
                run.log(scalars, step=iteration)
            run.finish()
        except (Exception, SystemExit) as error:  # noqa: BLE001 (an error of W&B or the network must not stop training)
            self._problem = f"{type(error).__name__}: {error}"

    def _start(self) -> Any:
        """Start or continue the W&B run, and store its id."""
        import wandb  # noqa: PLC0415 (optional package)

        config, save = self._config, self._save_folder
        folder = Path(config.wandb_save_dir or (save / "wandb" if save else "."))
        folder.mkdir(parents=True, exist_ok=True)
        id_file = save / _RUN_ID_FILE if save else None
        has_id = id_file is not None and id_file.exists()
        run_id = read_regular(id_file, max_bytes=1000).decode().strip() if id_file and has_id else ""
        run = wandb.init(
            project=config.wandb_project,
            name=config.wandb_exp_name,
            entity=config.wandb_entity,
            dir=str(folder),
            config=dict(self._settings),
            id=run_id or None,
            resume="allow",
        )
        if id_file is not None:
            replace_file(id_file, [f"{run.id}\n".encode()])
        return run

    def _disable_after_a_problem(self) -> None:
        """Print a warning and send nothing more, once there is a problem."""
        if self._is_on and self._problem is not None:
            self._is_on = False
            self._warn(f"> warning: W&B is disabled for the rest of the run: {self._problem}")


def is_wandb_hanging() -> bool:
    """Return whether a call of W&B has not returned, after the run: its exit handler would not return either."""
    return any(thread.name == _WANDB_THREAD for thread in threading.enumerate())
