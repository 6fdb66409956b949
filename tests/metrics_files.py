"""Lines of the metrics files that runs leave."""

import json
from pathlib import Path
from typing import Any


def logged_lines(path: Path) -> list[dict[str, Any]]:
    """Return the lines of a metrics file; of a folder, those of its metrics.jsonl."""
    file = path / "metrics.jsonl" if path.is_dir() else path
    return [json.loads(line) for line in file.read_text().splitlines()]


def logged_steps(path: Path) -> list[dict[str, Any]]:
    """Return the lines of iterations, without evaluations."""
    return [line for line in logged_lines(path) if "lm_loss" in line]


def logged_losses(path: Path) -> list[float]:
    """Return the loss of each iteration."""
    return [line["lm_loss"] for line in logged_steps(path)]
