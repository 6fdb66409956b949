"""AdamW over a flat shard in one launch that reads and writes each value once.

read   gradient 4 (2 in bf16), master 4, exp_avg 4 (2), exp_avg_sq 4 (2)
write  master 4, exp_avg 4 (2), exp_avg_sq 4 (2), weight 2        30 bytes per element, 22 with both moments in bf16
"""

from __future__ import annotations

import torch
from torch import Tensor

from megatrain.kernels.fused.launching import cdiv, jit, launch, tl
from megatrain.kernels.fused.ranges import range_arguments, select_by_range
from megatrain.kernels.optimizer.shard_update import FlatUpdate

_BLOCK = 2048


def adamw_fused(
    update: FlatUpdate,
    exp_avg: Tensor,
    exp_avg_sq: Tensor,
    *,
    betas: tuple[float, float],
    corrections: tuple[float, float],
    eps: float,
) -> None:
    """Implement `kernels.optimizer.adamw.adamw`."""
    flat = (update.master, update.grad, update.weight, exp_avg, exp_avg_sq)
    assert all(x.is_contiguous() for x in flat)
    size = update.master.numel()
    values = [
        (1 - one.lr * one.weight_decay, one.lr / corrections[0], eps * one.eps_scale) for one in update.ranges
    ]
    launch(
        _adamw, (cdiv(size, _BLOCK),),
        update.master, exp_avg, exp_avg_sq, update.grad, update.weight,
        update.grad_scale, update.is_finite.view(torch.uint8), size, *range_arguments(update.ranges, values),
        1 - betas[0], betas[1], 1 - betas[1], 1 / corrections[1],
        WRITES_WEIGHT=update.has_separate_weight, BLOCK=_BLOCK, num_warps=8,
    )  # fmt: skip


@jit
def _adamw(
    MASTER, MEAN, MEAN_SQ, GRAD, WEIGHT, GRAD_SCALE, IS_FINITE, size, start1, start2, start3,
    keep0, keep1, keep2, keep3, rate0, rate1, rate2, rate3, eps0, eps1, eps2, eps3,
    one_minus_beta1, beta2, one_minus_beta2, inverse_correction2,
    WRITES_WEIGHT: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    active = at < size * tl.load(IS_FINITE).to(tl.int64)
    keep = select_by_range(at, start1, start2, start3, keep0, keep1, keep2, keep3)
    rate = select_by_range(at, start1, start2, start3, rate0, rate1, rate2, rate3)
    eps = select_by_range(at, start1, start2, start3, eps0, eps1, eps2, eps3)
    grad = tl.load(GRAD + at, mask=active, other=0).to(tl.float32) * tl.load(GRAD_SCALE)
    mean = tl.load(MEAN + at, mask=active, other=0).to(tl.float32)
    mean_sq = tl.load(MEAN_SQ + at, mask=active, other=0).to(tl.float32)
    master = tl.load(MASTER + at, mask=active, other=0)
    mean += (grad - mean) * one_minus_beta1
    mean_sq = mean_sq * beta2 + grad * grad * one_minus_beta2
    master = master * keep - rate * mean / (tl.sqrt(mean_sq * inverse_correction2) + eps)
    tl.store(MASTER + at, master, mask=active)
    tl.store(MEAN + at, mean.to(MEAN.dtype.element_ty), mask=active)
    tl.store(MEAN_SQ + at, mean_sq.to(MEAN_SQ.dtype.element_ty), mask=active)
    if WRITES_WEIGHT:
        tl.store(WEIGHT + at, master.to(WEIGHT.dtype.element_ty), mask=active)
