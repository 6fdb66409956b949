"""The samples of BERT, T5 and vision-language models, from the configuration of a run."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

from megatrain.config import Config, Plan
from megatrain.config.derive.vision import image_shape, sample_length, text_length, tokens_per_image
from megatrain.config.errors import ConfigError
from megatrain.config.schema.data import MASKED_FAMILIES
from megatrain.data.images.build import ImageBuilder
from megatrain.data.images.conversations import Encoder, ImageSamples, Unlearned
from megatrain.data.images.pixels import require_pillow, tiling_of
from megatrain.data.images.vectors import MockImages
from megatrain.data.samples.build import SamplePlans, SplitDatasets
from megatrain.data.samples.dataset import SampleDataset
from megatrain.data.samples.index_cache import IndexCache
from megatrain.data.samples.masked_dataset import BERT_WORDS, T5_WORDS, MaskedSamples
from megatrain.data.tokenizers.build import load_tokenizer
from megatrain.data.tokenizers.mask_tokens import mask_vocabulary


def masked_samples(config: Config) -> MaskedSamples | None:
    """Return the kind of the samples; None: they are sequences of tokens.

    Raises:
        ConfigError: there is no data of sentences, or the tokenizer lacks a token that they need.
    """
    model, data = config.model, config.data
    if model.model_family not in MASKED_FAMILIES:
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


def with_mock_images(splits: SplitDatasets, config: Config) -> SplitDatasets:
    """Return the splits with a black image before each sample of text, if the model reads images."""
    shape = image_shape(config)
    if shape is None:
        return splits

    def add(text: SampleDataset | None) -> SampleDataset | None:
        if text is None:
            return None
        return MockImages(text, shape, tokens_per_image(config.vision), sample_length(config))

    return replace(splits, train=add(splits.train), valid=add(splits.valid), test=add(splits.test))


def image_conversations(
    plan: Plan, plans: SamplePlans, log: Callable[[str], None], digests: Sequence[str] | None
) -> SplitDatasets:
    """Return the samples of --image-data-path by split, whose rows --split divides.

    Args:
        digests: of the sources on rank 0; None: not compared.

    Raises:
        ConfigError: Pillow is missing.
        InputError: a file cannot be read, or differs from rank 0's.
    """
    config, shape = plan.config, image_shape(plan.config)
    assert shape is not None
    require_pillow()
    vision, tokenizer = config.vision, load_tokenizer(config.tokenizer)
    options = ImageSamples(
        image_shape=shape,
        text_length=text_length(config),
        length=sample_length(config),
        tiling=tiling_of(vision),
        stops=config.data.stop_at_unread_images,
    )
    builder = ImageBuilder(
        encoder=Encoder(options, tokenizer, plan.derived.eod_id or 0, Unlearned(log)),
        cache=IndexCache(config.data.data_cache_path, log),
        seed=plans.seed,
        is_packed=config.data.use_packed_sequence,
        tokenizer_fingerprint=tokenizer.fingerprint,
    )
    return builder.build(config.data.image_data_path, config.data.split, plans, digests)
