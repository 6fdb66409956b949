"""What a router makes of its logits, in one pass each way: the best experts with their weights, and sums of scores."""

from __future__ import annotations

import torch
from torch import Tensor

from megatrain.kernels.fused.launching import cdiv, jit, launch, power_of_two, tl

_PAIRS = 2048
"""Of a token and an expert, that a program works on at a time."""
_PROGRAMS = 512
"""That sum scores, at most."""


def pick(
    logits: Tensor,
    bias: Tensor | None,
    *,
    top_k: int,
    score_function: str,
    is_pre_softmax: bool,
    scaling_factor: float,
) -> tuple[Tensor, Tensor]:
    """As `kernels.routing.select_experts` of a rule without groups."""
    logits = logits.contiguous()
    num_tokens = len(logits)
    experts = torch.empty(num_tokens, top_k, dtype=torch.int64, device=logits.device)
    weights = torch.empty(num_tokens, top_k, dtype=logits.dtype, device=logits.device)
    kind, at_once = _kind(logits, score_function)
    launch(
        _pick, (cdiv(num_tokens, at_once),),
        logits, logits if bias is None else bias.contiguous(), experts, weights, num_tokens, scaling_factor,
        **kind, TOP_K=top_k, K_WIDTH=power_of_two(top_k), IS_PRE_SOFTMAX=is_pre_softmax,
        HAS_BIAS=bias is not None,
    )  # fmt: skip
    return experts, weights


def pick_backward(
    dweights: Tensor,
    logits: Tensor,
    experts: Tensor,
    *,
    score_function: str,
    is_pre_softmax: bool,
    scaling_factor: float,
) -> Tensor:
    """Gradient of the logits by that of the weights: [t, k] -> [t, E]."""
    assert experts.is_contiguous()
    logits, dweights = logits.contiguous(), dweights.contiguous()
    dlogits = torch.empty_like(logits)
    num_tokens, top_k = experts.shape
    kind, at_once = _kind(logits, score_function)
    launch(
        _pick_backward, (cdiv(num_tokens, at_once),),
        dweights, logits, experts, dlogits, num_tokens, scaling_factor,
        **kind, TOP_K=top_k, IS_PRE_SOFTMAX=is_pre_softmax,
    )  # fmt: skip
    return dlogits


def score_sums(logits: Tensor, score_function: str, samples: int) -> Tensor:
    """Of each sample the sums of its tokens' shares, then those of entropies and of squared log-sums: fp32 [b, E + 2]."""
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
    dshares: Tensor | None, dsquares: Tensor | None, logits: Tensor, score_function: str, samples: int
) -> Tensor:
    """Gradient of the logits by those of the shares' sums, [b, E], and of the squares' sum, a number; None for none."""
    logits = logits.contiguous()
    dlogits = torch.empty_like(logits)
    kind, at_once = _kind(logits, score_function)
    launch(
        _sum_scores_backward, (cdiv(len(logits), at_once),),
        logits if dshares is None else dshares.contiguous(), logits if dsquares is None else dsquares,
        logits, dlogits, len(logits), samples,
        **kind, HAS_SHARES=dshares is not None, HAS_SQUARES=dsquares is not None,
    )  # fmt: skip
    return dlogits


def _kind(logits: Tensor, score_function: str) -> tuple[dict[str, object], int]:
    """Constants of all kernels, and tokens of a program."""
    width = power_of_two(logits.shape[1])
    at_once = min(max(_PAIRS // width, 1), 64)
    kind = {"FUNCTION": score_function, "EXPERTS": logits.shape[1], "WIDTH": width, "AT_ONCE": at_once}
    return kind, at_once


@jit
def _tile(LOGITS, num_tokens, EXPERTS: tl.constexpr, WIDTH: tl.constexpr, AT_ONCE: tl.constexpr):
    """A program's tokens, all columns, where these pairs lie, which there are, and their logits."""
    token = tl.program_id(0).to(tl.int64) * AT_ONCE + tl.arange(0, AT_ONCE)
    column = tl.arange(0, WIDTH)[None, :]
    place = token[:, None] * EXPERTS + column
    inside = (column < EXPERTS) & (token < num_tokens)[:, None]
    x = tl.load(LOGITS + place, mask=inside, other=0).to(tl.float32)
    return token, column, place, inside, x


@jit
def _softmax(x, inside):
    """Softmax of each row over what is inside, and the log of the sum of exponentials."""
    largest = tl.max(tl.where(inside, x, float("-inf")), axis=1)
    powers = tl.where(inside, tl.exp(x - largest[:, None]), 0.0)
    total = tl.sum(powers, axis=1)
    return powers / total[:, None], largest + tl.log(total)


@jit
def _softmax_gradient(gradient, shares):
    """Gradient of what `_softmax` was made of by that of the shares."""
    return shares * (gradient - tl.sum(shares * gradient, axis=1)[:, None])


@jit
def _score_and_derivative(x, FUNCTION: tl.constexpr):
    """Of score functions that look at each logit alone."""
    sigmoid = 1 / (1 + tl.exp(-x))
    if FUNCTION == "sigmoid":
        score, derivative = sigmoid, sigmoid * (1 - sigmoid)
    else:
        tl.static_assert(FUNCTION == "sqrtsoftplus", "a score function that this kernel does not know")
        power = tl.exp(-tl.abs(x))
        more = 1 + power  # log(1 + power) without the rounding of the sum
        log = tl.where(more == 1, power, tl.log(more) * (power / (more - 1)))
        score = tl.sqrt(tl.where(x > 0, x, 0.0) + log)
        derivative = tl.where(score > 0, sigmoid / (2 * score), 0.0)  # a score too small for fp32 is 0
    return score, derivative


@jit
def _ordered(x):
    """Integers in the order of the numbers; NaN is as large as infinity, so that each row has its best."""
    x = tl.where((x <= 0) | (x > 0), x, float("inf"))
    x = tl.where(x == 0, 0.0, x)  # no -0
    bits = x.to(tl.int32, bitcast=True)
    return tl.where(bits < 0, bits ^ 0x7FFFFFFF, bits)


def _pick_tokens(
    LOGITS, BIAS, CHOSEN, WEIGHTS, num_tokens, scaling_factor,
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
    claims = scores
    if HAS_BIAS:
        claims += tl.load(BIAS + column, mask=column < EXPERTS, other=0).to(tl.float32)
    lowest = -2147483648  # below all numbers
    claims = tl.where(column < EXPERTS, _ordered(claims), lowest)
    experts = tl.zeros([AT_ONCE, K_WIDTH], dtype=tl.int32)
    weights = tl.zeros([AT_ONCE, K_WIDTH], dtype=tl.float32)
    for number in range(TOP_K):
        is_best = claims == tl.max(claims, axis=1)[:, None]
        expert = tl.min(tl.where(is_best, column, WIDTH), axis=1)[:, None]
        claims = tl.where(column == expert, lowest, claims)
        score = tl.sum(tl.where(column == expert, scores, 0.0), axis=1)[:, None]
        experts = tl.where(choice == number, expert, experts)
        weights = tl.where(choice == number, score, weights)
    if FUNCTION == "softmax":
        if not IS_PRE_SOFTMAX:
            weights, _ = _softmax(weights, choice < TOP_K)
    elif TOP_K > 1:
        weights /= tl.sum(weights, axis=1)[:, None] + 1e-20
    out = token[:, None] * TOP_K + choice
    stored = (choice < TOP_K) & (token < num_tokens)[:, None]
    tl.store(CHOSEN + out, experts.to(tl.int64), mask=stored)
    tl.store(WEIGHTS + out, (weights * scaling_factor).to(WEIGHTS.dtype.element_ty), mask=stored)


def _pick_tokens_backward(
    DWEIGHTS, LOGITS, CHOSEN, DLOGITS, num_tokens, scaling_factor,
    FUNCTION: tl.constexpr, EXPERTS: tl.constexpr, WIDTH: tl.constexpr, AT_ONCE: tl.constexpr,
    TOP_K: tl.constexpr, IS_PRE_SOFTMAX: tl.constexpr,
):  # fmt: skip
    token, column, place, inside, x = _tile(LOGITS, num_tokens, EXPERTS, WIDTH, AT_ONCE)
    gradient = tl.zeros([AT_ONCE, WIDTH], dtype=tl.float32)
    picked = tl.zeros([AT_ONCE, WIDTH], dtype=tl.int32)
    for number in range(TOP_K):
        expert = tl.load(CHOSEN + token * TOP_K + number, mask=token < num_tokens, other=0)
        dweight = tl.load(DWEIGHTS + token * TOP_K + number, mask=token < num_tokens, other=0).to(tl.float32)
        gradient = tl.where(column == expert[:, None], (dweight * scaling_factor)[:, None], gradient)
        picked = tl.where(column == expert[:, None], 1, picked)
    if FUNCTION == "softmax":
        shares, _ = _softmax(x, column < EXPERTS if IS_PRE_SOFTMAX else picked != 0)
        dx = _softmax_gradient(gradient, shares)
    else:
        scores, derivative = _score_and_derivative(x, FUNCTION)
        if TOP_K > 1:
            gradient = _share_gradient(gradient, scores, picked != 0)
        dx = gradient * derivative
    tl.store(DLOGITS + place, dx.to(DLOGITS.dtype.element_ty), mask=inside)


@jit
def _share_gradient(gradient, scores, inside):
    """Gradient of scores by that of their shares in the sum over what is inside."""
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
    shares_sum = tl.zeros([WIDTH], dtype=tl.float32)
    entropies = tl.zeros([AT_ONCE], dtype=tl.float32)
    squares = tl.zeros([AT_ONCE], dtype=tl.float32)
    for number in range(rounds):
        row = (tile * rounds + number).to(tl.int64) * AT_ONCE + tl.arange(0, AT_ONCE)
        inside = is_expert & (row < rows)[:, None]
        place = (row * samples + sample)[:, None] * EXPERTS + column[None, :]
        x = tl.load(LOGITS + place, mask=inside, other=0).to(tl.float32)
        shares, log_sum = _softmax(x, is_expert)
        if FUNCTION != "softmax":
            scores, _ = _score_and_derivative(x, FUNCTION)
            scores = tl.where(is_expert, scores, 0.0)
            shares = scores / (tl.sum(scores, axis=1)[:, None] + 1e-20)
        shares = tl.where(inside, shares, 0.0)
        shares_sum += tl.sum(shares, axis=0)
        entropies -= tl.sum(tl.where(shares == 0, 0.0, shares * tl.log(shares)), axis=1)
        squares += tl.where(row < rows, log_sum * log_sum, 0.0)
    start = PARTS + (tile * samples + sample) * (EXPERTS + 2)
    tl.store(start + column, shares_sum, mask=column < EXPERTS)
    tl.store(start + EXPERTS, tl.sum(entropies, axis=0))
    tl.store(start + EXPERTS + 1, tl.sum(squares, axis=0))


def _sums_backward(
    DSHARES, DSQUARES, LOGITS, DLOGITS, num_tokens, samples,
    FUNCTION: tl.constexpr, EXPERTS: tl.constexpr, WIDTH: tl.constexpr, AT_ONCE: tl.constexpr,
    HAS_SHARES: tl.constexpr, HAS_SQUARES: tl.constexpr,
):  # fmt: skip
    token, column, place, inside, x = _tile(LOGITS, num_tokens, EXPERTS, WIDTH, AT_ONCE)
    shares, log_sum = _softmax(x, column < EXPERTS)
    dx = tl.zeros([AT_ONCE, WIDTH], dtype=tl.float32)
    if HAS_SHARES:
        of_sample = (token % samples)[:, None] * EXPERTS + column
        gradient = tl.load(DSHARES + of_sample, mask=inside, other=0).to(tl.float32)
        if FUNCTION == "softmax":
            dx = _softmax_gradient(gradient, shares)
        else:
            scores, derivative = _score_and_derivative(x, FUNCTION)
            dx = _share_gradient(gradient, scores, column < EXPERTS) * derivative
    if HAS_SQUARES:
        dx += shares * (2 * log_sum * tl.load(DSQUARES).to(tl.float32))[:, None]
    tl.store(DLOGITS + place, dx.to(DLOGITS.dtype.element_ty), mask=inside)


_pick = jit(_pick_tokens, ("num_tokens",))
_pick_backward = jit(_pick_tokens_backward, ("num_tokens",))
_sum_scores = jit(_sums, ("rows", "rounds"))
_sum_scores_backward = jit(_sums_backward, ("num_tokens", "samples"))
