"""Fused casts to FP8 against their references, bit for bit."""

import pytest
import torch
from fused_helpers import DEVICE, DTYPES, drawn
from kernel_reference import reference

from megatrain.kernels.activations import SILU, Activation
from megatrain.kernels.fp8 import quantize as references
from megatrain.kernels.fused import activations
from megatrain.kernels.fused.fp8_scales import tensors as fused

pytestmark = pytest.mark.filterwarnings("default")  # Triton's own
FORMATS = [torch.float8_e4m3fn, torch.float8_e5m2]
SIZES = [(1, 16), (33, 48), (64, 128), (130, 260)] + ([(4096, 14336)] if DEVICE == "cuda" else [])


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("size", SIZES)
def test_the_scale_of_a_tensor(dtype: torch.dtype, size: tuple[int, int]) -> None:
    x = drawn(*size, dtype=dtype)
    for x_ in (x, torch.zeros_like(x)):
        assert fused.amax(x_).item() == reference(references.amax)(x_).item()
        for fp8 in FORMATS:
            expected = references.scale_of(reference(references.amax)(x_), torch.finfo(fp8).max)
            assert torch.equal(fused.current_scale(x_, fp8), expected)
            assert torch.equal(fused.scale_of_one(reference(references.amax)(x_), fp8), expected)
    x[-1, -1] = float("nan")
    assert fused.amax(x).isnan()
    assert fused.current_scale(x, FORMATS[0]).isnan().all()


@pytest.mark.parametrize("fp8", FORMATS)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("size", SIZES)
def test_a_cast_in_both_orders(fp8: torch.dtype, dtype: torch.dtype, size: tuple[int, int]) -> None:
    x = drawn(*size, dtype=dtype) * 1e-2
    scale = references.scale_of(
        reference(references.amax)(x) / 4, torch.finfo(fp8).max
    )  # large values saturate
    if (
        DEVICE == "cpu"
    ):  # the interpreter neither saturates nor carries to the exponent: test with FP8 numbers
        scale = torch.tensor([1 / 64, 64.0])
        x = ((x * 64).to(fp8).float() / 64).to(dtype)
    else:
        x[0, 3], x[0, 5], x[0, 7] = float("nan"), float("inf"), -torch.finfo(dtype).max
    for rows, columns in ((True, True), (True, False), (False, True)):
        found = references.Codes(*fused.quantize(x, scale, fp8, rows, columns, None))
        expected = reference(references.quantize)(x, scale, fp8, rows=rows, columns=columns)
        for one, other in zip(found, expected, strict=True):
            assert (one is None) == (other is None)
            assert one is None or torch.equal(one.float().nan_to_num(-1), other.float().nan_to_num(-1))
    codes = reference(references.quantize)(x, scale, fp8, rows=True, columns=False).rows
    assert torch.equal(fused.transposed(codes).view(torch.uint8), codes.view(torch.uint8).t())


def test_the_largest_value_seen() -> None:
    x, seen, scale = drawn(130, 48), torch.zeros(3, device=DEVICE), torch.ones(2, device=DEVICE)
    for factor, largest in ((2.0, 2.0), (1.0, 2.0), (3.0, 3.0)):
        fused.quantize(x * factor, scale, FORMATS[0], True, True, seen[1])
        assert seen.tolist() == pytest.approx([0, largest * x.abs().max().item(), 0])


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("is_gated", [False, True])
@pytest.mark.parametrize("size", SIZES)
def test_activations_cast_in_the_pass_that_computes_them(
    dtype: torch.dtype, is_gated: bool, size: tuple[int, int]
) -> None:
    rows, columns = size
    function = Activation(
        fn=SILU, is_gated=is_gated, clamp=2.0 if is_gated else None, offset=0.5 * is_gated
    ).kernel_args
    x, dy = drawn(rows, columns * (1 + is_gated), dtype=dtype), drawn(rows, columns, dtype=dtype)
    for value in (1.0, float("nan")):
        x[rows // 2, columns // 2] = value
        seen = torch.zeros(3, device=DEVICE)
        y = activations.activate(x, *function, seen=seen[0])
        assert torch.equal(y.nan_to_num(), activations.activate(x, *function).nan_to_num())
        recomputed, scale = torch.empty_like(dy), fused.current_scale(dy, FORMATS[0])
        dx, _ = activations.activate_backward(dy, x, recomputed, *function, seen=seen[1])
        _, codes = fused.quantize(recomputed, scale, FORMATS[0], False, True, None)
        in_place = x.clone()
        found, found_codes = activations.activate_backward_cast(
            dy, in_place, scale, FORMATS[0], *function, seen=seen[2]
        )
        assert found.data_ptr() == in_place.data_ptr()
        assert torch.equal(found.nan_to_num(), dx.nan_to_num())
        assert torch.equal(found_codes.view(torch.uint8), codes.view(torch.uint8))
        expected = torch.stack([part.abs().amax().float() for part in (y, dx, dx)])
        assert torch.equal(seen.nan_to_num(-1), expected.nan_to_num(-1))
