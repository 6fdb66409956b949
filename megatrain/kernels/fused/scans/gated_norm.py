"""`kernels.mamba2.gated_norm` in one pass each way. The gate is a part of the projection, read where it lies.

A tile has rows of one group, and stays in registers. The backward pass computes the gated rows again, so that only the inputs
are saved. The gradient of the weight is summed over a program's tiles, then over the programs: deterministic.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function

from megatrain.kernels.fused.launching import cdiv, jit, launch, power_of_two, tl
from megatrain.kernels.qkv import Place

_TILE, _ELEMENTS = 1024, 8
"""Elements of a tile, unless a row of a group is longer, and of a thread."""
_PROGRAMS = 132 * 8
"""Programs of the backward pass, of 4 warps: an H200's multiprocessors hold them all at once."""


def gated_norm(
    y: Tensor, gate: Tensor, weight: Tensor, num_groups: int, eps: float, gate_place: Place | None = None
) -> Tensor:
    """Implement `kernels.mamba2.gated_norm`."""
    out: Tensor = _GatedNorm.apply(y, gate, weight, num_groups, eps, gate_place)
    return out


class _GatedNorm(Function):
    @staticmethod
    def forward(
        ctx: Any, y: Tensor, gate: Tensor, weight: Tensor, num_groups: int, eps: float, gate_place: Place | None
    ) -> Tensor:  # fmt: skip
        ctx.save_for_backward(y, gate, weight)
        ctx.num_groups, ctx.eps, ctx.gate_place = num_groups, eps, gate_place
        out = torch.empty(y.shape, dtype=y.dtype, device=y.device)
        y_rows, gate_rows, tile = _rows(y), _rows(gate), _tile(y, num_groups)
        launch(
            _forward, (cdiv(len(y_rows), tile["ROWS"]), num_groups), y_rows, gate_rows, weight, out,
            len(y_rows), y.shape[-1] // num_groups, y_rows.stride(0), gate_rows.stride(0), eps, **tile,
        )  # fmt: skip
        return out

    @staticmethod
    def backward(ctx: Any, dout: Tensor) -> tuple[Tensor | None, ...]:
        y, gate, weight = ctx.saved_tensors
        dy = torch.empty(y.shape, dtype=y.dtype, device=y.device)
        dgate = (
            torch.empty(gate.shape, dtype=gate.dtype, device=gate.device)
            if ctx.gate_place is None
            else ctx.gate_place()
        )
        dout_rows, y_rows, gate_rows, dgate_rows = _rows(dout), _rows(y), _rows(gate), dgate.flatten(0, -2)
        tile, count = _tile(y, ctx.num_groups), len(y_rows)
        programs = min(cdiv(count, tile["ROWS"]), cdiv(_PROGRAMS, ctx.num_groups))
        sums = torch.empty(programs, y.shape[-1], dtype=torch.float32, device=y.device)
        launch(
            _backward, (programs, ctx.num_groups), dout_rows, y_rows, gate_rows, weight, dy, dgate_rows, sums,
            count, y.shape[-1] // ctx.num_groups, dout_rows.stride(0), y_rows.stride(0), gate_rows.stride(0), dgate_rows.stride(0),
            ctx.eps, **tile,
        )  # fmt: skip
        return dy, dgate, sums.sum(0).to(weight.dtype), None, None, None


def _rows(x: Tensor) -> Tensor:
    """[..., d] -> [rows, d] with contiguous channels."""
    rows = x.flatten(0, -2)
    return rows if rows.stride(1) == 1 else rows.contiguous()


def _tile(y: Tensor, num_groups: int) -> dict[str, int]:
    block = power_of_two(y.shape[-1] // num_groups)
    rows = max(_TILE // block, 1)
    return {"ROWS": rows, "BLOCK": block, "num_warps": min(max(rows * block // (32 * _ELEMENTS), 1), 16)}


@jit
def _silu(x):
    """Return SiLU and its derivative."""
    sigmoid = 1 / (1 + tl.exp(-x))
    return x * sigmoid, sigmoid * (1 + x * (1 - sigmoid))


@jit
def _load(X, row, channel, stride, inside):
    return tl.load(X + row[:, None] * stride + channel[None, :], mask=inside, other=0).to(tl.float32)


@jit
def _store(X, x, row, channel, stride, inside):
    tl.store(X + row[:, None] * stride + channel[None, :], x.to(X.dtype.element_ty), mask=inside)


@jit
def _forward(Y, G, W, OUT, count, width, y_row, g_row, eps, ROWS: tl.constexpr, BLOCK: tl.constexpr):
    row, column = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS), tl.arange(0, BLOCK)
    channel, inside = tl.program_id(1) * width + column, (row < count)[:, None] & (column < width)[None, :]
    activated, _ = _silu(_load(G, row, channel, g_row, inside))
    gated = _load(Y, row, channel, y_row, inside) * activated
    rstd = 1 / tl.sqrt(tl.sum(gated * gated, axis=1) / width + eps)
    weight = tl.load(W + channel, mask=column < width, other=0).to(tl.float32)
    out = gated * rstd[:, None] * weight[None, :]
    _store(OUT, out, row, channel, width * tl.num_programs(1), inside)


@jit
def _backward(
    DOUT, Y, G, W, DY, DG, SUMS, count, width, dout_row, y_row, g_row, dg_row, eps,
    ROWS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    first, programs, columns = tl.program_id(0), tl.num_programs(0), width * tl.num_programs(1)
    column = tl.arange(0, BLOCK)
    channel, is_column = tl.program_id(1) * width + column, column < width
    weight = tl.load(W + channel, mask=is_column, other=0).to(tl.float32)
    dweight = tl.zeros((BLOCK,), dtype=tl.float32)
    for tile in range(first, tl.cdiv(count, ROWS), programs):
        row = tl.cast(tile, tl.int64) * ROWS + tl.arange(0, ROWS)
        inside = (row < count)[:, None] & is_column[None, :]
        y = _load(Y, row, channel, y_row, inside)
        activated, derivative = _silu(_load(G, row, channel, g_row, inside))
        dout = _load(DOUT, row, channel, dout_row, inside)
        gated = y * activated
        rstd = 1 / tl.sqrt(tl.sum(gated * gated, axis=1) / width + eps)
        normed = gated * rstd[:, None]
        dweight += tl.sum(dout * normed, axis=0)
        dnormed = dout * weight[None, :]
        along = tl.sum(dnormed * normed, axis=1) / width
        dgated = (dnormed - normed * along[:, None]) * rstd[:, None]
        _store(DY, dgated * activated, row, channel, columns, inside)
        _store(DG, dgated * y * derivative, row, channel, dg_row, inside)
    tl.store(SUMS + first * columns + channel, dweight, mask=is_column)
