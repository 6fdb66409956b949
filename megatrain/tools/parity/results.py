"""Results of parity rows as JSON Lines, so that an interrupted table resumes.

{"precision": "fp64", "layout": "tp2 sp", "ranks": 2, "passed": true, "loss": ..., "seconds": ..., "by": {"device": "cpu", ...}}

A passed row counts only for the same implementation, device, code (a digest of all files), Python and libraries.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from megatrain.tools.parity.rows import Layout
from megatrain.training.launch.agreement import identity


@dataclass
class Results:
    """Results read from a file and appended to it; without a file, nothing is kept."""

    path: Path | None
    by: Mapping[str, str]
    """Implementation, device, code and libraries of the rows."""
    passed: set[tuple[str, str]] = field(default_factory=set)
    num_of_others: int = 0
    """Number of rows in the file that do not count because their identity differs."""

    @classmethod
    def read(cls, path: str | None, *, implementation: str = "local", device: str = "cpu") -> Results:
        """Read the rows of this identity; skip an incomplete last line."""
        by = {"implementation": implementation, "device": device, **identity()}
        results = cls(None if path is None else Path(path), by)
        if results.path is None or not results.path.exists():
            return results
        whole, _, cut = results.path.read_text().rpartition("\n")
        if cut:
            results.path.write_text(f"{whole}\n" if whole else "")
        for line in filter(None, whole.split("\n")):
            entry = json.loads(line)
            if entry.get("by") != by:
                results.num_of_others += 1
            elif entry["passed"]:
                results.passed.add((entry["precision"], entry["layout"]))
        return results

    def has_passed(self, precision: str, layout: Layout) -> bool:
        return (precision, layout.name) in self.passed

    def add(
        self, precision: str, layout: Layout, *, is_good: bool, numbers: Sequence[float], seconds: float
    ) -> None:
        """Append one row. `numbers`: loss, norm, gradient, weight."""
        if self.path is None:
            return
        entry = {
            "precision": precision,
            "layout": layout.name,
            "ranks": layout.world_size,
            "passed": is_good,
            **dict(zip(("loss", "norm", "gradient", "weight"), map(str, numbers), strict=True)),
            "seconds": round(seconds, 1),
            "by": dict(self.by),
        }
        with self.path.open("a") as file:
            file.write(json.dumps(entry) + "\n")
