"""`--ema-decay` in a run: resumed, evaluated and averaged over checkpoints; `megatrain checkpoint average`."""

from pathlib import Path

import pytest
import torch
from canonical_weights import hash_tensors
from metrics_files import logged_lines

import pretrain
from megatrain.checkpoint.reader import CheckpointReader
from megatrain.tools.main import main

RUN = (
    "--num-layers 1 --hidden-size 32 --num-attention-heads 4 --swiglu --position-embedding-type rope --hidden-dropout 0 --seq-length 16"
    " --attention-dropout 0 --mock-data --tokenizer-type NullTokenizer --vocab-size 101 --micro-batch-size 1 --device cpu --lr 1e-2"
    " --train-iters 3 --save-interval 1"
).split()
AVERAGED = [*RUN, *"--ema-decay 0.5 --eval-with-ema --eval-iters 1".split()]
WEIGHT = "decoder.layers.0.mlp.up.weight"


def values(folder: Path, kind: str, name: str = WEIGHT) -> torch.Tensor:
    with CheckpointReader(folder) as reader:
        shape = reader.manifest.tensors[name].shape
        return reader.values(name, shape, kind=kind, dtype=torch.float64)


def losses(folder: Path, split: str = "test") -> list[float]:
    return [line["loss"] for line in logged_lines(folder) if line.get("validation") == split]


@pytest.fixture(scope="module")
def run_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run with an average and checkpoints of iterations 1 to 3."""
    folder = tmp_path_factory.mktemp("averaged")
    assert pretrain.main([*AVERAGED, "--save", str(folder)]) == 0
    return folder


def test_an_average_is_resumed_to_the_bit(run_folder: Path, tmp_path: Path) -> None:
    weights = [values(run_folder / f"iter_000000{step}", "weight") for step in (1, 2, 3)]
    expected = weights[0].lerp(weights[1], 0.5).lerp(weights[2], 0.5)
    torch.testing.assert_close(values(run_folder / "iter_0000003", "ema"), expected, rtol=1e-6, atol=1e-8)
    words = ["--load", str(run_folder / "iter_0000001"), "--save", str(tmp_path)]
    assert pretrain.main([*AVERAGED, *words]) == 0
    assert hash_tensors(tmp_path / "iter_0000003") == hash_tensors(run_folder / "iter_0000003")
    assert losses(tmp_path) == losses(run_folder)


def test_the_average_is_what_is_evaluated(run_folder: Path, tmp_path: Path) -> None:
    """The weights of the run do not depend on its evaluations; those written by `average --ema` have the loss of the run."""
    target = tmp_path / "target"
    assert main(["checkpoint", "average", "--ema", str(run_folder), str(target)]) == 0
    found = {}
    weights = run_folder / "iter_0000003"
    assert pretrain.main(["--eval-only", "--load", str(weights), "--device", "cpu"]) == 2
    for name, load, *more in (("ema", target), ("weights", weights, "--no-eval-with-ema")):
        flags = ["--eval-only", "--load", str(load), "--device", "cpu", *more]
        assert pretrain.main([*flags, "--metrics-file", str(tmp_path / name / "metrics.jsonl")]) == 0
        found[name] = losses(tmp_path / name)
    assert found["ema"] == losses(run_folder) != found["weights"]


def test_checkpoints_are_averaged(
    run_folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folders = [run_folder / f"iter_000000{step}" for step in (2, 3)]
    for target, words in (("a", ["--last", "2", str(run_folder)]), ("b", [str(path) for path in folders])):
        assert main(["checkpoint", "average", *words, str(tmp_path / target)]) == 0
        expected = sum(values(path, "weight") for path in folders) / 2
        found = tmp_path / target / "iter_0000003"
        assert torch.equal(values(found, "weight"), expected.float().double())
    other = tmp_path / "other"
    assert (
        pretrain.main([*RUN, *"--num-layers 2 --train-iters 1 --eval-iters 0 --save".split(), str(other)])
        == 0
    )
    capsys.readouterr()
    for words, problem in {
        (str(run_folder), str(other)): "differ in the tensor decoder.layers.1",
        ("--ema", str(other)): "has no averages of weights",
        ("--last", "4", str(run_folder)): "--last 3 or less",
    }.items():
        assert main(["checkpoint", "average", *words, str(tmp_path / "c")]) == 2
        printed = capsys.readouterr().err
        assert problem in printed
        assert "fix: " in printed
