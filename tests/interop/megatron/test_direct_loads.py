"""Folders with checkpoints of Megatron-LM as --load and --save: starts, restarts, refusals; theirs are never lost."""

import shutil
from pathlib import Path

import pytest
from megatron_folders import weights, write

import pretrain

RUN = (
    "--use-checkpoint-args --mock-data --micro-batch-size 1 --global-batch-size 2 --lr 1e-3 --bf16 --eval-iters 0"
    " --hidden-dropout 0 --attention-dropout 0 --device cpu --override-opt-param-scheduler"
).split()


def run(*flags: str) -> int:
    return pretrain.main([*RUN, *flags])


def test_a_damaged_one_is_skipped_and_kept(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The run reaches the iteration of a damaged checkpoint of Megatron-LM: ours takes its name, and theirs stays."""
    first = write(tmp_path, weights())
    shutil.copytree(first, tmp_path / "iter_0000004")
    data = (tmp_path / "iter_0000004" / "__0_0.distcp").read_bytes()
    (tmp_path / "iter_0000004" / "__0_0.distcp").write_bytes(data[:-1000])
    folder = str(tmp_path)
    assert run("--load", folder, "--save", folder, "--train-iters", "4") == 0
    printed = capsys.readouterr().out
    assert "skipped iteration 4: " in printed
    assert f"loaded {first}: iteration 3, 6 samples consumed" in printed
    assert "2 rows of padding are left out" in printed
    names = sorted(path.name.partition("-")[0] for path in tmp_path.glob("iter_*"))
    assert names == ["iter_0000003", "iter_0000004", "iter_0000004.megatron"]
    assert run("--load", folder, "--save", folder, "--train-iters", "5") == 0
    assert f"loaded {tmp_path}/iter_0000004: iteration 4" in capsys.readouterr().out


def test_release_starts_a_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write(tmp_path, weights()).rename(tmp_path / "release")
    (tmp_path / "latest_checkpointed_iteration.txt").write_text("release")
    ours = str(tmp_path / "ours")
    flags = ("--pretrained-checkpoint", str(tmp_path), "--load", ours, "--save", ours, "--train-iters", "1")
    assert run(*flags) == 0
    assert f"loaded the weights of {tmp_path}/release" in capsys.readouterr().out
    assert run("--load", str(tmp_path), "--train-iters", "1") == 0
    assert f"loaded the weights of {tmp_path}/release" in capsys.readouterr().out


def test_checkpoints_that_a_run_does_not_continue_are_not_mixed(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = write(tmp_path, weights())
    folder = str(tmp_path)
    model = "--num-layers 2 --hidden-size 8 --num-attention-heads 2 --mock-data --vocab-size 30 --tokenizer-type NullTokenizer"
    training = (
        "--micro-batch-size 1 --global-batch-size 2 --train-iters 4 --lr 1e-3 --seq-length 16 --device cpu"
    )
    assert pretrain.main([*f"{model} {training}".split(), "--save", folder]) == 2
    assert "has checkpoints up to iteration 3, which this run does not continue" in capsys.readouterr().err
    shutil.copytree(path, tmp_path / "iter_0000004")
    assert run("--load", folder, "--save", folder, "--ckpt-step", "3", "--train-iters", "5") == 2
    assert "--save" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("file", "words"), [("__0_0.distcp", "No such file"), (".metadata", "no valid checkpoint")]
)
def test_a_missing_file_ends_the_start(
    file: str, words: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (write(tmp_path, weights()) / file).unlink()
    assert run("--load", str(tmp_path), "--train-iters", "4") == 3
    assert words in capsys.readouterr().err
