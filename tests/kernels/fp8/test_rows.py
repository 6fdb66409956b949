"""Casts with a scale per row, and their grouped products, against their definitions."""

import pytest
import torch

from megatrain.kernels.fp8.rows import (
    RowCast,
    cast_rows,
    decode_rows,
    grouped_gemm,
    pack_rows,
    row_amax,
    unpack_rows,
)


def drawn(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def test_each_row_has_the_scale_of_its_largest_value():
    x = drawn(3, 5, 16) * torch.logspace(-9, 5, 15).view(3, 5, 1)
    cast = cast_rows(x)
    assert cast.scale.shape == (3, 5)
    largest = cast.codes.float().abs().amax(dim=-1)
    assert ((largest > 216) & (largest <= 448)).all()  # a power of two more would saturate
    back = cast.codes.float() * cast.scale[..., None]
    assert ((back - x).abs() <= 2**-4 * x.abs() + 2**-10 * cast.scale[..., None]).all()


def test_a_row_does_not_depend_on_the_others():
    x = drawn(6, 32)
    for row in range(6):
        one, all_rows = cast_rows(x[row : row + 1]), cast_rows(x * torch.arange(6)[:, None].ne(row) * 1e4 + x)
        assert torch.equal(one.codes[0].float(), all_rows.codes[row].float())


def test_parts_of_rows_have_the_codes_of_whole_rows_with_the_largest_value_of_both():
    x = drawn(4, 32)
    whole, parts = cast_rows(x), x.chunk(2, dim=1)
    amax = torch.maximum(*(row_amax(part) for part in parts))
    found = [cast_rows(part, amax) for part in parts]
    assert torch.equal(torch.cat([part.codes.float() for part in found], dim=1), whole.codes.float())
    assert all(torch.equal(part.scale, whole.scale) for part in found)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_a_grouped_product_is_that_of_the_rounded_factors(dtype):
    ends = torch.tensor(
        [3, 3, 10], dtype=torch.int32
    )  # the second group is empty, the last rows have no group
    x, weight = cast_rows(drawn(12, 48)), cast_rows(drawn(3, 7, 48, seed=1))
    found = grouped_gemm(x, weight, ends, dtype, fast=True)
    values = [cast.codes.double() * cast.scale.double()[..., None] for cast in (x, weight)]
    expected = torch.cat([values[0][:3] @ values[1][0].t(), values[0][3:10] @ values[1][2].t()])
    assert found.dtype == dtype
    assert torch.allclose(found[:10].double(), expected, rtol=torch.finfo(dtype).eps, atol=1e-4)


def test_a_row_that_is_not_finite_gives_an_output_that_is_not_finite():
    x = drawn(2, 16)
    x[1, 3] = float("inf")
    weight = RowCast(*cast_rows(drawn(1, 4, 16)))
    found = grouped_gemm(cast_rows(x), weight, torch.tensor([2], dtype=torch.int32), torch.float32, fast=True)
    assert found[0].isfinite().all()
    assert not found[1].isfinite().any()


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_decoded_rows_are_exact_and_a_second_cast_changes_nothing(dtype):
    """The largest code of a row may be 224 in the first cast, and then is 448 in the second."""
    x = (drawn(4000, 16) * torch.logspace(-37, 30, 4000)[:, None]).to(dtype)
    x[0] = 0
    x[1, 1:] = x[1, :1] * torch.linspace(-1, 1, 15, dtype=dtype)
    cast = cast_rows(x)
    values = decode_rows(cast, dtype)
    assert values.dtype == dtype
    assert torch.equal(values.double(), cast.codes.double() * cast.scale.double()[:, None])
    again = cast_rows(values)
    assert not torch.equal(again.scale, cast.scale)
    assert torch.equal(decode_rows(again, dtype), values)


def test_packed_rows_have_codes_and_scales_of_their_own():
    cast = cast_rows(drawn(5, 6) * torch.logspace(-3, 3, 5)[:, None])
    packed = pack_rows(cast)
    assert packed.shape == (5, 6 + 32)
    order = torch.tensor([3, 0, 4])
    found = unpack_rows(packed[order])
    assert torch.equal(found.codes.float(), cast.codes.float()[order])
    assert torch.equal(found.scale, cast.scale[order])
