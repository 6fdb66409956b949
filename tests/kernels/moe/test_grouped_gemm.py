"""Grouped GEMM against one product per group; rows after the last end are not read."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from megatrain.kernels.moe.grouped_gemm import (
    accumulate_grouped_weight_gradient,
    grouped_gemm,
    grouped_gemm_backward,
)

SIZES = (3, 0, 8, 5, 0)
ROWS, INNER, OUTER = 20, 16, 24
KINDS = pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float64], ids=str)


def rows(width: int, dtype: torch.dtype) -> Tensor:
    """Return rows, with NaN after the last end."""
    x = torch.randn(ROWS, width, generator=torch.Generator().manual_seed(width)).to(dtype)
    x[sum(SIZES) :] = float("nan")
    return x


def weights(dtype: torch.dtype) -> Tensor:
    generator = torch.Generator().manual_seed(3)
    return torch.randn(len(SIZES), OUTER, INNER, generator=generator).to(dtype)


def ends() -> Tensor:
    return torch.tensor(SIZES).cumsum(0).to(torch.int32)


def by_group(x: Tensor) -> tuple[Tensor, ...]:
    return x[: sum(SIZES)].split(SIZES)


def close(found: Tensor, expected: Tensor) -> None:
    tolerance = {torch.bfloat16: 2e-2, torch.float32: 1e-5, torch.float64: 1e-12}[found.dtype]
    assert (found - expected).abs().max() <= tolerance * expected.abs().max()


@KINDS
def test_rows_are_multiplied_by_the_weight_of_their_group(dtype: torch.dtype) -> None:
    x, weight = rows(INNER, dtype), weights(dtype)
    found = grouped_gemm(x, weight, ends())
    assert found.shape == (ROWS, OUTER)
    close(found[: sum(SIZES)], torch.cat([x @ w.t() for x, w in zip(by_group(x), weight, strict=True)]))


@KINDS
def test_gradients_of_rows_use_the_same_weight(dtype: torch.dtype) -> None:
    dy, weight = rows(OUTER, dtype), weights(dtype)
    found = grouped_gemm_backward(dy, weight, ends())
    assert found.shape == (ROWS, INNER)
    close(found[: sum(SIZES)], torch.cat([dy @ w for dy, w in zip(by_group(dy), weight, strict=True)]))


@KINDS
def test_weight_gradients_accumulate_by_group(dtype: torch.dtype) -> None:
    dy, x = rows(OUTER, dtype), rows(INNER, dtype)
    kind = torch.promote_types(dtype, torch.float32)
    grad = torch.ones(len(SIZES), OUTER, INNER, dtype=kind)
    accumulate_grouped_weight_gradient(grad, dy, x, ends())
    expected = [1 + a.to(kind).t() @ b.to(kind) for a, b in zip(by_group(dy), by_group(x), strict=True)]
    assert (grad[1] == 1).all()
    close(grad.to(dtype), torch.stack(expected).to(dtype))


def test_widths_that_the_single_kernel_does_not_support() -> None:
    x = rows(INNER, torch.bfloat16)[:, :13]
    weight = weights(torch.bfloat16)[..., :13]
    found = grouped_gemm(x, weight, ends())
    close(found[: sum(SIZES)], torch.cat([x @ w.t() for x, w in zip(by_group(x), weight, strict=True)]))
