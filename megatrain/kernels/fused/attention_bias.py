"""The gradient of an attention bias that is a function of the distance key - query, for each head.

    far tiles, which have one bias    `dq_of_queries` sums the gradients of scores, before and after the query
    a diagonal of the other tiles     sum over the diagonal -> [rows of a tile, distances] ─ sum over rows ─> [distances]

A program has a diagonal of square tiles, where an element has the same distance in each tile, for some of the samples.
Each result is written by one program, in a fixed order: results are deterministic.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from megatrain.kernels.fused.attention_dropout import load_kept
from megatrain.kernels.fused.attention_kernels import (
    at,
    base_2,
    biased,
    is_far,
    is_token,
    kernel,
    load_tile,
)
from megatrain.kernels.fused.launching import cdiv, launch, tl

_PARTS = 4
"""Programs that share the samples of a diagonal."""


def bias_gradient(
    arguments: tuple[Any, ...], far: Tensor, tile: tuple[int, int], reach: int, sk: int, **constants: Any
) -> Tensor:
    """Return the gradient, fp32 [n, sq + sk - 1]; that of far distances is a sum, in part at the first and the last one.

    Args:
        arguments: of the kernel, up to the factor of dropout.
        far: sums of far tiles before and after each query, [b, n, 2, sq].
        tile: queries and keys of the tiles that are far or not, multiples of the square tile's.
        reach: see `DistanceBias`.
        sk: number of keys; with a causal mask that of queries.
        constants: of the kernel; IS_CAUSAL, QUERIES and the others of `attention_kernels`.
    """
    (b, n, _, sq), side = far.shape, constants["QUERIES"]
    assert constants["KEYS"] == side
    most = (reach + sum(tile) - side - 2) // side  # tiles on further diagonals are far
    first = -min(most, cdiv(sq, side) - 1)
    last = 0 if constants["IS_CAUSAL"] else min(most, cdiv(sk, side) - 1)
    zero, width = side * (1 - first), side * (last - first + 2)  # place of distance 0, number of distances
    parts = min(b, _PARTS)
    sums = torch.zeros(parts, n, side, width, dtype=torch.float32, device=far.device)
    launch(
        _bias_gradient, (last - first + 1, n, parts), *arguments, sums, b, first * side, (width, zero),
        DQ_QUERIES=tile[0], DQ_KEYS=tile[1], **constants,
    )  # fmt: skip
    gradient = torch.zeros(n, sq + sk - 1, dtype=torch.float32, device=far.device)
    start, end = max(1 - sq, -zero), min(sk, width - zero)
    gradient[:, start + sq - 1 : end + sq - 1] = sums.sum((0, 2))[:, start + zero : end + zero]
    of_heads = far.sum((0, 3))
    gradient[:, 0] += of_heads[:, 0]
    gradient[:, -1] += of_heads[:, 1]
    return gradient


@kernel
def _bias_gradient(
    Q, K, V, DOUT, q_at, k_at, v_at, dout_at, LSE, DOUT_DOT_OUT, KEPT, kept_width, IS_TOKEN, BIAS, bias_at,
    sq, sk, heads_per_group, into_tanh, to_base_2, keep_factor, SUMS, samples, first, sums_at,  # noqa: ARG001
    CHANNELS: tl.constexpr, PADDED: tl.constexpr, QUERIES: tl.constexpr, KEYS: tl.constexpr,
    IS_CAUSAL: tl.constexpr, HAS_SOFTCAP: tl.constexpr, HAS_DROPOUT: tl.constexpr, IS_EVEN: tl.constexpr,  # noqa: ARG001
    HAS_PADDING: tl.constexpr, HAS_BIAS: tl.constexpr, DQ_QUERIES: tl.constexpr, DQ_KEYS: tl.constexpr,  # noqa: ARG001
):  # fmt: skip
    head, shift = tl.program_id(1), first + tl.program_id(0) * KEYS
    end = tl.minimum(sq, sk - shift)
    side = tl.arange(0, QUERIES)
    distance = shift + side[None, :] - side[:, None]
    total = tl.zeros([QUERIES, KEYS], dtype=tl.float32)
    for sample in tl.range(tl.program_id(2), samples, tl.num_programs(2)):
        group = head // heads_per_group
        Q_HEAD, DOUT_HEAD = at(Q, q_at, sample, head), at(DOUT, dout_at, sample, head)
        K_HEAD, V_HEAD = at(K, k_at, sample, group), at(V, v_at, sample, group)
        of_head = (tl.cast(sample, tl.int64) * tl.num_programs(1) + head) * sq
        for start in tl.range(tl.maximum(-shift, 0), end, QUERIES):
            row, key_row = start + side, start + shift + side
            q = load_tile(Q_HEAD, start, QUERIES, q_at[0], sq, CHANNELS, PADDED, IS_EVEN)
            dout = load_tile(DOUT_HEAD, start, QUERIES, dout_at[0], sq, CHANNELS, PADDED, IS_EVEN)
            k = load_tile(
                K_HEAD, start + shift, KEYS, k_at[0], sk, CHANNELS, PADDED, IS_EVEN, IS_TRANSPOSED=True
            )
            v = load_tile(
                V_HEAD, start + shift, KEYS, v_at[0], sk, CHANNELS, PADDED, IS_EVEN, IS_TRANSPOSED=True
            )
            lse = base_2(LSE + of_head + row, row < sq)
            dout_dot_out = tl.load(DOUT_DOT_OUT + of_head + row, mask=row < sq, other=0)
            scores = tl.dot(q, k, input_precision="ieee")
            scores = biased(scores, BIAS, bias_at, head, start, start + shift, distance, to_base_2, False)
            probs = tl.exp2(scores - lse[:, None])
            dq_row, dq_key = start // DQ_QUERIES * DQ_QUERIES, (start + shift) // DQ_KEYS * DQ_KEYS
            is_near = is_far(dq_row, dq_key, bias_at[2], DQ_QUERIES, DQ_KEYS) == 0
            allowed = (key_row < sk)[None, :] & is_near
            if HAS_PADDING:
                allowed = allowed & is_token(IS_TOKEN, sample, key_row, sk)[None, :]
            if IS_CAUSAL:
                allowed = allowed & (distance <= 0)
            dprobs = tl.dot(dout, v, input_precision="ieee")
            if HAS_DROPOUT:
                kept = load_kept(KEPT + of_head * kept_width, row, sq, start + shift, kept_width, KEYS)
                dprobs = tl.where(kept, dprobs * keep_factor, 0)
            total += tl.where(allowed, probs * (dprobs - dout_dot_out[:, None]), 0)
    SUMS += (tl.program_id(2) * tl.num_programs(1) + head) * QUERIES * sums_at[0] + sums_at[1]
    tl.store(SUMS + side[:, None] * sums_at[0] + distance, total)
