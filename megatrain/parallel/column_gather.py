"""Gather of the output of a column-parallel layer: a rank gets all columns of the rows that it holds between layers.

without sp   all-gather     [s, b, h/tp] -> [s, b, h]       backward: this rank's columns of the gradient
with sp      all-to-all     [s, b, h/tp] -> [s/tp, b, h]    backward: the inverse all-to-all
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function

from megatrain.parallel.collectives import all_gather, begin_all_to_all_into
from megatrain.parallel.tensor_parallel import TensorParallel


def gather_columns(x: Tensor, tp: TensorParallel) -> Tensor:
    """Gather the columns of x [s, b, h/tp]: [s/tp, b, h] with sp, else [s, b, h]."""
    if tp.size == 1:
        return x
    out: Tensor = _GatherColumns.apply(x, tp)
    return out


class _GatherColumns(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, tp: TensorParallel) -> Tensor:
        ctx.tp = tp
        gathered = _all_to_all(x, tp) if tp.sequence_parallel else all_gather(x, tp.group)
        parts = gathered.view(tp.size, -1, *x.shape[1:])
        return parts.movedim(0, 2).flatten(2)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        tp: TensorParallel = ctx.tp
        rows, samples = grads[0].shape[:2]
        parts = grads[0].view(rows, samples, tp.size, -1).movedim(2, 0)
        return _all_to_all(parts.flatten(0, 1), tp) if tp.sequence_parallel else parts[tp.rank], None


def _all_to_all(x: Tensor, tp: TensorParallel) -> Tensor:
    """Send each rank its part of dimension 0; the received parts are concatenated in rank order."""
    x = x.contiguous()
    out = torch.empty_like(x)
    begin_all_to_all_into(out, x, tp.group).wait()
    return out
