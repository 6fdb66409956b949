"""`kernels.rotary.apply_rope` in one pass, in place for the output of a QKV projection."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from megatrain.kernels.fused.launching import cdiv, jit, launch, power_of_two, tl
from megatrain.kernels.qkv import fused_view

_TILE = 1024
"""Channel pairs per program."""


def apply_rope(
    x: Tensor, cos: Tensor, sin: Tensor, *, is_interleaved: bool, is_backward: bool = False
) -> Tensor:
    """Implement `kernels.rotary.apply_rope`."""
    y = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    rotate_into(y, x, cos, sin, is_interleaved, is_backward)
    return y


def apply_rope_to_qkv(
    qkv: Tensor, sizes: Sequence[int], cos: Tensor, sin: Tensor, *, is_interleaved: bool
) -> tuple[Tensor, ...]:
    """Implement `kernels.rotary.apply_rope_to_qkv`; the results are views of `qkv`."""
    rotated = qkv[:, :, : sizes[0] + sizes[1]]
    rotate_into(rotated, rotated, cos, sin, is_interleaved, False)
    return tuple(qkv.split(list(sizes), dim=2))


def apply_rope_to_qkv_backward(
    gradients: Sequence[Tensor], cos: Tensor, sin: Tensor, *, is_interleaved: bool
) -> Tensor:
    """Implement `kernels.rotary.apply_rope_to_qkv_backward`, in place if the gradients are views of one tensor."""
    s, b, _, d = gradients[0].shape
    sizes = [one.shape[2] for one in gradients]
    whole = fused_view(gradients)
    if whole is not None:
        rotated = whole[:, :, : sizes[0] + sizes[1]]
        rotate_into(rotated, rotated, cos, sin, is_interleaved, True)
        return whole
    out = torch.empty(s, b, sum(sizes), d, dtype=gradients[0].dtype, device=gradients[0].device)
    dq, dk, *others = out.split(sizes, dim=2)
    rotate_into(dq, gradients[0], cos, sin, is_interleaved, True)
    rotate_into(dk, gradients[1], cos, sin, is_interleaved, True)
    for other, gradient in zip(others, gradients[2:], strict=True):
        other.copy_(gradient)
    return out


def rotate_into(
    y: Tensor, x: Tensor, cos: Tensor, sin: Tensor, is_interleaved: bool, is_backward: bool
) -> None:
    """Write the rotated `x` to `y`, which may be `x`. Channels of a head are contiguous in both."""
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
        _rotate, (s * b, cdiv(heads, num_heads)),
        x, y, cos, sin, b, heads, half, d, *x.stride()[:3], *y.stride()[:3],
        IS_INTERLEAVED=is_interleaved, IS_BACKWARD=is_backward, HEADS=num_heads, HALF=block,
        PASSED=0 if is_in_place or d == 2 * half else power_of_two(d - 2 * half),
        IS_IN_PLACE=is_in_place,
    )  # fmt: skip


@jit
def _rotate(
    X, Y, COS, SIN, samples, heads, half, channels, x_s, x_b, x_n, y_s, y_b, y_n,
    IS_INTERLEAVED: tl.constexpr, IS_BACKWARD: tl.constexpr, HEADS: tl.constexpr, HALF: tl.constexpr, PASSED: tl.constexpr,
    IS_IN_PLACE: tl.constexpr,
):  # fmt: skip
    token = tl.program_id(0).to(tl.int64)
    position = token // samples
    sample = token % samples
    head = tl.program_id(1).to(tl.int64) * HEADS + tl.arange(0, HEADS)
    pair = tl.arange(0, HALF)
    cos = tl.load(COS + position * half + pair, mask=pair < half, other=0).to(tl.float32)[None, :]
    sin = tl.load(SIN + position * half + pair, mask=pair < half, other=0).to(tl.float32)[None, :]
    if IS_BACKWARD:
        sin = -sin
    first = (2 * pair if IS_INTERLEAVED else pair)[None, :]
    pair_stride = 1 if IS_INTERLEAVED else half
    inside = (head < heads)[:, None] & (pair < half)[None, :]
    source = X + position * x_s + sample * x_b + head[:, None] * x_n
    target = Y + position * y_s + sample * y_b + head[:, None] * y_n
    a = tl.load(source + first, mask=inside, other=0).to(tl.float32)
    b = tl.load(source + first + pair_stride, mask=inside, other=0).to(tl.float32)
    if IS_IN_PLACE:
        tl.debug_barrier()  # another thread may write where this one reads
    tl.store(target + first, (a * cos - b * sin).to(Y.dtype.element_ty), mask=inside)
    tl.store(target + first + pair_stride, (b * cos + a * sin).to(Y.dtype.element_ty), mask=inside)
    if PASSED > 0:
        rest = (2 * half + tl.arange(0, PASSED))[None, :]
        inside = (head < heads)[:, None] & (rest < channels)
        tl.store(target + rest, tl.load(source + rest, mask=inside, other=0), mask=inside)
