"""Linear layers that overlap their communication with their products match those that do not; on GPUs within rounding."""

from collections.abc import Iterator

import pytest
import torch
from torch import Tensor

from megatrain.kernels.activations import GELU, Activation
from megatrain.parallel.batch import PassInfo
from megatrain.parallel.build_grid import build_grid
from megatrain.parallel.process_groups import make_group
from megatrain.parallel.rank_lists import GridShape
from megatrain.parallel.tensor_parallel import Bias, TensorParallel, column_linear, row_linear
from megatrain.tools.worker_pool import WorkerPool


@pytest.fixture(scope="module")
def two_gpus() -> Iterator[WorkerPool]:
    with WorkerPool(2, device="cuda", timeout_seconds=600) as pool:
        yield pool


@pytest.mark.parametrize("size", [2, 3])
def test_overlapped_layers_match(pool: WorkerPool, size: int) -> None:
    check(pool.run(size, overlapped_and_plain, 24, 40, torch.float64, "cpu"), size, tolerance=1e-12)


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
@pytest.mark.parametrize(("width", "inner"), [(256, 512), (4096, 7168)])
def test_overlapped_layers_match_on_gpus(two_gpus: WorkerPool, width: int, inner: int) -> None:
    check(two_gpus.run(2, overlapped_and_plain, width, inner, torch.bfloat16, "cuda"), 2, tolerance=1e-2)


def check(of_ranks: list[list[dict[str, Tensor]]], size: int, *, tolerance: float) -> None:
    assert len(of_ranks) == size
    for overlapped, plain in of_ranks:
        assert set(overlapped) == set(plain)
        for name, want in plain.items():
            error = (overlapped[name].double() - want.double()).norm() / want.double().norm()
            assert want.any()
            assert error < tolerance, f"{name} is off by {error}"


def overlapped_and_plain(
    rank: int, world_size: int, width: int, inner: int, dtype: torch.dtype, device: str
) -> list[dict[str, Tensor]]:
    grid = build_grid(GridShape(tp=world_size), rank, make_group)
    return [
        both_layers(TensorParallel(grid.tp, grid.kv, sequence_parallel=True, is_overlapped=is_overlapped),
                    width, inner, dtype, device)
        for is_overlapped in (True, False)
    ]  # fmt: skip


def both_layers(
    tp: TensorParallel, width: int, inner: int, dtype: torch.dtype, device: str
) -> dict[str, Tensor]:
    """Run a column-parallel layer and a row-parallel one, each with a bias, forward and backward."""
    generator = torch.Generator().manual_seed(tp.rank)

    def randn(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator).to(device, dtype)

    x, dy = randn(64, 2, width).requires_grad_(), randn(64, 2, width)
    up, down = randn(inner, width) / width**0.5, randn(width, inner) / inner**0.5
    grads = {
        name: torch.zeros_like(value, dtype=torch.float32) for name, value in (("up", up), ("down", down))
    }
    grads |= {"up bias": torch.zeros(inner, device=device), "down bias": torch.zeros(width, device=device)}
    info = PassInfo()
    middle = column_linear(x, up, grads["up"], tp, info, Bias(randn(inner), grads["up bias"]))
    y = row_linear(
        middle,
        down,
        grads["down"],
        tp,
        info,
        Bias(randn(width), grads["down bias"]),
        activation=Activation(fn=GELU),
    )
    y.backward(dy)
    assert x.grad is not None
    return {"middle": middle.detach(), "y": y.detach(), "dx": x.grad, **grads}
