"""Report the progress of a run from its metrics.jsonl, which has one object per iteration and one per validation.

iteration      the last logged iteration (0 before the first)
train-iters    the number of iterations set in the run's YAML file
report         the first and last losses, and the number of repeated iterations that gave the same loss
"""

from __future__ import annotations

import argparse
import json
import statistics
from pathlib import Path
from typing import Any, Final

import yaml

_AVERAGED: Final = 10
"""Iterations of a mean: the loss of one is noise."""


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("question", choices=["iteration", "train-iters", "report"])
    parser.add_argument("file", type=Path, help="metrics.jsonl, or the YAML file for train-iters")
    arguments = parser.parse_args()

    if arguments.question == "train-iters":
        print(train_iters(arguments.file))
        return
    rows = read_rows(arguments.file)
    if arguments.question == "iteration":
        print(max((row["iteration"] for row in rows if "lm_loss" in row), default=0))
    else:
        print(report(rows))


def train_iters(path: Path) -> int:
    """Return the value of train_iters in any section, with dashes or underscores."""

    def search(node: Any) -> int | None:
        if not isinstance(node, dict):
            return None
        here = [node[key] for key in ("train_iters", "train-iters") if key in node]
        return next(
            iter([*here, *(found for child in node.values() if (found := search(child)) is not None)]), None
        )

    found = search(yaml.safe_load(path.read_text(encoding="utf-8")))
    if found is None:
        raise SystemExit(f"{path} does not set train_iters\n  fix: add it to the training section")
    return found


def read_rows(path: Path) -> list[dict[str, Any]]:
    if not path.is_file():
        return []
    rows = []
    for line in path.read_text(encoding="utf-8").splitlines():
        try:
            rows.append(json.loads(line))
        except json.JSONDecodeError:  # a line truncated by the kill
            continue
    return rows


def report(rows: list[dict[str, Any]]) -> str:
    losses: dict[int, list[float]] = {}
    for row in rows:
        if "lm_loss" in row:
            losses.setdefault(row["iteration"], []).append(row["lm_loss"])
    if not losses:
        return "no iteration was logged"
    values = [losses[iteration][-1] for iteration in sorted(losses)]
    first, last = (statistics.fmean(part) for part in (values[:_AVERAGED], values[-_AVERAGED:]))
    lines = [
        f"training loss    {first:.3f} in the first {_AVERAGED} iterations, {last:.3f} in the last ones (means)"
    ]
    if validations := [row["loss"] for row in rows if "validation" in row]:
        lines.append(
            f"validation loss  {validations[0]:.3f} the first time, {validations[-1]:.3f} the last time"
        )
    if twice := [values for values in losses.values() if len(values) > 1]:
        num_same = sum(len(set(values)) == 1 for values in twice)
        lines.append(
            f"resuming         {len(twice)} iteration(s) ran before a kill and again after it: "
            f"{num_same} of them with the same loss to the last digit"
        )
    return "\n".join(lines)


if __name__ == "__main__":
    main()
