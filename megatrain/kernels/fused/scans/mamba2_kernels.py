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
    store_block,
    store_rows,
    store_values,
)
from megatrain.kernels.fused.scans.decays import load_chunk, load_sums

_kernel = functools.partial(jit, any_value=("s", "n", "chunks", "heads", "heads_per_group"))


@_kernel
def states(
    X, B, STEPS, SUMS, FIRST, START, STATES, END, x_at, b_at, s, chunks, heads_per_group,
    CHUNK: tl.constexpr, P: tl.constexpr, ALL_P: tl.constexpr, M: tl.constexpr, BLOCK: tl.constexpr,
    HAS_FIRST: tl.constexpr, HAS_START: tl.constexpr, IS_REVERSE: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Scan the chunks of a head for a block of the state's columns: programs (block, head, sample).

    Writes the state before each chunk and the last state. IS_REVERSE: X and B are dy and C, and the state is its gradient, from
    the last chunk to the first.
    """
    column, head, sample = tl.program_id(0) * BLOCK, tl.program_id(1), tl.program_id(2)
    n, width = tl.num_programs(1), M - column
    X, B = head_at(X, x_at, sample, head), head_at(B, b_at, sample, head // heads_per_group) + column
    FIRST += tl.cast(sample, tl.int64) * s
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
        dt = load_chunk(STEPS, place, CHUNK)
        sums, total = load_sums(SUMS, place, CHUNK)
        first, last = boundaries(FIRST, start, s, CHUNK, HAS_FIRST)
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
    X, OTHER, B, C, STEPS, SUMS, D, FIRST, STATES, Y, ENDS, x_at, other_at, b_at, c_at, y_at, s, heads, heads_per_group,
    CHUNK: tl.constexpr, P: tl.constexpr, ALL_P: tl.constexpr, M: tl.constexpr, ALL_M: tl.constexpr,
    HAS_FIRST: tl.constexpr, IS_REVERSE: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Compute y of a chunk for `heads` heads of a group: programs (heads, chunk, sample). STATES: those before chunks.

    IS_REVERSE: X and Y are dy and dx, STATES the gradients of the states after chunks, OTHER is x, and ENDS [b, chunks, n, CHUNK]
    gets the part of each token's ddt that comes from the state after its chunk.
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
        dt = load_chunk(STEPS, place, CHUNK)
        sums, total = load_sums(SUMS, place, CHUNK)
        pairs = scores * decays_between(sums, first, start, CHUNK, HAS_FIRST)
        if IS_REVERSE:
            other = load_rows(head_at(OTHER, other_at, sample, head), start, other_at[0], s, CHUNK, P, ALL_P)
            y = tl.dot(b, tl.trans(state), input_precision=PRECISION)
            y *= decays_to_end(sums, total, last, start, CHUNK, HAS_FIRST)[:, None]
            tl.store(ENDS + place * CHUNK + tl.arange(0, CHUNK), tl.sum(y * other.to(tl.float32), 1))
            y = tl.dot(tl.trans(pairs.to(x.dtype)), x, y, input_precision=PRECISION) * dt[:, None]
        else:
            y = tl.dot(c, tl.trans(state), input_precision=PRECISION)
            y *= decays_from_start(sums, first, start, HAS_FIRST)[:, None]
            y = tl.dot((pairs * dt[None, :]).to(x.dtype), x, y, input_precision=PRECISION)
        y += tl.load(D + head).to(tl.float32) * x.to(tl.float32)
        store_rows(head_at(Y, y_at, sample, head), y, start, y_at[0], s, CHUNK, P, ALL_P)


@_kernel
def step_gradients(
    DY, X, B, C, STEPS, SUMS, A, FIRST, BEFORE, AFTER, ENDS, DDT, DA, DD, dy_at, x_at, b_at, c_at, s, heads, heads_per_group,
    CHUNK: tl.constexpr, P: tl.constexpr, ALL_P: tl.constexpr, M: tl.constexpr, ALL_M: tl.constexpr,
    HAS_FIRST: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Compute ddt and a chunk's part of dA and dD for `heads` heads of a group: programs (heads, chunk, sample).

    BEFORE: states before chunks; AFTER: gradients of the states after them. DDT is [b, n, s], DA and DD [b, chunks, n].
    """
    begin, chunk, sample = tl.program_id(0) * heads, tl.program_id(1), tl.program_id(2)
    n, group, start = tl.num_programs(0) * heads, begin // heads_per_group, chunk * CHUNK
    b = load_rows(head_at(B, b_at, sample, group), start, b_at[0], s, CHUNK, M, ALL_M)
    c = load_rows(head_at(C, c_at, sample, group), start, c_at[0], s, CHUNK, M, ALL_M)
    first, last = boundaries(FIRST + tl.cast(sample, tl.int64) * s, start, s, CHUNK, HAS_FIRST)
    scores = tl.dot(c, tl.trans(b), input_precision=PRECISION)
    is_itself = tl.arange(0, CHUNK)[:, None] == tl.arange(0, CHUNK)[None, :]
    for head in tl.range(begin, begin + heads):
        place = (tl.cast(sample, tl.int64) * tl.num_programs(1) + chunk) * n + head
        dy = load_rows(head_at(DY, dy_at, sample, head), start, dy_at[0], s, CHUNK, P, ALL_P)
        x = load_rows(head_at(X, x_at, sample, head), start, x_at[0], s, CHUNK, P, ALL_P)
        before = load_state(BEFORE + place * (P * M), P, M, ALL_P, ALL_M)
        after = load_state(AFTER + place * (P * M), P, M, ALL_P, ALL_M)
        dt = load_chunk(STEPS, place, CHUNK)
        sums, total = load_sums(SUMS, place, CHUNK)
        read = tl.dot(c, tl.trans(before), input_precision=PRECISION)
        dsums = tl.sum(read * dy.to(tl.float32), 1) * decays_from_start(sums, first, start, HAS_FIRST)
        of_state = decay_of_chunk(total, last, start, HAS_FIRST)
        of_state *= tl.sum(tl.sum(before.to(tl.float32) * after.to(tl.float32), 1), 0)
        pairs = tl.dot(dy, tl.trans(x), input_precision=PRECISION)
        tl.store(DD + place, tl.sum(tl.sum(tl.where(is_itself, pairs, 0.0), 1), 0))
        pairs *= scores * decays_between(sums, first, start, CHUNK, HAS_FIRST)
        of_tokens = tl.sum(pairs, 0)
        dsums += tl.sum(pairs * dt[None, :], 1) - of_tokens * dt
        ends = load_chunk(ENDS, place, CHUNK)
        da = decay_gradient(dsums, ends * dt, of_state)
        ddt = ends + of_tokens + tl.load(A + head).to(tl.float32) * da
        store_values(DDT + (tl.cast(sample, tl.int64) * n + head) * s, ddt, start, 1, s, CHUNK)
        tl.store(DA + place, tl.sum(dt * da, 0))


@_kernel
def group_gradients(
    DY, X, B, C, STEPS, SUMS, FIRST, BEFORE, AFTER, DB, DC, dy_at, x_at, b_at, c_at, db_at, dc_at, s, n, heads_per_group,
    CHUNK: tl.constexpr, P: tl.constexpr, ALL_P: tl.constexpr, M: tl.constexpr, BLOCK: tl.constexpr,
    HAS_FIRST: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Compute the gradients of B and C of a chunk, for a block of the state: programs (group and block, chunk, sample).

    BEFORE are the states before chunks, AFTER the gradients of the states after them.
    """
    blocks: tl.constexpr = (M + BLOCK - 1) // BLOCK
    group, column = tl.program_id(0) // blocks, tl.program_id(0) % blocks * BLOCK
    chunk, sample = tl.program_id(1), tl.program_id(2)
    start, width = chunk * CHUNK, M - column
    FIRST += tl.cast(sample, tl.int64) * s
    first, last = boundaries(FIRST, start, s, CHUNK, HAS_FIRST)
    dbetween = tl.zeros([CHUNK, CHUNK], tl.float32)
    db, dc = tl.zeros([CHUNK, BLOCK], tl.float32), tl.zeros([CHUNK, BLOCK], tl.float32)
    for head in tl.range(group * heads_per_group, (group + 1) * heads_per_group):
        place = (tl.cast(sample, tl.int64) * tl.num_programs(1) + chunk) * n + head
        x = load_rows(head_at(X, x_at, sample, head), start, x_at[0], s, CHUNK, P, ALL_P)
        dy = load_rows(head_at(DY, dy_at, sample, head), start, dy_at[0], s, CHUNK, P, ALL_P)
        before = load_block(BEFORE + place * (P * M) + column, 0, M, P, width, ALL_P, BLOCK)
        after = load_block(AFTER + place * (P * M) + column, 0, M, P, width, ALL_P, BLOCK)
        dt = load_chunk(STEPS, place, CHUNK)
        sums, total = load_sums(SUMS, place, CHUNK)
        of_pairs = tl.dot(dy, tl.trans(x), input_precision=PRECISION)
        dbetween += of_pairs * (decays_between(sums, first, start, CHUNK, HAS_FIRST) * dt[None, :])
        from_start = decays_from_start(sums, first, start, HAS_FIRST)
        dc = tl.dot(
            (dy.to(tl.float32) * from_start[:, None]).to(x.dtype), before, dc, input_precision=PRECISION
        )
        to_end = dt * decays_to_end(sums, total, last, start, CHUNK, HAS_FIRST)
        db = tl.dot((x.to(tl.float32) * to_end[:, None]).to(x.dtype), after, db, input_precision=PRECISION)
    b = load_block(head_at(B, b_at, sample, group) + column, start, b_at[0], s, width, CHUNK, BLOCK)
    c = load_block(head_at(C, c_at, sample, group) + column, start, c_at[0], s, width, CHUNK, BLOCK)
    dbetween = dbetween.to(b.dtype)
    dc = tl.dot(dbetween, b, dc, input_precision=PRECISION)
    db = tl.dot(tl.trans(dbetween), c, db, input_precision=PRECISION)
    store_block(head_at(DC, dc_at, sample, group) + column, dc, start, dc_at[0], s, width, CHUNK, BLOCK)
    store_block(head_at(DB, db_at, sample, group) + column, db, start, db_at[0], s, width, CHUNK, BLOCK)
