"""Fused kernels against their references, over shapes, dtypes and odd sizes.

On a GPU they are compiled; elsewhere Triton's interpreter runs them, where it is installed: `TRITON_INTERPRET=1 pytest ...`.
"""

import os

import pytest
import torch

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
if DEVICE == "cpu" and os.environ.get("TRITON_INTERPRET") != "1":
    pytest.skip("needs a GPU, or Triton's interpreter", allow_module_level=True)
pytest.importorskip("triton")

from megatrain.kernels import (  # noqa: E402
    activations,
    column_sums,
    cross_entropy,
    norms,
    random,
    rotary,
)
from megatrain.kernels.activations import Activation  # noqa: E402
from megatrain.kernels.fused import activations as fused_activations  # noqa: E402
from megatrain.kernels.fused import column_sums as fused_column_sums  # noqa: E402
from megatrain.kernels.fused import cross_entropy as fused_cross_entropy  # noqa: E402
from megatrain.kernels.fused import norms as fused_norms  # noqa: E402
from megatrain.kernels.fused import permute as fused_permute  # noqa: E402
from megatrain.kernels.fused import random as fused_random  # noqa: E402
from megatrain.kernels.fused import rotary as fused_rotary  # noqa: E402
from megatrain.kernels.fused import routing as fused_routing  # noqa: E402
from megatrain.kernels.moe import permute, routing, routing_losses  # noqa: E402

pytestmark = pytest.mark.filterwarnings("default")  # Triton's own
DTYPES = [torch.float32, torch.bfloat16, torch.float16]
if DEVICE == "cpu":
    DTYPES.remove(torch.bfloat16)  # numpy, which the interpreter computes with, does not know it


def drawn(*shape: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed + sum(shape))
    return torch.randn(*shape, generator=generator).to(dtype).to(DEVICE)


def near(
    found: torch.Tensor | None, expected: torch.Tensor | None, dtype: torch.dtype, terms: int = 1
) -> None:
    """Within two roundings of the dtype, relative to the largest value; sums over `terms` in fp32 besides."""
    assert (found is None) == (expected is None)
    if found is None or expected is None:
        return
    assert found.shape == expected.shape
    size = expected.double().abs().max().clamp(min=1e-30)
    error = ((found.double() - expected.double()).abs().max() / size).item()
    assert error <= 2 * torch.finfo(dtype).eps + 1e-6 * max(terms, 4) ** 0.5, error


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
        monkeypatch.setattr(fused_norms, "_WARPS", 12)  # of programs that have several tiles
    x, weight = drawn(rows, 1, columns, dtype=dtype), drawn(columns, dtype=dtype, seed=1)
    bias = drawn(columns, dtype=dtype, seed=2) if kind == "layer" else None
    delta = drawn(rows, 1, columns, dtype=dtype, seed=3) if has_delta else None
    dy, dtotal = drawn(rows, 1, columns, dtype=dtype, seed=4), drawn(rows, 1, columns, dtype=dtype, seed=5)
    found = norms.NormOutput(*fused_norms.norm(x, delta, weight, bias, 1e-5, 1.0))
    expected = norms.norm_reference(x, delta, weight, bias, 1e-5, 1.0)
    assert torch.equal(found.total, expected.total)
    near(found.y, expected.y, dtype)
    near(found.mean, expected.mean, torch.float32, columns)
    near(found.rstd, expected.rstd, torch.float32, columns)
    for along in (None, dtotal):
        gradients = fused_norms.norm_backward(dy, along, found.total, weight, found.mean, found.rstd, 1.0)
        references = norms.norm_backward_reference(dy, along, found, weight, 1.0)
        near(gradients[0], references[0], dtype)
        near(gradients[1], references[1], torch.float32, rows)
        near(gradients[2], references[2], torch.float32, rows)


def test_a_norm_of_a_wide_residual_stream_is_narrow() -> None:
    x, delta = drawn(5, 1, 96), drawn(5, 1, 96, dtype=torch.float16, seed=3)
    weight = drawn(96, dtype=torch.float16, seed=1)
    total, y, _, _ = fused_norms.norm(x, delta, weight, None, 1e-5, 0.0)
    expected = norms.norm_reference(x, delta, weight, None, 1e-5)
    assert (total.dtype, y.dtype) == (torch.float32, torch.float16)
    near(total, expected.total, torch.float32)
    near(y, expected.y, torch.float16)


@pytest.mark.parametrize("clamp", [None, 1.5])
@pytest.mark.parametrize(
    "activation_fn",
    [activations.SILU, activations.SQUARED_RELU],
    ids=lambda activation_fn: activation_fn.name,
)
def test_activations_hide_no_nan(activation_fn: activations.ActivationFunction, clamp: float | None) -> None:
    activation = Activation(fn=activation_fn, is_gated=clamp is not None, clamp=clamp)
    x, dy = drawn(4, 64), drawn(4, 32 if activation.is_gated else 64)
    for column in (3, 40):
        x[1, column] = float("nan")
    y = fused_activations.activate(x, *activation.kernel_args)
    dx = fused_activations.activate_backward(dy, x, None, *activation.kernel_args)
    assert torch.equal(y.isnan(), activations.activate_reference(x, activation).isnan())
    assert y.isnan().any()
    assert dx[1].isnan().any()


ACTIVATION_FUNCTIONS = [
    activations.SILU, activations.QUICK_GELU, activations.GELU, activations.GELU_TANH, activations.SQUARED_RELU,
]  # fmt: skip


@pytest.mark.parametrize("activation_fn", ACTIVATION_FUNCTIONS, ids=lambda activation_fn: activation_fn.name)
def test_slopes_are_numbers_where_squares_are_infinite(activation_fn: activations.ActivationFunction) -> None:
    activation = Activation(fn=activation_fn)
    x = torch.tensor([-1e20, -1e4, 1e4, 1e20], device=DEVICE)
    dx = fused_activations.activate_backward(torch.ones_like(x), x, None, *activation.kernel_args)
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
    near(y, activations.activate_reference(x, activation), dtype)
    dx = fused_activations.activate_backward(dy, x, recomputed, *activation.kernel_args)
    near(dx, activations.activate_backward_reference(dy, x, activation), dtype)
    near(recomputed, y, dtype)  # another kernel, in which other products and sums are one operation
    near(fused_activations.activate_backward(dy, x, None, *activation.kernel_args), dx, dtype)
    in_place = fused_activations.activate_backward(dy, x, dy, *activation.kernel_args, overwrites_x=True)
    assert in_place.data_ptr() == x.data_ptr()
    assert torch.equal(in_place, dx)
    assert torch.equal(dy, recomputed)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("is_interleaved", [False, True])
@pytest.mark.parametrize(
    ("heads", "d", "share"), [((4, 2, 2), 8, 1.0), ((40, 1, 1), 64, 1.0), ((3, 3, 3), 24, 0.5)]
)
def test_rotary(
    dtype: torch.dtype, is_interleaved: bool, heads: tuple[int, ...], d: int, share: float
) -> None:
    s, b = 5, 2
    spec = rotary.RotarySpec(base=10000.0, rotary_percent=share)
    cos, sin = rotary.cos_sin_tables(spec, d, torch.arange(s, device=DEVICE), dtype=torch.float32)
    kind = {"is_interleaved": is_interleaved}
    qkv = drawn(s, b, sum(heads), d, dtype=dtype)
    for is_back in (False, True):
        found = fused_rotary.apply_rope(qkv[:, :, 1:], cos, sin, **kind, is_backward=is_back)
        near(found, rotary.apply_rope_reference(qkv[:, :, 1:], cos, sin, **kind, is_backward=is_back), dtype)
    gradients = [drawn(s, b, n, d, dtype=dtype, seed=seed) for seed, n in enumerate(heads)]
    gradients[1] = gradients[1].transpose(0, 1).contiguous().transpose(0, 1)
    near(
        fused_rotary.apply_rope_to_qkv_backward(gradients, cos, sin, **kind),
        rotary.apply_rope_to_qkv_backward_reference(gradients, cos, sin, **kind), dtype,
    )  # fmt: skip
    expected = rotary.apply_rope_to_qkv_reference(qkv, heads, cos, sin, **kind)
    for one, other in zip(
        fused_rotary.apply_rope_to_qkv(qkv, heads, cos, sin, **kind), expected, strict=True
    ):
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
    expected = cross_entropy.logit_statistics_reference(logits.clone(), labels, num_real)
    assert torch.equal(found.target_logits, expected.target_logits)
    assert not num_real or torch.equal(found.max_logits, expected.max_logits)
    near(found.sum_exp, expected.sum_exp, torch.float32, columns)
    log_sums = found.sum_exp.clamp(min=1).log() + found.max_logits.clamp(min=-1e3)
    softmax_scale, onehot_scale = drawn(rows, seed=1).abs(), drawn(rows, seed=2).abs()
    fused_cross_entropy.write_gradient(logits, log_sums, labels, softmax_scale, onehot_scale, num_real)
    near(
        logits,
        cross_entropy.cross_entropy_backward_reference(
            expected, log_sums, labels, softmax_scale, onehot_scale, dtype
        ),
        dtype,
        columns,
    )


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("mean", "std"), [(0.0, 1.0), (1.0, 0.02), (0.0, 0.03)])
def test_normal_numbers_are_the_same_bits(dtype: torch.dtype, mean: float, std: float) -> None:
    # Enough to have both regions of the quantile, counters beyond 32 bits, and rows that begin between counters. The lower
    # halves of the place and of 0.03 have their highest bit set.
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
    random.fill_normal_reference(expected, **where)
    assert torch.equal(found.cpu(), expected)


def test_dropout_keeps_the_same_elements() -> None:
    rows = torch.tensor([5, 2**40, 0, 7], device=DEVICE)
    found = torch.empty(4, 1030, dtype=torch.bool, device=DEVICE)
    expected = torch.empty_like(found, device="cpu")
    fused_random.keep_mask(found, rows, 77, round(0.3 * 2**32))
    random.keep_mask_reference(expected, rows.cpu(), 77, round(0.3 * 2**32))
    assert torch.equal(found.cpu(), expected)
    assert 0.65 < found.float().mean().item() < 0.75


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("weight_dtype", [torch.float32, None], ids=["wide", "same"])
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
    recomputed, wide = dy.clone(), dy.double()
    dx, dweights = fused_activations.activate_weighted_backward(
        recomputed, x, weights, *activation.kernel_args
    )
    assert torch.equal(recomputed, found)
    of_x, of_weights = activations.activate_weighted_backward(wide, x.double(), weights.double(), activation)
    near(dx, of_x, dtype)
    near(dweights, of_weights, weights.dtype, columns)


SCORES = ["softmax", "sigmoid", "sqrtsoftplus"]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    ("tokens", "num_experts", "top_k"), [(1, 1, 1), (7, 5, 5), (300, 128, 8), (33, 60, 4), (9, 3000, 3)]
)
@pytest.mark.parametrize("is_pre_softmax", [False, True])
@pytest.mark.parametrize("function", SCORES)
def test_picked_experts(
    dtype: torch.dtype, tokens: int, num_experts: int, top_k: int, function: str, is_pre_softmax: bool
) -> None:
    if is_pre_softmax and function != "softmax":
        pytest.skip("for softmax alone")
    logits = (3 * drawn(tokens, num_experts)).to(dtype)
    bias = drawn(num_experts, seed=3) if function != "softmax" and top_k != 4 else None
    rule = routing.TopKRule(
        top_k=top_k, score_function=function, is_pre_softmax=is_pre_softmax, scaling_factor=2.5
    )
    kind = {"score_function": function, "is_pre_softmax": is_pre_softmax, "scaling_factor": 2.5}
    experts, weights = fused_routing.select_experts(logits, bias, top_k=top_k, **kind)
    given = logits.double().requires_grad_()
    expected, of_reference = routing.select_experts_reference(given, rule, bias)
    assert torch.equal(experts, expected)
    near(weights, of_reference, dtype)
    dweights = drawn(tokens, top_k, seed=1).to(dtype)
    of_reference.backward(dweights.double())
    near(fused_routing.select_experts_backward(dweights, logits, experts, **kind), given.grad, dtype, num_experts)


def test_of_equal_logits_the_first_expert_is_the_better_one() -> None:
    logits = torch.tensor([[0.0, -0.0, 0.0, -0.0], [1.0, 2, 2, 1], [-torch.inf, -1, -torch.inf, -torch.inf]])
    nan = torch.tensor([[1.0, torch.nan, 2, torch.nan]])
    kind = {"top_k": 3, "score_function": "softmax", "is_pre_softmax": False, "scaling_factor": 1.0}
    experts, _ = fused_routing.select_experts(torch.cat((logits, nan)).to(DEVICE), None, **kind)
    assert experts.tolist() == [[0, 1, 2], [1, 2, 0], [1, 0, 2], [1, 3, 2]]


@pytest.mark.parametrize("function", SCORES)
def test_routers_gradients_go_through_autograd(function: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of weights, of both sums, of each alone, and none of the entropy."""
    for module in (routing, routing_losses):
        monkeypatch.setattr(module, "is_fused", lambda x: x.dtype is not torch.float64)
    logits, rule = 3 * drawn(24, 8), routing.TopKRule(top_k=2, score_function=function)
    factors = drawn(24, 2, seed=1)
    found = []
    for dtype in (torch.float32, torch.float64):
        given = logits.to(dtype, copy=True).requires_grad_()
        _, weights = routing.select_experts(given, rule)
        sums = routing_losses.score_sums(given, function, 4)
        of_shares = routing_losses.load_balancing_loss(
            sums.probs, torch.arange(32, device=DEVICE).view(4, 8), top_k=2, num_tokens=6
        )
        parts = ((weights * factors).sum(), of_shares, sums.squares)
        found.append([
            torch.autograd.grad(total, given, retain_graph=True)[0] for total in (*parts, sum(parts))
        ])  # fmt: skip
        assert not sums.entropy.requires_grad
    for narrow, expected in zip(*found, strict=True):
        near(narrow, expected, torch.float32, 8)


@pytest.mark.parametrize("function", SCORES)
def test_gradients_of_scores_that_vanish_are_numbers(function: str) -> None:
    logits = torch.tensor([[0.0, 1.0, -90.0], [0.0, 1.0, -200.0], [-200.0, -300.0, 90.0]], device=DEVICE)
    kind = {"score_function": function, "is_pre_softmax": False, "scaling_factor": 1.0}
    experts, weights = fused_routing.select_experts(logits, None, top_k=2, **kind)
    assert weights.isfinite().all()
    assert fused_routing.select_experts_backward(torch.ones_like(weights), logits, experts, **kind).isfinite().all()
    gradients = drawn(1, 3), drawn(1)[0]
    assert fused_routing.score_sums_backward(*gradients, logits, function, 1).isfinite().all()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    ("tokens", "num_experts", "samples"), [(1, 2, 1), (6, 5, 3), (300, 128, 2), (35, 60, 5), (9, 3000, 1)]
)
@pytest.mark.parametrize("function", SCORES)
def test_score_sums(
    dtype: torch.dtype,
    tokens: int,
    num_experts: int,
    samples: int,
    function: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(fused_routing, "_PROGRAMS", 4)  # which have several rounds
    logits = (3 * drawn(tokens, num_experts)).to(dtype)
    found = fused_routing.score_sums(logits, function, samples)
    given = logits.double().requires_grad_()
    expected = routing_losses.score_sums_reference(given, function, samples)
    near(found[:, :-2], expected.shares, torch.float32, tokens)
    near(found[:, -2].sum(), expected.entropy, torch.float32, tokens)
    near(found[:, -1].sum(), expected.squares, torch.float32, tokens)
    dshares, dsquares = drawn(samples, num_experts, seed=1), drawn(1, seed=2)[0]
    for of_shares, of_squares in ((dshares, dsquares), (dshares, None), (None, dsquares)):
        total = given.new_zeros(())
        if of_shares is not None:
            total = total + (expected.shares * of_shares.double()).sum()
        if of_squares is not None:
            total = total + expected.squares * of_squares.double()
        (gradient,) = torch.autograd.grad(total, given, retain_graph=True)
        dlogits = fused_routing.score_sums_backward(of_shares, of_squares, logits, function, samples)
        near(dlogits, gradient, dtype, num_experts)


@pytest.mark.parametrize(
    ("tokens", "top_k", "num_experts"),
    [
        (0, 2, 8),
        (1, 1, 1),
        (7, 3, 5),
        (300, 8, 128),
        (700, 8, 128),
        (700, 1, 3),
        (50, 4, 2048),
        (30_000, 8, 33),
    ],
)
@pytest.mark.parametrize("is_padded", [False, True])
@pytest.mark.parametrize("is_kept", [False, True])
def test_the_order_of_experts(
    tokens: int, top_k: int, num_experts: int, is_padded: bool, is_kept: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if DEVICE == "cpu" and ((num_experts > 2000 and is_padded) or tokens > 10_000):
        pytest.skip("slow in the interpreter")
    if tokens == 300:
        monkeypatch.setattr(fused_permute, "_TILES", 5)  # which have several rounds
    experts = drawn(tokens, max(num_experts, top_k)).topk(top_k).indices - 1  # -1 is nobody
    experts[tokens // 2 :] = experts[tokens // 2 :].clamp(min=num_experts // 2)  # loads are uneven
    kept = drawn(tokens, top_k, seed=1) > -1 if is_kept else None
    for first, num_own in ((0, num_experts), (num_experts // 3, num_experts // 3)):
        if num_own:
            rows_per_expert = tokens * top_k + 1 if is_padded else None
            num_rows = num_own * rows_per_expert if rows_per_expert else tokens * top_k + 3
            expected = permute.sort_by_expert_reference(
                experts, num_own, num_rows, first, kept, rows_per_expert
            )
            found = fused_permute.sort_by_expert(
                experts,
                kept,
                num_experts=num_own,
                num_rows=num_rows,
                first_expert=first,
                rows_per_expert=rows_per_expert,
            )
            for part, reference in zip(found, expected, strict=True):
                assert part.dtype == reference.dtype
                assert torch.equal(part, reference)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("tokens", "top_k", "columns"), [(1, 1, 5), (7, 3, 1030), (40, 8, 64)])
def test_permuted_rows(dtype: torch.dtype, tokens: int, top_k: int, columns: int) -> None:
    scores = drawn(tokens, 9)
    experts = scores.topk(top_k).indices
    permutation = permute.sort_by_expert(
        experts, num_experts=6, num_rows=tokens * 6, rows_per_expert=tokens, kept=experts != 2
    )
    x = drawn(tokens, columns, dtype=dtype)
    expected = permute.gather_rows_reference(x, permutation.tokens)
    assert torch.equal(fused_permute.gather_rows(x, permutation.assignments, top_k), expected)
    assert torch.equal(fused_permute.gather_rows(x, permutation.tokens), expected)
    numbers = drawn(tokens * top_k, dtype=dtype, seed=2)
    at_rows = fused_permute.gather_values(numbers, permutation.assignments)
    assert torch.equal(
        at_rows, permute.gather_rows_reference(numbers[:, None], permutation.assignments).flatten()
    )
    back = fused_permute.gather_values(at_rows, permutation.rows)
    assert torch.equal(back.flatten(), numbers.masked_fill(permutation.rows.flatten() < 0, 0))
    rows = drawn(tokens * 6, columns, dtype=dtype, seed=1).masked_fill_(
        (permutation.assignments < 0)[:, None], float("nan")
    )
    found = fused_permute.gather_sum(rows, permutation.rows)
    assert torch.equal(found, permute.gather_sum_reference(rows, permutation.rows))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    ("rows", "columns"), [(1, 1), (7, 5), (31, 129), (100, 768), (5000, 3072), (9000, 64)]
)
def test_column_sums(dtype: torch.dtype, rows: int, columns: int) -> None:
    if DEVICE == "cpu" and rows * columns > 100_000:
        pytest.skip("slow in the interpreter")
    x, before = drawn(rows, columns, dtype=dtype), drawn(columns, seed=1)
    found, expected = before.clone(), before.double()
    fused_column_sums.add_column_sums(found, x)
    column_sums.add_column_sums_reference(expected, x.double())
    near(found, expected, torch.float32, rows)
    recomputed = before.clone()
    fused_column_sums.add_column_sums(recomputed, x)
    assert torch.equal(found, recomputed)


@pytest.mark.parametrize("is_interleaved", [False, True])
def test_gradients_of_heads_are_turned_where_they_are(is_interleaved: bool) -> None:
    sizes, table = (4, 2, 2), drawn(9, 1, 1, 8)
    whole = drawn(9, 3, 8, 16, seed=1)
    apart = [part.clone() for part in whole.split(sizes, dim=2)]
    expected = rotary.apply_rope_to_qkv_backward_reference(
        apart, table.cos(), table.sin(), is_interleaved=is_interleaved
    )
    of_both = [
        fused_rotary.apply_rope_to_qkv_backward(
            parts, table.cos(), table.sin(), is_interleaved=is_interleaved
        )
        for parts in (apart, whole.split(sizes, dim=2))
    ]
    assert of_both[1].data_ptr() == whole.data_ptr()
    for found in of_both:
        near(found, expected, torch.float32)


def test_numbers_that_lie_apart_are_read_where_they_are() -> None:
    x, delta, dy, dtotal = (drawn(6, 1, 2 * 40, seed=seed)[..., ::2] for seed in range(4))
    weight = drawn(40, seed=4)
    known = norms.norm_reference(x, delta, weight, None, 1e-5)
    near(fused_norms.norm(x, delta, weight, None, 1e-5, 0.0)[1], known.y, torch.float32, 40)
    apart = known._replace(total=known.total.repeat_interleave(2, dim=-1)[..., ::2])
    found = fused_norms.norm_backward(dy, dtotal, apart.total, weight, None, known.rstd, 0.0)
    expected = norms.norm_backward_reference(dy, dtotal, known, weight)
    near(found[0], expected.dx, torch.float32, 40)
    near(found[1], expected.dweight, torch.float32, 40)
    activation = Activation(fn=activations.SILU)
    recomputed = torch.empty(6, 1, 40, device=DEVICE)
    dx = fused_activations.activate_backward(dy, x, recomputed, *activation.kernel_args)
    near(dx, activations.activate_backward_reference(dy, x, activation), torch.float32)
    near(recomputed, activations.activate_reference(x, activation), torch.float32)


def test_kernels_that_work_in_place_refuse_numbers_that_lie_apart() -> None:
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
