"""Chat templates: the files of a tokenizer that have them, and the process that renders them.

--chat-template FILE | chat_template.jinja | tokenizer_config.json -> TemplateSettings -> ChatTemplate <-> template_program.py
"""

from __future__ import annotations

import json
import signal
import sys
import weakref
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any, Final

from megatrain.config.errors import ConfigError, InputError
from megatrain.config.schema.tokenizer import TokenizerConfig
from megatrain.data.files import optional_package
from megatrain.data.preprocess.documents import InvalidDocumentError
from megatrain.data.tokenizers.files import read_json, tokenizer_folder
from megatrain.data.tokenizers.special_tokens import named_tokens
from megatrain.process.line_program import LineProgram, ProgramEndedError

RENDER_SECONDS: Final = 10.0
"""CPU time in which a template must render a conversation once."""
MEMORY_BYTES: Final = 1 << 31
"""Address space of the process that renders."""
_PROGRAM: Final = Path(__file__).with_name("template_program.py")


@dataclass(frozen=True, kw_only=True)
class TemplateSettings:
    """The chat template of a tokenizer."""

    file: str
    """The file that has it."""
    sources: tuple[tuple[str, str], ...]
    """Templates by name: `default`, and perhaps `tool_use`, for conversations with tools."""
    special_tokens: tuple[tuple[str, str], ...]
    """Texts of special tokens by role, which templates use."""
    now: str
    """ISO time of `strftime_now`, the same for the whole run; empty: the template does not use it."""


def load_template(tokenizer: TokenizerConfig, file: str | None) -> TemplateSettings:
    """Return the chat template of a tokenizer.

    Args:
        tokenizer: its folder has the template, unless `file` is given.
        file: a file with a template.

    Raises:
        ConfigError: there is no template, or it cannot be compiled.
    """
    folder = tokenizer_folder(tokenizer)
    found = _named_file(Path(file)) if file is not None else _of_folder(folder) if folder else None
    if found is None:
        raise ConfigError(
            f"--sft-tokenizer-prompt-format default: {folder or 'the tokenizer'} has no chat template",
            fix="give --chat-template FILE, or another format, such as --sft-tokenizer-prompt-format chatml",
        )
    return _compiled(tokenizer, *found)


def has_template(tokenizer: TokenizerConfig) -> bool:
    """Return whether the folder of a tokenizer has a chat template."""
    folder = tokenizer_folder(tokenizer)
    return folder is not None and _of_folder(folder) is not None


def stored_template(tokenizer: TokenizerConfig, source: str | None) -> TemplateSettings | None:
    """Return the template of conversations that a model was trained on, else that of its tokenizer; None: there is none."""
    folder = tokenizer_folder(tokenizer)
    if source is not None:
        return _compiled(tokenizer, "of the checkpoint", {"default": source})
    found = _of_folder(folder) if folder else None
    return None if found is None else _compiled(tokenizer, *found)


def _compiled(tokenizer: TokenizerConfig, file: Path | str, sources: Mapping[str, str]) -> TemplateSettings:
    """Return the settings of a template. Raises InputError if it is not valid."""
    optional_package("jinja2", needed_for="a chat template (--sft-tokenizer-prompt-format default, --chat)")
    folder = tokenizer_folder(tokenizer)
    uses_time = any("strftime_now" in source for source in sources.values())
    settings = TemplateSettings(
        file=str(file),
        sources=tuple(sorted(sources.items())),
        special_tokens=tuple(sorted(_special_tokens(folder).items())) if folder else (),
        now=datetime.now().isoformat() if uses_time else "",  # noqa: DTZ005 - local, as in transformers
    )
    ChatTemplate(settings).compile()
    return settings


def _named_file(path: Path) -> tuple[Path, dict[str, str]]:
    try:
        return path, {"default": path.read_text(encoding="utf-8")}
    except (OSError, ValueError) as error:
        raise InputError(
            f"{path}: cannot be read: {error}", fix="give --chat-template a text file"
        ) from error


def _of_folder(folder: Path) -> tuple[Path, dict[str, str]] | None:
    """Return the templates in a tokenizer's folder: files come before tokenizer_config.json, as in transformers."""
    file, others = folder / "chat_template.jinja", folder / "additional_chat_templates"
    if file.is_file():
        tool_use = others / "tool_use.jinja"
        more = {"tool_use": _named_file(tool_use)[1]["default"]} if tool_use.is_file() else {}
        return file, _named_file(file)[1] | more
    config_file = folder / "tokenizer_config.json"
    config = read_json(config_file) if config_file.is_file() else {}
    source = config.get("chat_template") if isinstance(config, dict) else None
    if isinstance(source, list):  # several templates by name
        named = [one for one in source if isinstance(one, dict)]
        texts = {str(one.get("name")): one.get("template") for one in named}
    else:
        texts = {"default": source}
    found = {name: text for name in ("default", "tool_use") if isinstance(text := texts.get(name), str)}
    return (config_file, found) if "default" in found else None


def _special_tokens(folder: Path) -> dict[str, str]:
    """Return the texts of special tokens by role, as transformers passes them to a template."""
    config_file = folder / "tokenizer_config.json"
    config = read_json(config_file) if config_file.is_file() else {}
    extra = config.get("extra_special_tokens") if isinstance(config, dict) else None
    further = {
        str(role): text
        for role, text in (extra.items() if isinstance(extra, dict) else ())
        if isinstance(text, str)
    }
    return dict(named_tokens(folder).roles) | further


class ChatTemplate:
    """Renders conversations in a process of its own, which ends with this object."""

    def __init__(self, settings: TemplateSettings) -> None:
        self._settings = settings
        self._program: LineProgram | None = None

    def compile(self) -> None:
        """Start the process. Raises InputError if the template is not valid."""
        try:
            self._program = self._start()
        except _FailedError as error:
            raise InputError(
                f"{self._settings.file}: the chat template is not valid: {error}",
                fix="correct it, or give --chat-template FILE with another one",
            ) from None

    def segments(self, request: Mapping[str, Any]) -> list[tuple[str, bool]]:
        """Return the parts of the text of a conversation, each with True if it is the text of the assistant.

        Raises:
            InvalidDocumentError: the template rejects the conversation, fails, or exceeds its limits.
        """
        try:
            line = json.dumps(request, default=lambda value: f"<{type(value).__name__}>")
        except (RecursionError, ValueError) as error:
            raise InvalidDocumentError(f"not usable JSON: {error}") from None
        try:
            found = self._answer(line)["segments"]
        except _FailedError as error:
            raise InvalidDocumentError(
                f"rejected by the chat template {self._settings.file}: {error}",
                fix="give --chat-template FILE with another template, or correct the line",
            ) from None
        return [(str(text), bool(has_loss)) for text, has_loss in found]

    def _start(self) -> LineProgram:
        program = LineProgram([sys.executable, str(_PROGRAM)])
        weakref.finalize(self, program.end)
        settings = self._settings
        request = {
            "sources": dict(settings.sources),
            "variables": dict(settings.special_tokens),
            "now": settings.now,
            "seconds": RENDER_SECONDS,
            "memory_bytes": MEMORY_BYTES,
        }
        self._exchange(program, json.dumps(request))
        return program

    def _answer(self, line: str) -> dict[str, Any]:
        """Send a line of JSON and return the answer. Raises _FailedError."""
        self._program = self._program or self._start()
        return self._exchange(self._program, line)

    def _exchange(self, program: LineProgram, line: str) -> dict[str, Any]:
        program.send(line)
        try:
            answer: dict[str, Any] = program.receive()
        except ProgramEndedError as error:
            program.end()
            self._program = None  # the next conversation gets a new one
            took_too_long = error.code == -signal.SIGPROF
            reason = f"it takes more than {RENDER_SECONDS:g} seconds of CPU time"
            raise _FailedError(reason if took_too_long else f"its process ended: {error}") from None
        if "error" in answer:
            raise _FailedError(answer["error"])
        return answer


class _FailedError(Exception):
    """The template cannot render; the message is the reason."""
