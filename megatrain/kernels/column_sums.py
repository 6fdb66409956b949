"""Column sums of a matrix, accumulated in place: the gradient of a bias.

On GPUs one fused kernel reads the matrix once, at memory bandwidth, and is deterministic; the reference here runs in any
dtype on any device.
"""

from __future__ import annotations

from torch import Tensor

from megatrain.kernels.fused import column_sums as fused
from megatrain.kernels.fused.launching import is_fused


def add_column_sums(total: Tensor, x: Tensor) -> None:
    """Compute total += x.sum(0).

    Args:
        total: [columns], in the dtype of the accumulation.
        x: [rows, columns], in any float dtype.
    """
    if is_fused(x):
        fused.add_column_sums(total, x)
    else:
        add_column_sums_reference(total, x)


def add_column_sums_reference(total: Tensor, x: Tensor) -> None:
    """Compute it with torch's sum."""
    total.add_(x.sum(0, dtype=total.dtype))
