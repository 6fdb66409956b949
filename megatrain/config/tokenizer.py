"""The tokenizer that the data was made with."""

from dataclasses import dataclass, field
from typing import Literal

from megatrain.config.values import in_range


@dataclass(frozen=True, kw_only=True)
class TokenizerConfig:
    """Tokenizer: how text became token numbers."""

    tokenizer_type: Literal["HuggingFaceTokenizer", "NullTokenizer"] | None = None
    """Kind of the tokenizer. NullTokenizer reads no file: token numbers below --vocab-size, the last one ends a document."""
    tokenizer_model: str | None = None
    """The tokenizer's file or folder."""
    vocab_size: int | None = field(default=None, metadata=in_range(at_least=1))
    """Number of tokens, before padding, where no tokenizer file says it."""
