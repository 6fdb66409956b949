"""SGD with momentum over a flat shard in one launch: 22 bytes an element, with fp32 gradients and bf16 weights."""

from __future__ import annotations

import torch
from torch import Tensor

from megatrain.kernels.fused.launching import cdiv, jit, launch, tl
from megatrain.kernels.fused.runs import borders_and_numbers, pick
from megatrain.kernels.optimizer.shard_update import FlatUpdate

_BLOCK = 2048


def sgd_fused(update: FlatUpdate, momentum_buffer: Tensor, *, momentum: float) -> None:
    """As `kernels.sgd.sgd_reference`."""
    flat = (update.master, update.grad, update.weight, momentum_buffer)
    assert all(x.is_contiguous() for x in flat)
    size = update.master.numel()
    runs = [(run.weight_decay, run.lr) for run in update.runs]
    launch(
        _sgd, (cdiv(size, _BLOCK),),
        update.master, momentum_buffer, update.grad, update.weight,
        update.grad_scale, update.is_finite.view(torch.uint8), size, *borders_and_numbers(update.runs, runs),
        momentum, WRITES_WEIGHT=update.has_separate_weight, BLOCK=_BLOCK, num_warps=8,
    )  # fmt: skip


@jit
def _sgd(
    MASTER, MOMENTUM, GRAD, WEIGHT, GRAD_SCALE, IS_FINITE, size, border1, border2, border3,
    decay0, decay1, decay2, decay3, lr0, lr1, lr2, lr3, momentum,
    WRITES_WEIGHT: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    wanted = at < size * tl.load(IS_FINITE).to(tl.int64)
    decay = pick(at, border1, border2, border3, decay0, decay1, decay2, decay3)
    lr = pick(at, border1, border2, border3, lr0, lr1, lr2, lr3)
    grad = tl.load(GRAD + at, mask=wanted, other=0).to(tl.float32) * tl.load(GRAD_SCALE)
    buffer = tl.load(MOMENTUM + at, mask=wanted, other=0).to(tl.float32)
    master = tl.load(MASTER + at, mask=wanted, other=0)
    buffer = buffer * momentum + (grad + decay * master)
    master -= lr * buffer
    tl.store(MASTER + at, master, mask=wanted)
    tl.store(MOMENTUM + at, buffer.to(MOMENTUM.dtype.element_ty), mask=wanted)
    if WRITES_WEIGHT:
        tl.store(WEIGHT + at, master.to(WEIGHT.dtype.element_ty), mask=wanted)
