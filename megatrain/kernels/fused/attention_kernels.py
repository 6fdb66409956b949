"""The kernels of `fused/attention.py`.

Programs of `forward` and `dq_of_queries` have the axes (tile of queries, head, sample), programs of `dkdv_of_keys` (tile of keys,
group, sample). Each runs its loop up to five times: over the tiles at the beginning and at the end, where masks apply to some scores, and over
those without a mask, with different biases or with one (`_parts`). Pointers and strides belong to [s, b, n, d]; the last stride is 1.

    sq, sk                  queries and keys; the last query has the position of the last key if IS_CAUSAL
    scale, to_base_2        factors of scores: in gradients, and in powers of two
    into_tanh               factor of q k before the tanh of softcaps
    IS_TOKEN                of each key of each sample, False for padding, if HAS_PADDING
    BIAS, bias_at           of each head and distance, key - query, if HAS_BIAS: elements of a head and before distance 0; reach
    FIRST_SAMPLE .. threshold   the dropout stream, see `fused/attention_dropout.py`
    query_start .. key_jump the positions of queries and keys, see `position`
"""

from __future__ import annotations

import functools

from megatrain.kernels.fused.attention_dropout import (
    POSITIONS,
    STREAM,
    keeps,
    load_kept_by_key,
    position,
    stream_of,
)
from megatrain.kernels.fused.launching import jit, tl

kernel = functools.partial(jit, any_value=(*STREAM, *POSITIONS))


@jit
def load_tile(
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
def at(X, stride, sample, head):
    """Return the pointer to a head of a sample."""
    return X + tl.cast(sample, tl.int64) * stride[1] + tl.cast(head, tl.int64) * stride[2]


@jit
def is_token(IS_TOKEN, sample, key, sk):
    """Return whether keys are no padding."""
    return tl.load(IS_TOKEN + tl.cast(sample, tl.int64) * sk + key, mask=key < sk, other=0) != 0


@jit
def is_far(start_row, start_key, reach, QUERIES: tl.constexpr, KEYS: tl.constexpr):
    """Return whether a tile has one bias."""
    return (start_key - start_row - QUERIES + 1 >= reach) | (start_row - start_key - KEYS + 1 >= reach)


@jit
def biased(scores, BIAS, bias_at, head, start_row, start_key, distance, to_base_2, IS_FAR: tl.constexpr):
    """Return scores to base 2 with the bias of their distances."""
    BIAS += head * bias_at[0] + bias_at[1]
    bias = tl.load(BIAS + start_key - start_row) if IS_FAR else tl.load(BIAS + distance)
    return scores * to_base_2 + bias.to(tl.float32) * 1.4426950408889634


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


@kernel
def forward(
    Q, K, V, OUT, q_at, k_at, v_at, out_at, LSE, FIRST, IS_TOKEN, BIAS, bias_at,
    sq, sk, heads_per_group, into_tanh, to_base_2, keep_factor,
    FIRST_SAMPLE, first_head, num_heads, key_low, key_high, threshold,
    query_start, query_middle, query_jump, key_start, key_middle, key_jump,
    HAS_FIRST: tl.constexpr, CHANNELS: tl.constexpr, PADDED: tl.constexpr, QUERIES: tl.constexpr, KEYS: tl.constexpr,
    IS_CAUSAL: tl.constexpr, HAS_SOFTCAP: tl.constexpr, HAS_DROPOUT: tl.constexpr, IS_ALIGNED: tl.constexpr, IS_EVEN: tl.constexpr,
    HAS_PADDING: tl.constexpr, HAS_BIAS: tl.constexpr,
):  # fmt: skip
    tile, head, sample = (
        tl.num_programs(0) - 1 - tl.program_id(0),
        tl.program_id(1),
        tl.program_id(2),
    )  # the longest rows first
    Q, OUT = at(Q, q_at, sample, head), at(OUT, out_at, sample, head)
    K, V = at(K, k_at, sample, head // heads_per_group), at(V, v_at, sample, head // heads_per_group)
    row = tile * QUERIES + tl.arange(0, QUERIES)
    first = 0
    if HAS_FIRST:
        FIRST += sample.to(tl.int64) * sq
        first = tl.load(FIRST + row, mask=row < sq, other=sk)[:, None]
    if HAS_DROPOUT:
        stream, key = stream_of(FIRST_SAMPLE, sample, head, first_head, num_heads), (key_low, key_high)
        query, spans = (
            position(row, (query_start, query_middle, query_jump)),
            (key_start, key_middle, key_jump),
        )
    q = load_tile(Q, tile * QUERIES, QUERIES, q_at[0], sq, CHANNELS, PADDED, False)
    out = tl.zeros([QUERIES, PADDED], dtype=tl.float32)
    maximum = tl.full([QUERIES], float("-inf"), tl.float32)
    total = tl.zeros([QUERIES], dtype=tl.float32)
    bounds = _key_bounds(FIRST, tile, sq, sk, QUERIES, KEYS, IS_CAUSAL, HAS_FIRST)
    starts, ends = _parts(bounds, tile * QUERIES, bias_at[2], QUERIES, KEYS, HAS_BIAS, False)
    for part in tl.static_range(
        0 if HAS_FIRST else 1 if IS_CAUSAL or not IS_EVEN else 2, 3 if not HAS_BIAS else 4 if IS_CAUSAL else 5
    ):
        for start_key in tl.range(starts[part], ends[part], KEYS):
            key_row = start_key + tl.arange(0, KEYS)
            k = load_tile(
                K,
                start_key,
                KEYS,
                k_at[0],
                sk,
                CHANNELS,
                PADDED,
                part > 1,
                IS_TRANSPOSED=True,
            )
            scores = tl.dot(q, k, input_precision="ieee")
            factor = to_base_2
            if HAS_SOFTCAP:
                scores = _tanh(scores, into_tanh)
            if HAS_BIAS:
                distance, factor = key_row[None, :] - row[:, None], 1.0
                scores = biased(
                    scores, BIAS, bias_at, head, tile * QUERIES, start_key, distance, to_base_2, part > 2
                )
            if part < 2:
                allowed = _allowed(row[:, None], key_row[None, :], first, sq, sk, IS_CAUSAL, HAS_FIRST)
                scores = tl.where(allowed, scores, float("-inf"))
            if HAS_PADDING:
                scores = tl.where(is_token(IS_TOKEN, sample, key_row, sk)[None, :], scores, float("-inf"))
            new_maximum = tl.maximum(maximum, tl.max(scores, 1) * factor)
            shift = new_maximum
            if part < 2 or HAS_PADDING:
                shift = tl.where(new_maximum == float("-inf"), 0, new_maximum)  # queries without a key so far
            probs = tl.exp2(scores * factor - shift[:, None])
            rescale = tl.exp2(maximum - shift)
            maximum, total = new_maximum, total * rescale + tl.sum(probs, 1)
            if HAS_DROPOUT:
                kept = keeps(query, start_key, spans, stream, key, threshold, KEYS, IS_ALIGNED)
                probs = tl.where(kept, probs, 0)
            v = load_tile(V, start_key, KEYS, v_at[0], sk, CHANNELS, PADDED, part > 1)
            out = tl.dot(probs.to(v.dtype), v, out * rescale[:, None], input_precision="ieee")
    out *= (keep_factor / tl.where(total == 0, 1, total))[:, None]
    _store(OUT, out, tile * QUERIES, out_at[0], sq, CHANNELS)
    lse = (maximum + tl.log2(total)) * 0.6931471805599453
    tl.store(LSE + (sample.to(tl.int64) * tl.num_programs(1) + head) * sq + row, lse, mask=row < sq)


@kernel
def dq_of_queries(
    Q, K, V, DOUT, OUT, DQ, q_at, k_at, v_at, dout_at, out_at, dq_at, LSE, DOUT_DOT_OUT, FAR, FIRST, IS_TOKEN, BIAS, bias_at,
    scale, sq, sk, heads_per_group, into_tanh, to_base_2, keep_factor,
    FIRST_SAMPLE, first_head, num_heads, key_low, key_high, threshold,
    query_start, query_middle, query_jump, key_start, key_middle, key_jump,
    HAS_FIRST: tl.constexpr, CHANNELS: tl.constexpr, PADDED: tl.constexpr, QUERIES: tl.constexpr, KEYS: tl.constexpr,
    IS_CAUSAL: tl.constexpr, HAS_SOFTCAP: tl.constexpr, HAS_DROPOUT: tl.constexpr, IS_ALIGNED: tl.constexpr, IS_EVEN: tl.constexpr,
    HAS_PADDING: tl.constexpr, HAS_BIAS: tl.constexpr,
):  # fmt: skip
    tile, head, sample = tl.num_programs(0) - 1 - tl.program_id(0), tl.program_id(1), tl.program_id(2)
    Q, DOUT = at(Q, q_at, sample, head), at(DOUT, dout_at, sample, head)
    OUT, DQ = at(OUT, out_at, sample, head), at(DQ, dq_at, sample, head)
    K, V = at(K, k_at, sample, head // heads_per_group), at(V, v_at, sample, head // heads_per_group)
    row = tile * QUERIES + tl.arange(0, QUERIES)
    first = 0
    if HAS_FIRST:
        FIRST += sample.to(tl.int64) * sq
        first = tl.load(FIRST + row, mask=row < sq, other=sk)[:, None]
    if HAS_DROPOUT:
        stream, key = stream_of(FIRST_SAMPLE, sample, head, first_head, num_heads), (key_low, key_high)
        query, spans = (
            position(row, (query_start, query_middle, query_jump)),
            (key_start, key_middle, key_jump),
        )
    q = load_tile(Q, tile * QUERIES, QUERIES, q_at[0], sq, CHANNELS, PADDED, False)
    dout = load_tile(DOUT, tile * QUERIES, QUERIES, dout_at[0], sq, CHANNELS, PADDED, False)
    out = load_tile(OUT, tile * QUERIES, QUERIES, out_at[0], sq, CHANNELS, PADDED, False)
    dout_dot_out = tl.sum(dout.to(tl.float32) * out.to(tl.float32), 1)
    of_head = (sample.to(tl.int64) * tl.num_programs(1) + head) * sq + row
    tl.store(DOUT_DOT_OUT + of_head, dout_dot_out, mask=row < sq)
    lse = base_2(LSE + of_head, row < sq)
    dq = tl.zeros([QUERIES, PADDED], dtype=tl.float32)
    before, after = tl.zeros([QUERIES], dtype=tl.float32), tl.zeros([QUERIES], dtype=tl.float32)
    bounds = _key_bounds(FIRST, tile, sq, sk, QUERIES, KEYS, IS_CAUSAL, HAS_FIRST)
    starts, ends = _parts(bounds, tile * QUERIES, bias_at[2], QUERIES, KEYS, HAS_BIAS, False)
    for part in tl.static_range(
        0 if HAS_FIRST else 1 if IS_CAUSAL or not IS_EVEN else 2, 3 if not HAS_BIAS else 4 if IS_CAUSAL else 5
    ):
        for start_key in tl.range(starts[part], ends[part], KEYS):
            key_row = start_key + tl.arange(0, KEYS)
            k = load_tile(
                K,
                start_key,
                KEYS,
                k_at[0],
                sk,
                CHANNELS,
                PADDED,
                part > 1,
                IS_TRANSPOSED=True,
            )
            v = load_tile(
                V,
                start_key,
                KEYS,
                v_at[0],
                sk,
                CHANNELS,
                PADDED,
                part > 1,
                IS_TRANSPOSED=True,
            )
            scores = tl.dot(q, k, input_precision="ieee")
            factor = to_base_2
            if HAS_SOFTCAP:
                scores = _tanh(scores, into_tanh)
            if HAS_BIAS:
                distance, factor = key_row[None, :] - row[:, None], 1.0
                scores = biased(
                    scores, BIAS, bias_at, head, tile * QUERIES, start_key, distance, to_base_2, part > 2
                )
            probs = tl.exp2(scores * factor - lse[:, None])
            if part < 2:
                allowed = _allowed(row[:, None], key_row[None, :], first, sq, sk, IS_CAUSAL, HAS_FIRST)
                probs = tl.where(allowed, probs, 0)
            if HAS_PADDING:
                probs = tl.where(is_token(IS_TOKEN, sample, key_row, sk)[None, :], probs, 0)
            dprobs = tl.dot(dout, v, input_precision="ieee")
            if HAS_DROPOUT:
                kept = keeps(query, start_key, spans, stream, key, threshold, KEYS, IS_ALIGNED)
                dprobs = tl.where(kept, dprobs * keep_factor, 0)
            dscores = probs * (dprobs - dout_dot_out[:, None])
            if HAS_SOFTCAP:
                dscores *= 1 - scores * scores
            if HAS_BIAS:
                far = tl.where(
                    is_far(tile * QUERIES, start_key, bias_at[2], QUERIES, KEYS), tl.sum(dscores, 1), 0
                )
                before += tl.where(start_key < tile * QUERIES, far, 0)
                after += tl.where(start_key < tile * QUERIES, 0, far)
            dq = tl.dot(dscores.to(k.dtype), tl.trans(k), dq, input_precision="ieee")
    _store(DQ, dq * scale, tile * QUERIES, dq_at[0], sq, CHANNELS)
    if HAS_BIAS:  # sums of the tiles that `attention_bias.py` leaves out
        FAR += (sample.to(tl.int64) * tl.num_programs(1) + head) * 2 * sq + row
        tl.store(FAR, before, mask=row < sq)
        tl.store(FAR + sq, after, mask=row < sq)


@kernel
def dkdv_of_keys(
    Q, K, V, DOUT, DK, DV, q_at, k_at, v_at, dout_at, dk_at, dv_at, LSE, DOUT_DOT_OUT, KEPT, kept_width, END, IS_TOKEN, BIAS, bias_at,
    scale, sq, sk, heads_per_group, into_tanh, to_base_2, keep_factor,
    HAS_END: tl.constexpr, CHANNELS: tl.constexpr, PADDED: tl.constexpr, QUERIES: tl.constexpr, KEYS: tl.constexpr,
    IS_CAUSAL: tl.constexpr, HAS_SOFTCAP: tl.constexpr, HAS_DROPOUT: tl.constexpr, IS_EVEN: tl.constexpr,
    HAS_PADDING: tl.constexpr, HAS_BIAS: tl.constexpr,
):  # fmt: skip
    start_key, group, sample = tl.program_id(0) * KEYS, tl.program_id(1), tl.program_id(2)
    K, V = at(K, k_at, sample, group), at(V, v_at, sample, group)
    DK, DV = at(DK, dk_at, sample, group), at(DV, dv_at, sample, group)
    key_row = start_key + tl.arange(0, KEYS)
    ends = sq
    if HAS_END:
        END += sample.to(tl.int64) * sk
        ends = tl.load(END + key_row, mask=key_row < sk, other=0)[:, None]
    k = load_tile(K, start_key, KEYS, k_at[0], sk, CHANNELS, PADDED, False)
    v = load_tile(V, start_key, KEYS, v_at[0], sk, CHANNELS, PADDED, False)
    dk = tl.zeros([KEYS, PADDED], dtype=tl.float32)
    dv = tl.zeros([KEYS, PADDED], dtype=tl.float32)
    bounds = _query_bounds(END, start_key, sq, sk, QUERIES, KEYS, IS_CAUSAL, HAS_END)
    starts, last_rows = _parts(bounds, start_key, bias_at[2], KEYS, QUERIES, HAS_BIAS, True)
    for head in tl.range(group * heads_per_group, (group + 1) * heads_per_group):
        Q_HEAD, DOUT_HEAD = at(Q, q_at, sample, head), at(DOUT, dout_at, sample, head)
        of_head = (sample.to(tl.int64) * tl.num_programs(1) * heads_per_group + head) * sq
        for part in tl.static_range(
            0 if HAS_END or not IS_EVEN else 1 if IS_CAUSAL else 2,
            3 if not HAS_BIAS else 4 if IS_CAUSAL else 5,
        ):
            for start_row in tl.range(starts[part], last_rows[part], QUERIES):
                row = start_row + tl.arange(0, QUERIES)
                q = load_tile(
                    Q_HEAD,
                    start_row,
                    QUERIES,
                    q_at[0],
                    sq,
                    CHANNELS,
                    PADDED,
                    part > 1,
                    IS_TRANSPOSED=True,
                )
                dout = load_tile(DOUT_HEAD, start_row, QUERIES, dout_at[0], sq, CHANNELS, PADDED, part > 1)
                lse = base_2(LSE + of_head + row, row < sq)
                dout_dot_out = tl.load(DOUT_DOT_OUT + of_head + row, mask=row < sq, other=0)
                scores = tl.dot(k, q, input_precision="ieee")  # of keys by queries
                factor = to_base_2
                if HAS_SOFTCAP:
                    scores = _tanh(scores, into_tanh)
                if HAS_BIAS:
                    distance, factor = key_row[:, None] - row[None, :], 1.0
                    scores = biased(
                        scores, BIAS, bias_at, head, start_row, start_key, distance, to_base_2, part > 2
                    )
                probs = tl.exp2(scores * factor - lse[None, :])
                if part < 2:
                    allowed = row[None, :] < ends
                    if IS_CAUSAL:
                        allowed = allowed & (key_row[:, None] <= row[None, :] + (sk - sq))
                    probs = tl.where(allowed, probs, 0)
                dropped = probs
                if HAS_DROPOUT:  # until the products, the sign of a probability says whether it is dropped
                    kept = load_kept_by_key(KEPT + of_head * kept_width, row, sq, start_key, kept_width, KEYS)
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
    if HAS_PADDING:  # each row of dk and dv is that of one key
        keys_are_tokens = is_token(IS_TOKEN, sample, key_row, sk)[:, None]
        dk, dv = tl.where(keys_are_tokens, dk, 0), tl.where(keys_are_tokens, dv, 0)
    _store(DK, dk * scale, start_key, dk_at[0], sk, CHANNELS)
    _store(DV, dv * keep_factor, start_key, dv_at[0], sk, CHANNELS)


@jit
def base_2(LSE, inside):
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
