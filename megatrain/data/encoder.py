"""What a preprocessing worker does: a chunk of lines in, token ids by key out.

    lines -> parse -> sentences -> tokenize -> drop empty ones -> end-of-document id behind the last of a document

The answer depends on the chunk alone, so that the output is the same for any number of workers.
"""

from __future__ import annotations

import itertools
import os
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from megatrain.data.indexed_writer import token_dtype
from megatrain.data.lines import BadLine, Line, parse
from megatrain.data.tokenizer import Tokenizer, load_tokenizer

if TYPE_CHECKING:
    from collections.abc import Sequence

    from megatrain.config.tokenizer import TokenizerConfig
    from megatrain.data.indexed import Elements

Document = list[list[str]]
"""The sentences of each key."""


@dataclass(frozen=True)
class EncodedKey:
    """The documents of a chunk under one key, as `IndexedWriter.add_documents` takes them."""

    elements: Elements
    lengths: npt.NDArray[np.int32]
    sequences_per_document: npt.NDArray[np.int64]


@dataclass(frozen=True)
class EncodedChunk:
    """A chunk's result."""

    keys: list[EncodedKey]
    """In the order of the requested keys."""
    bad_lines: list[BadLine]
    """Lines left out, in order."""
    num_documents: int
    input_bytes: int


@dataclass(frozen=True, kw_only=True)
class EncoderSettings:
    """What a worker needs to know, in a form that reaches another process."""

    tokenizer: TokenizerConfig
    json_keys: tuple[str, ...]
    append_eod: bool


class ChunkEncoder:
    """Encodes chunks with one tokenizer."""

    def __init__(self, tokenizer: Tokenizer, json_keys: Sequence[str], *, append_eod: bool) -> None:
        self._tokenizer = tokenizer
        self._keys = tuple(json_keys)
        self._append_eod = append_eod
        self._dtype = token_dtype(tokenizer.vocab_size)

    def __call__(self, chunk: list[Line]) -> EncodedChunk:
        """Token ids of the good lines, and what is wrong with the others."""
        lines, documents, bad = [], [], []
        for line in chunk:
            parsed = parse(line, self._keys)
            if isinstance(parsed, BadLine):
                bad.append(parsed)
            else:
                lines.append(line)
                documents.append(parsed)
        try:
            keys = self._encode(documents)
        except Exception:  # noqa: BLE001 - each tokenizer raises its own; the line at fault is looked for
            documents, refused = self._sift(lines, documents)
            keys = self._encode(documents)
            bad = sorted(bad + refused, key=lambda line: chunk_place(chunk, line))
        return EncodedChunk(keys, bad, len(documents), sum(len(line.content) for line in chunk))

    def _encode(self, documents: list[Document]) -> list[EncodedKey]:
        return [self._encode_key([document[key] for document in documents]) for key in range(len(self._keys))]

    def _encode_key(self, documents: list[list[str]]) -> EncodedKey:
        encoded = iter(self._tokenizer.encode_batch(list(itertools.chain.from_iterable(documents))))
        sequences: list[list[int]] = []
        counts = np.zeros(len(documents), np.int64)
        for number, sentences in enumerate(documents):
            kept = [ids for ids in itertools.islice(encoded, len(sentences)) if ids]
            if kept and self._append_eod:
                kept[-1] = [*kept[-1], self._tokenizer.eod]
            sequences += kept
            counts[number] = len(kept)
        lengths = np.fromiter(map(len, sequences), np.int32, len(sequences))
        total = int(lengths.sum(dtype=np.int64))
        elements = np.fromiter(itertools.chain.from_iterable(sequences), self._dtype, total)
        return EncodedKey(elements, lengths, counts)

    def _sift(self, lines: list[Line], documents: list[Document]) -> tuple[list[Document], list[BadLine]]:
        """Documents that the tokenizer takes, and the lines of those that it does not."""
        good, bad = [], []
        for line, document in zip(lines, documents, strict=True):
            try:
                self._encode([document])
            except Exception as error:  # noqa: BLE001 - each tokenizer raises its own
                bad.append(BadLine(line.file, line.number, f"refused by the tokenizer: {error}"))
            else:
                good.append(document)
        return good, bad


def chunk_place(chunk: list[Line], bad: BadLine) -> int:
    """Where a bad line stands in its chunk."""
    return next(
        place for place, line in enumerate(chunk) if (line.file, line.number) == (bad.file, bad.number)
    )


def make_encoder(settings: EncoderSettings) -> ChunkEncoder:
    """The encoder of a worker process."""
    # The library would start a thread for every core in every worker; only the environment can tell it not to.
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    tokenizer = load_tokenizer(settings.tokenizer)
    return ChunkEncoder(tokenizer, settings.json_keys, append_eod=settings.append_eod)
