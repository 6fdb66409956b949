"""The kernels of `scans/mamba2.py`; `scans/chunks.py` explains chunks and documents.

The state of a head is [P, M], channels x state size. Pointers and strides belong to x and y [s, b, n, P], B and C
[s, b, g, M], dt [s, b, n]: the strides of rows, samples and heads; the last stride is 1. A segment is `per_segment` chunks.
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

_kernel = functools.partial(jit, any_value=("s", "n", "chunks", "per_segment", "segments", "heads_per_group"))


@_kernel
def states(
    X, B, DT, A, FIRST, STATES, DECAYS, CHUNK_STATES, x_at, b_at, dt_at, s, chunks, per_segment, heads_per_group,
    CHUNK: tl.constexpr, P: tl.constexpr, ALL_P: tl.constexpr, M: tl.constexpr, ALL_M: tl.constexpr,
    HAS_FIRST: tl.constexpr, IS_REVERSE: tl.constexpr, WRITES_CHUNKS: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Scan one segment of a head: programs (head, segment, sample).

    IS_REVERSE: X and B are dy and C, and the state is its gradient, from the last chunk to the first. WRITES_CHUNKS: start
    from STATES and write the state before each chunk (after it, if reverse) into CHUNK_STATES; else start from 0 and
    write the state into STATES, and the decay over the segment into DECAYS.
    """
    head, segment, sample = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    n, segments = tl.num_programs(0), tl.num_programs(1)
    X, DT, B = (
        head_at(X, x_at, sample, head),
        head_at(DT, dt_at, sample, head),
        head_at(B, b_at, sample, head // heads_per_group),
    )
    FIRST += tl.cast(sample, tl.int64) * s
    place = (tl.cast(sample, tl.int64) * segments + segment) * n + head
    log_decay = tl.load(A + head).to(tl.float32) * 1.4426950408889634
    state, kept = tl.zeros([ALL_P, ALL_M], tl.float32), tl.full([], 1.0, tl.float32)
    if WRITES_CHUNKS:
        state = load_state(STATES + place * (P * M), P, M, ALL_P, ALL_M)
    begin, count = segment * per_segment, tl.minimum(per_segment, chunks - segment * per_segment)
    for step in tl.range(0, count):
        chunk = begin + step
        if IS_REVERSE:
            chunk = begin + count - 1 - step
        start = chunk * CHUNK
        if WRITES_CHUNKS:
            of_chunk = (tl.cast(sample, tl.int64) * chunks + chunk) * n + head
            store_state(CHUNK_STATES + of_chunk * (P * M), state, P, M)
        x = load_rows(X, start, x_at[0], s, CHUNK, P, ALL_P)
        b = load_rows(B, start, b_at[0], s, CHUNK, M, ALL_M)
        dt = load_values(DT, start, dt_at[0], s, CHUNK)
        first, last = boundaries(FIRST, start, s, CHUNK, HAS_FIRST)
        sums, total = tl.cumsum(dt * log_decay, 0), tl.sum(dt * log_decay, 0)
        if IS_REVERSE:
            weight = decays_from_start(sums, first, start, HAS_FIRST)
        else:
            weight = dt * decays_to_end(sums, total, last, start, CHUNK, HAS_FIRST)
        weighted = (x.to(tl.float32) * weight[:, None]).to(x.dtype)
        keep = decay_of_chunk(total, last, start, HAS_FIRST)
        state = tl.dot(tl.trans(weighted), b, state * keep, input_precision=PRECISION)
        kept *= keep
    if not WRITES_CHUNKS:
        store_state(STATES + place * (P * M), state, P, M)
        tl.store(DECAYS + place, kept)


@_kernel
def pass_states(
    STATES, DECAYS, START, END, segments, SIZE: tl.constexpr, BLOCK: tl.constexpr, HAS_START: tl.constexpr, IS_REVERSE: tl.constexpr,
):  # fmt: skip
    """Replace each segment's state from 0 by the state before it (after it, if reverse): programs (block, head, sample).

    START and END: the states before the first and after the last segment.
    """
    head, sample, n = tl.program_id(1), tl.program_id(2), tl.num_programs(1)
    element = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = element < SIZE
    whole = (tl.cast(sample, tl.int64) * n + head) * SIZE + element
    state = tl.zeros([BLOCK], tl.float32)
    if HAS_START:
        state = tl.load(START + whole, mask=inside, other=0).to(tl.float32)
    for step in tl.range(0, segments):
        segment = step
        if IS_REVERSE:
            segment = segments - 1 - step
        place = (tl.cast(sample, tl.int64) * segments + segment) * n + head
        of_segment = tl.load(STATES + place * SIZE + element, mask=inside, other=0)
        tl.store(STATES + place * SIZE + element, state, mask=inside)
        state = state * tl.load(DECAYS + place) + of_segment
    tl.store(END + whole, state, mask=inside)


@_kernel
def outputs(
    X, B, C, DT, A, D, FIRST, STATES, Y, x_at, b_at, c_at, dt_at, y_at, s, chunks, per_segment, heads_per_group,
    CHUNK: tl.constexpr, P: tl.constexpr, ALL_P: tl.constexpr, M: tl.constexpr, ALL_M: tl.constexpr,
    HAS_FIRST: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Compute y of one segment of a head from the state before it: programs (head, segment, sample)."""
    head, segment, sample = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    n, group = tl.num_programs(0), head // heads_per_group
    X, DT, Y = (
        head_at(X, x_at, sample, head),
        head_at(DT, dt_at, sample, head),
        head_at(Y, y_at, sample, head),
    )
    B, C = head_at(B, b_at, sample, group), head_at(C, c_at, sample, group)
    FIRST += tl.cast(sample, tl.int64) * s
    log_decay, skip = tl.load(A + head).to(tl.float32) * 1.4426950408889634, tl.load(D + head).to(tl.float32)
    place = (tl.cast(sample, tl.int64) * tl.num_programs(1) + segment) * n + head
    state = load_state(STATES + place * (P * M), P, M, ALL_P, ALL_M)
    begin = segment * per_segment
    for chunk in tl.range(begin, tl.minimum(begin + per_segment, chunks)):
        start = chunk * CHUNK
        x = load_rows(X, start, x_at[0], s, CHUNK, P, ALL_P)
        b = load_rows(B, start, b_at[0], s, CHUNK, M, ALL_M)
        c = load_rows(C, start, c_at[0], s, CHUNK, M, ALL_M)
        dt = load_values(DT, start, dt_at[0], s, CHUNK)
        first, last = boundaries(FIRST, start, s, CHUNK, HAS_FIRST)
        sums, total = tl.cumsum(dt * log_decay, 0), tl.sum(dt * log_decay, 0)
        scores = tl.dot(c, tl.trans(b), input_precision=PRECISION)
        scores *= decays_between(sums, first, start, CHUNK, HAS_FIRST) * dt[None, :]
        y = tl.dot(c, tl.trans(state.to(x.dtype)), input_precision=PRECISION)
        y *= decays_from_start(sums, first, start, HAS_FIRST)[:, None]
        y = tl.dot(scores.to(x.dtype), x, y, input_precision=PRECISION)
        wide = x.to(tl.float32)
        store_rows(Y, y + skip * wide, start, y_at[0], s, CHUNK, P, ALL_P)
        weight = dt * decays_to_end(sums, total, last, start, CHUNK, HAS_FIRST)
        weighted = (wide * weight[:, None]).to(x.dtype)
        keep = decay_of_chunk(total, last, start, HAS_FIRST)
        state = tl.dot(tl.trans(weighted), b, state * keep, input_precision=PRECISION)


@_kernel
def head_gradients(
    DY, X, B, C, DT, A, D, FIRST, BEFORE, AFTER, DX, DDT, DA, DD, dy_at, x_at, b_at, c_at, dt_at, dx_at, s, heads_per_group,
    CHUNK: tl.constexpr, P: tl.constexpr, ALL_P: tl.constexpr, M: tl.constexpr, ALL_M: tl.constexpr,
    HAS_FIRST: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Compute the gradients of a head's inputs for a chunk: programs (head, chunk, sample).

    BEFORE: states before chunks; AFTER: gradients of the states after them. DDT is [b, n, s], DA and DD [b, chunks, n].
    """
    head, chunk, sample = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    n, group, start = tl.num_programs(0), head // heads_per_group, chunk * CHUNK
    place = (tl.cast(sample, tl.int64) * tl.num_programs(1) + chunk) * n + head
    a, skip = tl.load(A + head).to(tl.float32), tl.load(D + head).to(tl.float32)
    dt = load_values(head_at(DT, dt_at, sample, head), start, dt_at[0], s, CHUNK)
    first, last = boundaries(FIRST + tl.cast(sample, tl.int64) * s, start, s, CHUNK, HAS_FIRST)
    sums, total = tl.cumsum(dt * (a * 1.4426950408889634), 0), tl.sum(dt * (a * 1.4426950408889634), 0)

    before = load_state(BEFORE + place * (P * M), P, M, ALL_P, ALL_M)
    after = load_state(AFTER + place * (P * M), P, M, ALL_P, ALL_M)
    of_state = decay_of_chunk(total, last, start, HAS_FIRST)
    of_state *= tl.sum(tl.sum(before.to(tl.float32) * after.to(tl.float32), 1), 0)
    dy = load_rows(head_at(DY, dy_at, sample, head), start, dy_at[0], s, CHUNK, P, ALL_P)
    c = load_rows(head_at(C, c_at, sample, group), start, c_at[0], s, CHUNK, M, ALL_M)
    read = tl.dot(c, tl.trans(before), input_precision=PRECISION)
    dsums = tl.sum(read * dy.to(tl.float32), 1) * decays_from_start(sums, first, start, HAS_FIRST)

    x = load_rows(head_at(X, x_at, sample, head), start, x_at[0], s, CHUNK, P, ALL_P)
    tl.store(DD + place, tl.sum(tl.sum(x.to(tl.float32) * dy.to(tl.float32), 1), 0))
    b = load_rows(head_at(B, b_at, sample, group), start, b_at[0], s, CHUNK, M, ALL_M)
    scores = tl.dot(c, tl.trans(b), input_precision=PRECISION)
    scores *= decays_between(sums, first, start, CHUNK, HAS_FIRST)
    du = tl.dot(b, tl.trans(after), input_precision=PRECISION)
    du *= decays_to_end(sums, total, last, start, CHUNK, HAS_FIRST)[:, None]
    at_end = tl.sum(du * x.to(tl.float32), 1) * dt
    du = tl.dot(tl.trans(scores.to(x.dtype)), dy, du, input_precision=PRECISION)
    ddt = tl.sum(du * x.to(tl.float32), 1)
    dx = du * dt[:, None] + skip * dy.to(tl.float32)
    store_rows(head_at(DX, dx_at, sample, head), dx, start, dx_at[0], s, CHUNK, P, ALL_P)
    scores *= tl.dot(dy, tl.trans(x), input_precision=PRECISION) * dt[None, :]
    dsums += tl.sum(scores, 1) - tl.sum(scores, 0)
    da = decay_gradient(dsums, at_end, of_state)
    store_values(DDT + (tl.cast(sample, tl.int64) * n + head) * s, ddt + a * da, start, 1, s, CHUNK)
    tl.store(DA + place, tl.sum(dt * da, 0))


@_kernel
def group_gradients(
    DY, X, B, C, DT, A, FIRST, BEFORE, AFTER, DB, DC, dy_at, x_at, b_at, c_at, dt_at, db_at, dc_at, s, n, heads_per_group,
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
        place = ((tl.cast(sample, tl.int64) * tl.num_programs(1) + chunk) * n + head) * (P * M)
        x = load_rows(head_at(X, x_at, sample, head), start, x_at[0], s, CHUNK, P, ALL_P)
        dy = load_rows(head_at(DY, dy_at, sample, head), start, dy_at[0], s, CHUNK, P, ALL_P)
        before = load_block(BEFORE + place + column, 0, M, P, width, ALL_P, BLOCK)
        after = load_block(AFTER + place + column, 0, M, P, width, ALL_P, BLOCK)
        dt = load_values(head_at(DT, dt_at, sample, head), start, dt_at[0], s, CHUNK)
        log_decay = tl.load(A + head).to(tl.float32) * 1.4426950408889634
        sums, total = tl.cumsum(dt * log_decay, 0), tl.sum(dt * log_decay, 0)
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
