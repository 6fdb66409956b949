"""One pass of SGD with momentum over a flat shard.

    main, momentum, gradient  ->  main, momentum, weight

Weight decay is part of the gradient, as in PyTorch and Megatron-LM.
"""

from __future__ import annotations

from torch import Tensor

from megatrain.kernels.fused.launching import is_fused
from megatrain.kernels.fused.sgd import sgd_fused
from megatrain.kernels.optimizer.flat import FlatUpdate


def sgd(update: FlatUpdate, momentum_buffer: Tensor, *, momentum: float) -> None:
    """Update a shard in place; on a GPU in one launch, without a word to the host. A shard may have no runs left."""
    if not update.runs:
        return
    if is_fused(update.main):
        sgd_fused(update, momentum_buffer, momentum=momentum)
    else:
        sgd_reference(update, momentum_buffer, momentum=momentum)


def sgd_reference(update: FlatUpdate, momentum_buffer: Tensor, *, momentum: float) -> None:
    """The same in plain operations."""
    if update.main.is_meta or not update.is_finite:
        return
    for run in update.runs:
        main, buffer = update.main[run.part], momentum_buffer[run.part]
        scaled = update.grad[run.part].to(main.dtype) * update.grad_scale
        wide = buffer.to(main.dtype)  # the buffer itself, where it is as wide
        wide.mul_(momentum).add_(scaled.add_(main, alpha=run.weight_decay))
        main.add_(wide, alpha=-run.lr)
        if wide is not buffer:
            buffer.copy_(wide)
        if update.is_main_apart:
            update.weight[run.part].copy_(main)
