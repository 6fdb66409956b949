"""On four GPUs with NCCL: after a run of any layout, all processes end at once, and not by the deadline of their exit."""

import os
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

from megatrain.config.schema.pipeline_schedules import PIPELINE_SCHEDULES, flags_of_schedule

pytestmark = pytest.mark.skipif(torch.cuda.device_count() < 4, reason="needs four GPUs")
ROOT = Path(__file__).resolve().parents[2]
FLAGS = (
    "--num-layers 8 --hidden-size 128 --num-attention-heads 4 --ffn-hidden-size 384 --normalization RMSNorm --swiglu"
    " --position-embedding-type rope --disable-bias-linear --hidden-dropout 0 --attention-dropout 0 --seq-length 64"
    " --mock-data --tokenizer-type NullTokenizer --vocab-size 101 --micro-batch-size 1 --global-batch-size 16 --bf16"
    " --train-iters 2 --eval-iters 0 --lr 1e-3 --log-interval 1"
)
EXPERTS = "--num-experts 4 --moe-router-topk 2 --expert-model-parallel-size 4"
STAGES = "--pipeline-model-parallel-size"
LAYOUTS = {
    **{name: f"{STAGES} 4 {flags_of_schedule(name)}" for name in PIPELINE_SCHEDULES},
    "pp2 tp2": f"{STAGES} 2 --tensor-model-parallel-size 2 --sequence-parallel",
    "pp2 dp2": f"{STAGES} 2",
    "ep4": EXPERTS,
    "ep4 graphs": f"{EXPERTS} --moe-token-dispatcher-type allgather --cuda-graph-impl local",
    "cp4": "--context-parallel-size 4",
}
SECONDS = 10
"""Longest time from the line `ended` to the end of the last process."""


@pytest.mark.parametrize("layout", LAYOUTS)
def test_all_processes_end_at_once_after_a_run(layout: str, tmp_path: Path) -> None:
    with socket.socket() as free:
        free.bind(("localhost", 0))
        port = str(free.getsockname()[1])
    outputs, ranks = [tmp_path / f"{rank}.log" for rank in range(4)], []
    for rank, output in enumerate(outputs):
        launch = {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": "4", "LOCAL_WORLD_SIZE": "4"}
        launch |= {"MASTER_ADDR": "localhost", "MASTER_PORT": port, "PYTHONPATH": str(ROOT)}
        words = [sys.executable, "-u", "pretrain.py", *FLAGS.split(), *LAYOUTS[layout].split()]
        with output.open("w") as file:
            ranks.append(
                subprocess.Popen(
                    words, cwd=ROOT, env=os.environ | launch, stdout=file, stderr=subprocess.STDOUT
                )
            )
    try:
        until = time.monotonic() + 150
        while "> ended at" not in outputs[0].read_text():
            assert all(rank.poll() in (None, 0) for rank in ranks), [
                output.read_text()[-3000:] for output in outputs
            ]
            assert time.monotonic() < until, outputs[0].read_text()
            time.sleep(0.02)
        logged = time.monotonic()
        codes = [rank.wait(60) for rank in ranks]
        took = time.monotonic() - logged
    finally:
        for rank in ranks:
            rank.kill()
            rank.wait()
    print(f"{layout}: all processes gone {took:.1f} s after the end of the run")
    assert codes == [0, 0, 0, 0]
    assert took < SECONDS, [output.read_text()[-1000:] for output in outputs]
