"""Runs on images of files: they resume with the same samples, refuse other files, and name wrong input."""

import io
import json
from pathlib import Path

import numpy as np
import pytest
from metrics_files import logged_lines, logged_losses

from megatrain.data.images.pixels import Tiling, decode
from megatrain.tools.main import main
from pretrain import main as pretrain

Image = pytest.importorskip("PIL.Image")
GOLDEN = Path(__file__).parents[2] / "golden"
FLAGS = (
    "--model-family vlm --num-layers 1 --hidden-size 16 --num-attention-heads 2 --seq-length 64 --max-position-embeddings 80"
    " --img-h 8 --img-w 8 --patch-dim 4 --images-per-sample 3 --use-tiling --max-num-tiles 2 --use-packed-sequence"
    f" --tokenizer-type HuggingFaceTokenizer --tokenizer-model {GOLDEN} --micro-batch-size 2 --global-batch-size 2"
    " --train-iters 4 --lr-decay-iters 4 --lr 0.01 --eval-iters 0 --device cpu --split 1"
)

LLAVA = (
    " --vision-model-type siglip --vision-hidden-size 16 --vision-ffn-hidden-size 32 --vision-num-attention-heads 2"
    " --position-embedding-type rope --normalization RMSNorm --swiglu --ffn-hidden-size 32 --disable-bias-linear"
    " --untie-embeddings-and-output-weights --hidden-dropout 0 --attention-dropout 0"
)
PADDING = 1
"""A token that no text has."""


def conversations(folder: Path, num_rows: int = 9) -> Path:
    folder.mkdir(exist_ok=True)
    rows = []
    for number in range(num_rows):
        pixels = np.random.default_rng(number).integers(0, 256, (8, 8 + number, 3), dtype=np.uint8)
        file = io.BytesIO()
        Image.fromarray(pixels).save(file, "png")
        (folder / f"{number}.png").write_bytes(file.getvalue())
        turns = [{"from": "human", "value": f"{number} <image>?"}, {"from": "gpt", "value": f"a {number}"}]
        rows.append({"id": f"row {number}", "image": f"{number}.png", "conversations": turns})
    path = folder / "talks.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def losses_of(flags: str, metrics: Path) -> list[float]:
    assert pretrain(f"{flags} --metrics-file {metrics}".split()) in (0, 75)  # 75: --exit-interval
    return logged_losses(metrics)


def test_a_run_on_images_resumes_bit_for_bit_and_refuses_other_files(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    flags = f"{FLAGS} --image-data-path {conversations(tmp_path / 'data')}"
    whole = losses_of(flags, tmp_path / "whole.jsonl")
    halves, metrics = f"{flags} --save {tmp_path / 'save'} --save-interval 2", tmp_path / "halves.jsonl"
    losses_of(f"{halves} --exit-interval 2", metrics)
    moved = halves.replace(str(tmp_path / "data"), str(tmp_path / "moved"))
    conversations(tmp_path / "moved")
    assert losses_of(f"{moved} --load {tmp_path / 'save'}", metrics) == whole
    conversations(tmp_path / "moved", num_rows=10)
    assert main(f"data sample {moved} --load {tmp_path / 'save'} --of train --index 0".split()) == 2
    assert "is not the dataset that the checkpoint read" in capsys.readouterr().err


def test_a_wrong_row_ends_a_run_before_it_starts(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = conversations(tmp_path, num_rows=2)
    path.write_text(path.read_text().replace("1 <image>", "1"))
    assert pretrain(f"{FLAGS} --image-data-path {path}".split()) == 2
    shown = capsys.readouterr()
    assert "sample row 1" in shown.out + shown.err


def test_an_evaluation_without_a_readable_image_has_no_loss(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A loss of 0, of no token, would be the best of the run."""
    path, log = conversations(tmp_path / "data", num_rows=4), tmp_path / "metrics.jsonl"
    for file in path.parent.glob("*.png"):
        file.write_bytes(b"")
    flags = f"{FLAGS.replace('--split 1', '--split 1,1')} --eval-iters 1 --metrics-file {log}"
    assert pretrain(f"{flags} --image-data-path {path}".split()) == 0
    assert "validation at iteration 4: no token of its samples has a loss" in capsys.readouterr().out
    assert not [line for line in logged_lines(log) if "validation" in line]


def test_an_exported_model_reads_images_in_transformers_as_in_training(tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    words = FLAGS.replace(" --use-tiling --max-num-tiles 2 --use-packed-sequence", LLAVA)
    path, saved, out = conversations(tmp_path / "data"), tmp_path / "saved", tmp_path / "out"
    losses_of(f"{words} --image-data-path {path} --save {saved}", tmp_path / "metrics.jsonl")
    assert main(f"convert megatrain-to-hf {saved} {out} --image-token-id {PADDING}".split()) == 0
    processor = transformers.AutoProcessor.from_pretrained(out)
    parts = [{"type": "image"}, {"type": "text", "text": "Which?"}]
    turns = [{"role": "user", "content": parts}, {"role": "assistant", "content": "One."}]
    text = processor.apply_chat_template([*turns, {"role": "user", "content": "Why?"}])
    assert text == "USER: <|padding|>\nWhich? ASSISTANT: One.<|endoftext|>USER: Why? ASSISTANT:"
    image = path.parent / "8.png"
    found = processor(text=text, images=Image.open(image), return_tensors="np")
    tiling = Tiling(processor="siglip", height=8, width=8)
    assert np.abs(found["pixel_values"] - tiling.tiles(decode(image.read_bytes(), "x"), 1)).max() < 1e-5
    assert (found["input_ids"] == PADDING).sum() == 4
