"""Routing: which experts each token goes to, and with what weights, from a router's logits.

    logits [t, E] ─> scores ─> (+ bias) ─> the best groups ─> the best experts ─> weights ─> within capacity

Functions of tensors on any device, which no host waits for; autograd works through the weights. Arithmetic is
that of `accumulation_dtype(logits.dtype)`; on GPUs a fused kernel picks experts where they are not in groups, whose scores are off by
a rounding or two. Of equal scores the expert of the lowest number is the better one, and of equal claims to room the
earlier token, so that every layout picks alike.

Sources: Shazeer et al., arXiv:1701.06538 (top-k), Fedus et al., arXiv:2101.03961 (capacity), DeepSeek-V3,
arXiv:2412.19437 (sigmoid scores, bias, groups), Lewis et al., arXiv:2103.16716 (balanced assignment); rules and
defaults are Megatron-LM's.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor
from torch.autograd import Function
from torch.nn import functional as F

from megatrain.kernels.dtypes import accumulation_dtype
from megatrain.kernels.fused import routing as fused
from megatrain.kernels.fused.launching import is_fused

ScoreFunction = Literal["softmax", "sigmoid", "sqrtsoftplus"]
DropPolicy = Literal["probs", "position"]

_LEAST_SUM = 1e-20
_SINKHORN_ROUNDS = 64
_SINKHORN_TOLERANCE = 1e-4
_SINKHORN_EPSILON = 1e-8


class Routing(NamedTuple):
    """Where tokens go; a token is a row of the hidden states flattened to [t, h]. Everything stays on the device."""

    experts: Tensor
    """Numbers of each token's experts, the best first, int64 [t, k]."""
    weights: Tensor
    """By which their outputs are summed, [t, k], differentiable; 0 where a token is dropped."""
    kept: Tensor | None = None
    """False where a token is dropped by an expert, bool [t, k]; None: nothing is dropped."""


@dataclass(frozen=True, kw_only=True)
class TopKRule:
    """How experts are picked by their logits."""

    top_k: int
    score_function: ScoreFunction = "softmax"
    is_pre_softmax: bool = False
    """Whether the softmax is over all experts, or over those that are picked."""
    num_groups: int | None = None
    """Groups of neighbouring experts, of which a token uses `group_top_k`; None: a single group."""
    group_top_k: int | None = None
    scaling_factor: float = 1.0
    """Of the weights."""

    @property
    def picks_best_logits(self) -> bool:
        """Whether experts are picked by nothing but their logits."""
        return self.score_function == "softmax" and not self.is_pre_softmax and self.num_groups is None


def select_experts(logits: Tensor, rule: TopKRule, bias: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """The k best experts of each token, and their weights.

        softmax                    softmax of the picked logits; before: of all logits, picked, not normalised again
        sigmoid, sqrtsoftplus      score / (sum of the picked scores + 1e-20), or for k = 1 the score itself

    Args:
        logits: [t, E].
        bias: added to scores to pick, not to weigh, [E]; for sigmoid and sqrtsoftplus.
    Returns:
        int64 [t, k], best first, and weights [t, k] in the dtype of the logits, times the scaling factor.
    """
    assert bias is None or rule.score_function != "softmax", "a rule refuses it"
    if is_fused(logits) and rule.num_groups is None:
        picked: tuple[Tensor, Tensor] = _Picked.apply(logits, rule, bias)
        return picked
    return select_experts_reference(logits, rule, bias)


def select_experts_reference(
    logits: Tensor, rule: TopKRule, bias: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """The same, written out."""
    kind = accumulation_dtype(logits.dtype)
    if rule.score_function == "softmax":
        if rule.is_pre_softmax:
            scores = logits.softmax(-1, dtype=kind)
            experts = _best_experts(scores, rule)
            weights = scores.gather(1, experts)
        else:
            experts = _best_experts(logits, rule)
            weights = logits.gather(1, experts).softmax(-1, dtype=kind)
    else:
        scores = router_scores(logits, rule.score_function)
        experts = _best_experts(scores if bias is None else scores + bias, rule)
        weights = scores.gather(1, experts)
        if rule.top_k > 1:
            weights = weights / (weights.sum(-1, keepdim=True) + _LEAST_SUM)
    return experts, (weights * rule.scaling_factor).to(logits.dtype)


class _Picked(Function):
    @staticmethod
    def forward(ctx: Any, logits: Tensor, rule: TopKRule, bias: Tensor | None) -> tuple[Tensor, Tensor]:
        ctx.rule = {
            "score_function": rule.score_function,
            "is_pre_softmax": rule.is_pre_softmax,
            "scaling_factor": rule.scaling_factor,
        }
        experts, weights = fused.pick(logits, bias, top_k=rule.top_k, **ctx.rule)
        ctx.save_for_backward(logits, experts)
        ctx.mark_non_differentiable(experts)
        ctx.set_materialize_grads(False)
        return experts, weights

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None]:
        logits, experts = ctx.saved_tensors
        return fused.pick_backward(grads[1], logits, experts, **ctx.rule), None, None


def router_scores(logits: Tensor, score_function: ScoreFunction) -> Tensor:
    """Softmax, sigmoid or sqrt(softplus) of the logits, wide [t, E]."""
    kind = accumulation_dtype(logits.dtype)
    match score_function:
        case "softmax":
            return logits.softmax(-1, dtype=kind)
        case "sigmoid":
            return logits.to(kind).sigmoid()
        case "sqrtsoftplus":
            return F.softplus(logits.to(kind)).sqrt()


def router_probs(logits: Tensor, score_function: ScoreFunction) -> Tensor:
    """Scores that sum to 1 for each token, by which losses and entropy know a router's preferences: wide [t, E]."""
    scores = router_scores(logits, score_function)
    return scores if score_function == "softmax" else scores / (scores.sum(-1, keepdim=True) + _LEAST_SUM)


def top_k_experts(values: Tensor, k: int) -> Tensor:
    """Numbers of the k largest values of each row, the largest first, and of equal ones the lowest number: int64 [t, k]."""
    return values.sort(dim=-1, descending=True, stable=True).indices[:, :k]


def _best_experts(values: Tensor, rule: TopKRule) -> Tensor:
    values = values.detach()
    if rule.num_groups is None or rule.group_top_k is None:
        return top_k_experts(values, rule.top_k)
    return group_limited_top_k(values, rule.top_k, num_groups=rule.num_groups, group_top_k=rule.group_top_k)


def group_limited_top_k(values: Tensor, k: int, *, num_groups: int, group_top_k: int) -> Tensor:
    """As `top_k_experts`, of the experts in the best groups of each row.

    A group is as good as the sum of its k / group_top_k largest values (DeepSeek-V3, section 2.1.2).
    """
    groups = values.unflatten(-1, (num_groups, -1))
    worth = groups.topk(k // group_top_k, dim=-1).values.sum(-1)
    is_open = torch.zeros_like(worth, dtype=torch.bool).scatter_(1, top_k_experts(worth, group_top_k), True)
    return top_k_experts(groups.masked_fill(~is_open[..., None], float("-inf")).flatten(1), k)


def select_by_sinkhorn(logits: Tensor, plan: Tensor, top_k: int) -> tuple[Tensor, Tensor]:
    """The k largest entries of each row of a balanced plan; weights are sigmoids of the logits for k = 1, else softmax.

    Args:
        logits: [t, E].
        plan: of the same tokens by `sinkhorn_plan`; in evaluation, where nothing is balanced, the logits.
    """
    experts = top_k_experts(plan, top_k)
    scores = router_scores(logits, "sigmoid" if top_k == 1 else "softmax")
    return experts, scores.gather(1, experts).to(logits.dtype)


def sinkhorn_plan(logits: Tensor) -> Tensor:
    """exp(logits), rows and columns scaled in turn until all columns sum to 1 / E and rows to 1 / T: wide [T, E].

        rows = 1 / (T (exp(logits) columns + 1e-8))        columns = 1 / (E (exp(logits)^T rows + 1e-8))

    As Megatron-LM: until the columns' factors move by at most 1e-4 on average; here until then or for a fixed
    number of rounds, which leaves the host out and ends far from there where logits are steep (a deviation of 3 or more). Largest logits of rows are taken out first: rows'
    factors make up for it.

    Args:
        logits: of all tokens of a micro-batch, [T, E].

    Source: Sinkhorn and Knopp (1967); Lewis et al., arXiv:2103.16716.
    """
    values = logits.detach().to(accumulation_dtype(logits.dtype))
    values = (values - values.amax(-1, keepdim=True)).exp()
    num_tokens, num_experts = values.shape
    rows, columns = values.new_ones(num_tokens), values.new_ones(num_experts)
    is_moving = values.new_ones((), dtype=torch.bool)
    for _ in range(_SINKHORN_ROUNDS):
        new_rows = 1 / (num_tokens * (values @ columns + _SINKHORN_EPSILON))
        new_columns = 1 / (num_experts * (new_rows @ values + _SINKHORN_EPSILON))
        moved = (new_columns - columns).abs().mean()
        rows = torch.where(is_moving, new_rows, rows)
        columns = torch.where(is_moving, new_columns, columns)
        is_moving = is_moving & (moved > _SINKHORN_TOLERANCE)
    return rows[:, None] * values * columns


def tokens_per_expert(experts: Tensor, num_experts: int) -> Tensor:
    """How many of the tokens go to each expert: int64 [t, k] -> int64 [E], or [s, b, k] -> [b, E]."""
    picked = torch.zeros(*experts.shape[:-1], num_experts, dtype=torch.uint8, device=experts.device)
    return picked.scatter_(-1, experts, 1).sum(0, dtype=torch.int64)


def expert_capacity(factor: float, *, top_k: int, num_tokens: int, num_experts: int) -> int:
    """Tokens that an expert takes at most of a micro-batch: ceil(factor * k * T / E)."""
    return math.ceil(factor * top_k * num_tokens / num_experts)


def within_capacity(experts: Tensor, weights: Tensor, capacity: int, policy: DropPolicy) -> Tensor:
    """Which tokens experts take that have room for so many: those of the largest weights, or the first ones.

    Args:
        experts, weights: of all tokens of a micro-batch in their order, [T, k].
    Returns:
        bool [T, k].
    """
    flat = experts.flatten()
    order = torch.arange(flat.numel(), device=flat.device)
    if policy == "probs":
        order = weights.detach().flatten().sort(descending=True, stable=True).indices
    sorted_experts, by_expert = flat[order].sort(stable=True)
    place = torch.arange(flat.numel(), device=flat.device)
    first = torch.searchsorted(sorted_experts, sorted_experts)  # place of the first claim to the same expert
    kept = torch.empty_like(flat, dtype=torch.bool)
    kept[order[by_expert]] = place - first < capacity
    return kept.view(experts.shape)
