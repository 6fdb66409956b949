"""The softmax of a row of logits, or of the part of a row that this rank holds: what is known of it, and its gradient.

    logits ──> largest, sum of exponentials, target          (what ranks need of one another)
           ──> share * softmax - minus * onehot              (in the memory of the logits, on GPUs)

On GPUs logits stay in their own dtype, and each line is one fused kernel; the references here compute in `accumulation_dtype(dtype)`.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from megatrain.kernels.dtypes import accumulation_dtype
from megatrain.kernels.fused import cross_entropy as fused
from megatrain.kernels.fused.launching import is_fused


class Rows(NamedTuple):
    """What is known of rows of logits; wide [t] each, but for the values."""

    values: Tensor
    """[t, v]: the logits, or, by the reference, their exponentials less the largest, wide."""
    largest: Tensor
    """Logit of the `num_real` columns; finite, also where there are none."""
    sums: Tensor
    """Of the exponentials of logits less the largest."""
    targets: Tensor
    """Logit of the label's column, 0 where it is not here."""


def logit_statistics(logits: Tensor, columns: Tensor, num_real: int) -> Rows:
    """Look at rows once; uses up `logits`.

    Args:
        logits: [t, v]; columns from `num_real` on are padding and left out.
        columns: of the labels, [t]; -1 where a label is not here.
    """
    if is_fused(logits):
        return Rows(logits, *fused.logit_statistics(logits, columns, num_real))
    return logit_statistics_reference(logits, columns, num_real)


def cross_entropy_backward(
    rows: Rows,
    log_sums: Tensor,
    columns: Tensor,
    share: Tensor,
    minus: Tensor,
    num_real: int,
    dtype: torch.dtype,
) -> Tensor:
    """share * softmax - minus * onehot, [t, v] in `dtype`; uses up `rows.values`.

    Args:
        log_sums: logarithms of the sums of exponentials over whole rows, wide [t].
        share, minus: wide [t].
    """
    if is_fused(rows.values):
        fused.write_gradient(rows.values, log_sums, columns, share, minus, num_real)
        return rows.values.to(dtype)
    return cross_entropy_backward_reference(rows, log_sums, columns, share, minus, dtype)


def logit_statistics_reference(logits: Tensor, columns: Tensor, num_real: int) -> Rows:
    """The same, written out."""
    values = logits.to(accumulation_dtype(logits.dtype))
    values[:, num_real:] = float("-inf")
    largest = values.max(dim=-1).values.clamp(min=torch.finfo(values.dtype).min)
    targets = values.gather(1, columns.clamp(min=0)[:, None]).squeeze(1).masked_fill(columns < 0, 0)
    exponentials = values.sub_(largest[:, None]).exp_()
    return Rows(exponentials, largest, exponentials.sum(dim=-1), targets)


def cross_entropy_backward_reference(
    rows: Rows, log_sums: Tensor, columns: Tensor, share: Tensor, minus: Tensor, dtype: torch.dtype
) -> Tensor:
    """The same, written out."""
    gradient = rows.values.mul_(((rows.largest - log_sums).exp() * share)[:, None])
    gradient.scatter_add_(1, columns.clamp(min=0)[:, None], minus.masked_fill(columns < 0, 0).neg()[:, None])
    return gradient.to(dtype)
