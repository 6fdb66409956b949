"""The command line: flags generated from the settings, and YAML files.

    defaults  <  --config and --yaml-cfg files, in order  <  flags

Flags are Megatron-LM's; `_` and `-` are equivalent. `config/megatron/` answers those that are not
settings. Invalid input raises nothing here: the `Request` contains the problems, and `resolve` reports all of them
together.
"""

import functools
from collections.abc import Iterator, Sequence
from typing import Any, Final, Literal

from megatrain import __version__
from megatrain.config.cli.flag_words import FlagWords, list_words, split_flags
from megatrain.config.cli.help_page import help_page
from megatrain.config.cli.megatron_yaml import read_megatron_yaml
from megatrain.config.cli.parse_value import BadValueError, RawValue, load_value, value_fix
from megatrain.config.cli.yaml_file import meant_setting, read_yaml
from megatrain.config.errors import Problem
from megatrain.config.megatron.flags import GivenFlag, aliases, answers, closest_flag, megatron_flags, renamed
from megatrain.config.megatron.other_tools import OTHER_TOOLS
from megatrain.config.plan_note import PlanNote, graded
from megatrain.config.request import Given, Request
from megatrain.config.schema.tokenizer import default_type
from megatrain.config.schema.tree import Config, Origin, Setting, flag_of, settings, settings_by_path
from megatrain.config.schema.values import INVALID

_FILES: Final = ("--config", "--yaml-cfg")
_Found = Given | GivenFlag | Problem | str


def parse(argv: Sequence[str], *, program: str = "pretrain.py") -> Request:
    """Parse arguments into a request. For --help and --version: print and exit with 0."""
    if {"-h", "--help"} & set(argv):
        print(help_page(program), end="")
        raise SystemExit(0)
    if "--version" in argv:
        print(f"megatrain {__version__}")
        raise SystemExit(0)
    flags, stray = split_flags(argv)
    found = [
        *_values(flags),
        *(Problem(f"{word} follows no flag", "put its flag before it") for word in stray),
    ]
    given = [item for item in found if isinstance(item, Given)]
    given += _default_tokenizer(given)
    asked = {item.flag.flag: item for item in found if isinstance(item, GivenFlag)}
    notes, refusals = answers(asked.values())
    notes += [graded(item, "nothing") for item in found if isinstance(item, str)]
    notes += _override_notes(flags, given)
    problems = [*(item for item in found if isinstance(item, Problem)), *refusals]
    values = {item.path: item.value for item in given}
    if values.get("training.eval_only") and values.pop("checkpoint.save", None):
        given = [item for item in given if item.path != "checkpoint.save"]
        notes.append(PlanNote("--save has no effect with --eval-only, which saves nothing", "nothing"))
    return Request(
        Config().with_values(values),
        {setting.path: Origin("default") for setting in settings()}
        | {item.path: item.origin for item in given},
        tuple(problems),
        notes=tuple(notes),
        is_complete=not any(problem.text.startswith(f"{file} ") for problem in problems for file in _FILES),
    )


def _values(flags: Sequence[FlagWords]) -> Iterator[_Found]:
    for flag in flags:
        if flag.flag in _FILES:
            yield from _file_values(flag)
    for flag in {target(flag): flag for flag in flags if flag.flag not in _FILES}.values():
        yield from flag_values(flag)


def flag_values(flag: FlagWords) -> Iterator[_Found]:
    """Yield the value that a flag sets, its answer if it sets nothing, problems and notes."""
    name, alias = flag.flag, aliases().get(flag.flag)
    if name in megatron_flags():
        megatron = megatron_flags()[name]
        words = list_words(flag.words) if megatron.takes == "several" else flag.words
        if len(words) > 1 and megatron.takes != "several":
            yield _too_many_words(flag, takes_none=megatron.takes == "nothing")
        else:
            yield GivenFlag(megatron, words, str(flag) if flag.place else "")
        return
    setting = _setting_of(alias.path if alias else name)
    if setting is None:
        yield _unknown_flag(flag)
        yield from meant_setting(closest_flag(flag.flag.lower()), flag.origin)
        return
    value = INVALID
    try:
        value = _value(setting, flag, alias.value if alias else None)
    except BadValueError as error:
        yield Problem(f"{flag} {error.text}", error.fix)
    yield Given(setting.path, value, flag.origin)
    if alias:
        yield " ".join(filter(None, (f"{flag.name} is", flag_of(alias.path), alias.value)))


def _file_values(flag: FlagWords) -> Iterator[_Found]:
    if len(flag.words) != 1:
        has = f"has {len(flag.words)} values" if flag.words else "has no value"
        yield Problem(
            f"{flag.flag} {has}", f"give {flag.flag} a YAML file; repeat the flag for several files"
        )
    elif flag.flag == "--config":
        yield from read_yaml(flag.words[0])
    else:
        for item in read_megatron_yaml(flag.words[0]):
            if isinstance(item, FlagWords):
                yield from flag_values(item)
            else:
                yield item


def _default_tokenizer(given: Sequence[Given]) -> Iterator[Given]:
    """Yield the type of a tokenizer that is given by its files alone."""
    values = {item.path: item.value for item in given}
    family = values.get("model.model_family", Config().model.model_family)
    names = [path.removeprefix("tokenizer.") for path in values if path.startswith("tokenizer.")]
    kind = default_type(family, names)
    if kind is not None:
        reason = f"Megatron-LM's for --model-family {family}"
        yield Given("tokenizer.tokenizer_type", kind, Origin("derived", reason))


def _override_notes(flags: Sequence[FlagWords], given: Sequence[Given]) -> Iterator[PlanNote]:
    """Name the flags that override a --yaml-cfg file: Megatron-LM reads the file alone."""
    in_files = {item.path for item in given if item.origin.kind == "yaml"}
    over = [item.origin.detail for item in given if item.origin.kind == "flag" and item.path in in_files]
    if over and any(flag.flag == "--yaml-cfg" for flag in flags):
        text = f"{', '.join(over)} override the file of --yaml-cfg; Megatron-LM reads the file alone"
        yield PlanNote(text, "result")


def target(flag: FlagWords) -> str:
    """Return the path that a flag sets, or the flag: of several flags with one target the last counts."""
    alias = aliases().get(flag.flag)
    setting = None if flag.flag in megatron_flags() else _setting_of(alias.path if alias else flag.flag)
    return setting.path if setting else flag.flag


def takes(flag: FlagWords) -> Literal["nothing", "one", "several"]:
    """Return how many words a flag takes; an unknown one takes one."""
    if flag.flag in megatron_flags():
        return megatron_flags()[flag.flag].takes
    setting = _setting_of(target(flag))
    if setting is None:
        return "one"
    has_meaning = flag.flag in aliases() and aliases()[flag.flag].value is not None
    if setting.kind is bool or has_meaning:
        return "nothing"
    return "several" if setting.is_list or setting.joins_words else "one"


def modern_name(flag: str) -> tuple[str, ...]:
    """Return the setting's flag for an old or another name, with its value if the name stands for one."""
    alias = aliases().get(flag)
    if alias is None:
        return (renamed(flag) or flag,)
    setting = _settings_by_name()[alias.path]
    if alias.value in ("true", "false"):
        return (setting.flag if alias.value == "true" else setting.opposite_flag,)
    return (setting.flag, *filter(None, (alias.value,)))


def _setting_of(name: str) -> Setting | None:
    return _settings_by_name().get(name)


@functools.cache
def _settings_by_name() -> dict[str, Setting]:
    """Return the settings by path, by flag and by opposite flag."""
    switches = {setting.opposite_flag: setting for setting in settings() if setting.kind is bool}
    return switches | dict(settings_by_path()) | {setting.flag: setting for setting in settings()}


def _value(setting: Setting, flag: FlagWords, meaning: str | None) -> Any:
    """Return the value of a flag. Raises BadValueError if it is not valid.

    Args:
        meaning: the value for which an alias stands, which then takes none.
    """
    if meaning is not None:
        if flag.words:
            raise BadValueError("has a value, and accepts none", fix=f"use {setting.flag} {meaning}")
        return load_value(setting, meaning)
    if setting.kind is bool:
        return _switch_value(setting, flag)
    if not flag.words or (setting.is_list and not list_words(flag.words)):
        if setting.alone is not None:
            return setting.alone
        raise BadValueError("has no value", fix=value_fix(setting))
    return load_value(setting, _raw(setting, flag))


def _raw(setting: Setting, flag: FlagWords) -> RawValue:
    if setting.is_list:
        # A YAML file may hold a list as one text: `data_path: 0.3 a 0.7 b`.
        words = " ".join(flag.words).split() if flag.place else flag.words
        return list_words(words)
    if len(flag.words) > 1 and not setting.joins_words:
        fix = f"{value_fix(setting)}; quote a value that contains spaces"
        raise BadValueError(f"has {len(flag.words)} values, and accepts one", fix=fix)
    return " ".join(flag.words)


def _switch_value(setting: Setting, flag: FlagWords) -> bool:
    """Return the value of a switch: on, off for its opposite; `--switch=false` is valid too."""
    is_opposite = flag.flag == setting.opposite_flag
    if not flag.words:
        return not is_opposite
    if is_opposite:
        raise BadValueError(
            "has a value, and accepts none", fix=f"use {setting.opposite_flag} alone, or {setting.flag}"
        )
    return bool(load_value(setting, " ".join(flag.words)))


def _too_many_words(flag: FlagWords, *, takes_none: bool) -> Problem:
    if takes_none:
        return Problem(f"{flag} has a value, and accepts none", f"use {flag.flag} alone, or remove it")
    fix = f"give {flag.flag} one value; quote a value that contains spaces"
    return Problem(f"{flag} has {len(flag.words)} values, and accepts one", fix)


def _unknown_flag(flag: FlagWords) -> Problem:
    name = flag.flag.lower()
    near = closest_flag(name)
    if name in OTHER_TOOLS:
        return Problem(f"{flag.name if flag.place else flag.typed} is not a flag", OTHER_TOOLS[name])
    if flag.place:
        if near and not flag.written.startswith("-"):
            near = near[2:].replace("-", "_")
        return Problem(
            f"{flag.name} is not an argument", f"did you mean {near}?" if near else "remove the line"
        )
    fix = f"did you mean {near}?" if near else "leave it out; --help lists all flags"
    if not near and not name.startswith("--"):
        fix = f"write = before {flag.typed} if it is the value of a flag, as in --hybrid-layer-pattern=-M*; else leave it out"
    return Problem(f"{flag.typed} is not a flag", fix)
