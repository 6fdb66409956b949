"""The gradient of an attention bias that is a function of the distance key - query, for each head.

A program sums a diagonal of square tiles over all samples: an element of these tiles has the same distance in each.

    scores' gradients of the tiles (i, i + diagonal)  ─ sum over i and samples ─>  [rows of a tile, distances]  ─ sum over rows ─>

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
    is_token,
    kernel,
    load_tile,
)
from megatrain.kernels.fused.launching import cdiv, launch, tl


def bias_gradient(arguments: tuple[Any, ...], sizes: tuple[int, int, int, int], **constants: Any) -> Tensor:
    """Return the gradient, fp32 [n, sq + sk - 1], of the distances from 1 - sq on.

    Args:
        arguments: of the kernel, up to the factor of dropout.
        sizes: b, n, sq, sk; with a causal mask sq = sk.
        constants: of the kernel; IS_CAUSAL, QUERIES and the others of `attention_kernels`.
    """
    (b, n, sq, sk), side, is_causal = sizes, constants["QUERIES"], constants["IS_CAUSAL"]
    assert constants["KEYS"] == side
    assert sq == sk or not is_causal
    rows, columns = cdiv(sq, side), cdiv(sk, side)
    zero = rows * side  # place of distance 0
    sums = torch.zeros(n, side, zero + columns * side, dtype=torch.float32, device=arguments[0].device)
    diagonals = rows if is_causal else rows + columns - 1
    launch(_bias_gradient, (diagonals, n), *arguments, sums, b, (sums.shape[2], zero), **constants)
    return sums.sum(1)[:, zero + 1 - sq : zero + sk]


@kernel
def _bias_gradient(
    Q, K, V, DOUT, q_at, k_at, v_at, dout_at, LSE, DOUT_DOT_OUT, KEPT, kept_width, IS_TOKEN, BIAS, bias_at,
    sq, sk, heads_per_group, into_tanh, to_base_2, keep_factor, SUMS, samples, sums_at,  # noqa: ARG001
    CHANNELS: tl.constexpr, PADDED: tl.constexpr, QUERIES: tl.constexpr, KEYS: tl.constexpr,
    IS_CAUSAL: tl.constexpr, HAS_SOFTCAP: tl.constexpr, HAS_DROPOUT: tl.constexpr, IS_EVEN: tl.constexpr,  # noqa: ARG001
    HAS_PADDING: tl.constexpr, HAS_BIAS: tl.constexpr,  # noqa: ARG001
):  # fmt: skip
    head, shift = tl.program_id(1), (tl.program_id(0) + 1) * KEYS - tl.cdiv(sq, QUERIES) * QUERIES
    end = tl.minimum(sq, sk - shift)
    side = tl.arange(0, QUERIES)
    distance = shift + side[None, :] - side[:, None]
    total = tl.zeros([QUERIES, KEYS], dtype=tl.float32)
    for sample in tl.range(samples):
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
            scores = biased(tl.dot(q, k, input_precision="ieee"), BIAS, bias_at, head, distance, to_base_2)
            probs = tl.exp2(scores - lse[:, None])
            allowed = (key_row < sk)[None, :]
            if HAS_PADDING:
                allowed = allowed & is_token(IS_TOKEN, sample, key_row, sk)[None, :]
            if IS_CAUSAL:
                allowed = allowed & (distance <= 0)
            dprobs = tl.dot(dout, v, input_precision="ieee")
            if HAS_DROPOUT:
                kept = load_kept(KEPT + of_head * kept_width, row, sq, start + shift, kept_width, KEYS)
                dprobs = tl.where(kept, dprobs * keep_factor, 0)
            total += tl.where(allowed, probs * (dprobs - dout_dot_out[:, None]), 0)
    SUMS += head * QUERIES * sums_at[0] + sums_at[1]
    tl.store(SUMS + side[:, None] * sums_at[0] + distance, total)
