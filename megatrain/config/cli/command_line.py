"""The command line: flags generated from the settings, and YAML files.

    defaults  <  --config first.yaml  <  --config second.yaml  <  flags

Flags are Megatron-LM's; `_` and `-` are equivalent. `config/megatron/` answers those that are not
settings. Invalid input raises nothing here: the `Request` contains the problems, and `resolve` reports all of them
together.
"""

import argparse
import re
import textwrap
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

from megatrain import __version__
from megatrain.config.cli.help_text import field_help, section_help
from megatrain.config.cli.parse_value import BadValueError, accepted_values, load_value
from megatrain.config.cli.yaml_file import read_yaml
from megatrain.config.errors import Problem
from megatrain.config.megatron.flags import (
    GivenFlag,
    aliases,
    answers,
    closest_flag,
    given_flag,
    megatron_flags,
)
from megatrain.config.request import Given, Request
from megatrain.config.schema.tree import Config, Origin, Setting, flag_of, settings
from megatrain.config.schema.values import INVALID

_NO_VALUE: Final = object()
_NEGATIVE_NUMBER: Final = re.compile(r"-\.?[0-9]")


def parse(argv: Sequence[str], *, program: str = "pretrain.py") -> Request:
    """Parse arguments into a request. For --help and --version: print and exit with 0."""
    if {"-h", "--help"} & set(argv):
        print(_parser(program, field_help()).format_help(), end="")
        raise SystemExit(0)
    if "--version" in argv:
        print(f"megatrain {__version__}")
        raise SystemExit(0)
    flags, unknown = _typed_flags(_parser(program, {}, megatron=_spellings(argv)), argv)
    found: list[Given | GivenFlag | Problem] = list(_unknown_argument_problems(unknown))
    for flag in flags:
        if flag.dest == "config":
            found += _yaml_values(flag)
    last = {flag.dest: flag for flag in flags if flag.dest != "config"}
    for flag in last.values():
        found += _flag_value(flag)
    given = [item for item in found if isinstance(item, Given)]
    asked = {item.flag.flag: item for item in found if isinstance(item, GivenFlag)}
    notes, refusals = answers(asked.values())
    notes += [_alias_note(flag.spelling) for flag in last.values() if flag.spelling in aliases()]
    problems = [*(item for item in found if isinstance(item, Problem)), *refusals]
    return Request(
        Config().with_values({item.path: item.value for item in given}),
        {setting.path: Origin("default") for setting in settings()}
        | {item.path: item.origin for item in given},
        tuple(problems),
        notes=tuple(notes),
        is_complete=not any(problem.text.startswith("--config ") for problem in problems),
    )


@dataclass(frozen=True)
class _TypedFlag:
    """A flag on the command line: the path that it sets, its spelling, and its text or texts.

    For a Megatron-LM flag that sets nothing here, `dest` is the flag.
    """

    dest: str
    spelling: str
    value: Any


class _Collect(argparse.Action):
    """Collects flags in the order given; argparse itself converts and checks nothing."""

    def __call__(
        self,
        parser: argparse.ArgumentParser,
        namespace: argparse.Namespace,
        values: Any,
        option_string: str | None = None,
    ) -> None:
        del parser
        namespace.typed.append(_TypedFlag(self.dest, option_string or "", values))


class _HelpFormatter(argparse.HelpFormatter):
    """Shows `--flag VALUE` although argparse takes all values as optional, and does not break flags at hyphens."""

    def _format_action_invocation(self, action: argparse.Action) -> str:
        metavar = f" {action.metavar}" if action.metavar else ""
        return ", ".join(action.option_strings) + metavar

    def _split_lines(self, text: str, width: int) -> list[str]:
        return textwrap.wrap(" ".join(text.split()), width, break_on_hyphens=False)

    def _fill_text(self, text: str, width: int, indent: str) -> str:
        return textwrap.indent("\n".join(self._split_lines(text, width - len(indent))), indent)


def _parser(
    program: str, texts: Mapping[str, str], *, megatron: Collection[str] = ()
) -> argparse.ArgumentParser:
    """Build the parser of the flags, by section.

    Args:
        texts: help by path; needed only to print help.
        megatron: given flags, added if Megatron-LM has them: adding all of its flags would be slow.
    """
    parser = argparse.ArgumentParser(
        prog=program,
        usage=f"{program} [--config FILE] [--flag VALUE ...]\n"
        f"       torchrun --nproc-per-node 8 {program} [--config FILE] [--flag VALUE ...]\n"
        f"       {program} [--config FILE] [--flag VALUE ...] --dry-run [--world-size RANKS]",
        description="Pretrain a language model. Flags override --config files, later files override earlier ones. A run needs"
        f" {', '.join(setting.flag for setting in settings() if setting.is_required)}, a length (--train-iters), data"
        " (--data-path, or --mock-data) and a tokenizer (--tokenizer-type).",
        epilog="Other flags of Megatron-LM: docs/differences.md.",
        add_help=False,
        allow_abbrev=False,
        argument_default=argparse.SUPPRESS,
        formatter_class=_HelpFormatter,
    )
    general = parser.add_argument_group("general")
    general.add_argument("-h", "--help", action="store_true", help="show this help and exit")
    general.add_argument("--version", action="store_true", help="show the version and exit")
    general.add_argument(
        "--config",
        action=_Collect,
        nargs="?",
        const=_NO_VALUE,
        metavar="FILE",
        help="a YAML file of sections; repeatable",
    )
    groups: dict[str, Any] = {}
    for setting in settings():
        if setting.section not in groups:
            groups[setting.section] = parser.add_argument_group(
                setting.section, section_help(setting.section)
            )
        _add_flag(groups[setting.section], setting, texts.get(setting.path, ""))
    for spelling in megatron:
        _add_megatron_flag(parser, spelling)
    return parser


def _add_megatron_flag(parser: argparse.ArgumentParser, spelling: str) -> None:
    flag, alias = megatron_flags().get(spelling), aliases().get(spelling)
    if flag or alias:
        parser.add_argument(
            spelling,
            dest=alias.path if alias else spelling,
            action=_Collect,
            nargs="*" if flag and flag.takes == "several" else "?",
            const=_NO_VALUE,
        )


def _add_flag(group: Any, setting: Setting, text: str) -> None:
    is_switch = setting.kind is bool
    group.add_argument(
        setting.flag,
        dest=setting.path,
        action=_Collect,
        nargs="*" if setting.is_list else "?",
        const=_NO_VALUE,
        metavar="" if is_switch else _metavar(setting),
        help=f"{text} ({_default_words(setting)})".replace("%", "%%"),
    )
    if is_switch:
        shown = f"turn off {setting.flag}" if setting.default else argparse.SUPPRESS
        group.add_argument(
            setting.opposite_flag,
            dest=setting.path,
            action=_Collect,
            nargs="?",
            const=_NO_VALUE,
            metavar="",
            help=shown,
        )


def _metavar(setting: Setting) -> str:
    if setting.choices:
        words = "{" + ",".join(setting.choices) + "}"
        return f"[{words}]" if setting.alone else words
    word = {int: "INT", float: "FLOAT", str: "TEXT", bool: ""}[setting.kind]
    return f"{word} ..." if setting.is_list else word


def _default_words(setting: Setting) -> str:
    if setting.is_required:
        return "required"
    if setting.is_derived_if_open:
        return "default: auto"
    if setting.kind is bool:
        return f"default: {'on' if setting.default else 'off'}"
    return f"default: {'none' if setting.default in (None, ()) else setting.default}"


def _typed_flags(parser: argparse.ArgumentParser, argv: Sequence[str]) -> tuple[list[_TypedFlag], list[str]]:
    """Return the known flags, and the arguments that belong to none."""
    known = {spelling for action in parser._actions for spelling in action.option_strings}  # noqa: SLF001
    namespace, unknown = parser.parse_known_args(_normalized(argv, known), argparse.Namespace(typed=[]))
    return namespace.typed, unknown


def _spellings(argv: Sequence[str]) -> set[str]:
    """Return the words that look like flags."""
    return {word.partition("=")[0].replace("_", "-") for word in argv if word.startswith("--")}


def _normalized(argv: Sequence[str], known: set[str]) -> list[str]:
    """Replace `_` by `-` in known flags, and join negative numbers to their flag: argparse takes `-1e-4` for a flag."""
    words: list[str] = []
    for word in argv:
        name, sign, value = word.partition("=")
        spelling = name.replace("_", "-")
        if spelling in known:
            words.append(spelling + sign + value)
        elif words and words[-1] in known and _NEGATIVE_NUMBER.match(word):
            words[-1] += f"={word}"
        else:
            words.append(word)
    return words


def _yaml_values(flag: _TypedFlag) -> list[Given | GivenFlag | Problem]:
    if flag.value is _NO_VALUE:
        return [Problem("--config has no value", "give it a YAML file")]
    return read_yaml(flag.value)


def _flag_value(flag: _TypedFlag) -> Iterator[Given | GivenFlag | Problem]:
    if flag.dest in megatron_flags():
        yield given_flag(megatron_flags()[flag.dest], None if flag.value is _NO_VALUE else flag.value)
        return
    (setting,) = (setting for setting in settings() if setting.path == flag.dest)
    value = INVALID
    is_missing = flag.value is _NO_VALUE or flag.value == []
    typed = flag.spelling if is_missing else f"{flag.spelling} {_text(flag.value)}"
    alias = aliases().get(flag.spelling)
    try:
        if alias and alias.value is not None:
            value = _alias_value(setting, alias.value, is_missing=is_missing)
        elif setting.kind is bool:
            value = _switch_value(setting, flag, is_missing=is_missing)
        elif is_missing and setting.alone is not None:
            value = setting.alone
        elif is_missing:
            raise BadValueError("has no value", fix=f"give {setting.flag} {accepted_values(setting)}")  # noqa: TRY301
        else:
            value = load_value(setting, flag.value)
    except BadValueError as error:
        yield Problem(f"{typed} {error.text}", error.fix)
    yield Given(setting.path, value, Origin("flag", flag.spelling))


def _alias_note(spelling: str) -> str:
    alias = aliases()[spelling]
    return " ".join(filter(None, (f"{spelling} is", flag_of(alias.path), alias.value)))


def _alias_value(setting: Setting, meaning: str, *, is_missing: bool) -> Any:
    """Return the value of a flag that is an alias for a setting with a value."""
    if is_missing:
        return load_value(setting, meaning)
    raise BadValueError("has a value, and accepts none", fix=f"use {setting.flag} {meaning}")


def _switch_value(setting: Setting, flag: _TypedFlag, *, is_missing: bool) -> Any:
    """Return the value of a switch: on, off for its opposite; `--switch=false` is valid too."""
    if flag.spelling == setting.flag:
        return is_missing or load_value(setting, flag.value)
    if is_missing:
        return False
    raise BadValueError(
        "has a value, and accepts none", fix=f"use {setting.opposite_flag} alone, or {setting.flag}"
    )


def _text(value: str | list[str]) -> str:
    text = value if isinstance(value, str) else " ".join(value)
    return textwrap.shorten(text, 200) or "''"


def _unknown_argument_problems(unknown: Sequence[str]) -> Iterator[Problem]:
    """Report unknown flags; words after one are taken for its value."""
    flag = None
    for word in unknown:
        if word.startswith("-") and not _NEGATIVE_NUMBER.match(word):
            flag = word.partition("=")[0]
            spelling = flag.lower().replace("_", "-")
            near = closest_flag(spelling)
            fix = f"did you mean {near}?" if near else "leave it out; --help lists all flags"
            yield Problem(f"{flag} is not a flag", fix)
        elif flag is None:
            yield Problem(f"{word} follows no flag", "put its flag before it")
