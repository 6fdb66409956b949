"""The dropout mask of attention inside kernels: `kernels.random.attention_keep_mask`, tile by tile.

    counter (64-bit head in the run, query position, 8 * (key position // 64) + key position % 8) -> Philox4x32-7
    -> 8 numbers of 16 bits, for the keys k, k + 8, .., k + 56 of a block of 64

Integer operations per score, where the 8 keys of a counter lie in one thread (as in tiles of queries by keys: matrix
instructions give a thread two of 8 adjacent columns, and the same two of every 8):

    rounds 1 to 3   row and column counters are broadcast late: 1 product, 3 xor on the whole tile
    rounds 4 to 7   2 products of 32 x 32 -> 64 bits and 2 three-way xor each: 16
    20 per counter = 2.5 per score; extraction, comparison, selection: 2.5          5 per score in all

In tiles of keys by queries a thread has 2 of the 8 keys, and Triton would compute most counters four times. So the forward pass or,
where the mask would fill too much memory until then, the backward pass stores it, one bit a score: a byte has the keys
k, k + 8, .., k + 56 of 64 rows.
"""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch import Tensor

from megatrain.kernels.fused.launching import cdiv, jit, launch, tl
from megatrain.kernels.fused.random import philox

_QUERIES, _BYTES = 32, 64
"""Sizes of a tile of the stored mask."""
STREAM = ("first_head", "num_heads", "key_low", "key_high", "threshold")
POSITIONS = ("query_start", "query_middle", "query_jump", "key_start", "key_middle", "key_jump")
"""Arguments of kernels with dropout."""


def stored_mask(
    sizes: tuple[int, int, int],
    width: int,
    arguments: tuple[Any, ...],
    *,
    is_aligned: bool,
) -> Tensor:
    """Return the mask of all scores as bits, uint8 [b, n, sq, width].

    Args:
        sizes: b, n, sq.
        width: an eighth of the keys, rounded up to whole blocks of 64.
        arguments: of the kernels, from the first sample to the ranges of keys.
        is_aligned: see `keeps`.
    """
    b, n, sq = sizes
    kept = torch.empty(b, n, sq, width, dtype=torch.uint8, device=arguments[0].device)
    grid = (cdiv(sq, _QUERIES), n, b)
    launch(
        _store_mask, grid, kept, sq, width, *arguments, IS_ALIGNED=is_aligned, QUERIES=_QUERIES, BYTES=_BYTES
    )
    return kept


@functools.partial(jit, any_value=(*STREAM, *POSITIONS))
def _store_mask(
    KEPT, rows, width, FIRST_SAMPLE, first_head, num_heads, key_low, key_high, threshold,
    query_start, query_middle, query_jump, key_start, key_middle, key_jump,
    IS_ALIGNED: tl.constexpr, QUERIES: tl.constexpr, BYTES: tl.constexpr,
):  # fmt: skip
    row, head, sample = tl.program_id(0) * QUERIES + tl.arange(0, QUERIES), tl.program_id(1), tl.program_id(2)
    stream, key = stream_of(FIRST_SAMPLE, sample, head, first_head, num_heads), (key_low, key_high)
    query, spans = position(row, (query_start, query_middle, query_jump)), (key_start, key_middle, key_jump)
    KEPT += (sample.to(tl.int64) * tl.num_programs(1) + head) * rows * width
    for start in tl.range(0, width, BYTES):
        byte = start + tl.arange(0, BYTES)
        bits = tl.zeros([QUERIES, BYTES], dtype=tl.int32)
        for number in tl.static_range(8):
            place = position(byte // 8 * 64 + byte % 8 + (0 if IS_ALIGNED else 8 * number), spans)[None, :]
            word = number if IS_ALIGNED else place % 64 // 8
            kept = _keeps(place // 64 * 8 + place % 8, query[:, None], word, stream, key, threshold)
            bits |= kept.to(tl.int32) << number
        inside = (row < rows)[:, None] & (byte < width)[None, :]
        tl.store(KEPT + row.to(tl.int64)[:, None] * width + byte[None, :], bits.to(tl.uint8), mask=inside)


@jit
def stream_of(FIRST_SAMPLE, sample, head, first_head, num_heads):
    """Return the halves of the index of a head in the run."""
    index = (tl.load(FIRST_SAMPLE) + sample) * num_heads + first_head + head
    return index.to(tl.uint32), (index >> 32).to(tl.uint32)


@jit
def position(row, ranges):
    """Return the positions of rows whose positions are two ranges: (start, rows of the first, jump between them)."""
    return row + ranges[0] + tl.where(row >= ranges[1], ranges[2], 0)


@jit
def keeps(query, first_key, spans, head, key, threshold, KEYS: tl.constexpr, IS_ALIGNED: tl.constexpr):
    """Return the mask of a tile, bool [queries, keys].

    Args:
        query: positions, int32 [queries].
        first_key: row of the first key; the others follow.
        spans: arguments of `position` for keys.
        head, key: halves of the index of the head in the run and of the stream's key.
        IS_ALIGNED: each 64 rows of keys from `first_key` on have the positions of one block of 64.
    """
    if IS_ALIGNED:  # [queries, blocks, numbers of a counter, counters of a block]
        block = position(first_key + tl.arange(0, KEYS // 64) * 64, spans) // 8
        column = block[None, :, None, None] + tl.arange(0, 8)[None, None, None, :]
        number = tl.arange(0, 8)[None, None, :, None]
        w0, w1, w2, w3 = _philox(column, query[:, None, None, None], head, key)
        word = tl.where(number < 4, tl.where(number < 2, w0, w1), tl.where(number < 6, w2, w3))
        bits = tl.where(number % 2 == 0, word & 0xFFFF, word >> 16) | 0x4B000000
        x = tl.reshape(bits, [query.shape[0], KEYS]).to(tl.float32, bitcast=True)
        return tl.clamp(x - (8388607.0 + threshold), 0.0, 1.0)
    row = position(first_key + tl.arange(0, KEYS), spans)[None, :]
    return _keeps(row // 64 * 8 + row % 8, query[:, None], row % 64 // 8, head, key, threshold).to(tl.float32)


@jit
def store_kept(KEPT, signed, row, rows, first_key, width, KEYS: tl.constexpr):
    """Store the mask of a tile: of fp32 [queries, keys], which is negative where dropped."""
    queries: tl.constexpr = row.shape[0]
    kept = tl.reshape(signed, [queries, KEYS // 64, 8, 8])
    bits = tl.sum(kept * (1 << tl.arange(0, 8))[None, None, :, None].to(tl.float32), 2)
    place = tl.cast(row, tl.int64)[:, None, None] * width + _bytes_of_keys(first_key, KEYS)[None]
    tl.store(KEPT + place, bits.to(tl.uint8), mask=(row < rows)[:, None, None])


@jit
def load_kept(KEPT, row, rows, first_key, width, KEYS: tl.constexpr, IS_INSIDE: tl.constexpr):
    """Load a stored mask, 1.0 or 0.0 [queries, keys]."""
    queries: tl.constexpr = row.shape[0]
    query, key = row[:, None, None, None], _bytes_of_keys(first_key, KEYS)[None, :, None, :]
    kept = KEPT + (tl.cast(query, tl.int64) * width + key)
    byte = tl.load(kept) if IS_INSIDE else tl.load(kept, mask=query < rows, other=0)
    return tl.reshape(_factors(byte, tl.arange(0, 8)[None, None, :, None]), [queries, KEYS])


@jit
def load_kept_by_key(KEPT, row, rows, first_key, width, KEYS: tl.constexpr, IS_INSIDE: tl.constexpr):
    """Load a stored mask transposed, [keys, queries]."""
    queries: tl.constexpr = row.shape[0]
    query, key = row[None, None, None, :], _bytes_of_keys(first_key, KEYS)[:, None, :, None]
    kept = KEPT + (tl.cast(query, tl.int64) * width + key)
    byte = tl.load(kept) if IS_INSIDE else tl.load(kept, mask=query < rows, other=0)
    return tl.reshape(_factors(byte, tl.arange(0, 8)[None, :, None, None]), [KEYS, queries])


@jit
def _factors(byte, number):
    """Return bits as 1.0 or 0.0, by a logical operation and a product: bit 23 + n alone is 2 ** (2 ** n - 127) in fp32."""
    bit = (byte.to(tl.int32) << 23) & (0x800000 << number)
    return bit.to(tl.float32, bitcast=True) * ((254 - (1 << number)) << 23).to(tl.float32, bitcast=True)


@jit
def _bytes_of_keys(first_key, KEYS: tl.constexpr):
    """Return the places of the bytes of a tile in the row of a query, [blocks of 64, 8]."""
    return first_key // 8 + tl.arange(0, KEYS // 64)[:, None] * 8 + tl.arange(0, 8)[None, :]


@jit
def _keeps(column, query, number, head, key, threshold):
    """Return whether a counter's number of 16 bits is at least the threshold; operands are broadcast."""
    return _upper_bits(column, query, number, head, key) >= (tl.cast(threshold, tl.uint32) << 16)


@jit
def _upper_bits(column, query, number, head, key):
    """Return 32 bits whose upper 16 are a counter's number; the others do not matter when it is compared."""
    w0, w1, w2, w3 = _philox(column, query, head, key)
    word = tl.where(number < 4, tl.where(number < 2, w0, w1), tl.where(number < 6, w2, w3))
    return tl.where(number % 2 == 0, word << 16, word)


@jit
def _philox(column, query, head, key):
    """Return the four words of Philox4x32-7."""
    c2, c3 = tl.cast(head[0], tl.uint32), tl.cast(head[1], tl.uint32)
    k0, k1 = tl.cast(key[0], tl.uint32), tl.cast(key[1], tl.uint32)
    return philox(column.to(tl.uint32), query.to(tl.uint32), c2, c3, k0, k1, 7)
