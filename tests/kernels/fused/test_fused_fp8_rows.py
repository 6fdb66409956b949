"""Fused casts with a scale per row against their references, bit for bit."""

import pytest
import torch
from fused_helpers import DEVICE, DTYPES, drawn
from kernel_reference import reference

from megatrain.kernels.fp8 import rows as references
from megatrain.kernels.fused import permute
from megatrain.kernels.fused.fp8_scales import rows as fused
from megatrain.kernels.moe.permute import gather_rows_reference

pytestmark = pytest.mark.filterwarnings("default")  # Triton's own
SIZES = [(1, 16), (3, 5, 48)] + ([(8192, 4096), (16, 2048, 7168)] if DEVICE == "cuda" else [])


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("size", SIZES)
def test_codes_and_scales(dtype: torch.dtype, size: tuple[int, ...]) -> None:
    x = drawn(*size)
    if DEVICE == "cpu":  # the interpreter's rounding loses the carry to the exponent: test without rounding
        x = (x.sign() * x.abs().clamp(min=2**-4)).to(torch.float8_e5m2).float()
    x = x.to(dtype)
    x.view(-1, size[-1])[-1] = 0.0
    assert torch.equal(fused.row_amax(x), x.abs().amax(dim=-1).float())
    x[0].view(-1)[:3] = torch.tensor([float("nan"), float("inf"), 1.0])
    for amax in (None, fused.row_amax(x) * 3):
        codes, scale = fused.cast_rows(x, amax, references.FORMAT)
        expected = reference(references.cast_rows)(x, amax)
        assert torch.equal(scale, expected.scale)
        assert torch.equal(codes.float().nan_to_num(-1), expected.codes.float().nan_to_num(-1))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("size", [(3, 48), (5, 16)] + ([(8192, 7168)] if DEVICE == "cuda" else []))
def test_values_of_packed_rows(dtype: torch.dtype, size: tuple[int, int]) -> None:
    x = drawn(*size) * torch.logspace(-4, 4, size[0], device=DEVICE)[:, None]
    packed = references.pack_rows(reference(references.cast_rows)(x))
    cast = references.unpack_rows(packed)
    expected = (cast.codes.float() * cast.scale[:, None]).to(dtype)
    assert torch.equal(fused.decode_rows(*cast, dtype), expected)


@pytest.mark.parametrize("columns", [255, 256, 7200])
def test_bytes_are_gathered_as_they_are(columns: int) -> None:
    """All bytes, in pairs that are NaN, infinity or -0 in 16 bits too."""
    x = torch.arange(6 * columns, device=DEVICE).view(6, columns).mul(97).remainder(256).to(torch.uint8)
    index = torch.tensor([5, 0, -1, 3, 3], device=DEVICE)
    assert torch.equal(permute.gather_rows(x, index), gather_rows_reference(x, index))
