"""`megatrain watch`: the state of runs in a terminal, refreshed while they train.

It reads the files of the `--save` folders alone: it works on any host that sees them, and never disturbs a run.
"""

from __future__ import annotations

import argparse
import re
import shutil
import statistics
import sys
import textwrap
import time
from collections.abc import Iterator, Sequence
from datetime import datetime
from typing import Any, Final

from megatrain.tools.report_data import RunData, read_runs
from megatrain.tools.subcommands import add_command, duration

_BARS: Final = "▁▂▃▄▅▆▇█"
_CURVES: Final = {"lm_loss": "loss", "grad_norm": "gradient", "max_load": "experts"}
_RECENT: Final = 20
"""Iterations whose median is the current speed."""
_SHOWN_FAULTS: Final = 5
_SILENCE: Final = "no sign of life"
_PLAIN, _DIM, _RED, _GREEN, _YELLOW, _BLUE = (f"\x1b[{code}m" for code in (0, 2, 31, 32, 33, 34))
_CLEAR: Final = "\x1b[H\x1b[2J"


def add_flags(commands: Any) -> None:
    """Add `megatrain watch`."""
    watch = add_command(commands, "watch", run)
    watch.add("runs RUN ...", "--save folder or --metrics-file of a run")
    watch.add("--interval SECONDS", "time between two looks", 5.0)
    watch.add("--once", "print the state once; the default without a terminal")


def run(arguments: argparse.Namespace) -> None:
    """Show progress, curves, evaluations and saves of runs, and repeat it until Ctrl-C."""
    while True:
        (width, height), now = shutil.get_terminal_size(), time.time()
        is_terminal = sys.stdout.isatty()
        runs = [
            shown(one, width=width, now=now, is_coloured=is_terminal) for one in read_runs(arguments.runs)
        ]
        if arguments.once or not is_terminal:
            print("\n\n".join(runs))
            return
        print(f"{_CLEAR}{fitted(runs, height)}\n\nCtrl-C ends the display, not the runs", flush=True)
        try:
            time.sleep(max(arguments.interval, 0.1))
        except KeyboardInterrupt:
            return


def fitted(runs: Sequence[str], height: int) -> str:
    """Return the lines about runs; only the first ones of each if a terminal has fewer rows than all of them."""
    each = max((height - 3) // len(runs) - 1, 1)
    if sum(run.count("\n") + 2 for run in runs) > height - 2:
        runs = ["\n".join(run.split("\n")[:each]) + _PLAIN for run in runs]
    return "\n\n".join(runs)


def shown(run: RunData, *, width: int, now: float, is_coloured: bool) -> str:
    """Return the lines about a run, wrapped to a terminal of `width` columns; in colour, the state says whether it needs someone."""
    wrapped = [
        textwrap.fill(
            line, max(width, 40), subsequent_indent=" " * 14, break_long_words=False, break_on_hyphens=False
        )
        for line in lines(run, width=width, now=now)
    ]
    if not is_coloured:
        return "\n".join(wrapped)
    state, is_good = wrapped[0], run.summary["is_running"] or run.summary["status"].endswith("(exit code 0)")
    colour = (
        _GREEN
        if is_good and _SILENCE not in state
        else _YELLOW
        if re.search(r"code (0|75)\)", state)
        else _RED
    )
    wrapped[0] = f"{colour}{state}{_PLAIN}"
    for at, line in enumerate(wrapped[1:], 1):
        colour = _RED if line.startswith("  faults") else _DIM
        wrapped[at] = f"{colour}{line[:13]}{_PLAIN}{line[13:]}"
    return re.sub(f"([{_BARS}]+)", f"{_BLUE}\\1{_PLAIN}", "\n".join(wrapped))


def lines(run: RunData, *, width: int, now: float) -> Iterator[str]:
    """Yield the lines about a run; `now` in seconds since the epoch."""
    yield f"{run.name}: {_state(run, now)}"
    curve_width = max(10, min(60, width - 40))
    for name, title in _CURVES.items():
        values = [value for value in run.curves.get(name, ()) if value is not None]
        if values:
            yield _row(title, f"{values[-1]:<10.5g} {sparkline(values, curve_width)}  from {values[0]:.5g}")
    yield _row("speed", _speed(run))
    if run.summary["max_memory_bytes"]:
        yield _row("memory", f"{run.summary['max_memory_bytes'] / 1e9:.1f} GB at most")
    kinds = (
        ("evaluation", run.validations, ".5g"),
        ("accuracy", run.accuracies, ".1%"),
        ("bits/byte", run.bits, ".4g"),
    )
    for title, evaluations, form in kinds:
        for name, found in evaluations.items():
            iteration, value = found[-1]
            text = "not finite" if value is None else format(value, form)
            yield _row(title, f"{name} {text} at iteration {iteration:,}")
    if run.summary["saves"]:
        stall = run.summary["save_stall_seconds"]
        yield _row("saves", f"{run.summary['saves']}, training waited {stall:.1f} s for them")
    if run.faults:
        last = ", ".join(f"{iteration:,} {what}" for iteration, what in run.faults[-_SHOWN_FAULTS:])
        yield _row("faults", f"{len(run.faults)}: {'.. ' if len(run.faults) > _SHOWN_FAULTS else ''}{last}")


def sparkline(values: Sequence[float], width: int) -> str:
    """Draw values as bars, [n] -> at most `width` characters; each is the mean of its part of the values."""
    parts = min(width, len(values))
    means = [
        statistics.fmean(values[part * len(values) // parts : (part + 1) * len(values) // parts])
        for part in range(parts)
    ]
    low, high = min(means), max(means)
    scale = (len(_BARS) - 1) / (high - low) if high > low else 0.0
    return "".join(_BARS[round((mean - low) * scale)] for mean in means)


def _state(run: RunData, now: float) -> str:
    iteration, target = run.summary["iterations"], _target(run)
    progress = f"iteration {iteration:,}" + (f" of {target:,} ({iteration / target:.1%})" if target else "")
    if not run.summary["is_running"]:
        return f"{run.summary['status']}, {progress}"
    silence, per_iteration = now - run.last_activity, _iteration_seconds(run)
    if silence > 60 + 10 * (per_iteration or 0):
        since = datetime.fromtimestamp(run.last_activity).astimezone().isoformat(sep=" ", timespec="seconds")
        return f"{_SILENCE} since {since} ({duration(silence)}), {progress}"
    left = f", {duration((target - iteration) * per_iteration)} left" if target and per_iteration else ""
    return f"running, {progress}{left}"


def _target(run: RunData) -> int | None:
    """Return the last iteration of the run; None: not known."""
    iterations = run.settings.get("training.train_iters")
    return iterations if isinstance(iterations, int) and iterations > 0 else None


def _iteration_seconds(run: RunData) -> float | None:
    found = run.recent("iteration_ms", _RECENT)
    return None if found is None else found / 1000


def _speed(run: RunData) -> str:
    speed = run.recent("tokens_per_second_per_gpu", _RECENT)
    per_iteration, mfu = _iteration_seconds(run), run.summary["mfu"]
    parts = [f"{speed:,.0f} tokens/s per rank"] if speed is not None else []
    parts += [f"MFU {mfu:.1%}"] if mfu is not None else []
    parts += [f"{per_iteration:.3g} s an iteration"] if per_iteration is not None else []
    return ", ".join(parts) or "not known yet"


def _row(title: str, text: str) -> str:
    return f"  {title:<11} {text}"
