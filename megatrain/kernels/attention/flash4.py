"""flash-attn-4, imported on first use: the import takes seconds, and plans do not need it."""

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
    """Private functions of flash-attn-4: unlike the public ones they take the log-sum-exp and output tensors."""

    forward: Callable[..., Any]
    backward: Callable[..., Any]


_IMPORT_LOCK = threading.Lock()
"""Held during the import, which an early-import thread and the first use may start concurrently."""


@functools.cache
def flash4() -> Flash4Functions:
    """Import and return the functions; a plan selects this backend only if the library is installed."""
    # The library warns about an argument of its own kernels on every compilation.
    warnings.filterwarnings(
        "ignore", "Argument aux_data .* cannot be converted to a JitArgument", UserWarning
    )
    # It imports an autotuner of quack, never used here, whose decorator loads torch's compiler: 3.6 s.
    with _IMPORT_LOCK, mock.patch.object(torch.compiler, "disable", _no_disable):
        from flash_attn.cute.interface import _flash_attn_bwd, _flash_attn_fwd  # noqa: PLC0415
    return Flash4Functions(_flash_attn_fwd, _flash_attn_bwd)


def _no_disable(fn: Callable[..., Any] | None = None, *_: object, **__: object) -> Any:
    """Replace `torch.compiler.disable`: return the function unchanged."""
    return _no_disable if fn is None else fn


def determinism_options() -> dict[str, bool]:
    """Return the arguments of its backward pass that follow torch's deterministic mode, as torch's own kernels do."""
    return {"deterministic": torch.are_deterministic_algorithms_enabled()}
