"""NVFP4: values, scales and roundings against the definitions of arXiv:2509.25149."""

import pytest
import torch

from megatrain.kernels.fp8.blocks import accumulate_block_gemm, block_gemm
from megatrain.kernels.fp8.nvfp4 import (
    cast_row_blocks,
    cast_square_blocks,
    hadamard,
    round_to_e2m1,
    tensor_scale,
)

VALUES = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6])


def drawn(*shape, seed=0, dtype=torch.float32):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def scale_of(x):
    return tensor_scale(x.abs().amax().float())


def decoded(operand):
    n, k = operand.codes.shape
    return operand.codes.float() * operand.scale.t().repeat_interleave(16, 1)[:n, :k]


def test_rounding_takes_the_nearest_value_and_the_even_one_of_two():
    x = torch.linspace(-7, 7, 1401)
    nearest = VALUES[(x.abs().clamp(max=6)[:, None] - VALUES).abs().argmin(1)]
    is_tie = torch.isin(x.abs(), torch.tensor([0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0]))
    assert torch.equal(round_to_e2m1(x)[~is_tie], torch.copysign(nearest, x)[~is_tie])
    ties = torch.tensor([0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0, -5.0])
    assert round_to_e2m1(ties).tolist() == [0, 1, 1, 2, 2, 4, 4, -4]
    assert torch.equal(round_to_e2m1(VALUES), VALUES)
    assert round_to_e2m1(torch.tensor([float("nan")])).isnan().all()


@pytest.mark.parametrize("value", [0.1, -0.7, 1.9, 2.25, 5.5, -6.0])
def test_stochastic_rounding_keeps_the_mean(value):
    random = torch.arange(1000, dtype=torch.float64) / 1000
    rounded = round_to_e2m1(torch.full((1000,), value, dtype=torch.float64), random)
    assert rounded.mean().item() == pytest.approx(value, abs=2e-3)
    assert len(rounded.unique()) <= 2
    assert torch.isin(rounded.abs(), VALUES.double()).all()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_scales_of_row_blocks_are_those_of_the_paper(dtype):
    x = drawn(8, 48, dtype=dtype) * torch.logspace(-3, 2, 48, dtype=dtype)
    cast, s = cast_row_blocks(x, scale_of(x)), 6 * 448 / x.abs().max().float()
    for block in range(3):
        amax = x[5, 16 * block : 16 * block + 16].abs().max().float()
        stored = (amax / 6 * s).to(torch.float8_e4m3fn).float()
        assert cast.scale[block, 5] == stored / s
    assert torch.isin(cast.codes.float().abs(), VALUES).all()
    error = (decoded(cast) - x.float()).abs().unflatten(1, (3, 16)).amax(2)
    largest = x.float().abs().unflatten(1, (3, 16)).amax(2)
    assert (error <= largest / 6 * 1.14).all()  # half the distance of 4 and 6, and the rounding of a scale


def test_square_blocks_are_the_same_in_both_orders():
    x = drawn(32, 48)
    cast = cast_square_blocks(x, scale_of(x))
    assert torch.equal(cast.rows.codes.float(), cast.columns.codes.float().t())
    assert torch.equal(cast.rows.scale[:, :3], cast.columns.scale[:, :2].t())
    y = drawn(5, 48, seed=1)
    of_y = cast_row_blocks(y, scale_of(y))
    weight = cast.rows.codes.float() * cast.rows.scale[:, :3].repeat_interleave(16, 0).repeat_interleave(
        16, 1
    )
    expected = decoded(of_y) @ weight.t()
    assert torch.allclose(
        block_gemm(of_y, cast.rows, torch.float32, block=16), expected, rtol=1e-5, atol=1e-5
    )


def test_the_hadamard_transform_keeps_products_and_spreads_outliers():
    x, y = drawn(3, 32, dtype=torch.float64), drawn(5, 32, seed=1, dtype=torch.float64)
    x[0, 7] = 100
    assert torch.allclose(hadamard(x) @ hadamard(y).t(), x @ y.t())
    assert hadamard(x)[0].abs().max() < 30
    total = torch.zeros(3, 5, dtype=torch.float64)
    accumulate_block_gemm(total, *(cast_row_blocks(hadamard(a), scale_of(a)) for a in (x, y)), 16)
    assert (total[1:] - (x @ y.t())[1:]).abs().max() < 0.4 * x[1:].norm(dim=1).max() * y.norm(dim=1).max()


def test_zeros_and_values_that_are_not_finite():
    zeros = torch.zeros(16, 16)
    assert not cast_row_blocks(zeros, scale_of(zeros)).codes.float().any()
    x = drawn(2, 32)
    x[1, 20] = float("nan")
    assert decoded(cast_row_blocks(x, scale_of(drawn(2, 32))))[1, 16:].isnan().all()
