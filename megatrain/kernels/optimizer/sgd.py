"""SGD with momentum over a flat shard in one pass.

    master, momentum, gradient  ->  master, momentum, weight

Weight decay is added to the gradient, as in PyTorch and Megatron-LM.
"""

from __future__ import annotations

from torch import Tensor

from megatrain.kernels.fused.launching import is_fused
from megatrain.kernels.fused.sgd import sgd_fused
from megatrain.kernels.optimizer.shard_update import FlatUpdate


def sgd(update: FlatUpdate, momentum_buffer: Tensor, *, momentum: float) -> None:
    """Update a shard in place; on a GPU in one launch, without synchronizing the host. A shard may have no ranges."""
    if not update.ranges:
        return
    if is_fused(update.master):
        sgd_fused(update, momentum_buffer, momentum=momentum)
        return
    if update.master.is_meta or not update.is_finite:
        return
    for one in update.ranges:
        master, buffer = update.master[one.part], momentum_buffer[one.part]
        scaled = update.grad[one.part].to(master.dtype) * update.grad_scale
        updated = buffer.to(master.dtype)  # the buffer itself if the dtype is the same
        updated.mul_(momentum).add_(scaled.add_(master, alpha=one.weight_decay))
        master.add_(updated, alpha=-one.lr)
        if updated is not buffer:
            buffer.copy_(updated)
        if update.has_separate_weight:
            update.weight[one.part].copy_(master)
