"""SentencePiece models, for SentencePieceTokenizer, GPTSentencePieceTokenizer and Llama2Tokenizer alike.

    tokenizer.model ──> pieces ──> ids as the library gives them, nothing added

The three names are one tokenizer in today's Megatron-LM; those of its older releases differed: SentencePieceTokenizer
had ids of its own behind the pieces (<EOD> among them), and Llama2Tokenizer put the beginning token before every text.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from pathlib import Path

from megatrain.config.errors import InputError
from megatrain.config.schema.tokenizer import TokenizerConfig
from megatrain.data.files import optional_package
from megatrain.data.tokenizers.files import (
    GET_AGAIN,
    NO_PAD,
    Kind,
    fingerprint_of,
    read_file,
)


class SentencePieceTokenizer:
    """A SentencePiece model. The text of a control piece, such as </s>, stays text; user-defined pieces are found.

    Its end token ends documents.
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
        # Pieces, scores and the rules for blanks are all in the file, which people copy and never write anew.
        self.fingerprint = fingerprint_of({"sentencepiece": hashlib.sha256(file.content).hexdigest()})

    def encode(self, text: str) -> list[int]:
        """Ids of a text."""
        return list(self._processor.encode(text))

    def encode_batch(self, texts: Sequence[str]) -> list[list[int]]:
        """Ids of many texts. One thread: preprocessing has its own processes."""
        return list(self._processor.encode(list(texts), num_threads=1))

    def decode(self, ids: Sequence[int]) -> str:
        """Text of ids, without control pieces."""
        return str(self._processor.decode(list(ids)))
