"""What a run on a GPU leaves behind beside checkpoints: a profile that is cut short, and Triton's kernels."""

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
    pytest.mark.filterwarnings("ignore"),  # of flash-attn-4's libraries, where it is installed
]


@pytest.mark.parametrize("fails", [False, True])
def test_a_profile_that_is_cut_short_has_its_table(
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
    assert pretrain.main(command) == (1 if fails else 75)
    said = capsys.readouterr().out
    reason, last = ("OutOfMemoryError", 5) if fails else ("--exit-interval 4", 4)
    told = f"> profiling was cut short ({reason}), iterations 3 to {last} instead of 6: {tmp_path}/rank0.json.gz\n"
    assert told in said
    assert main(["trace", str(tmp_path / "rank0.json.gz")]) == 0
    table = capsys.readouterr().out
    assert "optimizer" in table
    assert table in said


def test_a_run_without_a_place_for_tritons_kernels_does_not_start(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path / "file" / "cache"))
    assert pretrain.main([*FLAGS.split(), str(tmp_path)]) == 2
    said = capsys.readouterr().err
    assert f"error: Triton cannot keep compiled kernels in '{tmp_path}/file/cache'" in said
    assert "fix: set TRITON_CACHE_DIR" in said
