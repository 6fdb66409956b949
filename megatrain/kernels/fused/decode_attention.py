"""`kernels.attention.decode` on GPUs: a long sequence is split over the multiprocessors, and the splits are merged.

    _write     rows of new tokens, keys and values
    _attend    a split of one sequence, for all query heads of a group: keys and values are read once -> out, lse
    _merge     the splits of one sequence and query head -> out

The sizes of grids follow from shapes alone; first rows and lengths are read on the device, so that a CUDA graph serves
sequences of any length. Splits follow from the length and are merged in order: results are deterministic.

Source: Flash-Decoding, https://pytorch.org/blog/flash-decoding/ (splits of keys and values).
"""

from __future__ import annotations

import torch
from torch import Tensor

from megatrain.kernels.fused.attention_kernels import _tanh
from megatrain.kernels.fused.launching import cdiv, jit, launch, power_of_two, tl

_LOG2_E = 1.4426950408889634
_PROGRAMS = 264
"""Programs that occupy an H200: two per multiprocessor."""
_MAX_SPLITS = 64
_LEAST_HEADS = 16
"""Rows of the smallest GEMM."""
_TILE = 1 << 13
"""Elements of a tile of keys; at least 16 rows."""


def write_rows(keys: Tensor, values: Tensor, k: Tensor, v: Tensor, written: Tensor) -> None:
    """Implement `kernels.attention.decode.write_rows`."""
    b, g, d = k.shape
    dv = v.shape[2]
    launch(
        _write, (b, g),
        k, v, keys, values, written, d, dv, *k.stride()[:2], *v.stride()[:2], *keys.stride()[:2], *values.stride()[:2],
        D=power_of_two(d), DV=power_of_two(dv), num_warps=1,
    )  # fmt: skip


def decode_attention(
    q: Tensor,
    keys: Tensor,
    values: Tensor,
    first: Tensor,
    count: Tensor,
    *,
    scale: float,
    softcap: float | None = None,
    window: int | None = None,
    sink: Tensor | None = None,
) -> Tensor:
    """Implement `kernels.attention.decode.decode_attention`."""
    (b, n, d), (g, dv) = q.shape, values.shape[1:]
    assert all(x.stride(-1) == 1 for x in (q, keys, values))
    splits = _num_splits(b, g)
    out = torch.empty(b, n, dv, dtype=q.dtype, device=q.device)
    parts, lse = out, out
    if splits > 1:
        parts = torch.empty(b, n, splits, dv, dtype=torch.float32, device=q.device)
        lse = torch.empty(b, n, splits, dtype=torch.float32, device=q.device)
    block = max(16, min(64, _TILE // power_of_two(d)))
    into_tanh = 0.0 if softcap is None else 2 * _LOG2_E * scale / softcap
    launch(
        _attend, (b, g, splits),
        q, keys, values, first, count, q if sink is None else sink, parts, lse,
        into_tanh, (scale if softcap is None else softcap) * _LOG2_E, 0 if window is None else window + 1, n // g, d, dv,
        *q.stride()[:2], *keys.stride()[:2], *values.stride()[:2],
        HAS_SINK=sink is not None, HAS_SOFTCAP=softcap is not None, HAS_WINDOW=window is not None, SPLITS=splits,
        HEADS=max(_LEAST_HEADS, power_of_two(n // g)), BLOCK=block, D=power_of_two(d), DV=power_of_two(dv),
        num_warps=4, num_stages=2,
    )  # fmt: skip
    if splits > 1:
        launch(_merge, (b * n,), parts, lse, out, dv, SPLITS=splits, DV=power_of_two(dv), num_warps=4)
    return out


def _num_splits(sequences: int, groups: int) -> int:
    """Return the splits of each sequence, a power of two."""
    return min(_MAX_SPLITS, power_of_two(cdiv(_PROGRAMS, sequences * groups)))


@jit
def _write(
    K, V, KEYS, VALUES, WRITTEN, d, dv, k_b, k_g, v_b, v_g, keys_r, keys_g, values_r, values_g,
    D: tl.constexpr, DV: tl.constexpr,
):  # fmt: skip
    sequence, group = tl.program_id(0).to(tl.int64), tl.program_id(1)
    row = tl.load(WRITTEN + sequence)
    c, cv = tl.arange(0, D), tl.arange(0, DV)
    k = tl.load(K + sequence * k_b + group * k_g + c, mask=c < d)
    tl.store(KEYS + row * keys_r + group * keys_g + c, k.to(KEYS.dtype.element_ty), mask=c < d)
    v = tl.load(V + sequence * v_b + group * v_g + cv, mask=cv < dv)
    tl.store(VALUES + row * values_r + group * values_g + cv, v.to(VALUES.dtype.element_ty), mask=cv < dv)


@jit
def _attend(
    Q, K, V, FIRST, COUNT, SINK, OUT, LSE, into_tanh, to_base_2, seen, repeat, d, dv,
    q_b, q_n, k_r, k_g, v_r, v_g,
    HAS_SINK: tl.constexpr, HAS_SOFTCAP: tl.constexpr, HAS_WINDOW: tl.constexpr, SPLITS: tl.constexpr,
    HEADS: tl.constexpr, BLOCK: tl.constexpr, D: tl.constexpr, DV: tl.constexpr,
):  # fmt: skip
    sequence, group, split = tl.program_id(0).to(tl.int64), tl.program_id(1), tl.program_id(2)
    first, length = tl.load(FIRST + sequence), tl.load(COUNT + sequence)
    if HAS_WINDOW:
        attended = tl.minimum(length, seen)
        first += length - attended
        length = attended
    blocks = tl.cdiv(tl.cdiv(length, SPLITS), BLOCK).to(tl.int32)
    start = first + split * blocks * BLOCK
    end = tl.minimum(start + blocks * BLOCK, first + length)
    own_blocks = tl.maximum(tl.cdiv(end - start, BLOCK), 0).to(tl.int32)
    head = tl.arange(0, HEADS)
    is_head = head < repeat
    c, cv = tl.arange(0, D), tl.arange(0, DV)
    q_at = Q + sequence * q_b + (group * repeat + head)[:, None] * q_n + c[None, :]
    q = tl.load(q_at, mask=is_head[:, None] & (c < d)[None, :], other=0)
    maximum = tl.full((HEADS,), -float("inf"), tl.float32)
    total = tl.zeros((HEADS,), tl.float32)
    out = tl.zeros((HEADS, DV), tl.float32)
    if HAS_SINK:  # a score of the first split, without a value
        sink = tl.load(SINK + group * repeat + head, mask=is_head, other=0).to(tl.float32)
        maximum = tl.where(split == 0, sink * 1.4426950408889634, maximum)
        total += tl.where(split == 0, 1.0, 0.0)
    for index in range(own_blocks):
        row = start + index * BLOCK + tl.arange(0, BLOCK)
        inside = row < end
        k_at = K + row[None, :] * k_r + group * k_g + c[:, None]
        k = tl.load(k_at, mask=inside[None, :] & (c < d)[:, None], other=0)
        scores = tl.dot(q, k, input_precision="ieee")
        if HAS_SOFTCAP:
            scores = _tanh(scores, into_tanh)
        scores = tl.where(inside[None, :], scores * to_base_2, -float("inf"))
        largest = tl.maximum(maximum, tl.max(scores, axis=1))
        probs = tl.exp2(scores - largest[:, None])
        rescale = tl.exp2(maximum - largest)
        total = total * rescale + tl.sum(probs, axis=1)
        v_at = V + row[:, None] * v_r + group * v_g + cv[None, :]
        v = tl.load(v_at, mask=inside[:, None] & (cv < dv)[None, :], other=0)
        out = tl.dot(probs.to(v.dtype), v, out * rescale[:, None], input_precision="ieee")
        maximum = largest
    out = out / tl.where(total > 0, total, 1.0)[:, None]  # a split may have no rows
    at = (sequence * tl.num_programs(1) * repeat + group * repeat + head) * SPLITS + split
    is_out = is_head[:, None] & (cv < dv)[None, :]
    tl.store(OUT + at[:, None] * dv + cv[None, :], out.to(OUT.dtype.element_ty), mask=is_out)
    if SPLITS > 1:
        lse = tl.where(total > 0, maximum + tl.log2(tl.where(total > 0, total, 1.0)), -float("inf"))
        tl.store(LSE + at, lse, mask=is_head)


@jit
def _merge(PARTS, LSE, OUT, dv, SPLITS: tl.constexpr, DV: tl.constexpr):
    head = tl.program_id(0).to(tl.int64)
    split, cv = tl.arange(0, SPLITS), tl.arange(0, DV)
    lse = tl.load(LSE + head * SPLITS + split)
    weight = tl.exp2(lse - tl.max(lse, axis=0))
    parts = PARTS + (head * SPLITS + split)[:, None] * dv + cv[None, :]
    rows = tl.load(parts, mask=(weight > 0)[:, None] & (cv < dv)[None, :], other=0)
    out = tl.sum(rows * weight[:, None], axis=0) / tl.sum(weight, axis=0)
    tl.store(OUT + head * dv + cv, out.to(OUT.dtype.element_ty), mask=cv < dv)
