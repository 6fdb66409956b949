"""Requests of OpenAI's chat API for a model of text.

messages, tools ─> chat template of the training ─> tokens; an answer ends where the template ends it
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Final

from megatrain.config.errors import ConfigError
from megatrain.data.preprocess.documents import InvalidDocumentError
from megatrain.inference.conversations import Conversations
from megatrain.inference.stored_model import LoadedModel
from megatrain.storage.untrusted_json import Check, integer, optional
from megatrain.tools.generation.completion_request import (
    COMMON,
    CompletionRequest,
    RequestError,
    check_length,
    check_model,
    read_fields,
    read_sampling,
    with_seeds,
)

_FIELDS: Final[Mapping[str, Check]] = {
    **COMMON,
    "messages": lambda value, name: None,  # noqa: ARG005 (the template's reader checks them)
    "tools": lambda value, name: None,  # noqa: ARG005 (as above)
    "max_completion_tokens": optional(integer(0, 1 << 30)),
}


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
        fields: dict[str, Any] = read_fields(body, _FIELDS)
        check_model(fields, model)
        try:
            ids = self.conversations.encode(fields)
        except InvalidDocumentError as error:
            raise RequestError(str(error), param="messages") from error
        given = fields.get("max_completion_tokens") or fields.get("max_tokens")
        fields["max_tokens"] = given or max(1, max_tokens + 1 - len(ids))
        stop = fields.get("stop") or []
        fields["stop"] = [*([stop] if isinstance(stop, str) else stop), *self.conversations.stop]
        sampling = read_sampling(fields)
        check_length(ids, sampling, max_tokens, "messages")
        count = fields.get("n") or 1
        return CompletionRequest(
            prompts=(tuple(ids),), samplings=with_seeds(sampling, count), choices_per_prompt=count,
            streams=bool(fields.get("stream")), is_chat=True,
        )  # fmt: skip


def text_chat(loaded: LoadedModel, note: Callable[[str], None]) -> TextChat:
    """Return the reader of conversations with a model; a note says why it refuses all, if it does."""
    try:
        return TextChat(Conversations(loaded))
    except ConfigError as error:
        note(f"no conversations: {error.problems[0].text}")
        return TextChat(None, error.problems[0].text)
