"""Requests of OpenAI's chat API for a model of text.

messages, tools ─> chat template of the training ─> tokens; an answer ends where the template ends it
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Final

from megatrain.config.errors import ConfigError
from megatrain.data.preprocess.documents import InvalidDocumentError
from megatrain.inference.conversations import Conversations
from megatrain.inference.stored_model import LoadedModel
from megatrain.tools.generation.completion_request import (
    OF_CHAT,
    CompletionRequest,
    RequestError,
    chat_request,
    read_fields,
)

_FIELDS: Final = {**OF_CHAT, "tools": OF_CHAT["messages"]}


@dataclass(frozen=True)
class TextChat:
    """Reader of conversations.

    Attributes:
        conversations: None: the model has no chat template.
        problem: the reason.
    """

    conversations: Conversations | None
    problem: str = ""

    def read(self, body: bytes, *, model: str, max_tokens: int) -> CompletionRequest:
        """Check a request; without a limit of tokens the answer may fill the context.

        Raises:
            RequestError: with the field that is wrong.
        """
        if self.conversations is None:
            raise RequestError(f"{self.problem}: use /v1/completions", code="unsupported_model", status=404)
        fields: dict[str, Any] = read_fields(body, _FIELDS, model)
        try:
            ids = self.conversations.encode(fields)
        except InvalidDocumentError as error:
            raise RequestError(str(error), param="messages") from error
        given = fields.get("max_completion_tokens") or fields.get("max_tokens")
        fields["max_tokens"] = given or max(1, max_tokens + 1 - len(ids))
        stop = fields.get("stop") or []
        fields["stop"] = [*([stop] if isinstance(stop, str) else stop), *self.conversations.stop]
        return chat_request(fields, ids, max_tokens=max_tokens)


def text_chat(loaded: LoadedModel, note: Callable[[str], None]) -> TextChat:
    """Return the reader of conversations with a model; a note says why it refuses all, if it does."""
    try:
        return TextChat(Conversations(loaded))
    except ConfigError as error:
        note(f"no conversations: {error.problems[0].text}")
        return TextChat(None, error.problems[0].text)
