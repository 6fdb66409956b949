"""Pixels of images are those of the image processors of transformers."""

import io

import numpy as np
import pytest

from megatrain.data.images.pixels import Processor, Tiling, decode

Image = pytest.importorskip("PIL.Image")
SIZE = 24


def picture(width: int, height: int, mode: str = "RGB") -> bytes:
    pixels = np.random.default_rng(0).integers(0, 256, (height, width, 3), dtype=np.uint8)
    file = io.BytesIO()
    Image.fromarray(pixels).convert(mode).save(file, "png")
    return file.getvalue()


@pytest.mark.parametrize("mode", ["RGB", "RGBA", "L", "P", "1"])
@pytest.mark.parametrize(("width", "height"), [(50, 30), (30, 50), (24, 24), (301, 77), (3, 200)])
@pytest.mark.parametrize("processor", ["clip", "siglip", "internvl"])
def test_pixels_are_those_of_the_processors_of_transformers(
    processor: Processor, width: int, height: int, mode: str
) -> None:
    transformers = pytest.importorskip("transformers")
    data, sides = picture(width, height, mode), {"height": SIZE, "width": SIZE}
    if processor == "clip":
        theirs = transformers.CLIPImageProcessorPil(size={"shortest_edge": SIZE}, crop_size=sides)
    elif processor == "internvl":
        means = {"image_mean": [0.485, 0.456, 0.406], "image_std": [0.229, 0.224, 0.225]}
        theirs = transformers.GotOcr2ImageProcessorPil(size=sides, **means)
    else:
        theirs = transformers.SiglipImageProcessorPil(size=sides, resample=3, do_convert_rgb=True)
    expected = np.asarray(theirs(Image.open(io.BytesIO(data)))["pixel_values"][0])
    found = Tiling(processor=processor, height=SIZE, width=SIZE).tiles(decode(data, "one"), 1)
    assert found.shape == (1, *expected.shape)
    assert np.abs(found[0] - expected).max() < 1e-5


@pytest.mark.parametrize(
    ("width", "height"), [(50, 30), (24, 24), (301, 77), (20, 210), (72, 48), (12, 24), (96, 96)]
)
@pytest.mark.parametrize("most", [2, 5, 12])
def test_tiles_are_those_of_transformers(width: int, height: int, most: int) -> None:
    transformers = pytest.importorskip("transformers")
    data = picture(width, height)
    theirs = transformers.GotOcr2ImageProcessorPil(
        size={"height": SIZE, "width": SIZE}, crop_to_patches=True, max_patches=most
    )
    expected = np.asarray(theirs(Image.open(io.BytesIO(data)))["pixel_values"])
    tiling = Tiling(processor="clip", height=SIZE, width=SIZE, max_tiles=most, has_thumbnail=True)
    found = tiling.tiles(decode(data, "one"), 99)
    assert tiling.num_tiles((width, height), 99) == len(found)
    assert found.shape == expected.shape
    assert np.abs(found - expected).max() < 1e-5
