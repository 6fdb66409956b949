"""SGD with momentum over a flat shard in one launch: 22 bytes per element with fp32 gradients and bf16 weights."""

from __future__ import annotations

import torch
from torch import Tensor

from megatrain.kernels.fused.launching import cdiv, jit, launch, tl
from megatrain.kernels.fused.ranges import range_arguments, select_by_range
from megatrain.kernels.optimizer.shard_update import FlatUpdate

_BLOCK = 2048


def sgd_fused(update: FlatUpdate, momentum_buffer: Tensor, *, momentum: float) -> None:
    """Implement `kernels.optimizer.sgd.sgd`."""
    flat = (update.master, update.grad, update.weight, momentum_buffer)
    assert all(x.is_contiguous() for x in flat)
    size = update.master.numel()
    values = [(one.weight_decay, one.lr) for one in update.ranges]
    launch(
        _sgd, (cdiv(size, _BLOCK),),
        update.master, momentum_buffer, update.grad, update.weight,
        update.grad_scale, update.is_finite.view(torch.uint8), size, *range_arguments(update.ranges, values),
        momentum, WRITES_WEIGHT=update.has_separate_weight, BLOCK=_BLOCK, num_warps=8,
    )  # fmt: skip


@jit
def _sgd(
    MASTER, MOMENTUM, GRAD, WEIGHT, GRAD_SCALE, IS_FINITE, size, start1, start2, start3,
    decay0, decay1, decay2, decay3, lr0, lr1, lr2, lr3, momentum,
    WRITES_WEIGHT: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    active = at < size * tl.load(IS_FINITE).to(tl.int64)
    decay = select_by_range(at, start1, start2, start3, decay0, decay1, decay2, decay3)
    lr = select_by_range(at, start1, start2, start3, lr0, lr1, lr2, lr3)
    grad = tl.load(GRAD + at, mask=active, other=0).to(tl.float32) * tl.load(GRAD_SCALE)
    buffer = tl.load(MOMENTUM + at, mask=active, other=0).to(tl.float32)
    master = tl.load(MASTER + at, mask=active, other=0)
    buffer = buffer * momentum + (grad + decay * master)
    master -= lr * buffer
    tl.store(MASTER + at, master, mask=active)
    tl.store(MOMENTUM + at, buffer.to(MOMENTUM.dtype.element_ty), mask=active)
    if WRITES_WEIGHT:
        tl.store(WEIGHT + at, master.to(WEIGHT.dtype.element_ty), mask=active)
