"""Selection and launch of fused kernels.

torch's GPU builds include Triton. Without it the kernels are only definitions, and a memory plan made on the meta device
allocates their outputs. With --no-compile GPUs run the references too.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, ClassVar

import torch
from torch import Tensor

try:
    import triton
    from triton import language as tl
except ModuleNotFoundError:
    triton, tl = None, None

__all__ = ["cdiv", "enable_fused_kernels", "is_fake", "is_fused", "jit", "launch", "power_of_two", "tl"]


class FusedKernels:
    """The process-wide switch of the fused kernels, in the manner of `torch.backends.*.enabled`; the engine sets it once.

    It is process state, not an argument or a context variable: backward passes run in autograd's threads, which see
    neither, and a pass must use the same kernels in both directions.
    """

    are_enabled: ClassVar[bool] = True


def enable_fused_kernels(*, are_enabled: bool) -> None:
    """Set whether fused kernels run in this process from now on (--compile, --no-compile)."""
    FusedKernels.are_enabled = are_enabled


def is_fused(x: Tensor) -> bool:
    """Return True if fused kernels process this tensor: on GPUs, except in fp64, since they compute in fp32."""
    return FusedKernels.are_enabled and x.is_cuda and x.dtype is not torch.float64


def jit(function: Callable[..., None], any_value: Sequence[str] = ()) -> Any:
    """Return a function as a Triton kernel, or as a part of kernels.

    Args:
        any_value: integer arguments that do not specialize the kernel; it is compiled again for other arguments that are
            1 or multiples of 16.
    """
    return function if triton is None else triton.jit(function, do_not_specialize=list(any_value))


def launch(kernel: Any, grid: tuple[int, ...], x: Tensor, /, *others: Any, **constants: Any) -> None:
    """Launch a kernel; do nothing for an empty grid or tensors without memory, `x` and others."""
    if 0 in grid or is_fake(x):
        return
    kernel[grid](x, *others, **constants)


def is_fake(x: Tensor) -> bool:
    """Return True for a tensor with a shape but no memory, as memory plans use."""
    return x.is_meta


def cdiv(a: int, b: int) -> int:
    """Return a / b, rounded up."""
    return -(-a // b)


def power_of_two(n: int) -> int:
    """Return the smallest power of two that is at least n."""
    return 1 << max(n - 1, 0).bit_length()
