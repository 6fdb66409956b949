"""Casts to FP8 and products of FP8 matrices against their definitions."""

import pytest
import torch

from megatrain.kernels.fp8.gemms import Operand, accumulate_gemm, gemm
from megatrain.kernels.fp8.quantize import amax, current_scale, quantize, scale_of, transposed

E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2


@pytest.mark.parametrize(
    ("largest", "margin", "scale"),
    [
        (448.0, 0, 1.0),
        (7.0, 0, 64.0),
        (7.0, 2, 16.0),
        (0.0, 0, 1.0),
        (1e-40, 0, torch.finfo(torch.float32).max),
    ],
)
def test_a_scale_maps_the_largest_value_to_the_largest_number(largest, margin, scale):
    found = scale_of(torch.tensor(largest), 448.0, margin)
    assert found.tolist() == pytest.approx([1 / scale, scale])


@pytest.mark.parametrize(("dtype", "error"), [(E4M3, 2**-4), (E5M2, 2**-3)])
def test_a_round_trip_errs_by_half_a_unit_in_the_last_place(dtype, error):
    x = torch.randn(33, 48, generator=torch.Generator().manual_seed(0)) * 1e-3
    scale = current_scale(x, dtype)
    codes = quantize(x, scale, dtype)
    back = codes.rows.float() * scale[0]
    normal = x.abs() * scale[1] >= torch.finfo(dtype).smallest_normal
    assert ((back - x).abs() <= error * x.abs() * 1.0001)[normal].all()
    assert torch.equal(codes.columns.float(), codes.rows.float().t())
    assert codes.columns.is_contiguous()
    assert torch.equal(transposed(codes.columns).float(), codes.rows.float())
    assert back.abs().max() == pytest.approx(amax(x).item())


def test_values_above_the_range_saturate_and_those_that_are_not_finite_become_nan():
    x = torch.tensor([[1000.0, -1000.0, float("inf"), float("-inf"), float("nan"), 1.0]])
    for dtype in (E4M3, E5M2):
        found = quantize(x, scale_of(torch.tensor(448.0), 448.0), dtype, columns=False).rows.float()
        largest = min(torch.finfo(dtype).max, 1024)
        assert found[0, :2].tolist() == [largest, -largest]
        assert found[0, 2:5].isnan().all()
        assert found[0, 5] == 1


def test_a_tensor_that_is_not_finite_gives_a_product_that_is_not_finite():
    for bad in (float("nan"), float("inf")):
        x = torch.ones(16, 16)
        x[0, 0] = bad
        scale = current_scale(x, E4M3)
        operand = Operand(quantize(x, scale, E4M3).rows, scale)
        assert not gemm(operand, operand, torch.float32, fast=True).isfinite().all()


def test_the_largest_value_seen_only_grows():
    seen = torch.tensor(2.0)
    for values, largest in (([1.0, -1.5], 2.0), ([-3.0, 0.0], 3.0), ([0.0, 0.0], 3.0)):
        quantize(torch.tensor([values]), torch.ones(2), E4M3, seen=seen)
        assert seen == largest


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_a_product_is_that_of_the_rounded_factors(dtype):
    generator = torch.Generator().manual_seed(1)
    a, b = torch.randn(5, 48, generator=generator), torch.randn(7, 48, generator=generator)
    bias = torch.randn(7, generator=generator).to(dtype)
    scales = [current_scale(x, E4M3) for x in (a, b)]
    operands = [Operand(quantize(x, s, E4M3).rows, s) for x, s in zip((a, b), scales, strict=True)]
    rounded = [operand.codes.double() * operand.scale[0].double() for operand in operands]
    found = gemm(*operands, dtype, bias, fast=True)
    expected = rounded[0] @ rounded[1].t() + bias
    assert found.dtype == dtype
    assert torch.allclose(found.double(), expected, rtol=torch.finfo(dtype).eps, atol=1e-5)
    total = torch.ones(5, 7)
    accumulate_gemm(total, *operands)
    assert torch.allclose(total.double(), 1 + rounded[0] @ rounded[1].t(), atol=1e-5)
