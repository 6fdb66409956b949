"""Conversations about images: pixels as transformers has them, samples, errors that name the sample, the same sample again."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from megatrain.config.errors import InputError
from megatrain.data.samples.image_conversations import ImageConversations, ImageSamples, row_offsets
from megatrain.data.samples.image_files import read_image

Image = pytest.importorskip("PIL.Image")


class Words:
    """A tokenizer with an id for each letter."""

    def encode(self, text: str) -> list[int]:
        return [ord(letter) for letter in text]


def picture(path: Path, width: int, height: int, seed: int = 0) -> Path:
    pixels = np.random.default_rng(seed).integers(0, 256, (height, width, 3), dtype=np.uint8)
    Image.fromarray(pixels).save(path)
    return path


@pytest.mark.parametrize(("width", "height"), [(50, 30), (30, 50), (24, 24), (301, 77)])
@pytest.mark.parametrize("processor", ["clip", "siglip"])
def test_pixels_are_those_of_the_processors_of_transformers(
    tmp_path: Path, processor: str, width: int, height: int
) -> None:
    transformers = pytest.importorskip("transformers")
    path, size = picture(tmp_path / "one.png", width, height), 24
    if processor == "clip":
        theirs = transformers.CLIPImageProcessorPil(
            size={"shortest_edge": size}, crop_size={"height": size, "width": size}
        )
    else:
        theirs = transformers.SiglipImageProcessorPil(size={"height": size, "width": size}, resample=3)
    expected = np.asarray(theirs(Image.open(path))["pixel_values"][0])
    found = read_image(path, height=size, width=size, processor=processor)
    assert np.abs(found - expected).max() < 1e-5


def samples(folder: Path, rows: list[Any], **options: Any) -> tuple[ImageConversations, list[str]]:
    lines: list[str] = []
    path = folder / "talks.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    sizes = ImageSamples(**{
        "image_shape": (2, 3, 8, 8), "tokens_per_image": 4, "text_length": 60, "length": 68, "processor": "clip",
        "stops": False, **options,
    })  # fmt: skip
    return ImageConversations(path, row_offsets(path), 6, 7, sizes, Words(), 1, lines.append), lines  # type: ignore[arg-type]


def talk(question: str, answer: str, **more: Any) -> dict[str, Any]:
    turns = [{"from": "human", "value": question}, {"from": "gpt", "value": answer}]
    return {"id": "s1", "conversations": turns, **more}


def test_answers_alone_have_a_loss_and_images_their_vectors(tmp_path: Path) -> None:
    picture(tmp_path / "a.png", 8, 8)
    found, _ = samples(tmp_path, [talk("<image>x", "yz", image="a.png")])
    arrays = found[0].arrays
    tokens, labels, mask = (arrays[name] for name in ("tokens", "labels", "loss_mask"))
    start = len("USER: ")
    assert tokens[start : start + 4].tolist() == [-1, -2, -3, -4]
    assert "".join(map(chr, tokens[:start])) == "USER: "
    assert "".join(map(chr, labels[mask == 1][:-1])) == " yz"
    assert labels[mask == 1][-1] == 1
    assert np.array_equal(
        arrays["images"][0], read_image(tmp_path / "a.png", height=8, width=8, processor="clip")
    )
    assert not arrays["images"][1].any()
    assert len(tokens) == 68


def test_an_epoch_reads_all_rows_and_a_sample_is_the_same_again(tmp_path: Path) -> None:
    found, _ = samples(tmp_path, [talk(name, name) for name in "abc"])
    letters = [chr(found[k].arrays["tokens"][6]) for k in range(6)]
    assert sorted(letters[:3]) == sorted(letters[3:]) == list("abc")
    again, _ = samples(tmp_path, [talk(name, name) for name in "abc"])
    assert all(
        np.array_equal(values, again[k].arrays[name])
        for k in (5, 0, 3)
        for name, values in found[k].arrays.items()
    )


@pytest.mark.parametrize("content", [b"no image", None])
def test_an_image_that_cannot_be_read_is_named_and_counted(tmp_path: Path, content: bytes | None) -> None:
    if content is not None:
        (tmp_path / "bad.png").write_bytes(content)
    rows = [talk("<image>x", "yz", image="bad.png")]
    found, lines = samples(tmp_path, rows)
    assert not any(found[k].arrays["loss_mask"].any() for k in range(3))
    (line,) = lines
    assert "sample s1" in line
    assert "bad.png" in line
    assert "1 images so far" in line
    stopping, _ = samples(tmp_path, rows, stops=True)
    with pytest.raises(InputError, match=r"sample s1 .*bad\.png"):
        stopping[0]


@pytest.mark.parametrize(
    ("row", "problem"),
    [
        (talk("<image>x", "y"), "sample s1 .* has 1 <image> in its text and 0 images"),
        (talk("x", "y", image="a.png"), "sample s1 .* has 0 <image> in its text and 1 images"),
        (talk("<image><image><image>", "y", image=["a.png"] * 3), "sample s1 .* has 3 images, more than --images-per-sample 2"),
        ({"id": "s1", "conversations": [{"from": "cat", "value": "x"}]}, "sample s1 .* a turn without a role"),
        ({"id": "s1"}, "sample s1 .* a turn without a role"),
        ([1], "no object"),
    ],
)  # fmt: skip
def test_wrong_input_names_the_sample(tmp_path: Path, row: Any, problem: str) -> None:
    found, _ = samples(tmp_path, [row])
    with pytest.raises(InputError, match=problem):
        found[0]


def test_long_text_is_cut(tmp_path: Path) -> None:
    found, _ = samples(tmp_path, [talk("x", "y" * 500)])
    assert found[0].arrays["tokens"][59] == ord("y")
    assert found[0].arrays["tokens"][60:].tolist() == [0] * 8
