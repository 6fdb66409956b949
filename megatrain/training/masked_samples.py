"""The kind of the samples of BERT and T5, from the configuration of a run."""

from __future__ import annotations

from dataclasses import replace

from megatrain.config import Config
from megatrain.config.errors import ConfigError
from megatrain.data.samples.masked_dataset import BERT_WORDS, T5_WORDS, MaskedSamples
from megatrain.data.tokenizers.build import load_tokenizer
from megatrain.data.tokenizers.mask_tokens import mask_vocabulary


def masked_samples(config: Config) -> MaskedSamples | None:
    """Return the kind of the samples; None: they are of a GPT.

    Raises:
        ConfigError: there is no data of sentences, or the tokenizer lacks a token that they need.
    """
    model, data = config.model, config.data
    if model.model_family in ("gpt", "vlm"):
        return None
    if data.mock_data:
        raise ConfigError(
            f"--mock-data has no sentences, which --model-family {model.model_family} masks",
            fix="name data of preprocess_data.py --split-sentences with --data-path, and remove --mock-data",
        )
    is_t5 = model.model_family == "t5"
    words = T5_WORDS if is_t5 else BERT_WORDS
    return MaskedSamples(
        family=model.model_family,
        seq_length=data.seq_length,
        decoder_seq_length=model.decoder_seq_length or 0,
        has_order_head=not model.bert_no_binary_head,
        short_probability=data.short_seq_prob,
        words=replace(words, probability=data.mask_prob),
        vocabulary=mask_vocabulary(load_tokenizer(config.tokenizer), needs_sentinels=is_t5),
    )
