"""The command line of `preprocess_data.py`, with Megatron-LM's names of flags.

All that is wrong with a command line is reported at once.
"""

from __future__ import annotations

import argparse
import difflib
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Literal, NoReturn

from megatrain.config.errors import ConfigError, Problem
from megatrain.config.tokenizer import TokenizerConfig

if TYPE_CHECKING:
    from collections.abc import Sequence


@dataclass(frozen=True, kw_only=True)
class PreprocessSettings:
    """What to tokenize, how, and where to."""

    input: Path
    """JSON Lines: one object a line."""
    output_prefix: str
    """Output is `<output_prefix>_<key>_document.bin`, `.idx` and `.json`."""
    json_keys: tuple[str, ...] = ("text",)
    """What to take of every object; each key makes a dataset of its own."""
    append_eod: bool = False
    """End every document that is not empty with the end-of-document id."""
    workers: int = 1
    """Processes that tokenize."""
    tokenizer: TokenizerConfig
    log_interval: int = 1000
    """Documents between two lines of progress."""
    on_bad_line: Literal["stop", "skip"] = "stop"
    """What to do about a line that is no document."""


def parse_settings(argv: Sequence[str] | None = None) -> PreprocessSettings:
    """The settings that a command line asks for; None: this process's own.

    Raises:
        ConfigError: with all problems of the command line.
    """
    parser = _make_parser()
    values, unknown = parser.parse_known_args(argv)
    flags = [flag for action in parser._actions for flag in action.option_strings]  # noqa: SLF001 - no other list
    problems = [_unknown(word, flags) for word in unknown]
    problems += [
        Problem(f"{flag} is missing", f"give {flag} {value}")
        for flag, value, given in (
            ("--input", "FILE", values.input),
            ("--output-prefix", "PREFIX", values.output_prefix),
        )
        if given is None
    ]
    problems += [
        Problem(f"{flag} is {given}, and must be at least 1", f"give a positive number to {flag}")
        for flag, given in (("--workers", values.workers), ("--log-interval", values.log_interval))
        if given < 1
    ]
    repeated = sorted({key for key in values.json_keys if values.json_keys.count(key) > 1})
    problems += [Problem(f"--json-keys names {key!r} twice", "name every key once") for key in repeated]
    if problems:
        raise ConfigError.of(problems)
    given = vars(values)
    tokenizer = TokenizerConfig(**{name: given.pop(name) for name in _TOKENIZER_FLAGS})
    return PreprocessSettings(**{**given, "json_keys": tuple(values.json_keys)}, tokenizer=tokenizer)


_TOKENIZER_FLAGS = ("tokenizer_type", "tokenizer_model", "vocab_size")


class _Parser(argparse.ArgumentParser):
    """Reports through the project's errors."""

    def error(self, message: str) -> NoReturn:
        raise ConfigError(message, fix="see --help")


def _make_parser() -> argparse.ArgumentParser:
    parser = _Parser(
        prog="preprocess_data.py",
        description="Tokenize JSON Lines into the .bin and .idx files that pretraining reads.",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
        allow_abbrev=False,
    )
    data = parser.add_argument_group("input and output")
    data.add_argument("--input", type=Path, metavar="FILE", help="JSON Lines, one object a line")
    data.add_argument(
        "--output-prefix", metavar="PREFIX", help="writes PREFIX_KEY_document.bin, .idx and .json"
    )
    data.add_argument(
        "--json-keys", nargs="+", default=["text"], metavar="KEY", help="a dataset is made of each"
    )
    data.add_argument(
        "--on-bad-line", choices=("stop", "skip"), default="stop", help="a line that is no document"
    )
    tokenizer = parser.add_argument_group("tokenizer")
    tokenizer.add_argument(
        "--tokenizer-type", default="HuggingFaceTokenizer", help="Megatron-LM's name of the type"
    )
    tokenizer.add_argument("--tokenizer-model", metavar="PATH", help="tokenizer.json or a folder with one")
    tokenizer.add_argument("--vocab-size", type=int, help="ids of a NullTokenizer")
    tokenizer.add_argument(
        "--append-eod", action="store_true", help="end documents with the end-of-document id"
    )
    runtime = parser.add_argument_group("runtime")
    runtime.add_argument("--workers", type=int, default=1, help="processes that tokenize")
    runtime.add_argument("--log-interval", type=int, default=1000, help="documents between lines of progress")
    return parser


def _unknown(word: str, flags: Sequence[str]) -> Problem:
    near = difflib.get_close_matches(word.split("=", maxsplit=1)[0], flags, n=1)
    fix = f"did you mean {near[0]}?" if near else "see --help for what there is"
    return Problem(f"{word} is unknown", fix)
