"""Cross entropy over rows of logits, or over the part of each row that this rank holds: statistics and gradient.

    logits ──> maximum, sum of exponentials, target logit               (reduced over ranks by the caller)
           ──> softmax_scale * softmax - onehot_scale * onehot          (in the memory of the logits, on GPUs)

On GPUs logits stay in their own dtype, and each line is one fused kernel. The references here compute in the accumulation
dtype.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from megatrain.kernels.dtypes import accumulation_dtype
from megatrain.kernels.fused import cross_entropy as fused
from megatrain.kernels.fused.launching import is_fused

_NUM_CHUNKS = 4
"""Chunks per micro-batch, if the logits of each are within the two limits below."""
_MIN_CHUNK_BYTES = 1 << 29
_MAX_CHUNK_BYTES = 1 << 31
_ROW_MULTIPLE = 128
"""GEMMs take multiples of this many rows without a remainder."""


def chunk_rows(tokens: int, columns: int, itemsize: int) -> int:
    """Return the number of tokens in a chunk, for logits of `columns` values of `itemsize` bytes per token.

    Chunks are few, since each reads and writes the whole weight gradient, and of even size.
    """
    row = columns * itemsize
    size = min(max(tokens * row // _NUM_CHUNKS, _MIN_CHUNK_BYTES), _MAX_CHUNK_BYTES)
    most = max(1, size // row)
    if most >= tokens:
        return max(tokens, 1)
    even = -(-tokens // -(-tokens // most))
    return min(most, -(-even // _ROW_MULTIPLE) * _ROW_MULTIPLE)


class LogitStatistics(NamedTuple):
    """Softmax statistics of rows of logits, [t] each in the accumulation dtype, and the logits."""

    logits: Tensor
    """[t, v]: the logits; from the reference exp(logits - max_logits), in the accumulation dtype."""
    max_logits: Tensor
    """Maximum over the first `num_real` columns; finite, also without such columns."""
    sum_exp: Tensor
    """Sum of exp(logits - max_logits)."""
    target_logits: Tensor
    """Logit of the label's column, 0 if this rank does not hold it."""


def logit_statistics(logits: Tensor, columns: Tensor, num_real: int) -> LogitStatistics:
    """Compute the statistics; may overwrite `logits`.

    Args:
        logits: [t, v]; columns from `num_real` on are padding and do not count.
        columns: columns of the labels, [t]; -1 for a label that this rank does not hold.
    """
    if is_fused(logits):
        return LogitStatistics(logits, *fused.logit_statistics(logits, columns, num_real))
    values = logits.to(accumulation_dtype(logits.dtype))
    values[:, num_real:] = float("-inf")
    largest = values.max(dim=-1).values.clamp(min=torch.finfo(values.dtype).min)
    targets = values.gather(1, columns.clamp(min=0)[:, None]).squeeze(1).masked_fill(columns < 0, 0)
    exponentials = values.sub_(largest[:, None]).exp_()
    return LogitStatistics(exponentials, largest, exponentials.sum(dim=-1), targets)


def cross_entropy_backward(
    stats: LogitStatistics,
    log_sums: Tensor,
    columns: Tensor,
    softmax_scale: Tensor,
    onehot_scale: Tensor,
    num_real: int,
    dtype: torch.dtype,
) -> Tensor:
    """Return softmax_scale * softmax - onehot_scale * onehot, [t, v] in `dtype`; overwrites `stats.logits`.

    Args:
        log_sums: log-sum-exp of whole rows, [t] in the accumulation dtype.
        softmax_scale, onehot_scale: [t] in the accumulation dtype.
    """
    if is_fused(stats.logits):
        fused.write_gradient(stats.logits, log_sums, columns, softmax_scale, onehot_scale, num_real)
        return stats.logits.to(dtype)
    gradient = stats.logits.mul_(((stats.max_logits - log_sums).exp() * softmax_scale)[:, None])
    onehot = onehot_scale.masked_fill(columns < 0, 0).neg()[:, None]
    gradient.scatter_add_(1, columns.clamp(min=0)[:, None], onehot)
    return gradient.to(dtype)
