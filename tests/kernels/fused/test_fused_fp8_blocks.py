"""Fused casts with a scale per block against their references, bit for bit."""

import pytest
import torch
from fused_helpers import DEVICE, DTYPES, drawn
from kernel_reference import reference

from megatrain.kernels.fp8 import blocks as references
from megatrain.kernels.fused.fp8_scales import blocks as fused

pytestmark = pytest.mark.filterwarnings("default")  # Triton's own
FORMATS = [torch.float8_e4m3fn, torch.float8_e5m2]
SIZES = [(1, 16), (33, 48), (130, 140)] + ([(8192, 4096), (1008, 14336)] if DEVICE == "cuda" else [])


@pytest.mark.parametrize("fp8", FORMATS)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("kind", ["row blocks", "square blocks"])
def test_codes_and_scales_of_both_orders(
    fp8: torch.dtype, dtype: torch.dtype, size: tuple[int, int], kind: str
) -> None:
    name = "cast_blocks" if kind == "row blocks" else "cast_square_blocks"
    cast, kernel = getattr(references, name), getattr(fused, name)
    x = drawn(*size)
    if DEVICE == "cpu":  # the interpreter's rounding loses the carry to the exponent: test without rounding
        x = (x.sign() * x.abs().clamp(min=2**-4)).to(torch.float8_e5m2).float()
    x = (x * torch.logspace(-4, 1, size[1], base=2, device=DEVICE).round().exp2()).to(dtype)
    x[0, 3], x[0, 5], x[-1, 7], x[:, 9] = float("nan"), float("inf"), 0.0, 0.0
    for block in (128,) if DEVICE == "cuda" or size[0] > 100 else (128, 16):
        for rows, columns in ((True, True), (True, False), (False, True)):
            found = kernel(x, fp8, block, rows, columns)
            expected = reference(cast)(x, fp8, block, rows=rows, columns=columns)
            for one, other in zip(found, expected, strict=True):
                assert (one is None) == (other is None)
                if one is not None:
                    assert torch.equal(one[0].float().nan_to_num(-1), other.codes.float().nan_to_num(-1))
                    assert torch.equal(one[1], other.scale)


def test_a_block_of_tiny_values_has_the_largest_scale() -> None:
    x = torch.full((16, 16), 1e-40, device=DEVICE)
    ((_, scale), _) = fused.cast_blocks(x, FORMATS[0], 16, True, True)
    assert (scale == 1 / references.LARGEST_SCALE).all()
