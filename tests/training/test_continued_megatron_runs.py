"""Runs of Megatron-LM continue here: its recorded checkpoints, loaded or converted, give the recorded iterations 9 to 12."""

import json
import shutil
from pathlib import Path

import pytest
from everyday import only
from megatron_torch_files import write_torch_files
from metrics_files import logged_steps
from test_golden_training import Bounds, compare, recordings, tf32_routers  # noqa: F401 (fixtures)

from megatrain.checkpoint.errors import MismatchError
from megatrain.config import parse
from megatrain.config.errors import NoCheckpointError
from megatrain.tools.main import main
from megatrain.training.launch.ranks import joined_ranks
from megatrain.training.logging.console import Console, Phases
from megatrain.training.trainer import Trainer

CASES = {
    "dsv3": Bounds(5e-7, 4e-6),
    "gpt2": Bounds(5e-7, 5e-7),
    "llama": Bounds(5e-7, 5e-7),
    "mixtral": Bounds(5e-7, 5e-7),
    "qwen3moe": Bounds(5e-7, 4e-6),
    "mtp": Bounds(5e-7, 4e-6),
}
"""Measured: losses 6e-8, norms 1.4e-7; `qwen3moe` 1.3e-6, see `test_golden_training.py`; `mtp` 9e-8 and 1.2e-6."""


CONVERTED = [case if case == "mtp" else pytest.param(case, marks=pytest.mark.nightly) for case in CASES]


@pytest.mark.parametrize("case", only(("dsv3", "gpt2", "mtp"), CASES))
@pytest.mark.usefixtures("tf32_routers")
def test_a_run_continues_with_the_recorded_digits(
    case: str,
    recordings: Path,  # noqa: F811 (the fixture)
    tmp_path: Path,
) -> None:
    continue_run(case, recordings, recordings / f"{case}.ckpt", tmp_path / "metrics.jsonl")


@pytest.mark.parametrize("case", CONVERTED)
@pytest.mark.usefixtures("tf32_routers")
def test_a_converted_run_continues_with_the_recorded_digits(
    case: str,
    recordings: Path,  # noqa: F811 (the fixture)
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    source, target = str(recordings / f"{case}.ckpt"), tmp_path / "run"
    assert main(["convert", "megatron-to-megatrain", source, str(target), "--vocab-size", "3072"]) == 0
    assert "iteration 8, 32 samples consumed" in capsys.readouterr().out
    continue_run(case, recordings, target, tmp_path / "metrics.jsonl")


def test_a_folder_with_checkpoints_of_both_programs_resumes_from_the_newest(
    recordings: Path,  # noqa: F811 (the fixture)
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """--save equals --load: checkpoints of Megatron-LM stay, also with --keep-last, and ours are newer."""
    run, metrics = tmp_path / "run", tmp_path / "metrics.jsonl"
    shutil.copytree(recordings / "llama.ckpt", run)
    theirs = {path.name: path.read_bytes() for path in (run / "iter_0000008").iterdir()}
    flags = f"--save {run} --keep-last 2 --save-interval 1 --exit-interval 11".split()
    train("llama", recordings, run, metrics, *flags, expected=75)
    text = " ".join(capsys.readouterr().out.split())
    assert "iter_0000008 is a checkpoint of Megatron-LM" in text
    assert "they stay, those of this run are added in megatrain's format" in text
    assert sorted(path.name for path in run.glob("iter_*")) == [
        "iter_0000008",
        "iter_0000010",
        "iter_0000011",
    ]
    assert {path.name: path.read_bytes() for path in (run / "iter_0000008").iterdir()} == theirs
    train("llama", recordings, run, metrics, "--save", str(run))
    assert f"loaded {run}/iter_0000011: iteration 11" in capsys.readouterr().out
    compare_resumed("llama", recordings, metrics)


def test_a_run_starts_from_the_weights_of_megatron(
    recordings: Path,  # noqa: F811 (the fixture)
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """--finetune, --ckpt-step, --no-load-optim, --use-checkpoint-args mean what they mean with checkpoints of megatrain."""
    load, metrics = recordings / "llama.ckpt", tmp_path / "metrics.jsonl"
    train("llama", recordings, load, metrics, "--finetune", "--train-iters", "1")
    (line,) = logged_steps(metrics)
    assert (line["iteration"], line["consumed_samples"]) == (1, 4)
    assert line["lm_loss"] < 7.98  # a new model has 8.03
    train(
        "llama",
        recordings,
        load,
        metrics,
        *"--ckpt-step 8 --no-load-optim --no-load-rng --train-iters 9".split(),
    )
    assert logged_steps(metrics)[-1]["iteration"] == 9
    assert logged_steps(metrics)[-1]["lm_loss"] == pytest.approx(7.974405765533447, rel=5e-7)
    with pytest.raises(NoCheckpointError, match=r"iter_0000007 is not.* iterations 8\n"):
        train("llama", recordings, load, metrics, "--ckpt-step", "7")
    capsys.readouterr()
    data = f"--data-path {recordings.parent / 'data/corpus_text_document'} --split 900,50,50 --micro-batch-size 2"
    taken = "--use-checkpoint-args --tokenizer-type NullTokenizer --vocab-size 3072 --global-batch-size 4 --eval-iters 0"
    rest = "--lr 2e-3 --no-load-optim --train-iters 9 --attention-dropout 0 --hidden-dropout 0 --device cpu --lr-decay-iters 20"
    words = f"{data} {taken} {rest} --load {load} --metrics-file {metrics} --eval-interval 1000".split()
    assert run_flags(words) == 0
    assert logged_steps(metrics)[-1]["lm_loss"] == pytest.approx(7.974405765533447, rel=5e-7)


FORMAT_TORCH = [
    ("mixtral", {"tp": 2, "ep": 2}),
    *(pytest.param(case, sizes, marks=pytest.mark.nightly) for case, sizes in [
        ("llama", {"tp": 2, "pp": 3}), ("gpt2", {"tp": 4}), ("gpt2", {"pp": 3}), ("llama", {}), ("mixtral", {"pp": 3, "ep": 2}), ("qwen3moe", {"ep": 2}),
    ]),
]  # fmt: skip


@pytest.mark.parametrize(("case", "sizes"), FORMAT_TORCH)
@pytest.mark.usefixtures("tf32_routers")
def test_files_of_the_format_torch_continue_with_the_recorded_digits(
    case: str,
    sizes: dict[str, int],
    recordings: Path,  # noqa: F811 (the fixture)
    tmp_path: Path,
) -> None:
    load = write_torch_files(recordings / f"{case}.ckpt", tmp_path / "theirs", **sizes)
    with pytest.raises(MismatchError, match="--allow-pickle"):
        train(case, recordings, load, tmp_path / "none")
    metrics = tmp_path / "metrics.jsonl"
    train(case, recordings, load, metrics, "--allow-pickle")
    compare_resumed(case, recordings, metrics)


def continue_run(case: str, recordings: Path, load: Path, metrics: Path) -> None:  # noqa: F811
    """Train from iteration 8 to 12, and compare with the recording."""
    train(case, recordings, load, metrics)
    compare_resumed(case, recordings, metrics)


def compare_resumed(case: str, recordings: Path, metrics: Path) -> None:  # noqa: F811
    recorded = json.loads((recordings / f"{case}.resumed.json").read_text())
    compare(logged_steps(metrics), recorded, CASES[case])


def train(
    case: str,
    recordings: Path,  # noqa: F811
    load: Path,
    metrics: Path,
    *more_flags: str,
    expected: int = 0,
) -> None:
    recorded = json.loads((recordings / "flags.json").read_text())[case]
    flags = [flag.format(corpus=recordings.parent / "data/corpus_text_document") for flag in recorded]
    flags += f"--train-iters 12 --device cpu --vocab-size 3072 --load {load} --metrics-file {metrics}".split()
    assert run_flags([*flags, *more_flags]) == expected


def run_flags(flags: list[str]) -> int:
    with joined_ranks(parse(flags), Phases(Console())) as ranks:
        trainer = Trainer(ranks)
        trainer.resume()
        return trainer.train()
