"""Conversations as prompts: the chat template of the training writes them, and shows where an answer ends.

row with messages ─> template, with the prompt for an answer ─> segments, each tokenized alone as in training ─> ids
a conversation with a probe as its answer ─> the text after it: a stop word
"""

from __future__ import annotations

import dataclasses
import threading
from typing import Any, Final

from megatrain.config.errors import ConfigError, InputError
from megatrain.data.preprocess.chat_template import ChatTemplate, stored_template
from megatrain.data.preprocess.conversations import MESSAGES, read_messages, read_tools
from megatrain.data.preprocess.documents import InvalidDocumentError, Row
from megatrain.data.tokenizers.build import load_tokenizer
from megatrain.inference.stored_model import LoadedModel

_PROBE: Final = "answer"


class Conversations:
    """Writes conversations as a model's training did, or as transformers does with the template of its tokenizer.

    Raises:
        ConfigError: the model has no chat template, or it is not valid.
    """

    def __init__(self, loaded: LoadedModel) -> None:
        config, source = loaded.tokenizer_config, loaded.chat_template
        settings = stored_template(config, source)
        if settings is None:
            raise ConfigError(
                "the model has no chat template: it was not trained with --sft, and its tokenizer has none",
                fix="put chat_template.jinja next to the tokenizer, or train with --sft on data of preprocess_data.py --sft",
            )
        self._is_trained, self._tokenizer = source is not None, loaded.tokenizer
        if source is None and config.tokenizer_type == "HuggingFaceTokenizer":  # the template writes them
            config = dataclasses.replace(config, tokenizer_hf_no_include_special_tokens=True)
            self._tokenizer = load_tokenizer(config)
        self._template, self._lock = ChatTemplate(settings), threading.Lock()
        self.stop = self._end_of_answer()
        """Texts that end an answer, in addition to the end-of-document token."""

    def encode(self, row: Row) -> list[int]:
        """Return the tokens of the row's `messages`, with its `tools`, and of the prompt for an answer.

        Raises:
            InvalidDocumentError: the template does not write such messages.
        """
        texts = self._texts(messages=read_messages(row, MESSAGES), tools=read_tools(row), is_prompt=True)
        texts = texts if self._is_trained else ["".join(texts)]
        try:
            "".join(texts).encode()  # raises ValueError for half of a surrogate pair
            return [token for text in texts for token in self._tokenizer.encode(text)]
        except ValueError as error:
            raise InvalidDocumentError(str(error)) from error

    def _texts(self, **request: Any) -> list[str]:
        try:
            with self._lock:  # requests of a server come from several threads
                return [text for text, _ in self._template.segments(request)]
        except InvalidDocumentError as error:  # whose fix is of preprocess_data.py
            raise InvalidDocumentError(
                str(error), fix="give messages that the model's chat template accepts"
            ) from error

    def _end_of_answer(self) -> tuple[str, ...]:
        messages = [{"role": "user", "content": "question"}, {"role": "assistant", "content": _PROBE}]
        try:
            text = "".join(self._texts(messages=messages))
        except InvalidDocumentError as error:
            raise InputError(
                f"the model's chat template fails: {error}",
                fix="correct the chat template of the checkpoint's data, or of its tokenizer",
            ) from error
        end = text.rpartition(_PROBE)[2].strip()
        return (end,) if end else ()
