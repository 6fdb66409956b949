"""Images from bytes: decoded, resized, cut and normalized as by the image processors of `transformers`.

    clip      the shorter side fills the image, the middle of the longer one is kept     means and deviations of CLIP
    siglip    each side is scaled to that of the model, without a cut                    (x - 0.5) / 0.5
    internvl  the same                                                                   means and deviations of ImageNet
    tiles     the image is scaled to the grid of tiles whose shape is most like its own, and cut row by row; the whole image,
              scaled to one tile, may follow

All resize by Pillow's bicubic filter, on 8-bit colours.

Source: tiles are those of InternVL, as in Megatron-LM's examples/multimodal and `GotOcr2ImageProcessor` of `transformers`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from io import BytesIO
from itertools import accumulate
from typing import TYPE_CHECKING, Final, Literal

import numpy as np
import numpy.typing as npt

from megatrain.config.derive.vision import pinpoints, shuffle_side
from megatrain.config.errors import ConfigError, InputError
from megatrain.data.images.anyres import AnyRes
from megatrain.data.images.vectors import vector_tokens

if TYPE_CHECKING:
    from PIL.Image import Image

    from megatrain.config.schema.vision import VisionConfig

Processor = Literal["clip", "siglip", "internvl"]
_MEANS: Final = {
    "clip": (0.48145466, 0.4578275, 0.40821073),
    "siglip": (0.5, 0.5, 0.5),
    "internvl": (0.485, 0.456, 0.406),
}
_DEVIATIONS: Final = {
    "clip": (0.26862954, 0.26130258, 0.27577711),
    "siglip": (0.5, 0.5, 0.5),
    "internvl": (0.229, 0.224, 0.225),
}


def require_pillow() -> None:
    """Raise ConfigError without Pillow."""
    try:
        import PIL.Image  # noqa: F401, PLC0415 (an optional package)
    except ImportError as error:
        raise ConfigError(
            "--image-data-path needs the package Pillow, which is not installed",
            fix="install megatrain[vision], or use --mock-data",
        ) from error


def open_image(data: bytes, name: str) -> Image:
    """Return an image whose header alone was read. Raises InputError if there is none."""
    from PIL import Image  # noqa: PLC0415

    try:
        return Image.open(BytesIO(data))
    except (OSError, ValueError, SyntaxError, Image.DecompressionBombError) as error:
        raise _no_image(name, error) from error


def decode(data: bytes, name: str) -> Image:
    """Return an image in RGB, on white where it is transparent. Raises InputError, which starts with the name, if it is damaged."""
    from PIL import Image  # noqa: PLC0415

    image = open_image(data, name)
    if image.mode in {"I", "F"}:  # Pillow clips their values at 255
        raise _no_image(name, ValueError(f"the range of its 32-bit values is unknown (mode {image.mode})"))
    try:
        if image.mode.startswith("I;16"):  # as above
            image = image.point(lambda value: value / 256, "L")
        elif "A" in image.getbands() or "transparency" in image.info:
            white = Image.new("RGBA", image.size, "white")
            image = Image.alpha_composite(white, image.convert("RGBA"))
        return image.convert("RGB")
    except (OSError, ValueError, SyntaxError) as error:
        raise _no_image(name, error) from error


def _no_image(name: str, error: Exception) -> InputError:
    reason = (
        "its format is unknown" if "cannot identify" in str(error) else str(error) or type(error).__name__
    )
    return InputError(f"{name}: no image: {reason}", fix="replace the file, or remove its sample")


@dataclass(frozen=True, kw_only=True)
class Tiling:
    """How an image becomes one or several images of the size of the model."""

    processor: Processor
    height: int
    width: int
    max_tiles: int = 1
    """1: an image is one tile, cut as its processor does."""
    has_thumbnail: bool = False
    """The whole image follows several tiles."""
    anyres: AnyRes | None = None
    """Tiles of LLaVA-NeXT, in place of these."""
    vectors: tuple[int, int] = (1, 1)
    """Rows and columns of the vectors of a tile."""
    has_class_token: bool = False
    """A tile has a vector more, before them."""

    @property
    def num_vectors(self) -> int:
        """Vectors of a tile."""
        return self.vectors[0] * self.vectors[1] + self.has_class_token

    @property
    def means(self) -> tuple[float, float, float]:
        """Means of red, green and blue, from 0 to 1, which are subtracted."""
        return _MEANS[self.processor]

    @property
    def deviations(self) -> tuple[float, float, float]:
        """Standard deviations of red, green and blue, which divide them after that."""
        return _DEVIATIONS[self.processor]

    @property
    def is_single(self) -> bool:
        """An image is one tile."""
        return self.max_tiles == 1 and self.anyres is None

    def rows(self, size: tuple[int, int], most: int) -> npt.NDArray[np.int64]:
        """Return the vectors of an image of `size` (width, height) in their order in the text: numbers over its tiles, and `NEWLINE`."""
        if self.anyres is not None:
            return self.anyres.rows(size[::-1], most, self.vectors)
        return np.arange(self.num_tiles(size, most) * self.num_vectors)

    def num_tiles(self, size: tuple[int, int], most: int) -> int:
        """Return the tiles of an image of `size` (width, height), of at most `most`, with the thumbnail."""
        if self.anyres is not None:
            return self.anyres.num_tiles(size[::-1], most)
        if self.is_single:
            return 1
        columns, rows = self._grid(size, most)
        return columns * rows + (self.has_thumbnail and columns * rows > 1)

    def tiles(self, image: Image, most: int) -> npt.NDArray[np.float32]:
        """Return the pixels of an image in RGB, [tiles, channels, height, width]."""
        if self.anyres is not None:
            return self._normalized(self.anyres.tiles(image, most))
        if self.is_single:
            return self._normalized([self._fitted(image)])
        columns, rows = self._grid(image.size, most)
        width, height = self.width, self.height
        whole = _resized(image, columns * width, rows * height)
        boxes = [(x * width, y * height) for y in range(rows) for x in range(columns)]
        found = [whole.crop((x, y, x + width, y + height)) for x, y in boxes]
        if self.has_thumbnail and len(found) > 1:
            found.append(_resized(image, width, height))
        return self._normalized(found)

    def _grid(self, size: tuple[int, int], most: int) -> tuple[int, int]:
        """Return columns and rows: of the shapes nearest to the image's, the largest grid below twice the area of the image."""
        # Several tiles have their thumbnail within `most`.
        limit = max(min(self.max_tiles, most - self.has_thumbnail), 1)
        numbers = range(1, limit + 1)
        grids = sorted(
            ((columns, rows) for columns in numbers for rows in numbers if columns * rows <= limit),
            key=lambda grid: grid[0] * grid[1],
        )
        shape, area = size[0] / size[1], size[0] * size[1]
        nearest = min(abs(shape - columns / rows) for columns, rows in grids)
        first, *others = (grid for grid in grids if abs(shape - grid[0] / grid[1]) == nearest)
        for columns, rows in others:
            if area > 0.5 * self.width * self.height * columns * rows:
                first = columns, rows
        return first

    def _fitted(self, image: Image) -> Image:
        width, height = self.width, self.height
        if self.processor != "clip":
            return _resized(image, width, height)
        old = image.width, image.height
        is_wide = width / image.width < height / image.height
        size = (int(old[0] * height / old[1]), height) if is_wide else (width, int(old[1] * width / old[0]))
        image = _resized(image, max(size[0], width), max(size[1], height))
        left, top = (image.width - width) // 2, (image.height - height) // 2
        return image.crop((left, top, left + width, top + height))

    def _normalized(self, images: list[Image]) -> npt.NDArray[np.float32]:
        values = np.stack([np.asarray(image, np.float64) for image in images]) / 255
        normal = (values - self.means) / self.deviations
        return normal.transpose(0, 3, 1, 2).astype(np.float32)

    def colours(self, pixels: npt.NDArray[np.float32]) -> npt.NDArray[np.uint8]:
        """Return the 8-bit colours [height, width, channels] of one tile's pixels."""
        values = pixels.transpose(1, 2, 0) * self.deviations + self.means
        found: npt.NDArray[np.uint8] = np.rint(values.clip(0, 1) * 255).astype(np.uint8)
        return found


@dataclass(frozen=True)
class ReadImage:
    """The pixels of an image, [tiles, channels, height, width], and its vectors; see `Tiling.rows`."""

    tiles: npt.NDArray[np.float32]
    rows: npt.NDArray[np.int64]


def read_image(data: bytes, name: str, tiling: Tiling, most: int) -> ReadImage:
    """Decode an image into at most so many tiles. Raises InputError, which starts with the name, if it is damaged."""
    image = decode(data, name)
    return ReadImage(tiling.tiles(image, most), tiling.rows(image.size, most))


def tokens_of(images: Sequence[ReadImage], tiling: Tiling) -> list[npt.NDArray[np.int64]]:
    """Return the tokens of the vectors of each image of a sample."""
    firsts = accumulate((len(one.tiles) * tiling.num_vectors for one in images), initial=0)
    return [vector_tokens(one.rows, first) for one, first in zip(images, firsts, strict=False)]


def tiling_of(vision: VisionConfig) -> Tiling:
    """Return how images become tiles."""
    sizes, side = pinpoints(vision), vision.patch_dim * shuffle_side(vision)
    return Tiling(
        processor=vision.image_processor,
        height=vision.img_h,
        width=vision.img_w,
        max_tiles=vision.max_num_tiles if vision.use_tiling else 1,
        has_thumbnail=vision.use_thumbnail,
        anyres=AnyRes(sizes, (vision.img_h, vision.img_w)) if sizes else None,
        vectors=(vision.img_h // side, vision.img_w // side),
        has_class_token=vision.vision_model_type != "siglip" and not vision.disable_vision_class_token,
    )


def _resized(image: Image, width: int, height: int) -> Image:
    from PIL.Image import Resampling  # noqa: PLC0415

    return image.resize((width, height), Resampling.BICUBIC)
