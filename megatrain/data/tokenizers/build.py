"""Text to token ids and back, by Megatron-LM's names of tokenizer types.

    TokenizerConfig (type, files) ──> load_tokenizer ──> Tokenizer

    tokenizers_huggingface     HuggingFaceTokenizer, GPT2BPETokenizer, BertWordPieceLowerCase, BertWordPieceCase
    tokenizers_sentencepiece   SentencePieceTokenizer, GPTSentencePieceTokenizer, Llama2Tokenizer
    tokenizers_tiktoken        TikTokenizer
    here                       NullTokenizer

Only the TokenizerConfig travels to other processes; each loads its own tokenizer.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Final, Protocol

from megatrain.config.errors import ConfigError
from megatrain.config.schema.tokenizer import TokenizerConfig, tokenizer_problems
from megatrain.data.tokenizers.files import NO_PAD, fingerprint_of
from megatrain.data.tokenizers.huggingface import load_bert, load_gpt2_bpe, load_huggingface
from megatrain.data.tokenizers.sentencepiece import SentencePieceTokenizer
from megatrain.data.tokenizers.tiktoken import TikTokenizer


class Tokenizer(Protocol):
    """What data and training need to know about a tokenizer."""

    vocab_size: int
    """All ids are below it; before padding for tensor parallelism."""
    eod: int | None
    """The id that ends a document; None: the tokenizer names none, see `missing_end_of_document`."""
    pad: int
    """The padding id, -1 if there is none. It counts as padding in data by the rule of `gpt.effective_pad`."""
    special_ids: frozenset[int]
    """Ids with a role other than padding."""
    note: str | None
    """A line for users where a token was guessed that no file names; None: nothing was guessed."""
    fingerprint: str
    """Equal for tokenizers that give equal ids, whatever their file's layout."""

    def encode(self, text: str) -> list[int]:
        """Ids of a text, with no token added at either end unless the configuration asks for it."""

    def encode_batch(self, texts: Sequence[str]) -> list[list[int]]:
        """Ids of many texts, faster than one by one."""

    def decode(self, ids: Sequence[int]) -> str:
        """Text of ids."""


def load_tokenizer(config: TokenizerConfig) -> Tokenizer:
    """Make the tokenizer that a configuration describes. Nothing is downloaded.

    Raises:
        ConfigError: the type is unknown, or what it needs was not given or is not usable.
    """
    problems = tuple(tokenizer_problems(config))
    if problems:
        raise ConfigError.of(problems)
    tokenizer = _LOADERS[str(config.tokenizer_type)](config)
    if config.vocab_size is not None and config.vocab_size != tokenizer.vocab_size:
        raise ConfigError(
            f"--vocab-size {config.vocab_size} is not the size of the tokenizer, {tokenizer.vocab_size}",
            fix="leave --vocab-size out; --padded-vocab-size sets the rows of the embedding",
        )
    return tokenizer


class NullTokenizer:
    """Text that already is numbers: `encode("5 3")` is [5, 3]. The last id ends documents, or the one that is given."""

    def __init__(self, config: TokenizerConfig) -> None:
        vocab_size = config.vocab_size
        if vocab_size is None or vocab_size < 1:
            raise ConfigError(
                f"--vocab-size {vocab_size} leaves no token", fix="give a --vocab-size of 1 or more"
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
        """The numbers of a text. Raises ValueError where there is none or it is no id."""
        ids = [int(word) for word in text.split()]
        wrong = next((number for number in ids if not 0 <= number < self.vocab_size), None)
        if wrong is not None:
            raise ValueError(f"id {wrong} is outside the vocabulary of {self.vocab_size}")
        return ids

    def encode_batch(self, texts: Sequence[str]) -> list[list[int]]:
        """The numbers of many texts."""
        return [self.encode(text) for text in texts]

    def decode(self, ids: Sequence[int]) -> str:
        """The numbers, with blanks between."""
        return " ".join(map(str, ids))


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
