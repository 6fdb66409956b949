"""Pixels of images are those of the image processors of transformers."""

import io
from types import SimpleNamespace

import numpy as np
import pytest

from megatrain.config.errors import InputError
from megatrain.config.model_spec.vision import NEWLINE
from megatrain.data.images.anyres import AnyRes
from megatrain.data.images.pixels import Processor, Tiling, decode, read_image

Image = pytest.importorskip("PIL.Image")
SIZE = 24


def picture(width: int, height: int, mode: str = "RGB") -> bytes:
    pixels = np.random.default_rng(0).integers(0, 256, (height, width, 3), dtype=np.uint8)
    image, file = Image.fromarray(pixels).convert(mode), io.BytesIO()
    if "A" in mode:
        image.putalpha(Image.linear_gradient("L").resize((width, height)))
    image.save(file, "png", **({"transparency": 7} if mode == "P" else {}))
    return file.getvalue()


@pytest.mark.parametrize("mode", ["RGB", "RGBA", "L", "LA", "P", "1"])
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


def test_images_of_16_bits_are_scaled_and_those_without_a_range_refused() -> None:
    """Pillow clips both at 255: almost all of such an image would be white."""
    file, grey = io.BytesIO(), np.array([[0, 257, 30000, 65535]], dtype=np.uint16)
    Image.fromarray(grey).save(file, "png")
    assert np.asarray(decode(file.getvalue(), "one")).tolist() == [
        [[value] * 3 for value in (0, 1, 117, 255)]
    ]
    for pixels in (grey.astype(np.int32), grey.astype(np.float32)):
        file = io.BytesIO()
        Image.fromarray(pixels).save(file, "tiff")
        with pytest.raises(InputError, match=r"one: no image: the range of its 32-bit values"):
            decode(file.getvalue(), "one")


@pytest.mark.parametrize("turned", range(1, 9))
def test_the_orientation_that_a_camera_notes_is_not_applied(turned: int) -> None:
    """Megatron-Energon reads pixels as they are stored; docs/data.md says so, and how to turn them."""
    image, file = Image.open(io.BytesIO(picture(3, 2))), io.BytesIO()
    image.getexif()[274] = turned
    image.save(file, "png", exif=image.getexif())
    assert Image.open(io.BytesIO(file.getvalue())).getexif()[274] == turned
    assert np.array_equal(np.asarray(decode(file.getvalue(), "one")), np.asarray(image))


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


@pytest.mark.parametrize(
    ("width", "height"), [(50, 30), (24, 24), (301, 77), (20, 210), (72, 48), (12, 25), (47, 96), (70, 24)]
)
def test_tiles_of_any_shape_are_those_of_llava_next(width: int, height: int) -> None:
    """Pixels, and as many vectors as the processor counts; the rows of patches end with a newline."""
    transformers = pytest.importorskip("transformers")
    from transformers.models.llava_next.processing_llava_next import LlavaNextProcessor

    sizes, data, sides = (
        ((24, 48), (48, 24), (48, 48), (72, 24)),
        picture(width, height),
        {"height": SIZE, "width": SIZE},
    )
    theirs = transformers.LlavaNextImageProcessorPil(
        size={"shortest_edge": SIZE}, crop_size=sides, image_grid_pinpoints=[list(one) for one in sizes]
    )
    expected = np.asarray(theirs(Image.open(io.BytesIO(data)))["pixel_values"][0])
    tiling = Tiling(
        processor="clip", height=SIZE, width=SIZE, anyres=AnyRes(sizes, (SIZE, SIZE)), vectors=(6, 6)
    )
    found = read_image(data, "one", tiling, 99)
    assert found.tiles.shape == expected.shape
    assert tiling.num_tiles((width, height), 99) == len(expected)
    assert np.abs(found.tiles - expected).max() < 1e-5
    counter = SimpleNamespace(image_processor=theirs, patch_size=4, num_additional_image_tokens=0)
    counter._get_unpadded_features = LlavaNextProcessor._get_unpadded_features.__get__(counter)
    count = LlavaNextProcessor._get_number_of_features(counter, height, width, SIZE, SIZE)
    assert len(found.rows) == count
    vectors = found.rows[found.rows != NEWLINE]
    assert len(set(vectors.tolist())) == len(vectors)
    assert 0 <= vectors.min() <= vectors.max() < 36 * len(expected)
    whole = tiling.anyres.rows((height, width), 1, (6, 6))
    assert whole.tolist() == [*range(36), NEWLINE], "no size fits: the whole image alone"
