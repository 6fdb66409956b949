"""Lion over a flat shard: one state, and steps of the same size in every element.

    step <- sign(beta1 m + (1 - beta1) g)        m <- beta2 m + (1 - beta2) g        w <- (1 - lr decay) w - lr step

Source: Chen et al., arXiv:2302.06675. Torch operators on every device, without synchronizing the host.
"""

from __future__ import annotations

import torch
from torch import Tensor

from megatrain.kernels.optimizer.shard_update import FlatUpdate

_CHUNKS = {"cpu": 1 << 16}
_CHUNK = 1 << 24
"""Elements per chunk on a GPU, where temporary tensors take 64 MiB each; on a CPU they stay in its cache."""


def lion(update: FlatUpdate, exp_avg: Tensor, *, beta1: float, beta2: float) -> None:
    """Update a shard in place. A shard may have no ranges."""
    chunk = _CHUNKS.get(update.master.device.type, _CHUNK)
    for one in update.ranges:
        for start in range(one.start, one.stop, chunk):
            part = slice(start, min(start + chunk, one.stop))
            master, state = update.master[part], exp_avg[part]
            grad = update.grad[part].to(master.dtype) * update.grad_scale
            mean = state.to(master.dtype)
            step = mean.lerp(grad, 1 - beta1).sign_()
            changed = master.mul(1 - one.lr * one.weight_decay).add_(step, alpha=-one.lr)
            master.copy_(torch.where(update.is_finite, changed, master))
            state.copy_(torch.where(update.is_finite, mean.lerp(grad, 1 - beta2), mean))
            if update.has_separate_weight:
                update.weight[part].copy_(master)
