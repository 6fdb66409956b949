"""What kernels are compared with: the reference of a function with a fused kernel, and head sizes of attention kernels on GPUs.

The head sizes are those that `config/subjects/attention_kernel.py` allows.
"""

import functools
from collections.abc import Callable
from typing import ParamSpec, TypeVar

import pytest
import torch

from megatrain.kernels.fused.launching import FusedKernels

P, R = ParamSpec("P"), TypeVar("R")

MAX_ERRORS = {torch.bfloat16: 0.02, torch.float16: 0.005}
"""Largest errors, relative to the largest value."""
DTYPES = {
    8: torch.bfloat16,
    16: torch.float16,
    32: torch.float16,
    40: torch.bfloat16,
    80: torch.bfloat16,
    96: torch.float16,
    120: torch.bfloat16,
    256: torch.bfloat16,
}
"""Dtype by the channels of a head."""


def reference(function: Callable[P, R]) -> Callable[P, R]:
    """Return the function with fused kernels switched off, as with --no-compile."""

    @functools.wraps(function)
    def without_kernels(*args: P.args, **kwargs: P.kwargs) -> R:
        with pytest.MonkeyPatch.context() as patched:
            patched.setattr(FusedKernels, "are_enabled", False)
            return function(*args, **kwargs)

    return without_kernels


def head_sizes_of(*backends: str) -> list[tuple[str, int]]:
    """Return each backend with the head sizes of DTYPES that it supports."""
    return [(backend, d) for backend in backends for d in DTYPES if _supports(backend, d)]


def _supports(backend: str, d: int) -> bool:
    is_small_enough = d <= 128 or backend in ("flash2", "triton", "sdpa")
    return is_small_enough and (backend != "flash4" or d % 32 == 0)
