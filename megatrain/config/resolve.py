"""From what was asked for and what is there to a plan, or to all that is wrong with it at once.

    request ──> missing and out of range? ──> derivations, in order ──> rules ──> notes ──> Plan
                                                                          └──> ConfigError with every problem

Each derivation is a function from the draft to an answer with its reason. One that meets INVALID, because of a
problem that is reported elsewhere, leaves INVALID; a rule that meets it says nothing.
"""

import dataclasses
from collections.abc import Callable, Iterable, Iterator
from typing import TypeVar

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

T = TypeVar("T")


def resolve(request: Request, facts: Facts) -> Plan:
    """The plan of a run. Pure: equal arguments give equal plans. Raises ConfigError with all problems."""
    if not request.is_complete:
        raise ConfigError.of([*request.problems, *facts.data_problems])
    config, problems = _checked_values(request.config)
    problems = [*request.problems, *facts.data_problems, *problems]
    draft = Draft(config, Derived(), facts, dict(request.origins))
    for path, derive in DERIVATIONS:
        draft = _with_derived(draft, path, derive)
    overridden: list[str] = []
    for path, override in OVERRIDES:
        answer = _tried(override, draft)
        if answer is not None:
            draft = _with_answer(draft, path, answer)
            overridden.append(answer.reason)
    problems += [problem for rule in RULES for problem in _told(rule, draft)]
    if problems:
        raise ConfigError.of(list(dict.fromkeys(problems)))
    left_open = [path for path in draft.origins if not is_resolved(_value_at(draft, path))]
    assert not left_open, f"nothing was found wrong, and yet these are open: {left_open}"
    notes = [note for tell in NOTES for note in _told(tell, draft)]
    return Plan(draft.config, draft.derived, draft.origins, (*request.notes, *overridden, *notes))


def _checked_values(config: Config) -> tuple[Config, list[Problem]]:
    """The configuration with INVALID for what is missing or out of range, which the command line's loader checks too."""
    problems: list[Problem] = []
    invalid: list[str] = []
    for setting in settings():
        value = config.raw(setting.path)
        if value is REQUIRED:
            invalid.append(setting.path)
            problems.append(
                Problem(f"{setting.flag} is missing", f"give {setting.flag}: {_example(setting.path)}")
            )
        elif setting.range and value is not None and is_resolved(value):
            try:
                require_in_range(setting, value)
            except BadValueError as error:
                invalid.append(setting.path)
                problems.append(Problem(f"{setting.flag} {value} {error.text}", error.fix))
    return config.with_values(dict.fromkeys(invalid, INVALID)), problems


def _example(path: str) -> str:
    """A value to begin with, for settings that have no default."""
    return {
        "model.num_layers": "12 is the size of GPT-2 small",
        "model.hidden_size": "768 is the size of GPT-2 small",
        "model.num_attention_heads": "12 is the size of GPT-2 small",
        "data.seq_length": "1024 tokens, for example",
        "optimizer.lr": "3e-4 is a common start for small models",
        "training.micro_batch_size": "1 always works; larger ones use the device better",
    }.get(path, "it has no default")


def _with_derived(draft: Draft, path: str, derive: Callable[[Draft], DerivedValue]) -> Draft:
    """The draft with this value filled in, unless the user gave it."""
    if not path.startswith("derived.") and draft.config.raw(path) is not AUTO:
        return draft
    return _with_answer(draft, path, _tried(derive, draft) or DerivedValue(INVALID, "not known"))


def _with_answer(draft: Draft, path: str, answer: DerivedValue) -> Draft:
    section, name = path.split(".")
    origins = {**draft.origins, path: Origin("derived", answer.reason)}
    if section == "derived":
        return dataclasses.replace(
            draft, derived=draft.derived.replaced({name: answer.value}), origins=origins
        )
    return dataclasses.replace(draft, config=draft.config.with_values({path: answer.value}), origins=origins)


def _tried(function: Callable[[Draft], T], draft: Draft) -> T | None:
    try:
        return function(draft)
    except UnresolvedError:
        return None


def _told(tell: Callable[[Draft], Iterable[T]], draft: Draft) -> Iterator[T]:
    """What a rule says, up to where it meets INVALID."""
    try:
        yield from tell(draft)
    except UnresolvedError:
        return


def _value_at(draft: Draft, path: str) -> object:
    section, name = path.split(".")
    return draft.derived.raw(name) if section == "derived" else draft.config.raw(path)
