"""Checks that the state of a save is finite: weights and moments that are not must never become a checkpoint.

A step can be finite and still leave such state: one NaN in `exp_avg` makes a NaN weight, which only the next loss shows.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor

from megatrain.checkpoint.errors import NotFiniteStateError

SQUARES = ("exp_avg_sq",)
"""Kinds of state that are means of squares: never negative."""


def check_finite(parts: Iterable[tuple[str, str, Tensor]]) -> None:
    """Check (canonical name, kind, values) parts of the state of this rank; each is read once, where it lies.

    Raises:
        NotFiniteStateError: with the number of invalid values of each tensor.
    """
    parts = [part for part in parts if part[2].numel()]
    # The bounds of all parts are read by the host at once: a device is synchronised once, not for every part.
    bounds = [torch.stack(torch.aminmax(values.detach())).double() for _, _, values in parts]
    rows = torch.stack(bounds).tolist() if bounds else []
    invalid: dict[tuple[str, str], int] = {}
    for (name, kind, values), (low, high) in zip(parts, rows, strict=True):
        if not (is_valid_from(kind) <= low and high < math.inf):
            invalid[name, kind] = invalid.get((name, kind), 0) + num_invalid(values, kind)
    if invalid:
        shown = "; ".join(
            f"{kind} of {name} has {count} values that are infinite, NaN{' or negative' * (kind in SQUARES)}"
            for (name, kind), count in list(invalid.items())[:_MAX_SHOWN]
        )
        more = f"; and {len(invalid) - _MAX_SHOWN} more tensors" if len(invalid) > _MAX_SHOWN else ""
        raise NotFiniteStateError(
            f"{shown}{more}",
            fix=_FIX,
        )


def check_finite_values(value: Any, name: str) -> None:
    """Check the numbers in JSON values, such as the biases of experts; `name` names the value in the message.

    Raises:
        NotFiniteStateError: one is infinite or NaN.
    """
    if isinstance(value, dict):
        for key, item in value.items():
            check_finite_values(item, f"{name}.{key}")
    elif isinstance(value, list | tuple):
        for number, item in enumerate(value):
            check_finite_values(item, f"{name}[{number}]")
    elif isinstance(value, float) and not math.isfinite(value):
        raise NotFiniteStateError(f"{name} is {value}", fix=_FIX)


def is_valid_from(kind: str) -> float:
    """Return the smallest valid value of a kind of state."""
    return 0.0 if kind in SQUARES else -_LARGEST


def num_invalid(values: Tensor, kind: str) -> int:
    """Return how many values are infinite, NaN or, in a mean of squares, negative."""
    is_valid = values.isfinite() & (values >= is_valid_from(kind))
    return values.numel() - int(is_valid.sum())


_LARGEST = torch.finfo(torch.float64).max
_MAX_SHOWN = 3
_FIX = "resume from an older checkpoint with --ckpt-step N; older checkpoints are intact"
