"""FP8 on a GPU: torch's products and the fused casts against the emulation and the references, and a linear layer in both.

Needs a GPU with FP8 tensor cores: Ada, Hopper or later.
"""

import pytest
import torch
from kernel_reference import reference

from megatrain.kernels.activations import SILU, Activation
from megatrain.kernels.fp8.gemms import Operand, accumulate_gemm, gemm
from megatrain.kernels.fp8.quantize import (
    amax,
    current_scale,
    quantize,
    scale_of,
)
from megatrain.parallel.batch import PassInfo
from megatrain.parallel.fp8.linear import fp8_column_linear, fp8_row_linear
from megatrain.parallel.fp8.scaling import Fp8Linear, Fp8Recipe
from megatrain.parallel.grid import RankGroup
from megatrain.parallel.tensor_parallel import Bias, TensorParallel

pytestmark = [
    pytest.mark.skipif(
        not torch.cuda.is_available() or torch.cuda.get_device_capability() < (8, 9),
        reason="needs a GPU with FP8 tensor cores",
    ),
    pytest.mark.filterwarnings("default"),  # Triton's own
]
E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2
ALONE = RankGroup("alone", (0,), 0)
FAST_ERROR = 0.02
"""Partial sums of 14 bits: "nearly 2 %" according to DeepSeek-V3, arXiv:2412.19437, section 3.3.2."""
SUM_ERROR = 2**-11
"""Without `fast` a partial sum of 14 bits has at most 128 products: less than 4 roundings of 2^-13 of the largest sum."""
TP = TensorParallel(ALONE, ALONE, sequence_parallel=False)


def drawn(*shape: int, seed: int = 0, std: float = 1.0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return (torch.randn(*shape, generator=generator) * std).to("cuda", torch.bfloat16)


def operand(x: torch.Tensor, dtype: torch.dtype) -> Operand:
    scale = current_scale(x, dtype)
    rows = quantize(x, scale, dtype, columns=False).rows
    assert rows is not None
    return Operand(rows, scale)


@pytest.mark.parametrize("size", [(16, 16, 16), (48, 80, 112), (8192, 4096, 14336), (1000, 6144, 4096)])
@pytest.mark.parametrize("dtype", [E4M3, E5M2])
@pytest.mark.parametrize("fast", [True, False])
def test_a_product_is_that_of_the_emulation(
    size: tuple[int, int, int], dtype: torch.dtype, fast: bool
) -> None:
    m, n, k = size
    a, b = operand(drawn(m, k), dtype), operand(drawn(n, k, seed=1, std=0.02), E4M3)
    bias = drawn(n, seed=2)
    for out, own in ((torch.bfloat16, bias), (torch.bfloat16, None), (torch.float32, bias.float())):
        found, expected = gemm(a, b, out, own, fast=fast), gemm(a, b, torch.float64, own, fast=fast)
        error = ((found - expected).abs().max() / expected.abs().max()).item()
        assert error < (FAST_ERROR if fast else 2**-7 if out is torch.bfloat16 else SUM_ERROR), error
    expected = gemm(a, b, torch.float64, fast=fast)
    for is_zero in (False, True):
        total = torch.ones(m, n, device="cuda")
        accumulate_gemm(total, a, b, is_zero=is_zero)
        error = ((total - expected - float(not is_zero)).abs().max() / expected.abs().max()).item()
        assert error < SUM_ERROR, error


@pytest.mark.parametrize("dtype", [E4M3, E5M2])
@pytest.mark.parametrize("size", [(1, 16), (130, 260), (8192, 14336), (28672, 4096)])
def test_casts_are_those_of_the_references_bit_for_bit(size: tuple[int, int], dtype: torch.dtype) -> None:
    x = drawn(*size)
    assert torch.equal(current_scale(x, dtype), scale_of(reference(amax)(x), torch.finfo(dtype).max))
    scale = scale_of(reference(amax)(x) / 2, torch.finfo(dtype).max)
    x[0, :3] = torch.tensor([float("nan"), float("inf"), -3e38])
    found = quantize(x, scale, dtype)
    expected = reference(quantize)(x, scale, dtype, rows=True, columns=True)
    for one, other in zip(found, expected, strict=True):
        assert one is not None
        assert other is not None
        bits, wanted = one.view(torch.uint8) & 0x7F, other.view(torch.uint8) & 0x7F
        assert (bits[wanted >= 0x7F] == 0x7F).all()
        assert torch.equal(one.float().nan_to_num(0), other.float().nan_to_num(0))


@pytest.mark.parametrize("kind", ["column", "row"])
@pytest.mark.parametrize("has_fp8_wgrad", [True, False])
def test_a_linear_layer_is_near_that_in_bf16(kind: str, has_fp8_wgrad: bool) -> None:
    """Codes have 3 or 2 bits of mantissa: errors of single factors are below 1/16 and 1/8, those of sums smaller."""
    recipe = Fp8Recipe(
        name="tensorwise",
        format="hybrid",
        tokens=ALONE,
        tp=ALONE,
        has_fp8_wgrad=has_fp8_wgrad,
        keeps_weights=True,
    )
    inputs, outputs = (1024, 512)
    weight, dy = drawn(outputs, inputs, std=0.02, seed=1), drawn(256, 2, outputs, std=1e-4, seed=2)
    weight.requires_grad_()
    bias = drawn(outputs, seed=3)
    activation = Activation(fn=SILU, is_gated=True) if kind == "row" else None
    x = drawn(256, 2, inputs * (2 if activation else 1)).requires_grad_()
    grads = [torch.zeros(outputs, inputs, device="cuda") for _ in range(2)]
    fp8: Fp8Linear = recipe.linear("weight")
    results = []
    for own, number in ((fp8, 0), (None, 1)):
        value = x.detach().clone().requires_grad_()
        hidden = (
            value
            if activation is None
            else torch.nn.functional.silu(value.chunk(2, -1)[0]) * value.chunk(2, -1)[1]
        )
        if own is None:
            y = hidden @ weight.detach().t() + bias
            grads[1] += dy.flatten(0, 1).float().t() @ hidden.detach().flatten(0, 1).float()
        elif activation is None:
            y = fp8_column_linear(
                own, value, weight, grads[number], TP, PassInfo(), Bias(bias, bias.float() * 0)
            )
        else:
            y = fp8_row_linear(
                own,
                value,
                weight,
                grads[number],
                TP,
                PassInfo(),
                Bias(bias, bias.float() * 0),
                activation=activation,
            )
        y.backward(dy)
        results.append((y.detach(), value.grad, grads[number]))
    for found, expected in zip(*results, strict=True):
        assert found is not None
        assert expected is not None
        error = ((found - expected).float().norm() / expected.float().norm()).item()
        assert error < 0.08, error
    assert not torch.equal(results[0][0], results[1][0])
