"""When fused kernels run, and how they are started.

Triton comes with torch's builds for GPUs. Where it is missing, the kernels are there to be read, and a plan made with
tensors on the meta device allocates what they would write to. Under --no-compile their references run on GPUs too.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

try:
    import triton
    from triton import language as tl
except ModuleNotFoundError:
    triton, tl = None, None

__all__ = ["cdiv", "compile_kernels", "is_fake", "is_fused", "jit", "launch", "power_of_two", "tl"]


@dataclass
class _Mode:
    """Of the whole process, as modes of torch are: backward passes run in threads of their own."""

    is_compiling: bool = True


_MODE = _Mode()


def compile_kernels(*, are_wanted: bool) -> None:
    """Say whether fused kernels run at all, from now on."""
    _MODE.is_compiling = are_wanted


def is_fused(x: Tensor) -> bool:
    """Whether work on this tensor is done by fused kernels: on GPUs, but for fp64, which is for proofs. Integers are exact."""
    return _MODE.is_compiling and x.is_cuda and x.dtype is not torch.float64


def jit(function: Callable[..., None], any_value: Sequence[str] = ()) -> Any:
    """A function as a Triton kernel, or a part of kernels.

    Args:
        any_value: integer arguments for which it is compiled once; for others again for 1 and for multiples of 16.
    """
    return function if triton is None else triton.jit(function, do_not_specialize=list(any_value))


def launch(kernel: Any, grid: tuple[int, ...], *arguments: Any, **constants: Any) -> None:
    """Start a kernel; on tensors without memory nothing is to be done."""
    if 0 in grid or any(isinstance(a, Tensor) and is_fake(a) for a in arguments):
        return
    kernel[grid](*arguments, **constants)


def is_fake(x: Tensor) -> bool:
    """Whether a plan is being made: there is a shape, and no memory."""
    return x.is_meta


def cdiv(a: int, b: int) -> int:
    """a / b, rounded up."""
    return -(-a // b)


def power_of_two(n: int) -> int:
    """The smallest power of two that is no less than n."""
    return 1 << max(n - 1, 0).bit_length()
