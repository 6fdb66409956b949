"""Time the initialization of a model of about a billion parameters, and measure its scratch memory."""

from __future__ import annotations

import resource
import time

import torch

from megatrain.config import Facts, parse, resolve
from megatrain.optim.sharded import fill_weights
from megatrain.parallel.allocate_buffers import allocate_buffers
from megatrain.parallel.build_grid import build_grid
from megatrain.parallel.initialize import InitialWeights
from megatrain.parallel.rank_lists import GridShape
from megatrain.training.build import build_model_from_plan

FLAGS = (
    "--num-layers 18 --hidden-size 2048 --num-attention-heads 16 --group-query-attention --num-query-groups 8 "
    "--ffn-hidden-size 5632 --normalization RMSNorm --swiglu --position-embedding-type rope --disable-bias-linear "
    "--hidden-dropout 0 --attention-dropout 0 --seq-length 2048 --mock-data --tokenizer-type NullTokenizer "
    "--vocab-size 32768 --micro-batch-size 1 --train-iters 1 --lr 1e-3 --bf16 --untie-embeddings-and-output-weights"
)


def main() -> None:
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    plan = resolve(parse(FLAGS.split()), Facts(vocab_size=32768, eod_id=0, device=device.type))
    grid = build_grid(GridShape(), 0)
    model = build_model_from_plan(plan, grid, device)
    buffers = allocate_buffers(
        model.registry,
        grid=grid,
        weight_dtype=torch.bfloat16,
        device=device,
    )
    torch._foreach_add_(buffers.weights.full, 1.0)  # touch every page before the clock starts
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    began = time.perf_counter()
    fill_weights(buffers, InitialWeights(1))
    if device.type == "cuda":
        torch.cuda.synchronize()
    seconds = time.perf_counter() - began
    scratch = (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) / 1024
    count = sum(flat.numel() for flat in buffers.weights.full)
    print(
        f"{count / 1e9:.3f} billion parameters in {seconds:.1f} s ({count / seconds / 1e6:.0f} million per second), "
        f"{scratch:.0f} MiB of scratch host memory, on {device.type} with {torch.get_num_threads()} threads"
    )


if __name__ == "__main__":
    main()
