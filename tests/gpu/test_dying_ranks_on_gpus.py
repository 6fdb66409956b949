"""On two GPUs with NCCL: a rank that dies or hangs makes the other exit within its time limit."""

import os
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from free_ports import free_port

pytestmark = pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
ROOT = Path(__file__).resolve().parents[2]
FLAGS = (
    "--num-layers 4 --hidden-size 128 --num-attention-heads 4 --ffn-hidden-size 384 --normalization RMSNorm --swiglu"
    " --position-embedding-type rope --disable-bias-linear --hidden-dropout 0 --attention-dropout 0 --seq-length 64"
    " --mock-data --tokenizer-type NullTokenizer --vocab-size 101 --micro-batch-size 2 --global-batch-size 8 --bf16"
    " --train-iters 100000 --eval-iters 0 --lr 1e-3 --log-interval 1 --tensor-model-parallel-size 2 --sequence-parallel"
)
SPOILED = """
import os, signal, sys, time
import pretrain
from megatrain.training.engine import Engine
begin, calls = Engine.begin_step, []
def spoiled(engine, *arguments, **more):
    calls.append(None)
    if len(calls) == 5 and os.environ["RANK"] == "1":
        {spoil}
    return begin(engine, *arguments, **more)
Engine.begin_step = spoiled
sys.exit(pretrain.main(sys.argv[1:]))
"""


@pytest.mark.parametrize(
    ("spoil", "code", "words"),
    [
        ("raise ValueError('planted')", 1, "ValueError: planted\n"),
        ("os.kill(os.getpid(), signal.SIGKILL)", -9, None),
        ("time.sleep(1000)", None, None),
    ],
    ids=["fails", "is-killed", "sleeps"],
)
def test_a_failed_rank_ends_the_other(
    spoil: str, code: int | None, words: str | None, tmp_path: Path
) -> None:
    port = str(free_port())
    outputs = [tmp_path / f"{rank}.log" for rank in range(2)]
    more = ["--distributed-timeout-seconds-after-init", "8"] if code is None else []
    ranks = []
    for rank, output in enumerate(outputs):
        launch = {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2"}
        launch |= {"MASTER_ADDR": "localhost", "MASTER_PORT": port, "PYTHONPATH": str(ROOT)}
        with output.open("w") as file:
            ranks.append(
                subprocess.Popen(
                    [sys.executable, "-c", SPOILED.format(spoil=spoil), *FLAGS.split(), *more],
                    cwd=ROOT,
                    env=os.environ | launch,
                    stdout=file,
                    stderr=subprocess.STDOUT,
                )
            )
    try:
        logged = _when_logged(outputs[0], ranks[0])
        ended = [rank.wait(150) for rank in ranks[: 1 if code is None else 2]]
        took = time.monotonic() - logged
    finally:
        for rank in ranks:
            rank.kill()
            rank.wait()
    texts = [output.read_text() for output in outputs]
    print(spoil, ended, f"{took:.1f} s", *texts, sep="\n")
    assert took < (120 if code is None else 30)  # NCCL's watchdog first dumps the state of each rank
    assert ended[0] not in (0, None)
    if code is not None:
        assert ended[1] == code
        later = texts[0].partition("iteration        3/")[2].splitlines()[1:]
        assert len(later) <= 3, later
    if words is not None:
        assert texts[1].endswith(words)


def _when_logged(output: Path, rank: subprocess.Popen[bytes]) -> float:
    """Return the time at which the third iteration is logged, while the fourth runs."""
    until = time.monotonic() + 120
    while "iteration        3/" not in output.read_text():
        assert rank.poll() is None or "iteration        3/" in output.read_text(), output.read_text()
        assert time.monotonic() < until, output.read_text()
        time.sleep(0.05)
    return time.monotonic()
