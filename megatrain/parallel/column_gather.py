"""Gather of the output of a column-parallel layer: a rank gets all columns of the rows that it holds between layers.

without sp   all-gather     [s, b, h/tp] -> [s, b, h]       backward: this rank's columns of the gradient
with sp      all-to-all     [s, b, h/tp] -> [s/tp, b, h]    backward: the inverse all-to-all
"""

from __future__ import annotations

from torch import Tensor

from megatrain.parallel.collectives import all_gather, exchange
from megatrain.parallel.grid import RankGroup
from megatrain.parallel.tensor_parallel import TensorParallel, conjugate


def gather_columns(x: Tensor, tp: TensorParallel) -> Tensor:
    """Gather the columns of x [s, b, h/tp]: [s/tp, b, h] with sp, else [s, b, h]."""
    if tp.sequence_parallel:
        return conjugate(x, tp.group, _columns_of_rows, _rows_of_columns)
    return conjugate(x, tp.group, _all_columns, _local_columns)


def _columns_of_rows(x: Tensor, group: RankGroup) -> Tensor:
    return _joined(exchange(x, group), group)


def _rows_of_columns(dy: Tensor, group: RankGroup) -> Tensor:
    return exchange(_split(dy, group).flatten(0, 1), group)


def _all_columns(x: Tensor, group: RankGroup) -> Tensor:
    return _joined(all_gather(x, group), group)


def _local_columns(dy: Tensor, group: RankGroup) -> Tensor:
    return _split(dy, group)[group.rank]


def _joined(parts: Tensor, group: RankGroup) -> Tensor:
    """[tp * rows, b, h/tp] -> [rows, b, h]."""
    columns: Tensor = parts.unflatten(0, (group.size, -1))
    return columns.movedim(0, 2).flatten(2)


def _split(x: Tensor, group: RankGroup) -> Tensor:
    """[rows, b, h] -> [tp, rows, b, h/tp]."""
    columns: Tensor = x.unflatten(2, (group.size, -1))
    return columns.movedim(2, 0)
