"""Data of a report, read from the `metrics.jsonl`, `config.yaml` and `status.json` of runs.

RUN/metrics.jsonl ─> rows ─> columns of numbers, downsampled for long runs
RUN/config.yaml of all runs ─> the settings that differ

Files may be damaged or of strangers: values of another type count as missing, and no text of a file is longer or deeper than a limit.
"""

from __future__ import annotations

import json
import math
import statistics
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from pathlib import Path
from typing import Any

import yaml

from megatrain.checkpoint.checked_files import read_small_file
from megatrain.checkpoint.errors import CheckpointError
from megatrain.checkpoint.find import list_candidates
from megatrain.checkpoint.manifest import MANIFEST_NAME
from megatrain.config.errors import InputError
from megatrain.config.plain_yaml import compose_yaml
from megatrain.data.files import different_ends
from megatrain.training.launch.save_lock import LOCK_NAME, dead_owner

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
    "max_attention_logit",
    "global_batch_size",
    "loss_scale",
)
ROUTER_CURVES: dict[str, Callable[[Sequence[float]], float]] = {
    "max_load": max,
    "entropy": statistics.fmean,
    "dropped": statistics.fmean,
}
"""Reduction of each router figure over the layers with experts."""
MAX_BUCKETS = 500
"""Number of intervals of a long run. Each curve keeps its minimum and maximum in each interval, so that no spike is lost."""
MAX_LAST_LOSSES = 100
"""Iterations at the end of a run over which its loss is averaged; at most a tenth of the run."""
MAX_CONFIG_BYTES = MAX_STATUS_BYTES = 1 << 18
MAX_REASON_CHARACTERS = 160
MAX_SHOWN_CHARACTERS = 1000
"""Limit of the text of a setting."""
Columns = dict[str, list[float | None]]
Evaluations = dict[str, list[tuple[int, float | None]]]
"""Iteration and value of each evaluation, by split or dataset."""
_LOSSES = {"loss": "", "sop_loss": " sop"}
_ACCURACIES = {"token_accuracy": " token", "sop_accuracy": " sop", "accuracy": "", "accuracy_norm": " norm"}
_BITS = {"bits_per_byte": ""}
"""Values of an evaluation, with what follows the name of the split or task."""
_MAX_INTEGER = 1 << 63
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
    validations: Evaluations
    """Losses; the sentence-order loss of split or dataset NAME is `NAME sop`."""
    accuracies: Evaluations = field(default_factory=dict)
    """Shares of right tokens, `NAME token`, of right sentence orders, `NAME sop`, and of documents of tasks, `NAME`, `NAME norm`."""
    bits: Evaluations = field(default_factory=dict)
    """Bits per byte."""
    settings: dict[str, Any] = field(default_factory=dict)
    """By path, such as `optimizer.lr`; empty without a valid config.yaml."""
    note: str | None = None
    """The reason why config.yaml cannot be read; None: it is valid, or there is none."""
    summary: dict[str, Any] = field(default_factory=dict)
    faults: list[tuple[int, str]] = field(default_factory=list)
    """Iterations that updated nothing, and why."""
    saves: list[int] = field(default_factory=list)
    """Iterations of its checkpoints, also of those that are removed by now."""
    resumes: list[int] = field(default_factory=list)
    """Iterations from which it resumed."""
    timers: dict[str, float | None] = field(default_factory=dict)
    """Mean milliseconds of each part of an iteration that was timed."""
    last_activity: float = 0.0
    """Time of the last write of metrics or status, in seconds since the epoch."""

    def recent(self, curve: str, count: int) -> float | None:
        """Return the median of the last points of a curve; None: it has none."""
        found = [value for value in self.curves.get(curve, [])[-count:] if value is not None]
        return statistics.median(found) if found else None


def read_runs(texts: Sequence[str]) -> list[RunData]:
    """Read the runs that a command line names. Raises what `read_run` raises."""
    paths = [Path(text) for text in texts]
    return [read_run(path, name) for path, name in zip(paths, run_names(paths), strict=True)]


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
    settings, note = _settings(folder / "config.yaml")
    x, curves, means = _columns(steps, _number(settings.get("data.seq_length")))
    validations = _evaluations(evaluations, _LOSSES)
    status = _status(folder / "status.json")
    saves, stall_ms = _saves(steps, status, folder)
    return RunData(
        name=name,
        folder=str(folder),
        x=x,
        curves=curves,
        means=means,
        validations=validations,
        accuracies=_evaluations(evaluations, _ACCURACIES),
        bits=_evaluations(evaluations, _BITS),
        settings=settings,
        note=note,
        summary=_summary(steps, validations, status, folder)
        | {"saves": len(saves), "save_stall_seconds": _number(stall_ms / 1000)}
        | {"last_save": max(saves, default=None)},
        faults=_faults(steps),
        saves=saves,
        resumes=[row["iteration"] - 1 for row in steps if row.get("resumed") == 1],
        timers=_timers(steps),
        last_activity=_last_activity(folder, file),
    )


def run_names(paths: Sequence[Path]) -> list[str]:
    """Return the shortest trailing parts of the paths that differ from each other, without names that say nothing."""
    parts = [path.resolve().parts for path in paths]
    for plain in ("metrics.jsonl", "checkpoints"):
        parts = [one[:-1] if one[-1] == plain and len(one) > 2 else one for one in parts]
    return different_ends(parts) or [f"{number} {path}" for number, path in enumerate(map(str, paths), 1)]


def differing_settings(runs: Sequence[RunData]) -> list[tuple[str, list[str]]]:
    """Return path and values of the settings that differ between runs, without the paths of the runs themselves."""
    rows = all_settings(runs)
    return [(path, values) for path, values in rows if len(set(values)) > 1 and path not in _PATH_SETTINGS]


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
            except (ValueError, RecursionError):
                continue
            if not isinstance(row, dict) or not _is_iteration(row.get("iteration")):
                continue
            if "validation" in row:
                evaluations[row["iteration"], str(row["validation"])] = row
            else:
                steps[row["iteration"]] = row
    return [steps[number] for number in sorted(steps)], [
        evaluations[key] for key in sorted(evaluations, key=lambda key: key[0])
    ]


def _evaluations(rows: Sequence[dict[str, Any]], endings: dict[str, str]) -> Evaluations:
    """Return the values with these names; a split without one of them has no entry for it."""
    found: Evaluations = {}
    for row in rows:
        for name in (one for one in endings if one in row):
            found.setdefault(f"{row['validation']}{endings[name]}", []).append(
                (row["iteration"], _number(row[name]))
            )
    return found


def _is_iteration(value: Any) -> bool:
    return type(value) is int and 0 <= value < 1 << 50


def _columns(
    steps: Sequence[dict[str, Any]], seq_length: float | None
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
    kept = kept_rows(list(curves.values()) or [x["iteration"]])
    return _at(x, kept), _at(curves, kept), _means(x, curves) if len(kept) < len(steps) else None


def _tokens(row: dict[str, Any], seq_length: float | None) -> float | None:
    """Return the consumed tokens of a row; without the field, the tokens of its samples."""
    tokens, samples = _number(row.get("consumed_tokens")), _number(row.get("consumed_samples"))
    if tokens is None and samples is not None and seq_length is not None:
        return _number(samples * seq_length)
    return tokens


def _router_value(row: dict[str, Any], name: str) -> float | None:
    layers = _dictionary(row.get("routers")).get("layers")
    layers = layers if isinstance(layers, list) else []
    values = [value for layer in layers if (value := _number(_dictionary(layer).get(name))) is not None]
    return _reduced(ROUTER_CURVES[name], values)


def _at(columns: Columns, rows: Sequence[int]) -> Columns:
    return {name: [column[row] for row in rows] for name, column in columns.items()}


def _means(x: Columns, curves: Columns) -> Means:
    intervals = _intervals(len(x["iteration"]), MAX_BUCKETS)
    means: Columns = {}
    for name, column in curves.items():
        by_interval = [
            [value for row in interval if (value := column[row]) is not None] for interval in intervals
        ]
        means[name] = [_reduced(statistics.fmean, values) for values in by_interval]
    return Means(_at(x, [interval[-1] for interval in intervals]), means)


def _summary(
    steps: Sequence[dict[str, Any]],
    validations: Evaluations,
    status: dict[str, Any],
    folder: Path,
) -> dict[str, Any]:
    """Return the run's row in the table of runs."""
    death, last_losses = _death(status, folder), _last_losses(steps)
    last = steps[-1] if steps else {}
    speeds, mfus = (_numbers(steps[1:], name) for name in ("tokens_per_second_per_gpu", "mfu"))
    losses = [loss for _, loss in validations.get("valid", []) if loss is not None]
    return {
        "iterations": last.get("iteration", 0),
        "tokens": _number(last.get("consumed_tokens")),
        "loss": _reduced(statistics.fmean, last_losses),
        "num_losses": len(last_losses),
        "validation": losses[-1] if losses else None,
        "tokens_per_second_per_gpu": _number(statistics.median(speeds)) if speeds else None,
        "mfu": _number(statistics.median(mfus)) if mfus else None,
        "max_memory_bytes": _number(last.get("max_memory_bytes")),
        "hours": _number(sum(_numbers(steps, "iteration_ms")) / 3.6e6),
        "faults": len(_faults(steps)),
        "is_running": "exit_code" in status and status["exit_code"] is None and death is None,
        "status": (death or _end(status))[:MAX_SHOWN_CHARACTERS],
    }


def _faults(steps: Sequence[dict[str, Any]]) -> list[tuple[int, str]]:
    return [
        (row["iteration"], "NaN" if row.get("nan") else "skipped")
        for row in steps
        if row.get("nan") or row.get("skipped")
    ]


def _timers(steps: Sequence[dict[str, Any]]) -> dict[str, float | None]:
    found: dict[str, list[float]] = {}
    for row in steps:
        for name, value in _dictionary(row.get("timers")).items():
            if (number := _number(value)) is not None:
                found.setdefault(name[:MAX_SHOWN_CHARACTERS], []).append(number)
    return {name: _reduced(statistics.fmean, values) for name, values in found.items()}


def _last_losses(steps: Sequence[dict[str, Any]]) -> list[float]:
    """Return the training losses at the end of a run: one iteration's is too noisy to compare with an evaluation's."""
    losses = [_number(row.get("lm_loss")) for row in steps if not row.get("skipped")]
    return [loss for loss in losses[-max(1, min(MAX_LAST_LOSSES, len(losses) // 10)) :] if loss is not None]


def _status(file: Path) -> dict[str, Any]:
    """Return the content of a status.json; empty if it cannot be read."""
    try:
        return _dictionary(json.loads(read_small_file(file, max_bytes=MAX_STATUS_BYTES)))
    except (CheckpointError, ValueError, RecursionError):
        return {}


def _death(status: dict[str, Any], folder: Path) -> str | None:
    """Describe the end of a run that was killed before it could record one: its lock names a dead process. None: there is none."""
    if status.get("exit_code", 0) is not None or (owner := dead_owner(folder)) is None:
        return None
    since = datetime.fromtimestamp(_last_activity(folder, folder / LOCK_NAME)).astimezone()
    return (
        f"dead since about {since.isoformat(sep=' ', timespec='seconds')}: process {owner.pid} on {owner.host} was killed"
        " before it could record why"
    )


def _last_activity(folder: Path, *files: Path) -> float:
    """Return the time of the last write of these files or the status, in seconds since the epoch."""
    return max(one.stat().st_mtime for one in (*files, folder / "status.json") if one.is_file())


def _end(status: dict[str, Any]) -> str:
    """Return how the run ended, for the user."""
    if not {"exit_code", "reason"} <= status.keys():
        return "unknown"
    code, refused = status["exit_code"], _dictionary(status.get("refused_start"))
    reason = _shortened(str(status["reason"]))
    end = reason if code is None else f"{reason} (exit code {code})"
    return f"{end}; a later start was refused: {_shortened(str(refused.get('reason')))}" if refused else end


def _shortened(reason: str) -> str:
    """Return the first line of a reason; status.json has the others."""
    first = reason.strip().partition("\n")[0]
    return first if len(first) <= MAX_REASON_CHARACTERS else f"{first[:MAX_REASON_CHARACTERS]} ..."


def _saves(steps: Sequence[dict[str, Any]], status: dict[str, Any], folder: Path) -> tuple[list[int], float]:
    """Return the iterations of saves and the milliseconds in which training waited for them, as far as they are known.

    No iteration follows the last save of a job: the newest one is in the status, older ones are known by their folders.
    """
    found = [_dictionary(values) for values in (*(row.get("save") for row in steps), status.get("last_save"))]
    stalls = {str(save.get("iteration")): _number(save.get("stall_ms")) or 0.0 for save in found if save}
    try:
        folders = [one for one in list_candidates(folder) if one.iteration and one.problem is None]
        present = {str(one.iteration) for one in folders if (one.path / MANIFEST_NAME).is_file()}
    except (CheckpointError, OSError):  # a metrics file may be in a folder that cannot be read
        present = set()
    return sorted(int(name) for name in stalls.keys() | present if name.isdecimal()), sum(stalls.values())


def _settings(file: Path) -> tuple[dict[str, Any], str | None]:
    """Return the settings of a config.yaml by path, and the reason if it cannot be read."""
    if not file.exists():
        return {}, None
    try:
        text = read_small_file(file.resolve(), max_bytes=MAX_CONFIG_BYTES).decode()
        return dict(_scalars(compose_yaml(text))), None
    except CheckpointError as error:
        return {}, error.problems[0].text
    except (OSError, ValueError, RecursionError, yaml.YAMLError) as error:
        return {}, f"{file}: not valid YAML: {type(error).__name__}"


def _scalars(root: yaml.Node | None) -> Iterator[tuple[str, Any]]:
    """Yield path and value of each setting: a scalar or a list of scalars. Nodes of another shape are no settings."""
    loader = yaml.SafeLoader("")
    for section, values in _entries(root):
        for name, node in _entries(values):
            if isinstance(node, yaml.ScalarNode):
                yield f"{section}.{name}", _value(loader, node)
            elif isinstance(node, yaml.SequenceNode):
                items = [_value(loader, one) for one in node.value if isinstance(one, yaml.ScalarNode)]
                yield f"{section}.{name}", items


def _value(loader: yaml.SafeLoader, node: yaml.ScalarNode) -> Any:
    value = loader.construct_object(node)
    is_too_large = isinstance(value, int) and abs(value) > _MAX_INTEGER
    return str(node.value) if is_too_large else value


def _entries(node: yaml.Node | None) -> Iterator[tuple[str, yaml.Node]]:
    if isinstance(node, yaml.MappingNode):
        yield from ((key.value, value) for key, value in node.value if isinstance(key, yaml.ScalarNode))


def _displayed(run: RunData, path: str) -> str:
    if path not in run.settings:
        return "unknown"
    value = run.settings[path]
    if isinstance(value, bool):
        return "on" if value else "off"
    text = "none" if value is None else " ".join(map(str, value)) if isinstance(value, list) else str(value)
    return text if len(text) <= MAX_SHOWN_CHARACTERS else f"{text[:MAX_SHOWN_CHARACTERS]} ..."


def _dictionary(value: Any) -> dict[str, Any]:
    return value if isinstance(value, dict) else {}


def _reduced(reduction: Callable[[Sequence[float]], float], values: Sequence[float]) -> float | None:
    try:
        return _number(reduction(values)) if values else None
    except OverflowError:  # a sum of values near the largest
        return None


def _numbers(rows: Sequence[dict[str, Any]], name: str) -> list[float]:
    """Return the numbers of a field, without rows that lack it."""
    return [value for row in rows if (value := _number(row.get(name))) is not None]


def _number(value: Any) -> float | None:
    """Return the value with six digits, more than are visible; None if it is not a finite number."""
    if not isinstance(value, int | float) or isinstance(value, bool):
        return None
    if isinstance(value, int):
        return value if abs(value) <= _MAX_INTEGER else None
    return float(f"{value:.6g}") if math.isfinite(value) else None
