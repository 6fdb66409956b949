"""The overlapped backward pass of a column-parallel layer matches its operations in sequence, bit for bit."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from megatrain.kernels.linear import accumulate_weight_gradient
from megatrain.parallel.batch import PassInfo
from megatrain.parallel.build_grid import build_grid
from megatrain.parallel.collectives import all_gather, all_reduce, reduce_scatter
from megatrain.parallel.process_groups import make_group
from megatrain.parallel.rank_lists import GridShape
from megatrain.parallel.tensor_parallel import TensorParallel, column_linear
from megatrain.tools.worker_pool import WorkerPool

S, B, H, OUT = 12, 2, 40, 24


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("is_deferred", [False, True])
@pytest.mark.parametrize("sequence_parallel", [False, True])
@pytest.mark.parametrize("size", [1, 2, 3])
def test_overlap_changes_no_bit_of_a_column_parallel_layer(
    pool: WorkerPool, size: int, sequence_parallel: bool, is_deferred: bool, dtype: torch.dtype
) -> None:
    for found, plain in pool.run(size, overlapped_and_in_sequence, sequence_parallel, is_deferred, dtype):
        assert set(found) == {"y", "dx", "dw"}
        for name, value in found.items():
            assert value.any()
            assert torch.equal(value, plain[name]), name


def overlapped_and_in_sequence(
    rank: int, world_size: int, sequence_parallel: bool, is_deferred: bool, dtype: torch.dtype
) -> list[dict[str, Tensor]]:
    grid = build_grid(GridShape(tp=world_size), rank, make_group)
    tp = TensorParallel(grid.tp, grid.kv, sequence_parallel)
    rows = tp.sequence_rows(S)
    generator = torch.Generator().manual_seed(rank if sequence_parallel else 0)
    x = torch.randn(rows, B, H, generator=generator).to(dtype)
    generator.manual_seed(10 + rank)
    weight = torch.randn(OUT, H, generator=generator).to(dtype)
    dy = torch.randn(S, B, OUT, generator=generator).to(dtype)
    return [layer(x, weight, dy, tp, is_deferred=is_deferred), in_sequence(x, weight, dy, tp)]


def layer(
    x: Tensor, weight: Tensor, dy: Tensor, tp: TensorParallel, *, is_deferred: bool
) -> dict[str, Tensor]:
    deferred: list[Callable[[], None]] | None = [] if is_deferred else None
    x, weight = x.clone().requires_grad_(), weight.clone().requires_grad_()
    weight_grad = torch.zeros(weight.shape)
    y = column_linear(x, weight, weight_grad, tp, PassInfo(deferred=deferred))
    y.backward(dy)
    assert x.grad is not None
    assert weight.grad is None
    if deferred is not None:
        assert not weight_grad.any()
        with torch.no_grad():
            for work in deferred:
                work()
    return {"y": y.detach(), "dx": x.grad, "dw": weight_grad}


def in_sequence(x: Tensor, weight: Tensor, dy: Tensor, tp: TensorParallel) -> dict[str, Tensor]:
    whole = all_gather(x, tp.group) if tp.sequence_parallel else x
    dx = dy @ weight
    dx = reduce_scatter(dx, tp.group) if tp.sequence_parallel else all_reduce(dx, tp.group)
    weight_grad = torch.zeros(weight.shape)
    accumulate_weight_gradient(weight_grad, dy.flatten(0, 1), whole.flatten(0, 1))
    return {"y": whole @ weight.t(), "dx": dx, "dw": weight_grad}
