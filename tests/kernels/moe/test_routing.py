"""Routing against loops over tokens in numpy; losses against finite differences."""

import itertools
import math

import numpy as np
import pytest
import torch
from torch import Tensor

from megatrain.kernels.moe.routing import (
    DropPolicy,
    ScoreFunction,
    TopKRule,
    expert_capacity,
    load_quantiles,
    router_probs,
    select_by_biased_logits,
    select_by_sinkhorn,
    select_experts,
    sinkhorn_plan,
    tokens_per_expert,
    top_k_experts,
    within_capacity,
)
from megatrain.kernels.moe.routing_losses import load_balancing_loss, score_sums

FUNCTIONS: tuple[ScoreFunction, ...] = ("softmax", "sigmoid", "sqrtsoftplus")


def _logits(tokens: int = 24, experts: int = 8, seed: int = 0) -> Tensor:
    return torch.randn(tokens, experts, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


def _score(row: np.ndarray, function: str) -> np.ndarray:
    if function == "softmax":
        return np.exp(row) / np.exp(row).sum()
    return 1 / (1 + np.exp(-row)) if function == "sigmoid" else np.sqrt(np.log1p(np.exp(row)))


def _best(values: np.ndarray, k: int, allowed: list[int]) -> list[int]:
    """Find the largest one k times; ties go to the first."""
    best: list[int] = []
    for _ in range(k):
        left = [e for e in allowed if e not in best]
        top = left[0]
        for e in left:
            if values[e] > values[top]:
                top = e
        best.append(top)
    return best


def _expected(row: np.ndarray, rule: TopKRule, bias: np.ndarray | None) -> tuple[list[int], list[float]]:
    scores = _score(row, rule.score_function)
    is_after = rule.score_function == "softmax" and not rule.is_pre_softmax
    values = row if is_after else scores if bias is None else scores + bias
    allowed = list(range(len(row)))
    if rule.num_groups is not None and rule.group_top_k is not None:
        size, most = len(row) // rule.num_groups, rule.group_score_top_k or rule.top_k // rule.group_top_k
        group_scores = np.array(
            [sum(sorted(values[g * size : (g + 1) * size])[-most:]) for g in range(rule.num_groups)]
        )
        groups = _best(group_scores, rule.group_top_k, list(range(rule.num_groups)))
        allowed = [e for e in allowed if e // size in groups]
    experts = _best(values, rule.top_k, allowed)
    if is_after:
        probs = np.exp(row[experts]) / np.exp(row[experts]).sum()
    else:
        probs = scores[experts]
        if rule.score_function != "softmax" and rule.top_k > 1:
            probs = probs / probs.sum()
    return experts, list(probs * rule.scaling_factor)


@pytest.mark.parametrize("function", FUNCTIONS)
@pytest.mark.parametrize(
    ("groups", "top_k", "is_pre_softmax", "scale"),
    [
        (None, 1, False, 1.0),
        (None, 2, True, 2.5),
        (None, 4, False, 1.0),
        ((4, 2), 2, True, 2.5),
        ((4, 2), 4, False, 1.0),
        ((4, 2, 1), 4, True, 1.0),
    ],
)
def test_experts_and_probabilities_are_those_of_a_loop(
    function: ScoreFunction, groups: tuple[int, ...] | None, top_k: int, is_pre_softmax: bool, scale: float
) -> None:
    num_groups, group_top_k, group_score_top_k = (*(groups or ()), None, None, None)[:3]
    rule = TopKRule(
        top_k=top_k,
        score_function=function,
        is_pre_softmax=is_pre_softmax,
        num_groups=num_groups,
        group_top_k=group_top_k,
        group_score_top_k=group_score_top_k,
        scaling_factor=scale,
    )
    logits = _logits()
    bias = None if function == "softmax" else torch.linspace(-0.5, 0.5, 8).double()
    experts, probs = select_experts(logits, rule, bias)
    for row, selected, row_probs in zip(logits.numpy(), experts.tolist(), probs.tolist(), strict=True):
        expected = _expected(row, rule, None if bias is None else bias.numpy())
        assert selected == expected[0]
        assert row_probs == pytest.approx(expected[1], rel=1e-12)


@pytest.mark.parametrize("function", FUNCTIONS)
@pytest.mark.parametrize("is_pre_softmax", [False, True])
def test_gradients_of_probabilities_are_finite_differences(
    function: ScoreFunction, is_pre_softmax: bool
) -> None:
    rule = TopKRule(top_k=3, score_function=function, is_pre_softmax=is_pre_softmax, scaling_factor=1.5)
    logits = _logits(tokens=5).requires_grad_()
    assert torch.autograd.gradcheck(lambda x: select_experts(x, rule)[1], (logits,))


def test_ties_go_to_the_lowest_index() -> None:
    assert top_k_experts(torch.tensor([[0.0, 1.0, 1.0, 1.0], [2.0] * 4]), 2).tolist() == [[1, 2], [0, 1]]
    rule = TopKRule(top_k=2, num_groups=4, group_top_k=2)
    assert select_experts(torch.zeros(1, 8), rule)[0].tolist() == [[0, 1]]


def test_a_bias_changes_the_selection_but_not_the_probabilities() -> None:
    rule = TopKRule(top_k=1, score_function="sigmoid")
    logits = torch.tensor([[3.0, 0.0]])
    experts, probs = select_experts(logits, rule, torch.tensor([0.0, 10.0]))
    assert experts.tolist() == [[1]]
    assert probs.item() == pytest.approx(0.5)


def test_probabilities_of_bf16_logits_are_computed_in_fp32() -> None:
    logits = _logits().to(torch.bfloat16)
    experts, probs = select_experts(logits, TopKRule(top_k=2, score_function="sigmoid"))
    fp32_experts, fp32_probs = select_experts(logits.float(), TopKRule(top_k=2, score_function="sigmoid"))
    assert probs.dtype == torch.bfloat16
    assert torch.equal(experts, fp32_experts)
    assert torch.equal(probs, fp32_probs.bfloat16())


def test_a_sinkhorn_plan_has_even_rows_and_columns() -> None:
    logits = _logits(tokens=64) * 3
    plan = sinkhorn_plan(logits)
    torch.testing.assert_close(plan.sum(0), torch.full((8,), 1 / 8).double(), rtol=1e-6, atol=0)
    torch.testing.assert_close(plan.sum(1), torch.full((64,), 1 / 64).double(), rtol=1e-2, atol=0)


@pytest.mark.parametrize("size", [0.1, 1.0, 4.0])
def test_a_sinkhorn_plan_is_that_of_scaling_until_convergence(size: float) -> None:
    logits = _logits(tokens=32) * size
    cost = np.exp(logits.numpy())
    columns, change = np.ones(8), 1.0
    while change > 1e-4:
        rows = [1 / (32 * (sum(cost[t] * columns) + 1e-8)) for t in range(32)]
        new = np.array([1 / (8 * (sum(cost[t, e] * rows[t] for t in range(32)) + 1e-8)) for e in range(8)])
        columns, change = new, np.abs(new - columns).mean()
    expected = torch.from_numpy(cost * columns * np.array(rows)[:, None])
    torch.testing.assert_close(sinkhorn_plan(logits), expected, rtol=1e-3, atol=1e-9)


@pytest.mark.parametrize("top_k", [1, 2])
def test_sinkhorn_balances_loads_and_uses_scores_as_probabilities(top_k: int) -> None:
    logits = _logits(tokens=256) + torch.linspace(-2, 2, 8).double()
    experts, probs = select_by_sinkhorn(logits, sinkhorn_plan(logits), top_k)
    plain = tokens_per_expert(top_k_experts(logits, top_k), 8)
    assert tokens_per_expert(experts, 8).max() < 0.7 * plain.max()
    scores = logits.sigmoid() if top_k == 1 else logits.softmax(-1)
    assert torch.equal(probs, scores.gather(1, experts))


def test_negative_quantiles_as_biases_give_every_expert_its_share() -> None:
    """With the thresholds of the tokens fixed, T k // E tokens exceed the quantile of each expert; others may tie with it."""
    logits = torch.randn(30, 5, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    logits[:, 2] += 2
    bias = torch.tensor([0.1, 0.0, -0.3, 0.0, 0.2], dtype=torch.float64)
    thresholds = (logits + bias).sort(dim=-1, descending=True).values[:, 2:3]  # of the third for k = 2
    quantiles = load_quantiles(logits, bias, 2)
    excess = logits - thresholds - quantiles
    share = 30 * 2 // 5
    assert max((excess > 1e-12).sum(0).tolist()) <= share < min((excess > -1e-12).sum(0).tolist())


@pytest.mark.parametrize("top_k", [1, 2])
def test_quantile_balancing_evens_the_loads_within_a_few_steps(top_k: int) -> None:
    logits = torch.randn(400, 8, dtype=torch.float64, generator=torch.Generator().manual_seed(2))
    logits += torch.linspace(-2, 2, 8)
    rule = TopKRule(top_k=top_k, score_function="sigmoid")
    bias = torch.zeros(8, dtype=torch.float64)
    largest = []
    for _ in range(6):
        experts, _ = select_by_biased_logits(logits, rule, bias)
        largest.append(tokens_per_expert(experts, 8).max().item() * 8 / (400 * top_k))
        bias = -load_quantiles(logits, bias, top_k)
        bias -= bias.mean()
    assert largest[0] > 2.5
    assert largest[-1] < 1.2


@pytest.mark.parametrize("function", FUNCTIONS)
def test_probabilities_of_experts_selected_by_biased_logits_have_no_bias(function: ScoreFunction) -> None:
    logits = torch.tensor([[0.5, 0.2, 0.1]], dtype=torch.float64)
    bias = torch.tensor([-1.0, 0.0, 0.2], dtype=torch.float64)
    rule = TopKRule(top_k=2, score_function=function, scaling_factor=3)
    experts, probs = select_by_biased_logits(logits, rule, bias)
    assert experts.tolist() == [[2, 1]]
    swapped, expected = select_experts(logits[:, 1:], rule)  # the same two experts, the best logit first
    assert swapped.tolist() == [[0, 1]]
    assert torch.allclose(probs, expected.flip(1))


def test_loads_count_tokens_of_each_expert_and_sequence() -> None:
    experts = torch.randint(0, 4, (6, 3, 1), generator=torch.Generator().manual_seed(1))
    experts = torch.cat((experts, (experts + 1) % 4), -1)
    by_sequence = tokens_per_expert(experts, 4)
    for b, e in itertools.product(range(3), range(4)):
        assert by_sequence[b, e] == sum(e in experts[s, b].tolist() for s in range(6))
    assert torch.equal(tokens_per_expert(experts.flatten(0, 1), 4), by_sequence.sum(0))
    kept = torch.rand(experts.shape, generator=torch.Generator().manual_seed(2)) < 0.5
    of_kept = tokens_per_expert(experts, 4, kept)
    for b, e in itertools.product(range(3), range(4)):
        assert of_kept[b, e] == sum(e in experts[s, b][kept[s, b]].tolist() for s in range(6))


@pytest.mark.parametrize(("factor", "expected"), [(1.0, 3), (1.25, 4), (0.5, 2), (100.0, 300)])
def test_capacity_is_rounded_up(factor: float, expected: int) -> None:
    assert expert_capacity(factor, top_k=2, num_tokens=12, num_experts=8) == expected


@pytest.mark.parametrize("policy", ["probs", "position"])
@pytest.mark.parametrize("capacity", [1, 4, 24])
def test_capacity_drops_what_a_loop_drops(policy: DropPolicy, capacity: int) -> None:
    experts, probs = select_experts(_logits(), TopKRule(top_k=3, is_pre_softmax=True))
    probs[5], experts[5] = probs[4], experts[4]  # a tie goes to the first
    kept = within_capacity(experts, probs, capacity, policy)
    assignments = [(t, j) for t in range(24) for j in range(3)]
    for expert in range(8):
        own = [one for one in assignments if experts[one] == expert]
        if policy == "probs":
            own.sort(key=lambda one: -probs[one].item())
        assert [bool(kept[one]) for one in own] == [n < capacity for n in range(len(own))]


@pytest.mark.parametrize(
    ("dtype", "noise"), [(torch.float64, 1e-13), (torch.float32, 2e-6), (torch.bfloat16, 0.0)]
)
def test_rounding_does_not_decide_which_of_equal_tokens_is_dropped(dtype: torch.dtype, noise: float) -> None:
    """Tokens of documents that start alike have equal probabilities up to rounding: the first are kept."""
    generator = torch.Generator().manual_seed(3)
    experts, alike = select_experts(_logits(tokens=8).repeat(6, 1), TopKRule(top_k=2))
    probs = alike.to(dtype).to(torch.float64)
    kept = within_capacity(experts, probs.to(dtype), 7, "probs")
    for expert in range(8):
        own = [one for one in itertools.product(range(48), range(2)) if experts[one] == expert]
        own.sort(key=lambda one: -probs[one].item())  # stable: of equal ones the first
        assert [bool(kept[one]) for one in own] == [n < 7 for n in range(len(own))]
    assert not kept.all()
    for _ in range(20):
        noisy = probs * (1 + noise * (2 * torch.rand(48, 2, dtype=torch.float64, generator=generator) - 1))
        assert torch.equal(within_capacity(experts, noisy.to(dtype), 7, "probs"), kept)


def test_many_probabilities_close_to_one_another_are_still_ordered() -> None:
    """Only those near the last kept one count as equal to it, however dense the others are."""
    probs = torch.linspace(0.5, 1, 20_000).flip(0)[torch.randperm(20_000)].unsqueeze(1)
    kept = within_capacity(torch.zeros(20_000, 1, dtype=torch.int64), probs, 5_000, "probs").flatten()
    assert kept.sum() == 5_000
    assert probs[kept].min() > probs[~kept].max() * (1 - 1e-4)


def test_the_balance_loss_is_its_formula_and_1_for_even_loads() -> None:
    logits = _logits()
    probs, loads = router_probs(logits, "sigmoid"), tokens_per_expert(top_k_experts(logits, 2), 8)
    loss = sum(probs[t, e] * loads[e] for t in range(24) for e in range(8)) * 8 / (2 * 24**2)
    torch.testing.assert_close(load_balancing_loss(probs.sum(0), loads, top_k=2, num_tokens=24), loss)
    even = torch.full((8,), 24 / 8).double()
    assert load_balancing_loss(even, torch.full((8,), 6), top_k=2, num_tokens=24).item() == pytest.approx(1)


@pytest.mark.parametrize("function", FUNCTIONS)
def test_sums_are_per_sample(function: ScoreFunction) -> None:
    logits = _logits()
    sums, probs = score_sums(logits, function, 4), router_probs(logits, function).view(6, 4, 8)
    for sample in range(4):
        torch.testing.assert_close(sums.probs[sample], probs[:, sample].sum(0))
    squares = sum(math.log(sum(map(math.exp, row))) ** 2 for row in logits.tolist())
    assert sums.squares.item() == pytest.approx(squares)
    torch.testing.assert_close(sums.entropy, -(probs * probs.log()).sum())


def test_losses_of_sequences_are_averaged() -> None:
    probs, loads = score_sums(_logits(), "softmax", 4).probs, torch.randint(0, 9, (4, 8))
    each = [load_balancing_loss(probs[b], loads[b], top_k=2, num_tokens=6) for b in range(4)]
    torch.testing.assert_close(
        load_balancing_loss(probs, loads, top_k=2, num_tokens=6), torch.stack(each).mean()
    )


def test_parts_of_losses_add_up() -> None:
    logits = _logits()
    whole, loads = score_sums(logits, "softmax", 1), tokens_per_expert(top_k_experts(logits, 2), 8)
    parts = [score_sums(part, "softmax", 1) for part in logits.split(10)]
    losses = [load_balancing_loss(part.probs[0], loads, top_k=2, num_tokens=24) for part in parts]
    torch.testing.assert_close(
        sum(losses), load_balancing_loss(whole.probs[0], loads, top_k=2, num_tokens=24)
    )
    torch.testing.assert_close(sum(part.squares for part in parts), whole.squares)


@pytest.mark.parametrize("function", FUNCTIONS)
def test_gradients_of_losses_are_finite_differences(function: ScoreFunction) -> None:
    loads = torch.arange(8).double()
    logits = _logits(tokens=5).requires_grad_()

    def losses(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        sums = score_sums(x, function, 1)
        return load_balancing_loss(sums.probs[0], loads, top_k=2, num_tokens=5), sums.squares

    assert torch.autograd.gradcheck(losses, (logits,))


def test_entropy_is_log_e_without_preferences_and_0_with_one() -> None:
    assert score_sums(torch.zeros(3, 8), "softmax", 1).entropy.item() == pytest.approx(3 * math.log(8))
    assert score_sums(1e6 * torch.eye(8), "softmax", 1).entropy.item() == 0
