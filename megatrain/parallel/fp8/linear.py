"""Tensor-parallel linear layers in FP8: the GEMMs of tensor_parallel.py with FP8 operands.

    forward           y  = x_fp8 W_fp8^T               codes of x and W by rows
    input gradient    dx = dy_fp8 W_fp8                codes of dy by rows, of W by columns
    weight gradient   dW += dy_fp8^T x_fp8             codes of both by columns; fp32

A column-parallel layer saves the codes of its input, one byte per element; a row-parallel one saves what other operations
save too, the output of attention or the input of the activation, and casts again. Ranks gather codes, not values: with
sequence parallelism the input of a column-parallel layer, and the gradient of a row-parallel one. With scales of blocks they
gather values, since row codes do not give the transposed codes, and save these. Results have the dtype of the weight.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function

from megatrain.kernels.activations import Activation, activate, activate_backward, activate_backward_cast
from megatrain.kernels.fp8.gemms import Operand
from megatrain.kernels.fp8.quantize import transposed
from megatrain.kernels.fused.launching import is_fused
from megatrain.kernels.linear import accumulate_weight_gradient
from megatrain.parallel.batch import PassInfo
from megatrain.parallel.collectives import Transfer, all_gather, all_reduce, reduce_scatter
from megatrain.parallel.fp8.scaling import Fp8Linear
from megatrain.parallel.tensor_parallel import (
    AddBias,
    Bias,
    TensorParallel,
    accumulate_bias_gradient,
    begin_gather,
    begin_reduction,
)


def fp8_column_linear(
    fp8: Fp8Linear,
    x: Tensor,
    weight: Tensor,
    weight_grad: Tensor | None,
    tp: TensorParallel,
    info: PassInfo,
    bias: Bias | None = None,
    *,
    recompute_fn: partial[Tensor] | None = None,
) -> Tensor:
    """Compute `column_linear` in FP8."""
    out: Tensor = _Fp8ColumnLinear.apply(x, weight, weight_grad, fp8, bias, tp, info, recompute_fn)
    return out


def fp8_row_linear(
    fp8: Fp8Linear,
    x: Tensor,
    weight: Tensor,
    weight_grad: Tensor | None,
    tp: TensorParallel,
    info: PassInfo,
    bias: Bias | None = None,
    *,
    activation: Activation | None = None,
) -> Tensor:
    """Compute `row_linear` in FP8."""
    fused_bias = bias if tp.size == 1 else None
    out: Tensor = _Fp8RowLinear.apply(x, weight, weight_grad, fp8, activation, fused_bias, tp, info)
    if bias is not None and tp.size > 1:
        out = AddBias.apply(out, bias)
    return out


class _Fp8ColumnLinear(Function):
    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        weight: Tensor,
        weight_grad: Tensor | None,
        fp8: Fp8Linear,
        bias: Bias | None,
        tp: TensorParallel,
        info: PassInfo,
        recompute_fn: partial[Tensor] | None,
    ) -> Tensor:
        is_split = tp.sequence_parallel and tp.size > 1
        gathers_codes, is_kept = is_split and fp8.gathers_codes, recompute_fn is None
        saves_codes = fp8.has_fp8_wgrad and (gathers_codes or not is_split)
        values = all_gather(x, tp.group) if is_split and not gathers_codes else x
        scale = fp8.input.scale(x)
        cast = fp8.input.cast(
            values.flatten(0, -2), scale, info, columns=is_kept and saves_codes and not is_split
        )
        w = fp8.cast_weight(weight, info)
        assert cast.rows is not None
        kept = cast.columns or cast.rows
        ctx.save_for_backward(
            recompute_fn.args[0] if recompute_fn else kept.codes if saves_codes else x,
            kept.scale if is_kept and saves_codes else scale,
            weight,
            w.scale,
        )
        ctx.weight_grad, ctx.fp8, ctx.bias, ctx.tp, ctx.info = weight_grad, fp8, bias, tp, info
        ctx.recompute_fn, ctx.is_split = recompute_fn and recompute_fn.func, is_split
        ctx.saves_codes = saves_codes
        rows = cast.rows._replace(codes=_gathered(cast.rows.codes, tp)) if gathers_codes else cast.rows
        y = fp8.gemm(rows, w, x.dtype, _value(bias), fast=True)
        return y.view(-1, *x.shape[1:-1], y.shape[-1])

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        x, scale, weight, w_scale = ctx.saved_tensors
        fp8: Fp8Linear = ctx.fp8
        dy, tp = grads[0], ctx.tp
        if ctx.recompute_fn is not None:
            x = ctx.recompute_fn(x)
            if ctx.saves_codes:
                cast = fp8.input.cast(
                    x.flatten(0, -2), scale, ctx.info, rows=ctx.is_split, columns=not ctx.is_split
                )
                x, scale = _operand(cast.rows if ctx.is_split else cast.columns)
        full_x, gather = _begin_gather_of(x, tp) if ctx.is_split else (x, Transfer())
        cast = fp8.gradient.cast(
            dy.flatten(0, -2), fp8.gradient_scale(dy), ctx.info, columns=fp8.has_fp8_wgrad
        )
        w_columns = fp8.weight_columns(weight, w_scale, ctx.info)
        dx = fp8.gemm(_operand(cast.rows), w_columns, dy.dtype, fast=False)
        dx, reduction = begin_reduction(dx.view(*dy.shape[:-1], -1), tp)
        gather.wait()
        if ctx.saves_codes:
            columns = transposed(full_x) if ctx.is_split else full_x
            _accumulate(ctx, _operand(cast.columns), Operand(columns, scale))
        elif fp8.has_fp8_wgrad:
            x_cast = fp8.input.cast(full_x.flatten(0, -2), None, ctx.info, rows=False)
            _accumulate(ctx, _operand(cast.columns), _operand(x_cast.columns))
        else:
            _accumulate_unquantized(ctx, dy, full_x)
        accumulate_bias_gradient(ctx.bias, dy)
        reduction.wait()
        return dx, *[None] * 7


class _Fp8RowLinear(Function):
    """A row-parallel linear layer with the reduction of its output, applied to an activation or to x itself."""

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        weight: Tensor,
        weight_grad: Tensor | None,
        fp8: Fp8Linear,
        activation: Activation | None,
        bias: Bias | None,
        tp: TensorParallel,
        info: PassInfo,
    ) -> Tensor:
        is_seen = activation is not None and fp8.input.needs_amax
        seen = torch.zeros((), dtype=torch.float32, device=x.device) if is_seen else None
        y = x if activation is None else activate(x, activation, seen)
        scale = fp8.input.scale(y, seen)
        cast = fp8.input.cast(y.flatten(0, -2), scale, info, columns=False)
        w = fp8.cast_weight(weight, info)
        ctx.save_for_backward(x, scale, weight, w.scale)
        ctx.weight_grad, ctx.fp8, ctx.activation, ctx.bias = weight_grad, fp8, activation, bias
        ctx.tp, ctx.info = tp, info
        out = fp8.gemm(_operand(cast.rows), w, x.dtype, _value(bias), fast=True)
        out = out.view(*x.shape[:-1], -1)
        return reduce_scatter(out, tp.group) if tp.sequence_parallel else all_reduce(out, tp.group)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        x, scale, weight, w_scale = ctx.saved_tensors
        fp8: Fp8Linear = ctx.fp8
        dy, tp, activation = grads[0], ctx.tp, ctx.activation
        is_split = tp.sequence_parallel and tp.size > 1
        accumulate_bias_gradient(ctx.bias, dy)
        if is_split and not (fp8.has_fp8_wgrad and fp8.gathers_codes):
            dy, is_split = all_gather(dy, tp.group), False
        cast = fp8.gradient.cast(
            dy.flatten(0, -2),
            fp8.gradient_scale(dy),
            ctx.info,
            columns=fp8.has_fp8_wgrad and not is_split,
        )
        rows = _operand(cast.rows)
        rows = rows._replace(codes=_gathered(rows.codes, tp)) if is_split else rows
        w_columns = fp8.weight_columns(weight, w_scale, ctx.info)
        dx = fp8.gemm(rows, w_columns, dy.dtype, fast=False)
        dx = dx.view(-1, *dy.shape[1:-1], weight.shape[1])
        y, y_columns, overwrites = x, None, is_fused(x)
        # Fused, y takes the memory of dx, and dx the memory of x, which no other operation reads.
        if activation is not None and fp8.has_fp8_wgrad and scale is not None:
            dtype = w_columns.codes.dtype  # inputs have the format of weights
            dx, codes = activate_backward_cast(dx, x.detach(), activation, scale, dtype)
            y_columns = Operand(codes, scale)
        elif activation is not None:
            y = dx if overwrites else torch.empty_like(dx)
            dx = activate_backward(dx, x.detach(), activation, recomputed=y, overwrites_x=overwrites)
        if fp8.has_fp8_wgrad:
            columns = cast.columns or rows._replace(codes=transposed(rows.codes))
            if y_columns is None:
                y_columns = _operand(fp8.input.cast(y.flatten(0, -2), scale, ctx.info, rows=False).columns)
            _accumulate(ctx, columns, y_columns)
        else:
            _accumulate_unquantized(ctx, dy, y)
        return dx, *[None] * 7


def _value(bias: Bias | None) -> Tensor | None:
    return None if bias is None else bias.value


def _operand(part: Operand | None) -> Operand:
    """Return a part of a cast that was asked for."""
    assert part is not None
    return part


def _gathered(codes: Tensor, tp: TensorParallel) -> Tensor:
    """Concatenate the ranks' rows of codes, as bytes: [r/tp, c] -> [r, c]."""
    return all_gather(codes.view(torch.uint8), tp.group).view(codes.dtype)


def _begin_gather_of(x: Tensor, tp: TensorParallel) -> tuple[Tensor, Transfer]:
    """Begin to gather codes, as bytes, or values."""
    if x.element_size() > 1:
        return begin_gather(x, tp)
    out, transfer = begin_gather(x.view(torch.uint8), tp)
    return out.view(x.dtype), transfer


def _accumulate(ctx: Any, dy: Operand, x: Operand) -> None:
    fp8, grad = ctx.fp8, ctx.weight_grad
    ctx.info.compute_weight_gradient(lambda: fp8.accumulate(grad, dy, x))


def _accumulate_unquantized(ctx: Any, dy: Tensor, x: Tensor) -> None:
    grad = ctx.weight_grad
    ctx.info.compute_weight_gradient(
        lambda: accumulate_weight_gradient(grad, dy.flatten(0, -2), x.flatten(0, -2))
    )
