"""Time the casts and products of FP8 linear layers on one GPU, by default with the sizes of case A2.

    PYTHONPATH=. python scripts/benchmarks/fp8.py
    PYTHONPATH=. python scripts/benchmarks/fp8.py --tile 64 128 4 --tile 32 128 4
    PYTHONPATH=. python scripts/benchmarks/fp8.py --algorithms

A cast reads 2 bytes per element and writes 1 in each order. --tile: rows, columns and warps of the casts' tiles.
--algorithms: rates of the algorithms that cuBLASLt offers for each product of a layer, in FP8 and in bf16.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from timing import milliseconds
from torch import Tensor

from megatrain.kernels.cublaslt import multiply, num_algorithms, problem_of
from megatrain.kernels.fp8.products import Operand, accumulate_product, product
from megatrain.kernels.fp8.quantize import current_scale, quantize, transposed
from megatrain.kernels.fused.fp8_scales import tensors as fused
from megatrain.kernels.wgrad import accumulate_weight_gradient

LAYERS = {"qkv": (6144, 4096), "proj": (4096, 4096), "fc1": (28672, 4096), "fc2": (4096, 14336)}
"""Outputs and inputs."""
E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--tokens", type=int, default=8192)
    parser.add_argument("--tile", type=int, nargs=3, action="append", default=[])
    parser.add_argument("--algorithms", action="store_true")
    arguments = parser.parse_args()
    if not torch.cuda.is_available():
        sys.exit("error: FP8 is timed on a GPU, and torch finds none\n  fix: check `nvidia-smi`")
    if arguments.algorithms:
        algorithms(arguments.tokens)
        return
    for tile in arguments.tile or [(fused._ROWS, fused._COLUMNS, fused._WARPS)]:  # noqa: SLF001
        fused._ROWS, fused._COLUMNS, fused._WARPS = tile  # noqa: SLF001
        print(f"tile of {tile[0]} x {tile[1]}, {tile[2]} warps")
        casts(arguments.tokens)
    products(arguments.tokens)


def casts(tokens: int) -> None:
    """Print times, and rates of memory traffic, of scales and casts."""
    print(
        f"{'matrix':>14} {'scale':>14} {'rows':>14} {'columns':>14} {'both':>14} {'and largest':>14} "
        f"{'transposed':>14}   ms (GB/s)"
    )
    for rows, columns in dict.fromkeys(
        [(tokens, n) for sizes in LAYERS.values() for n in sizes] + [(28672, 4096)]
    ):
        x = torch.randn(rows, columns, device="cuda", dtype=torch.bfloat16)
        scale = current_scale(x, E4M3)
        codes = quantize(x, scale, E4M3, columns=False).rows
        assert codes is not None
        seen = torch.zeros((), device="cuda")
        times = (
            (repeated(lambda x=x: current_scale(x, E4M3)), 2),
            (repeated(lambda x=x, s=scale: quantize(x, s, E4M3, columns=False)), 3),
            (repeated(lambda x=x, s=scale: quantize(x, s, E4M3, rows=False)), 3),
            (repeated(lambda x=x, s=scale: quantize(x, s, E4M3)), 4),
            (repeated(lambda x=x, s=scale, seen=seen: quantize(x, s, E4M3, seen=seen)), 4),
            (repeated(lambda c=codes: transposed(c)), 2),
        )
        cells = (f"{ms:.3f} ({size * x.numel() / ms / 1e6:5.0f})" for ms, size in times)
        print(f"{f'{rows} x {columns}':>14} " + " ".join(f"{cell:>14}" for cell in cells))


def repeated(run: Callable[[], object], times: int = 20) -> float:
    """Return the time of one of several runs, so that the GPU does not wait for launches."""
    return milliseconds(lambda: [run() for _ in range(times)]) / times


def algorithms(tokens: int) -> None:
    """Print, for each product, the rate of torch's choice and of cuBLASLt's algorithms in its order, in TFLOP/s."""
    shapes = {**LAYERS, "head": (128256, 4096)}
    for name, (outputs, inputs) in shapes.items():
        rows = min(tokens, 2048) if name == "head" else tokens
        flops = 2 * rows * outputs * inputs
        x, w, dy = (
            torch.randn(*sizes, device="cuda", dtype=torch.bfloat16)
            for sizes in ((rows, inputs), (outputs, inputs), (rows, outputs))
        )
        total = torch.zeros(outputs, inputs, device="cuda")
        y, dx = torch.empty_like(dy), torch.empty_like(x)
        cases: dict[str, tuple[Callable[[], object], tuple[Tensor, Tensor, Tensor], dict[str, Any]]] = {
            "y = x W^T": (lambda x=x, w=w, y=y: torch.mm(x, w.t(), out=y), (y, x, w), {"transposes_b": True}),
            "dx = dy W": (lambda dy=dy, w=w, dx=dx: torch.mm(dy, w, out=dx), (dx, dy, w), {}),
            "dW += dy^T x": (
                lambda t=total, dy=dy, x=x: accumulate_weight_gradient(t, dy, x),
                (total, dy, x),
                {"transposes_a": True, "beta": 1.0},
            ),
        }
        for product_name, (torch_run, matrices, options) in cases.items():
            transposes = options.get("transposes_a", False), options.get("transposes_b", False)
            count = num_algorithms(problem_of(*matrices, *transposes), has_scales=False)
            runs = [torch_run, *(partial(multiply, *matrices, **options, algorithm=i) for i in range(count))]
            rates = [flops / repeated(run, 10) / 1e9 for run in runs]
            print(
                f"bf16 {name:>5} {product_name:>13}: torch {rates[0]:.0f} | "
                + " ".join(f"{r:.0f}" for r in rates[1:])
            )
        if name == "head":
            continue
        (xc, wc, dyc) = (_codes(*sizes) for sizes in ((rows, inputs), (outputs, inputs), (rows, outputs)))
        xt, wt, dyt = (Operand(transposed(one.codes), one.scale) for one in (xc, wc, dyc))
        for product_name, out, a, b, beta, fast in (
            ("y = x W^T", y, xc, wc, 0.0, True),
            ("dx = dy W", dx, dyc, wt, 0.0, False),
            ("dW += dy^T x", total, dyt, xt, 1.0, False),
        ):
            scales = (a.scale[0], b.scale[0])
            problem = problem_of(out, a.codes, b.codes, False, True, fast)
            runs = [
                partial(
                    multiply,
                    out,
                    a.codes,
                    b.codes,
                    transposes_b=True,
                    scales=scales,
                    is_fast=fast,
                    beta=beta,
                    algorithm=i,
                )
                for i in range(num_algorithms(problem, has_scales=True))
            ]
            rates = [flops / repeated(run, 10) / 1e9 for run in runs]
            print(f"fp8  {name:>5} {product_name:>13}: " + " ".join(f"{r:.0f}" for r in rates))


def products(tokens: int) -> None:
    """Print the rates of the products of a layer in TFLOP/s, those of weight gradients with their addition in fp32."""
    print(f"{'layer':>14} {'forward':>10} {'dx':>10} {'dW, first':>10} {'dW, added':>10}   TFLOP/s")
    for name, (outputs, inputs) in LAYERS.items():
        x, w, dy = (_codes(*sizes) for sizes in ((tokens, inputs), (outputs, inputs), (tokens, outputs)))
        xt, wt, dyt = (Operand(transposed(one.codes), one.scale) for one in (x, w, dy))
        total = torch.zeros(outputs, inputs, device="cuda")
        flops = 2 * tokens * outputs * inputs
        times = (
            milliseconds(lambda x=x, w=w: product(x, w, torch.bfloat16, fast=True)),
            milliseconds(lambda dy=dy, wt=wt: product(dy, wt, torch.bfloat16, fast=False)),
            milliseconds(lambda t=total, dyt=dyt, xt=xt: accumulate_product(t, dyt, xt, is_zero=True)),
            milliseconds(lambda t=total, dyt=dyt, xt=xt: accumulate_product(t, dyt, xt)),
        )
        print(f"{name:>14} " + " ".join(f"{flops / ms / 1e9:10.0f}" for ms in times))


def _codes(rows: int, columns: int) -> Operand:
    x = torch.randn(rows, columns, device="cuda", dtype=torch.bfloat16)
    scale = current_scale(x, E4M3)
    codes = quantize(x, scale, E4M3, columns=False).rows
    assert codes is not None
    return Operand(codes, scale)


if __name__ == "__main__":
    main()
