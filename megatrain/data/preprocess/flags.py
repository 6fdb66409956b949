"""The command line of `preprocess_data.py`, with Megatron-LM's flag names.

Tokenizer flags are generated from the fields of `TokenizerConfig`. All problems of a command line are reported at once.
"""

from __future__ import annotations

import argparse
import dataclasses
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, Literal, NoReturn, get_args

from megatrain.config.cli.help_text import field_help
from megatrain.config.cli.parse_value import BadValueError, accepted_values, load_value
from megatrain.config.errors import ConfigError, Problem
from megatrain.config.schema.tokenizer import TokenizerConfig
from megatrain.config.schema.tree import Setting, closest_name, flag_of, settings
from megatrain.config.schema.values import Range
from megatrain.data.preprocess.conversations import PromptFormat
from megatrain.data.preprocess.inputs import InputFormat


@dataclass(frozen=True, kw_only=True)
class PreprocessSettings:
    """The settings of a preprocessing run."""

    input: tuple[str, ...]
    """Input paths and globs, in order."""
    output_prefix: str
    """Prefix of `<output_prefix>_<key>_document.bin`, `.idx` and `.json`."""
    input_format: InputFormat = "auto"
    """Format of the input files; auto: by suffix."""
    text_documents: Literal["file", "line"] = "file"
    """The part of a text file that is a document."""
    json_keys: tuple[str, ...] = ("text",)
    """Keys of each object to tokenize; each key makes its own dataset."""
    sft: bool = False
    """Read conversations: lists of messages."""
    sft_tokenizer_prompt_format: PromptFormat | None = None
    """Text around the messages of a conversation; None: `default` if there is a chat template, else `chatml`."""
    chat_template: str | None = None
    """File with the template of the format `default`."""
    split_sentences: bool = False
    """Split texts into sentences; each becomes a sequence."""
    keep_newlines: bool = False
    """Keep the white space between two sentences at the end of the first one."""
    lang: str = "english"
    """nltk's name of the language of the text."""
    append_eod: bool = False
    """Append the end-of-document id to every non-empty document."""
    workers: int = 1
    """Tokenizer processes."""
    tokenizer: TokenizerConfig
    log_interval: int = 1000
    """Documents between two progress lines."""
    on_bad_line: Literal["stop", "skip", "quarantine"] = "stop"
    """Handling of a line that contains no document."""
    max_line_mb: int = 64
    """Megabytes above which a line is a bad line."""
    without_effect: tuple[str, ...] = ()
    """Given flags without effect."""


def parse_settings(argv: Sequence[str] | None = None) -> PreprocessSettings:
    """Parse a command line; None: the one of this process.

    Raises:
        ConfigError: with all problems of the command line.
    """
    arguments = sys.argv[1:] if argv is None else list(argv)
    parser = _make_parser(with_help=bool({"-h", "--help"} & set(arguments)))
    values, unknown = parser.parse_known_args(arguments)
    given = {name: value for name, value in vars(values).items() if value not in (None, False)}
    flags = [flag for action in parser._actions for flag in action.option_strings]  # noqa: SLF001 - no other list
    problems = _unknown_flags(unknown, arguments, flags)
    loaded = given | load_values(_SETTINGS, given, problems)
    tokenizer = {"tokenizer_type": "HuggingFaceTokenizer"} | load_values(
        tokenizer_settings(), given, problems
    )
    problems += _missing_flags(given) + _invalid_values(loaded)
    if problems:
        raise ConfigError.of(problems)
    if "sft" in given:
        loaded = {"json_keys": ("messages",)} | loaded
    fields = {field.name for field in dataclasses.fields(PreprocessSettings)}
    return PreprocessSettings(
        **{name: value for name, value in loaded.items() if name in fields},
        tokenizer=TokenizerConfig(**tokenizer),
        without_effect=tuple(flag for flag in WITHOUT_EFFECT if flag[2:].replace("-", "_") in given),
    )


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
    for title, flags in _FLAGS.items():
        group = parser.add_argument_group(title)
        for flag, (metavar, text) in flags.items():
            if metavar is None:
                group.add_argument(flag, action="store_true", help=text)
            else:
                group.add_argument(flag, nargs="*", metavar=metavar, help=text + _default_of(flag))
    group = parser.add_argument_group("tokenizer")
    add_tokenizer_flags(group, field_help() if with_help else {}, nargs="*")
    return parser


def _default_of(flag: str) -> str:
    """Return the default of a flag for its help text."""
    defaults = {field.name: field.default for field in dataclasses.fields(PreprocessSettings)}
    value = defaults.get(flag.removeprefix("--").replace("-", "_"), dataclasses.MISSING)
    if value is dataclasses.MISSING:
        return ""
    return f" (default: {' '.join(value) if isinstance(value, tuple) else value})"


def add_tokenizer_flags(group: Any, texts: Mapping[str, str], *, nargs: Literal["*"] | None = None) -> None:
    """Add the tokenizer's flags. A missing flag stays None; `load_values` reads the others.

    Args:
        texts: help texts by path of the setting.
        nargs: `*` where no positional argument follows: a flag with a wrong number of values is then reported by its name.
    """
    for setting in tokenizer_settings().values():
        text = texts.get(setting.path, "").replace("%", "%%")
        if setting.kind is bool:
            group.add_argument(
                setting.flag, dest=setting.name, action="store_const", const=["true"], help=text
            )
            off = f"turn {setting.flag} off" if setting.default else argparse.SUPPRESS
            group.add_argument(
                setting.opposite_flag, dest=setting.name, action="store_const", const=["false"], help=off
            )
            continue
        metavar = "{" + ",".join(setting.choices) + "}" if setting.choices else setting.kind.__name__.upper()
        metavar += " ..." * setting.is_list
        count = nargs or ("+" if setting.is_list else 1)
        group.add_argument(setting.flag, dest=setting.name, metavar=metavar, nargs=count, help=text)


_FLAGS: Final[dict[str, dict[str, tuple[str | None, str]]]] = {
    "input and output": {
        "--input": (
            "FILE ...",
            "JSON Lines or text (.txt, .md; also with .gz, .bz2, .zst), .parquet; paths, folders, quoted globs",
        ),
        "--input-format": (
            "{auto,jsonl,text}",
            "read every file but Parquet as JSON Lines or as text; auto: .txt and .md are text, others JSON Lines",
        ),
        "--text-documents": ("{file,line}", "the part of a text file that is a document"),
        "--output-prefix": (
            "PREFIX",
            "write PREFIX_KEY_document.bin, .idx and .json (PREFIX_KEY_sentence with --split-sentences)",
        ),
        "--json-keys": ("KEY ...", "keys to tokenize; each makes its own dataset; text files have one"),
        "--on-bad-line": (
            "{stop,skip,quarantine}",
            "handling of a line that contains no document; quarantine writes it to PREFIX.bad_lines.jsonl",
        ),
        "--max-line-mb": (
            "MB",
            "megabytes above which a line is a bad line; a worker needs about 150 times the longest line in memory",
        ),
        "--append-eod": (
            None,
            "append the end-of-document id to every document; conversations always end with it",
        ),
    },
    "conversations": {
        "--sft": (
            None,
            "read lists of messages with role and content (key messages), and write tokens and a loss mask",
        ),
        "--sft-tokenizer-prompt-format": (
            f"{{{','.join(get_args(PromptFormat))}}}",
            "text around messages; `default`: the tokenizer's chat template (needs jinja2), used if there is one, else chatml",
        ),
        "--chat-template": ("FILE", "Jinja template in place of the tokenizer's"),
    },
    "sentences": {
        "--split-sentences": (
            None,
            "make a sequence of each sentence (needs nltk and its punkt models, or syntok)",
        ),
        "--keep-newlines": (None, "keep the white space after a sentence"),
        "--lang": ("LANGUAGE", "nltk's name of the language"),
    },
    "runtime": {
        "--workers": ("N", "tokenizer processes"),
        "--log-interval": ("N", "documents between progress lines; at most one line per second is printed"),
        "--partitions": ("N", "without effect: workers share all files"),
        "--keep-sequential-samples": (None, "without effect: output always has the order of the input"),
        "--dataset-impl": ("{mmap}", "without effect: there is one format of output files"),
    },
}
"""By title: every flag, its metavar (None: a flag without value), which `_setting` reads, and its help."""
WITHOUT_EFFECT: Final = {
    "--partitions": "workers share all files",
    "--keep-sequential-samples": "the output always has the order of the input",
    "--dataset-impl": "there is one format of .bin and .idx files, Megatron-LM's mmap",
}
"""Flags that are accepted and change nothing, and the reason."""


def _setting(flag: str, metavar: str) -> Setting:
    """Return the setting of a flag: a choice, a count of at least 1, a text, or a list of texts."""
    is_count = metavar in {"N", "MB"}
    return Setting(
        section="preprocess",
        name=flag.removeprefix("--").replace("-", "_"),
        kind=int if is_count else str,
        choices=tuple(metavar.strip("{}").split(",")) if metavar.startswith("{") else (),
        is_list=metavar.endswith(" ..."),
        is_optional=False,
        default=None,
        range=Range(at_least=1) if is_count else None,
    )


_SETTINGS: Final = {
    setting.name: setting
    for flags in _FLAGS.values()
    for setting in (_setting(flag, metavar) for flag, (metavar, _) in flags.items() if metavar is not None)
}
"""The flags with a value, without the flags of the tokenizer."""


def tokenizer_settings() -> dict[str, Setting]:
    """Return the settings of the tokenizer by name."""
    return {setting.name: setting for setting in settings() if setting.section == "tokenizer"}


def load_values(
    settings: Mapping[str, Setting], given: Mapping[str, Any], problems: list[Problem]
) -> dict[str, Any]:
    """Load the values of the given settings; append problems for invalid ones."""
    values: dict[str, Any] = {}
    for name, setting in settings.items():
        if name not in given:
            continue
        arguments = given[name]
        if not arguments:
            problems.append(
                Problem(f"{setting.flag} has no value", f"give {setting.flag} {accepted_values(setting)}")
            )
            continue
        try:
            values[name] = load_value(
                setting, arguments if setting.is_list or len(arguments) > 1 else arguments[0]
            )
        except BadValueError as error:
            problems.append(Problem(f"{setting.flag} {' '.join(arguments)} {error.text}", error.fix))
    return values


def _missing_flags(given: Mapping[str, Any]) -> list[Problem]:
    return [
        Problem(f"{flag_of(name)} is missing", f"give {flag_of(name)} {value}")
        for name, value in (("input", "FILE"), ("output_prefix", "PREFIX"))
        if name not in given
    ]


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
        if name in loaded and "split_sentences" not in loaded
    ]
    return problems + _conversation_problems(loaded)


def _conversation_problems(loaded: Mapping[str, Any]) -> list[Problem]:
    """Return problems of the flags of conversations."""
    if "sft" not in loaded:
        return [
            Problem(
                f"{flag_of(name)} has no meaning without --sft", f"add --sft, or leave {flag_of(name)} out"
            )
            for name in ("sft_tokenizer_prompt_format", "chat_template")
            if name in loaded
        ]
    problems = []
    if "split_sentences" in loaded:
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
