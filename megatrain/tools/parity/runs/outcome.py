"""Outcomes of runs and their differences: `metrics.jsonl`, the last checkpoint, and the numbers of the dry run.

metrics.jsonl     ─┐
last checkpoint   ─┼─> Outcome ──> differences of two outcomes: losses, norms, counts; weights and moments by canonical name
output of rank 0  ─┘         └───> differences of an outcome from its dry run: parameters, iterations, learning rates, counts
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import numpy as np
import numpy.typing as npt
import torch

from megatrain.checkpoint.find import find_checkpoints
from megatrain.checkpoint.manifest import DTYPES
from megatrain.tools.checkpoint.source import opened

_NOT_COMPARED: Final = {
    "iteration_ms", "timers", "tokens_per_second_per_gpu", "tflops_per_gpu", "mfu", "memory_bytes",
    "reserved_memory_bytes", "max_memory_bytes", "energy_joules", "compute_ms", "save", "resumed",
}  # fmt: skip
"""Fields of `metrics.jsonl` that two equal runs need not share: times and memory."""
_SMALLEST: Final = 1e-3
"""Numbers of the metrics are compared relative to their size, or to this if they are smaller."""
_NOISE: Final = 1e-12
"""A tensor whose moments are smaller, relative to the largest of all tensors, has no gradient but rounding errors."""
_FIRST_MOMENTS: Final = ("exp_avg", "momentum_buffer")
_MOST_LINES: Final = 4
_MODEL_LINE: Final = re.compile(r"> model: ([\d,]+) parameters(?:, ([\d,]+) active per token)?")


@dataclass(frozen=True)
class Outcome:
    """The files and printed counts of a finished run."""

    metrics: list[dict[str, Any]]
    """The lines of `metrics.jsonl`."""
    kinds: dict[str, dict[str, npt.NDArray[np.float64]]]
    """Whole tensors of the last checkpoint by kind (weight, or a moment) and canonical name."""
    counters: dict[str, Any]
    """Counters and state of the last checkpoint."""
    num_checkpoints: int
    parameters: tuple[int, int]
    """Parameters and active parameters, as the run has printed them."""

    @classmethod
    def of(cls, save: Path, output: str) -> Outcome:
        """Read the outcome of a run from its folder and the output of rank 0."""
        text = (save / "metrics.jsonl").read_text()
        with opened(save) as reader:
            manifest = reader.manifest
            kinds: dict[str, dict[str, npt.NDArray[np.float64]]] = {}
            for name, tensor in sorted(manifest.tensors.items()):
                for kind, stored in tensor.kinds.items():
                    values = reader.values(name, tensor.shape, kind=kind, dtype=DTYPES[stored.dtype])
                    kinds.setdefault(kind, {})[name] = values.to(torch.float64).numpy()
        if manifest.state["expert_biases"]:
            biases = manifest.state["expert_biases"].items()
            kinds["expert bias"] = {name: np.asarray(values, np.float64) for name, values in biases}
        counters = {
            "iteration": manifest.iteration,
            "consumed_train_samples": manifest.consumed_train_samples,
            "optimizer_step_count": manifest.optimizer_step_count,
        }
        printed = _MODEL_LINE.search(output)
        assert printed is not None, "a run prints the size of its model"
        total, active = (int((number or printed[1]).replace(",", "")) for number in printed.groups())
        return cls(
            metrics=[json.loads(line) for line in text.split("\n") if line],
            kinds=kinds,
            counters=counters,
            num_checkpoints=len(find_checkpoints(save)),
            parameters=(total, active),
        )


def differences(expected: Outcome, found: Outcome, tolerance: float) -> list[str]:
    """Return how an outcome differs, the earliest and largest differences first; tolerance 0: in any bit."""
    num_noise = _num_noise(expected, found) if tolerance else 0
    lines = list(_metric_differences(expected.metrics, found.metrics, tolerance, num_noise))
    lines = lines[:_MOST_LINES] + [f"and {len(lines) - _MOST_LINES} more"] * (len(lines) > _MOST_LINES)
    lines += [
        f"the checkpoint's {name}: {found.counters[name]}, not {value}"
        for name, value in expected.counters.items()
        if found.counters[name] != value
    ]
    if expected.parameters != found.parameters:
        lines.append(f"parameters and active ones: {found.parameters}, not {expected.parameters}")
    return lines + list(_tensor_differences(expected, found, tolerance))


def dry_run_differences(dry: Mapping[str, Any], run: Outcome) -> Iterator[str]:
    """Yield the numbers of a dry run that differ from the numbers of its run, which was not stopped."""
    model, timeline = dry["model"], dry["timeline"]
    steps = {line["iteration"]: line for line in run.metrics if "lm_loss" in line}
    evaluated = {line["iteration"] for line in run.metrics if line.get("validation", "test") != "test"}
    numbers = {
        "parameters": (model["parameters"], run.parameters[0]),
        "active parameters": (model["active_parameters"], run.parameters[1]),
        "iterations": (timeline["train_iters"], max(steps)),
        "samples": (timeline["train_samples"], max(line["consumed_samples"] for line in steps.values())),
        "evaluations": (timeline["evaluations"]["count"], len(evaluated)),
        "checkpoints": (timeline["checkpoints"]["count"], run.num_checkpoints),
    }
    for mark in timeline["landmarks"]:
        line = steps.get(mark["iteration"])
        if line is None:
            continue
        where, size = f"of iteration {mark['iteration']}", line["global_batch_size"]
        numbers[f"learning rate {where}"] = (mark["lr"], line["learning_rate"])
        numbers[f"batch size {where}"] = (mark["global_batch_size"], size)
        numbers[f"samples before {where}"] = (mark["consumed_samples"], line["consumed_samples"] - size)
    for name, (planned, real) in numbers.items():
        if not math.isclose(planned, real, rel_tol=1e-9, abs_tol=1e-12):
            yield f"{name} {planned}, in the run {real}"


def _num_noise(expected: Outcome, found: Outcome) -> int:
    """Return the number of elements whose gradients are rounding errors alone, such as those of biases of keys without RoPE:
    a layout's order of sums decides which of them are zero.
    """
    count = 0
    for kind in expected.kinds.keys() & found.kinds.keys() & {*_FIRST_MOMENTS}:
        own, other = expected.kinds[kind], found.kinds[kind]
        bound = _NOISE * _largest_of(own)
        for name in own.keys() & other.keys():
            sizes = np.maximum(np.abs(own[name]), np.abs(other[name]))
            count += int(np.count_nonzero((sizes > 0) & (sizes <= bound)))
    return count


def _metric_differences(
    expected: list[dict[str, Any]], found: list[dict[str, Any]], tolerance: float, num_noise: int
) -> Iterator[str]:
    if len(expected) != len(found):
        yield f"{len(found)} lines of metrics, not {len(expected)}"
    for own, other in zip(expected, found, strict=False):
        first, second = dict(_values(own)), dict(_values(other))
        where = f"iteration {own.get('iteration')} {own.get('validation', '')}".strip()
        for name in sorted(first.keys() | second.keys()):
            value, real = first.get(name), second.get(name)
            if name == "num_zeros" and value is not None and real is not None:
                is_equal = abs(real - value) <= num_noise
            else:
                is_equal = _is_equal(value, real, tolerance)
            if not is_equal:
                yield f"{where}: {name} {real}, not {value}"


def _values(line: Any, name: str = "") -> Iterator[tuple[str, Any]]:
    """Yield the values of nested JSON by their path."""
    if isinstance(line, dict):
        for key, value in line.items():
            if key not in _NOT_COMPARED:
                yield from _values(value, f"{name}.{key}".lstrip("."))
    elif isinstance(line, list):
        for number, value in enumerate(line):
            yield from _values(value, f"{name}[{number}]")
    else:
        yield name, line


def _is_equal(expected: Any, found: Any, tolerance: float) -> bool:
    if isinstance(expected, float) and isinstance(found, float | int) and tolerance:
        return abs(found - expected) <= tolerance * max(abs(expected), _SMALLEST)
    return bool(expected == found)


def _tensor_differences(expected: Outcome, found: Outcome, tolerance: float) -> Iterator[str]:
    """Yield the largest difference of each kind, relative to the largest value of its tensor."""
    idle = {
        name
        for kind in expected.kinds.keys() - {"weight", "expert bias"}
        for name, values in expected.kinds[kind].items()
        if _largest(values) <= _NOISE ** (2 if "sq" in kind else 1) * _largest_of(expected.kinds[kind])
    }
    for kind in sorted(expected.kinds.keys() | found.kinds.keys()):
        own, other = expected.kinds.get(kind, {}), found.kinds.get(kind, {})
        if own.keys() != other.keys():
            yield f"{kind}: {sorted(own.keys() ^ other.keys())[:3]} in one of the checkpoints only"
        errors = {}
        for name in own.keys() & other.keys():
            scale = _largest_of(own) if name in idle else _largest(own[name])
            if own[name].shape != other[name].shape:
                yield f"{kind} {name}: shape {other[name].shape}, not {own[name].shape}"
            elif own[name].size:
                errors[name] = float(np.max(np.abs(own[name] - other[name]))) / max(scale, 1e-300)
        worst = max(errors, key=lambda name: (math.isnan(errors[name]), errors[name]), default=None)
        if worst is not None and not errors[worst] <= tolerance:
            count = sum(not error <= tolerance for error in errors.values())
            yield f"{kind} {worst}: differs by {errors[worst]:.1e} of its largest value ({count} of {len(errors)} tensors differ)"


def _largest(values: npt.NDArray[np.float64]) -> float:
    return float(np.max(np.abs(values), initial=0.0))


def _largest_of(tensors: Mapping[str, npt.NDArray[np.float64]]) -> float:
    return max(map(_largest, tensors.values()), default=0.0)
