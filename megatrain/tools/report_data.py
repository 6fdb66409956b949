"""Data of a report, read from the `metrics.jsonl`, `config.yaml` and `status.json` of runs.

RUN/metrics.jsonl ─> rows ─> columns of numbers, downsampled for long runs
RUN/config.yaml of all runs ─> the settings that differ
"""

from __future__ import annotations

import json
import math
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

from megatrain.config.errors import InputError

CURVES = (
    "lm_loss",
    "learning_rate",
    "grad_norm",
    "tokens_per_second_per_gpu",
    "mfu",
    "iteration_ms",
    "max_memory_bytes",
    "params_norm",
    "num_zeros",
    "global_batch_size",
    "loss_scale",
)
ROUTER_CURVES: dict[str, Callable[[list[float]], float]] = {
    "max_load": max,
    "entropy": statistics.fmean,
    "dropped": statistics.fmean,
}
"""Reduction of each router figure over the layers with experts."""
MAX_BUCKETS = 500
"""Number of intervals of a long run. Each curve keeps its minimum and maximum in each interval, so that no spike is lost."""
MAX_LAST_LOSSES = 100
"""Iterations at the end of a run over which its loss is averaged; at most a tenth of the run."""
Columns = dict[str, list[float | None]]
_PATH_SETTINGS = ("checkpoint.save", "checkpoint.load", "logging.metrics_file")


@dataclass(frozen=True)
class Means:
    """Means over intervals of a long run, from which smoothed curves are drawn: the points that are kept are extremes."""

    x: Columns
    """Values at the end of each interval."""
    curves: Columns


@dataclass(frozen=True, kw_only=True)
class RunData:
    """The data of one run in the page."""

    name: str
    folder: str
    x: Columns
    """`iteration`, `samples`, `tokens` (None if unknown) and `hours` of training of each point."""
    curves: Columns
    """Same length as `x`; None: no value."""
    means: Means | None
    """None unless the run was downsampled."""
    validations: dict[str, list[tuple[int, float | None]]]
    """Iteration and loss of each evaluation, by split or dataset."""
    settings: dict[str, Any] = field(default_factory=dict)
    """By path, such as `optimizer.lr`; empty without a config.yaml."""
    summary: dict[str, Any] = field(default_factory=dict)


def read_run(path: Path, name: str) -> RunData:
    """Read one run from its folder or its metrics file.

    Raises:
        InputError: there are no metrics.
    """
    file = path / "metrics.jsonl" if path.is_dir() else path
    if not file.is_file():
        raise InputError(
            f"{path} has no metrics.jsonl" if path.is_dir() else f"{path} does not exist",
            fix="name the --save folder or the --metrics-file of a run",
        )
    steps, evaluations = _rows(file)
    if not steps and not evaluations:
        raise InputError(
            f"{file} has no iterations yet", fix="wait for the first iteration, or name another run"
        )
    folder = file.parent
    settings = _settings(folder / "config.yaml")
    x, curves, means = _columns(steps, settings.get("data.seq_length"))
    validations: dict[str, list[tuple[int, float | None]]] = {}
    for row in evaluations:
        validations.setdefault(row["validation"], []).append((row["iteration"], _number(row.get("loss"))))
    return RunData(
        name=name,
        folder=str(folder),
        x=x,
        curves=curves,
        means=means,
        validations=validations,
        settings=settings,
        summary=_summary(steps, validations, folder / "status.json"),
    )


def run_names(paths: Sequence[Path]) -> list[str]:
    """Return the shortest trailing parts of the paths that differ from each other."""
    parts = [path.resolve().parts for path in paths]
    if all(path.name == "metrics.jsonl" for path in paths):
        parts = [one[:-1] for one in parts]
    for count in range(1, max(map(len, parts)) + 1):
        names = ["/".join(one[-count:]) for one in parts]
        if len(set(names)) == len(names):
            return names
    return [f"{number} {path}" for number, path in enumerate(map(str, paths), 1)]


def differing_settings(runs: Sequence[RunData]) -> list[tuple[str, list[str]]]:
    """Return path and values of the settings that differ between runs, without the paths of the runs themselves."""
    paths = dict.fromkeys(path for run in runs for path in run.settings)
    rows = [(path, [_displayed(run, path) for run in runs]) for path in paths if path not in _PATH_SETTINGS]
    return [(path, values) for path, values in rows if len(set(values)) > 1]


def all_settings(runs: Sequence[RunData]) -> list[tuple[str, list[str]]]:
    """Return path and values of all settings."""
    paths = dict.fromkeys(path for run in runs for path in run.settings)
    return [(path, [_displayed(run, path) for run in runs]) for path in paths]


def kept_rows(columns: Sequence[Sequence[float | None]], *, max_buckets: int = MAX_BUCKETS) -> list[int]:
    """Return the rows to keep: of each interval the first row, and the minimum and maximum of each column."""
    num_rows = len(columns[0]) if columns else 0
    if num_rows <= 2 * max_buckets:
        return list(range(num_rows))
    kept = {num_rows - 1}
    for interval in _intervals(num_rows, max_buckets):
        kept.add(interval[0])
        for column in columns:
            points = [(value, row) for row in interval if (value := column[row]) is not None]
            if points:
                kept |= {min(points)[1], max(points)[1]}
    return sorted(kept)


def _intervals(num_rows: int, count: int) -> list[range]:
    return [range(n * num_rows // count, (n + 1) * num_rows // count) for n in range(count)]


def _rows(file: Path) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """Return iterations and evaluations, without an incomplete line that a running or killed run leaves."""
    steps: dict[int, dict[str, Any]] = {}
    evaluations: dict[tuple[int, str], dict[str, Any]] = {}
    with file.open(encoding="utf-8", errors="replace") as lines:
        for line in lines:
            try:
                row = json.loads(line)
            except ValueError:
                continue
            if not isinstance(row, dict) or not isinstance(row.get("iteration"), int):
                continue
            if "validation" in row:
                evaluations[row["iteration"], str(row["validation"])] = row
            else:
                steps[row["iteration"]] = row
    return [steps[number] for number in sorted(steps)], [evaluations[key] for key in sorted(evaluations)]


def _columns(
    steps: Sequence[dict[str, Any]], seq_length: int | None
) -> tuple[Columns, Columns, Means | None]:
    """Return x values and curves of the points that are kept, and means if the run was downsampled."""
    hours, total = [], 0.0
    for row in steps:
        total += (_number(row.get("iteration_ms")) or 0.0) / 3.6e6
        hours.append(total)
    x = {
        "iteration": [_number(row["iteration"]) for row in steps],
        "samples": [_number(row.get("consumed_samples")) for row in steps],
        "tokens": [_tokens(row, seq_length) for row in steps],
        "hours": [_number(value) for value in hours],
    }
    curves = {name: [_number(row.get(name)) for row in steps] for name in CURVES}
    curves |= {name: [_router_value(row, name) for row in steps] for name in ROUTER_CURVES}
    curves = {name: column for name, column in curves.items() if any(value is not None for value in column)}
    kept = kept_rows(list(curves.values()))
    return _at(x, kept), _at(curves, kept), _means(x, curves) if len(kept) < len(steps) else None


def _tokens(row: dict[str, Any], seq_length: int | None) -> float | None:
    """Return the consumed tokens of a row; without the field, those of its samples."""
    tokens, samples = _number(row.get("consumed_tokens")), _number(row.get("consumed_samples"))
    if tokens is None and samples is not None and seq_length is not None:
        return samples * seq_length
    return tokens


def _router_value(row: dict[str, Any], name: str) -> float | None:
    layers = (row.get("routers") or {}).get("layers", ())
    values = [value for layer in layers if (value := _number(layer.get(name))) is not None]
    return _number(ROUTER_CURVES[name](values)) if values else None


def _at(columns: Columns, rows: Sequence[int]) -> Columns:
    return {name: [column[row] for row in rows] for name, column in columns.items()}


def _means(x: Columns, curves: Columns) -> Means:
    intervals = _intervals(len(x["iteration"]), MAX_BUCKETS)
    means: Columns = {}
    for name, column in curves.items():
        by_interval = [
            [value for row in interval if (value := column[row]) is not None] for interval in intervals
        ]
        means[name] = [_number(statistics.fmean(values)) if values else None for values in by_interval]
    return Means(_at(x, [interval[-1] for interval in intervals]), means)


def _summary(
    steps: Sequence[dict[str, Any]],
    validations: dict[str, list[tuple[int, float | None]]],
    status_file: Path,
) -> dict[str, Any]:
    """Return the run's row in the table of runs."""
    last = steps[-1] if steps else {}
    speeds = [
        value for row in steps[1:] if (value := _number(row.get("tokens_per_second_per_gpu"))) is not None
    ]
    mfus = [value for row in steps[1:] if (value := _number(row.get("mfu"))) is not None]
    losses = [loss for _, loss in validations.get("valid", []) if loss is not None]
    return {
        "iterations": last.get("iteration", 0),
        "tokens": last.get("consumed_tokens"),
        "loss": _last_loss(steps),
        "validation": losses[-1] if losses else None,
        "tokens_per_second_per_gpu": statistics.median(speeds) if speeds else None,
        "mfu": statistics.median(mfus) if mfus else None,
        "max_memory_bytes": last.get("max_memory_bytes"),
        "hours": sum(_number(row.get("iteration_ms")) or 0.0 for row in steps) / 3.6e6,
        "status": _status(status_file),
    }


def _last_loss(steps: Sequence[dict[str, Any]]) -> float | None:
    """Return the mean training loss at the end of a run: one iteration's is too noisy to compare with an evaluation's."""
    losses = [_number(row.get("lm_loss")) for row in steps if not row.get("skipped")]
    last = [loss for loss in losses[-max(1, min(MAX_LAST_LOSSES, len(losses) // 10)) :] if loss is not None]
    return _number(statistics.fmean(last)) if last else None


def _status(file: Path) -> str:
    try:
        status = json.loads(file.read_text(encoding="utf-8"))
        code = status["exit_code"]
        end = str(status["reason"]) if code is None else f"{status['reason']} (exit code {code})"
        refused = status.get("refused_start")
        return f"{end}; a later start was refused: {refused['reason']}" if refused else end
    except (OSError, ValueError, KeyError, TypeError):
        return "unknown"


def _settings(file: Path) -> dict[str, Any]:
    """Return the settings of a config.yaml by path; empty if it cannot be read."""
    try:
        sections = yaml.safe_load(file.read_text(encoding="utf-8"))
    except (OSError, ValueError, yaml.YAMLError):
        return {}
    if not isinstance(sections, dict):
        return {}
    return {
        f"{section}.{name}": value
        for section, values in sections.items()
        if isinstance(values, dict)
        for name, value in values.items()
    }


def _displayed(run: RunData, path: str) -> str:
    if path not in run.settings:
        return "unknown"
    value = run.settings[path]
    if isinstance(value, bool):
        return "on" if value else "off"
    return "none" if value is None else " ".join(map(str, value)) if isinstance(value, list) else str(value)


def _number(value: Any) -> float | None:
    """Return the value with six digits, more than are visible; None if it is not a finite number."""
    if not isinstance(value, int | float) or isinstance(value, bool) or not math.isfinite(value):
        return None
    return value if isinstance(value, int) else float(f"{value:.6g}")
