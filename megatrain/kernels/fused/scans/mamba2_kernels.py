"""The kernels of `scans/mamba2.py`; `scans/chunks.py` explains chunks and documents.

The state of a head is [P, M], channels x state size. Pointers and strides belong to x and y [s, b, n, P], B and C
[s, b, g, M], dt [s, b, n]: the strides of rows, samples and heads; the last stride is 1. States of chunks are [b, chunks, n, P, M].
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
    store_values,
)

_kernel = functools.partial(jit, any_value=("s", "n", "chunks", "heads", "heads_per_group"))


@_kernel
def states(
    X, B, DT, A, FIRST, START, STATES, END, x_at, b_at, dt_at, s, chunks, heads_per_group,
    CHUNK: tl.constexpr, P: tl.constexpr, ALL_P: tl.constexpr, M: tl.constexpr, BLOCK: tl.constexpr,
    HAS_FIRST: tl.constexpr, HAS_START: tl.constexpr, IS_REVERSE: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Scan the chunks of a head for a block of the state's columns: programs (block, head, sample).

    Writes the state before each chunk and the last state. IS_REVERSE: X and B are dy and C, and the state is its gradient, from
    the last chunk to the first.
    """
    column, head, sample = tl.program_id(0) * BLOCK, tl.program_id(1), tl.program_id(2)
    n, width = tl.num_programs(1), M - column
    X, DT = head_at(X, x_at, sample, head), head_at(DT, dt_at, sample, head)
    B = head_at(B, b_at, sample, head // heads_per_group) + column
    FIRST += tl.cast(sample, tl.int64) * s
    log_decay = tl.load(A + head).to(tl.float32) * 1.4426950408889634
    of_sample = (tl.cast(sample, tl.int64) * n + head) * (P * M) + column
    state = tl.zeros([ALL_P, BLOCK], tl.float32)
    if HAS_START:
        state = load_block(START + of_sample, 0, M, P, width, ALL_P, BLOCK).to(tl.float32)
    for step in tl.range(0, chunks):
        chunk = step
        if IS_REVERSE:
            chunk = chunks - 1 - step
        start, place = chunk * CHUNK, (tl.cast(sample, tl.int64) * chunks + chunk) * n + head
        store_block(STATES + place * (P * M) + column, state, 0, M, P, width, ALL_P, BLOCK)
        x = load_rows(X, start, x_at[0], s, CHUNK, P, ALL_P)
        b = load_block(B, start, b_at[0], s, width, CHUNK, BLOCK)
        dt = load_values(DT, start, dt_at[0], s, CHUNK)
        first, last = boundaries(FIRST, start, s, CHUNK, HAS_FIRST)
        sums, total = tl.cumsum(dt * log_decay, 0), tl.sum(dt * log_decay, 0)
        if IS_REVERSE:
            weight = decays_from_start(sums, first, start, HAS_FIRST)
        else:
            weight = dt * decays_to_end(sums, total, last, start, CHUNK, HAS_FIRST)
        weighted = (b.to(tl.float32) * weight[:, None]).to(b.dtype)
        state *= decay_of_chunk(total, last, start, HAS_FIRST)
        state = tl.dot(tl.trans(x), weighted, state, input_precision=PRECISION)
    store_block(END + of_sample, state, 0, M, P, width, ALL_P, BLOCK)


@_kernel
def outputs(
    X, B, C, DT, A, D, FIRST, STATES, Y, x_at, b_at, c_at, dt_at, y_at, s, heads, heads_per_group,
    CHUNK: tl.constexpr, P: tl.constexpr, ALL_P: tl.constexpr, M: tl.constexpr, ALL_M: tl.constexpr,
    HAS_FIRST: tl.constexpr, IS_REVERSE: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Compute y of a chunk for `heads` heads of a group: programs (heads, chunk, sample). STATES: those before chunks.

    IS_REVERSE: X and Y are dy and dx, and STATES the gradients of the states after chunks.
    """
    begin, chunk, sample = tl.program_id(0) * heads, tl.program_id(1), tl.program_id(2)
    n, group, start = tl.num_programs(0) * heads, begin // heads_per_group, chunk * CHUNK
    b = load_rows(head_at(B, b_at, sample, group), start, b_at[0], s, CHUNK, M, ALL_M)
    c = load_rows(head_at(C, c_at, sample, group), start, c_at[0], s, CHUNK, M, ALL_M)
    first, last = boundaries(FIRST + tl.cast(sample, tl.int64) * s, start, s, CHUNK, HAS_FIRST)
    scores = tl.dot(c, tl.trans(b), input_precision=PRECISION)
    for head in tl.range(begin, begin + heads):
        place = (tl.cast(sample, tl.int64) * tl.num_programs(1) + chunk) * n + head
        x = load_rows(head_at(X, x_at, sample, head), start, x_at[0], s, CHUNK, P, ALL_P)
        state = load_state(STATES + place * (P * M), P, M, ALL_P, ALL_M)
        dt = load_values(head_at(DT, dt_at, sample, head), start, dt_at[0], s, CHUNK)
        log_decay = dt * (tl.load(A + head).to(tl.float32) * 1.4426950408889634)
        sums = tl.cumsum(log_decay, 0)
        pairs = scores * decays_between(sums, first, start, CHUNK, HAS_FIRST)
        if IS_REVERSE:
            y = tl.dot(b, tl.trans(state), input_precision=PRECISION)
            y *= decays_to_end(sums, tl.sum(log_decay, 0), last, start, CHUNK, HAS_FIRST)[:, None]
            y = tl.dot(tl.trans(pairs.to(x.dtype)), x, y, input_precision=PRECISION) * dt[:, None]
        else:
            y = tl.dot(c, tl.trans(state), input_precision=PRECISION)
            y *= decays_from_start(sums, first, start, HAS_FIRST)[:, None]
            y = tl.dot((pairs * dt[None, :]).to(x.dtype), x, y, input_precision=PRECISION)
        y += tl.load(D + head).to(tl.float32) * x.to(tl.float32)
        store_rows(head_at(Y, y_at, sample, head), y, start, y_at[0], s, CHUNK, P, ALL_P)


@_kernel
def gradients(
    DY, X, B, C, DT, A, FIRST, BEFORE, AFTER, DB, DC, DDT, DA, DD, dy_at, x_at, b_at, c_at, dt_at, db_at, dc_at,
    s, n, heads_per_group,
    CHUNK: tl.constexpr, P: tl.constexpr, ALL_P: tl.constexpr, M: tl.constexpr, ALL_M: tl.constexpr,
    HAS_FIRST: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Compute the gradients of a chunk of all heads of a group, without dx: programs (group, chunk, sample).

    BEFORE: states before chunks; AFTER: gradients of the states after them. DDT is [b, n, s], DA and DD [b, chunks, n].
    """
    group, chunk, sample = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    start = chunk * CHUNK
    first, last = boundaries(FIRST + tl.cast(sample, tl.int64) * s, start, s, CHUNK, HAS_FIRST)
    b = load_rows(head_at(B, b_at, sample, group), start, b_at[0], s, CHUNK, M, ALL_M)
    c = load_rows(head_at(C, c_at, sample, group), start, c_at[0], s, CHUNK, M, ALL_M)
    scores = tl.dot(c, tl.trans(b), input_precision=PRECISION)
    dscores = tl.zeros([CHUNK, CHUNK], tl.float32)
    db, dc = tl.zeros([CHUNK, ALL_M], tl.float32), tl.zeros([CHUNK, ALL_M], tl.float32)
    is_itself = tl.arange(0, CHUNK)[:, None] == tl.arange(0, CHUNK)[None, :]
    for head in tl.range(group * heads_per_group, (group + 1) * heads_per_group):
        place = (tl.cast(sample, tl.int64) * tl.num_programs(1) + chunk) * n + head
        a = tl.load(A + head).to(tl.float32)
        dy = load_rows(head_at(DY, dy_at, sample, head), start, dy_at[0], s, CHUNK, P, ALL_P)
        x = load_rows(head_at(X, x_at, sample, head), start, x_at[0], s, CHUNK, P, ALL_P)
        before = load_state(BEFORE + place * (P * M), P, M, ALL_P, ALL_M)
        after = load_state(AFTER + place * (P * M), P, M, ALL_P, ALL_M)
        dt = load_values(head_at(DT, dt_at, sample, head), start, dt_at[0], s, CHUNK)
        log_decay = dt * (a * 1.4426950408889634)
        sums, total = tl.cumsum(log_decay, 0), tl.sum(log_decay, 0)
        of_state = decay_of_chunk(total, last, start, HAS_FIRST)
        of_state *= tl.sum(tl.sum(before.to(tl.float32) * after.to(tl.float32), 1), 0)

        dpairs = tl.dot(dy, tl.trans(x), input_precision=PRECISION)
        tl.store(DD + place, tl.sum(tl.sum(tl.where(is_itself, dpairs, 0.0), 1), 0))
        dpairs *= decays_between(sums, first, start, CHUNK, HAS_FIRST)
        dscores += dpairs * dt[None, :]
        dpairs *= scores
        ddt = tl.sum(dpairs, 0)
        dsums = tl.sum(dpairs * dt[None, :], 1) - ddt * dt

        read = tl.dot(dy, before, input_precision=PRECISION)
        read *= decays_from_start(sums, first, start, HAS_FIRST)[:, None]
        dsums += tl.sum(read * c.to(tl.float32), 1)
        dc += read
        written = tl.dot(x, after, input_precision=PRECISION)
        written *= decays_to_end(sums, total, last, start, CHUNK, HAS_FIRST)[:, None]
        at_end = tl.sum(written * b.to(tl.float32), 1)
        db += written * dt[:, None]

        da = decay_gradient(dsums, at_end * dt, of_state)
        ddt += at_end + a * da
        store_values(DDT + (tl.cast(sample, tl.int64) * n + head) * s, ddt, start, 1, s, CHUNK)
        tl.store(DA + place, tl.sum(dt * da, 0))
    dscores = dscores.to(b.dtype)
    dc = tl.dot(dscores, b, dc, input_precision=PRECISION)
    db = tl.dot(tl.trans(dscores), c, db, input_precision=PRECISION)
    store_rows(head_at(DC, dc_at, sample, group), dc, start, dc_at[0], s, CHUNK, M, ALL_M)
    store_rows(head_at(DB, db_at, sample, group), db, start, db_at[0], s, CHUNK, M, ALL_M)
