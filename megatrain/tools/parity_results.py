"""What rows of parity found, a JSON object a line, so that a table that was stopped goes on where it was.

{"precision": "fp64", "implementation": "local", "layout": "tp2 sp", "ranks": 2, "passed": true, "loss": ..., "seconds": ...}
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from megatrain.tools.parity_rows import Layout


@dataclass
class Results:
    """The rows that a file holds, and those that are added to it; without a file, nothing is kept."""

    path: Path | None
    implementation: str
    passed: set[tuple[str, str]] = field(default_factory=set)

    @classmethod
    def read(cls, path: str | None, implementation: str = "local") -> Results:
        """What a file holds of an implementation; the last line is left out if a kill cut it short."""
        results = cls(None if path is None else Path(path), implementation)
        if results.path is None or not results.path.exists():
            return results
        whole, _, cut = results.path.read_text().rpartition("\n")
        if cut:
            results.path.write_text(f"{whole}\n" if whole else "")
        for line in whole.splitlines():
            entry = json.loads(line)
            if entry["passed"] and entry.get("implementation", "local") == implementation:
                results.passed.add((entry["precision"], entry["layout"]))
        return results

    def has_passed(self, precision: str, layout: Layout) -> bool:
        return (precision, layout.name) in self.passed

    def add(
        self, precision: str, layout: Layout, *, is_good: bool, numbers: Sequence[float], seconds: float
    ) -> None:
        """Note a row. `numbers`: loss, norm, gradient and weight."""
        if self.path is None:
            return
        entry = {
            "precision": precision,
            "implementation": self.implementation,
            "layout": layout.name,
            "ranks": layout.world_size,
            "passed": is_good,
            **dict(zip(("loss", "norm", "gradient", "weight"), map(str, numbers), strict=True)),
            "seconds": round(seconds, 1),
        }
        with self.path.open("a") as file:
            file.write(json.dumps(entry) + "\n")
