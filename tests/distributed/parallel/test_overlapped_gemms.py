"""Linear layers that overlap their communication with their products match those that do not: at tp 2 bit for bit."""

from collections.abc import Callable, Iterator
from types import SimpleNamespace

import pytest
import torch
from everyday import one_in
from torch import Tensor

from megatrain.kernels.activations import GELU, Activation
from megatrain.model import functions
from megatrain.parallel.batch import PassInfo
from megatrain.parallel.build_grid import build_grid
from megatrain.parallel.process_groups import make_group
from megatrain.parallel.rank_lists import GridShape
from megatrain.parallel.tensor_overlap.copies import peer_memory
from megatrain.parallel.tensor_overlap.terms import PendingTerm, add_terms
from megatrain.parallel.tensor_parallel import Bias, TensorParallel, column_linear, row_linear
from megatrain.tools.worker_pool import WorkerPool

PASSES = 4
"""Passes of both layers: more sends than slots, so that slots are used again."""


@pytest.fixture(scope="module")
def two_gpus() -> Iterator[WorkerPool]:
    with WorkerPool(2, device="cuda", timeout_seconds=600) as pool:
        yield pool


@pytest.mark.parametrize("is_deferred", [False, True])
@pytest.mark.parametrize("size", one_in(2, [2, 3]))
def test_overlapped_layers_match(pool: WorkerPool, size: int, is_deferred: bool) -> None:
    """Deferred weight gradients are computed after later sends have overwritten the gathered rows."""
    answers = pool.run(size, overlapped_and_plain, [(24, 40), (40, 56)], torch.float64, "cpu", is_deferred)
    check(answers, size, tolerance=0 if size == 2 else 1e-12)


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
@pytest.mark.parametrize("is_deferred", [False, True])
def test_overlapped_layers_match_on_gpus(two_gpus: WorkerPool, is_deferred: bool) -> None:
    """The second size needs larger slots than the first; products of half the rows have the bits of whole ones."""
    sizes = [(256, 512), (4096, 7168), (256, 512)]
    answers = two_gpus.run(2, overlapped_and_plain, sizes, torch.bfloat16, "cuda", is_deferred)
    check(answers, 2, tolerance=0)


def check(of_ranks: list[list[dict[str, Tensor]]], size: int, *, tolerance: float) -> None:
    assert len(of_ranks) == size
    for overlapped, plain in of_ranks:
        assert set(overlapped) == set(plain)
        for name, want in plain.items():
            error = (overlapped[name].double() - want.double()).norm() / want.double().norm()
            assert want.any()
            assert error <= tolerance, f"{name} is off by {error}"


def overlapped_and_plain(
    rank: int,
    world_size: int,
    sizes: list[tuple[int, int]],
    dtype: torch.dtype,
    device: str,
    is_deferred: bool,
) -> list[dict[str, Tensor]]:
    grid = build_grid(GridShape(tp=world_size), rank, make_group)
    return [
        {
            f"{name} of {width} x {inner}": value
            for width, inner in sizes
            for name, value in passes(
                TensorParallel(
                    grid.tp, grid.kv, sequence_parallel=True, peers=peers, halves_gradients=device == "cpu"
                ),
                width,
                inner,
                dtype,
                device,
                is_deferred=is_deferred,
            ).items()
        }
        for peers in (peer_memory(grid.tp, torch.device(device)), None)
    ]


def passes(
    tp: TensorParallel, width: int, inner: int, dtype: torch.dtype, device: str, *, is_deferred: bool
) -> dict[str, Tensor]:
    """Run a row-parallel layer, a norm, a column-parallel layer and row-parallel ones, forward and backward, a few times."""
    generator = torch.Generator().manual_seed(tp.rank)

    def randn(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator).to(device, dtype)

    up, down = randn(inner, width) / width**0.5, randn(width, inner) / inner**0.5
    grads = {
        name: torch.zeros_like(value, dtype=torch.float32) for name, value in (("up", up), ("down", down))
    }
    grads |= {"up bias": torch.zeros(inner, device=device), "down bias": torch.zeros(width, device=device)}
    norm = SimpleNamespace(weight=randn(width), weight_grads={"weight": torch.zeros(width, device=device)})
    biases = Bias(randn(inner), grads["up bias"]), Bias(randn(width), grads["down bias"])
    deferred: list[Callable[[], None]] | None = [] if is_deferred else None
    info = PassInfo(deferred=deferred)
    found: dict[str, Tensor] = {}
    for index in range(PASSES):
        if device == "cuda" and index % tp.size == tp.rank:
            torch.cuda._sleep(20_000_000)  # about 10 ms: the other rank's sends must wait for this one
        z, dy = randn(64 * tp.size**2, 2, inner).requires_grad_(), randn(64 * tp.size, 2, width)
        x = row_linear(z, down, grads["down"], tp, info)
        term = PendingTerm()
        total, normed = functions.norm(x, None, norm, 1e-5, 0.0, term)
        middle = column_linear(normed, up, grads["up"], tp, info, biases[0], dx_term=term)
        y = row_linear(middle, down, grads["down"], tp, info, biases[1], activation=Activation(fn=GELU))
        doubled = 2 * middle
        returns_partial_sums = tp.peers is not None and tp.size == 2
        delta = row_linear(doubled, down, grads["down"], tp, info, returns_partial_sums=returns_partial_sums)
        y, normed = functions.norm(y + total, delta, norm, 1e-5, 0.0)
        delta = row_linear(doubled, down, grads["down"], tp, info, returns_partial_sums=returns_partial_sums)
        y = add_terms(y + normed, delta) if returns_partial_sums else y + normed + delta
        y.backward(dy)
        assert z.grad is not None
        found |= {f"middle {index}": middle.detach(), f"y {index}": y.detach(), f"dz {index}": z.grad}
    assert tp.peers is None or not tp.peers.late, (
        "the gather of the first layer overlaps half of a weight gradient"
    )
    with torch.no_grad():
        for work in deferred or ():
            work()
    return found | grads | {"norm": norm.weight_grads["weight"]}
