"""`kernels.moe.permute`: sort by expert, gather rows, and sum gathered rows.

Sort: tiles of assignments count the assignments per expert, from which each tile derives the first row of its own.

    tile 0: 2 0 1    tile 1: 0 2 1      ->     rows of expert 0: tile 0, then tile 1;  of expert 1: ...
"""

from __future__ import annotations

import torch
from torch import Tensor

from megatrain.kernels.fused.launching import cdiv, jit, launch, power_of_two, tl

MAX_EXPERTS = 2048
"""Upper bound of the experts that this kernel sorts."""
_COLUMNS = 1024
"""Columns per program."""
_TILES = 128
"""Maximum programs that sort: each reads the counts of all."""
_PAIRS = 8192
"""(assignment, expert) pairs that a program compares at a time."""


def sort_by_expert(
    experts: Tensor,
    kept: Tensor | None,
    *,
    num_experts: int,
    num_rows: int,
    first_expert: int,
    rows_per_expert: int | None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return rows, assignments and ends of a `kernels.moe.permute.Permutation`."""
    experts, device = experts.contiguous(), experts.device
    rows = torch.empty_like(experts)
    assignments = torch.full((num_rows,), -1, dtype=torch.int64, device=device)
    ends = torch.empty(num_experts, dtype=torch.int32, device=device)
    width = power_of_two(num_experts)
    at_once = min(max(_PAIRS // width, 16), 128)
    num_assignments = experts.numel()
    rounds = max(cdiv(num_assignments, _TILES * at_once), 1)
    tiles = max(cdiv(num_assignments, rounds * at_once), 1)
    counts = torch.empty(tiles, width, dtype=torch.int32, device=device)
    inputs = (experts, experts if kept is None else kept.contiguous(), counts)
    kind = {"HAS_KEPT": kept is not None, "EXPERTS": num_experts, "WIDTH": width, "AT_ONCE": at_once}
    launch(_count_assignments, (tiles,), *inputs, num_assignments, first_expert, rounds, **kind)
    launch(
        _place_assignments, (tiles,), *inputs, rows, assignments, ends, num_assignments, first_expert, rounds, tiles, rows_per_expert or 0,
        **kind, HAS_ROWS_PER_EXPERT=rows_per_expert is not None,
    )  # fmt: skip
    return rows, assignments, ends


def gather_rows(x: Tensor, index: Tensor, per_row: int = 1) -> Tensor:
    """Implement `kernels.moe.permute.gather_rows_reference`, for an index divided by `per_row`."""
    return gather_sum(x, index[:, None], per_row)


def gather_sum(x: Tensor, index: Tensor, per_row: int = 1) -> Tensor:
    """Implement `kernels.moe.permute.gather_sum_reference`, for an index divided by `per_row`."""
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


def gather_values(x: Tensor, index: Tensor) -> Tensor:
    """Gather values of x, 0 for index -1, in the shape of the index."""
    x, index = x.contiguous(), index.contiguous()
    out = torch.empty(index.shape, dtype=x.dtype, device=x.device)
    launch(_gather_values, (cdiv(index.numel(), _COLUMNS),), x, index, out, index.numel(), BLOCK=_COLUMNS)
    return out


@jit
def _local_expert(
    EXPERTS_OF, KEPT, assignment, num_assignments, first_expert, HAS_KEPT: tl.constexpr, EXPERTS: tl.constexpr
):
    """Return each assignment's expert counted from `first_expert`; -1 if it gets no row."""
    inside = assignment < num_assignments
    expert = tl.load(EXPERTS_OF + assignment, mask=inside, other=-1) - first_expert
    inside = inside & (expert >= 0) & (expert < EXPERTS)
    if HAS_KEPT:
        inside = inside & (tl.load(KEPT + assignment, mask=inside, other=0) != 0)
    return tl.where(inside, expert, -1).to(tl.int32)


def _count(
    EXPERTS_OF, KEPT, COUNTS, num_assignments, first_expert, rounds,
    HAS_KEPT: tl.constexpr, EXPERTS: tl.constexpr, WIDTH: tl.constexpr, AT_ONCE: tl.constexpr,
):  # fmt: skip
    tile = tl.program_id(0)
    column = tl.arange(0, WIDTH)
    total = tl.zeros([WIDTH], dtype=tl.int32)
    for number in range(rounds):
        assignment = (tile * rounds + number) * AT_ONCE + tl.arange(0, AT_ONCE)
        expert = _local_expert(EXPERTS_OF, KEPT, assignment, num_assignments, first_expert, HAS_KEPT, EXPERTS)
        total += tl.sum((expert[:, None] == column[None, :]).to(tl.int32), axis=0)
    tl.store(COUNTS + tile * WIDTH + column, total)


def _place(
    EXPERTS_OF, KEPT, COUNTS, ROWS, ASSIGNMENTS, ENDS, num_assignments, first_expert, rounds, tiles, rows_per_expert,
    HAS_KEPT: tl.constexpr, EXPERTS: tl.constexpr, WIDTH: tl.constexpr, AT_ONCE: tl.constexpr,
    HAS_ROWS_PER_EXPERT: tl.constexpr,
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
    end = (column + 1) * rows_per_expert if HAS_ROWS_PER_EXPERT else tl.cumsum(total, axis=0)
    next_row += end - (rows_per_expert if HAS_ROWS_PER_EXPERT else total)
    tl.store(ENDS + column, end, mask=column < tl.where(tile == 0, EXPERTS, 0))
    for number in range(rounds):
        assignment = (tile * rounds + number) * AT_ONCE + tl.arange(0, AT_ONCE)
        expert = _local_expert(EXPERTS_OF, KEPT, assignment, num_assignments, first_expert, HAS_KEPT, EXPERTS)
        is_to = (expert[:, None] == column[None, :]).to(tl.int32)
        row = tl.sum(is_to * (next_row[None, :] + tl.cumsum(is_to, axis=0) - 1), axis=1)
        row = tl.where(expert < 0, -1, row)
        tl.store(ROWS + assignment, row.to(tl.int64), mask=assignment < num_assignments)
        tl.store(ASSIGNMENTS + row, assignment.to(tl.int64), mask=row >= 0)
        next_row += tl.sum(is_to, axis=0)


_count_assignments = jit(_count, ("num_assignments", "first_expert", "rounds"))
_place_assignments = jit(_place, ("num_assignments", "first_expert", "rounds", "tiles", "rows_per_expert"))


def _gather(X, INDEX, OUT, length, BLOCK: tl.constexpr):
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    source = tl.load(INDEX + at, mask=at < length, other=-1)
    tl.store(OUT + at, tl.load(X + source, mask=source >= 0, other=0), mask=at < length)


_gather_values = jit(_gather, ("length",))


@jit
def _sum_rows(X, INDEX, OUT, columns, TERMS: tl.constexpr, PER_ROW: tl.constexpr, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    total = tl.zeros([BLOCK], dtype=tl.float32)
    for term in tl.range(0, TERMS, loop_unroll_factor=8):  # unrolled, so that the loads are concurrent
        source = tl.load(INDEX + row * TERMS + term)
        width = tl.where(source < 0, 0, columns)
        total += tl.load(X + source // PER_ROW * columns + column, mask=column < width, other=0).to(
            tl.float32
        )
    tl.store(OUT + row * columns + column, total.to(OUT.dtype.element_ty), mask=column < columns)
