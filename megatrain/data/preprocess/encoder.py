"""The work of a preprocessing worker: a chunk of documents in, token ids by key out.

    documents -> parse -> sentences -> tokenize -> drop empty ones -> append the end-of-document id to each document

The result depends on the chunk alone, so the output is the same for any number of workers.
"""

from __future__ import annotations

import itertools
import json
import os
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from megatrain.config.schema.tokenizer import TokenizerConfig
from megatrain.data.indexed.reader import Elements
from megatrain.data.indexed.writer import token_dtype
from megatrain.data.preprocess.conversations import Conversation, ConversationSettings, make_formatter
from megatrain.data.preprocess.documents import (
    BadLine,
    Chunk,
    InvalidDocumentError,
    Position,
    Row,
    parse_line,
    texts_of,
    without_null,
)
from megatrain.data.preprocess.sentences import SplitSettings, load_splitter
from megatrain.data.tokenizers.build import Tokenizer, load_tokenizer

Document = list[list[str]]
"""The sentences of each key."""
MASK_DTYPE: Final = np.dtype(np.uint8)


@dataclass(frozen=True)
class EncodedKey:
    """The documents of a chunk under one key: the arguments of `IndexedWriter.add_documents`."""

    elements: Elements
    lengths: npt.NDArray[np.int32]
    sequences_per_document: npt.NDArray[np.int64]
    largest_id: int
    """Largest token id; -1 if there are no tokens."""
    eod_count: int


@dataclass(frozen=True)
class EncodedChunk:
    """The result of a chunk."""

    keys: list[EncodedKey]
    """Results in the order of the requested keys."""
    bad_lines: list[BadLine]
    """Skipped lines, in order."""
    num_documents: int
    end: Position
    """Position in the input after the chunk."""


@dataclass(frozen=True, kw_only=True)
class EncoderSettings:
    """The settings of a worker, which can be pickled."""

    tokenizer: TokenizerConfig
    json_keys: tuple[str, ...]
    append_eod: bool
    split: SplitSettings | None = None
    """None: a string is one sentence."""
    conversations: ConversationSettings | None = None
    """None: documents are texts."""
    keep_bad_lines: bool = False
    """Also return the content of bad lines."""


class ChunkEncoder:
    """Encodes chunks with one tokenizer."""

    def __init__(
        self,
        settings: EncoderSettings,
        tokenizer: Tokenizer,
        splitter: Callable[[str], list[str]] | None = None,
    ) -> None:
        self._settings = settings
        self._tokenizer = tokenizer
        self._splitter = splitter
        self._dtype = token_dtype(tokenizer.vocab_size)

    def __call__(self, chunk: Chunk) -> EncodedChunk:
        """Return the token ids of the valid documents, and the reasons of the bad lines."""
        contents = chunk.split()
        documents: dict[int, Any] = {}
        invalid: dict[int, InvalidDocumentError] = {}
        for index, content in enumerate(contents):
            try:
                documents[index] = self._sentences(content, chunk)
            except InvalidDocumentError as error:
                invalid[index] = error
        try:
            keys = self._encode(list(documents.values()))
        except Exception:  # noqa: BLE001 - each tokenizer raises its own; encode documents one by one to find it
            rejected = self._rejected(documents)
            invalid |= rejected
            documents = {index: document for index, document in documents.items() if index not in rejected}
            keys = self._encode(list(documents.values()))
        bad = [self._bad_line(chunk, index, contents[index], invalid[index]) for index in sorted(invalid)]
        if chunk.too_long:
            bad.append(chunk.too_long)
        return EncodedChunk(keys, bad, len(documents), chunk.end)

    def _sentences(self, content: bytes | Row, chunk: Chunk) -> Any:
        document = texts_of(content, chunk, self._settings.json_keys)
        if self._splitter is None:
            return document
        return [list(itertools.chain.from_iterable(map(self._splitter, texts))) for texts in document]

    def _encode(self, documents: list[Any]) -> list[EncodedKey]:
        return [
            self._encode_key([document[key] for document in documents])
            for key in range(len(self._settings.json_keys))
        ]

    def _encode_key(self, documents: list[list[str]]) -> EncodedKey:
        encoded = iter(self._tokenizer.encode_batch(list(itertools.chain.from_iterable(documents))))
        eod = self._tokenizer.eod
        sequences: list[list[int]] = []
        counts = np.zeros(len(documents), np.int64)
        for number, sentences in enumerate(documents):
            kept = [ids for ids in itertools.islice(encoded, len(sentences)) if ids]
            if kept and self._settings.append_eod:
                assert eod is not None, "checked before the workers start"
                kept[-1].append(eod)
            sequences += kept
            counts[number] = len(kept)
        return _encoded(sequences, counts, self._dtype, eod)

    def _rejected(self, documents: dict[int, Any]) -> dict[int, InvalidDocumentError]:
        """Return an error for each document that the tokenizer rejects."""
        rejected = {}
        for index, document in documents.items():
            try:
                self._encode([document])
            except Exception as error:  # noqa: BLE001 - each tokenizer raises its own
                rejected[index] = InvalidDocumentError(f"rejected by the tokenizer: {error}")
        return rejected

    def _bad_line(
        self, chunk: Chunk, index: int, content: bytes | Row, error: InvalidDocumentError
    ) -> BadLine:
        bad = BadLine(chunk.file, chunk.first + index, str(error), chunk.unit, fix=error.fix)
        if not self._settings.keep_bad_lines:
            return bad
        raw = content if isinstance(content, bytes) else json.dumps(content, default=str).encode()
        return replace(bad, content=raw, num_bytes=len(raw))


class ConversationEncoder(ChunkEncoder):
    """Encodes conversations, each as one sequence, to ids and a loss mask: 1 for tokens of the assistant.

    A line is a document of one conversation or several.
    """

    def __init__(self, settings: EncoderSettings, tokenizer: Tokenizer) -> None:
        super().__init__(settings, tokenizer)
        assert settings.conversations is not None
        self._conversations = make_formatter(settings.conversations)
        self._has_template = settings.conversations.template is not None

    def _sentences(self, content: bytes | Row, chunk: Chunk) -> list[Conversation]:
        assert not chunk.is_text, "checked before the workers start"
        return self._conversations(
            parse_line(content) if isinstance(content, bytes) else without_null(content)
        )

    def _encode(self, documents: list[list[Conversation]]) -> list[EncodedKey]:
        conversations = list(itertools.chain.from_iterable(documents))
        texts = [segment.text for conversation in conversations for segment in conversation.segments]
        encoded = iter(self._tokenizer.encode_batch(texts))
        eod = self._tokenizer.eod
        assert eod is not None, "checked before the workers start"
        ids: list[list[int]] = []
        masks: list[list[int]] = []
        for conversation in conversations:
            tokens: list[int] = []
            mask: list[int] = []
            for segment in conversation.segments:
                part = next(encoded)
                num_prompt = min(segment.num_prompt_tokens, len(part)) if segment.has_loss else len(part)
                tokens += part
                mask += [0] * num_prompt + [1] * (len(part) - num_prompt)
            if not self._has_end(tokens, eod):
                tokens.append(eod)
                mask.append(int(conversation.ends_with_answer))
            ids.append(tokens)
            masks.append(mask)
        counts = np.fromiter(map(len, documents), np.int64, len(documents))
        return [
            _encoded(ids, counts, self._dtype, eod),
            _encoded(masks, counts, MASK_DTYPE, None),
        ]

    def _has_end(self, tokens: list[int], eod: int) -> bool:
        """Return whether a conversation ends with its end token, after which a chat template may write white space."""
        tail = tokens[-_END_TOKENS:] if self._has_template else tokens[-1:]
        if eod not in tail:
            return False
        return not self._tokenizer.decode(tail[len(tail) - tail[::-1].index(eod) :]).strip()


def _encoded(
    sequences: list[list[int]], counts: npt.NDArray[np.int64], dtype: np.dtype[Any], eod: int | None
) -> EncodedKey:
    lengths = np.fromiter(map(len, sequences), np.int32, len(sequences))
    total = int(lengths.sum(dtype=np.int64))
    elements = np.fromiter(itertools.chain.from_iterable(sequences), dtype, total)
    eod_count = 0 if eod is None else int(np.count_nonzero(elements == eod))
    return EncodedKey(elements, lengths, counts, int(elements.max()) if total else -1, eod_count)


_END_TOKENS: Final = 8
"""Tokens at the end of a conversation among which its end token is looked for."""


def make_encoder(settings: EncoderSettings) -> ChunkEncoder:
    """Create the encoder of a worker process."""
    # Otherwise the library starts a thread per core in every worker; only this variable prevents it.
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    if settings.conversations is not None:
        return ConversationEncoder(settings, load_tokenizer(settings.tokenizer))
    splitter = load_splitter(settings.split) if settings.split else None
    return ChunkEncoder(settings, load_tokenizer(settings.tokenizer), splitter)
