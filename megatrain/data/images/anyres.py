"""Tiles of LLaVA-NeXT: an image keeps its shape, within the one of several sizes that holds most of it.

    tiles      the whole image, scaled to one tile; then those of the scaled image and its black padding, row by row
    vectors    those of the whole image; then each row of patches across the tiles, and a newline; none of the padding

Source: `LlavaNextImageProcessor` and `LlavaNextModel.pack_image_features` of `transformers`.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from megatrain.config.model_spec.vision import NEWLINE

if TYPE_CHECKING:
    from PIL.Image import Image

Size = tuple[int, int]
"""Height and width."""


@dataclass(frozen=True)
class AnyRes:
    """The sizes of scaled images, and the size of a tile, in pixels."""

    sizes: tuple[Size, ...]
    tile: Size

    def num_tiles(self, image: Size, most: int) -> int:
        """Return the tiles of an image, at most `most`; 1: the whole image alone."""
        size = self._best(image, most)
        return 1 if size is None else 1 + self._count(size)

    def tiles(self, image: Image, most: int) -> list[Image]:
        """Return the tiles of an image."""
        from PIL.Image import Resampling, new  # noqa: PLC0415

        height, width = self.tile
        whole = image.resize((width, height), Resampling.BICUBIC)
        size = self._best((image.height, image.width), most)
        if size is None:
            return [whole]
        inner = _inner((image.height, image.width), size)
        canvas = new("RGB", size[::-1])
        scaled = image.resize(inner[::-1], Resampling.BICUBIC)
        canvas.paste(scaled, ((size[1] - inner[1]) // 2, (size[0] - inner[0]) // 2))
        corners = [(x, y) for y in range(0, size[0], height) for x in range(0, size[1], width)]
        return [whole, *(canvas.crop((x, y, x + width, y + height)) for x, y in corners)]

    def rows(self, image: Size, most: int, vectors: Size) -> npt.NDArray[np.int64]:
        """Return the vectors of an image in their order in the text: numbers over all of its tiles, and `NEWLINE`.

        Args:
            vectors: of a tile: rows and columns.
        """
        per_tile = vectors[0] * vectors[1]
        whole, size = np.arange(per_tile), self._best(image, most)
        if size is None:
            return np.append(whole, NEWLINE)
        down, across = size[0] // self.tile[0], size[1] // self.tile[1]
        numbers = per_tile + np.arange(down * across * per_tile).reshape(down, across, *vectors)
        grid = numbers.transpose(0, 2, 1, 3).reshape(down * vectors[0], across * vectors[1])
        grid = _without_padding(grid, image)
        lines = np.pad(grid, ((0, 0), (0, 1)), constant_values=NEWLINE)
        return np.concatenate((whole, lines.ravel()))

    def _count(self, size: Size) -> int:
        return (size[0] // self.tile[0]) * (size[1] // self.tile[1])

    def _best(self, image: Size, most: int) -> Size | None:
        """Return the size that keeps most pixels of an image, then the smallest; None: all have too many tiles."""

        def fit(size: Size) -> tuple[int, int]:
            scale = min(size[1] / image[1], size[0] / image[0])
            kept = min(int(image[1] * scale) * int(image[0] * scale), image[0] * image[1])
            return kept, kept - size[0] * size[1]

        return max((size for size in self.sizes if 1 + self._count(size) <= most), key=fit, default=None)


def _inner(image: Size, size: Size) -> Size:
    """Return the size of an image scaled into another one."""
    of_height, of_width = size[0] / image[0], size[1] / image[1]
    if of_width < of_height:
        return min(math.ceil(image[0] * of_width), size[0]), size[1]
    return size[0], min(math.ceil(image[1] * of_height), size[1])


def _without_padding(grid: npt.NDArray[np.int64], image: Size) -> npt.NDArray[np.int64]:
    (height, width), (rows, columns) = image, grid.shape
    if width / height > columns / rows:
        padding = (rows - int(round(height * (columns / width), 7))) // 2
        return grid[padding : rows - padding]
    padding = (columns - int(round(width * (rows / height), 7))) // 2
    return grid[:, padding : columns - padding]
