"""Answers to flags of Megatron-LM that are not settings of megatrain, and other names of settings."""

from dataclasses import dataclass
from typing import Literal

from megatrain.config.plan_note import Grade


@dataclass(frozen=True, kw_only=True)
class Answer:
    """One answer, shared by several flags."""

    kind: Literal["accepted", "pending", "missing", "refused"]
    text: str
    """The reason. The message puts the flag before it."""
    instead: str = ""
    """The remedy if a flag or its value is refused."""
    flags: str
    """The flags, separated by spaces, in the notation of `flags.py`."""
    feature: str = ""
    """The missing feature of a pending flag."""
    grade: Grade = "nothing"
    """The grade of a note on the flags."""
    saves_memory: bool = False
    """True: in Megatron-LM the flags save memory."""

    @property
    def is_refusal(self) -> bool:
        return self.kind in ("missing", "refused")


@dataclass(frozen=True)
class Alias:
    """Another name of a setting. With a value, the flag stands for that value and takes none."""

    path: str
    value: str | None = None


def accepted(text: str, flags: str, *, instead: str = "", grade: Grade = "nothing") -> Answer:
    """Ignore these flags with a note; `instead` is the remedy for values that are refused."""
    return Answer(kind="accepted", text=text, flags=flags, instead=instead, grade=grade)


def pending(feature: str, text: str, flags: str, *, saves_memory: bool = False) -> Answer:
    """Ignore these flags with a note until the feature is there; results are the same without it."""
    return Answer(
        kind="pending",
        text=text,
        flags=flags,
        feature=feature,
        grade="cost",
        saves_memory=saves_memory,
    )


def refused(text: str, flags: str, *, instead: str = "remove the flag") -> Answer:
    """Refuse these flags by design."""
    return Answer(kind="refused", text=text, flags=flags, instead=instead)


def missing(text: str, flags: str, *, instead: str = "remove the flag") -> Answer:
    """Refuse these flags until their feature is there."""
    return Answer(kind="missing", text=text, flags=flags, instead=instead)
