"""Fused kernels against their references, over shapes, dtypes and odd sizes."""

import functools

import pytest
import torch
from fused_helpers import DEVICE, DTYPES, drawn, near
from kernel_reference import reference

from megatrain.kernels import (
    activations,
    cross_entropy,
    divergence,
    norms,
    output_gate,
    random,
    rotary,
    sums,
)
from megatrain.kernels.activations import Activation
from megatrain.kernels.fused import activations as fused_activations
from megatrain.kernels.fused import cross_entropy as fused_cross_entropy
from megatrain.kernels.fused import norms as fused_norms
from megatrain.kernels.fused import output_gate as fused_output_gate
from megatrain.kernels.fused import random as fused_random
from megatrain.kernels.fused import rotary as fused_rotary
from megatrain.kernels.fused import sums as fused_sums

pytestmark = pytest.mark.filterwarnings("default")  # Triton's own


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    ("rows", "columns"),
    [
        *((2, 5), (7, 16), (33, 129), (300, 64), (5, 4096), (600, 768)),
        *((3, 8192), (2, 12288), (3, 16384), (1000, 8192)),
    ],
)
@pytest.mark.parametrize("kind", ["rms", "layer"])
@pytest.mark.parametrize("has_delta", [False, True])
def test_norm(
    dtype: torch.dtype, rows: int, columns: int, kind: str, has_delta: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if DEVICE == "cpu" and rows * columns > 50_000:
        pytest.skip("slow in the interpreter")
    if rows == 300:
        monkeypatch.setattr(fused_norms, "_WARPS", 12)  # so that programs have several tiles
    x, weight = drawn(rows, 1, columns, dtype=dtype), drawn(columns, dtype=dtype, seed=1)
    bias = drawn(columns, dtype=dtype, seed=2) if kind == "layer" else None
    delta = drawn(rows, 1, columns, dtype=dtype, seed=3) if has_delta else None
    dy, dtotal = drawn(rows, 1, columns, dtype=dtype, seed=4), drawn(rows, 1, columns, dtype=dtype, seed=5)
    found = norms.NormOutput(*fused_norms.norm(x, delta, weight, bias, 1e-5, 1.0))
    expected = reference(norms.norm)(x, delta, weight, bias, 1e-5, 1.0)
    assert torch.equal(found.total, expected.total)
    near(found.y, expected.y, dtype)
    near(found.mean, expected.mean, torch.float32, columns)
    near(found.rstd, expected.rstd, torch.float32, columns)
    term = drawn(rows, 1, columns, dtype=dtype, seed=6)
    if delta is not None:
        terms = torch.stack((delta, term))
        of_terms = fused_norms.norm(x, terms, weight, bias, 1e-5, 1.0)
        assert torch.equal(of_terms[0], reference(norms.norm)(x, terms, weight, bias, 1e-5, 1.0).total)
        assert torch.equal(of_terms[0], fused_norms.add_terms(x, terms))
        assert torch.equal(of_terms[1], fused_norms.norm(x, delta + term, weight, bias, 1e-5, 1.0)[1])
    for along, dy_term in ((None, None), (dtotal, None), (dtotal, term)):
        gradients = fused_norms.norm_backward(
            dy, along, found.total, weight, found.mean, found.rstd, 1.0, dy_term
        )
        references = reference(norms.norm_backward)(dy, along, found, weight, 1.0, dy_term)
        if dy_term is not None:
            statistics = found.total, weight, found.mean, found.rstd, 1.0
            of_sum = fused_norms.norm_backward(dy + dy_term, along, *statistics)
            assert torch.equal(gradients[0], of_sum[0])
            # In the weight's, the compiler joins other multiplications and additions, unless it joins none.
            with monkeypatch.context() as patched:
                unjoined = functools.partial(fused_norms.launch, enable_fp_fusion=False)
                patched.setattr(fused_norms, "launch", unjoined)
                of_terms = fused_norms.norm_backward(dy, along, *statistics, dy_term)
                of_sum = fused_norms.norm_backward(dy + dy_term, along, *statistics)
            assert torch.equal(of_terms[1], of_sum[1])
        near(gradients[0], references[0], dtype)
        near(gradients[1].sum(0), references[1].sum(0), torch.float32, rows)


def test_a_norm_of_an_fp32_residual_stream_in_fp16() -> None:
    x, delta = drawn(5, 1, 96), drawn(5, 1, 96, dtype=torch.float16, seed=3)
    weight = drawn(96, dtype=torch.float16, seed=1)
    total, y, _, _ = fused_norms.norm(x, delta, weight, None, 1e-5, 0.0)
    expected = reference(norms.norm)(x, delta, weight, None, 1e-5)
    assert (total.dtype, y.dtype) == (torch.float32, torch.float16)
    near(total, expected.total, torch.float32)
    near(y, expected.y, torch.float16)


@pytest.mark.parametrize("clamp", [None, 1.5])
@pytest.mark.parametrize(
    "activation_fn",
    [activations.SILU, activations.SQUARED_RELU],
    ids=lambda activation_fn: activation_fn.name,
)
def test_activations_propagate_nan(
    activation_fn: activations.ActivationFunction, clamp: float | None
) -> None:
    activation = Activation(fn=activation_fn, is_gated=clamp is not None, clamp=clamp)
    x, dy = drawn(4, 64), drawn(4, 32 if activation.is_gated else 64)
    for column in (3, 40):
        x[1, column] = float("nan")
    y = fused_activations.activate(x, *activation.kernel_args)
    dx, _ = fused_activations.activate_backward(dy, x, None, *activation.kernel_args)
    assert torch.equal(y.isnan(), reference(activations.activate)(x, activation).isnan())
    assert y.isnan().any()
    assert dx[1].isnan().any()


ACTIVATION_FUNCTIONS = [
    activations.SILU, activations.QUICK_GELU, activations.GELU, activations.GELU_TANH, activations.SQUARED_RELU,
]  # fmt: skip


@pytest.mark.parametrize("activation_fn", ACTIVATION_FUNCTIONS, ids=lambda activation_fn: activation_fn.name)
def test_derivatives_are_finite_where_squares_overflow(activation_fn: activations.ActivationFunction) -> None:
    activation = Activation(fn=activation_fn)
    x = torch.tensor([-1e20, -1e4, 1e4, 1e20], device=DEVICE)
    dx, _ = fused_activations.activate_backward(torch.ones_like(x), x, None, *activation.kernel_args)
    assert dx.isfinite().all()
    torch.testing.assert_close(dx, activations.activate_backward_reference(torch.ones_like(x), x, activation))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("activation_fn", ACTIVATION_FUNCTIONS, ids=lambda activation_fn: activation_fn.name)
@pytest.mark.parametrize(
    ("is_gated", "clamp", "offset"), [(False, None, 0.0), (True, None, 0.0), (True, 1.5, 1.0)]
)
@pytest.mark.parametrize(("rows", "columns"), [(1, 40), (5, 33), (3, 2500)])
def test_activation(
    dtype: torch.dtype, activation_fn: activations.ActivationFunction, is_gated: bool, clamp: float | None, offset: float,
    rows: int, columns: int,
) -> None:  # fmt: skip
    activation = Activation(fn=activation_fn, is_gated=is_gated, clamp=clamp, offset=offset)
    x = 2 * drawn(rows, 1, columns * (1 + is_gated), dtype=dtype)
    dy = drawn(rows, 1, columns, dtype=dtype, seed=1)
    recomputed = torch.empty_like(dy)
    y = fused_activations.activate(x, *activation.kernel_args)
    near(y, reference(activations.activate)(x, activation), dtype)
    dx, _ = fused_activations.activate_backward(dy, x, recomputed, *activation.kernel_args)
    near(dx, activations.activate_backward_reference(dy, x, activation), dtype)
    near(recomputed, y, dtype)  # another kernel, with other fused multiply-adds
    with_sums, sums = fused_activations.activate_backward(dy, x, None, *activation.kernel_args, has_sums=True)
    near(with_sums, dx, dtype)
    near(
        sums.sum(0), with_sums.double().flatten(0, -2).sum(0), dtype, rows
    )  # of gradients that are not rounded
    in_place, _ = fused_activations.activate_backward(dy, x, dy, *activation.kernel_args, overwrites_x=True)
    assert in_place.data_ptr() == x.data_ptr()
    assert torch.equal(in_place, dx)
    assert torch.equal(dy, recomputed)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("is_interleaved", [False, True])
@pytest.mark.parametrize(
    ("heads", "d", "rotary_percent"),
    [((4, 2, 2), 8, 1.0), ((40, 1, 1), 64, 1.0), ((3, 3, 3), 24, 0.5), ((4, 2, 2, 4), 8, 1.0)],
)
def test_rotary(
    dtype: torch.dtype, is_interleaved: bool, heads: tuple[int, ...], d: int, rotary_percent: float
) -> None:
    s, b = 5, 2
    spec = rotary.RotarySpec(base=10000.0, rotary_percent=rotary_percent)
    cos, sin = rotary.cos_sin_tables(spec, d, torch.arange(s, device=DEVICE), dtype=torch.float32)
    kind = {"is_interleaved": is_interleaved}
    qkv = drawn(s, b, sum(heads), d, dtype=dtype)
    for is_backward in (False, True):
        found = fused_rotary.apply_rope(qkv[:, :, 1:], cos, sin, **kind, is_backward=is_backward)
        near(
            found,
            rotary.apply_rope_reference(qkv[:, :, 1:], cos, sin, **kind, is_backward=is_backward),
            dtype,
        )
        of_larger_heads = torch.cat((qkv, qkv), dim=-1)
        fused_rotary.rotate_into(*2 * (of_larger_heads[..., d:],), cos, sin, is_interleaved, is_backward)
        assert torch.equal(of_larger_heads[..., :d], qkv)
        assert torch.equal(of_larger_heads[:, :, 1:, d:], found)
    gradients = [drawn(s, b, n, d, dtype=dtype, seed=seed) for seed, n in enumerate(heads)]
    gradients[1] = gradients[1].transpose(0, 1).contiguous().transpose(0, 1)
    near(
        fused_rotary.apply_rope_to_qkv_backward(gradients, cos, sin, **kind),
        reference(rotary.apply_rope_to_qkv_backward)(gradients, cos, sin, **kind), dtype,
    )  # fmt: skip
    expected = reference(rotary.apply_rope_to_qkv)(qkv, heads, cos, sin, **kind)
    for one, other in zip(
        fused_rotary.apply_rope_to_qkv(qkv, heads, cos, sin, **kind), expected, strict=True
    ):
        near(one, other, dtype)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("has_silu", [False, True])
@pytest.mark.parametrize(("heads", "d"), [((4, 2, 2, 4), 8), ((3, 1, 1, 3), 33), ((40, 8, 8, 40), 64)])
def test_output_gate(dtype: torch.dtype, heads: tuple[int, ...], d: int, has_silu: bool) -> None:
    """The gate is a part of the QKV projection; the gradient may have other strides too."""
    s, b = 3, 2
    gate = drawn(s, b, sum(heads), d, dtype=dtype).split(list(heads), dim=2)[3].flatten(2)
    assert not gate.is_contiguous()
    x = drawn(s, b, heads[0] * d, dtype=dtype, seed=1)
    dy = drawn(b, s, heads[0] * d, dtype=dtype, seed=2).transpose(0, 1)
    expected_y = reference(output_gate.gate_output)(x, gate, has_silu=has_silu)
    near(fused_output_gate.gate_output(x, gate, has_silu=has_silu), expected_y, dtype)
    place = torch.zeros(s, b, 2 * heads[0] * d, dtype=dtype, device=DEVICE)[..., heads[0] * d :]
    found = fused_output_gate.gate_output_backward(dy, x, gate, has_silu=has_silu, out=place)
    assert found[1] is place
    expected = reference(output_gate.gate_output_backward)(dy, x, gate, has_silu=has_silu)
    for one, other in zip(found, expected, strict=True):
        near(one, other, dtype)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    ("rows", "columns", "num_real"), [(3, 7, 7), (5, 64, 50), (4, 9000, 8999), (2, 16, 0)]
)
def test_cross_entropy(dtype: torch.dtype, rows: int, columns: int, num_real: int) -> None:
    logits = (8 * drawn(rows, columns, dtype=torch.float32)).to(dtype)
    labels = torch.arange(rows, device=DEVICE) * 3 % max(num_real, 1)
    labels[0 if num_real else slice(None)] = -1
    found = cross_entropy.LogitStatistics(
        logits, *fused_cross_entropy.logit_statistics(logits, labels, num_real)
    )
    expected = reference(cross_entropy.logit_statistics)(logits.clone(), labels, num_real)
    assert torch.equal(found.target_logits, expected.target_logits)
    assert not num_real or torch.equal(found.max_logits, expected.max_logits)
    near(found.sum_exp, expected.sum_exp, torch.float32, columns)
    log_sums = found.sum_exp.clamp(min=1).log() + found.max_logits.clamp(min=-1e3)
    softmax_scale, onehot_scale = drawn(rows, seed=1).abs(), drawn(rows, seed=2).abs()
    fused_cross_entropy.write_gradient(logits, log_sums, labels, softmax_scale, onehot_scale, num_real)
    near(
        logits,
        reference(cross_entropy.cross_entropy_backward)(
            expected, log_sums, labels, softmax_scale, onehot_scale, num_real, dtype
        ),
        dtype,
        columns,
    )


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("is_reversed", [False, True])
@pytest.mark.parametrize(("rows", "columns", "num_real"), [(3, 7, 7), (4, 9000, 8999)])
def test_divergence(dtype: torch.dtype, rows: int, columns: int, num_real: int, *, is_reversed: bool) -> None:
    student, teacher = ((8 * drawn(rows, columns, seed=seed)).to(dtype) for seed in (1, 2))
    sizes, scale = (1.7, num_real), drawn(rows, seed=3)
    found = fused_cross_entropy.divergence_statistics(student, teacher, *sizes, is_reversed=is_reversed)
    expected = reference(divergence.statistics)(student, teacher, *sizes, is_reversed=is_reversed)
    for one, other in zip(found, expected, strict=True):
        near(one, other, torch.float32, columns)
    losses, log_sums = divergence.divergences(expected[2:], expected[:2], is_reversed=is_reversed)
    arguments = (student, teacher.clone(), log_sums, losses, scale, *sizes)
    gradient = reference(divergence.divergence_gradient)(*arguments, is_reversed=is_reversed)
    fused_cross_entropy.write_divergence_gradient(*arguments, is_reversed=is_reversed)
    near(arguments[1], gradient, dtype, columns)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("mean", "std"), [(0.0, 1.0), (1.0, 0.02), (0.0, 0.03)])
def test_normal_numbers_are_the_same_bits(dtype: torch.dtype, mean: float, std: float) -> None:
    # Covers both regions of the quantile, counters beyond 32 bits, rows that begin within a counter, and lower halves (of
    # the position and of 0.03) with the highest bit set.
    found = torch.empty(90, 101, dtype=dtype, device=DEVICE)
    expected = torch.empty_like(found, device="cpu")
    where = {
        "key": 0xFEDCBA9876543210,
        "first": 2**35 + 2**31 + 3,
        "row_stride": 1003,
        "mean": mean,
        "std": std,
    }
    fused_random.fill_normal(found, **where)
    reference(random.fill_normal)(expected, **where)
    assert torch.equal(found.cpu(), expected)


@pytest.mark.parametrize("columns", [1030, 64])
@pytest.mark.parametrize("dtype", DTYPES)
def test_dropout_is_the_same_to_the_last_bit(
    columns: int, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    rows = torch.stack([torch.arange(50), 2**40 - torch.arange(50)], dim=1).to(DEVICE)
    x, threshold = drawn(50, 2, columns, dtype=dtype), random.dropout_threshold(0.3)
    found = fused_random.drop(x, rows, 77, threshold)
    assert torch.equal(found.cpu(), random.drop(x.cpu(), rows.cpu(), key=77, p=0.3))
    assert 0.65 < (found != 0).float().mean().item() < 0.75
    for kind in (dtype, torch.float32):  # the residual stream may have a higher precision
        residual = drawn(50, 2, columns, dtype=kind, seed=1)
        total = fused_random.drop(x, rows, 77, threshold, residual)
        assert total.dtype is kind
        assert torch.equal(total, residual + found)
    monkeypatch.setattr(fused_random, "_SUMMING_PROGRAMS", 2)  # so that a program has several tiles
    again, sums_of_columns = fused_random.drop_with_sums(x, rows, 77, threshold)
    assert torch.equal(again, found)
    near(sums_of_columns.sum(0), found.double().flatten(0, 1).sum(0), dtype, 10)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("weight_dtype", [torch.float32, None], ids=["fp32", "same"])
@pytest.mark.parametrize("activation_fn", ACTIVATION_FUNCTIONS, ids=lambda activation_fn: activation_fn.name)
@pytest.mark.parametrize(
    ("is_gated", "clamp", "offset"), [(False, None, 0.0), (True, None, 0.0), (True, 1.5, 1.0)]
)
@pytest.mark.parametrize(("rows", "columns"), [(1, 40), (5, 33), (3, 2500)])
def test_weighted_activation(
    dtype: torch.dtype, weight_dtype: torch.dtype | None, activation_fn: activations.ActivationFunction,
    is_gated: bool, clamp: float | None, offset: float, rows: int, columns: int,
) -> None:  # fmt: skip
    activation = Activation(fn=activation_fn, is_gated=is_gated, clamp=clamp, offset=offset)
    x = 2 * drawn(rows, columns * (1 + is_gated), dtype=dtype)
    weights = drawn(rows, dtype=weight_dtype or dtype, seed=1)
    dy = drawn(rows, columns, dtype=dtype, seed=2)
    expected = activations.activate_weighted(x.double(), weights.double(), activation)
    found = fused_activations.activate(x, *activation.kernel_args, weights=weights)
    near(found, expected, dtype)
    in_place, dy_fp64 = dy.clone(), dy.double()
    dx, dweights = fused_activations.activate_weighted_backward(in_place, x, weights, *activation.kernel_args)
    assert torch.equal(in_place, found)
    of_x, of_weights = activations.activate_weighted_backward(
        dy_fp64, x.double(), weights.double(), activation
    )
    near(dx, of_x, dtype)
    near(dweights, of_weights, weights.dtype, columns)


def test_weighted_activation_skips_rows_after_the_last_end(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fused_activations, "_PROGRAMS", 3)  # so that programs compute several rows
    activation = Activation(fn=activations.SILU, is_gated=True)
    x, weights, dy = drawn(20, 2 * 33), drawn(20, seed=1), drawn(20, 33, seed=2)
    ends = torch.tensor([4, 4, 11], dtype=torch.int32, device=DEVICE)
    expected = fused_activations.activate(x, *activation.kernel_args, weights=weights)
    dy_of_all, dy_before = dy.clone(), dy.clone()
    of_all = fused_activations.activate_weighted_backward(dy_of_all, x, weights, *activation.kernel_args)
    found = fused_activations.activate(x, *activation.kernel_args, weights=weights, ends=ends)
    dx, dweights = fused_activations.activate_weighted_backward(
        dy, x, weights, *activation.kernel_args, ends=ends
    )
    assert torch.equal(found[:11], expected[:11])
    assert torch.equal(dx[:11], of_all[0][:11])
    assert torch.equal(dweights[:11], of_all[1][:11])
    assert torch.equal(dy[:11], dy_of_all[:11])
    assert torch.equal(dy[11:], dy_before[11:])


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    ("rows", "columns"), [(1, 1), (7, 5), (31, 129), (100, 768), (5000, 3072), (9000, 64)]
)
def test_column_sums(dtype: torch.dtype, rows: int, columns: int) -> None:
    if DEVICE == "cpu" and rows * columns > 100_000:
        pytest.skip("slow in the interpreter")
    x, before = drawn(rows, columns, dtype=dtype), drawn(columns, seed=1)
    found, expected = before.clone(), before.double()
    fused_sums.add_column_sums(found, x)
    reference(sums.add_column_sums)(expected, x.double())
    near(found, expected, torch.float32, rows)
    for first in {0, 1, columns // 2, columns - 1}:
        parts = [part.clone() for part in before.tensor_split([first])]
        fused_sums.add_column_sums(parts[0], x, parts[1])
        assert torch.equal(found, torch.cat(parts))


@pytest.mark.parametrize("is_interleaved", [False, True])
def test_rope_of_gradients_is_in_place_for_views_of_one_tensor(is_interleaved: bool) -> None:
    sizes, table = (4, 2, 2), drawn(9, 1, 1, 8)
    whole = drawn(9, 3, 8, 16, seed=1)
    copies = [part.clone() for part in whole.split(sizes, dim=2)]
    expected = reference(rotary.apply_rope_to_qkv_backward)(
        copies, table.cos(), table.sin(), is_interleaved=is_interleaved
    )
    of_both = [
        fused_rotary.apply_rope_to_qkv_backward(
            parts, table.cos(), table.sin(), is_interleaved=is_interleaved
        )
        for parts in (copies, whole.split(sizes, dim=2))
    ]
    assert of_both[1].data_ptr() == whole.data_ptr()
    for found in of_both:
        near(found, expected, torch.float32)


def test_strided_tensors_are_read_correctly() -> None:
    x, delta, dy, dtotal = (drawn(6, 1, 2 * 40, seed=seed)[..., ::2] for seed in range(4))
    weight = drawn(40, seed=4)
    output = reference(norms.norm)(x, delta, weight, None, 1e-5)
    near(fused_norms.norm(x, delta, weight, None, 1e-5, 0.0)[1], output.y, torch.float32, 40)
    strided = output._replace(total=output.total.repeat_interleave(2, dim=-1)[..., ::2])
    found = fused_norms.norm_backward(dy, dtotal, strided.total, weight, None, output.rstd, 0.0)
    expected = reference(norms.norm_backward)(dy, dtotal, output, weight)
    near(found[0], expected.dx, torch.float32, 40)
    near(found[1].sum(0), expected.rows.sum(0), torch.float32, 40)
    activation = Activation(fn=activations.SILU)
    recomputed = torch.empty(6, 1, 40, device=DEVICE)
    dx, _ = fused_activations.activate_backward(dy, x, recomputed, *activation.kernel_args)
    near(dx, activations.activate_backward_reference(dy, x, activation), torch.float32)
    near(recomputed, reference(activations.activate)(x, activation), torch.float32)


def test_in_place_kernels_refuse_strided_tensors() -> None:
    x, dy = drawn(6, 40), drawn(6, 2 * 40)[:, ::2]
    kind = Activation(fn=activations.SILU).kernel_args
    cos, sin = drawn(3, 1, 1, 4), drawn(3, 1, 1, 4)
    heads = drawn(3, 2, 4, 2 * 8)[..., ::2]
    columns, numbers = torch.zeros(6, dtype=torch.int64, device=DEVICE), drawn(2 * 6)[::2]
    for start in (
        lambda: fused_activations.activate_backward(dy, x, dy, *kind),
        lambda: fused_activations.activate_weighted_backward(dy, x, numbers, *kind),
        lambda: fused_rotary.apply_rope_to_qkv(heads, (2, 1, 1), cos, sin, is_interleaved=False),
        lambda: fused_cross_entropy.logit_statistics(dy, columns, 40),
        lambda: fused_cross_entropy.write_gradient(x, numbers, columns, numbers, numbers, 40),
        lambda: fused_random.fill_normal(dy, 1, 0, 40, 0.0, 1.0),
    ):
        with pytest.raises(AssertionError):
            start()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("size", "number", "count"), [(2, 0, 7), (2, 1, 2048), (4, 2, 5000), (8, 7, 4097)])
def test_parts_are_summed_in_their_order(dtype: torch.dtype, size: int, number: int, count: int) -> None:
    parts, own = drawn(size, count, dtype=dtype), drawn(count, dtype=dtype, seed=1)
    parts[number] = float("nan")  # is not read
    found, expected = torch.empty_like(own), own.clone()
    fused_sums.sum_parts(parts, own, number, found)
    reference(sums.sum_parts)(parts, expected, number, expected)
    assert torch.equal(found, expected)
    fused_sums.sum_parts(parts, own, number, own)
    assert torch.equal(own, expected)
