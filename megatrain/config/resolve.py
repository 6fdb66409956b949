"""Resolve a request into a plan, or report all of its problems at once.

    request ──> missing or out of range? ──> derivations, in order ──> overrides ──> rules ──> notes ──> Plan
                                                                                       └──> ConfigError with every problem

A derivation is a function from the draft to a value and its reason. A derivation or rule that reads an INVALID value
stops (UnresolvedError): the value stays INVALID, and the rule reports nothing more. The cause is reported elsewhere.
"""

import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import replace
from typing import Any, Final, TypeVar

from megatrain.config.cli.parse_value import BadValueError, require_in_range
from megatrain.config.derive.table import DERIVATIONS, OVERRIDES
from megatrain.config.errors import ConfigError, Problem
from megatrain.config.facts import Facts
from megatrain.config.plan import Derived, DerivedValue, Draft, Plan
from megatrain.config.request import Request
from megatrain.config.rules.notes import NOTES
from megatrain.config.rules.rule_list import RULES
from megatrain.config.schema.tree import Config, Origin, settings
from megatrain.config.schema.values import AUTO, INVALID, REQUIRED, UnresolvedError, is_resolved
from megatrain.config.stored_settings import with_settings, with_stored_settings

T = TypeVar("T")
Rule = Callable[[Draft], Iterator[Problem]]

_NUMBERS: Final = re.compile(r"[0-9][0-9.,e+-]*")


def resolve(request: Request, facts: Facts) -> Plan:
    """Return the plan of a run. Pure: equal arguments give equal plans. Raises ConfigError with all problems."""
    request = with_settings(request, facts.described_settings, Origin("folder", facts.described_by))
    request = with_stored_settings(request, facts.checkpoint)
    if not request.is_complete:
        raise ConfigError.of([*request.problems, *facts.data_problems])
    problems = [*request.problems, *facts.data_problems]
    draft, overridden, wrong_values = _drafted(request, facts)
    problems += wrong_values
    broken = _broken_rules(draft)
    problems += [
        problem
        for rule in broken
        for problem in _until_unresolved(rule, _with_trials(draft, rule, broken, request))
    ]
    if problems:
        raise ConfigError.of(list(dict.fromkeys(problems)))
    unresolved = [path for path in draft.origins if not is_resolved(_value_at(draft, path))]
    assert not unresolved, f"no rule reports these unresolved values: {unresolved}"
    notes = [note for note_rule in NOTES for note in _until_unresolved(note_rule, draft)]
    return Plan(draft.config, draft.derived, draft.origins, (*request.notes, *overridden, *notes))


def _drafted(request: Request, facts: Facts) -> tuple[Draft, list[str], list[Problem]]:
    """Return the draft with all values, notes on the overridden ones, and problems of missing and out-of-range ones."""
    config, problems = _checked_values(request.config)
    draft = Draft(config, Derived(), facts, dict(request.origins))
    for path, derive in DERIVATIONS:
        try:
            draft = _with_derived(draft, path, derive)
        except ConfigError as error:  # of the function of --spec
            problems += error.problems
            draft = _with_value(draft, path, DerivedValue(INVALID, "not known"))
    overridden: list[str] = []
    for path, override in OVERRIDES:
        new = _unless_unresolved(override, draft)
        if new is not None:
            draft = _with_value(draft, path, new)
            overridden.append(new.reason)
    return draft, overridden, problems


def _broken_rules(draft: Draft) -> dict[Rule, frozenset[str]]:
    """Return the kinds of problems of each rule that reports some: their texts without numbers."""
    found = {
        rule: frozenset(_NUMBERS.sub("#", problem.text) for problem in _until_unresolved(rule, draft))
        for rule in RULES
    }
    return {rule: kinds for rule, kinds in found.items() if kinds}


def _with_trials(draft: Draft, rule: Rule, broken: Mapping[Rule, frozenset[str]], request: Request) -> Draft:
    """Return the draft for a rule, which can try its fixes: see `Draft.breaks`."""

    def breaks(changes: Mapping[str, Any]) -> int:
        facts, values = draft.facts, dict(changes)
        if draft.config.parallel.world_size is None and "parallel.world_size" in values:
            facts = replace(facts, world_size=values.pop("parallel.world_size"))  # ranks to start
        now = _broken_rules(_drafted(with_settings(request, values, Origin("flag")), facts)[0])
        new = sum(len(kinds - broken.get(one, frozenset())) for one, kinds in now.items())
        is_mended = bool(broken[rule] - now.get(rule, frozenset()))
        return new + (not is_mended)

    return replace(draft, breaks=breaks)


def _checked_values(config: Config) -> tuple[Config, list[Problem]]:
    """Return the configuration with INVALID for missing and out-of-range values, and the problems.

    The command line checks ranges too; a `Request` may also be built in code.
    """
    problems: list[Problem] = []
    invalid: list[str] = []
    for setting in settings():
        value = config.raw(setting.path)
        if value is REQUIRED:
            invalid.append(setting.path)
            problems.append(Problem(f"{setting.flag} is missing", f"give {setting.flag}: {setting.example}"))
        elif setting.range and value is not None and is_resolved(value):
            try:
                require_in_range(setting, value)
            except BadValueError as error:
                invalid.append(setting.path)
                problems.append(Problem(f"{setting.flag} {value} {error.text}", error.fix))
    return config.with_values(dict.fromkeys(invalid, INVALID)), problems


def _with_derived(draft: Draft, path: str, derive: Callable[[Draft], DerivedValue]) -> Draft:
    """Return the draft with this value derived, unless the user gave it."""
    if not path.startswith("derived.") and draft.config.raw(path) is not AUTO:
        return draft
    return _with_value(draft, path, _unless_unresolved(derive, draft) or DerivedValue(INVALID, "not known"))


def _with_value(draft: Draft, path: str, derived: DerivedValue) -> Draft:
    section, name = path.split(".")
    origins = {**draft.origins, path: Origin("derived", derived.reason)}
    if section == "derived":
        return replace(draft, derived=draft.derived.replaced({name: derived.value}), origins=origins)
    return replace(draft, config=draft.config.with_values({path: derived.value}), origins=origins)


def _unless_unresolved(function: Callable[[Draft], T], draft: Draft) -> T | None:
    try:
        return function(draft)
    except UnresolvedError:
        return None


def _until_unresolved(rule: Callable[[Draft], Iterable[T]], draft: Draft) -> Iterator[T]:
    """Iterate over the results of a rule until it reads an INVALID value."""
    try:
        yield from rule(draft)
    except UnresolvedError:
        return


def _value_at(draft: Draft, path: str) -> object:
    section, name = path.split(".")
    return draft.derived.raw(name) if section == "derived" else draft.config.raw(path)
