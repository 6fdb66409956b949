"""`kernels.moe.permute`: sort by expert, gather rows, and sum gathered rows.

Sort: tiles of items count the items per column, from which each tile derives the first row of its own.

    tile 0: 2 0 1    tile 1: 0 2 1      ->     rows of column 0: tile 0, then tile 1;  of column 1: ...
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from megatrain.kernels.fused.launching import cdiv, jit, launch, power_of_two, tl

MAX_EXPERTS = 2048
"""Upper bound of the columns of a sort."""
_COLUMNS = 1024
"""Columns per program."""
_TILES = 128
"""Maximum programs that sort: each reads the counts of all."""
_PROGRAMS = 8192
"""Maximum programs that gather rows in groups: each gathers several, so that rows after the last end cost nothing."""
_PAIRS = 8192
"""(item, column) pairs that a program compares at a time."""


class Columns(NamedTuple):
    """The rule of a sort: it gives each item a column, or none.

    EXPERT    items are assignments            column: expert - first
    RANK      items are (token, rank) pairs    column: the rank, if the token has one of its `size` experts; `first`: of rank 0
    SOURCE    items are tokens                 column: the source of the token, if it has one of `size` experts from `first`
    """

    kind: int
    number: int
    first: int = 0
    size: int = 0
    tokens_per_source: int = 1


EXPERT, RANK, SOURCE = range(3)


def sort_items(
    experts: Tensor,
    columns: Columns,
    *,
    num_rows: int,
    kept: Tensor | None = None,
    rows_per_column: int | None = None,
    token_rows: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return the parts of a `kernels.moe.permute.Permutation` of the items with a column.

    Args:
        experts: [t, k].
        kept: bool [t, k], for EXPERT.
        token_rows: int64 [t], for EXPERT and RANK: the items are those of rows that hold the tokens, numbered row by row; -1: none.
    """
    num_tokens, top_k = experts.shape
    experts, device = experts.contiguous(), experts.device
    per_token = {EXPERT: top_k, RANK: columns.number, SOURCE: 1}[columns.kind]
    num_items = num_tokens * per_token
    has_holes = rows_per_column is not None
    rows = _indices((num_tokens, per_token), device, filled=token_rows is not None)
    assignments = _indices((num_rows,), device, filled=has_holes)
    ends = torch.empty(columns.number + 1, dtype=torch.int32, device=device)  # and the number of items
    width = power_of_two(columns.number)
    at_once = min(max(_PAIRS // width, 16), 128)
    rounds = max(cdiv(num_items, _TILES * at_once), 1)
    tiles = max(cdiv(num_items, rounds * at_once), 1)
    counts = torch.empty(tiles, width, dtype=torch.int32, device=device)
    inputs = (experts, experts if kept is None else kept.contiguous(), counts)
    numbers = (num_items, rounds, *columns[2:])
    kind = {
        "HAS_KEPT": kept is not None, "KIND": columns.kind, "COLUMNS": columns.number, "TOP_K": top_k,
        "WIDTH": width, "AT_ONCE": at_once,
    }  # fmt: skip
    launch(_count_items, (tiles,), *inputs, *numbers, **kind)
    launch(
        _place_items, (tiles,), *inputs, rows, assignments, ends, rows if token_rows is None else token_rows, *numbers,
        tiles, num_rows, rows_per_column or 0, **kind, HAS_HOLES=has_holes, HAS_TOKEN_ROWS=token_rows is not None,
    )  # fmt: skip
    return rows, assignments, ends[:-1], ends[-1]


def _indices(shape: tuple[int, ...], device: torch.device, *, filled: bool) -> Tensor:
    """Return memory for indices, filled with -1 where a kernel does not write all."""
    out = torch.empty(shape, dtype=torch.int64, device=device)
    return out.fill_(-1) if filled else out


def gather_rows(x: Tensor, index: Tensor, per_row: int = 1, ends: Tensor | None = None) -> Tensor:
    """Implement `kernels.moe.permute.gather_rows_reference`, for an index divided by `per_row`.

    Bytes are moved in pairs, as many at a time as of values in 16 bits.

    Args:
        ends: int32 [e]; rows after the last end are not written. None: all are.
    """
    if x.dtype is torch.uint8 and x.shape[1] % 2 == 0:
        return gather_sum(x.contiguous().view(torch.int16), index[:, None], per_row, ends).view(torch.uint8)
    return gather_sum(x, index[:, None], per_row, ends)


def gather_sum(x: Tensor, index: Tensor, per_row: int = 1, ends: Tensor | None = None) -> Tensor:
    """Implement `kernels.moe.permute.unpermute_rows`, for an index divided by `per_row`; `ends`: see `gather_rows`."""
    x, index = x.contiguous(), index.contiguous()
    num_rows, terms = index.shape
    columns = x.shape[1]
    out = torch.empty(num_rows, columns, dtype=x.dtype, device=x.device)
    block = min(power_of_two(columns), _COLUMNS)
    programs, groups = (num_rows, 0) if ends is None else (min(num_rows, _PROGRAMS), len(ends))
    launch(
        _sum_rows, (programs, cdiv(columns, block)),
        x, index, out, index if ends is None else ends, num_rows, columns,
        TERMS=terms, PER_ROW=per_row, NUM_GROUPS=groups, BLOCK=block,
    )  # fmt: skip
    return out


def gather_values(x: Tensor, index: Tensor) -> Tensor:
    """Gather values of x, 0 for index -1, in the shape of the index."""
    x, index = x.contiguous(), index.contiguous()
    out = torch.empty(index.shape, dtype=x.dtype, device=x.device)
    launch(_gather_values, (cdiv(index.numel(), _COLUMNS),), x, index, out, index.numel(), BLOCK=_COLUMNS)
    return out


@jit
def _column_of(
    EXPERTS_OF, KEPT, item, num_items, first, size, tokens_per_source,
    HAS_KEPT: tl.constexpr, KIND: tl.constexpr, COLUMNS: tl.constexpr, TOP_K: tl.constexpr,
):  # fmt: skip
    """Return each item's column; -1 if it has none."""
    inside = item < num_items
    if KIND == 0:
        column = tl.load(EXPERTS_OF + item, mask=inside, other=-1) - first
        inside = inside & (column >= 0) & (column < COLUMNS)
        if HAS_KEPT:
            inside = inside & (tl.load(KEPT + item, mask=inside, other=0) != 0)
    else:
        token = item // COLUMNS if KIND == 1 else item
        column = item % COLUMNS if KIND == 1 else item // tokens_per_source
        start = first + (column * size if KIND == 1 else column * 0)
        has_one = item < 0
        for slot in tl.static_range(TOP_K):
            expert = tl.load(EXPERTS_OF + token * TOP_K + slot, mask=inside, other=-1)
            has_one = has_one | ((expert >= start) & (expert < start + size))
        inside = inside & has_one
    return tl.where(inside, column, -1).to(tl.int32)


def _count(
    EXPERTS_OF, KEPT, COUNTS, num_items, rounds, first, size, tokens_per_source,
    HAS_KEPT: tl.constexpr, KIND: tl.constexpr, COLUMNS: tl.constexpr, TOP_K: tl.constexpr, WIDTH: tl.constexpr,
    AT_ONCE: tl.constexpr,
):  # fmt: skip
    tile = tl.program_id(0)
    column = tl.arange(0, WIDTH)
    total = tl.zeros([WIDTH], dtype=tl.int32)
    for number in range(rounds):
        item = (tile * rounds + number) * AT_ONCE + tl.arange(0, AT_ONCE)
        found = _column_of(
            EXPERTS_OF, KEPT, item, num_items, first, size, tokens_per_source, HAS_KEPT, KIND, COLUMNS, TOP_K
        )  # fmt: skip
        total += tl.sum((found[:, None] == column[None, :]).to(tl.int32), axis=0)
    tl.store(COUNTS + tile * WIDTH + column, total)


def _place(
    EXPERTS_OF, KEPT, COUNTS, ROWS, ASSIGNMENTS, ENDS, TOKEN_ROWS, num_items, rounds, first, size, tokens_per_source,
    tiles, num_rows, rows_per_column,
    HAS_KEPT: tl.constexpr, KIND: tl.constexpr, COLUMNS: tl.constexpr, TOP_K: tl.constexpr, WIDTH: tl.constexpr,
    AT_ONCE: tl.constexpr, HAS_HOLES: tl.constexpr, HAS_TOKEN_ROWS: tl.constexpr,
):  # fmt: skip
    tile = tl.program_id(0)
    column = tl.arange(0, WIDTH)
    total = tl.zeros([WIDTH], dtype=tl.int32)
    next_row = tl.zeros([WIDTH], dtype=tl.int32)
    for other in range(0, tiles, AT_ONCE):
        others = (other + tl.arange(0, AT_ONCE))[:, None]
        count = tl.load(COUNTS + others * WIDTH + column[None, :], mask=others < tiles, other=0)
        total += tl.sum(count, axis=0)
        next_row += tl.sum(tl.where(others < tile, count, 0), axis=0)
    end = (column + 1) * rows_per_column if HAS_HOLES else tl.cumsum(total, axis=0)
    next_row += end - (rows_per_column if HAS_HOLES else total)
    tl.store(ENDS + column, tl.minimum(end, num_rows), mask=column < tl.where(tile == 0, COLUMNS, 0))
    tl.store(ENDS + COLUMNS, tl.sum(total, axis=0), mask=tile == 0)
    for number in range(rounds):
        item = (tile * rounds + number) * AT_ONCE + tl.arange(0, AT_ONCE)
        found = _column_of(
            EXPERTS_OF, KEPT, item, num_items, first, size, tokens_per_source, HAS_KEPT, KIND, COLUMNS, TOP_K
        )  # fmt: skip
        is_to = (found[:, None] == column[None, :]).to(tl.int32)
        row = tl.sum(is_to * (next_row[None, :] + tl.cumsum(is_to, axis=0) - 1), axis=1)
        row = tl.where((found < 0) | (row >= num_rows), -1, row)
        inside = item < num_items
        if HAS_TOKEN_ROWS:
            per_token = TOP_K if KIND == 0 else COLUMNS
            token_row = tl.load(TOKEN_ROWS + item // per_token, mask=inside, other=-1)
            inside = inside & (token_row >= 0)
            item = token_row * per_token + item % per_token
        tl.store(ROWS + item, row.to(tl.int64), mask=inside)
        tl.store(ASSIGNMENTS + row, item.to(tl.int64), mask=row >= 0)
        next_row += tl.sum(is_to, axis=0)
    if not HAS_HOLES:  # rows after the last end
        first_unused = tl.sum(total, axis=0) + tile * AT_ONCE
        for start in range(first_unused, num_rows, tiles * AT_ONCE):
            row = start + tl.arange(0, AT_ONCE)
            tl.store(ASSIGNMENTS + row, tl.full([AT_ONCE], -1, tl.int64), mask=row < num_rows)


_NUMBERS = ("num_items", "rounds", "first", "size", "tokens_per_source")
_count_items = jit(_count, _NUMBERS)
_place_items = jit(_place, (*_NUMBERS, "tiles", "num_rows", "rows_per_column"))


def _gather(X, INDEX, OUT, length, BLOCK: tl.constexpr):
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    source = tl.load(INDEX + at, mask=at < length, other=-1)
    tl.store(OUT + at, tl.load(X + source, mask=source >= 0, other=0), mask=at < length)


_gather_values = jit(_gather, ("length",))


def _sum(
    X, INDEX, OUT, ENDS, num_rows, columns,
    TERMS: tl.constexpr, PER_ROW: tl.constexpr, NUM_GROUPS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    stop = tl.load(ENDS + NUM_GROUPS - 1) if NUM_GROUPS > 0 else num_rows
    for row in range(tl.program_id(0).to(tl.int64), stop, tl.num_programs(0)):
        total = tl.zeros([BLOCK], dtype=tl.float32)
        for term in tl.range(0, TERMS, loop_unroll_factor=8):  # unrolled, so that the loads are concurrent
            source = tl.load(INDEX + row * TERMS + term)
            width = tl.where(source < 0, 0, columns)
            total += tl.load(X + source // PER_ROW * columns + column, mask=column < width, other=0).to(
                tl.float32
            )
        tl.store(OUT + row * columns + column, total.to(OUT.dtype.element_ty), mask=column < columns)


_sum_rows = jit(_sum, ("num_rows",))
