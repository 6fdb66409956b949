"""Curves of a run, under Megatron-LM's names, computed from the fields of `metrics.jsonl`.

    {"lm_loss": 2.5, "consumed_samples": 40, ...}  ->  {"lm loss": 2.5, "lm loss vs samples": 2.5 at 40, ...}

TensorBoard: a write that fails raises LogError, perhaps some points later. The event files of a run have a hash of its `--save` folder in their names. On resume, points after the
resumed iteration are removed from the run's own files only: several runs may share a folder. `trackers.py` has W&B and others.
"""

from __future__ import annotations

import hashlib
import logging
import math
import os
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

from megatrain.config import LoggingConfig
from megatrain.storage.files import open_regular
from megatrain.training.logging.metrics_file import report_log_errors

_FLAG = "--tensorboard-dir"
VS_SAMPLES = " vs samples"
"""Suffix of a curve over consumed samples; the curve without it is over iterations."""
_ONLY_OVER_ITERATIONS = ("iteration-time", "throughput", "-time", "mem-", "samples vs steps", "decoupled-")


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
        "decoupled-learning-rate": values["decoupled_learning_rate"],
        "batch-size": values["global_batch_size"],
        "lm loss": values["lm_loss"],
        "sop loss": values["sop_loss"],
        "z loss": values["z_loss"],
        "indexer loss": values["indexer_loss"],
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
        with report_log_errors(folder, _FLAG):
            if run is not None:
                suffix = f".megatrain-{hashlib.sha256(run.encode()).hexdigest()[:12]}"
                for path in sorted(folder.glob(f"events.out.tfevents.*{suffix}")):
                    remove_later_events(path, iteration=iteration, consumed_samples=consumed_samples)
            self._writer = SummaryWriter(str(folder), max_queue=queue_size, filename_suffix=suffix)

    def write(self, scalars: Mapping[str, float], *, iteration: int, consumed_samples: int) -> None:
        """Add a point to each curve over iterations and, for most, to the curve over samples."""
        with report_log_errors(self._folder, _FLAG):
            for name, value in scalars.items():
                self._writer.add_scalar(name, value, iteration)
                if is_also_over_samples(name):
                    self._writer.add_scalar(f"{name}{VS_SAMPLES}", value, consumed_samples)

    def flush(self) -> None:
        """Write buffered points to disk."""
        with report_log_errors(self._folder, _FLAG):
            self._writer.flush()

    def close(self) -> None:
        """Write buffered points and close."""
        with report_log_errors(self._folder, _FLAG):
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
