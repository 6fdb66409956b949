"""Lines of the metrics files that runs leave."""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest


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


def assert_near_recorded(
    found: Sequence[Mapping[str, Any]], recorded: Sequence[Mapping[str, Any]], *, loss: float, norm: float
) -> None:
    """Compare the losses and norms of all iterations with those of Megatron-LM, by largest relative differences."""
    assert [line["iteration"] for line in found] == [line["iteration"] for line in recorded]
    for ours, theirs in zip(found, recorded, strict=True):
        assert ours["lm_loss"] == pytest.approx(theirs["lm loss"], rel=loss, abs=0)
        assert ours["grad_norm"] == pytest.approx(theirs["grad_norm"], rel=norm, abs=0)
