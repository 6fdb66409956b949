"""The three answers to a flag of Megatron-LM's that is no setting here, and other names of settings."""

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True, kw_only=True)
class Answer:
    """One answer to several flags."""

    kind: Literal["accepted", "refused"]
    text: str
    """Follows the flag and a colon."""
    instead: str = ""
    """What to do where a flag or its value is refused."""
    flags: str


@dataclass(frozen=True)
class Alias:
    """Another name of a setting; with a value, the flag stands for it and takes none."""

    path: str
    value: str | None = None


def here(text: str, flags: str, *, instead: str = "") -> Answer:
    """What is on here anyway, or is without meaning here."""
    return Answer(kind="accepted", text=text, flags=flags, instead=instead)


def later(feature: str, flags: str, *, instead: str = "leave this out") -> Answer:
    return Answer(kind="refused", text=f"{feature} is not there yet", flags=flags, instead=instead)


def never(text: str, flags: str, *, instead: str = "leave this out") -> Answer:
    return Answer(kind="refused", text=text, flags=flags, instead=instead)
