"""What Megatron-LM has and megatrain has not yet. Each is refused by name, with what to use in its place.

A line leaves this file when its feature arrives; nothing else changes then.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, Final

from megatrain.config.errors import Problem
from megatrain.config.plan import Draft
from megatrain.config.values import INVALID


@dataclass(frozen=True)
class Missing:
    """A value of a setting that stands for a feature that is not there."""

    path: str
    value: Any
    feature: str
    instead: str


_MISSING: Final = (
    Missing(
        "model.transformer_impl",
        "transformer_engine",
        "--transformer-impl transformer_engine",
        "use --transformer-impl local",
    ),
)


def features_are_there(draft: Draft) -> Iterator[Problem]:
    for missing in _MISSING:
        value = draft.config.get(missing.path)
        if value is not INVALID and value == missing.value:
            default = " (the default, as in Megatron-LM)" if draft.is_default(missing.path) else ""
            yield Problem(f"{missing.feature}{default} is not there yet", missing.instead)


def deterministic_mode_is_for_cpus(draft: Draft) -> Iterator[Problem]:
    if draft.config.training.deterministic_mode and draft.derived.device == "cuda":
        yield Problem(
            "--deterministic-mode is not there yet on a GPU",
            "leave it out; on a CPU every run is deterministic",
        )


UNSUPPORTED_RULES: Final[tuple[Callable[[Draft], Iterator[Problem]], ...]] = (
    features_are_there,
    deterministic_mode_is_for_cpus,
)
