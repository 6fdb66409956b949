"""Time the optimizer's passes over flat shards, compared with torch's fused AdamW and the memory bandwidth.

    python scripts/benchmarks/optimizer.py [--sizes 500000000 2000000000]        one GPU; under two minutes

Bytes are those that a pass must move: each value that it reads or writes, once.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from megatrain.kernels.optimizer.adamw import AdamwStep, adamw
from megatrain.kernels.optimizer.shard_update import FlatUpdate, HyperparamRange
from megatrain.kernels.optimizer.sum_of_squares import sum_of_squares

BOUND = 4.2e12
"""Bytes per second that a pass of reads and writes reaches on an H200."""
WARM_UP, REPEATS = 3, 10


@dataclass(frozen=True)
class Pass:
    name: str
    bytes_per_element: int
    """Bytes read and written per element."""
    run: Callable[[], object]


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--sizes", type=int, nargs="+", default=[500_000_000, 2_000_000_000], metavar="N")
    sizes = parser.parse_args().sizes
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    where = torch.cuda.get_device_name(device) if device.type == "cuda" else "the CPU, by the reference"
    print(f"torch {torch.__version__} on {where}; medians of {REPEATS}; bound: {BOUND / 1e12:g} TB/s")
    print(f"{'elements':>14}  {'pass':<44}{'bytes':>5}{'ms':>10}{'TB/s':>8}{'x bound':>9}")
    for size in sizes:
        for one in passes(size - size % 64, device):
            ms = milliseconds(one.run, device)
            num_bytes = one.bytes_per_element * size
            speed, ratio = num_bytes / ms / 1e9, ms * 1e-3 / (num_bytes / BOUND)
            print(
                f"{size:>14,}  {one.name:<44}{one.bytes_per_element:>5}{ms:>10.3f}{speed:>8.3f}{ratio:>9.3f}"
            )


def passes(size: int, device: torch.device) -> Iterator[Pass]:
    """Yield the passes one after the other, so that memory for one set of states is enough."""
    master_weights, grad = torch.randn(size, device=device), torch.randn(size, device=device)
    weight = master_weights.bfloat16()
    numbers = AdamwStep(beta1=0.9, beta2=0.95, eps=1e-8, step=3)
    for name, dtype, gradients, num_bytes in (
        ("AdamW", torch.float32, grad, 30),
        ("AdamW, moments in bf16", torch.bfloat16, grad, 22),
        ("AdamW, gradients in bf16", torch.float32, grad.bfloat16(), 28),
    ):
        states = [torch.zeros(size, dtype=dtype, device=device) for _ in range(2)]
        update = shard(master_weights, gradients, weight)
        yield Pass(name, num_bytes, lambda u=update, s=states: adamw(u, s[0], s[1], numbers))
        del states, update
    del gradients
    yield Pass("sum of squares of fp32 gradients", 4, lambda: sum_of_squares([grad], device))
    yield Pass("zeroing fp32 gradients", 4, lambda: torch._foreach_zero_([grad]))
    parameter = torch.nn.Parameter(master_weights)
    parameter.grad = grad
    torch_adamw = torch.optim.AdamW([parameter], lr=1e-3, fused=True)
    yield Pass("torch.optim.AdamW(fused=True), no bf16 weight", 28, torch_adamw.step)


def shard(master_weights: Tensor, grad: Tensor, weight: Tensor) -> FlatUpdate:
    """Return the update of a layer's shard: matrices that decay, and a few vectors that do not."""
    boundary = master_weights.numel() // 64 * 63 // 64 * 64
    return FlatUpdate(
        master=master_weights,
        grad=grad,
        weight=weight,
        ranges=(
            HyperparamRange(0, boundary, 1e-3, 0.1),
            HyperparamRange(boundary, master_weights.numel(), 1e-3, 0.0),
        ),
        grad_scale=torch.ones((), device=master_weights.device),
        is_finite=torch.ones((), dtype=torch.bool, device=master_weights.device),
    )


def milliseconds(
    run: Callable[[], object], device: torch.device, *, warm_up: int = WARM_UP, repeats: int = REPEATS
) -> float:
    """Return the median time of several runs."""
    for _ in range(warm_up):
        run()
    return statistics.median(one_run(run, device) for _ in range(repeats))


def one_run(run: Callable[[], object], device: torch.device) -> float:
    if device.type != "cuda":
        began = time.perf_counter()
        run()
        return (time.perf_counter() - began) * 1e3
    start, stop = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    start.record()
    run()
    stop.record()
    stop.synchronize()
    return start.elapsed_time(stop)


if __name__ == "__main__":
    main()
