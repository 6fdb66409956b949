"""`kernels.rotary.turn` in one pass, in place where the heads come out of a linear layer that does not keep them."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from megatrain.kernels.fused.launching import cdiv, jit, launch, power_of_two, tl
from megatrain.kernels.heads import whole_of

_TILE = 1024
"""Pairs of channels that a program turns."""


def turn(x: Tensor, cos: Tensor, sin: Tensor, *, is_interleaved: bool, is_back: bool = False) -> Tensor:
    """As `kernels.rotary.turn`."""
    y = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    _turn_into(y, x, cos, sin, is_interleaved, is_back)
    return y


def turn_heads(
    qkv: Tensor, sizes: Sequence[int], cos: Tensor, sin: Tensor, *, is_interleaved: bool
) -> tuple[Tensor, Tensor, Tensor]:
    """As `kernels.rotary.turn_heads`; the results are views of `qkv`."""
    turned = qkv[:, :, : sizes[0] + sizes[1]]
    _turn_into(turned, turned, cos, sin, is_interleaved, False)
    q, k, v = qkv.split(list(sizes), dim=2)
    return q, k, v


def turn_heads_backward(
    gradients: Sequence[Tensor], cos: Tensor, sin: Tensor, *, is_interleaved: bool
) -> Tensor:
    """As `kernels.rotary.turn_heads_backward`; gradients that are parts of one tensor are turned where they are."""
    s, b, _, d = gradients[0].shape
    sizes = [one.shape[2] for one in gradients]
    whole = whole_of(gradients)
    if whole is not None:
        turned = whole[:, :, : sizes[0] + sizes[1]]
        _turn_into(turned, turned, cos, sin, is_interleaved, True)
        return whole
    out = torch.empty(s, b, sum(sizes), d, dtype=gradients[0].dtype, device=gradients[0].device)
    dq, dk, dv = out.split(sizes, dim=2)
    _turn_into(dq, gradients[0], cos, sin, is_interleaved, True)
    _turn_into(dk, gradients[1], cos, sin, is_interleaved, True)
    dv.copy_(gradients[2])
    return out


def _turn_into(y: Tensor, x: Tensor, cos: Tensor, sin: Tensor, is_interleaved: bool, is_back: bool) -> None:
    """Channels of a head lie side by side in both; y may be x."""
    assert y.stride(-1) == 1
    assert all(table.is_contiguous() for table in (cos, sin))
    if x.stride(-1) != 1:
        x = x.contiguous()
    s, b, heads, d = x.shape
    half = cos.shape[-1]
    block = power_of_two(half)
    num_heads = min(power_of_two(heads), max(_TILE // block, 1))
    is_in_place = x.data_ptr() == y.data_ptr()
    launch(
        _turn, (s * b, cdiv(heads, num_heads)),
        x, y, cos, sin, b, heads, half, d, *x.stride()[:3], *y.stride()[:3],
        IS_INTERLEAVED=is_interleaved, IS_BACK=is_back, HEADS=num_heads, HALF=block,
        PASSED=0 if is_in_place or d == 2 * half else power_of_two(d - 2 * half),
        IS_IN_PLACE=is_in_place,
    )  # fmt: skip


@jit
def _turn(
    X, Y, COS, SIN, samples, heads, half, channels, x_s, x_b, x_n, y_s, y_b, y_n,
    IS_INTERLEAVED: tl.constexpr, IS_BACK: tl.constexpr, HEADS: tl.constexpr, HALF: tl.constexpr, PASSED: tl.constexpr,
    IS_IN_PLACE: tl.constexpr,
):  # fmt: skip
    token = tl.program_id(0).to(tl.int64)
    place = token // samples
    sample = token % samples
    head = tl.program_id(1).to(tl.int64) * HEADS + tl.arange(0, HEADS)
    pair = tl.arange(0, HALF)
    cos = tl.load(COS + place * half + pair, mask=pair < half, other=0).to(tl.float32)[None, :]
    sin = tl.load(SIN + place * half + pair, mask=pair < half, other=0).to(tl.float32)[None, :]
    if IS_BACK:
        sin = -sin
    first = (2 * pair if IS_INTERLEAVED else pair)[None, :]
    apart = 1 if IS_INTERLEAVED else half
    inside = (head < heads)[:, None] & (pair < half)[None, :]
    source = X + place * x_s + sample * x_b + head[:, None] * x_n
    target = Y + place * y_s + sample * y_b + head[:, None] * y_n
    a = tl.load(source + first, mask=inside, other=0).to(tl.float32)
    b = tl.load(source + first + apart, mask=inside, other=0).to(tl.float32)
    if IS_IN_PLACE:
        tl.debug_barrier()  # another thread may write where this one reads
    tl.store(target + first, (a * cos - b * sin).to(Y.dtype.element_ty), mask=inside)
    tl.store(target + first + apart, (b * cos + a * sin).to(Y.dtype.element_ty), mask=inside)
    if PASSED > 0:
        rest = (2 * half + tl.arange(0, PASSED))[None, :]
        inside = (head < heads)[:, None] & (rest < channels)
        tl.store(target + rest, tl.load(source + rest, mask=inside, other=0), mask=inside)
