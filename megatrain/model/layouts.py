"""Layouts of the usual weights: how each kind is split over tensor ranks.

columns  [o, h] by rows of the weight      tensors fused into one are split one by one, then stacked
                                           with fewer query groups than ranks, consecutive ranks hold copies
rows     [h, i] by columns of the weight
whole    [o, h] replicated
vocab    [v, h] by rows, padded; the rows of padding belong to no piece
norm     [h] replicated, as are the biases of rows
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from megatrain.config.derive.lr_schedule import ParamKind
from megatrain.config.model_spec.norm import NormSpec
from megatrain.parallel.grid import RankGroup
from megatrain.parallel.layout import Init, ParamLayout, Piece
from megatrain.parallel.tensor_parallel import TensorParallel

STEP_SIZES = (1e-3, 1e-1)
"""Bounds of the initial step sizes of states: the softplus of their biases."""


@dataclass(frozen=True)
class LinearLayout:
    """Layouts of the weight and the bias of a linear layer or a norm."""

    weight: ParamLayout
    bias: ParamLayout | None = None


@dataclass(frozen=True)
class Columns:
    """Outputs of a column-parallel layer that belong to one canonical tensor."""

    name: str
    num_outputs: int
    copies: RankGroup | None = None
    """Consecutive tensor ranks that hold the same outputs; None: ranks hold different ones."""


def columns_layout(
    tensors: Sequence[Columns],
    num_inputs: int,
    init: Init,
    tp: TensorParallel,
    *,
    is_qkv: bool = False,
) -> ParamLayout:
    """Return the layout of a column-parallel weight."""
    pieces = _split_columns(tensors, (num_inputs,), tp.group)
    rows = sum(piece.local_shape[0] for piece in pieces)
    return ParamLayout(shape=(rows, num_inputs), pieces=pieces, init=init, is_qkv=is_qkv)


def replicated_layout(
    tensors: Sequence[tuple[str, int]], num_inputs: int, init: Init, tp: TensorParallel
) -> ParamLayout:
    """Return the layout of a weight that all tensor ranks hold whole: canonical tensors with their rows, stacked.

    Under sequence parallelism its gradients are partial sums, each from local tokens.
    """
    pieces: list[Piece] = []
    row = 0
    for name, rows in tensors:
        pieces.append(_replicated(name, (rows, num_inputs), tp, tp.norm_grad_sums, row))
        row += rows
    return ParamLayout(shape=(row, num_inputs), pieces=tuple(pieces), init=init, num_matrices=len(pieces))


def rows_layout(name: str, num_outputs: int, num_inputs: int, init: Init, tp: TensorParallel) -> ParamLayout:
    """Return the layout of a row-parallel weight."""
    piece = _split_rows(name, num_outputs, num_inputs, tp.group)
    return ParamLayout(shape=piece.local_shape, pieces=(piece,), init=init)


def columns_bias_layout(
    tensors: Sequence[Columns], tp: TensorParallel, init: Init | None = None, *, decays: bool = False
) -> ParamLayout:
    """Return the layout of one number per output of a column-parallel layer, such as its bias."""
    pieces = _split_columns(tensors, (), tp.group)
    rows = sum(piece.local_shape[0] for piece in pieces)
    return ParamLayout(shape=(rows,), pieces=pieces, init=init or Init(), decays=decays, kind="vector")


def convolution_layout(tensors: Sequence[Columns], kernel_size: int, tp: TensorParallel) -> ParamLayout:
    """Return the layout of one filter per channel, [channels, taps]: split as the channels; torch's initial values of Conv1d."""
    pieces = _split_columns(tensors, (kernel_size,), tp.group)
    rows, bound = sum(piece.local_shape[0] for piece in pieces), kernel_size**-0.5
    return ParamLayout(
        shape=(rows, kernel_size), pieces=pieces, init=Init(uniform=(-bound, bound)), kind="vector"
    )


def expert_columns_layout(
    experts: Sequence[Sequence[Columns]], num_inputs: int, init: Init, etp: RankGroup
) -> ParamLayout:
    """Return the layout of the first weights of this rank's experts: split over etp, stacked expert by expert."""
    pieces = _split_columns([columns for expert in experts for columns in expert], (num_inputs,), etp)
    rows = sum(piece.local_shape[0] for piece in pieces)
    return _experts_layout((rows, num_inputs), pieces, init, len(experts))


def expert_rows_layout(
    names: Sequence[str], num_outputs: int, num_inputs: int, init: Init, etp: RankGroup
) -> ParamLayout:
    """Return the layout of the last weights of this rank's experts, stacked expert by expert."""
    pieces = tuple(
        _split_rows(name, num_outputs, num_inputs, etp, row=number * num_outputs)
        for number, name in enumerate(names)
    )
    return _experts_layout((len(names) * num_outputs, num_inputs // etp.size), pieces, init, len(names))


def expert_columns_bias_layout(experts: Sequence[Sequence[Columns]], etp: RankGroup) -> ParamLayout:
    """Return the layout of the first biases of this rank's experts: split over etp, stacked expert by expert."""
    pieces = _split_columns([columns for expert in experts for columns in expert], (), etp)
    return _expert_biases_layout(pieces)


def expert_rows_bias_layout(names: Sequence[str], num_outputs: int, etp: RankGroup) -> ParamLayout:
    """Return the layout of the last biases of this rank's experts: replicated over etp; one rank adds them."""
    grad_sum_groups = (etp.name,) if etp.size > 1 else ()
    pieces = tuple(
        Piece(
            name,
            (num_outputs,),
            ((0, num_outputs),),
            number * num_outputs,
            copies=(etp.name,),
            grad_sum_groups=grad_sum_groups,
        )
        for number, name in enumerate(names)
    )
    return _expert_biases_layout(pieces)


def _expert_biases_layout(pieces: tuple[Piece, ...]) -> ParamLayout:
    size = sum(piece.local_shape[0] for piece in pieces)
    return ParamLayout(
        shape=(size,), pieces=pieces, init=Init(), decays=False, kind="vector", family="expert"
    )


def _experts_layout(
    shape: tuple[int, ...], pieces: tuple[Piece, ...], init: Init, num_experts: int
) -> ParamLayout:
    return ParamLayout(shape=shape, pieces=pieces, init=init, family="expert", num_matrices=num_experts)


def _split_rows(name: str, num_outputs: int, num_inputs: int, group: RankGroup, row: int = 0) -> Piece:
    columns = num_inputs // group.size
    box = ((0, num_outputs), (group.rank * columns, (group.rank + 1) * columns))
    return Piece(name, (num_outputs, num_inputs), box, row)


def _split_columns(tensors: Sequence[Columns], inner: tuple[int, ...], group: RankGroup) -> tuple[Piece, ...]:
    """Return this rank's part of each tensor. Ranks with copies have partial gradients, each from its own queries."""
    pieces: list[Piece] = []
    row = 0
    for columns in tensors:
        copies = columns.copies
        num_copies = 1 if copies is None else copies.size
        rows = columns.num_outputs * num_copies // group.size
        first = group.rank // num_copies * rows
        names = () if copies is None or copies.size == 1 else (copies.name,)
        pieces.append(
            Piece(
                columns.name,
                (columns.num_outputs, *inner),
                ((first, first + rows), *((0, size) for size in inner)),
                row,
                copies=names,
                grad_sum_groups=names,
            )
        )
        row += rows
    return tuple(pieces)


def stream_layout(name: str, size: int, init: Init, tp: TensorParallel) -> ParamLayout:
    """Return the layout of one number per channel of the residual stream: gain or bias of a norm, bias of a row-parallel layer."""
    return ParamLayout(
        shape=(size,),
        pieces=(_replicated(name, (size,), tp, tp.norm_grad_sums),),
        init=init,
        decays=False,
        kind="vector",
    )


def norm_weights(name: str, size: int, spec: NormSpec, tp: TensorParallel) -> LinearLayout:
    """Return the layouts of a norm of the residual stream or of a branch's output."""
    return LinearLayout(
        stream_layout(f"{name}.weight", size, unit_gain(spec), tp),
        stream_layout(f"{name}.bias", size, Init(), tp) if spec.has_bias else None,
    )


def unit_gain(spec: NormSpec) -> Init:
    """Return the initial weight of a norm, a gain of 1 as it is stored."""
    return Init(mean=0.0 if spec.is_stored_minus_one else 1.0)


def heads_layout(name: str, size: int, init: Init, tp: TensorParallel, *, decays: bool) -> ParamLayout:
    """Return the layout of one number per channel of a head: replicated; each rank's gradient covers its own heads and is summed over tp."""
    grad_sum_groups = (tp.group.name,) if tp.size > 1 else ()
    return ParamLayout(
        shape=(size,),
        pieces=(_replicated(name, (size,), tp, grad_sum_groups),),
        init=init,
        decays=decays,
        kind="vector",
    )


def table_layout(
    name: str, num_rows: int, num_columns: int, init: Init, tp: TensorParallel, *, is_shared: bool = False
) -> ParamLayout:
    """Return the layout of a table with a row per position or token type, whole on every tensor rank."""
    shape = (num_rows, num_columns)
    piece = _replicated(name, shape, tp, tp.norm_grad_sums)
    if is_shared:
        piece = replace(
            piece,
            copies=(*piece.copies, "embedding"),
            grad_sum_groups=(*piece.grad_sum_groups, "embedding"),
        )
    return ParamLayout(shape=shape, pieces=(piece,), init=init, kind="positions")


def _replicated(
    name: str, shape: tuple[int, ...], tp: TensorParallel, grad_sum_groups: tuple[str, ...], row: int = 0
) -> Piece:
    box = tuple((0, size) for size in shape)
    return Piece(name, shape, box, row, copies=(tp.group.name,), grad_sum_groups=grad_sum_groups)


def vocab_layout(
    name: str,
    vocab_size: int,
    padded_vocab_size: int,
    num_columns: int,
    init: Init,
    tp: TensorParallel,
    *,
    is_shared: bool,
    kind: ParamKind,
) -> ParamLayout:
    """Return the layout of a table with a row per id. `is_shared`: the first and the last stage each hold a copy.

    A rank that has only padding has an empty piece: it takes part in the sums of the copies as the others do.
    """
    rows = padded_vocab_size // tp.size
    first, stop = (min(end, vocab_size) for end in (tp.rank * rows, (tp.rank + 1) * rows))
    piece = Piece(
        name,
        (vocab_size, num_columns),
        ((first, stop), (0, num_columns)),
        copies=("embedding",) if is_shared else (),
        grad_sum_groups=("embedding",) if is_shared else (),
    )
    return ParamLayout(shape=(rows, num_columns), pieces=(piece,), init=init, kind=kind)


def vocab_bias_layout(name: str, vocab_size: int, padded_vocab_size: int, tp: TensorParallel) -> ParamLayout:
    """Return the layout of a number per id."""
    rows = padded_vocab_size // tp.size
    first, stop = tp.rank * rows, min((tp.rank + 1) * rows, vocab_size)
    pieces = (Piece(name, (vocab_size,), ((first, stop),)),) if first < stop else ()
    return ParamLayout(shape=(rows,), pieces=pieces, init=Init(), decays=False, kind="vector")


def router_layout(
    name: str, num_experts: int, num_inputs: int, init: Init, tp: TensorParallel
) -> ParamLayout:
    """Return the layout of a router's weight."""
    return replicated_layout([(name, num_experts)], num_inputs, init, tp)
