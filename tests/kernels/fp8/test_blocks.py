"""Casts with a scale per block, and their products, against their definitions."""

import pytest
import torch

from megatrain.kernels.fp8.blocks import (
    LARGEST_SCALE,
    accumulate_block_gemm,
    block_gemm,
    cast_blocks,
    cast_square_blocks,
    power_of_two_scale,
    row_block_gemm_reference,
)

E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2


def drawn(*shape, seed=0, dtype=torch.float32):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


@pytest.mark.parametrize(
    ("amax", "scale"),
    [(448.0, 1.0), (449.0, 0.5), (224.0, 2.0), (225.0, 1.0), (7.0, 64.0), (0.0, 1.0), (1e-44, LARGEST_SCALE)],
)
def test_a_scale_is_the_largest_power_of_two_that_does_not_saturate(amax, scale):
    assert power_of_two_scale(torch.tensor([amax]), 448.0).item() == scale


@pytest.mark.parametrize("block", [4, 128])
def test_each_block_has_the_scale_of_its_largest_value(block):
    x = drawn(2 * block, 3 * block) * torch.logspace(-6, 3, 3 * block)
    cast = cast_blocks(x, E4M3, block)
    row, column = block + 1, 2 * block + 1
    of_row = x[row, 2 * block :].abs().amax()
    assert cast.rows.scale[2, row] == 1 / power_of_two_scale(of_row, 448.0)
    of_column = x[block:, column].abs().amax()
    assert cast.columns.scale[1, column] == 1 / power_of_two_scale(of_column, 448.0)
    square = cast_square_blocks(x, E4M3, block)
    of_square = power_of_two_scale(x[block:, 2 * block :].abs().amax(), 448.0)
    assert square.rows.scale[1, 2] == square.columns.scale[2, 1] == 1 / of_square
    assert torch.equal(square.rows.codes.float(), square.columns.codes.float().t())


@pytest.mark.parametrize(("dtype", "error"), [(E4M3, 2**-4), (E5M2, 2**-3)])
def test_a_round_trip_errs_by_half_a_unit_in_the_last_place_of_each_block(dtype, error):
    """Values of one tensor differ by ten orders of magnitude, which a single scale could not hold."""
    x = drawn(40, 32) * torch.logspace(-8, 2, 8).repeat_interleave(4)
    cast = cast_blocks(x, dtype, 4)
    back = cast.rows.codes.float() * cast.rows.scale.t().repeat_interleave(4, 1)
    is_normal = cast.rows.codes.float().abs() >= torch.finfo(dtype).smallest_normal
    assert ((back - x).abs() <= error * x.abs() * 1.0001)[is_normal].all()
    assert is_normal.float().mean() > 0.99


def test_smaller_blocks_at_the_ends_are_those_of_a_matrix_with_zeros_after_it():
    x = drawn(6, 10)
    whole = torch.zeros(8, 12)
    whole[:6, :10] = x
    for cast in (cast_blocks, cast_square_blocks):
        own, other = cast(x, E4M3, 4), cast(whole, E4M3, 4)
        assert torch.equal(own.rows.codes.float(), other.rows.codes.float()[:6, :10])
        assert torch.equal(own.columns.codes.float(), other.columns.codes.float()[:10, :6])


def test_a_block_with_a_value_that_is_not_finite_gives_nan_there_and_nowhere_else():
    x = torch.ones(8, 8)
    x[1, 2], x[5, 6] = float("nan"), float("inf")
    for cast in (cast_blocks, cast_square_blocks):
        for operand, place in ((cast(x, E4M3, 4).rows, x), (cast(x, E4M3, 4).columns, x.t())):
            assert torch.equal(operand.codes.float().isnan(), ~place.isfinite())
            assert operand.scale.isfinite().all()


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
@pytest.mark.parametrize("block", [4, 128])
def test_products_of_blocks_are_those_of_the_rounded_factors(dtype, block):
    x, weight, dy = drawn(5, 150), drawn(9, 150, seed=1), drawn(5, 9, seed=2)
    bias = drawn(9, seed=3, dtype=dtype)
    inputs, weights, gradients = (
        cast_blocks(x, E4M3, block),
        cast_square_blocks(weight, E4M3, block),
        cast_blocks(dy, E5M2, block),
    )
    rounded_weight = weights.rows.codes.double() * spread(weights.rows.scale, block)[:9, :150]
    rounded = inputs.rows.codes.double() * inputs.rows.scale.double().t().repeat_interleave(block, 1)[:, :150]
    y = block_gemm(inputs.rows, weights.rows, dtype, bias, block)
    near(y, rounded @ rounded_weight.t() + bias, dtype)
    rounded_dy = (
        gradients.rows.codes.double() * gradients.rows.scale.double().t().repeat_interleave(block, 1)[:, :9]
    )
    near(block_gemm(gradients.rows, weights.columns, dtype, None, block), rounded_dy @ rounded_weight, dtype)
    total = torch.ones(9, 150, dtype=torch.float64 if dtype is torch.float64 else torch.float32)
    accumulate_block_gemm(total, gradients.columns, inputs.columns, block)
    columns = [
        part.codes.double() * part.scale.double().t().repeat_interleave(block, 1)[:, :5]
        for part in (gradients.columns, inputs.columns)
    ]
    near(total, 1 + columns[0] @ columns[1].t(), total.dtype)


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_products_of_row_blocks_are_those_of_the_rounded_factors(dtype):
    """As in MXFP8, whose weights have other codes in each order."""
    x, weight, bias = drawn(5, 150), drawn(9, 150, seed=1), drawn(9, seed=2, dtype=dtype)
    inputs, weights = cast_blocks(x, E4M3, 32), cast_blocks(weight, E4M3, 32)
    factors = [
        part.codes.double() * part.scale.double().t().repeat_interleave(32, 1)[:, :150]
        for part in (inputs.rows, weights.rows)
    ]
    y = row_block_gemm_reference(inputs.rows, weights.rows, dtype, bias, 32)
    near(y, factors[0] @ factors[1].t() + bias, dtype)
    assert not torch.equal(weights.rows.codes.float(), weights.columns.codes.float().t())


def spread(scale, block):
    return scale.double().repeat_interleave(block, 0).repeat_interleave(block, 1)


def near(found, expected, dtype):
    assert found.dtype == dtype
    assert torch.allclose(found.double(), expected.double(), rtol=torch.finfo(dtype).eps, atol=1e-4)
