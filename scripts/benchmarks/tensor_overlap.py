"""Time a column-parallel layer, forward and backward, with communication overlapped with matrix products and before them.

    python -m torch.distributed.run --nproc-per-node 2 scripts/benchmarks/tensor_overlap.py       one process per GPU

The overlap depends on CUDA_DEVICE_MAX_CONNECTIONS, which CUDA reads when it starts: with 1, communication kernels run first.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch import Tensor

from megatrain.parallel import tensor_parallel
from megatrain.parallel.batch import PassInfo
from megatrain.parallel.build_grid import build_grid
from megatrain.parallel.collectives import Transfer
from megatrain.parallel.process_groups import make_group
from megatrain.parallel.rank_lists import GridShape

SHAPES = ((4096, 4096, 6144), (8192, 4096, 14336), (8192, 8192, 8192))
"""Tokens, input features and output features of the whole layer."""
BEGINNINGS = ("begin_all_gather_into", "begin_all_reduce", "begin_reduce_scatter_into")
WARM_UP, REPEATS = 10, 50


def main() -> None:
    rank, world_size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
    torch.cuda.set_device(device)
    dist.init_process_group("nccl", device_id=device)
    grid = build_grid(GridShape(tp=world_size), rank, make_group)
    if rank == 0:
        print(f"{world_size} ranks; ms per layer, forward and backward; medians of three")
    for sequence_parallel in (True, False):
        tp = tensor_parallel.TensorParallel(grid.tp, grid.kv, sequence_parallel)
        for tokens, inputs, outputs in SHAPES:
            run = layer(tp, tokens, inputs, outputs // world_size, device)
            overlapped, before = [], []
            for _ in range(3):
                overlapped.append(milliseconds(run))
                with mock.patch.multiple(
                    tensor_parallel, **{name: blocking(getattr(tensor_parallel, name)) for name in BEGINNINGS}
                ):
                    before.append(milliseconds(run))
            if rank == 0:
                words = "sp" if sequence_parallel else "no sp"
                print(
                    f"{tokens} x {inputs} -> {outputs}, {words}: overlapped {sorted(overlapped)[1]:.3f}, communication first {sorted(before)[1]:.3f}"
                )
    dist.destroy_process_group()


def layer(
    tp: tensor_parallel.TensorParallel, tokens: int, inputs: int, local_outputs: int, device: torch.device
) -> Callable[[], None]:
    """Return a function that runs one forward and backward pass of a column-parallel layer."""

    def random(*shape: int) -> Tensor:
        return torch.randn(*shape, device=device, dtype=torch.bfloat16)

    x = random(tp.sequence_rows(tokens), 1, inputs).requires_grad_()
    weight, dy = random(local_outputs, inputs).requires_grad_(), random(tokens, 1, local_outputs)
    weight_grad = torch.zeros(local_outputs, inputs, device=device)

    def run() -> None:
        x.grad = None
        tensor_parallel.column_linear(x, weight, weight_grad, tp, PassInfo()).backward(dy)

    return run


def blocking(begin: Callable[..., Transfer]) -> Callable[..., Transfer]:
    """Return the collective `begin` made blocking."""

    def begin_and_wait(*arguments: Any) -> Transfer:
        begin(*arguments).wait()
        return Transfer()

    return begin_and_wait


def milliseconds(run: Callable[[], None]) -> float:
    """Return the GPU time per run. Filler kernels run first, so that the launches of the host are not measured."""
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    filler = torch.randn(16384, 16384, device="cuda", dtype=torch.bfloat16)
    for _ in range(12):
        filler @ filler
    for number in range(WARM_UP + REPEATS):
        if number == WARM_UP:
            start.record()
        run()
    end.record()
    torch.cuda.synchronize()
    return start.elapsed_time(end) / REPEATS


if __name__ == "__main__":
    main()
