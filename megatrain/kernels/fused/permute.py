"""The order of rows by expert, rows read by number and sums of them, as `kernels.permute` needs them.

Order: tiles of visits count what goes to each expert, then each tile knows where its visits begin.

    tile 0: 2 0 1    tile 1: 0 2 1      ->     rows of expert 0: tile 0, then tile 1;  of expert 1: ...
"""

from __future__ import annotations

import torch
from torch import Tensor

from megatrain.kernels.fused.launching import cdiv, jit, launch, power_of_two, tl

MOST_EXPERTS = 2048
"""Whose visits are ordered here."""
_COLUMNS = 1024
"""Columns that a program moves."""
_TILES = 128
"""Programs that order visits, at most: each reads what all have counted."""
_PAIRS = 8192
"""Of a visit and an expert, that a program compares at a time."""


def sort_by_expert(
    experts: Tensor,
    kept: Tensor | None,
    *,
    num_experts: int,
    num_rows: int,
    first: int,
    rows_per_expert: int | None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Places, visits and ends as `kernels.permute.sort_by_expert` has them."""
    experts, device = experts.contiguous(), experts.device
    places = torch.empty_like(experts)
    visits = torch.full((num_rows,), -1, dtype=torch.int64, device=device)
    ends = torch.empty(num_experts, dtype=torch.int32, device=device)
    width = power_of_two(num_experts)
    at_once = min(max(_PAIRS // width, 16), 128)
    num_visits = experts.numel()
    rounds = max(cdiv(num_visits, _TILES * at_once), 1)
    tiles = max(cdiv(num_visits, rounds * at_once), 1)
    counts = torch.empty(tiles, width, dtype=torch.int32, device=device)
    given = (experts, experts if kept is None else kept.contiguous(), counts)
    kind = {"HAS_KEPT": kept is not None, "EXPERTS": num_experts, "WIDTH": width, "AT_ONCE": at_once}
    launch(_count_visits, (tiles,), *given, num_visits, first, rounds, **kind)
    launch(
        _place_visits, (tiles,), *given, places, visits, ends, num_visits, first, rounds, tiles, rows_per_expert or 0,
        **kind, HAS_ROWS_EACH=rows_per_expert is not None,
    )  # fmt: skip
    return places, visits, ends


def rows_at(x: Tensor, index: Tensor, per_row: int = 1) -> Tensor:
    """As `kernels.permute.gather_rows_reference`, of the numbers divided by `per_row`."""
    return sums_at(x, index[:, None], per_row)


def sums_at(x: Tensor, index: Tensor, per_row: int = 1) -> Tensor:
    """As `kernels.permute.gather_sum_reference`, likewise."""
    x, index = x.contiguous(), index.contiguous()
    num_rows, terms = index.shape
    columns = x.shape[1]
    out = torch.empty(num_rows, columns, dtype=x.dtype, device=x.device)
    block = min(power_of_two(columns), _COLUMNS)
    launch(
        _sum_rows, (num_rows, cdiv(columns, block)),
        x, index, out, columns, TERMS=terms, PER_ROW=per_row, BLOCK=block,
    )  # fmt: skip
    return out


def numbers_at(x: Tensor, index: Tensor) -> Tensor:
    """Numbers at these places of x, 0 for -1: in the shape of the index."""
    x, index = x.contiguous(), index.contiguous()
    out = torch.empty(index.shape, dtype=x.dtype, device=x.device)
    launch(_read_numbers, (cdiv(index.numel(), _COLUMNS),), x, index, out, index.numel(), BLOCK=_COLUMNS)
    return out


@jit
def _numbers(EXPERTS_OF, KEPT, visit, num_visits, first, HAS_KEPT: tl.constexpr, EXPERTS: tl.constexpr):
    """Number of each visit's expert on this rank, -1 where there is none."""
    inside = visit < num_visits
    expert = tl.load(EXPERTS_OF + visit, mask=inside, other=-1) - first
    inside = inside & (expert >= 0) & (expert < EXPERTS)
    if HAS_KEPT:
        inside = inside & (tl.load(KEPT + visit, mask=inside, other=0) != 0)
    return tl.where(inside, expert, -1).to(tl.int32)


def _count(
    EXPERTS_OF, KEPT, COUNTS, num_visits, first, rounds,
    HAS_KEPT: tl.constexpr, EXPERTS: tl.constexpr, WIDTH: tl.constexpr, AT_ONCE: tl.constexpr,
):  # fmt: skip
    tile = tl.program_id(0)
    column = tl.arange(0, WIDTH)
    total = tl.zeros([WIDTH], dtype=tl.int32)
    for number in range(rounds):
        visit = (tile * rounds + number) * AT_ONCE + tl.arange(0, AT_ONCE)
        expert = _numbers(EXPERTS_OF, KEPT, visit, num_visits, first, HAS_KEPT, EXPERTS)
        total += tl.sum((expert[:, None] == column[None, :]).to(tl.int32), axis=0)
    tl.store(COUNTS + tile * WIDTH + column, total)


def _place(
    EXPERTS_OF, KEPT, COUNTS, PLACES, VISITS, ENDS, num_visits, first, rounds, tiles, rows_per_expert,
    HAS_KEPT: tl.constexpr, EXPERTS: tl.constexpr, WIDTH: tl.constexpr, AT_ONCE: tl.constexpr,
    HAS_ROWS_EACH: tl.constexpr,
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
    end = (column + 1) * rows_per_expert if HAS_ROWS_EACH else tl.cumsum(total, axis=0)
    next_row += end - (rows_per_expert if HAS_ROWS_EACH else total)
    tl.store(ENDS + column, end, mask=column < tl.where(tile == 0, EXPERTS, 0))
    for number in range(rounds):
        visit = (tile * rounds + number) * AT_ONCE + tl.arange(0, AT_ONCE)
        expert = _numbers(EXPERTS_OF, KEPT, visit, num_visits, first, HAS_KEPT, EXPERTS)
        goes = (expert[:, None] == column[None, :]).to(tl.int32)
        row = tl.sum(goes * (next_row[None, :] + tl.cumsum(goes, axis=0) - 1), axis=1)
        row = tl.where(expert < 0, -1, row)
        tl.store(PLACES + visit, row.to(tl.int64), mask=visit < num_visits)
        tl.store(VISITS + row, visit.to(tl.int64), mask=row >= 0)
        next_row += tl.sum(goes, axis=0)


_count_visits = jit(_count, ("num_visits", "first", "rounds"))
_place_visits = jit(_place, ("num_visits", "first", "rounds", "tiles", "rows_per_expert"))


def _read(X, INDEX, OUT, length, BLOCK: tl.constexpr):
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    source = tl.load(INDEX + at, mask=at < length, other=-1)
    tl.store(OUT + at, tl.load(X + source, mask=source >= 0, other=0), mask=at < length)


_read_numbers = jit(_read, ("length",))


@jit
def _sum_rows(X, INDEX, OUT, columns, TERMS: tl.constexpr, PER_ROW: tl.constexpr, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    place = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    total = tl.zeros([BLOCK], dtype=tl.float32)
    for term in tl.range(0, TERMS, loop_unroll_factor=8):  # whose loads do not wait for one another
        source = tl.load(INDEX + row * TERMS + term)
        width = tl.where(source < 0, 0, columns)
        total += tl.load(X + source // PER_ROW * columns + place, mask=place < width, other=0).to(tl.float32)
    tl.store(OUT + row * columns + place, total.to(OUT.dtype.element_ty), mask=place < columns)
