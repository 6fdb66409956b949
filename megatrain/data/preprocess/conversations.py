"""Conversations as text: a list of messages to segments, each with or without loss.

    [{"role": "user", "content": ..}, ..] -> prompt format -> [(text, has_loss), ..]      loss on the assistant's text only

Each segment is tokenized alone, as a prompt is when text is generated, so that no token spans both.
The texts of the formats are those of Megatron-LM's `--sft-tokenizer-prompt-format`; `default` is the tokenizer's chat template.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, Literal, NamedTuple, NoReturn

from megatrain.config.errors import ConfigError, InputError
from megatrain.config.schema.tokenizer import TokenizerConfig
from megatrain.data.files import optional_package
from megatrain.data.preprocess.documents import InvalidDocumentError, Row
from megatrain.data.tokenizers.files import read_json
from megatrain.data.tokenizers.special_tokens import named_tokens

PromptFormat = Literal["nemotron-h-aligned", "nemotron-nano-v2", "identity", "default"]
Message = Mapping[str, Any]


class Segment(NamedTuple):
    """A part of the text of a conversation."""

    text: str
    has_loss: bool


@dataclass(frozen=True, kw_only=True)
class ConversationSettings:
    """How conversations become text."""

    key: str
    """Key of the messages."""
    prompt_format: PromptFormat
    chat_template: str = ""
    """Source of the Jinja template of the format `default`."""
    special_tokens: tuple[tuple[str, str], ...] = ()
    """Texts of special tokens by role, which templates use."""


def make_formatter(settings: ConversationSettings) -> Callable[[Row], list[Segment]]:
    """Return the function that converts an object with messages into segments.

    It raises InvalidDocumentError if the object has no conversation with text of the assistant.
    """
    build = _template(settings) if settings.prompt_format == "default" else _BUILT_IN[settings.prompt_format]

    def segments(row: Row) -> list[Segment]:
        found = [segment for segment in build(_messages(row, settings.key)) if segment.text]
        if not any(segment.has_loss for segment in found):
            raise InvalidDocumentError("the conversation has no text of the assistant")
        return found

    return segments


def load_template(tokenizer: TokenizerConfig, file: str | None) -> tuple[str, tuple[tuple[str, str], ...]]:
    """Return the source of a chat template and the special tokens that it may use.

    Args:
        tokenizer: its folder has the template, unless `file` is given.

    Raises:
        ConfigError: there is no template, or it is not valid.
    """
    path = Path(tokenizer.tokenizer_model or "")
    folder = path if path.is_dir() else path.parent
    config_file = folder / "tokenizer_config.json"
    config = read_json(config_file) if tokenizer.tokenizer_model and config_file.is_file() else {}
    source = config.get("chat_template") if isinstance(config, dict) else None
    named_file = Path(file) if file is not None else folder / "chat_template.jinja"
    if file is not None or named_file.is_file():
        try:
            source = named_file.read_text(encoding="utf-8")
        except (OSError, ValueError) as error:
            raise InputError(
                f"{named_file}: cannot be read: {error}", fix="give --chat-template a text file"
            ) from error
    if isinstance(source, list):  # several templates by name
        source = next((one["template"] for one in source if one.get("name") == "default"), None)
    if not isinstance(source, str):
        raise ConfigError(
            f"--sft-tokenizer-prompt-format default: {folder} has no chat template",
            fix="give --chat-template FILE, or another format, such as --sft-tokenizer-prompt-format nemotron-h-aligned",
        )
    try:
        _compiled(source)
    except _jinja().TemplateError as error:
        raise InputError(f"the chat template is not valid: {error}", fix="correct the template") from error
    roles = named_tokens(folder).roles if tokenizer.tokenizer_model else {}
    return source, tuple(sorted(roles.items()))


def _messages(row: Row, key: str) -> list[Message]:
    messages = row.get(key)
    if not isinstance(messages, list) or not messages:
        present = ", ".join(map(repr, list(row)[:8])) or "nothing"
        raise InvalidDocumentError(
            f"key {key!r} has no list of messages; the keys are {present}",
            fix="name the key of the messages with --json-keys, or correct the line",
        )
    for number, message in enumerate(messages, start=1):
        content = message.get("content") if isinstance(message, dict) else None
        if not isinstance(content, str) or not isinstance(message.get("role"), str):
            raise InvalidDocumentError(f"message {number} has no role and content that are strings")
        try:
            content.encode()
        except UnicodeEncodeError:
            raise InvalidDocumentError(
                f"message {number} contains half of a surrogate pair, which is not a character"
            ) from None
    return messages


def _nemotron_h_aligned(messages: Sequence[Message]) -> list[Segment]:
    texts = {
        "system": "<SPECIAL_10>System\n{}\n",
        "user": "<SPECIAL_11>User\n{}\n<SPECIAL_11>Assistant\n",
        "assistant": "{}\n",
    }
    return [
        Segment(_by_role(texts, message).replace("{}", message["content"].strip()), _is_answer(message))
        for message in messages
    ]


def _nemotron_nano_v2(messages: Sequence[Message]) -> list[Segment]:
    texts = {
        "system": "<SPECIAL_10>System\n{}\n",
        "user": "<SPECIAL_11>User\n{}\n",
        "assistant": "{}\n<SPECIAL_12>\n",
    }
    segments = []
    for message in messages:
        text, content = _by_role(texts, message), message["content"]
        if _is_answer(message):
            segments.append(Segment("<SPECIAL_11>Assistant\n", has_loss=False))
        else:
            content = content.replace("/think", "").replace("/no_think", "")
        segments.append(Segment(text.replace("{}", content.strip()), _is_answer(message)))
    return segments


def _identity(messages: Sequence[Message]) -> list[Segment]:
    return [Segment(message["content"], _is_answer(message)) for message in messages]


_BUILT_IN: Final[Mapping[str, Callable[[Sequence[Message]], list[Segment]]]] = {
    "nemotron-h-aligned": _nemotron_h_aligned,
    "nemotron-nano-v2": _nemotron_nano_v2,
    "identity": _identity,
}


def _is_answer(message: Message) -> bool:
    return bool(message["role"] == "assistant")


def _by_role(texts: Mapping[str, str], message: Message) -> str:
    if message["role"] not in texts:
        raise InvalidDocumentError(
            f"the prompt format has no role {message['role']!r}, only {', '.join(texts)}",
            fix="correct the line, or use --sft-tokenizer-prompt-format default, the tokenizer's chat template",
        )
    return texts[message["role"]]


def _template(settings: ConversationSettings) -> Callable[[Sequence[Message]], list[Segment]]:
    """Return the function that renders a chat template and finds the text of the assistant.

    The text of an answer is what the conversation up to it has, and the prompt for it has not.
    """
    template = _compiled(settings.chat_template)
    errors = _jinja().TemplateError

    def render(messages: Sequence[Message], *, is_prompt: bool) -> str:
        try:
            return str(
                template.render(
                    messages=list(messages), add_generation_prompt=is_prompt, **dict(settings.special_tokens)
                )
            )
        except (errors, TypeError, ValueError, KeyError, AttributeError) as error:
            raise InvalidDocumentError(f"rejected by the chat template: {error}") from None

    def segments(messages: Sequence[Message]) -> list[Segment]:
        found: list[Segment] = []
        text = ""
        for number, message in enumerate(messages):
            if _is_answer(message):
                for end, is_prompt in ((number, True), (number + 1, False)):
                    longer = render(messages[:end], is_prompt=is_prompt)
                    if not longer.startswith(text):
                        raise InvalidDocumentError(
                            f"the chat template changes the text before message {number + 1} when it is added",
                            fix="give --chat-template FILE with a template that keeps it, or correct the line",
                        )
                    found.append(Segment(longer[len(text) :], not is_prompt))
                    text = longer
        whole = render(messages, is_prompt=False)
        return [*found, Segment(whole[len(text) :], has_loss=False)]

    return segments


def _jinja() -> Any:
    return optional_package("jinja2", needed_for="--sft-tokenizer-prompt-format default (a chat template)")


def _compiled(source: str) -> Any:
    """Compile a template in a sandbox: it comes with the tokenizer, and may not run code."""
    _jinja()
    sandbox = optional_package("jinja2.sandbox", needed_for="a chat template")

    def raise_exception(message: str) -> NoReturn:
        raise _jinja().TemplateError(message)

    environment = sandbox.ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True)
    environment.globals["raise_exception"] = raise_exception
    return environment.from_string(source)
