"""Time the chunked scans of Mamba-2 and of the gated delta rule, their convolution and the gated norm against the roofline.

    python scripts/benchmarks/scans.py            one GPU; a minute, most of it compilation
    python scripts/benchmarks/scans.py --peers    also mamba-ssm and flash-linear-attention, if they can be imported
    python scripts/benchmarks/scans.py --gdn2     only the delta rule with a decay per channel, which has no kernels

Bytes count each input and output once, operations the GEMMs of chunks without what a backward pass computes again; the rates
are those of an H200, measured: 4.3 TB/s and 790 TFLOP/s.
"""

from __future__ import annotations

import argparse
import importlib
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch
from timing import gpu, milliseconds
from torch import Tensor
from torch.nn import functional as F

from megatrain.kernels.fused.scans import convolution, gated_delta, gated_norm, mamba2
from megatrain.kernels.gated_delta import delta_rule

BYTES_PER_MS, OPERATIONS_PER_MS = 4.3e9, 790e9
Run = Callable[..., Tensor]


@dataclass(frozen=True)
class Case:
    """A scan of one shape in bf16; `bytes` and `operations` of (forward, backward)."""

    name: str
    inputs: tuple[Tensor, ...]
    run: Run
    peer: Run | None
    bytes: tuple[float, float]
    operations: tuple[float, float]
    is_by_rows: bool = False
    """[s, b, ...]; peers have [b, s, ...]."""


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--peers", action="store_true", help="time other packages too")
    parser.add_argument("--gdn2", action="store_true", help="time the second variant of the delta rule")
    arguments = parser.parse_args()
    has_peers = arguments.peers
    print(f"torch {torch.__version__} on {gpu()}; bf16, medians")
    if arguments.gdn2:
        report_gdn2()
        return
    for build in (
        *(partial(mamba2_case, b, n) for b, n in ((1, 64), (1, 128), (4, 64))),
        *(partial(delta_case, b) for b in (1, 4)),
        partial(convolution_case, 10240),
        partial(norm_case, 8192),
    ):
        case = build()
        report(case, case.name, case.run, case.inputs)
        if has_peers and case.peer is not None:
            swap = (lambda x: x.transpose(0, 1).contiguous()) if case.is_by_rows else (lambda x: x)
            try:
                report(case, "  peer", case.peer, tuple(swap(x.detach()) for x in case.inputs))
            except ImportError as error:
                print(f"  peer: {error}")


def report(case: Case, name: str, run: Run, inputs: tuple[Tensor, ...]) -> None:
    """Print the times of both passes as CUDA graphs, and the roofline's part of them."""
    inputs = tuple(x.detach().requires_grad_() for x in inputs)
    dy = torch.randn_like(run(*inputs))
    forward = replayed(lambda: run(*inputs))
    both = replayed(lambda: torch.autograd.grad(run(*inputs), inputs, dy))
    floors = [
        max(moved / BYTES_PER_MS, computed / OPERATIONS_PER_MS)
        for moved, computed in zip(case.bytes, case.operations, strict=True)
    ]
    parts = f"{floors[0] / forward:.2f} and {sum(floors) / both:.2f} of the roofline"
    print(f"{name:<28}forward {forward:6.3f} ms  with backward {both:6.3f} ms  {parts}", flush=True)


def report_gdn2(b: int = 1, s: int = 8192, n: int = 32, d: int = 128) -> None:
    """Print the times of both passes of the delta rule with a decay per channel, launched by the host, and their memory."""
    q, k = (F.normalize(drawn(s, b, n, d), dim=-1).float() for _ in range(2))
    g, erase = -0.1 * torch.rand(s, b, n, d, device="cuda"), torch.rand(s, b, n, d, device="cuda")
    inputs = tuple(x.requires_grad_() for x in (q, k, drawn(s, b, n, d).float(), g, erase * k))

    def run() -> Tensor:
        return delta_rule(*inputs)[0]

    def both() -> object:
        return torch.autograd.grad(run(), inputs, dy)

    dy = torch.randn_like(run())
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    times = milliseconds(run), milliseconds(both)
    memory = (torch.cuda.max_memory_allocated() - before) / 1e9
    print(f"gdn2 b{b} s{s} n{n}  forward {times[0]:.1f} ms  with backward {times[1]:.1f} ms  {memory:.1f} GB")


def replayed(run: Callable[[], object]) -> float:
    """Return the median milliseconds of a graph of the run, without the host's launches."""
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        run()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        kept = run()
    time = milliseconds(graph.replay)
    del kept
    return time


def drawn(*shape: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    return torch.randn(*shape, device="cuda").to(dtype)


def mamba2_case(b: int, n: int, s: int = 8192, p: int = 64, g: int = 8, m: int = 128) -> Case:
    tokens, chunk = b * s, mamba2.CHUNK
    dt = F.softplus(drawn(b, s, n, dtype=torch.float32) - 4)
    inputs = (
        *(drawn(b, s, n, p), dt, -torch.linspace(1, 16, n, device="cuda")),
        *(drawn(b, s, g, m), drawn(b, s, g, m), torch.ones(n, device="cuda")),
    )
    wide, narrow = 2.0 * tokens * n * p, 2.0 * tokens * g * m
    states, pairs, scores = 2.0 * tokens * n * p * m, 2.0 * tokens * n * p * chunk, chunk * narrow
    return Case(
        f"Mamba-2 b{b} s{s} n{n} g{g}",
        inputs,
        lambda *x: mamba2.mamba2_scan(*x)[0],
        _mamba_ssm,
        (2 * wide + 2 * narrow + 4 * tokens * n, 3 * wide + 4 * narrow + 8 * tokens * n),
        (2 * states + pairs + scores, 5 * states + 2 * pairs + 3 * scores),
    )


def delta_case(b: int, s: int = 8192, n: int = 32, nk: int = 16, d: int = 128) -> Case:
    tokens, chunk = b * s, gated_delta.CHUNK
    q, k = (F.normalize(drawn(s, b, nk, d), dim=-1) for _ in range(2))
    g, beta = -0.1 * torch.rand(s, b, n, device="cuda"), torch.rand(s, b, n, device="cuda")
    wide, narrow = 2.0 * tokens * n * d, 2.0 * tokens * nk * d
    states, pairs = 2.0 * tokens * n * d * d, 2.0 * tokens * n * d * chunk
    return Case(
        f"delta rule b{b} s{s} n{n}/{nk}",
        (q * d**-0.5, k, drawn(s, b, n, d), g, beta),
        lambda *x: gated_delta.gated_delta_rule(*x)[0],
        _flash_linear_attention,
        (2 * wide + 2 * narrow + 8 * tokens * n, 3 * wide + 4 * narrow + 16 * tokens * n),
        (3 * states + 4 * pairs, 6 * states + 10 * pairs),
        is_by_rows=True,
    )


def convolution_case(c: int, s: int = 8192) -> Case:
    moved = 2.0 * s * c
    return Case(
        f"convolution s{s} c{c}",
        (drawn(1, s, c), drawn(c, 4), drawn(c)),
        lambda *x: convolution.causal_conv(*x, has_silu=True),
        _flash_linear_convolution,
        (2 * moved, 3 * moved),
        (0, 0),
    )


def norm_case(c: int, s: int = 8192, num_groups: int = 8) -> Case:
    """The gate is a part of Mamba-2's projection."""
    moved, gate = 2.0 * s * c, drawn(s, 1, 2 * c + 2048 + c // 64)[..., :c]
    return Case(
        f"gated norm s{s} c{c} g{num_groups}",
        (drawn(s, 1, c), gate, drawn(c)),
        lambda y, gate, weight: gated_norm.gated_norm(y, gate, weight, num_groups, 1e-5),
        None,
        (3 * moved, 5 * moved),
        (0, 0),
    )


def _mamba_ssm(*x: Tensor) -> Tensor:
    scan = importlib.import_module("mamba_ssm.ops.triton.ssd_combined").mamba_chunk_scan_combined
    y: Tensor = scan(*x[:5], chunk_size=256, D=x[5])
    return y


def _flash_linear_attention(*x: Tensor) -> Tensor:
    y: Tensor = importlib.import_module("fla.ops.gated_delta_rule").chunk_gated_delta_rule(*x, scale=1.0)[0]
    return y


def _flash_linear_convolution(*x: Tensor) -> Tensor:
    y: Tensor = importlib.import_module("fla.modules.causal_conv1d").causal_conv1d(*x, activation="silu")[0]
    return y


if __name__ == "__main__":
    main()
