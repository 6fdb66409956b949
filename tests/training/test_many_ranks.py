"""What one rank of thousands does before its first step takes seconds and little memory."""

from __future__ import annotations

import os
import subprocess
import sys

from test_broken_command_lines import ROOT

START = """
import resource, sys, time
began = time.process_time()
import torch
import torch.distributed as dist
from torch.testing._internal.distributed.fake_pg import FakeStore
from megatrain.config import Facts, parse, resolve
from megatrain.parallel.grid import RankGrid
from megatrain.parallel.groups import make_group
from megatrain.training.engine import Engine
from megatrain.training.launch import grid_shape

flags = '''
    --num-layers 126 --hidden-size 16384 --ffn-hidden-size 53248 --num-attention-heads 128
    --group-query-attention --num-query-groups 8 --normalization RMSNorm --swiglu --position-embedding-type rope
    --disable-bias-linear --untie-embeddings-and-output-weights --hidden-dropout 0 --attention-dropout 0
    --seq-length 8192 --tokenizer-type NullTokenizer --vocab-size 128256 --mock-data --micro-batch-size 1
    --global-batch-size 2048 --train-iters 10 --lr 1e-4 --bf16 --device cuda --tensor-model-parallel-size 8
    --pipeline-model-parallel-size 2 --sequence-parallel
'''
rank, world = 4095, 4096
dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=world)
plan = resolve(parse(flags.split()), Facts(world_size=world, device="cuda", vocab_size=128256, eod_id=0))
def make(name, rank_lists):
    return None if name == "messages" else make_group(name, rank_lists)  # gloo's, which has no fake

engine = Engine(plan, RankGrid.build(grid_shape(plan), rank, make), torch.device("meta"))
whole = {
    piece.name: piece.shape for entry in engine.model.registry.entries.values() for piece in entry.layout.pieces
}
seconds = time.process_time() - began
print(len(whole), engine.grid.dp.size, seconds, resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024)
"""


def test_a_rank_of_4096_of_a_model_of_405_billion_starts_in_seconds() -> None:
    ended = subprocess.run(
        [sys.executable, "-c", START],
        check=True, cwd=ROOT, env={**os.environ, "PYTHONPATH": str(ROOT)}, capture_output=True, text=True, timeout=120,
    )  # fmt: skip
    tensors, dp_size, seconds, num_bytes = map(float, ended.stdout.split())
    assert tensors == 63 * 9 + 2  # half of the layers, the last norm and the output weight
    assert dp_size == 256
    assert seconds < 10
    assert num_bytes < 2e9
