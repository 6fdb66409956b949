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

    @classmethod
    def ok(cls, topic: str, text: str) -> Finding:
        return cls("ok", topic, text)

    @classmethod
    def warning(cls, topic: str, text: str, fix: str) -> Finding:
        return cls("warning", topic, text, fix)

    @classmethod
    def error(cls, topic: str, text: str, fix: str) -> Finding:
        return cls("error", topic, text, fix)

    def __str__(self) -> str:
        mark = {"ok": "ok     ", "warning": "warning", "error": "error  "}[self.level]
        line = f"{mark}  {self.topic}: {self.text}"
        return line if self.fix is None else f"{line}\n  fix: {self.fix}"
