"""Whole matrices assembled from flat shards: which rank holds which part, and updates which matrix when.

    shards of ranks 0 .. n     boxes of q, k, v, gate, up, ...           the same list on every rank, gathered once
    matrices                   boxes that belong to one matrix           one owner each, costs balanced
    rounds                     at most one matrix per owner and round    so that memory for one matrix is enough

Only that list is communicated here, no tensors.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch

from megatrain.parallel.buckets import Shard
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
        """FLOPs of its GEMMs, up to a constant factor."""
        return math.prod(self.shape) * min(self.shape)


@dataclass(frozen=True)
class Part:
    """A box of a matrix that a rank holds."""

    matrix: Matrix
    box: Box
    is_sent: bool
    """False: another rank sends its replica of the box."""

    @property
    def numel(self) -> int:
        return math.prod(box_shape(self.box))


@dataclass(frozen=True)
class LocalPart(Part):
    """A part that this rank holds: elements `elements` of shard number `shard`."""

    shard: int
    elements: slice


@dataclass(frozen=True)
class Round:
    """The communication of one round, seen from one rank; each list has an entry per rank of the group."""

    matrix: Matrix | None
    """Matrix that this rank updates."""
    held_parts: list[list[LocalPart]]
    """This rank's parts of each rank's matrix."""
    matrix_parts: list[list[Part]]
    """Each rank's parts of this rank's matrix."""


def local_parts(
    shards: Sequence[Shard], grid: RankGrid, family: Family, *, splits_qkv: bool
) -> Iterator[LocalPart]:
    """Yield this rank's parts of a family's matrices, in the order of the shards."""
    for number, shard in enumerate(shards):
        if shard.bucket.family != family:
            continue
        for param, box, part in shard.owned():
            layout = param.entry.layout
            if not layout.group.is_matrix:
                continue
            is_alone = layout.is_qkv and splits_qkv
            matrix, row = _matrix_of(box.piece, layout, is_alone=is_alone)
            (start, stop), *rest = box.box
            shifted = ((start + row, stop + row), *rest)
            yield LocalPart(matrix, shifted, grid.is_first_of(box.piece.copies), number, part)


def matrices_of(shards: Sequence[Shard], family: Family, *, splits_qkv: bool) -> set[Matrix]:
    """Return all matrices of a family in the buckets of these shards: equal on all ranks that share them."""
    layouts = [
        param.entry.layout
        for shard in shards
        if shard.bucket.family == family
        for param in shard.bucket.params
    ]
    return {
        _matrix_of(piece, layout, is_alone=layout.is_qkv and splits_qkv)[0]
        for layout in layouts
        if layout.group.is_matrix
        for piece in layout.pieces
    }


def plan_rounds(
    parts: Sequence[LocalPart], owned: Sequence[Sequence[Matrix]], group: RankGroup, device: torch.device
) -> list[Round]:
    """Return the rounds of this rank; called by all ranks of the group, which get the same number of rounds.

    Args:
        owned: matrices of each rank of the group.
    """
    reports = gather_json([(p.matrix.name, p.matrix.shape, p.box, p.is_sent) for p in parts], group, device)
    parts_of_ranks = [
        [
            Part(Matrix(name, (shape[0], shape[1])), tuple((start, stop) for start, stop in box), is_sent)
            for name, shape, box, is_sent in report
        ]
        for report in reports
    ]
    held = {part.matrix for report in parts_of_ranks for part in report}
    assert held == {matrix for matrices in owned for matrix in matrices}, "ranks hold other matrices"
    rounds = []
    for number in range(max(map(len, owned))):
        current = [matrices[number] if number < len(matrices) else None for matrices in owned]
        own = current[group.rank]
        rounds.append(
            Round(
                own,
                [[p for p in parts if p.matrix == matrix] for matrix in current],
                [[p for p in report if p.matrix == own] for report in parts_of_ranks],
            )
        )
    return rounds


def assign_matrices(matrices: set[Matrix], num_ranks: int) -> list[list[Matrix]]:
    """Return each rank's matrices: greedily, the most expensive first, each to the rank with the least load."""
    loads = [(0, rank) for rank in range(num_ranks)]
    owned: list[list[Matrix]] = [[] for _ in range(num_ranks)]
    for matrix in sorted(matrices, key=lambda matrix: (-matrix.cost, matrix.name)):
        load, rank = heapq.heappop(loads)
        owned[rank].append(matrix)
        heapq.heappush(loads, (load + matrix.cost, rank))
    return owned


def _matrix_of(piece: Piece, layout: ParamLayout, *, is_alone: bool) -> tuple[Matrix, int]:
    """Return the matrix that a piece belongs to, and the piece's first row in it."""
    size = 1 if is_alone else len(layout.pieces) // layout.num_matrices
    first = layout.pieces.index(piece) // size * size
    pieces = layout.pieces[first : first + size]
    before = pieces[: pieces.index(piece)]
    rows = sum(other.shape[0] for other in pieces)
    return Matrix("+".join(other.name for other in pieces), (rows, piece.shape[1])), sum(
        other.shape[0] for other in before
    )
