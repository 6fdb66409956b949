"""Images from files: decoded, resized, cut and normalized as by the image processors of `transformers`.

    clip      the shorter side fills the image, the middle of the longer one is kept     means and deviations of CLIP
    siglip    each side is scaled to that of the model, without a cut                    (x - 0.5) / 0.5

Both resize by Pillow's bicubic filter, on 8-bit colours.
"""

from __future__ import annotations

from pathlib import Path
from typing import Final

import numpy as np
import numpy.typing as npt

from megatrain.config.errors import ConfigError, InputError

_MEANS: Final = {"clip": (0.48145466, 0.4578275, 0.40821073), "siglip": (0.5, 0.5, 0.5)}
_DEVIATIONS: Final = {"clip": (0.26862954, 0.26130258, 0.27577711), "siglip": (0.5, 0.5, 0.5)}


def require_pillow() -> None:
    """Raise ConfigError without Pillow."""
    try:
        import PIL.Image  # noqa: F401, PLC0415 (an optional package)
    except ImportError as error:
        raise ConfigError(
            "--image-data-path needs the package Pillow, which is not installed",
            fix="install megatrain[vision], or use --mock-data",
        ) from error


def read_image(path: Path, *, height: int, width: int, processor: str) -> npt.NDArray[np.float32]:
    """Return an image, [channels, height, width].

    Args:
        processor: clip or siglip.

    Raises:
        InputError: the file is missing or holds no image.
    """
    from PIL import Image, UnidentifiedImageError  # noqa: PLC0415

    try:
        with Image.open(path) as file:
            image = file.convert("RGB")
    except (OSError, ValueError, SyntaxError, UnidentifiedImageError, Image.DecompressionBombError) as error:
        reason = str(error).replace(str(path), path.name) or type(error).__name__
        raise InputError(
            f"{path}: no image: {reason}", fix="replace the file, or remove its sample"
        ) from error
    if processor == "siglip":
        image = image.resize((width, height), Image.Resampling.BICUBIC)
    else:
        old = image.width, image.height
        is_wide = width / image.width < height / image.height
        size = (int(old[0] * height / old[1]), height) if is_wide else (width, int(old[1] * width / old[0]))
        image = image.resize((max(size[0], width), max(size[1], height)), Image.Resampling.BICUBIC)
        left, top = (image.width - width) // 2, (image.height - height) // 2
        image = image.crop((left, top, left + width, top + height))
    values = np.asarray(image, np.float64) / 255
    normal = (values - _MEANS[processor]) / _DEVIATIONS[processor]
    return normal.transpose(2, 0, 1).astype(np.float32)
