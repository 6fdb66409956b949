"""Files of a run on a GPU other than checkpoints: a truncated profile, and Triton's cache."""

from pathlib import Path
from typing import Any

import pytest
import torch

import pretrain
from megatrain.tools.main import main
from megatrain.training.engine import Engine

FLAGS = (
    "--num-layers 2 --hidden-size 128 --num-attention-heads 4 --ffn-hidden-size 384 --normalization RMSNorm --swiglu "
    "--position-embedding-type rope --disable-bias-linear --hidden-dropout 0 --attention-dropout 0 --seq-length 24 "
    "--mock-data --tokenizer-type NullTokenizer --vocab-size 101 --micro-batch-size 2 --train-iters 8 --lr 1e-3 "
    "--eval-iters 0 --profile --profile-step-start 2 --profile-step-end 6 --profile-dir"
)

pytestmark = [
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU"),
    pytest.mark.filterwarnings("ignore"),  # warnings of flash-attn-4's dependencies
]


@pytest.mark.parametrize("fails", [False, True])
def test_a_truncated_profile_has_its_table(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, *, fails: bool
) -> None:
    begin, calls = Engine.begin_step, []

    def failing(self: Engine, *arguments: Any, **more: Any) -> Any:
        calls.append(None)
        if fails and len(calls) == 5:
            torch.empty(2**50, device="cuda")
        return begin(self, *arguments, **more)

    monkeypatch.setattr(Engine, "begin_step", failing)
    command = [*FLAGS.split(), str(tmp_path), *([] if fails else ["--exit-interval", "4"])]
    command += ["--record-memory-history", "--memory-snapshot-path", str(tmp_path / "memory.pickle")]
    assert pretrain.main(command) == (1 if fails else 75)
    assert (tmp_path / "memory.pickle").stat().st_size > 10_000
    printed = capsys.readouterr().out
    reason, last = ("OutOfMemoryError", 5) if fails else ("--exit-interval 4", 4)
    (line,) = [line for line in printed.splitlines() if "profiling" in line and reason in line]
    assert f"iterations 3 to {last} instead of 6" in line
    assert line.endswith(f"{tmp_path}/rank0.json.gz")
    assert main(["trace", str(tmp_path / "rank0.json.gz")]) == 0
    table = capsys.readouterr().out
    assert "optimizer" in table
    assert table in printed


def test_a_run_without_a_triton_cache_folder_does_not_start(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path / "file" / "cache"))
    assert pretrain.main([*FLAGS.split(), str(tmp_path)]) == 2
    printed = capsys.readouterr().err
    assert f"'{tmp_path}/file/cache'" in printed
    assert "fix: set TRITON_CACHE_DIR" in printed
