"""The reference of a function with a fused kernel: what it computes without the kernel."""

import functools
from collections.abc import Callable
from typing import ParamSpec, TypeVar

import pytest

from megatrain.kernels.fused.launching import FusedKernels

P, R = ParamSpec("P"), TypeVar("R")


def reference(function: Callable[P, R]) -> Callable[P, R]:
    """Return the function with fused kernels switched off, as with --no-compile."""

    @functools.wraps(function)
    def without_kernels(*args: P.args, **kwargs: P.kwargs) -> R:
        with pytest.MonkeyPatch.context() as patched:
            patched.setattr(FusedKernels, "are_enabled", False)
            return function(*args, **kwargs)

    return without_kernels
