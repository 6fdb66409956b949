"""Samples with images: text whose image tokens stand for the vectors of an image.

    tokens   3  image  7  9          tokens     3  -1 .. -n   7  9     token -1 - r: row r of the sample's vectors
    labels   image  7  9  2    ->    labels     0   0 ..  7   9  2
    mask     1      1  1  1          mask       0   0 ..  0   1  1     vectors predict nothing, and nothing predicts them

Source: Megatron-LM, core/models/multimodal/llava_model.py.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

import numpy as np

from megatrain.config.errors import MegatrainError
from megatrain.config.model_spec.vision import NEWLINE
from megatrain.data.samples.dataset import FamilySample, Sample

if TYPE_CHECKING:
    from collections.abc import Sequence

    import numpy.typing as npt

    from megatrain.data.samples.dataset import SampleDataset, TokenSpan

IMAGE_TOKEN: Final = -200
"""Stands for an image in the tokens of a sample."""
NO_LABEL: Final = -1


def place_images(
    tokens: npt.NDArray[Any],
    labels: npt.NDArray[Any],
    loss_mask: npt.NDArray[Any],
    position_ids: npt.NDArray[Any],
    *,
    vectors: Sequence[npt.NDArray[Any]],
    length: int,
) -> dict[str, npt.NDArray[Any]]:
    """Return the arrays of a sample with a token for each vector of its images, padded to a length.

    Args:
        tokens, labels, loss_mask, position_ids: one entry for each token of the text and each image.
        vectors: tokens of the vectors of each image.
        length: tokens of the sample, at least as many as there are.
    """
    is_image = tokens == IMAGE_TOKEN
    counts = np.ones(len(tokens), np.int64)
    counts[is_image] = [len(one) for one in vectors]
    places = np.repeat(np.arange(len(tokens)), counts)
    of_image = is_image[places]
    expanded = tokens[places]
    if len(vectors):
        expanded[of_image] = np.concatenate(vectors)
    is_last = np.append(places[1:] != places[:-1], True)
    found = {
        "tokens": expanded,
        "labels": np.where(is_last & (labels[places] != IMAGE_TOKEN), labels[places], NO_LABEL),
        "loss_mask": np.where(of_image | (labels[places] == IMAGE_TOKEN), 0, loss_mask[places]),
        "position_ids": np.where(of_image, 0, position_ids[places]),
    }
    missing = length - len(expanded)
    if missing < 0:
        raise MegatrainError(
            f"a sample has {len(expanded)} tokens with those of its images, and samples have {length}",
            fix="use a larger --seq-length, or more --images-per-sample",
        )
    return {
        name: np.pad(values, (0, missing)).astype(np.float32 if name == "loss_mask" else np.int64)
        for name, values in found.items()
    }


def vector_tokens(rows: npt.NDArray[Any], first: int) -> npt.NDArray[Any]:
    """Return the tokens of the vectors of an image; `first`: vectors of the sample before them."""
    return np.where(rows == NEWLINE, NEWLINE, -1 - first - rows)


@dataclass(frozen=True)
class MockImages:
    """Samples of text with a black image in front, as Megatron-LM's mock data has them. Implements `SampleDataset`.

    Attributes:
        text: samples of a GPT.
        image_shape: of the images of a sample, [images, channels, height, width]; only the first is in the sequence.
        length: tokens of a sample, with those of images.
    """

    text: SampleDataset
    image_shape: tuple[int, ...]
    tokens_per_image: int
    length: int

    def __len__(self) -> int:
        """Return the number of samples."""
        return len(self.text)

    def __getitem__(self, k: int) -> FamilySample:
        """Return sample k."""
        sample = self.text[k]
        assert isinstance(sample, Sample), "mock data of a GPT"
        positions = sample.position_ids
        arrays = place_images(
            np.insert(sample.tokens, 0, IMAGE_TOKEN),
            np.insert(sample.labels, 0, sample.tokens[0]),
            np.insert(sample.loss_mask, 0, 0),
            np.append(positions, positions[-1] + 1),
            vectors=[vector_tokens(np.arange(self.tokens_per_image), 0)],
            length=self.length,
        )
        return FamilySample({**arrays, "images": self.images(k)})

    def images(self, k: int) -> npt.NDArray[np.float32]:  # noqa: ARG002 (all are black)
        """Return the images of sample k."""
        return np.zeros(self.image_shape, np.float32)

    def spans(self, k: int) -> list[TokenSpan]:
        return self.text.spans(k)
