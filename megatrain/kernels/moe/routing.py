"""Routing: the experts of each token and their probabilities, from a router's logits.

    logits [t, E] ─> scores ─> (+ bias) ─> top groups ─> top experts ─> probabilities ─> within capacity

All functions run on any device without synchronizing the host; the probabilities are differentiable. Arithmetic is in the
accumulation dtype. On GPUs a fused kernel selects experts, unless they are in groups; its scores differ by a rounding or
two. Ties go to the expert with the lowest index, and within the capacity, also up to rounding, to the earlier token, so
that every layout selects the same experts.

Sources: Shazeer et al., arXiv:1701.06538 (top-k), Fedus et al., arXiv:2101.03961 (capacity), DeepSeek-V3,
arXiv:2412.19437 (sigmoid scores, bias, groups), Lewis et al., arXiv:2103.16716 (balanced assignment); rules and
defaults are Megatron-LM's.
"""

from __future__ import annotations

import math
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor
from torch.autograd import Function
from torch.nn import functional as F

from megatrain.config.model_spec.experts import ScoreFunction, TopKRule
from megatrain.kernels.dtypes import accumulation_dtype
from megatrain.kernels.fused import routing as fused
from megatrain.kernels.fused.launching import is_fused

DropPolicy = Literal["probs", "position"]

_LEAST_SUM = 1e-20
_ROUNDING = {torch.float64: 2.0**-36, torch.float32: 2.0**-15}
"""Largest relative difference of probabilities that are equal up to rounding in a model of this dtype; others: one rounding."""
_SINKHORN_ROUNDS = 64
_SINKHORN_TOLERANCE = 1e-4
_SINKHORN_EPSILON = 1e-8


class Routing(NamedTuple):
    """The token-expert assignments of hidden states flattened to [t, h], on the device."""

    experts: Tensor
    """Indices of each token's experts, the best first, int64 [t, k]."""
    probs: Tensor
    """Factors of the experts' outputs, [t, k], differentiable; 0 for dropped assignments."""
    kept: Tensor | None = None
    """False for dropped assignments, bool [t, k]; None: none are dropped."""

    @property
    def kept_experts(self) -> Tensor:
        """Each token's experts, -1 for dropped assignments, int64 [t, k]."""
        return self.experts if self.kept is None else self.experts.masked_fill(~self.kept, -1)


def select_experts(logits: Tensor, rule: TopKRule, bias: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """Select the top k experts of each token.

        softmax                    softmax of the selected logits; pre-softmax: of all logits, not normalized again
        sigmoid, sqrtsoftplus      score / (sum of the selected scores + 1e-20); for k = 1 the score itself

    Args:
        logits: [t, E].
        bias: [E], added to the scores for the selection only; for sigmoid and sqrtsoftplus.
    Returns:
        Experts, int64 [t, k], best first, and their probabilities [t, k] in the dtype of the logits, scaled.
    """
    assert bias is None or rule.score_function != "softmax", "a rule refuses it"
    if is_fused(logits) and rule.num_groups is None:
        selected: tuple[Tensor, Tensor] = _SelectExperts.apply(logits, rule, bias)
        return selected
    if rule.score_function == "softmax" and not rule.is_pre_softmax:
        experts = _select_by(logits, rule)
        return experts, expert_probs(logits, experts, rule)
    scores = router_scores(logits, rule.score_function)
    experts = _select_by(scores if bias is None else scores + bias, rule)
    return experts, _scaled(scores.gather(1, experts), rule, logits.dtype)


def expert_probs(logits: Tensor, experts: Tensor, rule: TopKRule) -> Tensor:
    """Return the probabilities of selected experts, int64 [t, k]: see `select_experts`."""
    if rule.score_function == "softmax" and not rule.is_pre_softmax:
        probs = logits.gather(1, experts).softmax(-1, dtype=accumulation_dtype(logits.dtype))
        return (probs * rule.scaling_factor).to(logits.dtype)
    return _scaled(router_scores(logits, rule.score_function).gather(1, experts), rule, logits.dtype)


def _scaled(scores: Tensor, rule: TopKRule, dtype: torch.dtype) -> Tensor:
    """Return the probabilities of scores of selected experts, [t, k]."""
    if rule.score_function != "softmax" and rule.top_k > 1:
        scores = scores / (scores.sum(-1, keepdim=True) + _LEAST_SUM)
    return (scores * rule.scaling_factor).to(dtype)


class _SelectExperts(Function):
    @staticmethod
    def forward(ctx: Any, logits: Tensor, rule: TopKRule, bias: Tensor | None) -> tuple[Tensor, Tensor]:
        ctx.rule = {
            "score_function": rule.score_function,
            "is_pre_softmax": rule.is_pre_softmax,
            "scaling_factor": rule.scaling_factor,
        }
        experts, probs = fused.select_experts(logits, bias, top_k=rule.top_k, **ctx.rule)
        ctx.save_for_backward(logits, experts)
        ctx.mark_non_differentiable(experts)
        ctx.set_materialize_grads(False)
        return experts, probs

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None]:
        logits, experts = ctx.saved_tensors
        return fused.select_experts_backward(grads[1], logits, experts, **ctx.rule), None, None


def router_scores(logits: Tensor, score_function: ScoreFunction) -> Tensor:
    """Return softmax, sigmoid or sqrt(softplus) of the logits, [t, E] in the accumulation dtype."""
    dtype = accumulation_dtype(logits.dtype)
    match score_function:
        case "softmax":
            return logits.softmax(-1, dtype=dtype)
        case "sigmoid":
            return logits.to(dtype).sigmoid()
        case "sqrtsoftplus":
            return F.softplus(logits.to(dtype)).sqrt()


def router_probs(logits: Tensor, score_function: ScoreFunction) -> Tensor:
    """Return scores normalized to sum 1 per token, for losses and entropy: [t, E] in the accumulation dtype."""
    scores = router_scores(logits, score_function)
    return scores if score_function == "softmax" else scores / (scores.sum(-1, keepdim=True) + _LEAST_SUM)


def top_k_experts(values: Tensor, k: int) -> Tensor:
    """Return the indices of the k largest values of each row, largest first, ties by the lowest index: int64 [t, k]."""
    return values.sort(dim=-1, descending=True, stable=True).indices[:, :k]


def _select_by(values: Tensor, rule: TopKRule) -> Tensor:
    values = values.detach()
    if rule.num_groups is None or rule.group_top_k is None:
        return top_k_experts(values, rule.top_k)
    score_top_k = rule.group_score_top_k or rule.top_k // rule.group_top_k
    return group_limited_top_k(
        values, rule.top_k, num_groups=rule.num_groups, group_top_k=rule.group_top_k, score_top_k=score_top_k
    )


def group_limited_top_k(
    values: Tensor, k: int, *, num_groups: int, group_top_k: int, score_top_k: int
) -> Tensor:
    """Return the top k experts of the top groups of each row: int64 [t, k].

    A group's score is the sum of its `score_top_k` largest values (DeepSeek-V3, section 2.1.2; 1 in DeepSeek-V2, arXiv:2405.04434).
    """
    groups = values.unflatten(-1, (num_groups, -1))
    group_scores = groups.topk(score_top_k, dim=-1).values.sum(-1)
    selected = top_k_experts(group_scores, group_top_k)
    is_selected = torch.zeros_like(group_scores, dtype=torch.bool).scatter_(1, selected, True)
    return top_k_experts(groups.masked_fill(~is_selected[..., None], float("-inf")).flatten(1), k)


def select_by_sinkhorn(logits: Tensor, plan: Tensor, top_k: int) -> tuple[Tensor, Tensor]:
    """Select the k largest entries of each row of a balanced plan; probabilities are sigmoid (k = 1) or softmax.

    Args:
        logits: [t, E].
        plan: from `sinkhorn_plan` for the same tokens; the logits in evaluation, which does not balance.
    """
    experts = top_k_experts(plan, top_k)
    scores = router_scores(logits, "sigmoid" if top_k == 1 else "softmax")
    return experts, scores.gather(1, experts).to(logits.dtype)


def select_by_biased_logits(logits: Tensor, rule: TopKRule, bias: Tensor) -> tuple[Tensor, Tensor]:
    """Select the experts with the largest logits + bias, [E]; probabilities as in `select_experts`."""
    experts = top_k_experts(_biased(logits, bias), rule.top_k)
    return experts, expert_probs(logits, experts, rule)


def load_quantiles(logits: Tensor, bias: Tensor, top_k: int) -> Tensor:
    """Return for each expert how far its logits exceed the tokens' thresholds for the share of tokens of an even load.

        threshold of a token     the (k + 1)-th largest logit + bias
        quantile of an expert    the (T k // E + 1)-th largest of (its logit - threshold) over the tokens

    With the negative quantiles as biases and the same thresholds, every expert has T k // E tokens, but for ties.

    Args:
        logits: of all tokens of a micro-batch, [T, E], with more than k experts.
        bias: [E], with which the tokens select.
    Returns:
        [E] in the accumulation dtype.

    Source: Megatron-LM's quantile balancing; a step of dual coordinate descent on the balanced assignment.
    """
    num_tokens, num_experts = logits.shape
    thresholds = _biased(logits, bias).topk(top_k + 1, dim=-1).values[:, -1:]
    excess = logits.detach().to(thresholds.dtype) - thresholds
    return excess.topk(num_tokens * top_k // num_experts + 1, dim=0).values[-1]


def _biased(logits: Tensor, bias: Tensor) -> Tensor:
    return logits.detach().to(accumulation_dtype(logits.dtype)) + bias


def sinkhorn_plan(logits: Tensor) -> Tensor:
    """Scale rows and columns of exp(logits) alternately until columns sum to 1 / E and rows to 1 / T.

        rows = 1 / (T (exp(logits) columns + 1e-8))        columns = 1 / (E (exp(logits)^T rows + 1e-8))

    Megatron-LM iterates until the column factors change by at most 1e-4 on average. Here the number of rounds is also
    bounded, so that the host does not synchronize; steep logits (deviation of 3 or more) have not converged by then. The
    maximum of each row is subtracted first; row factors compensate for it.

    Args:
        logits: of all tokens of a micro-batch, [T, E].
    Returns:
        [T, E] in the accumulation dtype.

    Source: Sinkhorn and Knopp (1967); Lewis et al., arXiv:2103.16716.
    """
    values = logits.detach().to(accumulation_dtype(logits.dtype))
    values = (values - values.amax(-1, keepdim=True)).exp()
    num_tokens, num_experts = values.shape
    rows, columns = values.new_ones(num_tokens), values.new_ones(num_experts)
    is_running = values.new_ones((), dtype=torch.bool)
    for _ in range(_SINKHORN_ROUNDS):
        new_rows = 1 / (num_tokens * (values @ columns + _SINKHORN_EPSILON))
        new_columns = 1 / (num_experts * (new_rows @ values + _SINKHORN_EPSILON))
        change = (new_columns - columns).abs().mean()
        rows = torch.where(is_running, new_rows, rows)
        columns = torch.where(is_running, new_columns, columns)
        is_running = is_running & (change > _SINKHORN_TOLERANCE)
    return rows[:, None] * values * columns


def tokens_per_expert(experts: Tensor, num_experts: int, kept: Tensor | None = None) -> Tensor:
    """Count the tokens of each expert: int64 [t, k] -> int64 [E], or [s, b, k] -> [b, E].

    Args:
        kept: bool like `experts`, the assignments that count; None: all.
    """
    if kept is None and experts.dim() == 3 and is_fused(experts):
        return fused.tokens_per_expert(experts, num_experts)
    selected = torch.zeros(*experts.shape[:-1], num_experts, dtype=torch.uint8, device=experts.device)
    if kept is None:
        selected.scatter_(-1, experts, 1)
    else:
        selected.scatter_(-1, experts, kept.to(torch.uint8))
    return selected.sum(0, dtype=torch.int64)


def expert_capacity(factor: float, *, top_k: int, num_tokens: int, num_experts: int) -> int:
    """Return the maximum tokens per expert of a micro-batch: ceil(factor * k * T / E)."""
    return math.ceil(factor * top_k * num_tokens / num_experts)


def kept_assignments(
    experts: Tensor,
    probs: Tensor,
    *,
    num_experts: int,
    capacity_factor: float,
    policy: DropPolicy,
    samples: int,
    num_samples: int | None = None,
) -> Tensor:
    """Return the assignments that experts with a capacity keep.

    Args:
        experts, probs: of all tokens of a micro-batch in order, [s b, k].
        samples: b.
        num_samples: samples before the padding samples, whose assignments are dropped and do not count; None: all.
    Returns:
        bool [s b, k].
    """
    num_tokens, is_padding = len(experts), None
    if num_samples is not None and num_samples < samples:
        num_tokens = num_tokens // samples * num_samples
        is_padding = (torch.arange(len(experts), device=experts.device) % samples >= num_samples)[:, None]
        experts = experts.masked_fill(is_padding, num_experts)
    capacity = expert_capacity(
        capacity_factor, top_k=experts.shape[1], num_tokens=num_tokens, num_experts=num_experts
    )
    kept = within_capacity(experts, probs, capacity, policy)
    return kept if is_padding is None else kept & ~is_padding


def within_capacity(experts: Tensor, probs: Tensor, capacity: int, policy: DropPolicy) -> Tensor:
    """Return the assignments within the experts' capacity: those with the largest probabilities, or the first ones.

    Tokens with the same past have the same probabilities up to rounding, which depends on the layout. Probabilities that
    differ from the last one within the capacity by rounding at most count as equal to it: of them, the first are kept.

    Args:
        experts, probs: of all tokens of a micro-batch in order, [T, k].
    Returns:
        bool [T, k].
    """
    flat = experts.flatten()
    keys = flat if policy == "position" else 3 * flat + _ranks_by_capacity(flat, probs, capacity)
    order = keys.sort(stable=True).indices
    kept = torch.empty_like(flat, dtype=torch.bool)
    kept[order] = _places(flat[order]) < capacity
    return kept.view(experts.shape)


def _ranks_by_capacity(experts: Tensor, probs: Tensor, capacity: int) -> Tensor:
    """Compare each probability with its expert's last one within the capacity.

    Args:
        experts: [T k].
        probs: [T, k].
    Returns:
        0 for larger ones, 1 for equal ones, 2 for smaller ones, int64 [T k].
    """
    values = probs.detach().flatten()
    by_prob = values.sort(descending=True, stable=True).indices
    sorted_experts, by_expert = experts[by_prob].sort(stable=True)
    order = by_prob[by_expert]
    last = torch.searchsorted(sorted_experts, sorted_experts, right=True) - 1
    places = _places(sorted_experts)
    last_kept = torch.arange(len(order), device=order.device) - places + (capacity - 1)
    found = values[order].to(accumulation_dtype(values.dtype))
    least = found[torch.minimum(last_kept, last)]
    margin = least * _ROUNDING.get(values.dtype, torch.finfo(values.dtype).eps)
    ranks = torch.empty_like(order)
    ranks[order] = 1 + (found < least - margin).long() - (found > least + margin).long()
    return ranks


def _places(sorted_experts: Tensor) -> Tensor:
    """Return the place of each assignment among the assignments of its expert, from 0."""
    places = torch.arange(len(sorted_experts), device=sorted_experts.device)
    return places - torch.searchsorted(sorted_experts, sorted_experts)
