"""Conversations as text: a row with a list of messages to segments, each with or without loss.

    row -> messages, read -> cut at each system message -> prompt format -> [(text, has_loss), ..]  loss on the assistant's text only

Each segment is tokenized alone, as a prompt is when text is generated, so that no token spans both.
The texts of the formats are the same as with Megatron-LM's `--sft-tokenizer-prompt-format`; `default` is the tokenizer's chat template.
Messages have OpenAI's names (role, content, tool_calls) or ShareGPT's (from, value).
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, Literal, NamedTuple

from megatrain.config.errors import is_unicode
from megatrain.data.preprocess.chat_template import ChatTemplate, TemplateSettings
from megatrain.data.preprocess.documents import InvalidDocumentError, Row, is_list_of_objects, kind_of

PromptFormat = Literal["chatml", "nemotron-h-aligned", "nemotron-nano-v2", "identity", "default"]
Message = Mapping[str, Any]

MESSAGES: Final = "messages"
"""The key of messages, unless another one is named."""
SHAREGPT: Final = "conversations"
"""The key of messages where a row has no `messages`."""
_ROLES: Final = {
    "human": "user",
    "gpt": "assistant",
    "chatgpt": "assistant",
    "bing": "assistant",
    "bard": "assistant",
    "function_call": "assistant",
    "observation": "tool",
    "function_response": "tool",
}
"""ShareGPT's names of roles, and OpenAI's."""
_USE_TEMPLATE: Final = (
    "use --sft-tokenizer-prompt-format default with a tokenizer that has a chat template or with --chat-template FILE,"
    " or correct the line"
)


_ROW: Final = '{"messages": [{"role": "user", "content": "..."}, {"role": "assistant", "content": "..."}]}'


class Segment(NamedTuple):
    """A part of the text of a conversation."""

    text: str
    has_loss: bool
    num_prompt_tokens: int = 0
    """Tokens at its start that have no loss."""


@dataclass(frozen=True)
class Conversation:
    """A conversation as text."""

    segments: Sequence[Segment]
    ends_with_answer: bool
    """True if its last message is the assistant's."""


@dataclass(frozen=True, kw_only=True)
class ConversationSettings:
    """How conversations become text."""

    key: str
    """Key of the messages."""
    prompt_format: PromptFormat
    template: TemplateSettings | None = None
    """The chat template of the format `default`."""


def make_formatter(settings: ConversationSettings) -> Callable[[Row], list[Conversation]]:
    """Return the function that converts an object with messages into conversations.

    It raises InvalidDocumentError if one of them has no text of the assistant.
    """
    if settings.template is not None:
        build = _template_builder(settings.template)
    else:
        build = _built_in_builder(settings.prompt_format)

    def conversations(row: Row) -> list[Conversation]:
        parts = _cut(read_messages(row, settings.key))
        found = []
        for number, messages in enumerate(parts, start=1):
            segments = [segment for segment in build(messages, row) if segment.text]
            if not any(segment.has_loss for segment in segments):
                which = f"conversation {number} of {len(parts)}" if len(parts) > 1 else "the conversation"
                raise InvalidDocumentError(f"{which} has no text of the assistant")
            if not all(is_unicode(segment.text) for segment in segments):
                raise InvalidDocumentError(
                    "the conversation contains half of a surrogate pair, which is not a character"
                )
            found.append(Conversation(segments, messages[-1]["role"] == "assistant"))
        return found

    return conversations


def special_words(settings: ConversationSettings) -> list[str]:
    """Return the words of a prompt format that should be one token each."""
    template = settings.template
    if template is None:
        sources = built_in_template(settings.prompt_format)
    else:
        sources = "\n".join(source for _, source in template.sources)
    return list(dict.fromkeys(re.findall(r"<[|\uff5c][^|\uff5c<>{}'\"\s]+[|\uff5c]>|<SPECIAL_\d+>", sources)))


def template_source(settings: ConversationSettings) -> str:
    """Return the chat template that writes what a prompt format writes."""
    if settings.template is None:
        return built_in_template(settings.prompt_format)
    return dict(settings.template.sources)["default"]


def built_in_template(prompt_format: PromptFormat) -> str:
    """Return a built-in format as a chat template, which transformers renders to the same text."""
    found = _BUILT_IN[prompt_format]
    strip = " | trim" if found.strips else ""
    removed = "".join(f" | replace({json.dumps(word)}, '')" for word in found.removed)
    written = [
        f"m.role == '{role}' %}}{{{{ {json.dumps(before)} + (m.content{'' if role == 'assistant' else removed}{strip})"
        f" + {json.dumps(after)} }}}}"
        for role, (before, after) in found.texts.items()
    ]
    unknown = f"{{% else %}}{{{{ raise_exception('no role ' ~ m.role ~ ', only {', '.join(found.texts)}') }}}}{{% endif %}}"
    body = "{% if " + "{% elif ".join(written) + unknown if written else "{{ m.content }}"
    prompt = f"{{% if add_generation_prompt %}}{{{{ {json.dumps(found.prompt)} }}}}{{% endif %}}"
    return f"{{% for m in messages %}}{body}{{% endfor %}}" + (prompt if found.prompt else "")


def message_keys(key: str) -> tuple[str, ...]:
    """Return the keys that may have the messages of a row; the first that is there counts."""
    return (key, SHAREGPT) if key == MESSAGES else (key,)


TEMPLATE_KEYS: Final = ("tools", "documents", "chat_template_kwargs")
"""Keys of a row that a chat template reads in addition to the messages."""
ROW_KEYS: Final = (*TEMPLATE_KEYS, "system")
"""Keys of a row that are read in addition to the messages; `system` has ShareGPT's system message."""
_MESSAGE_KEYS: Final = ("tool_calls", "function_call", "reasoning_content", "reasoning", "thinking")
"""Keys of a message, in addition to role and content, that a chat template writes."""


def read_messages(row: Row, key: str) -> list[dict[str, Any]]:
    """Return the messages of a row under OpenAI's names. Raises InvalidDocumentError."""
    name, found = next(
        ((name, row[name]) for name in message_keys(key) if row.get(name) is not None), (key, None)
    )
    if found is not None and (not isinstance(found, list) or not found):
        what = "an empty list" if found == [] else kind_of(found)
        raise InvalidDocumentError(f"key {name!r} is {what}, not a list of messages")
    if found is None:
        present = ", ".join(map(repr, list(row)[:8])) or "nothing"
        others = [name for name, value in row.items() if is_list_of_objects(value)]
        raise InvalidDocumentError(
            f"key {key!r} has no list of messages; the keys are {present}",
            fix=f"name the key of the messages with --json-keys ({' or '.join(others[:8])}), or correct the line"
            if others
            else f"write rows as {_ROW}, or correct the line",
        )
    messages = [_message(number, message) for number, message in enumerate(found, start=1)]
    system = row.get("system")
    is_sharegpt = any("from" in message for message in found)
    if is_sharegpt and isinstance(system, str) and system and messages[0]["role"] != "system":
        messages.insert(0, {"role": "system", "content": system})
    return messages


def _message(number: int, given: object) -> dict[str, Any]:
    if isinstance(given, dict) and "role" not in given and "from" in given:
        others = {name: value for name, value in given.items() if name not in ("from", "value")}
        role = given["from"]
        role = _ROLES.get(role, role) if isinstance(role, str) else role
        given = {"role": role, "content": given.get("value"), **others}
    if not isinstance(given, dict) or not isinstance(given.get("role"), str):
        raise InvalidDocumentError(f"message {number} has no role that is a string")
    if "content" not in given and not any(given.get(name) for name in _MESSAGE_KEYS):
        raise InvalidDocumentError(f"message {number} has no content")
    content = given.get("content")
    is_text = isinstance(content, str | None)
    if not is_text and not (
        isinstance(content, list) and all(isinstance(part, str | dict) for part in content)
    ):
        raise InvalidDocumentError(
            f"the content of message {number} is not a string, a list of parts, or null"
        )
    return given


def _cut(messages: Sequence[dict[str, Any]]) -> list[list[dict[str, Any]]]:
    """Cut messages into conversations: each system message begins a new one, as in Megatron-LM."""
    starts = [number for number, message in enumerate(messages) if number and message["role"] == "system"]
    return [list(messages[start:end]) for start, end in zip([0, *starts], [*starts, None], strict=True)]


Builder = Callable[[Sequence[Message], Row], list[Segment]]


def _template_builder(settings: TemplateSettings) -> Builder:
    """Return the function that renders a conversation with a chat template, as transformers' `apply_chat_template` does."""
    template = ChatTemplate(settings)

    def build(messages: Sequence[Message], row: Row) -> list[Segment]:
        request = {
            "messages": messages,
            "tools": read_tools(row),
            "documents": _parsed(row, "documents"),
        }
        variables = _parsed(row, "chat_template_kwargs")
        found = template.segments(request | {"variables": variables or {}})
        return [Segment(text, has_loss) for text, has_loss in found]

    return build


def read_tools(row: Row) -> Any:
    """Return the tools of a row, a list of objects or None. Raises InvalidDocumentError."""
    return _parsed(row, "tools")


def _parsed(row: Row, key: str) -> Any:
    """Return the value of a key: tables often hold it as JSON in a string."""
    value = row.get(key)
    kind = dict if key == "chat_template_kwargs" else list
    if isinstance(value, str):
        try:
            value = json.loads(value) if value.strip() else None
        except (ValueError, RecursionError) as error:
            raise InvalidDocumentError(f"key {key!r} is a string that is not JSON: {error}") from None
    items = value if isinstance(value, list) else []
    if value is not None and (not isinstance(value, kind) or not all(isinstance(one, dict) for one in items)):
        raise InvalidDocumentError(
            f"key {key!r} is not {'an object' if kind is dict else 'a list of objects'}"
        )
    return value


def _built_in_builder(prompt_format: PromptFormat) -> Builder:
    """Return the function that writes a conversation in a built-in format."""
    found = _BUILT_IN[prompt_format]

    def build(messages: Sequence[Message], row: Row) -> list[Segment]:
        left_out = [key for key in TEMPLATE_KEYS if row.get(key)]
        left_out += [key for message in messages for key in _MESSAGE_KEYS if message.get(key)]
        if left_out:
            raise InvalidDocumentError(
                f"the prompt format {prompt_format} does not write {' and '.join(dict.fromkeys(left_out))}",
                fix=_USE_TEMPLATE,
            )
        return [one for message in messages for one in found.segments(message["role"], _text_of(message))]

    return build


def _text_of(message: Message) -> str:
    """Return the content of a message; null is empty, and parts are joined."""
    content = message.get("content")
    if content is None or isinstance(content, str):
        return content or ""
    texts = [part if isinstance(part, str) else part.get("text") for part in content]
    if not all(isinstance(text, str) for text in texts):
        kinds = {str(part.get("type")) for part in content if isinstance(part, dict)} - {"text"}
        raise InvalidDocumentError(
            f"a message has a part of type {', '.join(sorted(kinds))}, which is not text"
        )
    return "".join(texts)


@dataclass(frozen=True, kw_only=True)
class _BuiltIn:
    """A prompt format: the text before and after a message."""

    texts: Mapping[str, tuple[str, str]]
    """By role; empty: there is none, and any role."""
    prompt: str = ""
    """The text before an answer that is to be generated."""
    num_prompt_tokens: int = 0
    """Tokens of `prompt` in an answer's segment; 0: it is a segment without loss."""
    strips: bool = True
    removed: tuple[str, ...] = ()
    """Words that are left out of messages other than the assistant's."""

    def segments(self, role: str, content: str) -> list[Segment]:
        """Return the text of a message. Raises InvalidDocumentError if the format has no such role."""
        if self.texts and role not in self.texts:
            raise InvalidDocumentError(
                f"the prompt format has no role {role!r}, only {', '.join(self.texts)}", fix=_USE_TEMPLATE
            )
        before, after = self.texts.get(role, ("", ""))
        is_answer = role == "assistant"
        for word in () if is_answer else self.removed:
            content = content.replace(word, "")
        text = (content.strip() if self.strips else content) + after
        if is_answer and not self.num_prompt_tokens:
            return [Segment(before, False), Segment(text, True)]
        return [Segment(before + text, is_answer, self.num_prompt_tokens * is_answer)]


_BUILT_IN: Final[Mapping[str, _BuiltIn]] = {
    "chatml": _BuiltIn(
        texts={
            role: (f"<|im_start|>{role}\n", "<|im_end|>\n")
            for role in ("system", "user", "assistant", "tool")
        },
        prompt="<|im_start|>assistant\n",
        strips=False,
    ),
    "nemotron-h-aligned": _BuiltIn(
        texts={
            "system": ("<SPECIAL_10>System\n", "\n"),
            "user": ("<SPECIAL_11>User\n", "\n<SPECIAL_11>Assistant\n"),
            "assistant": ("", "\n"),
        }
    ),
    "nemotron-nano-v2": _BuiltIn(
        texts={
            "system": ("<SPECIAL_10>System\n", "\n"),
            "user": ("<SPECIAL_11>User\n", "\n"),
            "assistant": ("<SPECIAL_11>Assistant\n", "\n<SPECIAL_12>\n"),
        },
        prompt="<SPECIAL_11>Assistant\n",
        num_prompt_tokens=3,  # with the tokenizer of Nemotron Nano; Megatron-LM counts three with any tokenizer
        removed=("/think", "/no_think"),
    ),
    "identity": _BuiltIn(texts={}, strips=False),
}
