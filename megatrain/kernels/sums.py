"""Sums that have a kernel of their own: of columns, for the gradient of a bias, and of parts that ranks sent.

On GPUs a fused kernel reads its input once, at memory bandwidth, and is deterministic; the references here run in any dtype on any
device.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from megatrain.kernels.dtypes import accumulation_dtype
from megatrain.kernels.fused import sums as fused
from megatrain.kernels.fused.launching import is_fused


@dataclass
class ColumnSums:
    """Column sums of a gradient, left by the kernel that wrote it to the layer that needs them for its bias.

    None: it left none. A kernel that has them in its registers saves a pass over memory.
    """

    value: Tensor | None = None

    def take(self) -> Tensor | None:
        """Return the sums once."""
        value, self.value = self.value, None
        return value


def add_column_sums(total: Tensor, x: Tensor) -> None:
    """Compute total += x.sum(0).

    Args:
        total: [columns], in the dtype of the accumulation.
        x: [rows, columns], in any float dtype.
    """
    if is_fused(x):
        fused.column_sums(x, total)
    else:
        add_column_sums_reference(total, x)


def column_sums_reference(x: Tensor) -> Tensor:
    """Return the sums of the columns of [..., columns], in the accumulation dtype."""
    return x.flatten(0, -2).sum(0, dtype=accumulation_dtype(x.dtype))


def add_column_sums_reference(total: Tensor, x: Tensor) -> None:
    """Compute it with torch's sum."""
    total.add_(x.sum(0, dtype=total.dtype))


def sum_parts(parts: Tensor, own: Tensor, number: int, out: Tensor) -> None:
    """Sum parts, [size, n, ...], with `own`, [n, ...], in place of part `number`: -> `out`, [n, ...], which may be `own`.

    Parts are added in their order, 16-bit ones in fp32, and rounded once. All tensors are contiguous.
    """
    if is_fused(own):
        fused.sum_parts(parts, own, number, out)
    else:
        sum_parts_reference(parts, own, number, out)


def sum_parts_reference(parts: Tensor, own: Tensor, number: int, out: Tensor) -> None:
    """Sum with torch operators."""
    total = torch.zeros_like(own, dtype=accumulation_dtype(own.dtype))
    for k, part in enumerate(parts):
        total += own if k == number else part
    out.copy_(total)
