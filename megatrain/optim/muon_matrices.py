"""Whole matrices out of flat shards: who holds which part of each, who works on it, and in which order.

    shards of ranks 0 .. n     boxes of q, k, v, gate, up, ...            on every rank the same list, gathered once
    matrices                   boxes joined by name                       each with one owner, costs spread evenly
    rounds                     at most one matrix of each owner a round   so that memory for one at a time is enough

Nothing here moves a tensor, but for the list itself.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch

from megatrain.parallel.buffers import Shard
from megatrain.parallel.collectives import gather_json
from megatrain.parallel.grid import RankGrid, RankGroup
from megatrain.parallel.layout import Box, ParamLayout, Piece, box_shape
from megatrain.parallel.rank_lists import Family


@dataclass(frozen=True)
class Matrix:
    """One or several canonical tensors, stacked by rows."""

    name: str
    shape: tuple[int, int]

    @property
    def cost(self) -> int:
        """Of its products, up to a factor."""
        return math.prod(self.shape) * min(self.shape)


@dataclass(frozen=True)
class Part:
    """A box of a matrix that a rank holds."""

    matrix: Matrix
    box: Box
    is_sent: bool
    """False: another rank sends its copy."""

    @property
    def numel(self) -> int:
        return math.prod(box_shape(self.box))


@dataclass(frozen=True)
class OwnPart(Part):
    """A part that this rank holds, and where: `place` in the shard of that number."""

    shard: int
    place: slice


@dataclass(frozen=True)
class Round:
    """What moves in one round, seen from one rank; all lists have an entry for each rank of the group."""

    matrix: Matrix | None
    """That this rank works on."""
    held: list[list[OwnPart]]
    """This rank's parts of what each rank works on."""
    wanted: list[list[Part]]
    """Each rank's parts of what this rank works on."""


def own_parts(
    shards: Sequence[Shard], grid: RankGrid, family: Family, *, splits_qkv: bool
) -> Iterator[OwnPart]:
    """This rank's parts of a family's matrices, in the order of the shards."""
    for number, shard in enumerate(shards):
        if shard.bucket.family != family:
            continue
        for placed, box, place in shard.owned():
            layout = placed.entry.layout
            if not layout.group.is_matrix:
                continue
            is_alone = layout.is_qkv and splits_qkv
            matrix, row = _matrix_of(box.piece, layout, is_alone=is_alone)
            (start, stop), *rest = box.box
            moved = ((start + row, stop + row), *rest)
            yield OwnPart(matrix, moved, grid.is_first_of(box.piece.copies), number, place)


def plan_rounds(parts: Sequence[OwnPart], group: RankGroup, device: torch.device) -> list[Round]:
    """The rounds of this rank; called by all ranks of the group, which get equally many."""
    reports = gather_json([(p.matrix.name, p.matrix.shape, p.box, p.is_sent) for p in parts], group, device)
    of_ranks = [
        [
            Part(Matrix(name, (shape[0], shape[1])), tuple((start, stop) for start, stop in box), is_sent)
            for name, shape, box, is_sent in report
        ]
        for report in reports
    ]
    owned = assign({part.matrix for report in of_ranks for part in report}, group.size)
    rounds = []
    for number in range(max(map(len, owned))):
        at_work = [matrices[number] if number < len(matrices) else None for matrices in owned]
        mine = at_work[group.rank]
        rounds.append(
            Round(
                mine,
                [[p for p in parts if p.matrix == matrix] for matrix in at_work],
                [[p for p in report if p.matrix == mine] for report in of_ranks],
            )
        )
    return rounds


def assign(matrices: set[Matrix], num_ranks: int) -> list[list[Matrix]]:
    """Each rank's matrices: the dearest first, always to the rank with the least to do."""
    loads = [(0, rank) for rank in range(num_ranks)]
    owned: list[list[Matrix]] = [[] for _ in range(num_ranks)]
    for matrix in sorted(matrices, key=lambda matrix: (-matrix.cost, matrix.name)):
        load, rank = heapq.heappop(loads)
        owned[rank].append(matrix)
        heapq.heappush(loads, (load + matrix.cost, rank))
    return owned


def _matrix_of(piece: Piece, layout: ParamLayout, *, is_alone: bool) -> tuple[Matrix, int]:
    """The matrix that a piece is part of, and the row at which its tensor begins there."""
    size = 1 if is_alone else len(layout.pieces) // layout.num_matrices
    first = layout.pieces.index(piece) // size * size
    pieces = layout.pieces[first : first + size]
    before = pieces[: pieces.index(piece)]
    rows = sum(other.shape[0] for other in pieces)
    return Matrix("+".join(other.name for other in pieces), (rows, piece.shape[1])), sum(
        other.shape[0] for other in before
    )
