"""All that the subjects register, and what holds for every setting: needs that are not met, and combinations that are not proven."""

from __future__ import annotations

import textwrap
from collections.abc import Sequence
from typing import Final

from megatrain.config.errors import Problem
from megatrain.config.fixes import distance, divisors, located, multiples, use
from megatrain.config.plan import Draft
from megatrain.config.plan_note import PlanNote
from megatrain.config.registry import (
    Derivation,
    Note,
    Notes,
    Override,
    Problems,
    Rule,
    Unproven,
    note,
    registered,
    rule,
)
from megatrain.config.schema.needs import Need
from megatrain.config.schema.tree import Setting, flag_of, in_words, settings, settings_by_path
from megatrain.config.schema.values import is_resolved
from megatrain.config.subjects import (
    attention,
    attention_kernel,
    batches,
    checkpoint,
    context_parallel,
    data,
    data_plans,
    device,
    experts,
    fp8,
    layers,
    model,
    model_spec,
    packs,
    pipeline,
    ranks,
    resume,
    run,
    schedule,
    transformer_engine,
)
from megatrain.config.subjects.families import text, vision
from megatrain.config.subjects.post_training import distillation, lora, quantization

_SUBJECTS: Final = (
    device, attention, model, data, model_spec, layers, pipeline, ranks, packs, context_parallel, fp8,
    transformer_engine, attention_kernel, experts, text, vision, distillation, lora, quantization, batches, data_plans, schedule, run, checkpoint, resume,
)  # fmt: skip
"""In the order in which problems and notes are printed."""


_SAVING_MEMORY: Final = ("recompute_method", "recompute_num_layers", "recompute_modules", "offload_modules")
"""Settings that save memory, with the one that they need."""
_FAMILY: Final = "model.model_family"
"""The setting that no fix removes: it says which model the run is about."""


@note("nothing")
def settings_without_effect(draft: Draft) -> Notes:
    """Yield one note on the settings that lack the same needs, of those that are given and not at their defaults."""
    idle: dict[tuple[tuple[str, ...], bool, bool], list[str]] = {}
    for setting in settings():
        value = draft.config.get(setting.path)
        if not draft.is_given(setting.path) or value in (setting.default, None, False):
            continue
        unmet = [need for need in setting.needs if not need.holds(draft.get)]
        if unmet:
            is_costly = any(need.is_costly for need in unmet)
            key = (tuple(map(reason_of, unmet)), is_costly, setting.name in _SAVING_MEMORY)
            idle.setdefault(key, []).append(f"{setting.flag}{_value(value)}")
    for (reasons, is_costly, saves_memory), flags in idle.items():
        text = f"{', '.join(flags)} {'have' if len(flags) > 1 else 'has'} no effect {', and '.join(reasons)}"
        yield PlanNote(text, "cost" if is_costly else "nothing", saves_memory)


def reason_of(need: Need) -> str:
    """Return the end of a note about a need that is not met."""
    return need.words.format(*map(flag_of, need.paths))


def _value(value: object) -> str:
    return "" if isinstance(value, bool) else f" {in_words(value)}"


@rule
def conflicting_settings(draft: Draft) -> Problems:
    by_path = settings_by_path()
    for setting in by_path.values():
        for one in setting.conflicts:
            given = _given(draft, setting, one.of)
            other = _given(draft, by_path[one.path], one.values)
            if given and other and (one.when is None or one.when.holds(draft.config.raw)):
                sides = (setting, by_path[one.path])
                removable = [side for side in sides if draft.is_given(side.path) and side.path != _FAMILY]
                yield Problem(
                    f"{given} is not supported together with {other}{one.why}",
                    one.fix or f"remove {', or '.join(_removed(draft, removable or [setting]))}",
                )


def _removed(draft: Draft, removable: Sequence[Setting]) -> list[str]:
    """Return the flags whose removal breaks fewest other rules, those that the user typed first."""
    broken = {one.path: draft.breaks({one.path: one.default}) for one in removable}
    least = [path for path, count in broken.items() if count == min(broken.values())]
    return [located(draft, path) for path in sorted(least, key=lambda path: distance(draft, path))]


@rule
def multiples_are_multiples(draft: Draft) -> Problems:
    for setting in settings():
        if not setting.multiple_of or not all(need.holds(draft.config.raw) for need in setting.needs):
            continue
        number, factor = draft.config.raw(setting.path), draft.config.raw(setting.multiple_of)
        if isinstance(number, int) and isinstance(factor, int) and number % factor:
            yield Problem(
                f"{setting.flag} {number} is not divisible by {flag_of(setting.multiple_of)} {factor}",
                use(
                    draft,
                    divisors(setting.multiple_of, number, factor),
                    multiples(setting.path, number, factor),
                ),
            )


def _given(draft: Draft, setting: Setting, values: tuple[str, ...]) -> str:
    """Return a setting with those of its values that are among these, or, without any, with its given value; empty: it has none."""
    value = draft.config.raw(setting.path)
    if not is_resolved(value):
        return ""
    if values:
        found = [one for one in (value if isinstance(value, tuple) else (value,)) if one in values]
        return f"{setting.flag} {' '.join(found)}" if found else ""
    is_given = value and draft.origins[setting.path].kind != "derived"
    return textwrap.shorten(f"{setting.flag}{_value(value)}", 100) if is_given else ""


@note("nothing")
def unproven_combinations(draft: Draft) -> Notes:
    if not draft.config.training.require_parity:
        for one in UNPROVEN:
            for line in one(draft):
                yield PlanNote(f"not proven equal under every layout: {line}", line.grade)


@rule
def parity_is_required(draft: Draft) -> Problems:
    for one in UNPROVEN if draft.config.training.require_parity else ():
        for line in one(draft):
            yield Problem(
                f"--require-parity: {line}",
                "change this setting, or remove --require-parity to run with a note",
            )


DERIVATIONS: Final = registered(Derivation, _SUBJECTS)
OVERRIDES: Final = registered(Override, _SUBJECTS)
UNPROVEN: Final = registered(Unproven, _SUBJECTS)
RULES: Final = (
    conflicting_settings,
    multiples_are_multiples,
    *registered(Rule, _SUBJECTS),
    parity_is_required,
)
NOTES: Final = (unproven_combinations, settings_without_effect, *registered(Note, _SUBJECTS))
