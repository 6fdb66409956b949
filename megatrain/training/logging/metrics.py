"""Megatron-LM's log line, and figures of a run.

The columns of the log line have Megatron-LM's names and order, because scripts parse them; tokens/s and MFU are appended.
"""

from __future__ import annotations

import math
import resource
from collections.abc import Mapping
from dataclasses import asdict
from datetime import datetime
from typing import Any

import torch

from megatrain.training.routers import RouterReport

_MIN_COLUMNS = 160
"""Width of a terminal for Megatron-LM's columns."""
PEAK_TFLOPS = {
    "GB200": 2500.0, "B200": 2250.0,
    "GH200": 989.0, "H200 NVL": 835.5, "H200": 989.0, "H100 NVL": 835.5, "H100 PCIe": 756.5, "H100": 989.0, "H800": 989.0,
    "A100": 312.0,
}  # fmt: skip
"""Peak dense bf16 TFLOP/s of a GPU, from NVIDIA's data sheets; SXM, unless the name says more. A name is before those that it contains."""


def peak_tflops(device_name: str | None) -> float | None:
    """Return the peak TFLOP/s of a GPU by its device name; None if it is not known, as on a CPU."""
    return next((peak for name, peak in PEAK_TFLOPS.items() if device_name and name in device_name), None)


def log_line(
    values: dict[str, Any],
    *,
    train_iters: int,
    has_throughput: bool,
    speed_unit: str,
    world_size: int,
    columns: float = math.inf,
) -> str:
    """Return the log line of an interval: Megatron-LM's columns in its order, then speed; on a narrow terminal a short form.

    Args:
        values: the fields of `metrics.jsonl`, as means over the interval.
        train_iters: the last iteration of the run.
        has_throughput: include Megatron-LM's TFLOP/s column.
        speed_unit: name of the speed column.
        world_size: number of ranks over which the speed column is summed.
        columns: width of the terminal; infinite for a file or a pipe, whose readers parse Megatron-LM's columns.
    """
    if columns < _MIN_COLUMNS:
        speed = f"{values['tokens_per_second_per_gpu'] * world_size:,.0f} {speed_unit}"
        return _short_line(values, start=f"{values['iteration']}/{train_iters}", speed=speed, columns=columns)
    now = datetime.now().isoformat(sep=" ", timespec="microseconds")  # noqa: DTZ005 (local time, for human readers)
    parts = [
        f" [{now}] iteration {values['iteration']:8d}/{train_iters:8d}",
        f"consumed samples: {values['consumed_samples']:12d}",
        f"elapsed time per iteration (ms): {values['iteration_ms']:.1f}",
        f"throughput per GPU (TFLOP/s/GPU): {values['tflops_per_gpu']:.1f}" if has_throughput else None,
        f"learning rate: {values['learning_rate']:.6E}",
        f"decoupled learning rate: {rate:.6E}"
        if (rate := values["decoupled_learning_rate"]) is not None
        else None,
        f"global batch size: {values['global_batch_size']:5d}",
        f"lm loss: {values['lm_loss']:.6E}",
        *(f"{name}: {loss:.6E}" for name, loss in _more_losses(values).items()),
        f"loss scale: {values['loss_scale']:.1f}",
        f"grad norm: {values['grad_norm']:.3f}",
        f"num zeros: {values['num_zeros']}" if values["num_zeros"] is not None else None,
        f"params norm: {values['params_norm']:.3f}" if values["params_norm"] is not None else None,
        f"number of skipped iterations: {values['skipped']:3d}",
        f"number of nan iterations: {values['nan']:3d}",
        f"{speed_unit}: {values['tokens_per_second_per_gpu'] * world_size:.0f}",
        f"MFU: {100 * values['mfu']:.1f} %" if values["mfu"] is not None else None,
        f"max attention logit: {logit:.3f}" if (logit := values["max_attention_logit"]) is not None else None,
    ]
    return " | ".join(part for part in parts if part is not None) + " |"


def _more_losses(values: dict[str, Any]) -> dict[str, float]:
    """Return the losses besides that of the language model, by Megatron-LM's names."""
    single = {"sop loss": "sop_loss", "z loss": "z_loss", "indexer loss": "indexer_loss"}
    losses = {name: values[key] for name, key in single.items() if values[key] is not None}
    losses |= (values["routers"] or {"losses": {}})["losses"]
    return losses | (values["mtp_losses"] or {}) | (values["kd_losses"] or {})


def _short_line(values: dict[str, Any], *, start: str, speed: str, columns: float) -> str:
    """Return the values of an interval, the most important ones first, as far as the terminal has columns."""
    parts = [
        f" {datetime.now():%H:%M:%S} {start}",  # noqa: DTZ005 (local time, for human readers)
        f"loss {values['lm_loss']:.4f}",
        *(f"{values[name]} {name}" for name in ("skipped", "nan") if values[name]),
        f"grad norm {values['grad_norm']:.2f}",
        f"lr {values['learning_rate']:.2e}",
        speed,
        f"MFU {100 * values['mfu']:.1f} %" if values["mfu"] is not None else None,
        f"{values['iteration_ms']:,.0f} ms",
        *(f"{name} {loss:.4f}" for name, loss in _more_losses(values).items()),
    ]
    line = parts[0] or ""
    for part in filter(None, parts[1:]):
        line = f"{line} | {part}" if len(f"{line} | {part}") <= columns else line
    return line


def evaluation_line(start: str, values: Mapping[str, float], *, columns: float = math.inf) -> str:
    """Return the log line of an evaluation: Megatron-LM's, then the other values of its line of `metrics.jsonl`; `columns` as above."""
    if columns < _MIN_COLUMNS:
        return " | ".join(
            [f" {start}", *(f"{name.replace('_', ' ')} {value:.4g}" for name, value in values.items())]
        )
    names = {"loss": "lm loss value", "ppl": "lm loss PPL", "sop_loss": "sop loss value"}
    parts = [f"{names.get(name, name.replace('_', ' '))}: {value:.6E} | " for name, value in values.items()]
    return f" {start} | {''.join(parts)}"


def max_memory_bytes(device: torch.device) -> int:
    """Return the peak memory so far: of tensors on a GPU, of the whole process on a CPU."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    return 1024 * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss


def router_values(report: RouterReport | None) -> dict[str, Any] | None:
    """Return the field `routers` of `metrics.jsonl`; None without routers."""
    if report is None:
        return None
    return {"losses": dict(report.losses), "layers": [asdict(layer) for layer in report.layers]}


def router_line(values: Mapping[str, Any]) -> str:
    """Return the log line about `router_values`, with extremes over layers.

    experts | max load: 1.31 x mean (layer 5) | dropped assignments: 0.00 % | router entropy: 1.94 (layer 3) to 2.05
    """
    layers = values["layers"]
    most_loaded = max(layers, key=lambda layer: layer["max_load"])
    lowest, highest = (pick(layers, key=lambda layer: layer["entropy"]) for pick in (min, max))
    dropped = sum(layer["dropped"] for layer in layers) / len(layers)
    return (
        f" experts | max load: {most_loaded['max_load']:.2f} x mean (layer {most_loaded['layer']})"
        f" | dropped assignments: {100 * dropped:.2f} %"
        f" | router entropy: {lowest['entropy']:.3f} (layer {lowest['layer']}) to {highest['entropy']:.3f} |"
    )
