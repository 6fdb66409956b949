"""The kernels of `fused/attention.py`.

Programs of `forward` and `dq_of_queries` have the axes (tile of queries, head, sample), programs of `dkdv_of_keys` (tile of keys,
group, sample). Each runs its loop up to three times: over the tiles at the beginning, where masks apply to some scores, over those
without a mask, and over the tiles at the end. Pointers and strides belong to [s, b, n, d]; the last stride is 1.

    sq, sk                  queries and keys; the last query has the position of the last key if IS_CAUSAL
    scale, to_base_2        factors of scores: in gradients, and in powers of two
    into_tanh               factor of q k before the tanh of softcaps
    head_low .. threshold   the dropout stream, see `fused/attention_dropout.py`
    query_start .. key_jump the positions of queries and keys, see `position`
"""

from __future__ import annotations

import functools

from megatrain.kernels.fused.attention_dropout import keeps, keeps_by_key, position
from megatrain.kernels.fused.launching import jit, tl

_STREAM = ("head_low", "head_high", "num_heads", "key_low", "key_high", "threshold")
_POSITIONS = ("query_start", "query_middle", "query_jump", "key_start", "key_middle", "key_jump")
_kernel = functools.partial(jit, any_value=(*_STREAM, *_POSITIONS))


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
def _store(X, x, start, stride, rows, CHANNELS: tl.constexpr):
    """Store the tile of the rows from `start` on."""
    row, channel = tl.arange(0, x.shape[0])[:, None], tl.arange(0, x.shape[1])[None, :]
    pointer = X + tl.cast(start, tl.int64) * stride + (row * stride + channel)
    tl.store(pointer, x.to(X.dtype.element_ty), mask=(start + row < rows) & (channel < CHANNELS))


@jit
def _at(X, stride, head):
    """Return the pointer to a head of this program's sample."""
    return X + tl.program_id(2).to(tl.int64) * stride[1] + tl.cast(head, tl.int64) * stride[2]


@jit
def _stream(head, head_low, head_high, num_heads):
    """Return the halves of the index of a head in the run; given: the first one's, or a pointer to the first sample and a head."""
    if head_low.dtype.is_ptr():
        index = tl.load(head_low) * num_heads + head_high
    else:
        index = (tl.cast(head_high, tl.int64) << 32) | (tl.cast(head_low, tl.int64) & 0xFFFFFFFF)
    index += tl.program_id(2).to(tl.int64) * num_heads + head
    return index.to(tl.uint32), (index >> 32).to(tl.uint32)


@jit
def _key_bounds(
    FIRST,
    tile,
    sq,
    sk,
    QUERIES: tl.constexpr,
    KEYS: tl.constexpr,
    IS_CAUSAL: tl.constexpr,
    HAS_FIRST: tl.constexpr,
):
    """Return four bounds of keys: the first, those between which all queries of a tile attend to all keys, and the last."""
    start, full_start, full_end, end = 0, 0, sk, sk
    if IS_CAUSAL:
        full_end = tl.minimum(sk, tl.maximum(tile * QUERIES + 1 + sk - sq, 0))
        end = tl.minimum(sk, tl.maximum((tile + 1) * QUERIES + sk - sq, 0))
    if HAS_FIRST:
        start = tl.maximum(tl.load(FIRST + tile * QUERIES), 0) // KEYS * KEYS
        full_start = tl.load(FIRST + tl.minimum((tile + 1) * QUERIES, sq) - 1)
        full_start = tl.minimum(tl.maximum(tl.cdiv(full_start, KEYS), 0) * KEYS, end)
    return start, full_start, tl.maximum(full_end // KEYS * KEYS, full_start), end


@jit
def _allowed(row, key, first, sq, sk, IS_CAUSAL: tl.constexpr, HAS_FIRST: tl.constexpr):
    """Return whether queries attend to keys."""
    allowed = key < sk
    if IS_CAUSAL:
        allowed = allowed & (key <= row + (sk - sq))
    if HAS_FIRST:
        allowed = allowed & (key >= first)
    return allowed


@jit
def _tanh(x, into_tanh):
    return 1 - 2 / (1 + tl.exp2(x * into_tanh))


@_kernel
def forward(
    Q, K, V, OUT, q_at, k_at, v_at, out_at, LSE, FIRST, sq, sk, heads_per_group, into_tanh, to_base_2,
    head_low, head_high, num_heads, key_low, key_high, keep_factor, threshold,
    query_start, query_middle, query_jump, key_start, key_middle, key_jump,
    HAS_FIRST: tl.constexpr, CHANNELS: tl.constexpr, PADDED: tl.constexpr, QUERIES: tl.constexpr, KEYS: tl.constexpr,
    IS_CAUSAL: tl.constexpr, HAS_SOFTCAP: tl.constexpr, HAS_DROPOUT: tl.constexpr, IS_ALIGNED: tl.constexpr, IS_EVEN: tl.constexpr,
):  # fmt: skip
    tile, head = tl.num_programs(0) - 1 - tl.program_id(0), tl.program_id(1)  # the longest rows first
    Q, OUT = _at(Q, q_at, head), _at(OUT, out_at, head)
    K, V = _at(K, k_at, head // heads_per_group), _at(V, v_at, head // heads_per_group)
    row = tile * QUERIES + tl.arange(0, QUERIES)
    first = 0
    if HAS_FIRST:
        FIRST += tl.program_id(2).to(tl.int64) * sq
        first = tl.load(FIRST + row, mask=row < sq, other=sk)[:, None]
    stream, key = _stream(head, head_low, head_high, num_heads), (key_low, key_high)
    query, spans = position(row, (query_start, query_middle, query_jump)), (key_start, key_middle, key_jump)
    q = _load(Q, tile * QUERIES, QUERIES, q_at[0], sq, CHANNELS, PADDED, False)
    out = tl.zeros([QUERIES, PADDED], dtype=tl.float32)
    maximum = tl.full([QUERIES], float("-inf"), tl.float32)
    total = tl.zeros([QUERIES], dtype=tl.float32)
    bounds = _key_bounds(FIRST, tile, sq, sk, QUERIES, KEYS, IS_CAUSAL, HAS_FIRST)
    for part in tl.static_range(0 if HAS_FIRST else 1, 3 if IS_CAUSAL or not IS_EVEN else 2):
        for start_key in tl.range(bounds[part], bounds[part + 1], KEYS):
            key_row = start_key + tl.arange(0, KEYS)
            k = _load(K, start_key, KEYS, k_at[0], sk, CHANNELS, PADDED, part == 1, IS_TRANSPOSED=True)
            scores = tl.dot(q, k, input_precision="ieee")
            if HAS_SOFTCAP:
                scores = _tanh(scores, into_tanh)
            if part != 1:
                allowed = _allowed(row[:, None], key_row[None, :], first, sq, sk, IS_CAUSAL, HAS_FIRST)
                scores = tl.where(allowed, scores, float("-inf"))
            new_maximum = tl.maximum(maximum, tl.max(scores, 1) * to_base_2)
            shift = new_maximum
            if part != 1:
                shift = tl.where(new_maximum == float("-inf"), 0, new_maximum)  # queries without a key so far
            probs = tl.exp2(scores * to_base_2 - shift[:, None])
            rescale = tl.exp2(maximum - shift)
            maximum, total = new_maximum, total * rescale + tl.sum(probs, 1)
            if HAS_DROPOUT:
                kept = keeps(query, start_key, spans, stream, key, threshold, KEYS, IS_ALIGNED)
                probs = tl.where(kept, probs, 0)
            v = _load(V, start_key, KEYS, v_at[0], sk, CHANNELS, PADDED, part == 1)
            out = tl.dot(probs.to(v.dtype), v, out * rescale[:, None], input_precision="ieee")
    out *= (keep_factor / tl.where(total == 0, 1, total))[:, None]
    _store(OUT, out, tile * QUERIES, out_at[0], sq, CHANNELS)
    lse = (maximum + tl.log2(total)) * 0.6931471805599453
    tl.store(LSE + (tl.program_id(2).to(tl.int64) * tl.num_programs(1) + head) * sq + row, lse, mask=row < sq)


@_kernel
def dq_of_queries(
    Q, K, V, DOUT, OUT, DQ, q_at, k_at, v_at, dout_at, out_at, dq_at, LSE, DOUT_DOT_OUT, FIRST,
    scale, sq, sk, heads_per_group, into_tanh, to_base_2,
    head_low, head_high, num_heads, key_low, key_high, keep_factor, threshold,
    query_start, query_middle, query_jump, key_start, key_middle, key_jump,
    HAS_FIRST: tl.constexpr, CHANNELS: tl.constexpr, PADDED: tl.constexpr, QUERIES: tl.constexpr, KEYS: tl.constexpr,
    IS_CAUSAL: tl.constexpr, HAS_SOFTCAP: tl.constexpr, HAS_DROPOUT: tl.constexpr, IS_ALIGNED: tl.constexpr, IS_EVEN: tl.constexpr,
):  # fmt: skip
    tile, head = tl.num_programs(0) - 1 - tl.program_id(0), tl.program_id(1)
    Q, DOUT = _at(Q, q_at, head), _at(DOUT, dout_at, head)
    OUT, DQ = _at(OUT, out_at, head), _at(DQ, dq_at, head)
    K, V = _at(K, k_at, head // heads_per_group), _at(V, v_at, head // heads_per_group)
    row = tile * QUERIES + tl.arange(0, QUERIES)
    first = 0
    if HAS_FIRST:
        FIRST += tl.program_id(2).to(tl.int64) * sq
        first = tl.load(FIRST + row, mask=row < sq, other=sk)[:, None]
    stream, key = _stream(head, head_low, head_high, num_heads), (key_low, key_high)
    query, spans = position(row, (query_start, query_middle, query_jump)), (key_start, key_middle, key_jump)
    q = _load(Q, tile * QUERIES, QUERIES, q_at[0], sq, CHANNELS, PADDED, False)
    dout = _load(DOUT, tile * QUERIES, QUERIES, dout_at[0], sq, CHANNELS, PADDED, False)
    out = _load(OUT, tile * QUERIES, QUERIES, out_at[0], sq, CHANNELS, PADDED, False)
    dout_dot_out = tl.sum(dout.to(tl.float32) * out.to(tl.float32), 1)
    of_head = (tl.program_id(2).to(tl.int64) * tl.num_programs(1) + head) * sq + row
    tl.store(DOUT_DOT_OUT + of_head, dout_dot_out, mask=row < sq)
    lse = _base_2(LSE + of_head, row < sq)
    dq = tl.zeros([QUERIES, PADDED], dtype=tl.float32)
    bounds = _key_bounds(FIRST, tile, sq, sk, QUERIES, KEYS, IS_CAUSAL, HAS_FIRST)
    for part in tl.static_range(0 if HAS_FIRST else 1, 3 if IS_CAUSAL or not IS_EVEN else 2):
        for start_key in tl.range(bounds[part], bounds[part + 1], KEYS):
            key_row = start_key + tl.arange(0, KEYS)
            k = _load(K, start_key, KEYS, k_at[0], sk, CHANNELS, PADDED, part == 1, IS_TRANSPOSED=True)
            v = _load(V, start_key, KEYS, v_at[0], sk, CHANNELS, PADDED, part == 1, IS_TRANSPOSED=True)
            scores = tl.dot(q, k, input_precision="ieee")
            if HAS_SOFTCAP:
                scores = _tanh(scores, into_tanh)
            probs = tl.exp2(scores * to_base_2 - lse[:, None])
            if part != 1:
                allowed = _allowed(row[:, None], key_row[None, :], first, sq, sk, IS_CAUSAL, HAS_FIRST)
                probs = tl.where(allowed, probs, 0)
            dprobs = tl.dot(dout, v, input_precision="ieee")
            if HAS_DROPOUT:
                kept = keeps(query, start_key, spans, stream, key, threshold, KEYS, IS_ALIGNED)
                dprobs = tl.where(kept, dprobs * keep_factor, 0)
            dscores = probs * (dprobs - dout_dot_out[:, None])
            if HAS_SOFTCAP:
                dscores *= 1 - scores * scores
            dq = tl.dot(dscores.to(k.dtype), tl.trans(k), dq, input_precision="ieee")
    _store(DQ, dq * scale, tile * QUERIES, dq_at[0], sq, CHANNELS)


@_kernel
def dkdv_of_keys(
    Q, K, V, DOUT, DK, DV, q_at, k_at, v_at, dout_at, dk_at, dv_at, LSE, DOUT_DOT_OUT, END,
    scale, sq, sk, heads_per_group, into_tanh, to_base_2,
    head_low, head_high, num_heads, key_low, key_high, keep_factor, threshold,
    query_start, query_middle, query_jump, key_start, key_middle, key_jump,
    HAS_END: tl.constexpr, CHANNELS: tl.constexpr, PADDED: tl.constexpr, QUERIES: tl.constexpr, KEYS: tl.constexpr,
    IS_CAUSAL: tl.constexpr, HAS_SOFTCAP: tl.constexpr, HAS_DROPOUT: tl.constexpr, IS_ALIGNED: tl.constexpr, IS_EVEN: tl.constexpr,
):  # fmt: skip
    start_key, group = tl.program_id(0) * KEYS, tl.program_id(1)
    K, V = _at(K, k_at, group), _at(V, v_at, group)
    DK, DV = _at(DK, dk_at, group), _at(DV, dv_at, group)
    key_row = start_key + tl.arange(0, KEYS)
    ends = sq
    if HAS_END:
        END += tl.program_id(2).to(tl.int64) * sk
        ends = tl.load(END + key_row, mask=key_row < sk, other=0)[:, None]
    k = _load(K, start_key, KEYS, k_at[0], sk, CHANNELS, PADDED, False)
    v = _load(V, start_key, KEYS, v_at[0], sk, CHANNELS, PADDED, False)
    dk = tl.zeros([KEYS, PADDED], dtype=tl.float32)
    dv = tl.zeros([KEYS, PADDED], dtype=tl.float32)
    key, spans = (key_low, key_high), (key_start, key_middle, key_jump)
    bounds = _query_bounds(END, start_key, sq, sk, QUERIES, KEYS, IS_CAUSAL, HAS_END)
    for head in tl.range(group * heads_per_group, (group + 1) * heads_per_group):
        stream = _stream(head, head_low, head_high, num_heads)
        Q_HEAD, DOUT_HEAD = _at(Q, q_at, head), _at(DOUT, dout_at, head)
        of_head = (tl.program_id(2).to(tl.int64) * tl.num_programs(1) * heads_per_group + head) * sq
        for part in tl.static_range(0 if IS_CAUSAL else 1, 3 if HAS_END or not IS_EVEN else 2):
            for start_row in tl.range(bounds[part], bounds[part + 1], QUERIES):
                row = start_row + tl.arange(0, QUERIES)
                q = _load(
                    Q_HEAD, start_row, QUERIES, q_at[0], sq, CHANNELS, PADDED, part == 1, IS_TRANSPOSED=True
                )
                dout = _load(DOUT_HEAD, start_row, QUERIES, dout_at[0], sq, CHANNELS, PADDED, part == 1)
                lse = _base_2(LSE + of_head + row, row < sq)
                dout_dot_out = tl.load(DOUT_DOT_OUT + of_head + row, mask=row < sq, other=0)
                scores = tl.dot(k, q, input_precision="ieee")  # of keys by queries
                if HAS_SOFTCAP:
                    scores = _tanh(scores, into_tanh)
                probs = tl.exp2(scores * to_base_2 - lse[None, :])
                if part != 1:
                    allowed = row[None, :] < ends
                    if IS_CAUSAL:
                        allowed = allowed & (key_row[:, None] <= row[None, :] + (sk - sq))
                    probs = tl.where(allowed, probs, 0)
                dropped = probs
                if HAS_DROPOUT:  # until the products, the sign of a probability says whether it is dropped
                    query = position(row, (query_start, query_middle, query_jump))
                    kept = keeps_by_key(query, start_key, spans, stream, key, threshold, KEYS, IS_ALIGNED)
                    probs = tl.where(kept, probs, -probs)
                    dropped = tl.maximum(probs, 0)
                dv = tl.dot(dropped.to(dout.dtype), dout, dv, input_precision="ieee")
                dprobs = tl.dot(v, tl.trans(dout), input_precision="ieee")
                if HAS_DROPOUT:
                    dprobs = tl.where(probs > 0, dprobs * keep_factor, 0)
                    probs = tl.abs(probs)
                dscores = probs * (dprobs - dout_dot_out[None, :])
                if HAS_SOFTCAP:
                    dscores *= 1 - scores * scores
                dk = tl.dot(dscores.to(q.dtype), tl.trans(q), dk, input_precision="ieee")
    _store(DK, dk * scale, start_key, dk_at[0], sk, CHANNELS)
    _store(DV, dv * keep_factor, start_key, dv_at[0], sk, CHANNELS)


@jit
def _base_2(LSE, inside):
    """Load log-sum-exps to base 2; infinity, which makes probabilities 0, for queries without keys."""
    lse = tl.load(LSE, mask=inside, other=float("inf"))
    return tl.where(lse == float("-inf"), float("inf"), lse * 1.4426950408889634)


@jit
def _query_bounds(
    END,
    start_key,
    sq,
    sk,
    QUERIES: tl.constexpr,
    KEYS: tl.constexpr,
    IS_CAUSAL: tl.constexpr,
    HAS_END: tl.constexpr,
):
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
