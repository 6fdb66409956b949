"""SentencePiece models: SentencePieceTokenizer, GPTSentencePieceTokenizer and Llama2Tokenizer.

    tokenizer.model ──> pieces ──> ids of the library, nothing added

The three types are identical in today's Megatron-LM. In older releases SentencePieceTokenizer added ids after those of
the pieces (such as <EOD>), and Llama2Tokenizer put the beginning-of-sequence token before every text.
"""

from __future__ import annotations

import functools
import hashlib
from collections.abc import Sequence
from pathlib import Path

from megatrain.config.errors import InputError
from megatrain.config.schema.tokenizer import TokenizerConfig
from megatrain.data.files import optional_package
from megatrain.data.tokenizers.files import GET_AGAIN, NO_PAD, Kind, read_file
from megatrain.data.tokenizers.hf_tokenizer import HfTokenizer
from megatrain.data.tokenizers.identity import fingerprint_of, full_fingerprint
from megatrain.data.tokenizers.sentencepiece_model import library_tokenizer


class SentencePieceTokenizer:
    """A SentencePiece model; its end-of-sequence token ends documents.

    The text of a control piece, such as </s>, is encoded as text; user-defined pieces are recognized in text.
    """

    def __init__(self, config: TokenizerConfig) -> None:
        file = read_file(Path(config.tokenizer_model or ""), Kind.SENTENCEPIECE, flag="--tokenizer-model")
        library = optional_package("sentencepiece", needed_for=f"--tokenizer-type {config.tokenizer_type}")
        try:
            self._processor = library.SentencePieceProcessor(model_proto=file.content)
        except Exception as error:
            raise InputError(
                f"{file.path}: is a damaged SentencePiece model: {error}", fix=GET_AGAIN
            ) from error
        self.vocab_size = int(self._processor.get_piece_size())
        eos, pad = int(self._processor.eos_id()), int(self._processor.pad_id())
        roles = {eos, int(self._processor.bos_id()), int(self._processor.unk_id())}
        self.eod = eos if eos >= 0 else None
        self.pad = pad if pad >= 0 else NO_PAD
        self.special_ids = frozenset(number for number in roles if number >= 0)
        self.note: str | None = None
        self._content = file.content

    @functools.cached_property
    def fingerprint(self) -> str:
        """Return the digests of ids and of the file, which contains everything that determines them."""
        digest = fingerprint_of({"sentencepiece": hashlib.sha256(self._content).hexdigest()})
        pieces = {str(self._processor.id_to_piece(number)): number for number in range(self.vocab_size)}
        return full_fingerprint(pieces, self.encode, digest)

    def encode(self, text: str) -> list[int]:
        """Tokenize a text."""
        return list(self._processor.encode(text))

    def encode_batch(self, texts: Sequence[str]) -> list[list[int]]:
        """Tokenize many texts. One thread: preprocessing has its own processes."""
        return list(self._processor.encode(list(texts), num_threads=1))

    def decode(self, ids: Sequence[int]) -> str:
        """Convert ids to text, without control pieces."""
        return str(self._processor.decode(list(ids)))

    def to_hf(self) -> HfTokenizer:
        """Return the model as a tokenizer.json: the text of a control piece is not matched."""
        ids = {
            "unk_token": self._processor.unk_id(),
            "bos_token": self._processor.bos_id(),
            "eos_token": self._processor.eos_id(),
            "pad_token": self._processor.pad_id(),
        }
        roles = {
            role: str(self._processor.id_to_piece(number)) for role, number in ids.items() if number >= 0
        }
        library = library_tokenizer(self._content, special=list(roles.values()))
        return HfTokenizer(library.to_str(pretty=True).encode(), roles, matches_special=False)
