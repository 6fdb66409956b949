"""Broken command lines: exit code 2, flag and remedy named, everything at once, no traceback, printed once, before
the grid is built, and without a change to the files of an earlier run."""

import os
import resource
import subprocess
import sys
from pathlib import Path

import pytest
from forked_job import ForkedJob
from run_helpers import ROOT, command_line

import pretrain

BROKEN: dict[str, tuple[dict[str, str | None], str, str]] = {
    "typo": ({"--num-layer": "4"}, "--num-layer", "--num-layers"),
    "missing value": ({"--lr": ""}, "--lr", "above 0"),
    "missing flag": ({"--hidden-size": None}, "--hidden-size", "give --hidden-size"),
    "not a number": ({"--num-layers": "four"}, "--num-layers four", "whole number"),
    "fraction": ({"--micro-batch-size": "1.5"}, "--micro-batch-size 1.5", "whole number"),
    "negative": ({"--lr": "-1"}, "--lr -1", "above 0"),
    "wrong choice": ({"--lr-decay-style": "cosin"}, "--lr-decay-style cosin", "cosine"),
    "heads do not divide": ({"--num-attention-heads": "5", "--kv-channels": "8",
                             "--group-query-attention": "", "--num-query-groups": "2"},
                            "--num-attention-heads 5", "--num-query-groups"),
    "heads over tp": ({"--tensor-model-parallel-size": "3"}, "--tensor-model-parallel-size", "3"),
    "layers over pp": ({"--pipeline-model-parallel-size": "3"}, "--pipeline-model-parallel-size", "3"),
    "world too small": ({"--tensor-model-parallel-size": "2"}, "--tensor-model-parallel-size", "torchrun"),
    "batch does not split": ({"--micro-batch-size": "3", "--global-batch-size": "8"}, "--global-batch-size 8", "9"),
    "no data": ({"--mock-data": None}, "--data-path", "--mock-data"),
    "data file missing": ({"--mock-data": None, "--data-path": "nowhere/text"}, "nowhere/text", ".idx"),
    "tokenizer missing": ({"--tokenizer-type": "HuggingFaceTokenizer", "--tokenizer-model": "nowhere.json"},
                          "nowhere.json", "tokenizer"),
    "learned positions without a table": ({"--position-embedding-type": None}, "learned_absolute",
                                          "--max-position-embeddings 16"),
    "everything dropped": ({"--hidden-dropout": "1"}, "--hidden-dropout 1", "below 1"),
    "groups without the switch": ({"--num-query-groups": "2"}, "--num-query-groups 2", "--group-query-attention"),
    "both lengths": ({"--train-samples": "8"}, "--train-samples", "--train-iters"),
    "warm-up longer than the run": ({"--lr-warmup-iters": "5"}, "--lr-warmup-iters", "shorten"),
    "Megatron-LM's yaml missing": ({"--yaml-cfg": "nowhere.yaml"}, "--yaml-cfg nowhere.yaml", "YAML"),
    "yaml missing": ({"--config": "nowhere.yaml"}, "nowhere.yaml", "YAML"),
    "a file for TensorBoard": ({"--tensorboard-dir": "pretrain.py"}, "--tensorboard-dir pretrain.py", "a folder"),
    "gpu without one": ({"--device": "cuda"}, "--device cuda", "cpu"),
    "unknown flag": ({"--xyzzy": "1"}, "--xyzzy is not a flag", "leave it out"),
    "typo of a flag that is accepted": ({"--use-mcore-modles": ""}, "--use-mcore-modles", "--use-mcore-models"),
    "feature that is not there": ({"--mtp-hsm": ""}, "--mtp-hsm", "remove the flag"),
    "feature that will never be there": ({"--retro-add-retriever": ""}, "--retro-add-retriever", "train a GPT"),
    "old name": ({"--batch-size": "4"}, "--batch-size 4", "--micro-batch-size"),
    "experts over ranks without experts": ({"--expert-model-parallel-size": "2"}, "--expert-model-parallel-size 2 requires --num-experts", "--num-experts"),
    "value of a flag that is accepted": ({"--attention-backend": "flsh"}, "--attention-backend flsh", "flash"),
    "value after a switch that is accepted": ({"--use-mcore-models": "3"}, "--use-mcore-models 3", "alone"),
    "no value after a flag that is accepted": ({"--ckpt-format": ""}, "--ckpt-format has no value", "remove it"),
    "layer spec of one's own": ({"--spec": "my.module my_spec"}, "--spec my.module:my_spec: my.module cannot be imported: ModuleNotFoundError", "PYTHONPATH"),
    "value after an opposite": ({"--no-bf16": "true"}, "--no-bf16 true", "--no-bf16 alone"),
    "word too many": ({"--num-layers": "4 5"}, "--num-layers 4 5 has 2 values", "quote"),
    "sequence beyond positions": ({"--max-position-embeddings": "8"}, "--seq-length 16", "--max-position-embeddings 16"),
    "vocabulary beyond its rows": ({"--padded-vocab-size": "100"}, "--padded-vocab-size 100", "remove --padded-vocab-size"),
    "formats contradict": ({"--bf16": "", "--params-dtype": "float32"}, "--params-dtype float32", "remove one of them"),
    "two warm-ups": ({"--lr-warmup-iters": "1", "--lr-warmup-fraction": "0.1"}, "--lr-warmup-fraction 0.1", "remove --lr-"),
    "two decays": ({"--lr-decay-iters": "2", "--lr-decay-samples": "2"}, "--lr-decay-samples 2", "remove --lr-"),
    "learning rates out of order": ({"--min-lr": "1"}, "--min-lr 1", "use --min-lr 0.001"),
    "samples below a batch": ({"--train-iters": None, "--train-samples": "2", "--global-batch-size": "4"},
                              "--train-samples 2", "--train-samples 4 or more"),
    "share of dropout above one": ({"--hidden-dropout": "10"}, "--hidden-dropout 10", "below 1"),
}  # fmt: skip


WITHOUT_A_FOLDER = ("samples below a batch",)


@pytest.fixture(scope="module")
def earlier_run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a run that was saved in the middle."""
    folder = tmp_path_factory.mktemp("earlier") / "run"
    assert pretrain.main(command_line({"--save": str(folder), "--exit-interval": "1"})) == 75
    return folder


def contents(folder: Path) -> dict[str, bytes]:
    """Return all files except the status of the last attempt."""
    files = (path for path in folder.rglob("*") if path.is_file())
    return {str(path): path.read_bytes() for path in files if path.name != "status.json"}


@pytest.mark.parametrize("name", BROKEN)
def test_a_broken_command_line_names_flag_and_remedy(
    name: str, earlier_run: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def build(*_: object) -> None:
        raise AssertionError("a grid was built")

    monkeypatch.setattr("megatrain.training.launch.ranks.build_grid", build)
    changed, flag, remedy = BROKEN[name]
    folder = {"--save": str(earlier_run), "--load": str(earlier_run)} if name not in WITHOUT_A_FOLDER else {}
    before = contents(earlier_run)
    assert pretrain.main(command_line({**folder, **changed})) == 2
    assert contents(earlier_run) == before
    captured = capsys.readouterr()
    assert flag in captured.err
    assert remedy in captured.err
    assert "fix:" in captured.err
    assert "Traceback" not in captured.err
    assert captured.out == ""


def test_all_problems_are_reported_at_once(capsys: pytest.CaptureFixture[str]) -> None:
    changed: dict[str, str | None] = {"--num-attention-heads": "5", "--min-lr": "1", "--mock-data": None}
    assert pretrain.main(command_line(changed)) == 2
    errors = capsys.readouterr().err
    assert all(word in errors for word in ("--num-attention-heads 5", "--min-lr 1", "--data-path"))


def test_what_cannot_be_parsed_is_reported_before_pytorch_is_imported(tmp_path: Path) -> None:
    """All of it at once, without the problems that follow from it, and with a record of the start."""
    changed = {"--num-layers": None, "--num-layesr": "4", "--lr": "fast", "--save": str(tmp_path)}
    code = f"import sys, pretrain; code = pretrain.main({command_line(changed)}); sys.exit(code + 90 * ('torch' in sys.modules))"
    ended = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, check=False, capture_output=True, text=True
    )
    assert ended.returncode == 2, ended.stderr
    assert ended.stderr.startswith("error: 2 problems\n")
    assert all(
        word in ended.stderr
        for word in ("--num-layesr is not a flag", "did you mean --num-layers?", "--lr fast")
    )
    assert "--lr fast" in (tmp_path / "status.json").read_text()


@pytest.mark.parametrize(
    ("words", "code", "printed"),
    [
        (["--trian-iters", "3"], 2, "did you mean --train-iters?"),
        (["--config", "bad.yaml"], 2, "bad.yaml:2: section model has no field num_layer\n  fix: did you mean num_layers?"),
        (["--help"], 0, "--tensor-model-parallel-size"),
    ],
)  # fmt: skip
def test_an_answer_without_a_run_needs_no_pytorch(
    tmp_path: Path, words: list[str], code: int, printed: str
) -> None:
    """It takes 0.3 s; PyTorch would take several."""
    (tmp_path / "bad.yaml").write_text("model:\n  num_layer: 4\n")
    program = (
        f"import sys, pretrain\ntry: code = pretrain.main({words})\nexcept SystemExit as end: code = end.code or 0\n"
        "sys.exit(code + 90 * bool({'torch', 'numpy'} & set(sys.modules)))"
    )
    before = resource.getrusage(resource.RUSAGE_CHILDREN).ru_utime
    ended = subprocess.run(
        [sys.executable, "-c", program], cwd=tmp_path, env=os.environ | {"PYTHONPATH": str(ROOT)}, check=False,
        capture_output=True, text=True,
    )  # fmt: skip
    assert ended.returncode == code, ended.stderr
    assert printed in ended.stdout + ended.stderr
    assert resource.getrusage(resource.RUSAGE_CHILDREN).ru_utime - before < 1


def test_a_missing_checkpoint_is_exit_code_3(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    assert pretrain.main(command_line({"--load": str(tmp_path / "nothing")})) == 3
    assert "--load-or-start" in capsys.readouterr().err


def test_the_first_run_of_save_and_load_in_one_folder_starts_fresh(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    same: dict[str, str | None] = {"--load": str(tmp_path / "run"), "--save": str(tmp_path / "run")}
    assert pretrain.main(command_line({**same, "--exit-on-missing-checkpoint": ""})) == 3
    assert pretrain.main(command_line(same)) == 0
    assert "starting from scratch" in capsys.readouterr().out
    assert pretrain.main(command_line({**same, "--exit-on-missing-checkpoint": ""})) == 0
    assert "was reached before" in capsys.readouterr().out


def test_of_several_ranks_one_prints_it(tmp_path: Path) -> None:
    changed, flag, remedy = BROKEN["typo"]
    job = ForkedJob(command_line(changed), 2, tmp_path)
    job.wait()
    assert job.exit_codes == {0: 2, 1: 2}
    outputs = job.output(0) + job.output(1)
    assert outputs.count("error:") == outputs.count("fix:") == 1
    assert flag in outputs
    assert remedy in outputs


@pytest.mark.nightly
@pytest.mark.parametrize("name", ["typo", "layers over pp", "data file missing"])
def test_under_torchrun_it_is_printed_once(name: str) -> None:
    changed, flag, _ = BROKEN[name]
    words = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", "pretrain.py"]
    ended = subprocess.run(  # torchrun replaces the exit code by 1
        [*words, *command_line(changed)], cwd=ROOT, check=False, capture_output=True, text=True, timeout=120
    )
    assert ended.returncode == 1  # torchrun's own code for any failure
    ours = ended.stderr.split("torch/distributed")[0]
    assert ended.stderr.count("fix:") == ours.count("fix:")
    assert ours.count("error:") == 1
    assert flag in ours
    assert 'pretrain.py", line' not in ended.stderr
    assert "exitcode  : 2" in ended.stderr
