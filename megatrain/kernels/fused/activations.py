"""`kernels.activations` in one pass each way; the backward pass can recompute the activation in the same pass.

For FP8, a pass finds the largest absolute value of what it writes, and the backward pass writes the codes of the activation
instead of its values, transposed as the weight gradient reads them.
"""

from __future__ import annotations

import torch
from torch import Tensor

from megatrain.kernels.fused.fp8_scales.tensors import FORMATS, codes_of, magnitude_bits, see_largest
from megatrain.kernels.fused.launching import cdiv, jit, launch, power_of_two, tl

_BLOCK = 2048
_PROGRAMS = 8192
"""Maximum programs of weighted rows: each computes several, so that rows after the last end cost nothing."""
_SUMMING_PROGRAMS = 132 * 4
"""Programs that sum columns of a gradient: an H200's multiprocessors hold them all at once."""
_TILE_ROWS, _TILE_COLUMNS, _TILE_WARPS = 32, 128, 8
"""Tile of the backward pass that writes codes: 256 contiguous bytes of bf16 are read, and 32 bytes of codes written."""


def activate(
    x: Tensor,
    function: str,
    is_gated: bool,
    clamp: float | None,
    offset: float,
    weights: Tensor | None = None,
    ends: Tensor | None = None,
    seen: Tensor | None = None,
) -> Tensor:
    """Implement `kernels.activations.activate` or `activate_weighted`, for a function given by name."""
    x = x.contiguous()
    columns = x.shape[-1] // (2 if is_gated else 1)
    y = torch.empty(*x.shape[:-1], columns, dtype=x.dtype, device=x.device)
    (num_rows, num_blocks), block = _grid(y, columns)
    launch(
        _forward, (_programs(num_rows, ends), num_blocks), x, y, y if weights is None else weights.contiguous(),
        x if ends is None else ends, _bits(seen, y), num_rows, columns, offset, clamp or 0.0,
        **_kind(function, is_gated, clamp), IS_WEIGHTED=weights is not None, **_groups(ends), SEES=seen is not None,
        BLOCK=block,
    )  # fmt: skip
    return y


def activate_backward(
    dy: Tensor,
    x: Tensor,
    recomputed: Tensor | None,
    function: str,
    is_gated: bool,
    clamp: float | None,
    offset: float,
    *,
    overwrites_x: bool = False,
    has_sums: bool = False,
    seen: Tensor | None = None,
) -> tuple[Tensor, Tensor | None]:
    """Implement `kernels.activations.activate_backward`; return also, if wanted, rows whose sum is that of the gradient's columns, fp32."""
    assert recomputed is None or recomputed.is_contiguous()
    x, dy = x.contiguous(), dy.contiguous()
    columns = dy.shape[-1]
    dx = x if overwrites_x else torch.empty_like(x)
    (num_rows, num_blocks), block = _grid(dy, columns)
    programs = min(num_rows, cdiv(_SUMMING_PROGRAMS, num_blocks)) if has_sums else num_rows
    sums = torch.empty(programs if has_sums else 0, x.shape[-1], dtype=torch.float32, device=x.device)
    launch(
        _backward, (programs, num_blocks), dy, x, dx, dx if recomputed is None else recomputed, sums, _bits(seen, dx),
        num_rows, columns, offset, clamp or 0.0, **_kind(function, is_gated, clamp), RECOMPUTES=recomputed is not None,
        IS_IN_PLACE=overwrites_x or recomputed is not None, HAS_SUMS=has_sums, SEES=seen is not None, BLOCK=block,
        num_warps=16 if has_sums else 4,
    )  # fmt: skip
    return dx, sums if has_sums else None


def activate_backward_cast(
    dy: Tensor,
    x: Tensor,
    scale: Tensor,
    dtype: torch.dtype,
    function: str,
    is_gated: bool,
    clamp: float | None,
    offset: float,
    *,
    seen: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Implement `kernels.activations.activate_backward_cast`; the gradient takes the memory of x."""
    x, dy = x.contiguous(), dy.contiguous()
    columns = dy.shape[-1]
    rows = dy.numel() // max(columns, 1)
    codes = torch.empty(columns, rows, dtype=dtype, device=x.device)
    launch(
        _backward_cast, (cdiv(rows, _TILE_ROWS), cdiv(columns, _TILE_COLUMNS)),
        dy, x, scale, codes.view(torch.uint8), _bits(seen, x), rows, columns, offset, clamp or 0.0,
        **_kind(function, is_gated, clamp), FORMAT=FORMATS.get(dtype), SEES=seen is not None,
        IS_EVEN=rows % _TILE_ROWS == 0 and columns % _TILE_COLUMNS == 0,
        ROWS=_TILE_ROWS, COLUMNS=_TILE_COLUMNS, num_warps=_TILE_WARPS,
    )  # fmt: skip
    return x, codes


def activate_weighted_backward(
    dy: Tensor,
    x: Tensor,
    weights: Tensor,
    function: str,
    is_gated: bool,
    clamp: float | None,
    offset: float,
    ends: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Implement `kernels.activations.activate_weighted_backward`."""
    assert dy.is_contiguous()
    x, weights = x.contiguous(), weights.contiguous()
    dx, dweights = torch.empty_like(x), torch.empty_like(weights)
    (num_rows, _), block = _grid(dy, dy.shape[-1])
    launch(
        _weighted_backward, (_programs(num_rows, ends),), dy, x, weights, dx, dweights,
        x if ends is None else ends, num_rows, dy.shape[-1], offset, clamp or 0.0,
        **_kind(function, is_gated, clamp), **_groups(ends), BLOCK=block,
    )  # fmt: skip
    return dx, dweights


def _bits(seen: Tensor | None, unused: Tensor) -> Tensor:
    return unused if seen is None else seen.view(torch.int32)


def _grid(y: Tensor, columns: int) -> tuple[tuple[int, int], int]:
    block = min(_BLOCK, power_of_two(columns))
    return (y.numel() // max(columns, 1), cdiv(columns, block)), block


def _programs(num_rows: int, ends: Tensor | None) -> int:
    return num_rows if ends is None else min(num_rows, _PROGRAMS)


def _groups(ends: Tensor | None) -> dict[str, object]:
    return {"NUM_GROUPS": 0 if ends is None else len(ends)}


def _kind(function: str, is_gated: bool, clamp: float | None) -> dict[str, object]:
    return {"FUNCTION": function, "IS_GATED": is_gated, "HAS_CLAMP": is_gated and clamp is not None}


@jit
def _at_most(x, limit):
    return tl.where(x > limit, limit, x)  # NaN stays NaN


@jit
def _within(x, limit):
    return tl.where(tl.abs(x) > limit, tl.where(x > 0, limit, -limit), x)


@jit
def _tanh(x):
    return 2 / (1 + tl.exp(-2 * x)) - 1


@jit
def _mills_ratio(x):
    """Return P(X > x) exp(x^2 / 2) of a normal X, for x >= 0, with a relative error below 1e-7 before rounding.

    A polynomial of t = 1 / (1 + 0.304 x), as in Abramowitz and Stegun 7.1.26, fitted on [0, 13.5]: an erf would compute an
    exponential of its own.
    """
    t = 1 / (1 + 0.304 * x)
    y = 0.0368577747 * t - 0.155296054
    y = y * t + 0.192184229
    y = y * t - 0.0431260122
    y = y * t + 0.123551722
    y = y * t + 0.10242301
    y = y * t + 0.122170688
    y = y * t + 0.121234683
    return y * t


@jit
def _value_and_derivative(x, FUNCTION: tl.constexpr):
    # One return at the end: Triton compiles the code after a return inside a constexpr branch.
    if FUNCTION == "silu":
        sigmoid = 1 / (1 + tl.exp(-x))
        value, derivative = x * sigmoid, sigmoid * (1 + x * (1 - sigmoid))
    elif FUNCTION == "quick_gelu":
        sigmoid = 1 / (1 + tl.exp(-1.702 * x))
        value, derivative = x * sigmoid, sigmoid * (1 + 1.702 * x * (1 - sigmoid))
    elif FUNCTION == "gelu":
        density = tl.exp(-0.5 * x * x)
        tail = _mills_ratio(tl.abs(x)) * density
        cdf = tl.where(x < 0, tail, 1 - tail)
        value, derivative = x * cdf, cdf + x * density * 0.3989422804014327
    elif FUNCTION == "gelu_tanh":
        near = _within(x, 10.0)  # beyond it tanh is 1; far beyond it x * x may overflow
        tanh = _tanh(0.7978845608028654 * near * (1 + 0.044715 * near * near))
        inner = 0.7978845608028654 * (1 + 3 * 0.044715 * near * near)
        value, derivative = 0.5 * x * (1 + tanh), 0.5 * (1 + tanh) + 0.5 * x * (1 - tanh * tanh) * inner
    else:
        tl.static_assert(FUNCTION == "squared_relu", "a function that this kernel does not implement")
        positive = tl.where(x < 0, 0.0, x)  # a maximum would replace NaN by 0
        value, derivative = positive * positive, 2 * positive
    return value, derivative


def _forward_rows(
    X, Y, W, ENDS, SEEN, num_rows, columns, offset, clamp,
    FUNCTION: tl.constexpr, IS_GATED: tl.constexpr, HAS_CLAMP: tl.constexpr, IS_WEIGHTED: tl.constexpr,
    NUM_GROUPS: tl.constexpr, SEES: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = column < columns
    stop = tl.load(ENDS + NUM_GROUPS - 1) if NUM_GROUPS > 0 else num_rows
    for row in range(tl.program_id(0).to(tl.int64), stop, tl.num_programs(0)):
        start = row * columns * (2 if IS_GATED else 1) + column
        x = tl.load(X + start, mask=inside, other=0).to(tl.float32)
        if HAS_CLAMP:
            x = _at_most(x, clamp)
        y, _ = _value_and_derivative(x, FUNCTION)
        if IS_GATED:
            up = tl.load(X + start + columns, mask=inside, other=0).to(tl.float32)
            if HAS_CLAMP:
                up = _within(up, clamp)
            y *= up + offset
        if IS_WEIGHTED:
            y *= tl.load(W + row).to(tl.float32)
        y = y.to(Y.dtype.element_ty)
        tl.store(Y + row * columns + column, y, mask=inside)
        if SEES:
            see_largest(SEEN, tl.where(inside, magnitude_bits(y), 0))


_forward = jit(_forward_rows, ("num_rows",))


@jit
def _gradients(
    dy, x, up, offset, clamp, FUNCTION: tl.constexpr, IS_GATED: tl.constexpr, HAS_CLAMP: tl.constexpr
):
    """Return the gradients of x and of up, and the activation."""
    y, derivative = _value_and_derivative(_at_most(x, clamp) if HAS_CLAMP else x, FUNCTION)
    if IS_GATED:
        kept = _within(up, clamp) if HAS_CLAMP else up
        dup = dy * y
        dx = dy * (kept + offset) * derivative
        if HAS_CLAMP:
            dup = tl.where(tl.abs(up) > clamp, 0.0, dup)
            dx = tl.where(x > clamp, 0.0, dx)
        y *= kept + offset
    else:
        dx = dy * derivative
        dup = dx
    return dx, dup, y


def _backward_rows(
    DY, X, DX, Y, SUMS, SEEN, num_rows, columns, offset, clamp,
    FUNCTION: tl.constexpr, IS_GATED: tl.constexpr, HAS_CLAMP: tl.constexpr, RECOMPUTES: tl.constexpr,
    IS_IN_PLACE: tl.constexpr, HAS_SUMS: tl.constexpr, SEES: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = column < columns
    width = columns * (2 if IS_GATED else 1)
    total, total_up = tl.zeros([BLOCK], dtype=tl.float32), tl.zeros([BLOCK], dtype=tl.float32)
    for row in range(tl.program_id(0).to(tl.int64), num_rows, tl.num_programs(0)):
        start = row * width + column
        x = tl.load(X + start, mask=inside, other=0).to(tl.float32)
        dy = tl.load(DY + row * columns + column, mask=inside, other=0).to(tl.float32)
        up = tl.load(X + start + columns, mask=inside, other=0).to(tl.float32) if IS_GATED else x
        if IS_IN_PLACE:
            tl.debug_barrier()  # another thread may overwrite what this one reads
        dx, dup, y = _gradients(dy, x, up, offset, clamp, FUNCTION, IS_GATED, HAS_CLAMP)
        tl.store(DX + start, dx.to(DX.dtype.element_ty), mask=inside)
        if IS_GATED:
            tl.store(DX + start + columns, dup.to(DX.dtype.element_ty), mask=inside)
        if SEES:
            _see_gradients(SEEN, dx.to(DX.dtype.element_ty), dup.to(DX.dtype.element_ty), inside)
        if RECOMPUTES:
            tl.store(Y + row * columns + column, y.to(Y.dtype.element_ty), mask=inside)
        if HAS_SUMS:
            total += dx
            total_up += dup
    if HAS_SUMS:
        SUMS += tl.program_id(0) * width + column
        tl.store(SUMS, total, mask=inside)
        if IS_GATED:
            tl.store(SUMS + columns, total_up, mask=inside)


_backward = jit(_backward_rows, ("num_rows",))


@jit
def _see_gradients(SEEN, dx, dup, inside):
    """Note the largest absolute value of both gradients, rounded as they are stored; without a gate they are the same."""
    see_largest(SEEN, tl.where(inside, tl.maximum(magnitude_bits(dx), magnitude_bits(dup)), 0))


@jit
def _backward_cast(
    DY, X, SCALE, CODES, SEEN, r, c, offset, clamp,
    FUNCTION: tl.constexpr, IS_GATED: tl.constexpr, HAS_CLAMP: tl.constexpr, FORMAT: tl.constexpr,
    SEES: tl.constexpr, IS_EVEN: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    first_row, first_column = tl.program_id(0) * ROWS, tl.program_id(1) * COLUMNS
    row, column = tl.arange(0, ROWS), tl.arange(0, COLUMNS)
    inside = (row < r - first_row)[:, None] & (column < c - first_column)[None, :]
    mask = None if IS_EVEN else inside  # wider loads and stores than with a mask
    width = c * (2 if IS_GATED else 1)
    X += tl.cast(first_row, tl.int64) * width + first_column + row[:, None] * width + column[None, :]
    DY += tl.cast(first_row, tl.int64) * c + first_column + row[:, None] * c + column[None, :]
    x = tl.load(X, mask=mask).to(tl.float32)
    dy = tl.load(DY, mask=mask).to(tl.float32)
    up = tl.load(X + c, mask=mask).to(tl.float32) if IS_GATED else x
    tl.debug_barrier()  # another thread may overwrite what this one reads
    dx, dup, y = _gradients(dy, x, up, offset, clamp, FUNCTION, IS_GATED, HAS_CLAMP)
    dx, dup = dx.to(X.dtype.element_ty), dup.to(X.dtype.element_ty)
    tl.store(X, dx, mask=mask)
    if IS_GATED:
        tl.store(X + c, dup, mask=mask)
    if SEES:
        _see_gradients(SEEN, dx, dup, inside)
    codes = codes_of(y.to(X.dtype.element_ty).to(tl.float32), tl.load(SCALE + 1), FORMAT)
    CODES += tl.cast(first_column, tl.int64) * r + first_row + column[:, None] * r + row[None, :]
    tl.store(CODES, tl.trans(codes), mask=None if IS_EVEN else tl.trans(inside))


def _weighted_backward_rows(
    DY, X, W, DX, DW, ENDS, num_rows, columns, offset, clamp,
    FUNCTION: tl.constexpr, IS_GATED: tl.constexpr, HAS_CLAMP: tl.constexpr, NUM_GROUPS: tl.constexpr,
    BLOCK: tl.constexpr,
):  # fmt: skip
    stop = tl.load(ENDS + NUM_GROUPS - 1) if NUM_GROUPS > 0 else num_rows
    for row in range(tl.program_id(0).to(tl.int64), stop, tl.num_programs(0)):
        weight = tl.load(W + row).to(tl.float32)
        total = tl.zeros([BLOCK], dtype=tl.float32)
        for first in range(0, columns, BLOCK):
            column = first + tl.arange(0, BLOCK)
            inside = column < columns
            start = row * columns * (2 if IS_GATED else 1) + column
            x = tl.load(X + start, mask=inside, other=0).to(tl.float32)
            dy = tl.load(DY + row * columns + column, mask=inside, other=0).to(tl.float32)
            up = tl.load(X + start + columns, mask=inside, other=0).to(tl.float32) if IS_GATED else x
            tl.debug_barrier()  # the activation overwrites dy
            dx, dup, y = _gradients(dy * weight, x, up, offset, clamp, FUNCTION, IS_GATED, HAS_CLAMP)
            total += tl.where(inside, dy * y, 0.0)
            tl.store(DX + start, dx.to(DX.dtype.element_ty), mask=inside)
            if IS_GATED:
                tl.store(DX + start + columns, dup.to(DX.dtype.element_ty), mask=inside)
            tl.store(DY + row * columns + column, (y * weight).to(DY.dtype.element_ty), mask=inside)
        tl.store(DW + row, tl.sum(total, axis=0).to(DW.dtype.element_ty))


_weighted_backward = jit(_weighted_backward_rows, ("num_rows",))
