"""A result of a check."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True)
class Finding:
    """A result of a check, with the remedy if something is wrong."""

    level: Literal["ok", "warning", "error"]
    topic: str
    text: str
    fix: str | None = None

    def __str__(self) -> str:
        mark = {"ok": "ok     ", "warning": "warning", "error": "error  "}[self.level]
        line = f"{mark}  {self.topic}: {self.text}"
        return line if self.fix is None else f"{line}\n  fix: {self.fix}"
