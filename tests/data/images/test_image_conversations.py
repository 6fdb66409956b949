"""Conversations about images: samples, packing, blends, errors that name the sample, the same sample again."""

import io
import json
import tarfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from megatrain.config.errors import InputError
from megatrain.config.schema.data import DataConfig
from megatrain.data.images.build import ImageBuilder, image_facts
from megatrain.data.images.conversations import Encoder, ImageConversations, ImageSamples, Unlearned
from megatrain.data.images.pixels import Tiling, decode
from megatrain.data.samples.build import SamplePlans
from megatrain.data.samples.dataset import SampleDataset
from megatrain.data.samples.index_cache import IndexCache

Image = pytest.importorskip("PIL.Image")

CLIP = Tiling(processor="clip", height=8, width=8, vectors=(2, 2))
TILES = Tiling(processor="siglip", height=8, width=8, max_tiles=3, has_thumbnail=True, vectors=(2, 2))


class Words:
    """A tokenizer with an id for each letter."""

    fingerprint = "letters"

    def encode(self, text: str) -> list[int]:
        return [ord(letter) for letter in text]


def picture(width: int, height: int, seed: int = 0) -> bytes:
    pixels = np.random.default_rng(seed).integers(0, 256, (height, width, 3), dtype=np.uint8)
    file = io.BytesIO()
    Image.fromarray(pixels).save(file, "png")
    return file.getvalue()


def talk(question: str, answer: str, **more: Any) -> dict[str, Any]:
    turns = [{"from": "human", "value": question}, {"from": "gpt", "value": answer}]
    return {"id": "s1", "conversations": turns, **more}


def write_lines(path: Path, rows: list[Any]) -> str:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


def write_shard(path: Path, members: Mapping[str, bytes]) -> str:
    with tarfile.open(path, "w") as shard:
        for name, content in members.items():
            info = tarfile.TarInfo(name)
            info.size = len(content)
            shard.addfile(info, io.BytesIO(content))
    return str(path)


def samples(
    *words: str, count: int | None = 6, log: Any = print, cache: Path | None = None, packed: bool = False, **options: Any
) -> SampleDataset:  # fmt: skip
    sizes = ImageSamples(**{
        "image_shape": (2, 3, 8, 8), "text_length": 60, "length": 68, "tiling": CLIP, "stops": False,
        **options,
    })  # fmt: skip
    encoder = Encoder(sizes, Words(), 1, Unlearned(log))  # type: ignore[arg-type]
    builder = ImageBuilder(
        encoder=encoder, cache=IndexCache(cache), seed=7, is_packed=packed, tokenizer_fingerprint="letters"
    )
    plans = SamplePlans(train=(count,), valid=(0,), test=(0,), seed=7)
    train = builder.build(words, "1", plans, None).train
    assert train is not None
    return train


def text_of(arrays: Mapping[str, Any], name: str = "tokens") -> str:
    return "".join("#" if one < 0 else chr(one) for one in arrays[name] if one)


def test_answers_alone_have_a_loss_and_images_their_vectors(tmp_path: Path) -> None:
    (tmp_path / "a.png").write_bytes(picture(8, 8))
    (tmp_path / "b.png").write_bytes(picture(8, 8, seed=1))
    row = talk("<image>x<image> y", "yz", image=["a.png", "b.png"])
    arrays = samples(write_lines(tmp_path / "t.jsonl", [row]))[0].arrays
    tokens, labels, mask = (arrays[name] for name in ("tokens", "labels", "loss_mask"))
    assert text_of(arrays) == "USER: ####x#### y ASSISTANT: yz\x01"
    assert tokens[6:10].tolist() == [-1, -2, -3, -4]
    assert tokens[11:15].tolist() == [-5, -6, -7, -8]
    assert "".join(map(chr, labels[mask == 1])) == " yz\x01"
    for place, name in enumerate(("a.png", "b.png")):
        expected = CLIP.tiles(decode((tmp_path / name).read_bytes(), name), 1)
        assert np.array_equal(arrays["images"][place], expected[0])
    assert len(tokens) == 68


def test_plain_text_is_learned_whole_and_long_text_is_cut(tmp_path: Path) -> None:
    path = write_lines(tmp_path / "t.jsonl", [{"text": "abc"}])
    arrays = samples(path)[0].arrays
    assert (text_of(arrays), arrays["loss_mask"].sum()) == ("abc\x01", 3)
    assert not arrays["images"].any()
    arrays = samples(write_lines(tmp_path / "u.jsonl", [talk("x", "y" * 500)]))[0].arrays
    assert arrays["tokens"][59:].tolist() == [ord("y"), *[0] * 8]


def test_an_epoch_reads_all_rows_and_a_sample_is_the_same_again(tmp_path: Path) -> None:
    path = write_lines(tmp_path / "t.jsonl", [talk(name, name) for name in "abc"])
    found = samples(path)
    letters = [chr(found[k].arrays["tokens"][6]) for k in range(6)]
    assert sorted(letters[:3]) == sorted(letters[3:]) == list("abc")
    again = samples(path, count=60)
    for k in (5, 0, 3):
        assert all(np.array_equal(values, again[k].arrays[name]) for name, values in found[k].arrays.items())


def test_tiles_take_the_place_of_their_image(tmp_path: Path) -> None:
    (tmp_path / "wide.png").write_bytes(picture(32, 16))
    path = write_lines(tmp_path / "t.jsonl", [talk("a<image>b", "c", image="wide.png")])
    arrays = samples(path, image_shape=(4, 3, 8, 8), length=80, tiling=TILES)[0].arrays
    assert text_of(arrays) == "USER: a" + "#" * 12 + "b ASSISTANT: c\x01"  # two tiles and the thumbnail
    tiles = TILES.tiles(decode((tmp_path / "wide.png").read_bytes(), "wide.png"), 4)
    assert np.array_equal(arrays["images"], np.concatenate([tiles, np.zeros((1, 3, 8, 8))]))
    two = talk("<image><image>", "c", image=["wide.png"] * 2)
    arrays = samples(
        write_lines(tmp_path / "u.jsonl", [two]), image_shape=(4, 3, 8, 8), length=80, tiling=TILES
    )[0].arrays
    assert text_of(arrays).count("#") == 8, "two images share four tiles, and none has a thumbnail"


def test_packed_conversations_keep_their_images_and_are_apart(tmp_path: Path) -> None:
    rows = []
    for number, letter in enumerate("abcdef"):
        (tmp_path / f"{letter}.png").write_bytes(picture(8, 8, seed=number))
        rows.append(talk(f"<image>{letter}", letter, image=f"{letter}.png"))
    path = write_lines(tmp_path / "t.jsonl", rows)
    found = samples(path, count=None, packed=True)
    single = samples(path, count=6)
    assert isinstance(found, ImageConversations)
    assert len(found) == 3, "two images fit into a sample"
    for k in range(3):
        sample = found[k]
        arrays = sample.arrays
        start, end = sample.document_starts.tolist()[1], len(text_of(arrays))
        assert start * 2 == end
        for part, row in ((slice(start), 2 * k), (slice(start, end), 2 * k + 1)):
            own = single[row].arrays
            of_image = 4 * (row % 2)
            tokens = np.where(
                arrays["tokens"][part] < 0, arrays["tokens"][part] + of_image, arrays["tokens"][part]
            )
            assert np.array_equal(tokens, own["tokens"][:start])
            for name in ("labels", "loss_mask", "position_ids"):
                assert np.array_equal(arrays[name][part], own[name][:start]), name
            assert np.array_equal(arrays["images"][row % 2], own["images"][0])
    longer = samples(path, count=40, packed=True)
    for k in range(3):
        assert all(np.array_equal(values, longer[k].arrays[name]) for name, values in found[k].arrays.items())


def test_a_blend_mixes_text_with_images_by_weight(tmp_path: Path) -> None:
    (tmp_path / "a.png").write_bytes(picture(8, 8))
    images = write_lines(tmp_path / "images.jsonl", [talk("<image>", "a", image="a.png")])
    text = write_lines(tmp_path / "text.jsonl", [{"text": "t"}])
    found = samples("3", images, "1", text, count=40)
    kinds = [text_of(found[k].arrays).count("#") for k in range(40)]
    assert (kinds.count(4), kinds.count(0)) == (30, 10)
    together = samples(images, text, count=4)
    assert sorted(text_of(together[k].arrays).count("#") for k in range(2)) == [0, 4]


def test_shards_are_read_as_their_members_say(tmp_path: Path) -> None:
    row = json.dumps({"conversations": talk("x<image>", "y")["conversations"]}).encode()
    write_shard(tmp_path / "0.tar", {"d/1.png": picture(8, 8), "d/1.json": row, "d/2.txt": b"only text"})
    second = {"3.0.jpg": picture(8, 8, 1), "3.1.jpg": picture(8, 8, 2), "3.txt": b"two"}
    write_shard(tmp_path / "1.tar", second)
    for _ in range(2):  # the second time from the cached index
        found = samples(str(tmp_path / "*.tar"), count=3, cache=tmp_path / "cache")
        by_text = {text_of(found[k].arrays): found[k].arrays for k in range(3)}
        assert set(by_text) == {"USER: x#### ASSISTANT: y\x01", "only text\x01", "########two\x01"}
        expected = [CLIP.tiles(decode(second[name], name), 1)[0] for name in ("3.0.jpg", "3.1.jpg")]
        assert np.array_equal(by_text["########two\x01"]["images"], expected)
        assert len([one for one in (tmp_path / "cache").iterdir() if one.name.startswith("shards-")]) == 1


@pytest.mark.parametrize("content", [b"no image", picture(64, 64)[:500], None])
def test_an_image_that_cannot_be_read_is_named_and_counted(tmp_path: Path, content: bytes | None) -> None:
    if content is not None:
        (tmp_path / "bad.png").write_bytes(content)
    lines: list[str] = []
    path = write_lines(tmp_path / "t.jsonl", [talk("<image>x", "yz", image="bad.png")])
    found = samples(path, log=lines.append)
    assert not any(found[k].arrays["loss_mask"].any() for k in range(3))
    (line,) = lines
    assert "sample s1" in line
    assert "bad.png" in line
    assert "1 images so far" in line
    with pytest.raises(InputError, match=r"sample s1 .*bad\.png"):
        samples(path, stops=True)[0]


def test_samples_whose_answers_are_cut_off_are_named_and_counted(tmp_path: Path) -> None:
    lines: list[str] = []
    rows = [talk(f"{number:02} and many words before the answer", "y") for number in range(10)]
    found = samples(write_lines(tmp_path / "t.jsonl", rows), log=lines.append, text_length=20, count=20)
    assert not any(found[k].arrays["loss_mask"].any() for k in range(20))
    assert [line.partition("; a larger --seq-length keeps more")[2] for line in lines] == [
        " (1 such samples so far)",
        " (10 such samples so far)",
    ]
    assert "has no loss: no answer begins within its first 20 tokens" in lines[0]
    samples(write_lines(tmp_path / "u.jsonl", [talk("x", "y")]), log=lines.append, text_length=20)[0]
    assert len(lines) == 2


def test_names_of_images_in_another_folder_are_found_before_the_run(tmp_path: Path) -> None:
    (tmp_path / "images").mkdir()
    (tmp_path / "images/b.png").write_bytes(picture(8, 8))
    rows = [{"text": "words alone"}, *(talk("<image>x", "y", image=name) for name in ("a.png", "b.png"))]
    path = write_lines(tmp_path / "t.jsonl", rows)
    with pytest.raises(InputError, match=rf"no image of its first 3 rows exists, such as {tmp_path}/a\.png"):
        image_facts(DataConfig(seq_length=8, image_data_path=(path,)), most_images=2, log=print)
    path = write_lines(tmp_path / "images/t.jsonl", rows)
    image_facts(DataConfig(seq_length=8, image_data_path=(path,)), most_images=2, log=print)


def test_a_name_that_no_file_may_have_is_named(tmp_path: Path) -> None:
    path = write_lines(tmp_path / "t.jsonl", [talk("<image>x", "yz", image="a\0.png")])
    with pytest.raises(InputError, match=r"sample s1 .*no image: embedded null byte"):
        samples(path, stops=True)[0]


@pytest.mark.parametrize(
    ("row", "problem"),
    [
        (talk("<image>x", "y"), "sample s1 .* has 1 <image> in its text and 0 images"),
        (talk("x", "y", image="a.png"), "sample s1 .* has 0 <image> in its text and 1 images"),
        (talk("<image><image><image>", "y", image=["a.png"] * 3), "sample s1 .* has 3 images, more than --images-per-sample 2"),
        (talk("<image>", "y", image=[3]), "sample s1 .* has images that are no names"),
        ({"id": "s1", "conversations": [{"from": "cat", "value": "x"}]}, "sample s1 .* a turn without a role"),
        ({"id": "s1", "conversations": [{"from": ["cat"], "value": "x"}]}, "sample s1 .* a turn without a role"),
        ({"id": "s1"}, "sample s1 .* a turn without a role"),
        ([1], "no object"),
    ],
)  # fmt: skip
def test_a_wrong_row_is_named_before_training(tmp_path: Path, row: Any, problem: str) -> None:
    path = write_lines(tmp_path / "t.jsonl", [talk("x", "y"), row])
    with pytest.raises(InputError, match=problem):
        image_facts(DataConfig(seq_length=8, image_data_path=(path,)), most_images=2, log=print)


@pytest.mark.parametrize(
    ("kept", "problem"), [(1300, "cut off after sample 1"), (1700, "after sample 1: it ends within 2.png"), (100, "damaged")]
)  # fmt: skip
def test_a_shard_that_is_cut_off_is_named(tmp_path: Path, kept: int, problem: str) -> None:
    path = write_shard(tmp_path / "0.tar", {"1.txt": b"x", "2.png": picture(16, 16), "2.txt": b"y"})
    whole = Path(path).read_bytes()
    Path(path).write_bytes(whole[:kept])
    with pytest.raises(InputError, match=rf"0\.tar: .*{problem}"):
        samples(path)


@pytest.mark.parametrize(
    ("members", "problem"),
    [
        ({"d/1.png": b"x"}, "sample d/1 .* has no text"),
        ({"d/1.txt": b"\xff"}, "sample d/1 .* not UTF-8"),
        ({"d/1.json": b"{"}, "sample d/1 .* no JSON"),
        ({"d/1.json": b'{"text": "<image>"}'}, "sample d/1 .* has 1 <image> in its text and 0 images"),
    ],
)
def test_a_wrong_sample_of_a_shard_is_named(tmp_path: Path, members: dict[str, bytes], problem: str) -> None:
    path = write_shard(tmp_path / "0.tar", members)
    with pytest.raises(InputError, match=problem):
        image_facts(DataConfig(seq_length=8, image_data_path=(path,)), most_images=2, log=print)


def test_folders_and_missing_files_have_a_remedy(tmp_path: Path) -> None:
    (tmp_path / "energon" / ".nv-meta").mkdir(parents=True)
    with pytest.raises(InputError, match=r"Megatron-Energon\n.*\*\.tar"):
        samples(str(tmp_path / "energon"))
    for missing in ("none.jsonl", "none.tar", "none-*.tar"):
        with pytest.raises(InputError, match=r"--image-data-path .*none"):
            samples(str(tmp_path / missing))
