"""Answers to flags of Megatron-LM that are not settings of megatrain, and other names of settings."""

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True, kw_only=True)
class Answer:
    """One answer, shared by several flags."""

    kind: Literal["accepted", "pending", "refused"]
    text: str
    """The reason. The message puts the flag before it."""
    instead: str = ""
    """The remedy if a flag or its value is refused."""
    flags: str
    """The flags, separated by spaces, in the notation of `flags.py`."""
    feature: str = ""
    """The missing feature of a pending flag."""


@dataclass(frozen=True)
class Alias:
    """Another name of a setting. With a value, the flag stands for that value and takes none."""

    path: str
    value: str | None = None


def accepted(text: str, flags: str, *, instead: str = "") -> Answer:
    """Ignore these flags with a note; `instead` is the remedy for values that are refused."""
    return Answer(kind="accepted", text=text, flags=flags, instead=instead)


def pending(feature: str, text: str, flags: str, *, instead: str = "") -> Answer:
    """Ignore these flags with a note until the feature is there; results are the same without it."""
    return Answer(kind="pending", text=text, flags=flags, feature=feature, instead=instead)


def refused(text: str, flags: str, *, instead: str = "remove the flag") -> Answer:
    """Refuse these flags."""
    return Answer(kind="refused", text=text, flags=flags, instead=instead)
