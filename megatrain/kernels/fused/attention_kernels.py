"""The kernels of `fused/attention.py`.

Programs of `forward`, `numbers_of_rows`, `dq_of_queries` and `dq_of_scores` have the axes (tile of queries, head, sample), programs of `dkdv_of_keys`
(tile of keys, group, sample). Each runs its loop up to five times: over the tiles at the beginning and at the end, where masks apply to some scores, and over
those without a mask, with different biases or with one (`_parts`). Pointers and strides belong to [s, b, n, d]; the last stride is 1.

    sq, sk                  queries and keys; the last query has the position of the last key if IS_CAUSAL
    scale, to_base_2        factors of scores: in gradients, and in powers of two
    into_tanh               factor of q k before the tanh of softcaps
    IS_TOKEN, TOKENS        of each key of each sample, False for padding, and `tokens_of_samples`, if HAS_PADDING
    BIAS, bias_at           of `bias_of_distances`, if HAS_BIAS: elements of a head and before distance 0; reach
    LSE_2                   log-sum-exps to base 2; infinity, which makes probabilities 0, for queries without keys
    DOUT_DOT_OUT            dout . out / keep_factor of each query: until they are stored, gradients of inputs lack that factor
    DSCORES                 gradients of scores, [b, n, scores_at[0] keys, scores_at[1] queries], if HAS_BIAS
    FIRST_SAMPLE .. threshold   the dropout stream, see `fused/attention_dropout.py`
    query_start .. key_jump the positions of queries and keys, see `position`
"""

from __future__ import annotations

import functools

from megatrain.kernels.fused.attention_dropout import (
    POSITIONS,
    STREAM,
    keeps,
    load_kept,
    load_kept_by_key,
    position,
    store_kept,
    stream_of,
)
from megatrain.kernels.fused.launching import jit, tl

_kernel = functools.partial(jit, any_value=(*STREAM, *POSITIONS))


@jit
def _load(
    X, start, ROWS: tl.constexpr, stride, rows, CHANNELS: tl.constexpr, PADDED: tl.constexpr, IS_INSIDE: tl.constexpr,
    IS_TRANSPOSED: tl.constexpr = False,
):  # fmt: skip
    """Load the tile of the rows from `start` on, [ROWS, PADDED] or transposed; 0 outside. Offsets in a tile have 32 bits."""
    if IS_TRANSPOSED:
        row, channel = tl.arange(0, ROWS)[None, :], tl.arange(0, PADDED)[:, None]
    else:
        row, channel = tl.arange(0, ROWS)[:, None], tl.arange(0, PADDED)[None, :]
    pointer = X + tl.cast(start, tl.int64) * stride + (row * stride + channel)
    if CHANNELS == PADDED:
        return tl.load(pointer) if IS_INSIDE else tl.load(pointer, mask=start + row < rows, other=0)
    if IS_INSIDE:
        return tl.load(pointer, mask=channel < CHANNELS, other=0)
    return tl.load(pointer, mask=(start + row < rows) & (channel < CHANNELS), other=0)


@jit
def _store(
    X, x, start, stride, rows, CHANNELS: tl.constexpr, SUMS=None, place=0, HAS_SUMS: tl.constexpr = False
):
    """Store the tile of the rows from `start` on, and their sums after those of `place` heads."""
    row, channel = tl.arange(0, x.shape[0])[:, None], tl.arange(0, x.shape[1])[None, :]
    pointer = X + tl.cast(start, tl.int64) * stride + (row * stride + channel)
    x = x.to(X.dtype.element_ty)
    tl.store(pointer, x, mask=(start + row < rows) & (channel < CHANNELS))
    if HAS_SUMS:
        sums = tl.sum(tl.where(start + row < rows, x.to(tl.float32), 0), 0)
        column = tl.arange(0, x.shape[1])
        tl.store(SUMS + place * CHANNELS + column, sums, mask=column < CHANNELS)


@jit
def _at(X, stride, sample, head):
    """Return the pointer to a head of a sample."""
    return X + tl.cast(sample, tl.int64) * stride[1] + tl.cast(head, tl.int64) * stride[2]


@jit
def _is_token(IS_TOKEN, sample, key, sk):
    """Return whether keys are no padding."""
    return tl.load(IS_TOKEN + tl.cast(sample, tl.int64) * sk + key, mask=key < sk, other=0) != 0


@jit
def _is_far(start_row, start_key, reach, QUERIES: tl.constexpr, KEYS: tl.constexpr):
    """Return whether a tile has one bias."""
    return (start_key - start_row - QUERIES + 1 >= reach) | (start_row - start_key - KEYS + 1 >= reach)


@jit
def _biased(
    scores, BIAS, bias_at, head, start_row, start_key, to_base_2, HAS_BIAS: tl.constexpr, IS_FAR: tl.constexpr, IS_BY_KEY: tl.constexpr = False
):  # fmt: skip
    """Return scores of queries by keys, or of keys by queries, and what makes them powers of two: a factor, and a term of the tile.

    BIAS is to base 2, or `by key` in the dtype of the inputs: 16 bits are loaded into registers, 32 through shared memory, which
    takes longer, but 16 bits by query would give the mask of dropout another layout.
    """
    if not HAS_BIAS:
        return scores, to_base_2, 0.0
    log2_e: tl.constexpr = 1.4426950408889634 if IS_BY_KEY else 1.0
    BIAS += head * bias_at[0] + bias_at[1] + start_key - start_row
    if IS_FAR:
        return scores, to_base_2, tl.load(BIAS).to(tl.float32) * log2_e
    first, second = tl.arange(0, scores.shape[0])[:, None], tl.arange(0, scores.shape[1])[None, :]
    bias = tl.load(BIAS - second + first) if IS_BY_KEY else tl.load(BIAS - first + second)
    return scores * (to_base_2 / log2_e) + bias.to(tl.float32), log2_e, 0.0


@jit
def _parts(
    bounds, own, reach, OWN: tl.constexpr, OTHER: tl.constexpr, HAS_BIAS: tl.constexpr, IS_REVERSED: tl.constexpr
):  # fmt: skip
    """Return starts and ends of five loops: at the beginning, at the end, and without a mask near, before and after; or reversed.

    Args:
        bounds: the first, those between which no mask applies, and the last.
        own: first row of the program's tile, of OWN rows; loops are over tiles of OTHER rows. Far tiles have one bias.
    """
    near, far = bounds[1], bounds[2]
    if HAS_BIAS:
        near = tl.maximum(own + 1 - reach, 0) // OTHER * OTHER
        near = tl.minimum(tl.maximum(near, bounds[1]), bounds[2])
        far = tl.cdiv(own + OWN - 1 + reach, OTHER) * OTHER
        far = tl.minimum(tl.maximum(far, near), bounds[2])
    if IS_REVERSED:
        return (bounds[2], bounds[0], near, far, bounds[1]), (bounds[3], bounds[1], far, bounds[2], near)
    else:  # noqa: RET505 (Triton needs it)
        return (bounds[0], bounds[2], near, bounds[1], far), (bounds[1], bounds[3], far, near, bounds[2])


@jit
def _key_bounds(
    FIRST, TOKENS, sample, tile, sq, sk,
    QUERIES: tl.constexpr, KEYS: tl.constexpr, IS_CAUSAL: tl.constexpr, HAS_FIRST: tl.constexpr, HAS_PADDING: tl.constexpr,
):  # fmt: skip
    """Return four bounds of keys: the first, those between which all queries of a tile attend to all keys, and the last."""
    start, full_start, full_end, end = 0, 0, sk, sk
    if IS_CAUSAL:
        full_end = tl.minimum(sk, tl.maximum(tile * QUERIES + 1 + sk - sq, 0))
        end = tl.minimum(sk, tl.maximum((tile + 1) * QUERIES + sk - sq, 0))
    if HAS_FIRST:
        start = tl.maximum(tl.load(FIRST + tile * QUERIES), 0) // KEYS * KEYS
        full_start = tl.load(FIRST + tl.minimum((tile + 1) * QUERIES, sq) - 1)
        full_start = tl.minimum(tl.maximum(tl.cdiv(full_start, KEYS), 0) * KEYS, end)
    if HAS_PADDING:
        full_end = tl.minimum(full_end, tl.load(TOKENS + 2 * sample))
        end = tl.minimum(end, tl.load(TOKENS + 2 * sample + 1))
    return start, full_start, tl.maximum(full_end // KEYS * KEYS, full_start), end


@jit
def _masked(
    x, other, row, key, first, sq, sk, IS_TOKEN, sample,
    HAS_MASK: tl.constexpr, IS_CAUSAL: tl.constexpr, HAS_FIRST: tl.constexpr, HAS_PADDING: tl.constexpr,
):  # fmt: skip
    """Return a tile of queries by keys with another number where a query does not attend to a key."""
    if HAS_MASK:
        allowed = key[None, :] < sk
        if IS_CAUSAL:
            allowed = allowed & (key[None, :] <= row[:, None] + (sk - sq))
        if HAS_FIRST:
            allowed = allowed & (key[None, :] >= first)
        if HAS_PADDING:
            allowed = allowed & _is_token(IS_TOKEN, sample, key, sk)[None, :]
        x = tl.where(allowed, x, other)
    return x


@jit
def _masked_by_key(probs, row, key, ends, shift, HAS_MASK: tl.constexpr, IS_CAUSAL: tl.constexpr):
    """Return a tile of keys by queries with 0 where a query does not attend to a key, apart from padding."""
    if HAS_MASK:
        allowed = row[None, :] < ends
        if IS_CAUSAL:
            allowed = allowed & (key[:, None] <= row[None, :] + shift)
        probs = tl.where(allowed, probs, 0)
    return probs


@jit
def _tanh(x, into_tanh):
    return 1 - 2 / (1 + tl.exp2(x * into_tanh))


@_kernel
def forward(
    Q, K, V, OUT, q_at, k_at, v_at, out_at, LSE, KEPT, kept_width, FIRST, IS_TOKEN, TOKENS, BIAS, bias_at,
    sq, sk, heads_per_group, into_tanh, to_base_2, keep_factor,
    FIRST_SAMPLE, first_head, num_heads, key_low, key_high, threshold,
    query_start, query_middle, query_jump, key_start, key_middle, key_jump,
    HAS_FIRST: tl.constexpr, CHANNELS: tl.constexpr, PADDED: tl.constexpr, QUERIES: tl.constexpr, KEYS: tl.constexpr,
    IS_CAUSAL: tl.constexpr, HAS_SOFTCAP: tl.constexpr, HAS_DROPOUT: tl.constexpr, IS_ALIGNED: tl.constexpr, IS_EVEN: tl.constexpr,
    STORES_MASK: tl.constexpr, HAS_PADDING: tl.constexpr, HAS_BIAS: tl.constexpr,
):  # fmt: skip
    tile, head, sample = tl.num_programs(0) - 1 - tl.program_id(0), tl.program_id(1), tl.program_id(2)
    Q, OUT = _at(Q, q_at, sample, head), _at(OUT, out_at, sample, head)
    K, V = _at(K, k_at, sample, head // heads_per_group), _at(V, v_at, sample, head // heads_per_group)
    row = tile * QUERIES + tl.arange(0, QUERIES)
    first = 0
    if HAS_FIRST:
        FIRST += sample.to(tl.int64) * sq
        first = tl.load(FIRST + row, mask=row < sq, other=sk)[:, None]
    if HAS_DROPOUT:
        stream, key = stream_of(FIRST_SAMPLE, sample, head, first_head, num_heads), (key_low, key_high)
        query = position(row, (query_start, query_middle, query_jump))
        spans = (key_start, key_middle, key_jump)
        KEPT += (sample.to(tl.int64) * tl.num_programs(1) + head) * sq * kept_width
    q = _load(Q, tile * QUERIES, QUERIES, q_at[0], sq, CHANNELS, PADDED, False)
    out = tl.zeros([QUERIES, PADDED], dtype=tl.float32)
    maximum = tl.full([QUERIES], float("-inf"), tl.float32)
    total = tl.zeros([QUERIES], dtype=tl.float32)
    bounds = _key_bounds(
        FIRST, TOKENS, sample, tile, sq, sk, QUERIES, KEYS, IS_CAUSAL, HAS_FIRST, HAS_PADDING
    )
    starts, ends = _parts(bounds, tile * QUERIES, bias_at[2], QUERIES, KEYS, HAS_BIAS, False)
    for part in tl.static_range(
        0 if HAS_FIRST else 1 if IS_CAUSAL or HAS_PADDING or not IS_EVEN else 2,
        3 if not HAS_BIAS else 4 if IS_CAUSAL else 5,
    ):
        for start_key in tl.range(starts[part], ends[part], KEYS):
            key_row = start_key + tl.arange(0, KEYS)
            k = _load(K, start_key, KEYS, k_at[0], sk, CHANNELS, PADDED, part > 1, IS_TRANSPOSED=True)
            scores = tl.dot(q, k, input_precision="ieee")
            if HAS_SOFTCAP:
                scores = _tanh(scores, into_tanh)
            scores, factor, term = _biased(
                scores, BIAS, bias_at, head, tile * QUERIES, start_key, to_base_2, HAS_BIAS, part > 2
            )
            scores = _masked(
                scores, float("-inf"), row, key_row, first, sq, sk, IS_TOKEN, sample, part < 2, IS_CAUSAL, HAS_FIRST, HAS_PADDING
            )  # fmt: skip
            new_maximum = tl.maximum(maximum, tl.max(scores, 1) * factor + term)
            shift = new_maximum
            if part < 2:
                shift = tl.where(new_maximum == float("-inf"), 0, new_maximum)  # queries without a key so far
            probs = tl.exp2(scores * factor - (shift - term)[:, None])
            rescale = tl.exp2(maximum - shift)
            maximum, total = new_maximum, total * rescale + tl.sum(probs, 1)
            if HAS_DROPOUT:
                kept = keeps(query, start_key, spans, stream, key, threshold, KEYS, IS_ALIGNED)
                if STORES_MASK:
                    store_kept(KEPT, kept + probs * 0, row, sq, start_key, kept_width, KEYS)
                probs *= kept
            v = _load(V, start_key, KEYS, v_at[0], sk, CHANNELS, PADDED, part > 1)
            out = tl.dot(probs.to(v.dtype), v, out * rescale[:, None], input_precision="ieee")
    out *= (keep_factor / tl.where(total == 0, 1, total))[:, None]
    _store(OUT, out, tile * QUERIES, out_at[0], sq, CHANNELS)
    lse = (maximum + tl.log2(total)) * 0.6931471805599453
    tl.store(LSE + (sample.to(tl.int64) * tl.num_programs(1) + head) * sq + row, lse, mask=row < sq)


@jit
def tokens_of_samples(TOKENS, IS_TOKEN, sk, BLOCK: tl.constexpr):
    """Write the number of tokens before the first padding, and the end of the last token, of each sample."""
    sample = tl.program_id(0).to(tl.int64)
    full, end = sk, 0
    for start in tl.range(0, sk, BLOCK):
        key = start + tl.arange(0, BLOCK)
        is_token = _is_token(IS_TOKEN, sample, key, sk)
        full = tl.minimum(full, tl.min(tl.where(is_token | (key >= sk), sk, key), 0))
        end = tl.maximum(end, tl.max(tl.where(is_token, key + 1, 0), 0))
    tl.store(TOKENS + 2 * sample, full)
    tl.store(TOKENS + 2 * sample + 1, end)


@jit
def bias_of_distances(WIDE, WIDE_2, TABLE, BUCKETS, first, distances, heads, width, BLOCK: tl.constexpr):
    """Write the bias of a head and distance from TABLE [buckets, heads], and to base 2; columns outside have the nearest distance."""
    column, head = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK), tl.program_id(1)
    bucket = tl.load(BUCKETS + tl.minimum(tl.maximum(column - first, 0), distances - 1))
    bias = tl.load(TABLE + bucket * heads + head)
    tl.store(WIDE + head * width + column, bias, mask=column < width)
    tl.store(WIDE_2 + head * width + column, bias.to(tl.float32) * 1.4426950408889634, mask=column < width)


@jit
def _numbers_of_rows(dout, out, LSE, LSE_2, DOUT_DOT_OUT, rows, row, sq, keep_factor):
    """Store and return the log-sum-exps to base 2 and dout . out of a tile of queries of a head, whose numbers begin with `rows`."""
    dout_dot_out = tl.sum(dout.to(tl.float32) * out.to(tl.float32), 1) / keep_factor
    tl.store(DOUT_DOT_OUT + rows + row, dout_dot_out, mask=row < sq)
    lse = tl.load(LSE + rows + row, mask=row < sq, other=float("inf"))
    lse = tl.where(lse == float("-inf"), float("inf"), lse * 1.4426950408889634)
    tl.store(LSE_2 + rows + row, lse, mask=row < sq)
    return lse, dout_dot_out


@jit
def _load_numbers(LSE_2, DOUT_DOT_OUT, row, sq, IS_INSIDE: tl.constexpr):
    """Load them."""
    if IS_INSIDE:
        return tl.load(LSE_2 + row), tl.load(DOUT_DOT_OUT + row)
    lse = tl.load(LSE_2 + row, mask=row < sq, other=float("inf"))
    return lse, tl.load(DOUT_DOT_OUT + row, mask=row < sq, other=0)


@jit
def numbers_of_rows(
    DOUT, OUT, dout_at, out_at, LSE, LSE_2, DOUT_DOT_OUT, sq, keep_factor,
    CHANNELS: tl.constexpr, PADDED: tl.constexpr, QUERIES: tl.constexpr,
):  # fmt: skip
    start_row, head, sample = tl.program_id(0) * QUERIES, tl.program_id(1), tl.program_id(2)
    DOUT, OUT = _at(DOUT, dout_at, sample, head), _at(OUT, out_at, sample, head)
    dout = _load(DOUT, start_row, QUERIES, dout_at[0], sq, CHANNELS, PADDED, False)
    out = _load(OUT, start_row, QUERIES, out_at[0], sq, CHANNELS, PADDED, False)
    rows, row = (sample.to(tl.int64) * tl.num_programs(1) + head) * sq, start_row + tl.arange(0, QUERIES)
    _numbers_of_rows(dout, out, LSE, LSE_2, DOUT_DOT_OUT, rows, row, sq, keep_factor)


@jit
def _scores_at(DSCORES, scores_at, of_head, start_row, start_key, QUERIES: tl.constexpr, KEYS: tl.constexpr):
    """Return the pointers to a tile of gradients of scores, [keys, queries]."""
    row, key = tl.arange(0, QUERIES)[None, :], tl.arange(0, KEYS)[:, None]
    start = (of_head * scores_at[0] + start_key) * scores_at[1] + start_row
    return DSCORES + start + (key * scores_at[1] + row)


@_kernel
def dq_of_queries(
    Q, K, V, DOUT, OUT, DQ, q_at, k_at, v_at, dout_at, out_at, dq_at, LSE, LSE_2, DOUT_DOT_OUT, KEPT, kept_width, SUMS, FIRST, IS_TOKEN, TOKENS,
    scale, sq, sk, heads_per_group, into_tanh, to_base_2, keep_factor,
    HAS_FIRST: tl.constexpr, CHANNELS: tl.constexpr, PADDED: tl.constexpr, QUERIES: tl.constexpr, KEYS: tl.constexpr,
    IS_CAUSAL: tl.constexpr, HAS_SOFTCAP: tl.constexpr, HAS_DROPOUT: tl.constexpr, IS_EVEN: tl.constexpr,
    HAS_PADDING: tl.constexpr, HAS_SUMS: tl.constexpr,
):  # fmt: skip
    tile, head, sample = tl.num_programs(0) - 1 - tl.program_id(0), tl.program_id(1), tl.program_id(2)
    Q, DOUT = _at(Q, q_at, sample, head), _at(DOUT, dout_at, sample, head)
    OUT, DQ = _at(OUT, out_at, sample, head), _at(DQ, dq_at, sample, head)
    K, V = _at(K, k_at, sample, head // heads_per_group), _at(V, v_at, sample, head // heads_per_group)
    row = tile * QUERIES + tl.arange(0, QUERIES)
    first = 0
    if HAS_FIRST:
        FIRST += sample.to(tl.int64) * sq
        first = tl.load(FIRST + row, mask=row < sq, other=sk)[:, None]
    q = _load(Q, tile * QUERIES, QUERIES, q_at[0], sq, CHANNELS, PADDED, False)
    dout = _load(DOUT, tile * QUERIES, QUERIES, dout_at[0], sq, CHANNELS, PADDED, False)
    out = _load(OUT, tile * QUERIES, QUERIES, out_at[0], sq, CHANNELS, PADDED, False)
    of_head = (sample.to(tl.int64) * tl.num_programs(1) + head) * sq
    lse, dout_dot_out = _numbers_of_rows(dout, out, LSE, LSE_2, DOUT_DOT_OUT, of_head, row, sq, keep_factor)
    dq = tl.zeros([QUERIES, PADDED], dtype=tl.float32)
    bounds = _key_bounds(
        FIRST, TOKENS, sample, tile, sq, sk, QUERIES, KEYS, IS_CAUSAL, HAS_FIRST, HAS_PADDING
    )
    starts, ends = _parts(bounds, tile * QUERIES, 0, QUERIES, KEYS, False, False)
    for part in tl.static_range(0 if HAS_FIRST else 1 if IS_CAUSAL or HAS_PADDING or not IS_EVEN else 2, 3):
        for start_key in tl.range(starts[part], ends[part], KEYS):
            key_row = start_key + tl.arange(0, KEYS)
            k = _load(K, start_key, KEYS, k_at[0], sk, CHANNELS, PADDED, part > 1, IS_TRANSPOSED=True)
            v = _load(V, start_key, KEYS, v_at[0], sk, CHANNELS, PADDED, part > 1, IS_TRANSPOSED=True)
            scores = tl.dot(q, k, input_precision="ieee")
            if HAS_SOFTCAP:
                scores = _tanh(scores, into_tanh)
            probs = tl.exp2(scores * to_base_2 - lse[:, None])
            dprobs = tl.dot(dout, v, input_precision="ieee")
            if HAS_DROPOUT:
                bits = KEPT + of_head * kept_width
                dprobs *= load_kept(bits, row, sq, start_key, kept_width, KEYS, IS_EVEN)
            dscores = probs * (dprobs - dout_dot_out[:, None])
            if HAS_SOFTCAP:
                dscores *= 1 - scores * scores
            dscores = _masked(
                dscores, 0, row, key_row, first, sq, sk, IS_TOKEN, sample, part < 2, IS_CAUSAL, HAS_FIRST, HAS_PADDING
            )  # fmt: skip
            dq = tl.dot(dscores.to(k.dtype), tl.trans(k), dq, input_precision="ieee")
    place = (sample * tl.num_programs(0) + tile) * tl.num_programs(1) + head
    _store(DQ, dq * (scale * keep_factor), tile * QUERIES, dq_at[0], sq, CHANNELS, SUMS, place, HAS_SUMS)


@jit
def dq_of_scores(
    K, DQ, k_at, dq_at, DSCORES, scores_at, FAR, SUMS, IS_TOKEN, TOKENS, reach, factor, sq, sk, heads_per_group,
    CHANNELS: tl.constexpr, PADDED: tl.constexpr, QUERIES: tl.constexpr, KEYS: tl.constexpr,
    IS_CAUSAL: tl.constexpr, IS_EVEN: tl.constexpr, HAS_PADDING: tl.constexpr, HAS_SUMS: tl.constexpr,
):  # fmt: skip
    """Compute dq, and sum gradients of scores of tiles with one bias before and after the queries: -> FAR, fp32 [b, tiles, n, 2]."""
    tile, head, sample = tl.num_programs(0) - 1 - tl.program_id(0), tl.program_id(1), tl.program_id(2)
    K, DQ = _at(K, k_at, sample, head // heads_per_group), _at(DQ, dq_at, sample, head)
    start_row, of_head = tile * QUERIES, sample.to(tl.int64) * tl.num_programs(1) + head
    row = start_row + tl.arange(0, QUERIES)
    dq = tl.zeros([QUERIES, PADDED], dtype=tl.float32)
    place = (sample * tl.num_programs(0) + tile) * tl.num_programs(1) + head
    bounds = _key_bounds(TOKENS, TOKENS, sample, tile, sq, sk, QUERIES, KEYS, IS_CAUSAL, False, HAS_PADDING)
    starts, ends = _parts(bounds, start_row, reach, QUERIES, KEYS, True, False)
    before, after = 0.0, 0.0
    for part in tl.static_range(1, 4 if IS_CAUSAL else 5):
        far = tl.zeros([QUERIES, KEYS], dtype=tl.float32)
        for start_key in tl.range(starts[part], ends[part], KEYS):
            key_row = start_key + tl.arange(0, KEYS)
            k = _load(K, start_key, KEYS, k_at[0], sk, CHANNELS, PADDED, part > 1)
            stored = _scores_at(DSCORES, scores_at, of_head, start_row, start_key, QUERIES, KEYS)
            dscores = tl.load(stored) if IS_EVEN else tl.load(stored, mask=row[None, :] < sq, other=0)
            dscores = _masked(
                tl.trans(dscores), 0, row, key_row, 0, sq, sk, IS_TOKEN, sample, part < 2, IS_CAUSAL, False, HAS_PADDING
            )  # fmt: skip
            if part > 2:
                far += dscores.to(tl.float32)
            elif part < 2:
                is_far = _is_far(start_row, start_key, reach, QUERIES, KEYS)
                sums = tl.where(is_far, tl.sum(tl.sum(dscores.to(tl.float32), 1), 0), 0)
                before += tl.where(start_key < start_row, sums, 0)
                after += tl.where(start_key < start_row, 0, sums)
            dq = tl.dot(dscores, k, dq, input_precision="ieee")
        if part == 3:
            before += tl.sum(tl.sum(far, 1), 0)
        elif part == 4:
            after += tl.sum(tl.sum(far, 1), 0)
    _store(DQ, dq * factor, start_row, dq_at[0], sq, CHANNELS, SUMS, place, HAS_SUMS)
    tl.store(FAR + 2 * place, before)
    tl.store(FAR + 2 * place + 1, after)


@jit
def gradients_near(
    DSCORES, scores_at, SUMS, BUCKETS, eighths, reach, samples, sq, sk, IS_TOKEN,
    QUERIES: tl.constexpr, KEYS: tl.constexpr, ROWS: tl.constexpr, DISTANCES: tl.constexpr, NUM: tl.constexpr, HAS_PADDING: tl.constexpr,
):  # fmt: skip
    """Sum gradients of scores by bucket, of tiles that are not far: -> SUMS, fp32 [parts, places, n, NUM].

    A program reads every eighth key, of each the queries from `8 * eighths` + DISTANCES * place rows after a multiple of 8 on: loads
    are aligned, and a column of its sums is of one distance.
    """
    place, head, part = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    residue, tiles = part % 8, tl.cdiv(sk, 8 * ROWS)
    after = 8 * eighths + place * DISTANCES + tl.arange(0, DISTANCES)
    total = tl.zeros([ROWS, DISTANCES], dtype=tl.float32)
    for number in tl.range(part // 8, samples * tiles, tl.num_programs(2) // 8):
        sample, aligned = number // tiles, (number % tiles * ROWS + tl.arange(0, ROWS)[:, None]) * 8
        key, row, start_key = aligned + residue, aligned + after[None, :], aligned // KEYS * KEYS
        near = tl.maximum(start_key + 1 - reach, 0) // QUERIES * QUERIES
        far = tl.minimum(tl.cdiv(start_key + KEYS - 1 + reach, QUERIES) * QUERIES, scores_at[1])
        of_head = tl.cast(sample, tl.int64) * tl.num_programs(1) + head
        start = number % tiles * ROWS * 8
        stored = (
            DSCORES + (of_head * scores_at[0] + start) * scores_at[1] + ((key - start) * scores_at[1] + row)
        )
        dscores = tl.load(stored, mask=(key < sk) & (row >= near) & (row < far), other=0).to(tl.float32)
        is_pair = (row < sq) & (key < sk)
        if HAS_PADDING:  # whose tiles may not have been stored
            is_pair = is_pair & _is_token(IS_TOKEN, sample, key, sk)
        total += tl.where(is_pair, dscores, 0)
    distance = residue - after
    bucket = tl.load(BUCKETS + distance + sq - 1, mask=(distance > -sq) & (distance < sk), other=NUM)
    is_own = bucket[:, None] == tl.arange(0, NUM)[None, :]
    sums = tl.sum(tl.where(is_own, tl.sum(total, 0)[:, None], 0), 0)
    SUMS += ((part * tl.num_programs(0) + place) * tl.num_programs(1) + head) * NUM
    tl.store(SUMS + tl.arange(0, NUM), sums)


@jit
def gradients_of_buckets(
    SUMS, FAR, BUCKETS, DTABLE, num_buckets, num_sums, far_tiles, distances, keep_factor, NUM: tl.constexpr, BLOCK: tl.constexpr
):  # fmt: skip
    """Sum the gradients of a head by bucket: -> DTABLE, fp32 [buckets, n]."""
    head, heads, bucket = tl.program_id(0), tl.num_programs(0), tl.arange(0, NUM)
    sums = tl.zeros([BLOCK, NUM], dtype=tl.float32)
    for start in tl.range(0, num_sums, BLOCK):
        number = start + tl.arange(0, BLOCK)[:, None]
        sums += tl.load(
            SUMS + (number * heads + head) * NUM + bucket[None, :], mask=number < num_sums, other=0
        )
    before, after = tl.zeros([BLOCK], dtype=tl.float32), tl.zeros([BLOCK], dtype=tl.float32)
    for start in tl.range(0, far_tiles, BLOCK):
        tile = start + tl.arange(0, BLOCK)
        far = FAR + (tile * heads + head) * 2
        before += tl.load(far, mask=tile < far_tiles, other=0)
        after += tl.load(far + 1, mask=tile < far_tiles, other=0)
    total = tl.sum(sums, 0)
    total += tl.where(bucket == tl.load(BUCKETS), tl.sum(before, 0), 0)
    total += tl.where(bucket == tl.load(BUCKETS + distances - 1), tl.sum(after, 0), 0)
    tl.store(DTABLE + bucket * heads + head, total * keep_factor, mask=bucket < num_buckets)


@_kernel
def dkdv_of_keys(
    Q, K, V, DOUT, DK, DV, q_at, k_at, v_at, dout_at, dk_at, dv_at, DSCORES, scores_at, LSE_2, DOUT_DOT_OUT, KEPT, kept_width, SUMS, END, IS_TOKEN, TOKENS, BIAS, bias_at,
    scale, sq, sk, heads_per_group, into_tanh, to_base_2, keep_factor,
    HAS_END: tl.constexpr, CHANNELS: tl.constexpr, PADDED: tl.constexpr, QUERIES: tl.constexpr, KEYS: tl.constexpr,
    IS_CAUSAL: tl.constexpr, HAS_SOFTCAP: tl.constexpr, HAS_DROPOUT: tl.constexpr, IS_EVEN: tl.constexpr,
    HAS_PADDING: tl.constexpr, HAS_BIAS: tl.constexpr, HAS_SUMS: tl.constexpr,
):  # fmt: skip
    start_key, group, sample = tl.program_id(0) * KEYS, tl.program_id(1), tl.program_id(2)
    K, V = _at(K, k_at, sample, group), _at(V, v_at, sample, group)
    DK, DV = _at(DK, dk_at, sample, group), _at(DV, dv_at, sample, group)
    key_row = start_key + tl.arange(0, KEYS)
    ends = sq
    if HAS_END:
        END += sample.to(tl.int64) * sk
        ends = tl.load(END + key_row, mask=key_row < sk, other=0)[:, None]
    k = _load(K, start_key, KEYS, k_at[0], sk, CHANNELS, PADDED, False)
    v = _load(V, start_key, KEYS, v_at[0], sk, CHANNELS, PADDED, False)
    dk = tl.zeros([KEYS, PADDED], dtype=tl.float32)
    dv = tl.zeros([KEYS, PADDED], dtype=tl.float32)
    queries = sq
    if HAS_PADDING:  # no query attends to a tile of padding
        queries = tl.where(start_key < tl.load(TOKENS + 2 * sample + 1), sq, 0)
    bounds = _query_bounds(END, start_key, queries, sk, QUERIES, KEYS, IS_CAUSAL, HAS_END)
    starts, last_rows = _parts(bounds, start_key, bias_at[2], KEYS, QUERIES, HAS_BIAS, True)
    for head in tl.range(group * heads_per_group, (group + 1) * heads_per_group):
        Q_HEAD, DOUT_HEAD = _at(Q, q_at, sample, head), _at(DOUT, dout_at, sample, head)
        number = sample.to(tl.int64) * tl.num_programs(1) * heads_per_group + head
        of_head = number * sq
        for part in tl.static_range(
            0 if HAS_END or not IS_EVEN else 1 if IS_CAUSAL else 2,
            3 if not HAS_BIAS else 4 if IS_CAUSAL else 5,
        ):
            for start_row in tl.range(starts[part], last_rows[part], QUERIES):
                row = start_row + tl.arange(0, QUERIES)
                q = _load(
                    Q_HEAD, start_row, QUERIES, q_at[0], sq, CHANNELS, PADDED, part > 1, IS_TRANSPOSED=True
                )
                dout = _load(DOUT_HEAD, start_row, QUERIES, dout_at[0], sq, CHANNELS, PADDED, part > 1)
                lse, dout_dot_out = _load_numbers(LSE_2 + of_head, DOUT_DOT_OUT + of_head, row, sq, part > 1)
                scores = tl.dot(k, q, input_precision="ieee")  # of keys by queries
                if HAS_SOFTCAP:
                    scores = _tanh(scores, into_tanh)
                scores, factor, term = _biased(
                    scores, BIAS, bias_at, head, start_row, start_key, to_base_2, HAS_BIAS, part > 2, IS_BY_KEY=True
                )  # fmt: skip
                probs = tl.exp2(scores * factor - (lse - term)[None, :])
                probs = _masked_by_key(probs, row, key_row, ends, sk - sq, part < 2, IS_CAUSAL)
                kept = 1.0
                if HAS_DROPOUT:
                    bits = KEPT + of_head * kept_width
                    kept = load_kept_by_key(bits, row, sq, start_key, kept_width, KEYS, part > 1)
                dropped = probs * kept
                dv = tl.dot(dropped.to(dout.dtype), dout, dv, input_precision="ieee")
                dprobs = tl.dot(v, tl.trans(dout), input_precision="ieee")
                dscores = probs * (dprobs * kept - dout_dot_out[None, :])
                if HAS_SOFTCAP:
                    dscores *= 1 - scores * scores
                dscores = dscores.to(q.dtype)
                if HAS_BIAS:
                    stored = _scores_at(DSCORES, scores_at, number, start_row, start_key, QUERIES, KEYS)
                    tl.store(stored, dscores)
                dk = tl.dot(dscores, tl.trans(q), dk, input_precision="ieee")
    if HAS_PADDING:  # each row of dk and dv is that of one key
        keys_are_tokens = _is_token(IS_TOKEN, sample, key_row, sk)[:, None]
        dk, dv = tl.where(keys_are_tokens, dk, 0), tl.where(keys_are_tokens, dv, 0)
    groups = tl.num_programs(1)
    place = (sample * tl.num_programs(0) + tl.program_id(0)) * 2 * groups + group
    _store(DK, dk * (scale * keep_factor), start_key, dk_at[0], sk, CHANNELS, SUMS, place, HAS_SUMS)
    _store(DV, dv * keep_factor, start_key, dv_at[0], sk, CHANNELS, SUMS, place + groups, HAS_SUMS)


@jit
def _query_bounds(
    END, start_key, sq, sk, QUERIES: tl.constexpr, KEYS: tl.constexpr, IS_CAUSAL: tl.constexpr, HAS_END: tl.constexpr
):  # fmt: skip
    """Return four bounds of queries, as `_key_bounds` does of keys."""
    start, full_start, full_end, end = 0, 0, sq, sq
    if HAS_END:
        full_end = tl.load(END + start_key)
        end = tl.load(END + tl.minimum(start_key + KEYS, sk) - 1)
    if IS_CAUSAL:
        start = tl.maximum(start_key + (sq - sk), 0) // QUERIES * QUERIES
        full_start = tl.maximum(start_key + KEYS - 1 + (sq - sk), 0)
        full_start = tl.minimum(tl.cdiv(full_start, QUERIES) * QUERIES, tl.maximum(end, start))
    return start, full_start, tl.maximum(full_end // QUERIES * QUERIES, full_start), end
