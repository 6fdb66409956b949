"""What a preprocessing worker does: a chunk of documents in, token ids by key out.

    documents -> parse -> sentences -> tokenize -> drop empty ones -> end-of-document id behind the last of a document

The answer depends on the chunk alone, so that the output is the same for any number of workers.
"""

from __future__ import annotations

import itertools
import json
import os
from collections.abc import Callable
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt

from megatrain.config.schema.tokenizer import TokenizerConfig
from megatrain.data.indexed.reader import Elements
from megatrain.data.indexed.writer import token_dtype
from megatrain.data.preprocess.lines import (
    BadLine,
    Chunk,
    Position,
    Row,
    UnusableError,
    parse_line,
    sentences_of,
)
from megatrain.data.preprocess.sentences import SplitSettings, load_splitter
from megatrain.data.tokenizers.build import Tokenizer, load_tokenizer

Document = list[list[str]]
"""The sentences of each key."""


@dataclass(frozen=True)
class EncodedKey:
    """The documents of a chunk under one key, as `IndexedWriter.add_documents` takes them."""

    elements: Elements
    lengths: npt.NDArray[np.int32]
    sequences_per_document: npt.NDArray[np.int64]
    largest_id: int
    """-1 if there is none."""
    eod_count: int


@dataclass(frozen=True)
class EncodedChunk:
    """A chunk's result."""

    keys: list[EncodedKey]
    """In the order of the requested keys."""
    bad_lines: list[BadLine]
    """Lines left out, in order."""
    num_documents: int
    end: Position
    """Where the chunk ends in the input."""


@dataclass(frozen=True, kw_only=True)
class EncoderSettings:
    """What a worker needs to know, in a form that reaches another process."""

    tokenizer: TokenizerConfig
    json_keys: tuple[str, ...]
    append_eod: bool
    split: SplitSettings | None = None
    """None: a string is one sentence."""
    keep_bad_lines: bool = False
    """Hand back the content of bad lines, too."""


class ChunkEncoder:
    """Encodes chunks with one tokenizer."""

    def __init__(
        self, settings: EncoderSettings, tokenizer: Tokenizer, splitter: Callable[[str], list[str]] | None
    ) -> None:
        self._settings = settings
        self._tokenizer = tokenizer
        self._splitter = splitter
        self._dtype = token_dtype(tokenizer.vocab_size)

    def __call__(self, chunk: Chunk) -> EncodedChunk:
        """Token ids of the good documents, and what is wrong with the others."""
        contents = chunk.split()
        documents: dict[int, Document] = {}
        reasons: dict[int, str] = {}
        for place, content in enumerate(contents):
            try:
                documents[place] = self._sentences(content)
            except UnusableError as error:
                reasons[place] = str(error)
        try:
            keys = self._encode(list(documents.values()))
        except Exception:  # noqa: BLE001 - each tokenizer raises its own; the document at fault is looked for
            refused = self._refused(documents)
            reasons |= refused
            documents = {place: document for place, document in documents.items() if place not in refused}
            keys = self._encode(list(documents.values()))
        bad = [self._bad_line(chunk, place, contents[place], reasons[place]) for place in sorted(reasons)]
        if chunk.too_long:
            bad.append(chunk.too_long)
        return EncodedChunk(keys, bad, len(documents), chunk.end)

    def _sentences(self, content: bytes | Row) -> Document:
        row = parse_line(content) if isinstance(content, bytes) else content
        document = sentences_of(row, self._settings.json_keys)
        if self._splitter is None:
            return document
        return [list(itertools.chain.from_iterable(map(self._splitter, texts))) for texts in document]

    def _encode(self, documents: list[Document]) -> list[EncodedKey]:
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
                assert eod is not None, "refused before the workers start"
                kept[-1].append(eod)
            sequences += kept
            counts[number] = len(kept)
        lengths = np.fromiter(map(len, sequences), np.int32, len(sequences))
        total = int(lengths.sum(dtype=np.int64))
        elements = np.fromiter(itertools.chain.from_iterable(sequences), self._dtype, total)
        largest = int(elements.max()) if total else -1
        return EncodedKey(elements, lengths, counts, largest, int(np.count_nonzero(elements == eod)))

    def _refused(self, documents: dict[int, Document]) -> dict[int, str]:
        """The documents that the tokenizer does not take, and why."""
        reasons = {}
        for place, document in documents.items():
            try:
                self._encode([document])
            except Exception as error:  # noqa: BLE001 - each tokenizer raises its own
                reasons[place] = f"refused by the tokenizer: {error}"
        return reasons

    def _bad_line(self, chunk: Chunk, place: int, content: bytes | Row, reason: str) -> BadLine:
        bad = BadLine(chunk.file, chunk.first + place, reason, chunk.is_rows)
        if not self._settings.keep_bad_lines:
            return bad
        raw = content if isinstance(content, bytes) else json.dumps(content).encode()
        return replace(bad, content=raw, num_bytes=len(raw))


def make_encoder(settings: EncoderSettings) -> ChunkEncoder:
    """The encoder of a worker process."""
    # The library would start a thread for every core in every worker; only the environment can tell it not to.
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    splitter = load_splitter(settings.split) if settings.split else None
    return ChunkEncoder(settings, load_tokenizer(settings.tokenizer), splitter)
