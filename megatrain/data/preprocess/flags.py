"""The command line of `preprocess_data.py`, with Megatron-LM's flag names.

Flags are generated from the fields of `PreprocessFlags` and `TokenizerConfig`. All problems of a command line are reported at once.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, Literal, NoReturn

from megatrain.config.cli.help_text import docs_of, field_help
from megatrain.config.cli.parse_value import BadValueError, load_value, value_fix
from megatrain.config.errors import ConfigError, Problem
from megatrain.config.schema.resume_class import SILENT
from megatrain.config.schema.setting import Section, setting
from megatrain.config.schema.tokenizer import TokenizerConfig
from megatrain.config.schema.tree import Setting, closest_name, flag_of, in_words, settings, settings_of
from megatrain.config.schema.values import REQUIRED
from megatrain.data.preprocess.conversations import PromptFormat
from megatrain.data.preprocess.inputs import InputFormat


@dataclass(frozen=True, kw_only=True)
class PreprocessFlags(Section, on_resume=SILENT):
    """The flags of preprocessing. The docstring under a field is its help text."""

    input: tuple[str, ...] = setting(REQUIRED, example="FILE")
    """JSON Lines or text (.txt, .md; also with .gz, .bz2, .zst), .parquet; paths, folders, quoted globs."""
    input_format: InputFormat = "auto"
    """Read every file but Parquet as JSON Lines or as text; auto: .txt and .md are text, others JSON Lines."""
    text_documents: Literal["file", "line"] = "file"
    """The part of a text file that is a document."""
    output_prefix: str = setting(REQUIRED, example="PREFIX")
    """Write PREFIX_KEY_document.bin, .idx and .json (PREFIX_KEY_sentence with --split-sentences)."""
    json_keys: tuple[str, ...] = ("text",)
    """Keys to tokenize; each makes its own dataset; text files have one."""
    on_bad_line: Literal["stop", "skip", "quarantine"] = "stop"
    """Handling of a line that contains no document; quarantine writes it to PREFIX.bad_lines.jsonl."""
    max_line_mb: int = setting(64, at_least=1)
    """Megabytes above which a line is a bad line; a worker needs about 150 times the longest line in memory."""
    append_eod: bool = False
    """Append the end-of-document id to every document that is not empty; conversations always end with it."""
    sft: bool = False
    """Read conversations, lists of messages with role and content (key messages), and write tokens and a loss mask."""
    sft_tokenizer_prompt_format: PromptFormat | None = None
    """Text around messages; default: the tokenizer's chat template (needs jinja2), used if there is one, else chatml."""
    chat_template: str | None = None
    """File with a Jinja template in place of the tokenizer's."""
    split_sentences: bool = False
    """Make a sequence of each sentence (needs nltk and its punkt models, or syntok)."""
    keep_newlines: bool = False
    """Keep the white space between two sentences at the end of the first one."""
    lang: str = "english"
    """nltk's name of the language of the text."""
    workers: int = setting(1, at_least=1)
    """Tokenizer processes."""
    log_interval: int = setting(1000, at_least=1)
    """Documents between progress lines; at most one line per second is printed."""
    partitions: int | None = setting(None, at_least=1)
    """Without effect: workers share all files."""
    keep_sequential_samples: bool = False
    """Without effect: output always has the order of the input."""
    dataset_impl: Literal["mmap"] | None = None
    """Without effect: there is one format of output files."""


@dataclass(frozen=True, kw_only=True)
class PreprocessSettings(PreprocessFlags):
    """The settings of a preprocessing run."""

    tokenizer: TokenizerConfig

    @property
    def without_effect(self) -> list[str]:
        """The given flags without effect."""
        return [flag for flag in WITHOUT_EFFECT if getattr(self, flag[2:].replace("-", "_"))]


WITHOUT_EFFECT: Final = {
    "--partitions": "workers share all files",
    "--keep-sequential-samples": "the output always has the order of the input",
    "--dataset-impl": "there is one format of .bin and .idx files, Megatron-LM's mmap",
}
"""Flags that are accepted and change nothing, and the reason."""
_SETTINGS: Final = {one.name: one for one in settings_of("preprocess", PreprocessFlags)}
_TITLES: Final = {
    "input": "input and output",
    "sft": "conversations",
    "split_sentences": "sentences",
    "workers": "runtime",
}
"""Titles in the help text, by the first setting below each."""


def parse_settings(argv: Sequence[str] | None = None) -> PreprocessSettings:
    """Parse a command line; None: the one of this process.

    Raises:
        ConfigError: with all problems of the command line.
    """
    arguments = sys.argv[1:] if argv is None else list(argv)
    parser = _make_parser(with_help=bool({"-h", "--help"} & set(arguments)))
    values, unknown = parser.parse_known_args(arguments)
    given = {name: value for name, value in vars(values).items() if value is not None}
    flags = [flag for action in parser._actions for flag in action.option_strings]  # noqa: SLF001 - no other list
    problems = _unknown_flags(unknown, arguments, flags)
    loaded = load_values(_SETTINGS, given, problems)
    tokenizer = {"tokenizer_type": "HuggingFaceTokenizer"} | load_values(
        tokenizer_settings(), given, problems
    )
    problems += [
        Problem(f"{one.flag} is missing", f"give {one.flag} {one.example}")
        for one in _SETTINGS.values()
        if one.is_required and one.name not in given
    ]
    problems += _invalid_values(loaded)
    if problems:
        raise ConfigError.of(problems)
    if loaded.get("sft"):
        loaded = {"json_keys": ("messages",)} | loaded
    return PreprocessSettings(**loaded, tokenizer=TokenizerConfig(**tokenizer))


class _Parser(argparse.ArgumentParser):
    """A parser that raises the project's errors."""

    def error(self, message: str) -> NoReturn:
        raise ConfigError(message, fix="see --help")


class _HelpFormatter(argparse.HelpFormatter):
    """Shows one metavar per flag, although every flag accepts any number of values for better error messages."""

    def _format_args(self, action: argparse.Action, default_metavar: str) -> str:
        return str(action.metavar or default_metavar)


def _make_parser(*, with_help: bool) -> argparse.ArgumentParser:
    parser = _Parser(
        prog="preprocess_data.py",
        usage="preprocess_data.py --input FILE ... --output-prefix PREFIX --tokenizer-model PATH [--flag VALUE ...]",
        description="Tokenize JSON Lines, text or Parquet files into the .bin and .idx files that pretraining reads.",
        formatter_class=_HelpFormatter,
        allow_abbrev=False,
    )
    docs = docs_of(PreprocessFlags) if with_help else {}
    group: Any = parser
    for name, one in _SETTINGS.items():
        group = parser.add_argument_group(_TITLES[name]) if name in _TITLES else group
        _add_flag(group, one, docs.get(name, "") + _default_of(one), nargs="*")
    group = parser.add_argument_group("tokenizer")
    add_tokenizer_flags(group, field_help() if with_help else {}, nargs="*")
    return parser


def _default_of(one: Setting) -> str:
    """Return the default of a setting for its help text."""
    if one.is_required or one.default in (None, False):
        return ""
    return f" (default: {in_words(one.default)})"


def add_tokenizer_flags(group: Any, texts: Mapping[str, str], *, nargs: Literal["*"] | None = None) -> None:
    """Add the tokenizer's flags. A missing flag stays None; `load_values` reads the others.

    Args:
        texts: help texts by path of the setting.
        nargs: `*` where no positional argument follows: a flag with a wrong number of values is then reported by its name.
    """
    for one in tokenizer_settings().values():
        _add_flag(group, one, texts.get(one.path, ""), nargs=nargs)


def _add_flag(group: Any, one: Setting, text: str, *, nargs: Literal["*"] | None) -> None:
    text = text.replace("%", "%%")
    if one.kind is bool:
        off = f"turn {one.flag} off" if one.default else argparse.SUPPRESS
        for flag, value, shown in ((one.flag, "true", text), (one.opposite_flag, "false", off)):
            group.add_argument(flag, dest=one.name, action="store_const", const=[value], help=shown)
        return
    metavar = "{" + ",".join(one.choices) + "}" if one.choices else one.kind.__name__.upper()
    metavar = (one.example if one.is_required else metavar) + " ..." * one.is_list
    count = nargs or ("+" if one.is_list else 1)
    group.add_argument(one.flag, dest=one.name, metavar=metavar, nargs=count, help=text)


def tokenizer_settings() -> dict[str, Setting]:
    """Return the settings of the tokenizer by name."""
    return {one.name: one for one in settings() if one.section == "tokenizer"}


def load_values(
    settings: Mapping[str, Setting], given: Mapping[str, Any], problems: list[Problem]
) -> dict[str, Any]:
    """Load the values of the given settings; append problems for invalid ones."""
    values: dict[str, Any] = {}
    for name in (name for name in settings if name in given):
        one, words = settings[name], given[name]
        if not words:
            problems.append(Problem(f"{one.flag} has no value", value_fix(one)))
            continue
        try:
            values[name] = load_value(one, words if one.is_list or len(words) > 1 else words[0])
        except BadValueError as error:
            problems.append(Problem(f"{one.flag} {' '.join(words)} {error.text}", error.fix))
    return values


def _invalid_values(loaded: Mapping[str, Any]) -> list[Problem]:
    """Return problems of values that parse, but that this run cannot use."""
    problems = []
    prefix = loaded.get("output_prefix")
    if isinstance(prefix, str) and (not prefix or prefix.endswith("/")):
        problems.append(
            Problem(
                f"--output-prefix {prefix or repr(prefix)} does not end with a file name",
                f"append the beginning of a file name, such as {prefix}corpus",
            )
        )
    keys: Sequence[str] = loaded.get("json_keys", ())
    repeated = sorted({key for key in keys if keys.count(key) > 1})
    problems += [
        Problem(f"--json-keys names {key!r} twice", "give --json-keys each key once") for key in repeated
    ]
    problems += [
        Problem(f"--json-keys {key!r} cannot be part of a file name", "rename the key in the input")
        for key in keys
        if "/" in key or "\0" in key
    ]
    problems += [
        Problem(
            f"{flag_of(name)} has no meaning without --split-sentences",
            f"add --split-sentences, or leave {flag_of(name)} out{reason}",
        )
        for name, reason in (("keep_newlines", ": unsplit texts keep all newlines"), ("lang", ""))
        if loaded.get(name) and not loaded.get("split_sentences")
    ]
    return problems + _conversation_problems(loaded)


def _conversation_problems(loaded: Mapping[str, Any]) -> list[Problem]:
    """Return problems of the flags of conversations."""
    if not loaded.get("sft"):
        return [
            Problem(
                f"{flag_of(name)} has no meaning without --sft", f"add --sft, or leave {flag_of(name)} out"
            )
            for name in ("sft_tokenizer_prompt_format", "chat_template")
            if name in loaded
        ]
    problems = []
    if loaded.get("split_sentences"):
        problems.append(Problem("--sft does not split sentences", "remove --split-sentences"))
    if len(loaded.get("json_keys", ("messages",))) > 1:
        problems.append(Problem("--sft reads one key", "give --json-keys the key of the messages alone"))
    if "chat_template" in loaded and loaded.get("sft_tokenizer_prompt_format") not in (None, "default"):
        problems.append(
            Problem(
                "--chat-template belongs to the prompt format default",
                "add --sft-tokenizer-prompt-format default, or remove --chat-template",
            )
        )
    return problems


def _unknown_flags(unknown: Sequence[str], arguments: Sequence[str], flags: Sequence[str]) -> list[Problem]:
    """Return a problem for each unknown flag, and for each argument that belongs to no flag."""
    problems = []
    left = list(unknown)
    flag = ""
    for argument in arguments:
        flag = argument if argument.startswith("-") else flag
        if left and argument == left[0]:
            left.pop(0)
            if argument == flag or flag not in unknown:
                near = closest_name(argument.partition("=")[0].replace("_", "-"), flags)
                fix = f"did you mean {near}?" if near else "leave it out; --help lists all flags"
                problems.append(Problem(f"{argument} is unknown", fix))
    return problems
