"""AdamW over a flat shard in one pass.

    master, exp_avg, exp_avg_sq, gradient  ->  master, exp_avg, exp_avg_sq, weight

The moments may be bf16: they are cast to the dtype of `master`, updated in it, and rounded to nearest.
Source: Loshchilov and Hutter, arXiv:1711.05101 (decoupled weight decay).
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from megatrain.kernels.fused.adamw import adamw_fused
from megatrain.kernels.fused.launching import is_fused
from megatrain.kernels.optimizer.shard_update import FlatUpdate, HyperparamRange

_CHUNK = 1 << 16
"""Elements per chunk on a CPU: four fp32 chunks stay in its cache."""


@dataclass(frozen=True, kw_only=True)
class AdamwStep:
    """Hyperparameters of one step that all ranges share. `step` counts from 1 and corrects the moments' bias."""

    beta1: float
    beta2: float
    eps: float
    step: int

    @property
    def correction1(self) -> float:
        return 1 - self.beta1**self.step

    @property
    def correction2(self) -> float:
        return 1 - self.beta2**self.step


def adamw(update: FlatUpdate, exp_avg: Tensor, exp_avg_sq: Tensor, numbers: AdamwStep) -> None:
    """Update a shard in place; on a GPU in one launch, without synchronizing the host. A shard may have no ranges."""
    if not update.ranges:
        return
    if is_fused(update.master):
        adamw_fused(
            update,
            exp_avg,
            exp_avg_sq,
            betas=(numbers.beta1, numbers.beta2),
            corrections=(numbers.correction1, numbers.correction2),
            eps=numbers.eps,
        )
        return
    if update.master.is_meta or not update.is_finite:
        return
    for one in update.ranges:
        for start in range(one.start, one.stop, _CHUNK):
            part = slice(start, min(start + _CHUNK, one.stop))
            _update_part(update, exp_avg[part], exp_avg_sq[part], part, one, numbers)


def _update_part(
    update: FlatUpdate,
    exp_avg: Tensor,
    exp_avg_sq: Tensor,
    part: slice,
    hyperparams: HyperparamRange,
    numbers: AdamwStep,
) -> None:
    master = update.master[part]
    scaled = update.grad[part].to(master.dtype) * update.grad_scale
    mean, mean_sq = (
        exp_avg.to(master.dtype),
        exp_avg_sq.to(master.dtype),
    )  # the states themselves if the dtype is the same
    mean.lerp_(scaled, 1 - numbers.beta1)
    mean_sq.mul_(numbers.beta2).addcmul_(scaled, scaled, value=1 - numbers.beta2)
    denominator = (mean_sq / numbers.correction2).sqrt_().add_(numbers.eps * hyperparams.eps_scale)
    master.mul_(1 - hyperparams.lr * hyperparams.weight_decay)
    master.addcdiv_(mean, denominator, value=-hyperparams.lr / numbers.correction1)
    for state, updated in ((exp_avg, mean), (exp_avg_sq, mean_sq)):
        if updated is not state:
            state.copy_(updated)
    if update.has_separate_weight:
        update.weight[part].copy_(master)
