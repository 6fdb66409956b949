"""FP8 with a scale per block or row on a GPU: products and fused casts against the references, and layers in both.

Needs a Hopper GPU, whose cuBLAS multiplies blocks with fp32 scales.
"""

import pytest
import torch
from kernel_reference import reference

from megatrain.kernels.activations import SILU, Activation
from megatrain.kernels.fp8.blocks import (
    accumulate_block_gemm,
    block_gemm,
    cast_blocks,
    cast_square_blocks,
)
from megatrain.kernels.fp8.gemms import Operand
from megatrain.kernels.fp8.rows import (
    cast_rows,
    decode_rows,
    grouped_gemm,
    pack_rows,
    unpack_rows,
)
from megatrain.kernels.moe.grouped_gemm import GroupedProducts
from megatrain.kernels.moe.permute import Permutation, permute_rows
from megatrain.model.implementations.grouped_mlp import GroupedWeight, _GroupedMlp
from megatrain.parallel.batch import PassInfo
from megatrain.parallel.fp8.experts import Fp8GroupedGemms
from megatrain.parallel.fp8.linear import fp8_column_linear, fp8_row_linear
from megatrain.parallel.fp8.scaling import Fp8Recipe
from megatrain.parallel.grid import RankGroup
from megatrain.parallel.tensor_parallel import Bias, TensorParallel

pytestmark = [
    pytest.mark.skipif(
        not torch.cuda.is_available() or torch.cuda.get_device_capability()[0] != 9,
        reason="needs a Hopper GPU",
    ),
    pytest.mark.filterwarnings("default"),  # Triton's own
]
E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2
ALONE = RankGroup("alone", (0,), 0)
TP = TensorParallel(ALONE, ALONE, sequence_parallel=False)
SIZES = [(128, 128, 128), (256, 384, 640), (48, 80, 112), (1008, 6144, 4096), (8192, 4096, 14336)]


def drawn(*shape: int, seed: int = 0, std: float = 1.0) -> torch.Tensor:
    """Return values whose blocks differ in size by up to 2^12."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(*shape, generator=generator) * std
    places = torch.arange(shape[-1]) // 32 % 13
    return (x * 2.0 ** -places.float()).to("cuda", torch.bfloat16)


def decoded(operand: Operand) -> torch.Tensor:
    """Return the values of a cast in row blocks, in fp32: torch multiplies them with TF32 off by default."""
    scale = operand.scale.t().repeat_interleave(128, 1)[:, : operand.codes.shape[1]]
    return operand.codes.float() * scale


@pytest.mark.parametrize("dtype", [E4M3, E5M2])
@pytest.mark.parametrize("size", [(1, 16), (130, 260), (8192, 14336), (28672, 4096)])
@pytest.mark.parametrize("kind", ["row blocks", "square blocks"])
def test_casts_are_those_of_the_references_bit_for_bit(
    kind: str, size: tuple[int, int], dtype: torch.dtype
) -> None:
    cast = cast_blocks if kind == "row blocks" else cast_square_blocks
    x = drawn(*size)
    x[0, :3] = torch.tensor([float("nan"), float("inf"), -3e38])
    for found, expected in zip(cast(x, dtype), reference(cast)(x, dtype), strict=True):
        assert found is not None
        assert expected is not None
        assert torch.equal(found.scale, expected.scale)
        assert torch.equal(found.codes.float().nan_to_num(0), expected.codes.float().nan_to_num(0))
        assert torch.equal(found.codes.float().isnan(), expected.codes.float().isnan())


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("dtype", [E4M3])
def test_a_product_with_a_weight_is_that_of_the_emulation(
    size: tuple[int, int, int], dtype: torch.dtype
) -> None:
    m, n, k = size
    x, weight = cast_blocks(drawn(m, k), dtype).rows, cast_square_blocks(drawn(n, k, seed=1, std=0.02), E4M3)
    assert x is not None
    assert weight.rows is not None
    bias = drawn(n, seed=2)
    for out, own in ((torch.bfloat16, bias), (torch.bfloat16, None), (torch.float32, bias.float())):
        found = block_gemm(x, weight.rows, out, own)
        expected = block_gemm(x, weight.rows, torch.float64, own)
        error = ((found - expected).abs().max() / expected.abs().max()).item()
        assert error < (2**-7 if out is torch.bfloat16 else 1e-3), error
    dy = cast_blocks(drawn(m, n, seed=3), dtype).rows
    assert dy is not None
    assert weight.columns is not None
    found = block_gemm(dy, weight.columns, torch.bfloat16)
    expected = block_gemm(dy, weight.columns, torch.float64)
    assert ((found - expected).abs().max() / expected.abs().max()).item() < 2**-7


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("dtype", [E4M3])
def test_a_weight_gradient_is_that_of_the_emulation(size: tuple[int, int, int], dtype: torch.dtype) -> None:
    m, n, k = size
    dy, x = cast_blocks(drawn(m, n), dtype).columns, cast_blocks(drawn(m, k, seed=1), E4M3).columns
    assert dy is not None
    assert x is not None
    total, first = torch.ones(n, k, device="cuda"), torch.zeros(n, k, device="cuda")
    accumulate_block_gemm(total, dy, x)
    accumulate_block_gemm(first, dy, x, is_zero=True)
    expected = decoded(dy) @ decoded(x).t()
    error = ((first - expected).abs().max() / expected.abs().max()).item()
    assert error < 1e-3, error
    assert torch.allclose(total, 1 + first, rtol=1e-5)


@pytest.mark.parametrize("kind", ["column", "row"])
@pytest.mark.parametrize("numbers", ["e4m3", "hybrid"])
@pytest.mark.parametrize("has_fp8_wgrad", [True, False])
def test_a_linear_layer_is_near_that_in_bf16(kind: str, numbers: str, has_fp8_wgrad: bool) -> None:
    """Codes of e4m3 have 3 bits of mantissa: errors of single factors are below 1/16, those of sums smaller."""
    recipe = Fp8Recipe(
        name="blockwise",
        format="hybrid" if numbers == "hybrid" else "e4m3",
        tokens=ALONE, tp=ALONE, has_fp8_wgrad=has_fp8_wgrad, keeps_weights=True, block=128,
    )  # fmt: skip
    inputs, outputs = 1024, 512
    weight, dy = drawn(outputs, inputs, std=0.02, seed=1), drawn(256, 2, outputs, std=1e-4, seed=2)
    bias = drawn(outputs, seed=3)
    activation = Activation(fn=SILU, is_gated=True) if kind == "row" else None
    x = drawn(256, 2, inputs * (2 if activation else 1)).requires_grad_()
    grad, info = torch.zeros(outputs, inputs, device="cuda"), PassInfo()
    value = x.detach().clone().requires_grad_()  # the backward pass of an activation overwrites its input
    own_weight, own_bias = weight.clone().requires_grad_(), Bias(bias, bias.float() * 0)
    fp8 = recipe.linear("weight")
    y = (
        fp8_column_linear(fp8, x, own_weight, grad, TP, info, own_bias)
        if activation is None
        else fp8_row_linear(fp8, x, own_weight, grad, TP, info, own_bias, activation=activation)
    )
    y.backward(dy)
    gate, up = value.chunk(2, -1)
    hidden = value if activation is None else torch.nn.functional.silu(gate) * up
    expected = hidden @ weight.t() + bias
    expected.backward(dy)
    wgrad = dy.flatten(0, 1).float().t() @ hidden.detach().flatten(0, 1).float()
    for found, wanted in ((y, expected), (x.grad, value.grad), (grad, wgrad)):
        assert found is not None
        assert wanted is not None
        error = ((found - wanted).float().norm() / wanted.float().norm()).item()
        assert error < 0.05, error
    assert not torch.equal(y, expected)


@pytest.mark.parametrize("ends", [(256, 512, 768, 1024), (3, 3, 700, 1001), (0, 16, 1008, 1024)])
@pytest.mark.parametrize("fast", [True, False])
def test_a_grouped_product_is_that_of_the_emulation(ends: tuple[int, ...], fast: bool) -> None:
    """Groups may be empty and of any size; no one reads the rows after the last end."""
    x, weight = cast_rows(drawn(1024, 2048)), cast_rows(drawn(4, 1408, 2048, seed=1, std=0.02))
    offsets = torch.tensor(ends, dtype=torch.int32, device="cuda")
    x.scale[ends[-1] :] = float("nan")
    found = grouped_gemm(x, weight, offsets, torch.bfloat16, fast=fast)[: ends[-1]]
    expected = grouped_gemm(x, weight, offsets, torch.float64, fast=fast)[: ends[-1]]
    error = ((found - expected).abs().max() / expected.abs().max()).item()
    assert error < 2**-7, error


def test_casts_of_rows_are_those_of_the_references_bit_for_bit() -> None:
    for x in (drawn(1000, 7168), drawn(3, 2816, 2048)):
        x.view(-1, x.shape[-1])[5, :2] = torch.tensor([float("nan"), float("inf")])
        found, expected = cast_rows(x), reference(cast_rows)(x)
        assert torch.equal(found.scale, expected.scale)
        assert torch.equal(found.codes.float().nan_to_num(-1), expected.codes.float().nan_to_num(-1))


def pass_of_experts(products: GroupedProducts, rows: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """Return output, gradients of rows and probabilities, and weight gradients; rows after the last end are left out."""
    e, h, f = 4, 1024, 768
    ends = torch.tensor([100, 100, 640, 990], dtype=torch.int32, device="cuda")
    weights = [drawn(e, 2 * f, h, seed=1, std=0.02), drawn(e, h, f, seed=2, std=0.02)]
    probs = torch.rand(len(rows), generator=torch.Generator().manual_seed(3)).cuda()
    own_rows, own_probs = rows.clone().requires_grad_(), probs.requires_grad_()
    grads = [torch.zeros_like(weight, dtype=torch.float32) for weight in weights]
    fc1, fc2 = (
        GroupedWeight(weight.clone().requires_grad_(), grad)
        for weight, grad in zip(weights, grads, strict=True)
    )
    activation = Activation(fn=SILU, is_gated=True)
    out = _GroupedMlp.apply(own_rows, own_probs, ends, fc1, fc2, activation, products, PassInfo(), None)
    out.backward(drawn(len(rows), h, seed=4, std=1e-3))
    assert own_rows.grad is not None
    assert own_probs.grad is not None
    return (out[:990], own_rows.grad[:990], own_probs.grad[:990], *grads)


def test_routed_experts_are_near_those_in_bf16() -> None:
    both = (GroupedProducts(), Fp8GroupedGemms(ALONE, keeps_weights=True))
    results = [pass_of_experts(products, drawn(1000, 1024)) for products in both]
    for expected, found in zip(*results, strict=True):
        error = ((found - expected).float().norm() / expected.float().norm()).item()
        assert 0 < error < 0.08, error


def test_saved_codes_of_rounded_rows_change_no_bit() -> None:
    rows, order = drawn(1000, 1024), torch.arange(1000, device="cuda")
    ends = torch.tensor([1000], dtype=torch.int32, device="cuda")
    packed = permute_rows(pack_rows(cast_rows(rows)), Permutation(order[:, None], order, ends, ends[0]))
    rounded = decode_rows(unpack_rows(packed), torch.bfloat16)
    of_values, of_rounded, of_codes = (
        pass_of_experts(Fp8GroupedGemms(ALONE, keeps_weights=True, saves_codes=saves_codes), given)
        for saves_codes, given in ((False, rows), (False, rounded), (True, rounded))
    )
    assert all(map(torch.equal, of_rounded, of_codes))
    assert all(map(torch.equal, of_values[:3], of_codes[:3]))
    assert not torch.equal(of_values[-2], of_codes[-2])
