"""Time the grouped products of experts, forward, backward and weight gradients, and Transformer Engine's GroupedLinear on the same rows.

    python scripts/benchmarks/experts.py        one GPU; half a minute

Rows are spread over the experts as a router does early in training: the largest load is 1.5 times the mean. Weight gradients are
added to fp32 buffers by both. Transformer Engine gets the numbers of rows from the host without waiting for them.
"""

from __future__ import annotations

import importlib.util
from dataclasses import dataclass

import torch
from timing import REPEATS, gpu, milliseconds
from torch import Tensor

from megatrain.kernels.moe.grouped_gemm import (
    accumulate_grouped_weight_gradient,
    grouped_gemm,
    grouped_gemm_backward,
)


@dataclass(frozen=True)
class Shape:
    name: str
    experts: int
    rows: int
    outputs: int
    inputs: int


SHAPES = (
    Shape("B7 fc1, ep1", 64, 49152, 2816, 2048),
    Shape("B7 fc2, ep1", 64, 49152, 2048, 1408),
    Shape("B6 fc1, ep2", 64, 65536, 1536, 2048),
    Shape("B6 fc2, ep2", 64, 65536, 2048, 768),
)


def main() -> None:
    print(f"torch {torch.__version__} on {gpu()}; bf16, medians of {REPEATS}, ms (TFLOP/s)")
    has_library = importlib.util.find_spec("transformer_engine") is not None
    for shape in SHAPES:
        x, dy, sizes = rows_of(shape)
        report(shape, "ours", *ours(shape, x, dy, sizes))
        if has_library:
            report(shape, "Transformer Engine", *transformer_engine(shape, x, dy, sizes))


def rows_of(shape: Shape) -> tuple[Tensor, Tensor, list[int]]:
    generator = torch.Generator("cuda").manual_seed(0)
    x, dy = (
        torch.randn(shape.rows, width, device="cuda", dtype=torch.bfloat16, generator=generator)
        for width in (shape.inputs, shape.outputs)
    )
    share = torch.rand(shape.experts, device="cuda", generator=generator) + 0.5
    ends = (share.cumsum(0) / share.sum() * shape.rows).round().long().tolist()
    return x, dy, [stop - start for start, stop in zip([0, *ends], ends, strict=False)]


def ours(shape: Shape, x: Tensor, dy: Tensor, sizes: list[int]) -> tuple[float, float]:
    weight = torch.randn(shape.experts, shape.outputs, shape.inputs, device="cuda", dtype=torch.bfloat16)
    grad = torch.zeros_like(weight, dtype=torch.float32)
    ends = torch.tensor(sizes, device="cuda").cumsum(0).to(torch.int32)

    def backward() -> None:
        grouped_gemm_backward(dy, weight, ends)
        accumulate_grouped_weight_gradient(grad, dy, x, ends)

    return milliseconds(lambda: grouped_gemm(x, weight, ends)), milliseconds(backward)


def transformer_engine(shape: Shape, x: Tensor, dy: Tensor, sizes: list[int]) -> tuple[float, float]:
    import transformer_engine.pytorch as te

    module = te.GroupedLinear(
        shape.experts, shape.inputs, shape.outputs, bias=False, params_dtype=torch.bfloat16, fuse_wgrad_accumulation=True, device="cuda"
    )  # fmt: skip
    for weight in module.parameters():
        weight.main_grad = torch.zeros_like(weight, dtype=torch.float32)  # type: ignore[attr-defined]
    x.requires_grad_()

    def both() -> None:
        module(x, sizes).backward(dy)

    with torch.no_grad():
        forward = milliseconds(lambda: module(x, sizes))
    return forward, milliseconds(both) - forward


def report(shape: Shape, name: str, forward: float, backward: float) -> None:
    flops = 2 * shape.rows * shape.outputs * shape.inputs
    figures = (
        f"{label} {time:6.2f} ({factor * flops / time / 1e9:4.0f})"
        for label, time, factor in (
            ("forward", forward, 1),
            ("backward", backward, 2),
            ("both", forward + backward, 3),
        )
    )
    print(f"{shape.name:<14} {name:<20}", "  ".join(figures), flush=True)


if __name__ == "__main__":
    main()
