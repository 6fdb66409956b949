"""Sums of a matrix's columns, added in place: the gradient of a bias.

On GPUs one fused kernel reads the matrix once, at the memory's speed, and gives the same bits in every run; the
reference here does the same in any dtype on any device.
"""

from __future__ import annotations

from torch import Tensor

from megatrain.kernels.fused import column_sums as fused
from megatrain.kernels.fused.launching import is_fused


def add_column_sums(total: Tensor, x: Tensor) -> None:
    """total += x summed over its rows.

    Args:
        total: [columns], in the dtype of the sums.
        x: [rows, columns], in any float dtype.
    """
    if is_fused(x):
        fused.add_column_sums(total, x)
    else:
        add_column_sums_reference(total, x)


def add_column_sums_reference(total: Tensor, x: Tensor) -> None:
    """The same, by torch's own sum."""
    total.add_(x.sum(0, dtype=total.dtype))
