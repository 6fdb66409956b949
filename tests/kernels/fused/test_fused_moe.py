"""Fused kernels of mixtures of experts against their references: routing, sums for its losses, permutation."""

from collections.abc import Iterator

import pytest
import torch
from fused_helpers import DEVICE, DTYPES, drawn, near
from kernel_reference import reference
from torch import Tensor

from megatrain.kernels.fused import grouped_gemm as fused_grouped_gemm
from megatrain.kernels.fused import permute as fused_permute
from megatrain.kernels.fused import routing as fused_routing
from megatrain.kernels.moe import permute, routing, routing_losses

pytestmark = pytest.mark.filterwarnings("default")  # Triton's own


SCORES = ["softmax", "sigmoid", "sqrtsoftplus"]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    ("tokens", "num_experts", "top_k"), [(1, 1, 1), (7, 5, 5), (300, 128, 8), (33, 60, 4), (9, 3000, 3)]
)
@pytest.mark.parametrize("is_pre_softmax", [False, True])
@pytest.mark.parametrize("function", SCORES)
def test_selected_experts(
    dtype: torch.dtype, tokens: int, num_experts: int, top_k: int, function: str, is_pre_softmax: bool
) -> None:
    if is_pre_softmax and function != "softmax":
        pytest.skip("softmax only")
    logits = (3 * drawn(tokens, num_experts)).to(dtype)
    bias = drawn(num_experts, seed=3) if function != "softmax" and top_k != 4 else None
    rule = routing.TopKRule(
        top_k=top_k, score_function=function, is_pre_softmax=is_pre_softmax, scaling_factor=2.5
    )
    kind = {"score_function": function, "is_pre_softmax": is_pre_softmax, "scaling_factor": 2.5}
    experts, probs = fused_routing.select_experts(logits, bias, top_k=top_k, **kind)
    given = logits.double().requires_grad_()
    expected, of_reference = reference(routing.select_experts)(given, rule, bias)
    assert torch.equal(experts, expected)
    near(probs, of_reference, dtype)
    dprobs = drawn(tokens, top_k, seed=1).to(dtype)
    of_reference.backward(dprobs.double())
    near(
        fused_routing.select_experts_backward(dprobs, logits, experts, **kind), given.grad, dtype, num_experts
    )


def test_ties_go_to_the_first_expert() -> None:
    logits = torch.tensor([[0.0, -0.0, 0.0, -0.0], [1.0, 2, 2, 1], [-torch.inf, -1, -torch.inf, -torch.inf]])
    nan = torch.tensor([[1.0, torch.nan, 2, torch.nan]])
    kind = {"top_k": 3, "score_function": "softmax", "is_pre_softmax": False, "scaling_factor": 1.0}
    experts, _ = fused_routing.select_experts(torch.cat((logits, nan)).to(DEVICE), None, **kind)
    assert experts.tolist() == [[0, 1, 2], [1, 2, 0], [1, 0, 2], [1, 3, 2]]


@pytest.mark.parametrize("function", SCORES)
def test_gradients_of_a_router_through_autograd(function: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Gradients of probabilities, of both sums, of each alone; none of the entropy."""
    for module in (routing, routing_losses):
        monkeypatch.setattr(module, "is_fused", lambda x: x.dtype is not torch.float64)
    logits, rule = 3 * drawn(24, 8), routing.TopKRule(top_k=2, score_function=function)
    factors = drawn(24, 2, seed=1)
    found = []
    for dtype in (torch.float32, torch.float64):
        given = logits.to(dtype, copy=True).requires_grad_()
        _, probs = routing.select_experts(given, rule)
        sums = routing_losses.score_sums(given, function, 4)
        of_probs = routing_losses.load_balancing_loss(
            sums.probs, torch.arange(32, device=DEVICE).view(4, 8), top_k=2, num_tokens=6
        )
        parts = ((probs * factors).sum(), of_probs, sums.squares)
        found.append([
            torch.autograd.grad(total, given, retain_graph=True)[0] for total in (*parts, sum(parts))
        ])  # fmt: skip
        assert not sums.entropy.requires_grad
    for fp32, expected in zip(*found, strict=True):
        near(fp32, expected, torch.float32, 8)


@pytest.mark.parametrize("function", SCORES)
def test_gradients_of_scores_that_underflow_are_finite(function: str) -> None:
    logits = torch.tensor([[0.0, 1.0, -90.0], [0.0, 1.0, -200.0], [-200.0, -300.0, 90.0]], device=DEVICE)
    kind = {"score_function": function, "is_pre_softmax": False, "scaling_factor": 1.0}
    experts, probs = fused_routing.select_experts(logits, None, top_k=2, **kind)
    assert probs.isfinite().all()
    assert (
        fused_routing.select_experts_backward(torch.ones_like(probs), logits, experts, **kind)
        .isfinite()
        .all()
    )
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
    monkeypatch.setattr(fused_routing, "_PROGRAMS", 4)  # so that programs have several rounds
    logits = (3 * drawn(tokens, num_experts)).to(dtype)
    found = fused_routing.score_sums(logits, function, samples)
    given = logits.double().requires_grad_()
    expected = routing_losses.score_sums_reference(given, function, samples)
    near(found[:, :-2], expected.probs, torch.float32, tokens)
    near(found[:, -2].sum(), expected.entropy, torch.float32, tokens)
    near(found[:, -1].sum(), expected.squares, torch.float32, tokens)
    dprobs, dsquares = drawn(samples, num_experts, seed=1), drawn(1, seed=2)[0]
    for of_probs, of_squares in ((dprobs, dsquares), (dprobs, None), (None, dsquares)):
        total = given.new_zeros(())
        if of_probs is not None:
            total = total + (expected.probs * of_probs.double()).sum()
        if of_squares is not None:
            total = total + expected.squares * of_squares.double()
        (gradient,) = torch.autograd.grad(total, given, retain_graph=True)
        dlogits = fused_routing.score_sums_backward(of_probs, of_squares, logits, function, samples)
        near(dlogits, gradient, dtype, num_experts)


@pytest.mark.parametrize(
    ("tokens", "samples", "top_k", "num_experts"), [(1, 1, 1, 1), (300, 3, 4, 17), (999, 2, 8, 128)]
)
def test_tokens_per_expert(tokens: int, samples: int, top_k: int, num_experts: int) -> None:
    experts = drawn(tokens, samples, num_experts).topk(top_k, dim=-1).indices
    found = fused_routing.tokens_per_expert(experts, num_experts)
    expected = torch.nn.functional.one_hot(experts, num_experts).sum((0, 2))
    assert found.dtype == expected.dtype
    assert torch.equal(found, expected)


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
@pytest.mark.parametrize("rows", ["enough", "padded", "too few"])
@pytest.mark.parametrize("is_kept", [False, True])
def test_sort_by_expert(
    tokens: int, top_k: int, num_experts: int, rows: str, is_kept: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    is_padded = rows == "padded"
    if DEVICE == "cpu" and ((num_experts > 2000 and is_padded) or tokens > 10_000):
        pytest.skip("slow in the interpreter")
    if tokens == 300:
        monkeypatch.setattr(fused_permute, "_TILES", 5)  # so that programs have several rounds
    experts = drawn(tokens, max(num_experts, top_k)).topk(top_k).indices - 1  # -1: no expert
    experts[tokens // 2 :] = experts[tokens // 2 :].clamp(min=num_experts // 2)  # uneven loads
    kept = drawn(tokens, top_k, seed=1) > -1 if is_kept else None
    for first, num_own in ((0, num_experts), (num_experts // 3, num_experts // 3)):
        if num_own:
            rows_per_expert = tokens * top_k + 1 if is_padded else None
            num_rows = num_own * rows_per_expert if rows_per_expert else tokens * top_k + 3
            num_rows = num_rows if rows != "too few" else tokens * top_k // 5
            expected = permute.sort_by_expert_reference(
                experts, num_own, num_rows, first, kept, rows_per_expert
            )
            columns = fused_permute.Columns(fused_permute.EXPERT, num_own, first)
            found = fused_permute.sort_items(
                experts, columns, num_rows=num_rows, kept=kept, rows_per_column=rows_per_expert
            )
            for part, reference in zip(found, expected, strict=True):
                assert part.dtype == reference.dtype
                assert torch.equal(part, reference)


@pytest.mark.parametrize(
    ("ep", "etp", "tokens", "top_k"), [(1, 1, 5, 2), (4, 1, 40, 3), (2, 2, 30, 1), (4, 2, 75, 4)]
)
def test_sorts_of_a_dispatch(
    ep: int, etp: int, tokens: int, top_k: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    own, rank = 3, ep - 1
    drawn_experts = drawn(ep * etp * tokens, max(ep * own, top_k)).topk(top_k).indices
    experts = drawn_experts.masked_fill(drawn(*drawn_experts.shape, seed=1) > 1, -1).int().to(DEVICE)
    mine = {"first_expert": rank * own, "num_experts": own}

    def sorts() -> Iterator[Tensor]:
        yield from permute.sort_by_rank(experts, num_ranks=ep, experts_per_rank=own)
        for num_sources, rows_per_source in ((etp * ep, None), (etp, ep * tokens)):
            received = permute.sort_by_source(experts, num_sources, rows_per_source=rows_per_source, **mine)
            yield from received
            num_rows = int(received.ends[-1])
            found = permute.sort_by_expert(
                experts, num_rows=len(experts) * top_k, token_rows=received.rows.flatten(), **mine
            )
            yield from (found.rows[:num_rows], found.assignments, found.ends)
            forwarded = permute.sort_by_rank(
                experts,
                num_ranks=own,
                experts_per_rank=1,
                first_expert=rank * own,
                token_rows=received.rows.flatten(),
            )
            yield from (forwarded.rows[:num_rows], forwarded.assignments, forwarded.ends)

    monkeypatch.setattr(permute, "is_fused", lambda _: False)
    expected = list(sorts())
    monkeypatch.setattr(permute, "is_fused", lambda _: True)
    monkeypatch.setattr(fused_permute, "_TILES", 5)
    for part, wanted in zip(sorts(), expected, strict=True):
        assert part.dtype == wanted.dtype
        assert torch.equal(part, wanted)


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
    assert torch.equal(found, reference(permute.unpermute_rows)(rows, permutation))


def test_rows_after_the_last_end_are_not_gathered(monkeypatch: pytest.MonkeyPatch) -> None:
    experts = drawn(40, 9).topk(3).indices
    permutation = permute.sort_by_expert(experts, num_experts=4, num_rows=200, first_expert=2)
    num_rows, x = int(permutation.ends[-1]), drawn(40, 1030)
    expected = permute.gather_rows_reference(x, permutation.tokens[:num_rows])
    monkeypatch.setattr(fused_permute, "_PROGRAMS", 7)  # so that programs gather several rows
    monkeypatch.setattr(fused_permute.torch, "empty", lambda *size, **kind: torch.full(size, 7.0, **kind))
    found = fused_permute.gather_rows(x, permutation.assignments, 3, permutation.ends)
    assert 0 < num_rows < 200
    assert torch.equal(found[:num_rows], expected)
    assert (found[num_rows:] == 7).all()


@pytest.mark.parametrize("dtype", [dtype for dtype in DTYPES if dtype is not torch.float32])
@pytest.mark.parametrize(
    ("sizes", "outputs", "inputs"), [((3, 0, 64, 130, 0), 24, 16), ((1,), 136, 8), ((0, 65), 130, 257)]
)
def test_weight_gradients_of_groups(
    dtype: torch.dtype, sizes: tuple[int, ...], outputs: int, inputs: int
) -> None:
    """Rows after the last end are NaN and are not read; the rows have any stride."""
    dy, x = (drawn(sum(sizes) + 5, 2 * width, dtype=dtype)[:, :width] for width in (outputs, inputs))
    for rows in (dy, x):
        rows[sum(sizes) :] = torch.nan
    ends = torch.tensor(sizes).cumsum(0).to(torch.int32).to(DEVICE)
    grad = drawn(len(sizes), outputs, inputs, seed=1)
    expected = grad.double()
    for group, (a, b) in enumerate(
        zip(dy[: sum(sizes)].split(sizes), x[: sum(sizes)].split(sizes), strict=True)
    ):
        expected[group] += a.double().t() @ b.double()
    fused_grouped_gemm.accumulate_weight_gradients(grad, dy, x, ends)
    near(grad, expected, torch.float32, max(sizes))
