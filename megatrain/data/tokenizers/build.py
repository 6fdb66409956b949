"""Load tokenizers by Megatron-LM's type names.

    TokenizerConfig (type, files) ──> load_tokenizer ──> Tokenizer

    huggingface     HuggingFaceTokenizer, GPT2BPETokenizer, BertWordPieceLowerCase, BertWordPieceCase
    sentencepiece   SentencePieceTokenizer, GPTSentencePieceTokenizer, Llama2Tokenizer
    tiktoken        TikTokenizer
    build           NullTokenizer

Worker processes receive the TokenizerConfig; each loads its own tokenizer.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Final, Protocol

from megatrain.config.errors import ConfigError
from megatrain.config.schema.tokenizer import TokenizerConfig, tokenizer_problems
from megatrain.data.tokenizers.files import NO_PAD
from megatrain.data.tokenizers.hf_tokenizer import HfTokenizer
from megatrain.data.tokenizers.huggingface import load_bert, load_gpt2_bpe, load_huggingface
from megatrain.data.tokenizers.identity import fingerprint_of
from megatrain.data.tokenizers.sentencepiece import SentencePieceTokenizer
from megatrain.data.tokenizers.tiktoken import TikTokenizer


class Tokenizer(Protocol):
    """The interface of a tokenizer that data and training use."""

    vocab_size: int
    """Upper bound of all ids, before padding for tensor parallelism."""
    eod: int | None
    """End-of-document id; None: the tokenizer has none, see `missing_end_of_document`."""
    pad: int
    """Padding id, -1 if there is none; see `gpt_dataset.effective_pad` for its role in data."""
    special_ids: frozenset[int]
    """Ids of special tokens other than padding."""
    note: str | None
    """Message for the user if a special token was guessed because no file names it; else None."""

    @property
    def fingerprint(self) -> str:
        """Digests of what the tokenizer does and of its definition; see `identity` and `is_same_tokenizer`."""

    def encode(self, text: str) -> list[int]:
        """Tokenize a text. Tokens are added at its ends only if the configuration asks for them."""

    def encode_batch(self, texts: Sequence[str]) -> list[list[int]]:
        """Tokenize many texts, faster than one by one."""

    def decode(self, ids: Sequence[int]) -> str:
        """Convert ids to text."""

    def to_hf(self) -> HfTokenizer | None:
        """Return the tokenizer in the form of transformers; None: it has no text. Raises InputError if that form lacks it."""


def load_tokenizer(config: TokenizerConfig) -> Tokenizer:
    """Load the tokenizer of a configuration. Nothing is downloaded.

    Raises:
        ConfigError: the type is unknown, or its files are missing or invalid.
    """
    problems = tuple(tokenizer_problems(config))
    if problems:
        raise ConfigError.of(problems)
    tokenizer = _LOADERS[str(config.tokenizer_type)](config)
    if config.vocab_size is not None and config.vocab_size < tokenizer.vocab_size:
        raise ConfigError(
            f"--vocab-size {config.vocab_size} is less than the size of the tokenizer, {tokenizer.vocab_size}",
            fix="leave --vocab-size out",
        )
    return tokenizer


class NullTokenizer:
    """A tokenizer of numbers: `encode("5 3")` is [5, 3]. The last id ends documents, unless another one is configured."""

    def __init__(self, config: TokenizerConfig) -> None:
        vocab_size = config.vocab_size
        if vocab_size is None or vocab_size < 1:
            raise ConfigError(
                f"--vocab-size {vocab_size} is too small", fix="give a --vocab-size of 1 or more"
            )
        last, eod, pad = vocab_size - 1, config.null_tokenizer_eod_id, config.null_tokenizer_pad_id
        self.vocab_size = vocab_size
        self.eod: int | None = last if eod is None else eod
        self.pad = pad
        self.special_ids = frozenset({self.eod})
        self.note: str | None = None
        other_ids = ({} if self.eod == last else {"eod": self.eod}) | ({} if pad == NO_PAD else {"pad": pad})
        self.fingerprint = fingerprint_of({"type": "NullTokenizer", "vocab_size": vocab_size, **other_ids})

    def encode(self, text: str) -> list[int]:
        """Parse the numbers of a text. Raises ValueError if a word is not an id."""
        try:
            ids = [int(word) for word in text.split()]
        except ValueError as error:
            raise ValueError(f"NullTokenizer reads numbers, such as '5 3', as token ids: {error}") from error
        wrong = next((number for number in ids if not 0 <= number < self.vocab_size), None)
        if wrong is not None:
            raise ValueError(f"id {wrong} is outside the vocabulary of {self.vocab_size}")
        return ids

    def encode_batch(self, texts: Sequence[str]) -> list[list[int]]:
        """Parse the numbers of many texts."""
        return [self.encode(text) for text in texts]

    def decode(self, ids: Sequence[int]) -> str:
        """Join the numbers with spaces."""
        return " ".join(map(str, ids))

    def to_hf(self) -> None:
        """Return None: it has no text."""


_LOADERS: Final[Mapping[str, Callable[[TokenizerConfig], Tokenizer]]] = {
    "HuggingFaceTokenizer": load_huggingface,
    "GPT2BPETokenizer": load_gpt2_bpe,
    "BertWordPieceLowerCase": load_bert,
    "BertWordPieceCase": load_bert,
    "SentencePieceTokenizer": SentencePieceTokenizer,
    "GPTSentencePieceTokenizer": SentencePieceTokenizer,
    "Llama2Tokenizer": SentencePieceTokenizer,
    "TikTokenizer": TikTokenizer,
    "NullTokenizer": NullTokenizer,
}
