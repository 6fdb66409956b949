"""Needs of a setting, without which it has no effect, and its conflicts: `setting(1, needs=on("model.use_mup"))`.

    on(path, ...)            without --load or --pretrained-checkpoint
    off(path)                with --softmax-scale
    above(path, 1)           with --pipeline-model-parallel-size 1
    one_of(path, "x", "y")   unless --cuda-graph-impl is x or y
    none_of(path, "x")       with --optimizer x
    differs(path, other)     with --eval-micro-batch-size as --micro-batch-size
    either(need, need)       as its `words` say
    costly(need)             the setting's speed or memory is lost

A given setting without effect is a note, as in Megatron-LM: its flag, `has no effect`, and the words of all needs that are not met.
A path is of a setting, or of a value that is derived, such as `derived.num_microbatches`. `why` continues the words, and `words`
replaces them.

A conflict is a problem: `--optimizer-cpu-offload is not supported together with --optimizer muon`, and its `why`.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

ValueOf = Callable[[str], Any]
"""Return the value at a path."""


@dataclass(frozen=True)
class Need:
    """A condition under which a setting has an effect."""

    words: str
    """Words of a note where it does not hold, with {} for each flag."""
    paths: tuple[str, ...]
    """Settings of these flags."""
    holds: Callable[[ValueOf], bool]
    is_costly: bool = False
    """True: without it the setting's speed or memory is lost; False: the setting has nothing to act on."""


def costly(need: Need) -> Need:
    """Return a need whose note says that speed or memory is lost; its words have the remedy."""
    return replace(need, is_costly=True)


def on(*paths: str, why: str = "") -> Need:
    """Need one of these settings: a value other than none, off and 0."""
    *first, last = ["{}"] * len(paths)
    either_flag = f"{', '.join(first)} or {last}" if first else last
    return Need(f"without {either_flag}{why}", paths, lambda value_of: any(map(value_of, paths)))


def off(path: str, *, words: str = "with {}") -> Need:
    """Need that this setting is none, off or 0."""
    return Need(words, (path,), lambda value_of: not value_of(path))


def above(path: str, number: int, *, words: str = "") -> Need:
    return Need(words or f"with {{}} {number}", (path,), lambda value_of: value_of(path) > number)


def one_of(path: str, *values: str, words: str = "") -> Need:
    """Need one of these values; of a list, that it has one of them."""
    default = f"unless {{}} is {' or '.join(values)}"
    return Need(words or default, (path,), lambda value_of: _has(value_of(path), values))


def none_of(path: str, *values: str, why: str = "") -> Need:
    """Need another value than these; of a list, that it has none of them."""
    words = f"with {{}} {' or '.join(map(str, values))}{why}"
    return Need(words, (path,), lambda value_of: not _has(value_of(path), values))


def differs(path: str, other: str) -> Need:
    """Need that two settings have different values."""
    return Need("with {} as {}", (path, other), lambda value_of: value_of(path) != value_of(other))


def contains(path: str, text: str) -> Need:
    """Need a value that contains this text."""

    def holds(value_of: ValueOf) -> bool:
        value = value_of(path)
        return isinstance(value, str) and text in value

    return Need(f"without {text} in {{}}", (path,), holds)


def either(*needs: Need, words: str) -> Need:
    return Need(words, (), lambda value_of: any(need.holds(value_of) for need in needs))


@dataclass(frozen=True)
class Conflict:
    """Another setting with which a setting is not supported."""

    path: str
    values: tuple[str, ...]
    """Values of the other setting; empty: all that are given, but none, off and 0."""
    of: tuple[str, ...]
    """Values of the setting, likewise."""
    when: Need | None
    """Condition of the conflict; None: there is none."""
    why: str
    fix: str
    """Empty: to remove one of both."""


def conflict(
    path: str, *values: str, of: tuple[str, ...] = (), when: Need | None = None, why: str = "", fix: str = ""
) -> Conflict:
    """State that these values of another setting are not supported together with the setting, or with its values `of`."""
    return Conflict(path, values, of, when, why, fix)


def _has(value: Any, wanted: tuple[str, ...]) -> bool:
    return not set(wanted).isdisjoint(value if isinstance(value, tuple) else (value,))


NCCL = one_of("parallel.distributed_backend", "nccl")
LOGITS_CONFLICTS = (
    conflict("model.model_family", "bert", "t5", "vlm", why=": only causal attention is measured"),
    conflict("data.pack_documents", why=", whose ranks have documents of their own"),
)
"""Conflicts of settings that measure attention logits."""
