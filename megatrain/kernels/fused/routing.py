"""`kernels.moe.routing` and `routing_losses` in one pass each way: selection of experts, and sums of probabilities."""

from __future__ import annotations

import torch
from torch import Tensor

from megatrain.kernels.fused.launching import cdiv, jit, launch, power_of_two, tl

_PAIRS = 2048
"""(token, expert) pairs that a program processes at a time."""
_PROGRAMS = 512
"""Maximum programs that sum."""


def select_experts(
    logits: Tensor,
    bias: Tensor | None,
    *,
    top_k: int,
    score_function: str,
    is_pre_softmax: bool,
    scaling_factor: float,
) -> tuple[Tensor, Tensor]:
    """Implement `kernels.moe.routing.select_experts` for a rule without groups."""
    logits = logits.contiguous()
    num_tokens = len(logits)
    experts = torch.empty(num_tokens, top_k, dtype=torch.int64, device=logits.device)
    probs = torch.empty(num_tokens, top_k, dtype=logits.dtype, device=logits.device)
    kind, at_once = _kind(logits, score_function)
    launch(
        _select, (cdiv(num_tokens, at_once),),
        logits, logits if bias is None else bias.contiguous(), experts, probs, num_tokens, scaling_factor,
        **kind, TOP_K=top_k, K_WIDTH=power_of_two(top_k), IS_PRE_SOFTMAX=is_pre_softmax,
        HAS_BIAS=bias is not None,
    )  # fmt: skip
    return experts, probs


def select_experts_backward(
    dprobs: Tensor,
    logits: Tensor,
    experts: Tensor,
    *,
    score_function: str,
    is_pre_softmax: bool,
    scaling_factor: float,
) -> Tensor:
    """Return the gradient of the logits from that of the probabilities: [t, k] -> [t, E]."""
    assert experts.is_contiguous()
    logits, dprobs = logits.contiguous(), dprobs.contiguous()
    dlogits = torch.empty_like(logits)
    num_tokens, top_k = experts.shape
    kind, at_once = _kind(logits, score_function)
    launch(
        _select_backward, (cdiv(num_tokens, at_once),),
        dprobs, logits, experts, dlogits, num_tokens, scaling_factor,
        **kind, TOP_K=top_k, IS_PRE_SOFTMAX=is_pre_softmax,
    )  # fmt: skip
    return dlogits


def tokens_per_expert(experts: Tensor, num_experts: int) -> Tensor:
    """Implement `kernels.moe.routing.tokens_per_expert` for [s, b, k]."""
    experts, (_, samples, top_k) = experts.contiguous(), experts.shape
    counts = torch.zeros(samples, num_experts, dtype=torch.int64, device=experts.device)
    grid = (cdiv(experts.numel(), _PAIRS),)
    launch(
        _count_tokens, grid, experts, counts, experts.numel(), samples, num_experts, TOP_K=top_k, BLOCK=_PAIRS
    )
    return counts


def score_sums(logits: Tensor, score_function: str, samples: int) -> Tensor:
    """Return per sample the sums of probabilities, then of entropies and of squared log-sum-exps: fp32 [b, E + 2]."""
    logits = logits.contiguous()
    rows, num_experts = len(logits) // samples, logits.shape[1]
    assert rows * samples == len(logits), f"{len(logits)} tokens of {samples} samples"
    kind, at_once = _kind(logits, score_function)
    rounds = max(cdiv(rows * samples, _PROGRAMS * at_once), 1)
    tiles = max(cdiv(rows, rounds * at_once), 1)
    parts = torch.empty(tiles, samples, num_experts + 2, dtype=torch.float32, device=logits.device)
    launch(_sum_scores, (tiles, samples), logits, parts, rows, rounds, **kind)
    return parts.sum(0)


def score_sums_backward(
    dprobs: Tensor | None, dsquares: Tensor | None, logits: Tensor, score_function: str, samples: int
) -> Tensor:
    """Return the gradient of the logits from those of the sums of probabilities, [b, E], and of squares, []; each may be None."""
    logits = logits.contiguous()
    dlogits = torch.empty_like(logits)
    kind, at_once = _kind(logits, score_function)
    launch(
        _sum_scores_backward, (cdiv(len(logits), at_once),),
        logits if dprobs is None else dprobs.contiguous(), logits if dsquares is None else dsquares,
        logits, dlogits, len(logits), samples,
        **kind, HAS_PROBS=dprobs is not None, HAS_SQUARES=dsquares is not None,
    )  # fmt: skip
    return dlogits


def _kind(logits: Tensor, score_function: str) -> tuple[dict[str, object], int]:
    """Return the constants of all kernels, and the tokens per program."""
    width = power_of_two(logits.shape[1])
    at_once = min(max(_PAIRS // width, 1), 64)
    kind = {"FUNCTION": score_function, "EXPERTS": logits.shape[1], "WIDTH": width, "AT_ONCE": at_once}
    return kind, at_once


@jit
def _tile(LOGITS, num_tokens, EXPERTS: tl.constexpr, WIDTH: tl.constexpr, AT_ONCE: tl.constexpr):
    """Return a program's tokens, all columns, the flat index of each pair, its validity, and its logit."""
    token = tl.program_id(0).to(tl.int64) * AT_ONCE + tl.arange(0, AT_ONCE)
    column = tl.arange(0, WIDTH)[None, :]
    index = token[:, None] * EXPERTS + column
    inside = (column < EXPERTS) & (token < num_tokens)[:, None]
    x = tl.load(LOGITS + index, mask=inside, other=0).to(tl.float32)
    return token, column, index, inside, x


@jit
def _softmax(x, inside):
    """Return the softmax of each row over the valid elements, and the log-sum-exp."""
    largest = tl.max(tl.where(inside, x, float("-inf")), axis=1)
    powers = tl.where(inside, tl.exp(x - largest[:, None]), 0.0)
    total = tl.sum(powers, axis=1)
    return powers / total[:, None], largest + tl.log(total)


@jit
def _softmax_gradient(gradient, probs):
    """Return the gradient of the logits from that of the softmax `probs`."""
    return probs * (gradient - tl.sum(probs * gradient, axis=1)[:, None])


@jit
def _score_and_derivative(x, FUNCTION: tl.constexpr):
    """Return value and derivative of an element-wise score function."""
    sigmoid = 1 / (1 + tl.exp(-x))
    if FUNCTION == "sigmoid":
        score, derivative = sigmoid, sigmoid * (1 - sigmoid)
    else:
        tl.static_assert(FUNCTION == "sqrtsoftplus", "a score function that this kernel does not implement")
        power = tl.exp(-tl.abs(x))
        more = 1 + power  # log1p(power), corrected for the rounding of the sum
        log = tl.where(more == 1, power, tl.log(more) * (power / (more - 1)))
        score = tl.sqrt(tl.where(x > 0, x, 0.0) + log)
        derivative = tl.where(score > 0, sigmoid / (2 * score), 0.0)  # a score that underflows in fp32 is 0
    return score, derivative


@jit
def _ordered(x):
    """Map numbers to integers of the same order; NaN counts as infinity, so that each row has a maximum."""
    x = tl.where((x <= 0) | (x > 0), x, float("inf"))
    x = tl.where(x == 0, 0.0, x)  # no -0
    bits = x.to(tl.int32, bitcast=True)
    return tl.where(bits < 0, bits ^ 0x7FFFFFFF, bits)


def _select_experts(
    LOGITS, BIAS, SELECTED, PROBS, num_tokens, scaling_factor,
    FUNCTION: tl.constexpr, EXPERTS: tl.constexpr, WIDTH: tl.constexpr, AT_ONCE: tl.constexpr,
    TOP_K: tl.constexpr, K_WIDTH: tl.constexpr, IS_PRE_SOFTMAX: tl.constexpr, HAS_BIAS: tl.constexpr,
):  # fmt: skip
    token, column, _, _, x = _tile(LOGITS, num_tokens, EXPERTS, WIDTH, AT_ONCE)
    choice = tl.arange(0, K_WIDTH)[None, :]
    if FUNCTION == "softmax":
        scores = x
        if IS_PRE_SOFTMAX:
            scores, _ = _softmax(x, column < EXPERTS)
    else:
        scores, _ = _score_and_derivative(x, FUNCTION)
    keys = scores
    if HAS_BIAS:
        keys += tl.load(BIAS + column, mask=column < EXPERTS, other=0).to(tl.float32)
    lowest = -2147483648  # below all keys
    keys = tl.where(column < EXPERTS, _ordered(keys), lowest)
    experts = tl.zeros([AT_ONCE, K_WIDTH], dtype=tl.int32)
    probs = tl.zeros([AT_ONCE, K_WIDTH], dtype=tl.float32)
    for number in range(TOP_K):
        is_best = keys == tl.max(keys, axis=1)[:, None]
        expert = tl.min(tl.where(is_best, column, WIDTH), axis=1)[:, None]
        keys = tl.where(column == expert, lowest, keys)
        score = tl.sum(tl.where(column == expert, scores, 0.0), axis=1)[:, None]
        experts = tl.where(choice == number, expert, experts)
        probs = tl.where(choice == number, score, probs)
    if FUNCTION == "softmax":
        if not IS_PRE_SOFTMAX:
            probs, _ = _softmax(probs, choice < TOP_K)
    elif TOP_K > 1:
        probs /= tl.sum(probs, axis=1)[:, None] + 1e-20
    out = token[:, None] * TOP_K + choice
    stored = (choice < TOP_K) & (token < num_tokens)[:, None]
    tl.store(SELECTED + out, experts.to(tl.int64), mask=stored)
    tl.store(PROBS + out, (probs * scaling_factor).to(PROBS.dtype.element_ty), mask=stored)


def _select_experts_backward(
    DPROBS, LOGITS, SELECTED, DLOGITS, num_tokens, scaling_factor,
    FUNCTION: tl.constexpr, EXPERTS: tl.constexpr, WIDTH: tl.constexpr, AT_ONCE: tl.constexpr,
    TOP_K: tl.constexpr, IS_PRE_SOFTMAX: tl.constexpr,
):  # fmt: skip
    token, column, index, inside, x = _tile(LOGITS, num_tokens, EXPERTS, WIDTH, AT_ONCE)
    gradient = tl.zeros([AT_ONCE, WIDTH], dtype=tl.float32)
    selected = tl.zeros([AT_ONCE, WIDTH], dtype=tl.int32)
    for number in range(TOP_K):
        expert = tl.load(SELECTED + token * TOP_K + number, mask=token < num_tokens, other=0)
        dprob = tl.load(DPROBS + token * TOP_K + number, mask=token < num_tokens, other=0).to(tl.float32)
        gradient = tl.where(column == expert[:, None], (dprob * scaling_factor)[:, None], gradient)
        selected = tl.where(column == expert[:, None], 1, selected)
    if FUNCTION == "softmax":
        probs, _ = _softmax(x, column < EXPERTS if IS_PRE_SOFTMAX else selected != 0)
        dx = _softmax_gradient(gradient, probs)
    else:
        scores, derivative = _score_and_derivative(x, FUNCTION)
        if TOP_K > 1:
            gradient = _normalized_gradient(gradient, scores, selected != 0)
        dx = gradient * derivative
    tl.store(DLOGITS + index, dx.to(DLOGITS.dtype.element_ty), mask=inside)


@jit
def _normalized_gradient(gradient, scores, inside):
    """Return the gradient of the scores from that of the scores normalized over the valid elements."""
    total = tl.sum(tl.where(inside, scores, 0.0), axis=1)[:, None] + 1e-20
    mean = tl.sum(tl.where(inside, gradient * scores, 0.0), axis=1)[:, None] / total
    return tl.where(inside, (gradient - mean) / total, 0.0)


def _sums(
    LOGITS, PARTS, rows, rounds,
    FUNCTION: tl.constexpr, EXPERTS: tl.constexpr, WIDTH: tl.constexpr, AT_ONCE: tl.constexpr,
):  # fmt: skip
    tile, sample, samples = tl.program_id(0), tl.program_id(1), tl.num_programs(1)
    column = tl.arange(0, WIDTH)
    is_expert = (column < EXPERTS)[None, :]
    probs_sum = tl.zeros([WIDTH], dtype=tl.float32)
    entropies = tl.zeros([AT_ONCE], dtype=tl.float32)
    squares = tl.zeros([AT_ONCE], dtype=tl.float32)
    for number in range(rounds):
        row = (tile * rounds + number).to(tl.int64) * AT_ONCE + tl.arange(0, AT_ONCE)
        inside = is_expert & (row < rows)[:, None]
        index = (row * samples + sample)[:, None] * EXPERTS + column[None, :]
        x = tl.load(LOGITS + index, mask=inside, other=0).to(tl.float32)
        probs, log_sum = _softmax(x, is_expert)
        if FUNCTION != "softmax":
            scores, _ = _score_and_derivative(x, FUNCTION)
            scores = tl.where(is_expert, scores, 0.0)
            probs = scores / (tl.sum(scores, axis=1)[:, None] + 1e-20)
        probs = tl.where(inside, probs, 0.0)
        probs_sum += tl.sum(probs, axis=0)
        entropies -= tl.sum(tl.where(probs == 0, 0.0, probs * tl.log(probs)), axis=1)
        squares += tl.where(row < rows, log_sum * log_sum, 0.0)
    start = PARTS + (tile * samples + sample) * (EXPERTS + 2)
    tl.store(start + column, probs_sum, mask=column < EXPERTS)
    tl.store(start + EXPERTS, tl.sum(entropies, axis=0))
    tl.store(start + EXPERTS + 1, tl.sum(squares, axis=0))


def _sums_backward(
    DPROBS, DSQUARES, LOGITS, DLOGITS, num_tokens, samples,
    FUNCTION: tl.constexpr, EXPERTS: tl.constexpr, WIDTH: tl.constexpr, AT_ONCE: tl.constexpr,
    HAS_PROBS: tl.constexpr, HAS_SQUARES: tl.constexpr,
):  # fmt: skip
    token, column, index, inside, x = _tile(LOGITS, num_tokens, EXPERTS, WIDTH, AT_ONCE)
    probs, log_sum = _softmax(x, column < EXPERTS)
    dx = tl.zeros([AT_ONCE, WIDTH], dtype=tl.float32)
    if HAS_PROBS:
        of_sample = (token % samples)[:, None] * EXPERTS + column
        gradient = tl.load(DPROBS + of_sample, mask=inside, other=0).to(tl.float32)
        if FUNCTION == "softmax":
            dx = _softmax_gradient(gradient, probs)
        else:
            scores, derivative = _score_and_derivative(x, FUNCTION)
            dx = _normalized_gradient(gradient, scores, column < EXPERTS) * derivative
    if HAS_SQUARES:
        dx += probs * (2 * log_sum * tl.load(DSQUARES).to(tl.float32))[:, None]
    tl.store(DLOGITS + index, dx.to(DLOGITS.dtype.element_ty), mask=inside)


def _count(EXPERTS_OF, COUNTS, length, samples, num_experts, TOP_K: tl.constexpr, BLOCK: tl.constexpr):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    expert = tl.load(EXPERTS_OF + at, mask=at < length, other=0)
    tl.atomic_add(COUNTS + at // TOP_K % samples * num_experts + expert, 1, mask=at < length, sem="relaxed")


_select = jit(_select_experts, ("num_tokens",))
_select_backward = jit(_select_experts_backward, ("num_tokens",))
_sum_scores = jit(_sums, ("rows", "rounds"))
_sum_scores_backward = jit(_sums_backward, ("num_tokens", "samples"))
_count_tokens = jit(_count, ("length", "samples", "num_experts"))
