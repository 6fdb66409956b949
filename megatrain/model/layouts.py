"""Layouts of the usual weights: how each kind is cut over tensor ranks.

columns  [o, h] by rows of the weight      several tensors fused into one are cut one by one, then stacked
rows     [h, i] by columns of the weight
vocab    [v, h] by rows, padded; the rows of padding belong to no piece
norm     [h] whole on every rank; so are the biases of rows
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from megatrain.parallel.layout import Init, ParamLayout, Piece
from megatrain.parallel.tensor import TensorParallel


@dataclass(frozen=True)
class Weights:
    """What a linear layer or a norm is made of."""

    weight: ParamLayout
    bias: ParamLayout | None = None


def columns_layout(
    tensors: Sequence[tuple[str, int]], num_inputs: int, init: Init, tp: TensorParallel
) -> ParamLayout:
    """Column-parallel weight of one or several (canonical name, number of outputs)."""
    pieces: list[Piece] = []
    row = 0
    for name, num_outputs in tensors:
        rows = num_outputs // tp.size
        box = ((tp.rank * rows, (tp.rank + 1) * rows), (0, num_inputs))
        pieces.append(Piece(name, (num_outputs, num_inputs), box, row))
        row += rows
    return ParamLayout(shape=(row, num_inputs), pieces=tuple(pieces), init=init)


def rows_layout(name: str, num_outputs: int, num_inputs: int, init: Init, tp: TensorParallel) -> ParamLayout:
    """Row-parallel weight."""
    columns = num_inputs // tp.size
    box = ((0, num_outputs), (tp.rank * columns, (tp.rank + 1) * columns))
    piece = Piece(name, (num_outputs, num_inputs), box)
    return ParamLayout(shape=(num_outputs, columns), pieces=(piece,), init=init)


def columns_bias_layout(
    tensors: Sequence[tuple[str, int]], tp: TensorParallel, init: Init | None = None
) -> ParamLayout:
    """What belongs to the outputs of a column-parallel layer, one number each."""
    pieces: list[Piece] = []
    row = 0
    for name, num_outputs in tensors:
        rows = num_outputs // tp.size
        pieces.append(Piece(name, (num_outputs,), ((tp.rank * rows, (tp.rank + 1) * rows),), row))
        row += rows
    return ParamLayout(shape=(row,), pieces=tuple(pieces), init=init or Init(), decays=False)


def stream_layout(name: str, size: int, init: Init, tp: TensorParallel) -> ParamLayout:
    """A number for each channel of the residual stream: the gain or bias of a norm, the bias of a row-parallel layer."""
    return ParamLayout(
        shape=(size,),
        pieces=(Piece(name, (size,), ((0, size),)),),
        init=init,
        copies=(tp.group.name,),
        grad_sum_group=tp.norm_grad_sum,
        decays=False,
    )


def heads_layout(name: str, size: int, init: Init, tp: TensorParallel) -> ParamLayout:
    """A number for each channel of a head: the ranks hold copies, and each sees its own heads."""
    return ParamLayout(
        shape=(size,),
        pieces=(Piece(name, (size,), ((0, size),)),),
        init=init,
        copies=(tp.group.name,),
        grad_sum_group=tp.group.name if tp.size > 1 else None,
        decays=False,
    )


def positions_layout(
    name: str, num_positions: int, num_columns: int, init: Init, tp: TensorParallel
) -> ParamLayout:
    """Table with a row for each place in the sequence."""
    shape = (num_positions, num_columns)
    return ParamLayout(
        shape=shape,
        pieces=(Piece(name, shape, tuple((0, size) for size in shape)),),
        init=init,
        copies=(tp.group.name,),
        grad_sum_group=tp.norm_grad_sum,
    )


def vocab_layout(
    name: str,
    vocab_size: int,
    padded_vocab_size: int,
    num_columns: int,
    init: Init,
    tp: TensorParallel,
    *,
    is_shared: bool,
) -> ParamLayout:
    """Table with a row for each id. `is_shared`: the first and the last stage hold a copy each."""
    rows = padded_vocab_size // tp.size
    first = tp.rank * rows
    stop = min(first + rows, vocab_size)
    pieces = (
        (Piece(name, (vocab_size, num_columns), ((first, stop), (0, num_columns))),) if first < stop else ()
    )
    return ParamLayout(
        shape=(rows, num_columns),
        pieces=pieces,
        init=init,
        copies=("embedding",) if is_shared else (),
        grad_sum_group="embedding" if is_shared else None,
        is_embedding=True,
    )
