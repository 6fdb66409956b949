"""One pass of SGD with momentum over a flat shard.

    master, momentum, gradient  ->  master, momentum, weight

Weight decay is part of the gradient, as in PyTorch and Megatron-LM.
"""

from __future__ import annotations

from torch import Tensor

from megatrain.kernels.fused.launching import is_fused
from megatrain.kernels.fused.sgd import sgd_fused
from megatrain.kernels.optimizer.shard_update import FlatUpdate


def sgd(update: FlatUpdate, momentum_buffer: Tensor, *, momentum: float) -> None:
    """Update a shard in place; on a GPU in one launch, without a word to the host. A shard may have no runs left."""
    if not update.runs:
        return
    if is_fused(update.master):
        sgd_fused(update, momentum_buffer, momentum=momentum)
    else:
        sgd_reference(update, momentum_buffer, momentum=momentum)


def sgd_reference(update: FlatUpdate, momentum_buffer: Tensor, *, momentum: float) -> None:
    """The same in plain operations."""
    if update.master.is_meta or not update.is_finite:
        return
    for run in update.runs:
        master, buffer = update.master[run.part], momentum_buffer[run.part]
        scaled = update.grad[run.part].to(master.dtype) * update.grad_scale
        wide = buffer.to(master.dtype)  # the buffer itself, where it is as wide
        wide.mul_(momentum).add_(scaled.add_(master, alpha=run.weight_decay))
        master.add_(wide, alpha=-run.lr)
        if wide is not buffer:
            buffer.copy_(wide)
        if update.has_separate_weight:
            update.weight[run.part].copy_(master)
