"""Scales, rounding and packing are those of compressed-tensors; GPTQ and AWQ have smaller errors of the outputs than rounding."""

import pytest
import torch
from torch import Tensor

from megatrain.config.schema.quantization import QUANTIZATION_FORMATS, NumberFormat
from megatrain.kernels.quantization.awq import channel_scales, clipped_scales, output_error
from megatrain.kernels.quantization.gptq import gptq
from megatrain.kernels.quantization.packing import pack, unpack
from megatrain.kernels.quantization.rounding import dequantize, quantize, round_trip, scales_of

INT4 = NumberFormat("int", 4, "group", 16)


def weight(rows: int = 200, columns: int = 256) -> Tensor:
    found = torch.randn(rows, columns, generator=torch.Generator().manual_seed(1)) * 0.05
    found[3] = 0
    return found


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", QUANTIZATION_FORMATS)
def test_numbers_are_those_of_compressed_tensors(name: str) -> None:
    pytest.importorskip("compressed_tensors")
    from compressed_tensors.quantization import QuantizationArgs
    from compressed_tensors.quantization.lifecycle import forward
    from compressed_tensors.quantization.utils import calculate_qparams

    numbers, w = QUANTIZATION_FORMATS[name].weights, weight()
    args = QuantizationArgs(**numbers.described(is_dynamic=False))
    scales = scales_of(w, numbers, torch.bfloat16)
    values = quantize(w, scales, numbers)
    theirs = forward.quantize(w, scales, torch.zeros_like(scales), args)
    assert torch.equal(values, theirs)
    assert torch.equal(dequantize(values, scales, numbers), forward.dequantize(theirs, scales, args=args))
    if numbers.strategy in ("channel", "group"):
        groups = w.unflatten(1, (-1, numbers.group_size or w.shape[1]))
        expected, _ = calculate_qparams(groups.amin(-1), groups.amax(-1), args)
        found = scales_of(w, numbers)
        assert torch.allclose(
            found[w.any(1)], expected[w.any(1)], rtol=1e-6 if numbers.kind == "float" else 2e-3, atol=0
        )


@pytest.mark.parametrize("name", [name for name, one in QUANTIZATION_FORMATS.items() if one.inputs])
@pytest.mark.filterwarnings("ignore")
def test_rounded_inputs_are_those_of_compressed_tensors(name: str) -> None:
    pytest.importorskip("compressed_tensors")
    from compressed_tensors.quantization import QuantizationArgs
    from compressed_tensors.quantization.lifecycle.forward import fake_quantize
    from compressed_tensors.quantization.utils import compute_dynamic_scales_and_zp

    numbers, x = QUANTIZATION_FORMATS[name].inputs, weight().view(4, 50, 256)
    assert numbers is not None
    args = QuantizationArgs(**numbers.described(is_dynamic=True))
    scales, zeros = compute_dynamic_scales_and_zp(x, args, torch.nn.Module())
    found = scales_of(x, numbers)
    some = x.any(-1)
    assert torch.allclose(
        found[some], scales[some].view_as(found[some]), rtol=1e-6 if numbers.kind == "float" else 1e-4, atol=0
    )
    expected = fake_quantize(x, found, zeros, args)
    assert torch.allclose(round_trip(x, found, numbers), expected, rtol=1e-6, atol=1e-9)


def test_the_last_bit_of_the_largest_value_does_not_change_its_number() -> None:
    x = -weight(16, 64).abs().double()
    noise = 1 + 1e-15 * torch.randn(x.shape, generator=torch.Generator().manual_seed(0))
    first, other = (quantize(one, scales_of(one, INT4), INT4) for one in (x, x * noise))
    assert torch.equal(first, other)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("num_bits", [4, 8])
@pytest.mark.parametrize("columns", [64, 37])
def test_packed_words_are_those_of_compressed_tensors(num_bits: int, columns: int) -> None:
    half = 1 << num_bits - 1
    values = torch.randint(-half, half, (5, columns), generator=torch.Generator().manual_seed(0))
    words = pack(values, num_bits)
    assert torch.equal(unpack(words, num_bits, columns).long(), values)
    pytest.importorskip("compressed_tensors")
    from compressed_tensors.compressors.pack_quantized.helpers import pack_to_int32

    assert torch.equal(words, pack_to_int32(values.to(torch.int8), num_bits))


def inputs(channels: int) -> Tensor:
    """Correlated inputs; some channels are large."""
    generator = torch.Generator().manual_seed(2)
    mix = torch.randn(channels, channels, generator=generator) / channels**0.5 + torch.eye(channels)
    x = torch.randn(512, channels, generator=generator) @ mix
    x[:, :3] *= 20
    return x


def test_gptq_and_awq_have_smaller_errors_of_the_outputs_than_rounding() -> None:
    w, x = weight(64, 64), inputs(64)
    hessian = x.t() @ x / len(x)
    scales = scales_of(w, INT4)
    rounding = output_error(round_trip(w, scales, INT4) - w, hessian)
    assert rounding == pytest.approx(
        float((x @ (round_trip(w, scales, INT4) - w).t()).square().sum() / len(x)), rel=1e-3
    )
    by_gptq = output_error(dequantize(gptq(w, hessian, scales, INT4), scales, INT4) - w, hessian)
    assert by_gptq < 0.6 * rounding
    s = channel_scales([w], hessian, x.abs().mean(0), INT4)
    scaled, inner = w * s, hessian / s / s[:, None]
    clipped = clipped_scales(scaled, inner, INT4, torch.float32)
    by_awq = output_error(round_trip(scaled, clipped, INT4) - scaled, inner)
    assert by_awq < 0.6 * rounding


def test_gptq_without_correlations_rounds_to_nearest() -> None:
    w = weight(16, 32)
    scales = scales_of(w, INT4)
    assert torch.equal(gptq(w, torch.eye(32), scales, INT4), quantize(w, scales, INT4))


def test_gptq_reads_channels_that_are_always_zero() -> None:
    w, x = weight(16, 32), inputs(32)
    x[:, 5] = 0
    values = gptq(w, x.t() @ x, scales_of(w, INT4), INT4)
    assert bool(values.isfinite().all())
