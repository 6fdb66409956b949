"""A setting of a section: `micro_batch_size: int = setting(REQUIRED, at_least=1, unit="samples")`.

All that is known of it stands in this call, and its help text in the docstring under the field. A setting with a default
alone needs no call. What most settings of a section share stands in the line of the class.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, ClassVar, Final

from megatrain.config.schema.needs import Conflict, Need
from megatrain.config.schema.resume_class import ResumeClass
from megatrain.config.schema.values import CheckedSection, Range

Needs = Need | tuple[Need, ...]

ARGS: Final = "--use-checkpoint-args"
LAYOUT: Final = "--use-mp-args-from-checkpoint-args"
EVALUATION: Final = "--eval-only"
"""Flags that take settings from a checkpoint: see `taken_by`."""


@dataclass(frozen=True)
class Section(CheckedSection):
    """Base of the sections: `class LoggingConfig(Section, on_resume=SAFE)`."""

    _shared: ClassVar[Mapping[str, Any]]

    def __init_subclass__(
        cls, *, on_resume: ResumeClass | None = None, taken_by: str = "", needs: Needs = ()
    ) -> None:
        if on_resume is not None:
            cls._shared = {"on_resume": on_resume, "taken_by": taken_by, "needs": _all(needs)}
        assert hasattr(cls, "_shared"), "a section states the effect of changes on resume, or its base does"

    @classmethod
    def stated(cls, metadata: Mapping[str, Any]) -> dict[str, Any]:
        """Return what is stated for a setting, as `tree.Setting` has it: by itself, or by the section; needs of both."""
        needs = (*cls._shared["needs"], *metadata.get("needs", ()))
        return {**cls._shared, **metadata, "needs": needs}


def setting(
    default: Any,
    *,
    at_least: float | None = None,
    above: float | None = None,
    at_most: float | None = None,
    below: float | None = None,
    unit: str | None = None,
    example: str | None = None,
    choices: Mapping[str, str] | None = None,
    accepts_function: bool | None = None,
    alone: str | None = None,
    joins_words: bool | None = None,
    on_resume: ResumeClass | None = None,
    may_move: bool | None = None,
    adapts: Callable[[Any, Any], bool] | None = None,
    taken_by: str | None = None,
    needs: Needs = (),
    conflicts: Conflict | tuple[Conflict, ...] = (),
    multiple_of: str | None = None,
) -> Any:
    """Return a field of a section; `tree.Setting` says what each argument means. Typed Any, as `dataclasses.field` is."""
    bounds = Range(at_least=at_least, above=above, at_most=at_most, below=below)
    stated = {
        "range": bounds if bounds != Range() else None,
        "unit": unit,
        "example": example,
        "meanings": choices,
        "accepts_function": accepts_function,
        "alone": alone,
        "joins_words": joins_words,
        "on_resume": on_resume,
        "may_move": may_move,
        "adapts": adapts,
        "taken_by": taken_by,
        "needs": _all(needs),
        "multiple_of": multiple_of,
        "conflicts": conflicts if isinstance(conflicts, tuple) else (conflicts,),
    }
    return field(
        default=default, metadata={name: value for name, value in stated.items() if value is not None}
    )


def _all(needs: Needs) -> tuple[Need, ...]:
    return needs if isinstance(needs, tuple) else (needs,)
