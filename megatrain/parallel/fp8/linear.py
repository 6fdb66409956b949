"""Tensor-parallel linear layers in FP8: the products of tensor_parallel.py with FP8 operands.

    forward           y  = x_fp8 W_fp8^T               codes of x and W by rows
    input gradient    dx = dy_fp8 W_fp8                codes of dy by rows, of W by columns
    weight gradient   dW += dy_fp8^T x_fp8             codes of both by columns; fp32

A column-parallel layer saves the codes of its input, one byte per element; a row-parallel one saves what other operations
save too, the output of attention or the input of the activation, and casts again. Ranks gather codes, not values: with
sequence parallelism the input of a column-parallel layer, and the gradient of a row-parallel one. Results have the dtype of the weight.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function

from megatrain.kernels.activations import Activation, activate, activate_backward
from megatrain.kernels.fp8.products import Operand, accumulate_product, product
from megatrain.kernels.fp8.quantize import transposed
from megatrain.kernels.fused.launching import is_fused
from megatrain.kernels.wgrad import accumulate_weight_gradient
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
    recompute_fn: Callable[[], Tensor] | None = None,
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
        recompute_fn: Callable[[], Tensor] | None,
    ) -> Tensor:
        is_split = tp.sequence_parallel and tp.size > 1
        scale, is_kept = fp8.input.scale(x), recompute_fn is None
        columns = is_kept and fp8.has_fp8_wgrad and not is_split
        codes = fp8.input.cast(x.flatten(0, -2), scale, info, columns=columns)
        w, w_scale = fp8.cast_weight(weight, info)
        assert codes.rows is not None
        assert w.rows is not None
        kept = (codes.columns if columns else codes.rows) if fp8.has_fp8_wgrad else x
        ctx.save_for_backward(kept if is_kept else None, scale, weight, w_scale)
        ctx.weight_grad, ctx.fp8, ctx.bias, ctx.tp, ctx.info = weight_grad, fp8, bias, tp, info
        ctx.recompute_fn, ctx.is_split = recompute_fn, is_split
        rows = _gathered(codes.rows, tp) if is_split else codes.rows
        y = product(Operand(rows, scale), Operand(w.rows, w_scale), x.dtype, _value(bias), fast=True)
        return y.view(-1, *x.shape[1:-1], y.shape[-1])

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        x, scale, weight, w_scale = ctx.saved_tensors
        fp8: Fp8Linear = ctx.fp8
        dy, tp = grads[0], ctx.tp
        if ctx.recompute_fn is not None:
            x, ctx.recompute_fn = ctx.recompute_fn(), None
            if fp8.has_fp8_wgrad:
                codes = fp8.input.cast(
                    x.flatten(0, -2), scale, ctx.info, rows=ctx.is_split, columns=not ctx.is_split
                )
                x = codes.rows if ctx.is_split else codes.columns
        full_x, gather = _begin_gather_of(x, tp) if ctx.is_split else (x, Transfer())
        dy_scale = fp8.gradient.scale(dy)
        dy_codes = fp8.gradient.cast(dy.flatten(0, -2), dy_scale, ctx.info, columns=fp8.has_fp8_wgrad)
        assert dy_codes.rows is not None
        w_columns = fp8.weight_columns(weight, w_scale, ctx.info)
        dx = product(Operand(dy_codes.rows, dy_scale), Operand(w_columns, w_scale), dy.dtype, fast=False)
        dx, reduction = begin_reduction(dx.view(*dy.shape[:-1], -1), tp)
        gather.wait()
        if fp8.has_fp8_wgrad:
            columns = transposed(full_x) if ctx.is_split else full_x
            _accumulate(ctx, (dy_codes.columns, dy_scale), Operand(columns, scale))
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
        y = x if activation is None else activate(x, activation)
        scale = fp8.input.scale(y)
        codes = fp8.input.cast(y.flatten(0, -2), scale, info, columns=False)
        w, w_scale = fp8.cast_weight(weight, info)
        assert codes.rows is not None
        assert w.rows is not None
        ctx.save_for_backward(x, scale, weight, w_scale)
        ctx.weight_grad, ctx.fp8, ctx.activation, ctx.bias = weight_grad, fp8, activation, bias
        ctx.tp, ctx.info = tp, info
        out = product(Operand(codes.rows, scale), Operand(w.rows, w_scale), x.dtype, _value(bias), fast=True)
        out = out.view(*x.shape[:-1], -1)
        return reduce_scatter(out, tp.group) if tp.sequence_parallel else all_reduce(out, tp.group)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        x, scale, weight, w_scale = ctx.saved_tensors
        fp8: Fp8Linear = ctx.fp8
        dy, tp, activation = grads[0], ctx.tp, ctx.activation
        is_split = tp.sequence_parallel and tp.size > 1
        accumulate_bias_gradient(ctx.bias, dy)
        if is_split and not fp8.has_fp8_wgrad:
            dy, is_split = all_gather(dy, tp.group), False
        dy_scale = fp8.gradient.scale(dy)
        codes = fp8.gradient.cast(
            dy.flatten(0, -2), dy_scale, ctx.info, columns=fp8.has_fp8_wgrad and not is_split
        )
        assert codes.rows is not None
        rows = _gathered(codes.rows, tp) if is_split else codes.rows
        dx = product(
            Operand(rows, dy_scale),
            Operand(fp8.weight_columns(weight, w_scale, ctx.info), w_scale),
            dy.dtype,
            fast=False,
        ).view(-1, *dy.shape[1:-1], weight.shape[1])
        y = x
        if (
            activation is not None
        ):  # on GPUs y takes the memory of dx, then dx that of x, which no other operation reads
            y = dx if is_fused(x) else torch.empty_like(dx)
            dx = activate_backward(dx, x.detach(), activation, recomputed=y, overwrites_x=is_fused(x))
        if fp8.has_fp8_wgrad:
            columns = transposed(rows) if is_split else codes.columns
            y_codes = fp8.input.cast(y.flatten(0, -2), scale, ctx.info, rows=False)
            assert y_codes.columns is not None
            _accumulate(ctx, (columns, dy_scale), Operand(y_codes.columns, scale))
        else:
            _accumulate_unquantized(ctx, dy, y)
        return dx, *[None] * 7


def _value(bias: Bias | None) -> Tensor | None:
    return None if bias is None else bias.value


def _gathered(codes: Tensor, tp: TensorParallel) -> Tensor:
    """Concatenate the ranks' rows of codes, as bytes: [r/tp, c] -> [r, c]."""
    return all_gather(codes.view(torch.uint8), tp.group).view(codes.dtype)


def _begin_gather_of(x: Tensor, tp: TensorParallel) -> tuple[Tensor, Transfer]:
    """Begin to gather codes, as bytes, or values."""
    if x.element_size() > 1:
        return begin_gather(x, tp)
    out, transfer = begin_gather(x.view(torch.uint8), tp)
    return out.view(x.dtype), transfer


def _accumulate(ctx: Any, dy: tuple[Tensor | None, Tensor], x: Operand) -> None:
    codes, scale = dy
    assert codes is not None
    grad, operand = ctx.weight_grad, Operand(codes, scale)
    is_zero = (
        ctx.info.microbatch == 0
    )  # gradients are zeroed at the end of a step, and the first micro-batch comes first
    ctx.info.compute_weight_gradient(lambda: accumulate_product(grad, operand, x, is_zero=is_zero))


def _accumulate_unquantized(ctx: Any, dy: Tensor, x: Tensor) -> None:
    grad = ctx.weight_grad
    ctx.info.compute_weight_gradient(
        lambda: accumulate_weight_gradient(grad, dy.flatten(0, -2), x.flatten(0, -2))
    )
