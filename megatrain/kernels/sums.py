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

    A kernel that has them in its registers saves a pass over memory.
    """

    parts: tuple[Tensor, ...] = ()
    """Parts of the columns, each as few rows that are to be summed, [rows, columns]. Empty: it left none."""

    def take(self) -> tuple[Tensor, ...]:
        """Return the parts once."""
        parts, self.parts = self.parts, ()
        return parts


def add_column_sums(total: Tensor, x: Tensor, second: Tensor | None = None) -> None:
    """Compute total += x.sum(0).

    Args:
        total: [columns], contiguous, in the dtype of the accumulation.
        x: [rows, columns], in any float dtype.
        second: total of the last columns, where `total` has only those before; None: it has all.
    """
    assert x.shape[1] == total.numel() + (0 if second is None else second.numel())
    if is_fused(x):
        fused.add_column_sums(total, x, second)
        return
    for one, part in zip((total, second), x.tensor_split([total.numel()], dim=1), strict=True):
        if one is not None:
            one.add_(part.sum(0, dtype=accumulation_dtype(one.dtype)))


def column_sums_reference(x: Tensor) -> Tensor:
    """Return the sums of the columns of [..., columns], in the accumulation dtype: [1, columns]."""
    return x.flatten(0, -2).sum(0, keepdim=True, dtype=accumulation_dtype(x.dtype))


def sum_parts(parts: Tensor, own: Tensor, number: int, out: Tensor) -> None:
    """Sum parts, [size, n, ...], with `own`, [n, ...], in place of part `number`: -> `out`, [n, ...], which may be `own`.

    Parts are added in their order, 16-bit ones in fp32, and rounded once. All tensors are contiguous.
    """
    if is_fused(own):
        fused.sum_parts(parts, own, number, out)
        return
    total = torch.zeros_like(own, dtype=accumulation_dtype(own.dtype))
    for k, part in enumerate(parts):
        total += own if k == number else part
    out.copy_(total)
