"""The command line of `preprocess_data.py`, with Megatron-LM's names of flags.

The flags of the tokenizer are made from the fields of `TokenizerConfig`. All that is wrong with a command line is told at once.
"""

from __future__ import annotations

import argparse
import dataclasses
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, Literal, NoReturn

from megatrain.config.cli.help_text import field_help
from megatrain.config.cli.parse_value import BadValueError, accepted_values, load_value
from megatrain.config.errors import ConfigError, Problem
from megatrain.config.schema.tokenizer import TokenizerConfig
from megatrain.config.schema.tree import Setting, flag_of, near_name, settings
from megatrain.config.schema.values import Range


@dataclass(frozen=True, kw_only=True)
class PreprocessSettings:
    """What to tokenize, how, and where to."""

    input: tuple[str, ...]
    """Paths and globs, in order."""
    output_prefix: str
    """Output is `<output_prefix>_<key>_document.bin`, `.idx` and `.json`."""
    json_keys: tuple[str, ...] = ("text",)
    """What to take of every object; each key makes a dataset of its own."""
    split_sentences: bool = False
    """Cut texts into sentences; each becomes a sequence."""
    keep_newlines: bool = False
    """White space between two sentences belongs to the first."""
    lang: str = "english"
    """Language of the sentences."""
    append_eod: bool = False
    """End every document that is not empty with the end-of-document id."""
    workers: int = 1
    """Processes that tokenize."""
    tokenizer: TokenizerConfig
    log_interval: int = 1000
    """Documents between two lines of progress."""
    on_bad_line: Literal["stop", "skip", "quarantine"] = "stop"
    """What to do about a line that is no document."""
    max_line_mb: int = 64
    """Longer lines are bad lines."""
    without_effect: tuple[str, ...] = ()
    """Flags given that change nothing here."""


def parse_settings(argv: Sequence[str] | None = None) -> PreprocessSettings:
    """The settings that a command line asks for; None: this process's own.

    Raises:
        ConfigError: with all problems of the command line.
    """
    words = sys.argv[1:] if argv is None else list(argv)
    parser = _make_parser(with_help=bool({"-h", "--help"} & set(words)))
    values, unknown = parser.parse_known_args(words)
    given = {name: value for name, value in vars(values).items() if value not in (None, False)}
    flags = [flag for action in parser._actions for flag in action.option_strings]  # noqa: SLF001 - no other list
    problems = _unknown(unknown, words, flags)
    loaded = given | _loaded(_SETTINGS, given, problems)
    tokenizer = {"tokenizer_type": "HuggingFaceTokenizer"} | _loaded(_tokenizer_settings(), given, problems)
    problems += _missing(given) + _wrong_values(loaded)
    if problems:
        raise ConfigError.of(problems)
    fields = {field.name for field in dataclasses.fields(PreprocessSettings)}
    return PreprocessSettings(
        **{name: value for name, value in loaded.items() if name in fields},
        tokenizer=TokenizerConfig(**tokenizer),
        without_effect=tuple(flag_of(name) for name in _WITHOUT_EFFECT if name in given),
    )


class _Parser(argparse.ArgumentParser):
    """Reports through the project's errors."""

    def error(self, message: str) -> NoReturn:
        raise ConfigError(message, fix="see --help")


class _HelpFormatter(argparse.HelpFormatter):
    """Shows what a flag takes; that the parser takes any number of values is for the errors' sake."""

    def _format_args(self, action: argparse.Action, default_metavar: str) -> str:
        return str(action.metavar or default_metavar)


def _make_parser(*, with_help: bool) -> argparse.ArgumentParser:
    parser = _Parser(
        prog="preprocess_data.py",
        usage="preprocess_data.py --input FILE ... --output-prefix PREFIX --tokenizer-model PATH [--flag VALUE ...]",
        description="Tokenize JSON Lines or Parquet files into the .bin and .idx files that pretraining reads.",
        formatter_class=_HelpFormatter,
        allow_abbrev=False,
    )
    for title, flags in _FLAGS.items():
        group = parser.add_argument_group(title)
        for flag, (metavar, text) in flags.items():
            if metavar is None:
                group.add_argument(flag, action="store_true", help=text)
            else:
                group.add_argument(flag, nargs="*", metavar=metavar, help=text + _default_of(flag))
    group = parser.add_argument_group("tokenizer")
    texts = field_help() if with_help else {}
    for setting in _tokenizer_settings().values():
        _add_tokenizer_flag(group, setting, texts.get(setting.path, "").replace("%", "%%"))
    return parser


def _default_of(flag: str) -> str:
    """What the help says of the default, where there is one."""
    defaults = {field.name: field.default for field in dataclasses.fields(PreprocessSettings)}
    value = defaults.get(flag.removeprefix("--").replace("-", "_"), dataclasses.MISSING)
    if value is dataclasses.MISSING:
        return ""
    return f" (default: {' '.join(value) if isinstance(value, tuple) else value})"


def _add_tokenizer_flag(group: Any, setting: Setting, text: str) -> None:
    """What is not given stays None: its default is the field's."""
    if setting.kind is bool:
        group.add_argument(setting.flag, dest=setting.name, action="store_const", const=["true"], help=text)
        off = f"turn {setting.flag} off" if setting.default else argparse.SUPPRESS
        group.add_argument(
            setting.opposite_flag, dest=setting.name, action="store_const", const=["false"], help=off
        )
        return
    metavar = "{" + ",".join(setting.choices) + "}" if setting.choices else setting.kind.__name__.upper()
    metavar += " ..." * setting.is_list
    group.add_argument(setting.flag, dest=setting.name, metavar=metavar, nargs="*", help=text)


_FLAGS: Final[dict[str, dict[str, tuple[str | None, str]]]] = {
    "input and output": {
        "--input": ("FILE ...", "JSON Lines (plain, .gz, .bz2, .zst) or .parquet; paths and quoted globs"),
        "--output-prefix": (
            "PREFIX",
            "writes PREFIX_KEY_document.bin, .idx and .json (PREFIX_KEY_sentence with --split-sentences)",
        ),
        "--json-keys": ("KEY ...", "a dataset is made of each"),
        "--on-bad-line": (
            "{stop,skip,quarantine}",
            "a line that is no document; quarantine writes it to PREFIX.bad_lines.jsonl",
        ),
        "--max-line-mb": (
            "MB",
            "longer lines are bad lines, which are not read into memory; a worker needs about 150 times the longest line",
        ),
        "--append-eod": (None, "end documents with the end-of-document id"),
    },
    "sentences": {
        "--split-sentences": (None, "make a sequence of each sentence (needs nltk)"),
        "--keep-newlines": (None, "sentences keep the white space behind them"),
        "--lang": ("LANGUAGE", "nltk's name of the language"),
    },
    "runtime": {
        "--workers": ("N", "processes that tokenize"),
        "--log-interval": (
            "N",
            "documents between lines of progress, of which there is at most one a second",
        ),
        "--partitions": ("N", "without effect: workers share all files"),
        "--keep-sequential-samples": (None, "without effect: output is always in the order of the input"),
    },
}
"""By title: every flag, what its value is called (None: it has none), and its help."""
_WITHOUT_EFFECT: Final = ("partitions", "keep_sequential_samples")


def _text(name: str, *, choices: tuple[str, ...] = (), is_list: bool = False) -> Setting:
    return Setting(
        section="preprocess",
        name=name,
        kind=str,
        choices=choices,
        is_list=is_list,
        is_optional=False,
        default=None,
        range=None,
    )


def _count(name: str) -> Setting:
    return dataclasses.replace(_text(name), kind=int, range=Range(at_least=1))


_SETTINGS: Final = {
    setting.name: setting
    for setting in (
        _text("input", is_list=True),
        _text("output_prefix"),
        _text("json_keys", is_list=True),
        _text("on_bad_line", choices=("stop", "skip", "quarantine")),
        _count("max_line_mb"),
        _text("lang"),
        _count("workers"),
        _count("log_interval"),
        _count("partitions"),
    )
}
"""The flags that take a value, but for those of the tokenizer."""


def _tokenizer_settings() -> dict[str, Setting]:
    return {setting.name: setting for setting in settings() if setting.section == "tokenizer"}


def _loaded(
    settings: Mapping[str, Setting], given: Mapping[str, Any], problems: list[Problem]
) -> dict[str, Any]:
    """The values of the settings that are given; what is wrong with others joins the problems."""
    values: dict[str, Any] = {}
    for name, setting in settings.items():
        if name not in given:
            continue
        words = given[name]
        if not words:
            problems.append(
                Problem(f"{setting.flag} has no value", f"{setting.flag} takes {accepted_values(setting)}")
            )
            continue
        try:
            values[name] = load_value(setting, words if setting.is_list or len(words) > 1 else words[0])
        except BadValueError as error:
            problems.append(Problem(f"{setting.flag} {' '.join(words)} {error.text}", error.fix))
    return values


def _missing(given: Mapping[str, Any]) -> list[Problem]:
    return [
        Problem(f"{flag_of(name)} is missing", f"give {flag_of(name)} {value}")
        for name, value in (("input", "FILE"), ("output_prefix", "PREFIX"))
        if name not in given
    ]


def _wrong_values(loaded: Mapping[str, Any]) -> list[Problem]:
    """Values that are fine by themselves, and name nothing or say nothing here."""
    problems = []
    prefix = loaded.get("output_prefix")
    if isinstance(prefix, str) and (not prefix or prefix.endswith("/")):
        problems.append(
            Problem(
                f"--output-prefix {prefix or repr(prefix)} names no file",
                f"end it with the beginning of a name, such as {prefix}corpus",
            )
        )
    keys: Sequence[str] = loaded.get("json_keys", ())
    repeated = sorted({key for key in keys if keys.count(key) > 1})
    problems += [Problem(f"--json-keys names {key!r} twice", "name every key once") for key in repeated]
    problems += [
        Problem(f"--json-keys {key!r} cannot be part of a file's name", "rename the key in the input")
        for key in keys
        if "/" in key or "\0" in key
    ]
    whole = "whole texts keep all of their newlines"
    problems += [
        Problem(
            f"{flag_of(name)} says how sentences are split, and they are not",
            f"add --split-sentences, or leave {flag_of(name)} out{reason}",
        )
        for name, reason in (("keep_newlines", f": {whole}"), ("lang", ""))
        if name in loaded and "split_sentences" not in loaded
    ]
    return problems


def _unknown(unknown: Sequence[str], words: Sequence[str], flags: Sequence[str]) -> list[Problem]:
    """What is no flag, and no value of what was meant to be one."""
    problems = []
    left = list(unknown)
    flag = ""
    for word in words:
        flag = word if word.startswith("-") else flag
        if left and word == left[0]:
            left.pop(0)
            if word == flag or flag not in unknown:
                near = near_name(word.partition("=")[0].replace("_", "-"), flags)
                fix = f"did you mean {near}?" if near else "see --help for what there is"
                problems.append(Problem(f"{word} is unknown", fix))
    return problems
