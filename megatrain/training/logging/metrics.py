"""The forms in which a run is shown: Megatron-LM's log line, `metrics.jsonl` as the source of truth, and `status.json` at the end.

The log line's columns stand in Megatron-LM's order, which people's scripts parse; tokens/s and MFU are added behind.
"""

from __future__ import annotations

import json
import math
import os
import resource
import sys
from datetime import datetime
from pathlib import Path
from typing import Any

import torch

PEAK_TFLOPS = {"H200": 989.0, "H100": 989.0, "GH200": 989.0, "H800": 989.0, "A100": 312.0, "B200": 2250.0}
"""Dense bf16 matrix rate of a GPU in 10^12 operations a second, from NVIDIA's data sheets (SXM)."""


def peak_tflops(device_name: str | None) -> float | None:
    """Peak rate of the GPU by its name; None where it is not known, as on a CPU."""
    return next((peak for name, peak in PEAK_TFLOPS.items() if device_name and name in device_name), None)


class MetricsFile:
    """Appends one JSON object a line. Lines past the iteration that a run resumes from are cut first."""

    def __init__(self, path: Path, *, resumed_iteration: int) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        kept = _lines_up_to(path, resumed_iteration) if path.exists() and resumed_iteration else []
        temporary = path.with_name(path.name + ".tmp")
        temporary.write_text("".join(kept), encoding="utf-8")
        temporary.replace(path)
        self._file = path.open("a", encoding="utf-8")

    def write(self, values: dict[str, Any]) -> None:
        """Append an object; numbers that JSON lacks become null."""
        self._file.write(json.dumps(_finite(values)) + "\n")
        self._file.flush()

    def close(self) -> None:
        self._file.close()


def _finite(value: Any) -> Any:
    """With None for numbers that JSON lacks."""
    if isinstance(value, dict):
        return {name: _finite(item) for name, item in value.items()}
    if isinstance(value, list):
        return [_finite(item) for item in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def metrics_path(save: str | None, metrics_file: str | None) -> Path | None:
    """Where the metrics go: `--metrics-file`, else beside the checkpoints, else nowhere."""
    if metrics_file is not None:
        return Path(metrics_file)
    return Path(save) / "metrics.jsonl" if save is not None else None


def is_metrics_file(path: Path) -> bool:
    """Whether the file may be cut and written: there is none, it is empty, or it begins like one of ours."""
    if not path.exists():
        return True
    with path.open("rb") as file:
        first = file.readline()
    return not first.strip() or _iteration_of(first) is not None


def _iteration_of(line: str | bytes) -> int | None:
    try:
        values = json.loads(line)
    except ValueError:
        return None
    number = values.get("iteration") if isinstance(values, dict) else None
    return number if isinstance(number, int) else None


def _lines_up_to(path: Path, iteration: int) -> list[str]:
    """Lines of iterations up to this one; a line that a killed run has not finished ends them."""
    kept = []
    for line in path.read_text(encoding="utf-8").splitlines(keepends=True):
        number = _iteration_of(line)
        if number is None:
            break
        if number <= iteration:
            kept.append(line)
    return kept


def write_status(folder: Path, *, exit_code: int | None, reason: str, iteration: int | None) -> None:
    """`status.json`: the exit code that a launcher such as torchrun hides; null while the run goes on.

    `iteration` is null for a run that was not started.
    """
    folder.mkdir(parents=True, exist_ok=True)
    status = {
        "exit_code": exit_code,
        "reason": reason,
        "iteration": iteration,
        "pid": os.getpid(),
        "time": datetime.now().astimezone().isoformat(timespec="seconds"),
    }
    temporary = folder / "status.json.tmp"
    temporary.write_text(json.dumps(status) + "\n", encoding="utf-8")
    temporary.replace(folder / "status.json")


def log_line(
    values: dict[str, Any], *, train_iters: int, has_throughput: bool, speed_unit: str, world_size: int
) -> str:
    """The line of an interval: Megatron-LM's columns in its order, then speed.

    Args:
        values: those of `metrics.jsonl`, as means over the interval.
        train_iters: at which the run ends.
        has_throughput: whether Megatron-LM's column of TFLOP/s is there.
        speed_unit, world_size: how the last column is called, and of how many ranks it is the sum.
    """
    now = datetime.now().isoformat(sep=" ", timespec="microseconds")  # noqa: DTZ005 (local time, as people read it)
    parts = [
        f" [{now}] iteration {values['iteration']:8d}/{train_iters:8d}",
        f"consumed samples: {values['consumed_samples']:12d}",
        f"elapsed time per iteration (ms): {values['iteration_ms']:.1f}",
        f"throughput per GPU (TFLOP/s/GPU): {values['tflops_per_gpu']:.1f}" if has_throughput else None,
        f"learning rate: {values['learning_rate']:.6E}",
        f"global batch size: {values['global_batch_size']:5d}",
        f"lm loss: {values['lm_loss']:.6E}",
        f"z loss: {values['z_loss']:.6E}" if values["z_loss"] is not None else None,
        *(f"{name}: {loss:.6E}" for name, loss in (values["routers"] or {"losses": {}})["losses"].items()),
        f"loss scale: {values['loss_scale']:.1f}",
        f"grad norm: {values['grad_norm']:.3f}",
        f"num zeros: {values['num_zeros']}" if values["num_zeros"] is not None else None,
        f"params norm: {values['params_norm']:.3f}" if values["params_norm"] is not None else None,
        f"number of skipped iterations: {values['skipped']:3d}",
        f"number of nan iterations: {values['nan']:3d}",
        f"{speed_unit}: {values['tokens_per_second_per_gpu'] * world_size:.0f}",
        f"MFU: {100 * values['mfu']:.1f} %" if values["mfu"] is not None else None,
    ]
    return " | ".join(part for part in parts if part is not None) + " |"


def max_memory_bytes(device: torch.device) -> int:
    """Largest memory held so far: by tensors on a GPU, by the whole process on a CPU."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    used = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return used if sys.platform == "darwin" else used * 1024
