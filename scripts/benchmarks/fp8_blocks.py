"""Time casts and products of FP8 with a scale per block or row on one Hopper GPU, and of bf16 products.

    PYTHONPATH=. python scripts/benchmarks/fp8_blocks.py

Layers have the sizes of case A2; experts are 64 of width 1408, 8 per token.
"""

from __future__ import annotations

import torch
from fp8 import LAYERS
from timing import gpu, milliseconds
from torch.nn import functional as F

from megatrain.kernels.fp8.blocks import (
    accumulate_block_gemm,
    block_gemm,
    cast_blocks,
    cast_square_blocks,
)
from megatrain.kernels.fp8.gemms import Operand
from megatrain.kernels.fp8.rows import cast_rows, grouped_gemm

TOKENS = 8192
EXPERTS, TOP_K, HIDDEN, WIDTH = 64, 8, 2048, 1408
E4M3 = torch.float8_e4m3fn


def main() -> None:
    gpu()
    layers()
    experts()


def layers() -> None:
    """Print times of casts in both orders, and rates of products."""
    print(
        f"{'layer':>8} {'cast x':>9} {'cast W':>9} ms {'forward':>9} {'dx':>9} {'dW, first':>10} {'dW, added':>10} TFLOP/s"
    )
    for name, (outputs, inputs) in LAYERS.items():
        x, weight, dy = drawn(TOKENS, inputs), drawn(outputs, inputs), drawn(TOKENS, outputs)
        casts = [
            milliseconds(lambda x=x: cast_blocks(x, E4M3)),
            milliseconds(lambda w=weight: cast_square_blocks(w, E4M3)),
        ]
        (x8, xt), (w8, wt), (dy8, dyt) = (
            (needed(cast.rows), needed(cast.columns))
            for cast in (cast_blocks(x, E4M3), cast_square_blocks(weight, E4M3), cast_blocks(dy, E4M3))
        )
        total = torch.zeros(outputs, inputs, device="cuda")
        products = [
            milliseconds(lambda x=x8, w=w8: block_gemm(x, w, torch.bfloat16)),
            milliseconds(lambda dy=dy8, w=wt: block_gemm(dy, w, torch.bfloat16)),
            milliseconds(lambda t=total, dy=dyt, x=xt: accumulate_block_gemm(t, dy, x, is_zero=True)),
            milliseconds(lambda t=total, dy=dyt, x=xt: accumulate_block_gemm(t, dy, x)),
        ]
        flops = 2 * TOKENS * outputs * inputs
        print(
            f"{name:>8} "
            + " ".join(f"{ms:9.3f}" for ms in casts)
            + "    "
            + " ".join(f"{flops / ms / 1e9:9.0f}" for ms in products)
        )


def experts() -> None:
    """Print times of the grouped products of experts in bf16 and FP8, and of their casts."""
    rows = TOKENS * TOP_K
    ends = torch.arange(1, EXPERTS + 1, device="cuda", dtype=torch.int32) * (rows // EXPERTS)
    for name, n, k in (("fc1", 2 * WIDTH, HIDDEN), ("fc2", HIDDEN, WIDTH)):
        x, weight = drawn(rows, k), torch.randn(EXPERTS, n, k, device="cuda", dtype=torch.bfloat16)
        x8, weight8 = cast_rows(x), cast_rows(weight)
        times = [
            milliseconds(lambda x=x, w=weight: F.grouped_mm(x, w.transpose(1, 2), offs=ends)),
            milliseconds(lambda x=x8, w=weight8: grouped_gemm(x, w, ends, torch.bfloat16, fast=True)),
            milliseconds(lambda x=x8, w=weight8: grouped_gemm(x, w, ends, torch.bfloat16, fast=False)),
            milliseconds(lambda x=x: cast_rows(x)),
            milliseconds(lambda w=weight: cast_rows(w)),
        ]
        words = ("bf16", "FP8 fast", "FP8", "cast rows", "cast weights")
        print(
            f"experts {name}: "
            + ", ".join(f"{word} {ms:.3f} ms" for word, ms in zip(words, times, strict=True))
        )


def drawn(rows: int, columns: int) -> torch.Tensor:
    return torch.randn(rows, columns, device="cuda", dtype=torch.bfloat16)


def needed(part: Operand | None) -> Operand:
    assert part is not None
    return part


if __name__ == "__main__":
    main()
