"""flash-attn-4, imported when it is first asked for: it takes seconds, and plans do without."""

from __future__ import annotations

import functools
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch


@dataclass(frozen=True)
class Flash4Functions:
    """Its functions."""

    attend: Callable[..., Any]
    """For samples, with a backward pass of its own."""
    attend_by_length: Callable[..., Any]
    """For documents end to end, likewise."""
    forward: Callable[..., Any]
    backward: Callable[..., Any]
    """The two that take a log-sum-exp, which are private: no public ones take one."""


@functools.cache
def flash4() -> Flash4Functions:
    """The library; a plan takes it only where it is installed."""
    # What it says to itself about an argument of its own kernels, on every compilation.
    warnings.filterwarnings(
        "ignore", "Argument aux_data .* cannot be converted to a JitArgument", UserWarning
    )
    from flash_attn.cute import flash_attn_func, flash_attn_varlen_func  # noqa: PLC0415
    from flash_attn.cute.interface import _flash_attn_bwd, _flash_attn_fwd  # noqa: PLC0415

    return Flash4Functions(flash_attn_func, flash_attn_varlen_func, _flash_attn_fwd, _flash_attn_bwd)


def order_of_sums() -> dict[str, bool]:
    """What its backward passes are told, as torch's own kernels ask for themselves."""
    return {"deterministic": torch.are_deterministic_algorithms_enabled()}
