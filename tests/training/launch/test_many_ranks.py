"""One rank of thousands starts in seconds and with little memory."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest
from everyday import nightly
from run_helpers import ROOT

START = r"""
import re, sys, time
from pathlib import Path
began = time.process_time()
import torch
import torch.distributed as dist
from torch.testing._internal.distributed.fake_pg import FakeStore
import importlib
from megatrain.parallel.build_grid import build_grid
from megatrain.config import Facts, parse, resolve
from megatrain.parallel.grid import RankGrid
from megatrain.parallel.process_groups import make_group
from megatrain.training.engine import Engine
from megatrain.training.launch.ranks import grid_shape

flags = '''
    --group-query-attention --num-query-groups 8 --normalization RMSNorm --swiglu --position-embedding-type rope
    --disable-bias-linear --untie-embeddings-and-output-weights --hidden-dropout 0 --attention-dropout 0
    --seq-length 8192 --tokenizer-type NullTokenizer --vocab-size 128256 --mock-data --micro-batch-size 1
    --global-batch-size 2048 --train-iters 10 --lr 1e-4 --bf16 --device cuda --pipeline-model-parallel-size 2
    --sequence-parallel
''' + sys.argv[1]
resolving = importlib.import_module("megatrain.config.resolve")
resolving.RULES = [rule for rule in resolving.RULES if not rule.name.endswith("_proven")]  # sizes count here
rank, world = 4095, 4096
dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=world)
plan = resolve(parse(flags.split()), Facts(world_size=world, device="cuda", vocab_size=128256, eod_id=0))
def make(name, rank_lists):
    return None if name == "messages" else make_group(name, rank_lists)  # gloo's, which has no fake

engine = Engine(plan, build_grid(grid_shape(plan), rank, make), torch.device("meta"))
whole = {
    piece.name: piece.shape for entry in engine.model.registry.entries.values() for piece in entry.layout.pieces
}
seconds = time.process_time() - began
peak = re.search(r"VmHWM:\s+(\d+) kB", Path("/proc/self/status").read_text())  # ru_maxrss would count the parent's too
print(len(whole), engine.grid.expert_replicas.size, seconds, int(peak[1]) * 1024)
"""


OF_405_BILLION = """
    --num-layers 126 --hidden-size 16384 --ffn-hidden-size 53248 --num-attention-heads 128
    --tensor-model-parallel-size 8
"""
OF_256_EXPERTS = """
    --num-layers 64 --hidden-size 7168 --ffn-hidden-size 18432 --num-attention-heads 64 --kv-channels 128
    --num-experts 256 --moe-router-topk 8 --moe-ffn-hidden-size 2048 --moe-layer-freq ([0]*3+[1]*61)
    --moe-token-dispatcher-type alltoall --tensor-model-parallel-size 4 --expert-model-parallel-size 64
    --expert-tensor-parallel-size 1
"""


@pytest.mark.parametrize(("model", "num_tensors", "num_replicas"), [
    nightly(OF_405_BILLION, 63 * 9 + 2, 256),  # half of the layers, the last norm and the output weight
    (OF_256_EXPERTS, 31 * (7 + 4 * 3) + 2, 32),  # with 4 experts each, one layer less than others for the head
])  # fmt: skip
def test_a_rank_of_4096_of_a_large_model_starts_in_seconds(
    model: str, num_tensors: int, num_replicas: int
) -> None:
    ended = subprocess.run(
        [sys.executable, "-c", START, model],
        check=True, cwd=ROOT, env={**os.environ, "PYTHONPATH": str(ROOT)}, capture_output=True, text=True, timeout=120,
    )  # fmt: skip
    tensors, replicas, seconds, num_bytes = map(float, ended.stdout.split())
    assert (tensors, replicas) == (num_tensors, num_replicas)
    assert seconds < 10
    assert num_bytes < 2e9
