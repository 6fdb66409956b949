"""The samples of a vision-language model, from the configuration of a run."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from megatrain.config.derive.vision import image_shape, sample_length, tokens_per_image
from megatrain.data.samples.image_dataset import MockImages

if TYPE_CHECKING:
    from megatrain.config import Config
    from megatrain.data.samples.build import SplitDatasets
    from megatrain.data.samples.dataset import SampleDataset


def with_mock_images(splits: SplitDatasets, config: Config) -> SplitDatasets:
    """Return the splits with a black image in front of each sample of text, if the model reads images."""
    shape = image_shape(config)
    if shape is None:
        return splits

    def add(text: SampleDataset | None) -> SampleDataset | None:
        if text is None:
            return None
        return MockImages(text, shape, tokens_per_image(config.vision), sample_length(config))

    return replace(splits, train=add(splits.train), valid=add(splits.valid), test=add(splits.test))
