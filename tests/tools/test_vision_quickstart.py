"""The quickstart of images: its set, and a model that answers questions about images it has not seen."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("PIL")
ROOT = Path(__file__).parents[2]
SHAPES = "scripts/quickstart/shapes.py"


def run(*words: object, given: str | None = None, code: int = 0) -> str:
    done = subprocess.run(
        [sys.executable, *map(str, words)], check=False, cwd=ROOT, input=given, capture_output=True, text=True,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
    )  # fmt: skip
    assert done.returncode == code, done.stdout + done.stderr
    return done.stdout


def answers(folder: Path, num_wrong: int) -> str:
    lines = [json.loads(line) for line in (folder / "questions.jsonl").read_text().splitlines()]
    wrong = ["blue" if number < num_wrong else one["answer"] for number, one in enumerate(lines)]
    given = zip(lines, wrong, strict=True)
    return "\n".join(json.dumps({"prompt": one["prompt"], "text": f" {text}"}) for one, text in given)


def test_held_out_images_are_new_and_right_answers_are_counted(tmp_path: Path) -> None:
    run(SHAPES, tmp_path, "--images", 30, "--held-out", 20)
    rows = [json.loads(line) for line in (tmp_path / "train.jsonl").read_text().splitlines()]
    asked = [json.loads(line) for line in (tmp_path / "questions.jsonl").read_text().splitlines()]
    trained, held_out = ({(tmp_path / name).read_bytes() for name in names} for names in (
        [row["image"] for row in rows], [one["images"][0] for one in asked],
    ))  # fmt: skip
    assert (len(trained), len(held_out), trained & held_out) == (30, 20, set())
    assert len(rows) == 4 * 30
    assert "20 of 20" in run(SHAPES, tmp_path, "--score", given=answers(tmp_path, 0))
    few = run(SHAPES, tmp_path, "--score", "--at-least", 0.95, given=answers(tmp_path, 6), code=1)
    assert "of 20 answers are right" in few
    run(SHAPES, tmp_path, "--score", given="", code=2)


@pytest.mark.nightly
def test_a_small_model_answers_questions_about_new_images(tmp_path: Path) -> None:
    run(SHAPES, tmp_path)
    tokenizer = tmp_path / "tokenizer.json"
    words = ["--input", tmp_path / "corpus.jsonl", "--output", tmp_path, "--vocab-size", 400]
    run("-m", "megatrain.tools.main", "tokenizer", "train", *words)
    run_folder = tmp_path / "run"
    run(
        "pretrain.py", "--config", "configs/quickstart_vision.yaml", "--image-data-path", tmp_path / "train.jsonl",
        "--tokenizer-model", tokenizer, "--save", run_folder, "--load", run_folder, "--device", "cpu",
    )  # fmt: skip
    given = run(
        "-m", "megatrain.tools.main", "generate", "--load", run_folder, "--prompt-file", tmp_path / "questions.jsonl",
        "--json", "--temperature", 0, "--max-new-tokens", 16, "--device", "cpu",
    )  # fmt: skip
    assert "answers are right" in run(SHAPES, tmp_path, "--score", "--at-least", 0.95, given=given)
