"""`kernels.output_gate` in one pass each way. The gate is a part of the QKV projection, read where it lies."""

from __future__ import annotations

import torch
from torch import Tensor

from megatrain.kernels.fused.launching import cdiv, jit, launch, power_of_two, tl

_BLOCK = 2048


def gate_output(x: Tensor, gate: Tensor, *, has_silu: bool = False) -> Tensor:
    """Implement `kernels.output_gate.gate_output`."""
    y = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    x_rows, gate_rows = _rows(x), _rows(gate)
    grid, block = _grid(x_rows)
    launch(
        _forward, grid, x_rows, gate_rows, y, x.shape[-1], x_rows.stride(0), gate_rows.stride(0),
        HAS_SILU=has_silu, BLOCK=block,
    )  # fmt: skip
    return y


def gate_output_backward(
    dy: Tensor, x: Tensor, gate: Tensor, *, has_silu: bool = False, out: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Implement `kernels.output_gate.gate_output_backward`."""
    dx = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    dgate = torch.empty(gate.shape, dtype=gate.dtype, device=gate.device) if out is None else out
    dy_rows, x_rows, gate_rows = _rows(dy), _rows(x), _rows(gate)
    grid, block = _grid(x_rows)
    launch(
        _backward, grid, dy_rows, x_rows, gate_rows, dx, dgate, x.shape[-1],
        dy_rows.stride(0), x_rows.stride(0), gate_rows.stride(0), dgate.flatten(0, 1).stride(0), HAS_SILU=has_silu, BLOCK=block,
    )  # fmt: skip
    return dx, dgate


def _rows(x: Tensor) -> Tensor:
    """[s, b, c] -> [s * b, c] with contiguous channels."""
    rows = x.flatten(0, 1)
    return rows if rows.stride(1) == 1 else rows.contiguous()


def _grid(rows: Tensor) -> tuple[tuple[int, int], int]:
    block = min(_BLOCK, power_of_two(rows.shape[1]))
    return (rows.shape[0], cdiv(rows.shape[1], block)), block


@jit
def _forward(X, G, Y, columns, x_row, g_row, HAS_SILU: tl.constexpr, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = column < columns
    x = tl.load(X + row * x_row + column, mask=inside, other=0).to(tl.float32)
    gate = tl.load(G + row * g_row + column, mask=inside, other=0).to(tl.float32)
    y = x / (1 + tl.exp(-gate))
    if HAS_SILU:
        y *= gate
    tl.store(Y + row * columns + column, y.to(Y.dtype.element_ty), mask=inside)


@jit
def _backward(
    DY, X, G, DX, DG, columns, dy_row, x_row, g_row, dg_row, HAS_SILU: tl.constexpr, BLOCK: tl.constexpr
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = column < columns
    dy = tl.load(DY + row * dy_row + column, mask=inside, other=0).to(tl.float32)
    x = tl.load(X + row * x_row + column, mask=inside, other=0).to(tl.float32)
    gate = tl.load(G + row * g_row + column, mask=inside, other=0).to(tl.float32)
    weight = 1 / (1 + tl.exp(-gate))
    derivative = weight * (1 - weight)
    if HAS_SILU:
        derivative = weight + gate * derivative
        weight *= gate
    tl.store(DX + row * columns + column, (dy * weight).to(DX.dtype.element_ty), mask=inside)
    tl.store(DG + row * dg_row + column, (dy * x * derivative).to(DG.dtype.element_ty), mask=inside)
