"""`megatrain generate`: a checkpoint names no code, and one that is damaged is skipped."""

import hashlib
import json
import re
import shutil
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import pretrain
from megatrain.tools.main import main

FLAGS = (
    "--num-layers 1 --hidden-size 16 --num-attention-heads 4 --seq-length 16 --tokenizer-type NullTokenizer --vocab-size 29"
    " --mock-data --micro-batch-size 1 --train-iters 2 --lr 1e-3 --device cpu --position-embedding-type rope --save-interval 1"
    " --hidden-dropout 0 --attention-dropout 0 --eval-iters 0"
).split()
LAYERS = """
from pathlib import Path
Path({mark!r}).touch()
def layers(model, default):
    return default
"""


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Iterations 1 and 2 of a run."""
    folder = tmp_path_factory.mktemp("trained")
    assert pretrain.main([*FLAGS, "--save", str(folder)]) == 0
    return folder


@pytest.fixture
def folder(trained: Path, tmp_path: Path) -> Path:
    shutil.copytree(trained, tmp_path / "run")
    return tmp_path / "run"


def edit(
    folder: Path, change: Callable[[dict[str, Any]], Any], *, iterations: tuple[int, ...] = (1, 2)
) -> None:
    for iteration in iterations:
        file = folder / f"iter_{iteration:07d}" / "manifest.json"
        content = json.loads(file.read_text())
        del content["checksum"]
        change(content)
        text = json.dumps(content, sort_keys=True, separators=(",", ":")).encode()
        file.write_text(json.dumps(content | {"checksum": zlib.crc32(text)}))


def generate(folder: Path, *flags: str) -> int:
    return main(["generate", "--load", str(folder), "--prompt", "5 3", "--max-new-tokens", "2", *flags])


@pytest.fixture
def evil(folder: Path, tmp_path: Path) -> tuple[Path, Path]:
    """A file with custom layers that the manifests name with its right digest, and the file that shows that its code ran."""
    mark, file = tmp_path / "the code ran", tmp_path / "evil.py"
    file.write_text(LAYERS.format(mark=str(mark)))
    digest = hashlib.sha256(file.read_bytes()).hexdigest()[:16]
    edit(folder, lambda c: c["config"]["model"].update(spec=[f"{file}:layers"], spec_digest=digest))
    return file, mark


def test_code_that_a_checkpoint_names_is_not_run(
    folder: Path, evil: tuple[Path, Path], capsys: pytest.CaptureFixture[str]
) -> None:
    assert generate(folder) == 2
    assert not evil[1].exists()
    message = capsys.readouterr().err
    assert "no code is run" in message
    assert f"fix: add --spec {evil[0]}:layers" in message


def test_a_resume_and_its_plan_do_not_run_it(folder: Path, evil: tuple[Path, Path]) -> None:
    more = ["--load", str(folder), "--save", str(folder), "--train-iters", "2"]
    for flags in ([*FLAGS, *more], [*FLAGS, *more, "--use-checkpoint-args"]):
        pretrain.main(flags)
        assert not evil[1].exists()


def test_the_user_may_name_the_code_and_its_digest_is_compared(
    folder: Path, evil: tuple[Path, Path], capsys: pytest.CaptureFixture[str]
) -> None:
    assert generate(folder, "--spec", f"{evil[0]}:layers") == 0
    assert evil[1].exists()
    evil[0].write_text(evil[0].read_text() + "\n")
    evil[1].unlink()
    assert generate(folder, "--spec", f"{evil[0]}:layers") == 2
    consent = re.search(r"the file has changed[\s\S]*fix: .*(--spec-digest) (\w+)", capsys.readouterr().err)
    assert consent is not None
    assert not evil[1].exists()
    assert generate(folder, "--spec", f"{evil[0]}:layers", *consent.groups()) == 0
    assert evil[1].exists()


def test_spec_without_custom_layers_is_an_error(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert generate(folder, "--spec", "mine.py:layers") == generate(folder, "--spec-digest", "0") == 2
    assert "fix: remove --spec" in capsys.readouterr().err


@pytest.mark.parametrize(
    "change",
    [
        lambda c: c["config"]["model"].update(hidden_size=32),
        lambda c: c["config"]["model"].update(hidden_size=1 << 50),
        lambda c: c["config"]["model"].update(num_attention_heads=0),
        lambda c: c["config"]["model"].update(num_query_groups=3),
        lambda c: c["config"]["model"].update(kv_channels=-1),
        lambda c: c["config"]["model"].update(heterogeneous_layers_config_encoded_json="[" * 100_000),
        lambda c: c["state"].update(expert_biases={"a": ["\ud800"]}),
        lambda c: c["tensors"].popitem(),
    ],
    ids=range(8),
)
def test_a_newer_checkpoint_of_no_model_is_skipped(
    folder: Path, change: Callable[[dict[str, Any]], Any], capsys: pytest.CaptureFixture[str]
) -> None:
    edit(folder, change, iterations=(2,))
    assert generate(folder) == 0
    shown = capsys.readouterr().out
    assert "skipped iteration 2" in shown
    assert "iteration 1" in shown


@pytest.mark.parametrize(
    "change",
    [
        lambda c: c["config"]["model"].update(of_a_later_version=1),
        lambda c: c["config"]["model"].pop("num_layers"),
    ],
    ids=["unknown setting", "missing setting"],
)
def test_a_checkpoint_of_another_version_is_wrong_input(
    folder: Path, change: Callable[[dict[str, Any]], Any], capsys: pytest.CaptureFixture[str]
) -> None:
    edit(folder, change)
    assert generate(folder) == 2
    assert "fix: use the version" in capsys.readouterr().err


def test_with_no_intact_checkpoint_the_exit_code_is_3(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for file in folder.glob("iter_*/*.safetensors"):
        file.write_bytes(bytes(file.stat().st_size))
    assert generate(folder) == 3
    assert capsys.readouterr().err.count("skipped iteration") == 2
