"""Resolve a request into a plan, or report all of its problems at once.

    request ──> missing or out of range? ──> derivations ──> overrides ──> rules ──> notes ──> Plan
                                                                            └──> ConfigError with every problem

A derivation is a function from the draft to a value and its reason; one that reads an open value waits for it (OpenError). A
derivation or rule that reads an INVALID value stops (UnresolvedError): the value stays INVALID, and the rule reports nothing more.
The cause is reported elsewhere.
"""

import functools
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import fields, replace
from typing import Any, Final, TypeVar

from megatrain.config.cli.parse_value import BadValueError, require_in_range
from megatrain.config.derive.custom_layers import called_once
from megatrain.config.derive.families import settings_of_pattern
from megatrain.config.errors import ConfigError, Problem
from megatrain.config.facts import Facts
from megatrain.config.plan import Derived, DerivedValue, Draft, Plan
from megatrain.config.plan_note import graded
from megatrain.config.registry import Rule
from megatrain.config.request import Request
from megatrain.config.rule_list import DERIVATIONS, NOTES, OVERRIDES, RULES
from megatrain.config.schema.tree import Config, Origin, settings
from megatrain.config.schema.values import (
    AUTO,
    INVALID,
    OPEN,
    REQUIRED,
    OpenError,
    UnresolvedError,
    is_resolved,
)
from megatrain.config.stored_settings import with_settings, with_stored_settings

T = TypeVar("T")
Kinds = Mapping[Rule | None, frozenset[str]]
"""Texts of problems without numbers, by the rule that reports them; None: those of missing and wrong values."""

_NUMBERS: Final = re.compile(r"[0-9][0-9.,e+-]*")
_UNKNOWN: Final = DerivedValue(INVALID, "not known")


def resolve(request: Request, facts: Facts) -> Plan:
    """Return the plan of a run. Pure: equal arguments give equal plans. Raises ConfigError with all problems."""
    request = with_settings(request, facts.described_settings, Origin("folder", facts.described_by))
    request = with_stored_settings(request, facts.checkpoint)
    file = request.known("distillation.export_kd_cfg")
    request = with_settings(request, facts.distillation_settings, Origin("folder", file or ""))
    problems = [*request.problems, *facts.data_problems]
    if not request.is_complete:
        raise ConfigError.of(problems)
    if facts.custom_layers is not None:
        facts = replace(facts, custom_layers=called_once(facts.custom_layers))
    draft, overridden, wrong_values = _drafted(request, facts)
    draft = replace(draft, is_same_model=functools.partial(_is_same_model, draft, request))
    broken = _kinds(draft, wrong_values)
    problems += wrong_values
    for rule in RULES:
        if rule in broken:
            problems += _until_unresolved(rule, _with_trials(draft, rule, broken, request))
    if problems:
        raise ConfigError.of(list(dict.fromkeys(problems)))
    unresolved = [path for path in draft.origins if not is_resolved(_value_at(draft, path))]
    assert not unresolved, f"no rule reports these unresolved values: {unresolved}"
    notes = [note for note_rule in NOTES for note in _until_unresolved(note_rule, draft)]
    first = (*request.notes, *(graded(text, "nothing") for text in overridden))
    return Plan(draft.config, draft.derived, draft.origins, (*first, *notes))


def _drafted(request: Request, facts: Facts) -> tuple[Draft, list[str], list[Problem]]:
    """Return the draft with all values, notes on the overridden ones, and problems of missing and wrong ones."""
    of_pattern, overridden = settings_of_pattern(request.known)
    request = with_settings(request, of_pattern, Origin("derived", "by --hybrid-layer-pattern"))
    config, problems = _checked_values(request.config)
    origins = {**request.origins, **{f"derived.{one.name}": Origin("derived") for one in fields(Derived)}}
    draft, of_derivations = _derived(Draft(config, Derived(), facts, origins))
    for override in OVERRIDES:
        try:
            new = override(draft)
        except UnresolvedError:
            continue
        if new is not None:
            draft = _with_value(draft, override.path, new)
            overridden.append(new.reason)
    return draft, overridden, problems + of_derivations


def _derived(draft: Draft) -> tuple[Draft, list[Problem]]:
    """Derive all open values. Return the problems of the function of --spec, too."""
    problems: list[Problem] = []
    waiting = [one for one in DERIVATIONS if _value_at(draft, one.path) is OPEN]
    while waiting:
        now, waiting = waiting, []
        for derivation in now:
            try:
                value = derivation(draft)
            except OpenError:
                waiting.append(derivation)
                continue
            except UnresolvedError:
                value = _UNKNOWN
            except ConfigError as error:
                problems += error.problems
                value = _UNKNOWN
            draft = _with_value(draft, derivation.path, value)
        assert len(waiting) < len(now), f"these wait for one another: {[one.path for one in waiting]}"
    return draft, problems


def _kinds(draft: Draft, wrong_values: Iterable[Problem]) -> Kinds:
    """Return the kinds of problems of missing and wrong values, and of each rule that reports some."""
    found = {rule: _without_numbers(_until_unresolved(rule, draft)) for rule in RULES}
    return {None: _without_numbers(wrong_values)} | {rule: kinds for rule, kinds in found.items() if kinds}


def _without_numbers(problems: Iterable[Problem]) -> frozenset[str]:
    return frozenset(_NUMBERS.sub("#", problem.text) for problem in problems)


def _is_same_model(draft: Draft, request: Request, changes: Mapping[str, Any]) -> bool:
    """See `Draft.is_same_model`."""
    trial, _, wrong_values = _drafted(with_settings(request, changes, Origin("flag")), draft.facts)
    spec = draft.derived.raw("model_spec")
    return is_resolved(spec) and not wrong_values and bool(trial.derived.raw("model_spec") == spec)


def _with_trials(draft: Draft, rule: Rule, broken: Kinds, request: Request) -> Draft:
    """Return the draft for a rule, which can try its fixes: see `Draft.breaks`."""
    known = [name for name, value in vars(draft.derived).items() if value is not INVALID]

    def breaks(changes: Mapping[str, Any]) -> int:
        facts, values = draft.facts, dict(changes)
        if draft.config.parallel.world_size is None and "parallel.world_size" in values:
            facts = replace(facts, world_size=values.pop("parallel.world_size"))  # ranks to start
        changed = with_settings(request, values, Origin("flag"))
        removed = {path: value for path, value in values.items() if value is AUTO}
        trial, _, wrong_values = _drafted(with_settings(changed, removed, Origin("default")), facts)
        now = _kinds(trial, wrong_values)
        new = sum(len(kinds - broken.get(one, frozenset())) for one, kinds in now.items())
        is_mended = bool(broken[rule] - now.get(rule, frozenset()))
        is_known = all(trial.derived.raw(name) is not INVALID for name in known)
        return new + (not is_mended) + (not is_known)

    return replace(draft, breaks=breaks)


def _checked_values(config: Config) -> tuple[Config, list[Problem]]:
    """Return the configuration with OPEN for AUTO, INVALID for missing and out-of-range values, and the problems.

    The command line checks ranges too; a `Request` may also be built in code.
    """
    problems: list[Problem] = []
    changed: dict[str, Any] = {}
    for setting in settings():
        value = config.raw(setting.path)
        if value is AUTO:
            changed[setting.path] = OPEN
        elif value is REQUIRED:
            changed[setting.path] = INVALID
            problems.append(Problem(f"{setting.flag} is missing", f"give {setting.flag}: {setting.example}"))
        elif setting.range and value is not None and is_resolved(value):
            try:
                require_in_range(setting, *(value if setting.is_list else (value,)))
            except BadValueError as error:
                changed[setting.path] = INVALID
                problems.append(Problem(f"{setting.flag} {value} {error.text}", error.fix))
    return config.with_values(changed), problems


def _with_value(draft: Draft, path: str, derived: DerivedValue) -> Draft:
    section, name = path.split(".")
    origins = {**draft.origins, path: Origin("derived", derived.reason)}
    if section == "derived":
        return replace(draft, derived=draft.derived.replaced({name: derived.value}), origins=origins)
    return replace(draft, config=draft.config.with_values({path: derived.value}), origins=origins)


def _until_unresolved(rule: Callable[[Draft], Iterable[T]], draft: Draft) -> Iterator[T]:
    """Iterate over the results of a rule until it reads an INVALID value."""
    try:
        yield from rule(draft)
    except UnresolvedError:
        return


def _value_at(draft: Draft, path: str) -> object:
    section, name = path.split(".")
    return draft.derived.raw(name) if section == "derived" else draft.config.raw(path)
