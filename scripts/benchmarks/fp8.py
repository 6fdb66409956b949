"""Time the casts and products of FP8 linear layers on one GPU, by default with the sizes of case A2.

    PYTHONPATH=. python scripts/benchmarks/fp8.py
    PYTHONPATH=. python scripts/benchmarks/fp8.py --tile 64 128 4 --tile 32 128 4

A cast reads 2 bytes per element and writes 1 in each order. --tile: rows, columns and warps of the casts' tiles.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable

import torch
from timing import gpu, milliseconds

from megatrain.kernels.fp8.gemms import Operand, accumulate_gemm, gemm
from megatrain.kernels.fp8.quantize import current_scale, quantize, transposed
from megatrain.kernels.fused.fp8_scales import tensors as fused

LAYERS = {"qkv": (6144, 4096), "proj": (4096, 4096), "fc1": (28672, 4096), "fc2": (4096, 14336)}
"""Outputs and inputs."""
E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--tokens", type=int, default=8192)
    parser.add_argument("--tile", type=int, nargs=3, action="append", default=[])
    arguments = parser.parse_args()
    gpu()
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


def products(tokens: int) -> None:
    """Print the rates of the products of a layer in TFLOP/s, those of weight gradients with their addition in fp32."""
    print(f"{'layer':>14} {'forward':>10} {'dx':>10} {'dW, first':>10} {'dW, added':>10}   TFLOP/s")
    for name, (outputs, inputs) in LAYERS.items():
        x, w, dy = (_codes(*sizes) for sizes in ((tokens, inputs), (outputs, inputs), (tokens, outputs)))
        xt, wt, dyt = (Operand(transposed(one.codes), one.scale) for one in (x, w, dy))
        total = torch.zeros(outputs, inputs, device="cuda")
        flops = 2 * tokens * outputs * inputs
        times = (
            milliseconds(lambda x=x, w=w: gemm(x, w, torch.bfloat16, fast=True)),
            milliseconds(lambda dy=dy, wt=wt: gemm(dy, wt, torch.bfloat16, fast=False)),
            milliseconds(lambda t=total, dyt=dyt, xt=xt: accumulate_gemm(t, dyt, xt, is_zero=True)),
            milliseconds(lambda t=total, dyt=dyt, xt=xt: accumulate_gemm(t, dyt, xt)),
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
