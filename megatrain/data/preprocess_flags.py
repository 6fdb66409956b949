"""The command line of `preprocess_data.py`, with Megatron-LM's names of flags.

The flags of the tokenizer are made from the fields of `TokenizerConfig`. All that is wrong with a command line is told at once.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final, Literal, NoReturn

from megatrain.config.errors import ConfigError, Problem
from megatrain.config.help_text import field_help
from megatrain.config.loading import BadValueError, load_value
from megatrain.config.tokenizer import TokenizerConfig
from megatrain.config.tree import Setting, near_name, settings


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
    values.json_keys = values.json_keys or ["text"]
    given = vars(values)
    flags = [flag for action in parser._actions for flag in action.option_strings]  # noqa: SLF001 - no other list
    problems = [_unknown(word, flags) for word in unknown] + _wrong_values(values)
    tokenizer = _tokenizer({name: given.pop(name) for name in _tokenizer_settings()}, problems)
    if problems:
        raise ConfigError.of(problems)
    idle = {
        "--partitions": given.pop("partitions"),
        "--keep-sequential-samples": given.pop("keep_sequential"),
    }
    lists = {name: tuple(given[name]) for name in ("input", "json_keys")}
    without_effect = tuple(flag for flag, value in idle.items() if value)
    return PreprocessSettings(**given | lists, tokenizer=tokenizer, without_effect=without_effect)


class _Parser(argparse.ArgumentParser):
    """Reports through the project's errors."""

    def error(self, message: str) -> NoReturn:
        raise ConfigError(message, fix="see --help")


class _HelpFormatter(argparse.HelpFormatter):
    """Shows the defaults that say something."""

    def _get_help_string(self, action: argparse.Action) -> str:
        is_telling = action.default not in (None, False, argparse.SUPPRESS)
        return (action.help or "") + " (default: %(default)s)" * is_telling


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
        for flag, options in flags.items():
            group.add_argument(flag, **options)
    group = parser.add_argument_group("tokenizer")
    texts = field_help() if with_help else {}
    for setting in _tokenizer_settings().values():
        _add_tokenizer_flag(group, setting, texts.get(setting.path, "").replace("%", "%%"))
    return parser


def _add_tokenizer_flag(group: Any, setting: Setting, text: str) -> None:
    """What is not given stays None: its default is the field's."""
    named = {"dest": setting.name, "default": argparse.SUPPRESS if text else None}
    if setting.kind is bool:
        group.add_argument(setting.flag, action="store_const", const="true", help=text, **named)
        off = f"turn {setting.flag} off" if setting.default else argparse.SUPPRESS
        group.add_argument(setting.opposite_flag, action="store_const", const="false", help=off, **named)
        return
    metavar = "{" + ",".join(setting.choices) + "}" if setting.choices else setting.kind.__name__.upper()
    group.add_argument(
        setting.flag, metavar=metavar, nargs="+" if setting.is_list else None, help=text, **named
    )


# Values that argparse would show as defaults although they mean "not given" are left out of the help.
_FLAGS: Final[dict[str, dict[str, dict[str, Any]]]] = {
    "input and output": {
        "--input": {
            "nargs": "+",
            "metavar": "FILE",
            "help": "JSON Lines (plain, .gz, .bz2, .zst) or .parquet; paths and quoted globs",
        },
        "--output-prefix": {
            "metavar": "PREFIX",
            "help": "writes PREFIX_KEY_document.bin, .idx and .json (PREFIX_KEY_sentence with --split-sentences)",
        },
        "--json-keys": {
            "nargs": "+",
            "metavar": "KEY",
            "help": "a dataset is made of each (default: text)",
        },
        "--on-bad-line": {
            "choices": ("stop", "skip", "quarantine"),
            "default": "stop",
            "help": "a line that is no document; quarantine writes it to PREFIX.bad_lines.jsonl",
        },
        "--max-line-mb": {
            "type": int,
            "default": 64,
            "metavar": "MB",
            "help": "longer lines are bad lines, which are not read into memory; a worker needs about 150 times the longest line",
        },
        "--append-eod": {"action": "store_true", "help": "end documents with the end-of-document id"},
    },
    "sentences": {
        "--split-sentences": {
            "action": "store_true",
            "help": "make a sequence of each sentence (needs nltk)",
        },
        "--keep-newlines": {"action": "store_true", "help": "sentences keep the white space behind them"},
        "--lang": {"default": "english", "metavar": "LANGUAGE", "help": "nltk's name of the language"},
    },
    "runtime": {
        "--workers": {"type": int, "default": 1, "metavar": "N", "help": "processes that tokenize"},
        "--log-interval": {
            "type": int,
            "default": 1000,
            "metavar": "N",
            "help": "documents between lines of progress, of which there is at most one a second",
        },
        "--partitions": {"type": int, "metavar": "N", "help": "without effect: workers share all files"},
        "--keep-sequential-samples": {
            "action": "store_true",
            "dest": "keep_sequential",
            "help": "without effect: output is always in the order of the input",
        },
    },
}


def _tokenizer_settings() -> dict[str, Setting]:
    return {setting.name: setting for setting in settings() if setting.section == "tokenizer"}


def _tokenizer(texts: dict[str, str | list[str] | None], problems: list[Problem]) -> TokenizerConfig:
    values: dict[str, Any] = {"tokenizer_type": "HuggingFaceTokenizer"}
    for name, setting in _tokenizer_settings().items():
        text = texts[name]
        if text is None:
            continue
        try:
            values[name] = load_value(setting, text)
        except BadValueError as error:
            problems.append(Problem(f"{setting.flag} {text} {error.text}", error.fix))
    return TokenizerConfig(**values)


def _wrong_values(values: argparse.Namespace) -> list[Problem]:
    problems = [
        Problem(f"{flag} is missing", f"give {flag} {value}")
        for flag, value, given in (
            ("--input", "FILE", values.input),
            ("--output-prefix", "PREFIX", values.output_prefix),
        )
        if given is None
    ]
    problems += [
        Problem(f"{flag} is {given}, and must be at least 1", f"give a positive number to {flag}")
        for flag, given in (
            ("--workers", values.workers),
            ("--log-interval", values.log_interval),
            ("--max-line-mb", values.max_line_mb),
        )
        if given < 1
    ]
    repeated = sorted({key for key in values.json_keys if values.json_keys.count(key) > 1})
    problems += [Problem(f"--json-keys names {key!r} twice", "name every key once") for key in repeated]
    problems += [
        Problem(f"--json-keys {key!r} cannot be part of a file's name", "rename the key in the input")
        for key in values.json_keys
        if "/" in key or "\0" in key
    ]
    if values.keep_newlines and not values.split_sentences:
        problems.append(
            Problem(
                "--keep-newlines says how sentences are split, and they are not",
                "add --split-sentences, or leave --keep-newlines out: whole texts keep all of their newlines",
            )
        )
    return problems


def _unknown(word: str, flags: Sequence[str]) -> Problem:
    near = near_name(word.partition("=")[0].replace("_", "-"), flags)
    fix = f"did you mean {near}?" if near else "see --help for what there is"
    return Problem(f"{word} is unknown", fix)
