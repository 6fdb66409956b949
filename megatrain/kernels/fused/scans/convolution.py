"""Causal depthwise convolution with an activation: `kernels.gated_delta.activated_convolution` on GPUs, forward and backward.

    z_t = bias + sum over d < width of weight[width - 1 - d] * x_(t - d)        y = silu(z), or z

A program has a few channels of ROWS tokens and reads each row once: the last rows stay in registers. The backward pass
computes z again, so that only x is saved; it also reads the WIDTH - 1 rows after its own, whose gradients reach them.
Terms across the start of a document are left out. Sums over tokens are sums of the programs' sums: deterministic.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function

from megatrain.kernels.fused.launching import cdiv, jit, launch, power_of_two, tl
from megatrain.kernels.fused.scans.chunks import first_rows_of_ids, like, with_contiguous_channels
from megatrain.kernels.qkv import Place

MAX_WIDTH = 4
_ROWS, _CHANNELS, _WARPS = 64, 512, 4


def causal_conv(
    x: Tensor, weight: Tensor, bias: Tensor | None = None, *, has_silu: bool,
    document_ids: Tensor | None = None, initial_tokens: Tensor | None = None, place: Place | None = None,
) -> Tensor:  # fmt: skip
    """Convolve x [b, s, c] with weight [c, width], width at most MAX_WIDTH.

    `initial_tokens` [b, width - 1, c] are the tokens before each sample; None: 0. `document_ids` [s, b] is the
    document of each token; the first of a sample continues its initial tokens. None: one document. The gradient of x is
    written into `place` [s, b, c].
    """
    assert 1 < weight.shape[1] <= MAX_WIDTH
    y: Tensor = _Convolution.apply(
        x, weight, bias, first_rows_of_ids(document_ids), initial_tokens, has_silu, place
    )
    return y


class _Convolution(Function):
    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, first: Tensor | None, initial: Tensor | None, has_silu: bool,
        place: Place | None,
    ) -> Tensor:  # fmt: skip
        ctx.save_for_backward(x, weight, bias, first, initial)
        ctx.has_silu, ctx.place = has_silu, place
        x = with_contiguous_channels(x)
        y = like(x)
        launch(
            _forward, _grid(x), x, *_inputs(x, weight, bias, first, initial), y, *x.shape[1:], _strides(x), _strides(y),
            **_constants(weight, bias, first, initial, has_silu=has_silu),
        )  # fmt: skip
        return y

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        x, weight, bias, first, initial = ctx.saved_tensors
        x, dy = with_contiguous_channels(x), with_contiguous_channels(dy)
        dx, grid = like(x) if ctx.place is None else ctx.place().transpose(0, 1), _grid(x)
        dinitial = (
            None if initial is None else torch.empty(initial.shape, dtype=initial.dtype, device=x.device)
        )
        (b, _, c), width = x.shape, weight.shape[1]
        sums = torch.empty(width + 1, b * grid[1], c, dtype=torch.float32, device=x.device)
        launch(
            _backward, grid, dy, x, *_inputs(x, weight, bias, first, initial), dx, dx if dinitial is None else dinitial, sums,
            *x.shape[1:], _strides(dy), _strides(x), _strides(dx),
            **_constants(weight, bias, first, initial, has_silu=ctx.has_silu),
        )  # fmt: skip
        of_channels = sums.sum(1)
        dweight = of_channels[:width].t().to(weight.dtype)
        return (
            dx,
            dweight,
            None if bias is None else of_channels[width].to(bias.dtype),
            None,
            dinitial,
            None,
            None,
        )


def _grid(x: Tensor) -> tuple[int, int, int]:
    return cdiv(x.shape[2], _block(x)), cdiv(x.shape[1], _ROWS), x.shape[0]


def _block(x: Tensor) -> int:
    return min(_CHANNELS, power_of_two(x.shape[2]))


def _strides(x: Tensor) -> tuple[int, ...]:
    return x.stride()[:2]


def _inputs(
    x: Tensor, weight: Tensor, bias: Tensor | None, first: Tensor | None, initial: Tensor | None
) -> tuple[Tensor, ...]:
    """Return the pointers of the kernels; x stands for those that are not used."""
    before = x if initial is None else initial.contiguous()
    return weight.t().contiguous(), x if bias is None else bias, x if first is None else first, before


def _constants(
    weight: Tensor, bias: Tensor | None, first: Tensor | None, initial: Tensor | None, *, has_silu: bool
) -> dict[str, Any]:
    return {
        "WIDTH": weight.shape[1],
        "ROWS": _ROWS,
        "BLOCK": min(_CHANNELS, power_of_two(weight.shape[0])),
        "HAS_BIAS": bias is not None,
        "HAS_FIRST": first is not None,
        "HAS_INITIAL": initial is not None,
        "HAS_SILU": has_silu,
        "num_warps": _WARPS,
    }


@jit
def _row(
    X, INITIAL, row, channel, inside, stride, s, channels, WIDTH: tl.constexpr, HAS_INITIAL: tl.constexpr
):
    """Load a row of a sample in fp32; rows before it are initial tokens or 0, rows after it 0."""
    x = tl.load(
        X + tl.cast(row, tl.int64) * stride + channel, mask=inside & (row >= 0) & (row < s), other=0
    ).to(tl.float32)
    if HAS_INITIAL:
        is_before = inside & (row < 0) & (row >= 1 - WIDTH)
        x += tl.load(INITIAL + (row + WIDTH - 1) * channels + channel, mask=is_before, other=0).to(tl.float32)
    return x


@jit
def _ahead(X, row, inside, stride, s):
    """Load a row as it is, two rows before its use, so that several loads are in flight; 0 after the sample."""
    return tl.load(X + tl.cast(row, tl.int64) * stride, mask=inside & (row < s), other=0)


@jit
def _weights(W, channel, inside, channels, WIDTH: tl.constexpr):
    """Return the weights of the token itself and of the three before it; 0 beyond the width."""
    none = tl.zeros(channel.shape, tl.float32)
    w0 = tl.load(W + (WIDTH - 1) * channels + channel, mask=inside, other=0).to(tl.float32)
    w1 = tl.load(W + (WIDTH - 2) * channels + channel, mask=inside, other=0).to(tl.float32)
    w2, w3 = none, none
    if WIDTH > 2:
        w2 = tl.load(W + (WIDTH - 3) * channels + channel, mask=inside, other=0).to(tl.float32)
    if WIDTH > 3:
        w3 = tl.load(W + channel, mask=inside, other=0).to(tl.float32)
    return w0, w1, w2, w3


@jit
def _reach(FIRST, row, s, HAS_FIRST: tl.constexpr):
    """Return how many rows before a row are of its document; 3 for more."""
    reach = 3
    if HAS_FIRST:
        first = tl.load(FIRST + tl.minimum(row, s - 1))
        reach = tl.where(first < 0, 3, tl.minimum(row - first, 3))
    return reach


@jit
def _forward(
    X, W, BIAS, FIRST, INITIAL, Y, s, channels, x_at, y_at,
    WIDTH: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr,
    HAS_BIAS: tl.constexpr, HAS_FIRST: tl.constexpr, HAS_INITIAL: tl.constexpr, HAS_SILU: tl.constexpr,
):  # fmt: skip
    channel, start, sample = (
        tl.program_id(0) * BLOCK + tl.arange(0, BLOCK),
        tl.program_id(1) * ROWS,
        tl.program_id(2),
    )
    inside = channel < channels
    X += tl.cast(sample, tl.int64) * x_at[0]
    Y += tl.cast(sample, tl.int64) * y_at[0] + channel
    FIRST += tl.cast(sample, tl.int64) * s
    INITIAL += tl.cast(sample, tl.int64) * (WIDTH - 1) * channels
    w0, w1, w2, w3 = _weights(W, channel, inside, channels, WIDTH)
    bias = tl.zeros([BLOCK], tl.float32)
    if HAS_BIAS:
        bias = tl.load(BIAS + channel, mask=inside, other=0).to(tl.float32)
    x3 = _row(X, INITIAL, start - 3, channel, inside, x_at[1], s, channels, WIDTH, HAS_INITIAL)
    x2 = _row(X, INITIAL, start - 2, channel, inside, x_at[1], s, channels, WIDTH, HAS_INITIAL)
    x1 = _row(X, INITIAL, start - 1, channel, inside, x_at[1], s, channels, WIDTH, HAS_INITIAL)
    X += channel
    x, following = _ahead(X, start, inside, x_at[1], s), _ahead(X, start + 1, inside, x_at[1], s)
    for row in tl.range(start, tl.minimum(start + ROWS, s)):
        x0 = x.to(tl.float32)
        x, following = following, _ahead(X, row + 2, inside, x_at[1], s)
        z = bias + w0 * x0
        if HAS_FIRST:
            reach = _reach(FIRST, row, s, HAS_FIRST)
            z += (
                tl.where(reach >= 1, w1 * x1, 0)
                + tl.where(reach >= 2, w2 * x2, 0)
                + tl.where(reach >= 3, w3 * x3, 0)
            )
        else:
            z += w1 * x1 + w2 * x2 + w3 * x3
        if HAS_SILU:
            z = z / (1 + tl.exp(-z))
        tl.store(Y + tl.cast(row, tl.int64) * y_at[1], z.to(Y.dtype.element_ty), mask=inside)
        x3, x2, x1 = x2, x1, x0


@jit
def _backward(
    DY, X, W, BIAS, FIRST, INITIAL, DX, DINITIAL, SUMS, s, channels, dy_at, x_at, dx_at,
    WIDTH: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr,
    HAS_BIAS: tl.constexpr, HAS_FIRST: tl.constexpr, HAS_INITIAL: tl.constexpr, HAS_SILU: tl.constexpr,
):  # fmt: skip
    """At each row its dz is added to the gradients of the rows it reads; the oldest of them, three rows before, is complete."""
    channel, start, sample = (
        tl.program_id(0) * BLOCK + tl.arange(0, BLOCK),
        tl.program_id(1) * ROWS,
        tl.program_id(2),
    )
    inside = channel < channels
    X += tl.cast(sample, tl.int64) * x_at[0]
    DY += tl.cast(sample, tl.int64) * dy_at[0] + channel
    DX += tl.cast(sample, tl.int64) * dx_at[0] + channel
    FIRST += tl.cast(sample, tl.int64) * s
    INITIAL += tl.cast(sample, tl.int64) * (WIDTH - 1) * channels
    DINITIAL += tl.cast(sample, tl.int64) * (WIDTH - 1) * channels + channel
    w0, w1, w2, w3 = _weights(W, channel, inside, channels, WIDTH)
    bias = tl.zeros([BLOCK], tl.float32)
    if HAS_BIAS:
        bias = tl.load(BIAS + channel, mask=inside, other=0).to(tl.float32)
    x3 = _row(X, INITIAL, start - 3, channel, inside, x_at[1], s, channels, WIDTH, HAS_INITIAL)
    x2 = _row(X, INITIAL, start - 2, channel, inside, x_at[1], s, channels, WIDTH, HAS_INITIAL)
    x1 = _row(X, INITIAL, start - 1, channel, inside, x_at[1], s, channels, WIDTH, HAS_INITIAL)
    dx1, dx2, dx3, dbias = bias * 0, bias * 0, bias * 0, bias * 0
    dw0, dw1, dw2, dw3 = bias * 0, bias * 0, bias * 0, bias * 0
    stop = tl.minimum(start + ROWS, s)
    X += channel
    x, next_x = _ahead(X, start, inside, x_at[1], s), _ahead(X, start + 1, inside, x_at[1], s)
    dy, next_dy = _ahead(DY, start, inside, dy_at[1], s), _ahead(DY, start + 1, inside, dy_at[1], s)
    for row in tl.range(start, stop + 3):
        x0, dz = x.to(tl.float32), dy.to(tl.float32)
        x, next_x = next_x, _ahead(X, row + 2, inside, x_at[1], s)
        dy, next_dy = next_dy, _ahead(DY, row + 2, inside, dy_at[1], s)
        r1, r2, r3 = x1, x2, x3
        reach = _reach(FIRST, row, s, HAS_FIRST)
        if HAS_FIRST:
            r1, r2, r3 = tl.where(reach >= 1, x1, 0), tl.where(reach >= 2, x2, 0), tl.where(reach >= 3, x3, 0)
        if HAS_SILU:
            z = bias + w0 * x0 + w1 * r1 + w2 * r2 + w3 * r3
            gate = 1 / (1 + tl.exp(-z))
            dz *= gate * (1 + z * (1 - gate))
        d1, d2, d3 = w1 * dz, w2 * dz, w3 * dz
        if HAS_FIRST:
            d1, d2, d3 = tl.where(reach >= 1, d1, 0), tl.where(reach >= 2, d2, 0), tl.where(reach >= 3, d3, 0)
        done = row - 3
        complete = (dx3 + d3).to(DX.dtype.element_ty)
        tl.store(
            DX + tl.cast(done, tl.int64) * dx_at[1], complete, mask=inside & (done >= start) & (done < stop)
        )
        if HAS_INITIAL:
            is_before = inside & (done < 0) & (done >= 1 - WIDTH)
            place = DINITIAL + (done + WIDTH - 1) * channels
            tl.store(place, (dx3 + d3).to(DINITIAL.dtype.element_ty), mask=is_before)
        dx3, dx2, dx1 = dx2 + d2, dx1 + d1, w0 * dz
        counted = tl.where(row < stop, dz, 0)
        dbias += counted
        dw0 += counted * x0
        dw1 += counted * r1
        dw2 += counted * r2
        dw3 += counted * r3
        x3, x2, x1 = x2, x1, x0
    part = tl.cast(sample, tl.int64) * tl.num_programs(1) + tl.program_id(1)
    SUMS += part * channels + channel
    step = tl.cast(tl.num_programs(1) * tl.num_programs(2), tl.int64) * channels
    _store_sums(SUMS, dbias, dw0, dw1, dw2, dw3, step, inside, WIDTH)


@jit
def _store_sums(SUMS, dbias, dw0, dw1, dw2, dw3, step, inside, WIDTH: tl.constexpr):
    """Store the gradients of the weights, the oldest token's first, and of the bias."""
    tl.store(SUMS + WIDTH * step, dbias, mask=inside)
    tl.store(SUMS + (WIDTH - 1) * step, dw0, mask=inside)
    tl.store(SUMS + (WIDTH - 2) * step, dw1, mask=inside)
    if WIDTH > 2:
        tl.store(SUMS + (WIDTH - 3) * step, dw2, mask=inside)
    if WIDTH > 3:
        tl.store(SUMS, dw3, mask=inside)
