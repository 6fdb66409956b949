"""The kernels of `scans/gated_delta.py`; `scans/chunks.py` explains chunks and documents, `kernels/gated_delta.py` the formulas.

The state of a head is [K, V]. Pointers and strides belong to [s, b, heads, ...]: the strides of rows, samples and heads; the
last stride is 1. Matrices of a chunk [CHUNK, CHUNK] and states of chunks are [b, chunks, n, ...], contiguous.
"""

from __future__ import annotations

import functools

from megatrain.kernels.fused.launching import jit, tl
from megatrain.kernels.fused.scans.chunks import (
    boundaries,
    decay_gradient,
    decay_of_chunk,
    decays_between,
    decays_from_start,
    decays_to_end,
    head_at,
    load_block,
    load_rows,
    load_state,
    load_values,
    store_block,
    store_rows,
    store_state,
    store_values,
)
from megatrain.kernels.fused.scans.decays import load_sums

_kernel = functools.partial(jit, any_value=("s", "chunks", "shares"))


@jit
def _inverse(a, CHUNK: tl.constexpr, PRECISION: tl.constexpr):
    """Return (I + a)^-1 of a matrix that is 0 on and above the diagonal, in fp32.

    A block n of 4 on the diagonal has (I + n)^-1 = (I - n) (I + n^2), as n^4 = 0; two adjacent blocks are joined by
    [[A, 0], [C, B]]^-1 = [[A^-1, 0], [-B^-1 C A^-1, B^-1]], all pairs at once.
    """
    i, j = tl.arange(0, CHUNK)[:, None], tl.arange(0, CHUNK)[None, :]
    block = tl.where(i // 4 == j // 4, a, 0.0)
    one = tl.where(i == j, 1.0, 0.0)
    inverse = tl.dot(
        one - block, one + tl.dot(block, block, input_precision=PRECISION), input_precision=PRECISION
    )
    for level in tl.static_range(2, 6):
        if 1 << level < CHUNK:
            below = tl.where((i >> level) == (j >> level) + 1, tl.where((j >> level) % 2 == 0, a, 0.0), 0.0)
            below = tl.dot(inverse, below, input_precision=PRECISION)
            inverse -= tl.dot(below, inverse, input_precision=PRECISION)
    return inverse


@_kernel
def solve(
    K, SUMS, BETA, FIRST, INVERSES, k_at, beta_at, s, shares,
    CHUNK: tl.constexpr, DK: tl.constexpr, ALL_K: tl.constexpr, HAS_FIRST: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Compute (I + beta (k k^T * decay) below the diagonal)^-1: programs (head, chunk, sample)."""
    head, chunk, sample = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    start = chunk * CHUNK
    place = (tl.cast(sample, tl.int64) * tl.num_programs(1) + chunk) * tl.num_programs(0) + head
    FIRST += tl.cast(sample, tl.int64) * s
    k = load_rows(head_at(K, k_at, sample, head // shares), start, k_at[0], s, CHUNK, DK, ALL_K)
    beta = load_values(head_at(BETA, beta_at, sample, head), start, beta_at[0], s, CHUNK)
    sums, _ = load_sums(SUMS, place, CHUNK)
    first, _ = boundaries(FIRST, start, s, CHUNK, HAS_FIRST)
    decay = decays_between(sums, first, start, CHUNK, HAS_FIRST)
    system = tl.dot(k, tl.trans(k), input_precision=PRECISION) * decay * beta[:, None]
    system = tl.where(tl.arange(0, CHUNK)[:, None] > tl.arange(0, CHUNK)[None, :], system, 0.0)
    store_state(INVERSES + place * (CHUNK * CHUNK), _inverse(system, CHUNK, PRECISION), CHUNK, CHUNK)


@_kernel
def decayed_scores(
    Q, K, SUMS, FIRST, SCORES, q_at, k_at, s, shares,
    CHUNK: tl.constexpr, DK: tl.constexpr, ALL_K: tl.constexpr, HAS_FIRST: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Compute q k^T * decay: programs (head, chunk, sample)."""
    head, chunk, sample = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    start = chunk * CHUNK
    place = (tl.cast(sample, tl.int64) * tl.num_programs(1) + chunk) * tl.num_programs(0) + head
    q = load_rows(head_at(Q, q_at, sample, head // shares), start, q_at[0], s, CHUNK, DK, ALL_K)
    k = load_rows(head_at(K, k_at, sample, head // shares), start, k_at[0], s, CHUNK, DK, ALL_K)
    sums, _ = load_sums(SUMS, place, CHUNK)
    first, _ = boundaries(FIRST + tl.cast(sample, tl.int64) * s, start, s, CHUNK, HAS_FIRST)
    scores = tl.dot(q, tl.trans(k), input_precision=PRECISION)
    scores *= decays_between(sums, first, start, CHUNK, HAS_FIRST)
    store_state(SCORES + place * (CHUNK * CHUNK), scores, CHUNK, CHUNK)


@jit
def _columns(
    X, column, COLUMNS: tl.constexpr, ROWS: tl.constexpr, ALL_ROWS: tl.constexpr, BLOCK: tl.constexpr
):
    """Return the pointers to a block of columns of a state, [ALL_ROWS, BLOCK], and where it is inside."""
    row = tl.arange(0, ALL_ROWS)[:, None]
    place = column + tl.arange(0, BLOCK)[None, :]
    return X + (row * COLUMNS + place), (row < ROWS) & (place < COLUMNS)


@_kernel
def states(
    K, V, SUMS, BETA, FIRST, INVERSES, START, STATES, END, NEW, k_at, v_at, beta_at, new_at, s, chunks, shares,
    CHUNK: tl.constexpr, DK: tl.constexpr, ALL_K: tl.constexpr, DV: tl.constexpr, BLOCK: tl.constexpr,
    HAS_FIRST: tl.constexpr, HAS_START: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Scan the chunks of a head for a block of channels: programs (block, head, sample).

    Writes the state before each chunk, the last state, and the values NEW that replace what was stored under the keys.
    """
    column, head, sample = tl.program_id(0) * BLOCK, tl.program_id(1), tl.program_id(2)
    n, width = tl.num_programs(1), DV - column
    K, V = head_at(K, k_at, sample, head // shares), head_at(V, v_at, sample, head) + column
    BETA, NEW = (
        head_at(BETA, beta_at, sample, head),
        head_at(NEW, new_at, sample, head) + column,
    )
    FIRST += tl.cast(sample, tl.int64) * s
    state, of_sample = (
        tl.zeros([ALL_K, BLOCK], tl.float32),
        (tl.cast(sample, tl.int64) * n + head) * (DK * DV),
    )
    if HAS_START:
        given, is_given = _columns(START + of_sample, column, DV, DK, ALL_K, BLOCK)
        state = tl.load(given, mask=is_given, other=0).to(tl.float32)
    for chunk in tl.range(0, chunks):
        start, place = chunk * CHUNK, (tl.cast(sample, tl.int64) * chunks + chunk) * n + head
        k = load_rows(K, start, k_at[0], s, CHUNK, DK, ALL_K)
        v = load_block(V, start, v_at[0], s, width, CHUNK, BLOCK)
        inverse = load_state(INVERSES + place * (CHUNK * CHUNK), CHUNK, CHUNK, CHUNK, CHUNK)
        beta = load_values(BETA, start, beta_at[0], s, CHUNK)
        sums, total = load_sums(SUMS, place, CHUNK)
        first, last = boundaries(FIRST, start, s, CHUNK, HAS_FIRST)
        rounded = state.to(k.dtype)
        pointer, inside = _columns(STATES + place * (DK * DV), column, DV, DK, ALL_K, BLOCK)
        tl.store(pointer, rounded, mask=inside)
        stored = tl.dot(k, rounded, input_precision=PRECISION)
        stored *= decays_from_start(sums, first, start, HAS_FIRST)[:, None]
        new = ((v.to(tl.float32) - stored) * beta[:, None]).to(k.dtype)
        new = tl.dot(inverse, new, input_precision=PRECISION)
        store_block(NEW, new, start, new_at[0], s, width, CHUNK, BLOCK)
        new *= decays_to_end(sums, total, last, start, CHUNK, HAS_FIRST)[:, None]
        state *= decay_of_chunk(total, last, start, HAS_FIRST)
        state = tl.dot(tl.trans(k), new.to(k.dtype), state, input_precision=PRECISION)
    result, is_result = _columns(END + of_sample, column, DV, DK, ALL_K, BLOCK)
    tl.store(result, state, mask=is_result)


@_kernel
def outputs(
    Q, K, SUMS, FIRST, STATES, NEW, OUT, q_at, k_at, new_at, out_at, s, shares,
    CHUNK: tl.constexpr, DK: tl.constexpr, ALL_K: tl.constexpr, DV: tl.constexpr, ALL_V: tl.constexpr,
    HAS_FIRST: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Compute the outputs of one chunk: programs (head, chunk, sample)."""
    head, chunk, sample = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    start = chunk * CHUNK
    place = (tl.cast(sample, tl.int64) * tl.num_programs(1) + chunk) * tl.num_programs(0) + head
    FIRST += tl.cast(sample, tl.int64) * s
    q = load_rows(head_at(Q, q_at, sample, head // shares), start, q_at[0], s, CHUNK, DK, ALL_K)
    k = load_rows(head_at(K, k_at, sample, head // shares), start, k_at[0], s, CHUNK, DK, ALL_K)
    new = load_rows(head_at(NEW, new_at, sample, head), start, new_at[0], s, CHUNK, DV, ALL_V)
    state = load_state(STATES + place * (DK * DV), DK, DV, ALL_K, ALL_V)
    sums, _ = load_sums(SUMS, place, CHUNK)
    first, _ = boundaries(FIRST, start, s, CHUNK, HAS_FIRST)
    scores = tl.dot(q, tl.trans(k), input_precision=PRECISION)
    scores *= decays_between(sums, first, start, CHUNK, HAS_FIRST)
    out = tl.dot(q, state, input_precision=PRECISION)
    out *= decays_from_start(sums, first, start, HAS_FIRST)[:, None]
    out = tl.dot(scores.to(q.dtype), new, out, input_precision=PRECISION)
    store_rows(head_at(OUT, out_at, sample, head), out, start, out_at[0], s, CHUNK, DV, ALL_V)


@_kernel
def state_gradients(
    DOUT, Q, K, SUMS, BETA, FIRST, INVERSES, SCORES, END, STATES, START, DRIGHT,
    dout_at, q_at, k_at, beta_at, dright_at, s, chunks, shares,
    CHUNK: tl.constexpr, DK: tl.constexpr, ALL_K: tl.constexpr, DV: tl.constexpr, BLOCK: tl.constexpr,
    HAS_FIRST: tl.constexpr, HAS_END: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Scan the chunks in reverse for a block of channels: programs (block, head, sample).

    Writes the gradients of the state after each chunk and of the first state, and those of the right side of the
    triangular system, DRIGHT.
    """
    column, head, sample = tl.program_id(0) * BLOCK, tl.program_id(1), tl.program_id(2)
    n, width = tl.num_programs(1), DV - column
    Q, K = head_at(Q, q_at, sample, head // shares), head_at(K, k_at, sample, head // shares)
    DOUT, DRIGHT = (
        head_at(DOUT, dout_at, sample, head) + column,
        head_at(DRIGHT, dright_at, sample, head) + column,
    )
    BETA = head_at(BETA, beta_at, sample, head)
    FIRST += tl.cast(sample, tl.int64) * s
    state, of_sample = (
        tl.zeros([ALL_K, BLOCK], tl.float32),
        (tl.cast(sample, tl.int64) * n + head) * (DK * DV),
    )
    if HAS_END:
        given, is_given = _columns(END + of_sample, column, DV, DK, ALL_K, BLOCK)
        state = tl.load(given, mask=is_given, other=0).to(tl.float32)
    for step in tl.range(0, chunks):
        chunk = chunks - 1 - step
        start, place = chunk * CHUNK, (tl.cast(sample, tl.int64) * chunks + chunk) * n + head
        q = load_rows(Q, start, q_at[0], s, CHUNK, DK, ALL_K)
        k = load_rows(K, start, k_at[0], s, CHUNK, DK, ALL_K)
        dout = load_block(DOUT, start, dout_at[0], s, width, CHUNK, BLOCK)
        inverse = load_state(INVERSES + place * (CHUNK * CHUNK), CHUNK, CHUNK, CHUNK, CHUNK)
        scores = load_state(SCORES + place * (CHUNK * CHUNK), CHUNK, CHUNK, CHUNK, CHUNK)
        beta = load_values(BETA, start, beta_at[0], s, CHUNK)
        sums, total = load_sums(SUMS, place, CHUNK)
        first, last = boundaries(FIRST, start, s, CHUNK, HAS_FIRST)
        from_start = decays_from_start(sums, first, start, HAS_FIRST)
        rounded = state.to(k.dtype)
        pointer, inside = _columns(STATES + place * (DK * DV), column, DV, DK, ALL_K, BLOCK)
        tl.store(pointer, rounded, mask=inside)
        dnew = tl.dot(k, rounded, input_precision=PRECISION)
        dnew *= decays_to_end(sums, total, last, start, CHUNK, HAS_FIRST)[:, None]
        dnew = tl.dot(tl.trans(scores), dout, dnew, input_precision=PRECISION)
        dright = tl.dot(tl.trans(inverse), dnew.to(k.dtype), input_precision=PRECISION)
        store_block(DRIGHT, dright, start, dright_at[0], s, width, CHUNK, BLOCK)
        state *= decay_of_chunk(total, last, start, HAS_FIRST)
        read = (dout.to(tl.float32) * from_start[:, None]).to(k.dtype)
        state = tl.dot(tl.trans(q), read, state, input_precision=PRECISION)
        replaced = (dright * (-beta * from_start)[:, None]).to(k.dtype)
        state = tl.dot(tl.trans(k), replaced, state, input_precision=PRECISION)
    result, is_result = _columns(START + of_sample, column, DV, DK, ALL_K, BLOCK)
    tl.store(result, state, mask=is_result)


@_kernel
def query_gradients(
    DOUT, Q, K, SUMS, FIRST, BEFORE, NEW, DQ, DSUMS, dout_at, q_at, k_at, new_at, dq_at, s, shares,
    CHUNK: tl.constexpr, DK: tl.constexpr, ALL_K: tl.constexpr, DV: tl.constexpr, ALL_V: tl.constexpr,
    HAS_FIRST: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Compute dq of one chunk of a head of values: programs (head, chunk, sample).

    BEFORE: states before chunks. DSUMS [b, n, s] gets the queries' part of `dsums`, see `decay_gradient`.
    """
    head, chunk, sample = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    n, start = tl.num_programs(0), chunk * CHUNK
    place = (tl.cast(sample, tl.int64) * tl.num_programs(1) + chunk) * n + head
    first, _ = boundaries(FIRST + tl.cast(sample, tl.int64) * s, start, s, CHUNK, HAS_FIRST)
    sums, _ = load_sums(SUMS, place, CHUNK)
    dout = load_rows(head_at(DOUT, dout_at, sample, head), start, dout_at[0], s, CHUNK, DV, ALL_V)
    before = load_state(BEFORE + place * (DK * DV), DK, DV, ALL_K, ALL_V)
    q = load_rows(head_at(Q, q_at, sample, head // shares), start, q_at[0], s, CHUNK, DK, ALL_K)
    dq = tl.dot(dout, tl.trans(before), input_precision=PRECISION)
    dq *= decays_from_start(sums, first, start, HAS_FIRST)[:, None]
    dsums = tl.sum(q.to(tl.float32) * dq, 1)
    new = load_rows(head_at(NEW, new_at, sample, head), start, new_at[0], s, CHUNK, DV, ALL_V)
    k = load_rows(head_at(K, k_at, sample, head // shares), start, k_at[0], s, CHUNK, DK, ALL_K)
    dscores = tl.dot(dout, tl.trans(new), input_precision=PRECISION)
    dscores *= decays_between(sums, first, start, CHUNK, HAS_FIRST)
    dq = tl.dot(dscores.to(k.dtype), k, dq, input_precision=PRECISION)
    store_rows(head_at(DQ, dq_at, sample, head), dq, start, dq_at[0], s, CHUNK, DK, ALL_K)
    dscores *= tl.dot(q, tl.trans(k), input_precision=PRECISION)
    dsums += tl.sum(dscores, 1) - tl.sum(dscores, 0)
    store_values(DSUMS + (tl.cast(sample, tl.int64) * n + head) * s, dsums, start, 1, s, CHUNK)


@_kernel
def key_gradients(
    DOUT, Q, K, V, SUMS, BETA, FIRST, BEFORE, AFTER, NEW, DRIGHT, DSUMS, DK_, DV_, DG, DBETA,
    dout_at, q_at, k_at, v_at, beta_at, new_at, dk_at, dv_at, s, shares,
    CHUNK: tl.constexpr, DK: tl.constexpr, ALL_K: tl.constexpr, DV: tl.constexpr, ALL_V: tl.constexpr,
    HAS_FIRST: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Compute the other gradients of one chunk of a head of values: programs (head, chunk, sample).

    AFTER: gradients of the states after chunks. DG and DBETA are [b, n, s]. DRIGHT has the strides of NEW.
    """
    head, chunk, sample = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    n, start = tl.num_programs(0), chunk * CHUNK
    place = (tl.cast(sample, tl.int64) * tl.num_programs(1) + chunk) * n + head
    of_head = (tl.cast(sample, tl.int64) * n + head) * s
    first, last = boundaries(FIRST + tl.cast(sample, tl.int64) * s, start, s, CHUNK, HAS_FIRST)
    beta = load_values(head_at(BETA, beta_at, sample, head), start, beta_at[0], s, CHUNK)
    sums, total = load_sums(SUMS, place, CHUNK)
    before = load_state(BEFORE + place * (DK * DV), DK, DV, ALL_K, ALL_V)
    after = load_state(AFTER + place * (DK * DV), DK, DV, ALL_K, ALL_V)
    of_state = decay_of_chunk(total, last, start, HAS_FIRST)
    of_state *= tl.sum(tl.sum(before.to(tl.float32) * after.to(tl.float32), 1), 0)

    dright = load_rows(head_at(DRIGHT, new_at, sample, head), start, new_at[0], s, CHUNK, DV, ALL_V)
    v = load_rows(head_at(V, v_at, sample, head), start, v_at[0], s, CHUNK, DV, ALL_V)
    dv = dright.to(tl.float32) * beta[:, None]
    store_rows(head_at(DV_, dv_at, sample, head), dv, start, dv_at[0], s, CHUNK, DV, ALL_V)
    dbeta = tl.sum(dright.to(tl.float32) * v.to(tl.float32), 1)
    k = load_rows(head_at(K, k_at, sample, head // shares), start, k_at[0], s, CHUNK, DK, ALL_K)
    read = tl.dot(dright, tl.trans(before), input_precision=PRECISION)
    read *= -decays_from_start(sums, first, start, HAS_FIRST)[:, None]
    dbeta_of_state = tl.sum(k.to(tl.float32) * read, 1)
    dk = read * beta[:, None]
    new = load_rows(head_at(NEW, new_at, sample, head), start, new_at[0], s, CHUNK, DV, ALL_V)
    written = tl.dot(new, tl.trans(after), input_precision=PRECISION)
    written *= decays_to_end(sums, total, last, start, CHUNK, HAS_FIRST)[:, None]
    at_end = tl.sum(k.to(tl.float32) * written, 1)
    dk += written

    decay = decays_between(sums, first, start, CHUNK, HAS_FIRST)
    dout = load_rows(head_at(DOUT, dout_at, sample, head), start, dout_at[0], s, CHUNK, DV, ALL_V)
    q = load_rows(head_at(Q, q_at, sample, head // shares), start, q_at[0], s, CHUNK, DK, ALL_K)
    dscores = (tl.dot(dout, tl.trans(new), input_precision=PRECISION) * decay).to(k.dtype)
    dk = tl.dot(tl.trans(dscores), q, dk, input_precision=PRECISION)
    dsystem = tl.dot(dright, tl.trans(new), input_precision=PRECISION) * decay
    is_before = tl.arange(0, CHUNK)[:, None] > tl.arange(0, CHUNK)[None, :]
    dsystem = tl.where(is_before, -dsystem, 0.0)
    of_keys = (dsystem * beta[:, None]).to(k.dtype)
    dk = tl.dot(of_keys, k, dk, input_precision=PRECISION)
    dk = tl.dot(tl.trans(of_keys), k, dk, input_precision=PRECISION)
    store_rows(head_at(DK_, dk_at, sample, head), dk, start, dk_at[0], s, CHUNK, DK, ALL_K)
    dsystem *= tl.dot(k, tl.trans(k), input_precision=PRECISION)
    store_values(DBETA + of_head, dbeta + dbeta_of_state + tl.sum(dsystem, 1), start, 1, s, CHUNK)
    dsystem *= beta[:, None]
    dsums = load_values(DSUMS + of_head, start, 1, s, CHUNK) + beta * dbeta_of_state
    dsums += tl.sum(dsystem, 1) - tl.sum(dsystem, 0)
    store_values(DG + of_head, decay_gradient(dsums, at_end, of_state), start, 1, s, CHUNK)
