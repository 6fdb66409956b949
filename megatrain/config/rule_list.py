"""All that the subjects register, and what holds for every setting: needs that are not met, and combinations that are not proven."""

from __future__ import annotations

from typing import Final

from megatrain.config.errors import Problem
from megatrain.config.plan import Draft
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
from megatrain.config.schema.tree import flag_of, settings
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
    masked_samples,
    model,
    model_spec,
    pipeline,
    precision,
    ranks,
    resume,
    run,
    schedule,
    transformer_engine,
)

_SUBJECTS: Final = (
    device, attention, model, data, masked_samples, model_spec, layers, pipeline, ranks, context_parallel, precision, fp8, transformer_engine,
    attention_kernel, experts, batches, data_plans, schedule, run, checkpoint, resume,
)  # fmt: skip
"""In the order in which problems and notes are printed."""


@note
def settings_without_effect(draft: Draft) -> Notes:
    """Yield one note per need that is not met, about the settings that are given and not at their defaults."""
    idle: dict[str, list[str]] = {}
    for setting in settings():
        value = draft.config.get(setting.path)
        if not draft.is_given(setting.path) or value in (setting.default, None, False):
            continue
        for need in setting.needs:
            if not need.holds(draft.get):
                idle.setdefault(reason_of(need), []).append(f"{setting.flag}{_value(value)}")
    for reason, flags in idle.items():
        yield f"{', '.join(flags)} {'have' if len(flags) > 1 else 'has'} no effect {reason}"


def reason_of(need: Need) -> str:
    """Return the end of a note about a need that is not met."""
    return need.words.format(*map(flag_of, need.paths))


def _value(value: object) -> str:
    if isinstance(value, bool):
        return ""
    return " " + (" ".join(map(str, value)) if isinstance(value, tuple) else str(value))


@note
def unproven_combinations(draft: Draft) -> Notes:
    if not draft.config.training.require_parity:
        for one in UNPROVEN:
            yield from (f"not proven equal under every layout: {line}" for line in one(draft))


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
RULES: Final = (*registered(Rule, _SUBJECTS), parity_is_required)
NOTES: Final = (unproven_combinations, settings_without_effect, *registered(Note, _SUBJECTS))
