"""flash-attn-4, imported when it is first asked for: it takes seconds, and plans do without."""

from __future__ import annotations

import functools
import threading
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any
from unittest import mock

import torch


@dataclass(frozen=True)
class Flash4Functions:
    """Its functions that take a log-sum-exp, and memory for their results. They are private: no public ones take these."""

    forward: Callable[..., Any]
    backward: Callable[..., Any]


_ONE_IMPORT = threading.Lock()
"""A thread imports it early, and whoever needs it."""


@functools.cache
def flash4() -> Flash4Functions:
    """The library; a plan takes it only where it is installed."""
    # What it says to itself about an argument of its own kernels, on every compilation.
    warnings.filterwarnings(
        "ignore", "Argument aux_data .* cannot be converted to a JitArgument", UserWarning
    )
    # An autotuner of quack's, which it imports and never calls, marks functions so, which brings torch's compiler: 3.6 s.
    with _ONE_IMPORT, mock.patch.object(torch.compiler, "disable", _unmarked):
        from flash_attn.cute.interface import _flash_attn_bwd, _flash_attn_fwd  # noqa: PLC0415
    return Flash4Functions(_flash_attn_fwd, _flash_attn_bwd)


def _unmarked(fn: Callable[..., Any] | None = None, *_: object, **__: object) -> Any:
    """In place of `torch.compiler.disable`."""
    return _unmarked if fn is None else fn


def determinism_options() -> dict[str, bool]:
    """What its backward passes are told, as torch's own kernels ask for themselves."""
    return {"deterministic": torch.are_deterministic_algorithms_enabled()}
