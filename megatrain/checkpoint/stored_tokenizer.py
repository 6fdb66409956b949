"""The tokenizer of a checkpoint, compared with the tokenizer of the training run, and the tokens that end a text."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from pathlib import Path

from megatrain.checkpoint.manifest import Manifest
from megatrain.checkpoint.stored_values import stored_section
from megatrain.config.errors import ConfigError
from megatrain.config.schema.tokenizer import TokenizerConfig, is_same_tokenizer
from megatrain.data.tokenizers.build import Tokenizer, load_tokenizer
from megatrain.data.tokenizers.huggingface import LibraryTokenizer
from megatrain.data.tokenizers.special_tokens import listed_end_ids


@dataclass(frozen=True)
class StoredTokenizer:
    """A tokenizer, loaded from the files that a checkpoint names."""

    config: TokenizerConfig
    tokenizer: Tokenizer
    end_ids: tuple[int, ...]
    """Tokens that end a text: the end-of-document token, and those that the files of a model list."""
    start_id: int | None = None
    """First token of a decoder after an encoder: of the files of a model, or the tokenizer's [CLS]; None: there is none."""
    chat_template: str | None = None
    """Jinja template of the conversations that the model was trained on; None: it has none of its own."""

    @property
    def vocab_size(self) -> int:
        """Ids of the model: those of the tokenizer, and rows of padding that --vocab-size counts."""
        return self.config.vocab_size or self.tokenizer.vocab_size


def stored_tokenizer(path: Path, manifest: Manifest) -> StoredTokenizer:
    """Load the tokenizer of the checkpoint at `path`.

    Raises:
        ConfigError: its files are missing, or it has changed since training.
    """
    config: TokenizerConfig = stored_section(path, manifest.config, "tokenizer", TokenizerConfig)
    fingerprint = manifest.state["tokenizer_fingerprint"]
    tokenizer_type = config.tokenizer_type or "NullTokenizer"
    tokenizer = load_tokenizer(dataclasses.replace(config, tokenizer_type=tokenizer_type))
    if fingerprint is not None and not is_same_tokenizer(tokenizer.fingerprint, fingerprint):
        raise ConfigError(
            f"--tokenizer-model {config.tokenizer_model}: not the tokenizer of the training run",
            fix="restore the tokenizer file of the training run",
        )
    folder = Path(config.tokenizer_model or "")
    listed = listed_end_ids(folder) if config.tokenizer_model is not None and folder.is_dir() else ()
    ends = (tokenizer.eod, *manifest.state.get("end_token_ids", ()), *listed)
    within = (number for number in ends if number is not None and number < tokenizer.vocab_size)
    roles = tokenizer.role_ids if isinstance(tokenizer, LibraryTokenizer) else {}
    start = manifest.state.get("decoder_start_id", roles.get("cls_token"))
    templates = (dataset.get("chat_template") for dataset in manifest.state.get("datasets", ()))
    template = next(filter(None, templates), None)
    return StoredTokenizer(config, tokenizer, tuple(dict.fromkeys(within)), start, template)
