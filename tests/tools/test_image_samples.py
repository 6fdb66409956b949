"""`megatrain data sample` and `inspect` show samples with images as text and as a picture."""

import json
from pathlib import Path

import numpy as np
import pytest

from megatrain.tools.main import main

Image = pytest.importorskip("PIL.Image")
TOKENIZER = f"--tokenizer-type HuggingFaceTokenizer --tokenizer-model {Path(__file__).parents[1] / 'golden'}"
RUN = (
    "--model-family vlm --num-layers 1 --hidden-size 16 --num-attention-heads 2 --seq-length 96 --max-position-embeddings 200"
    " --img-h 16 --img-w 16 --patch-dim 8 --images-per-sample 3 --micro-batch-size 1 --global-batch-size 1 --train-iters 1"
    " --lr 1 --eval-iters 0 --split 1"
)


@pytest.fixture
def talks(tmp_path: Path) -> Path:
    for number, colour in enumerate([(255, 0, 0), (0, 0, 255)]):
        Image.new("RGB", (32, 16), colour).save(tmp_path / f"{number}.png")
    turns = [{"from": "human", "value": "see <image> and <image>?"}, {"from": "gpt", "value": "yes"}]
    rows = [{"id": "two", "image": ["0.png", "1.png"], "conversations": turns}]
    (tmp_path / "talks.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return tmp_path / "talks.jsonl"


def colours_of(path: Path) -> set[tuple[int, ...]]:
    pixels = np.asarray(Image.open(path).convert("RGB")).reshape(-1, 3)
    return {tuple(one) for one in np.unique(pixels, axis=0).tolist()}


def test_a_sample_is_shown_as_it_is_read(talks: Path, capsys: pytest.CaptureFixture[str]) -> None:
    picture = talks.parent / "sample.png"
    words = f"data sample {RUN} --image-data-path {talks} --use-packed-sequence --of train --index 0 --picture {picture}"
    assert main(f"{words} {TOKENIZER}".split()) == 0
    shown = capsys.readouterr().out
    assert "USER: see [image 1] and [image 2]? ASSISTANT: yes<|endoftext|>" in shown
    assert "2 images of 5 tokens" in shown
    assert {(255, 0, 0), (0, 0, 255), (255, 255, 255)} <= colours_of(picture)
    assert any(max(one) < 100 for one in colours_of(picture)), "the text"


def test_mock_images_are_shown_without_a_tokenizer(capsys: pytest.CaptureFixture[str]) -> None:
    words = (
        f"data sample {RUN} --mock-data --tokenizer-type NullTokenizer --vocab-size 50 --of train --index 0"
    )
    assert main(words.split()) == 0
    assert "[image 1]" in capsys.readouterr().out


def test_a_row_is_shown_with_its_images(talks: Path, capsys: pytest.CaptureFixture[str]) -> None:
    picture = talks.parent / "row.png"
    assert main(f"data inspect {talks} --document 0 --picture {picture}".split()) == 0
    shown = capsys.readouterr().out
    assert "rows         1" in shown
    assert "sample two" in shown
    assert "0.png: 32 x 16 pixels" in shown
    assert {(255, 0, 0), (0, 0, 255)} <= colours_of(picture)
    assert main(f"data inspect {talks} --document 0 --json".split()) == 0
    assert json.loads(capsys.readouterr().out)["images"] == {"2": 1}
    assert main(f"data inspect {talks} --document 1".split()) == 2
    assert "--document 1" in capsys.readouterr().err
