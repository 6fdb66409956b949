"""The dropout mask of attention inside kernels: `kernels.random.attention_keep_mask`, tile by tile.

    counter (64-bit head in the run, query position, 8 * (key position // 64) + key position % 8) -> Philox4x32-7
    -> 8 numbers of 16 bits, for the keys k, k + 8, .., k + 56 of a block of 64

Integer operations per score, where the 8 keys of a counter lie in one thread (as in tiles of queries by keys: matrix
instructions give a thread two of 8 adjacent columns, and the same two of every 8):

    rounds 1 to 3   row and column counters are broadcast late: 1 product, 3 xor on the whole tile
    rounds 4 to 7   2 products of 32 x 32 -> 64 bits and 2 three-way xor each: 16
    20 per counter = 2.5 per score; extraction, comparison, selection: 2.5          5 per score in all

In tiles of keys by queries a thread has 2 of the 8 keys, and Triton computes most counters four times. On one H200 both passes
together reach 64 to 69 % of their speed without dropout with 128 channels, 60 % with 64. A counter of Philox2x32 for the keys k, k + 8 and
the queries q, q + 8, which a thread has in both kinds of tiles, would compile to fewer instructions in dk and dv (858 instead of 1,375), and to
more in the other two kernels.
"""

from __future__ import annotations

from megatrain.kernels.fused.launching import jit, tl


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
        return tl.reshape(
            _keeps(column, query[:, None, None, None], number, head, key, threshold), [query.shape[0], KEYS]
        )
    row = position(first_key + tl.arange(0, KEYS), spans)[None, :]
    return _keeps(row // 64 * 8 + row % 8, query[:, None], row % 64 // 8, head, key, threshold)


@jit
def keeps_by_key(query, first_key, spans, head, key, threshold, KEYS: tl.constexpr, IS_ALIGNED: tl.constexpr):
    """Return the same mask transposed, bool [keys, queries]."""
    if IS_ALIGNED:
        block = position(first_key + tl.arange(0, KEYS // 64) * 64, spans) // 8
        column = block[:, None, None, None] + tl.arange(0, 8)[None, None, :, None]
        number = tl.arange(0, 8)[None, :, None, None]
        return tl.reshape(
            _keeps(column, query[None, None, None, :], number, head, key, threshold), [KEYS, query.shape[0]]
        )
    row = position(first_key + tl.arange(0, KEYS), spans)[:, None]
    return _keeps(row // 64 * 8 + row % 8, query[None, :], row % 64 // 8, head, key, threshold)


@jit
def _keeps(column, query, number, head, key, threshold):
    """Return whether a counter's number of 16 bits is at least the threshold; operands are broadcast."""
    w0, w1, w2, w3 = _philox(column, query, head, key)
    word = tl.where(number < 4, tl.where(number < 2, w0, w1), tl.where(number < 6, w2, w3))
    return tl.where(number % 2 == 0, word << 16, word) >= (tl.cast(threshold, tl.uint32) << 16)


@jit
def _philox(column, query, head, key):
    """Return the four words of Philox4x32-7; operands are broadcast in the round that first combines them."""
    c0, c1 = column.to(tl.uint32), query.to(tl.uint32)
    c2, c3 = tl.cast(head[0], tl.uint32), tl.cast(head[1], tl.uint32)
    k0, k1 = tl.cast(key[0], tl.uint32), tl.cast(key[1], tl.uint32)
    for _ in tl.static_range(7):
        product_0, product_1 = c0.to(tl.uint64) * 0xD2511F53, c2.to(tl.uint64) * 0xCD9E8D57
        c0, c2 = (product_1 >> 32).to(tl.uint32) ^ c1 ^ k0, (product_0 >> 32).to(tl.uint32) ^ c3 ^ k1
        c1, c3 = product_1.to(tl.uint32), product_0.to(tl.uint32)
        k0, k1 = k0 + 0x9E3779B9, k1 + 0xBB67AE85
    return c0, c1, c2, c3
