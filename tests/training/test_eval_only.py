"""`--eval-only` repeats the last evaluation of a checkpoint, with its own settings and data, to the last bit."""

from pathlib import Path

import numpy as np
import pytest
from metrics_files import logged_lines
from run_helpers import command_line

import pretrain
from megatrain.data.indexed.writer import IndexedWriter


def losses(file: Path) -> dict[tuple[int, str], float]:
    """Return loss by iteration and validation set."""
    lines = logged_lines(file)
    return {(line["iteration"], line["validation"]): line["loss"] for line in lines if "validation" in line}


def evaluate(load: Path, *more: str) -> dict[tuple[int, str], float]:
    file = load.parent.parent / "again.jsonl"
    file.unlink(missing_ok=True)
    assert (
        pretrain.main(
            ["--eval-only", "--load", str(load), "--metrics-file", str(file), "--device", "cpu", *more]
        )
        == 0
    )
    return losses(file)


def test_an_evaluation_of_a_checkpoint_has_the_losses_of_the_run(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    random = np.random.default_rng(0)
    for name in ("a", "b"):
        with IndexedWriter(tmp_path / name, "uint16") as writer:
            for _ in range(100):
                writer.add_document([[*random.integers(0, 99, random.integers(2, 40)), 99]])
    common = {
        "--micro-batch-size": "4", "--train-iters": "4", "--eval-interval": "2", "--eval-iters": "2", "--save-interval": "2", "--seed": "7",
        "--tokenizer-type": "NullTokenizer", "--vocab-size": "100", "--mock-data": None, "--lr-decay-iters": "100",
    }  # fmt: skip
    runs = {
        "part": {
            "--data-path": str(tmp_path / "a"), "--split": "80,10,10",
            "--bf16": "", "--fp8-format": "hybrid", "--fp8-amax-history-len": "2",
        },
        "sets": {
            "--train-data-path": str(tmp_path / "a"), "--valid-data-path": f"{tmp_path}/a {tmp_path}/b",
            "--full-validation": "", "--multiple-validation-sets": "",
        },
    }  # fmt: skip
    for name, data in runs.items():
        folder = {"--save": str(tmp_path / name), "--load": str(tmp_path / name)}
        words = [word for part in command_line({**common, **data, **folder}) for word in part.split()]
        assert pretrain.main(words) == 0
        of_run = losses(tmp_path / name / "metrics.jsonl")
        capsys.readouterr()
        found = evaluate(tmp_path / name / "iter_0000004")
        assert "evaluated only (exit code 0)" in capsys.readouterr().out
        expected = {key: loss for key, loss in of_run.items() if key[0] == 4}
        assert expected.keys() == {(4, one) for one in {"part": ("valid", "test"), "sets": ("a", "b")}[name]}
        assert found == expected
    untouched = {path: path.read_bytes() for path in (tmp_path / "part").glob("*") if path.is_file()}
    saving = ["--save", str(tmp_path / "part")]
    assert evaluate(tmp_path / "part" / "iter_0000004", *saving).keys() == {(4, "valid"), (4, "test")}
    assert {path: path.read_bytes() for path in untouched} == untouched
    words = ["--eval-only", "--load", str(tmp_path / "part"), "--eval-iters", "0", "--device", "cpu"]
    assert pretrain.main(words) == 2
    assert "--eval-iters 0 evaluates nothing" in capsys.readouterr().err
    missing = ["--eval-only", "--load", str(tmp_path / "none"), "--save", str(tmp_path / "none")]
    assert pretrain.main([*command_line({}), *missing, "--eval-iters", "1"]) == 3
    assert not (tmp_path / "none").exists()
    other = evaluate(
        tmp_path / "part" / "iter_0000002", "--data-path", str(tmp_path / "b"), "--split", "0,100,0"
    )
    of_run = losses(tmp_path / "part" / "metrics.jsonl")
    assert other[2, "valid"] != of_run[2, "valid"] != of_run[4, "valid"]
