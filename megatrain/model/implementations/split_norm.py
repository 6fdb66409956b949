"""RMSNorm over channels that are split over tensor ranks: `--qk-layernorm-width all_heads`."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function

from megatrain.config.model_spec.norm import NormSpec
from megatrain.kernels.dtypes import accumulation_dtype
from megatrain.model.implementations.local import LocalNorm
from megatrain.model.layouts import LinearLayout
from megatrain.parallel.batch import PassInfo
from megatrain.parallel.collectives import all_reduce
from megatrain.parallel.grid import RankGroup
from megatrain.parallel.layout import ShardedModule
from megatrain.parallel.tensor_parallel import TensorParallel


class LocalSplitRmsNorm(LocalNorm):
    """RMSNorm over all heads, [s, b, n/tp, d], with an all-reduce of the squares over tp."""

    def __init__(self, weights: LinearLayout, spec: NormSpec, dtype: torch.dtype, tp: TensorParallel) -> None:
        super().__init__(weights, spec, dtype)
        self.tp = tp

    def forward(self, x: Tensor, info: PassInfo) -> Tensor:  # noqa: ARG002
        normed = split_rms_norm(x.flatten(2), self, self.epsilon, self.offset, self.tp.group)
        return normed.view_as(x)


def split_rms_norm(x: Tensor, module: ShardedModule, eps: float, offset: float, group: RankGroup) -> Tensor:
    """Compute RMSNorm over channels that are split over the ranks of a group: [..., c/tp], weight [c/tp]."""
    out: Tensor = _SplitRmsNorm.apply(x, module.weight, module.weight_grads.get("weight"), eps, offset, group)
    return out


class _SplitRmsNorm(Function):
    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        weight: Tensor,
        weight_grad: Tensor | None,
        eps: float,
        offset: float,
        group: RankGroup,
    ) -> Tensor:
        xw = x.to(accumulation_dtype(x.dtype))
        squares = all_reduce(xw.square().sum(-1, keepdim=True), group)
        rstd = (squares / (x.shape[-1] * group.size) + eps).rsqrt()
        ctx.save_for_backward(x, weight, rstd)
        ctx.weight_grad, ctx.offset, ctx.group = weight_grad, offset, group
        return (xw * rstd * (weight.to(xw.dtype) + offset)).to(weight.dtype)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None, None, None, None]:
        x, weight, rstd = ctx.saved_tensors
        normed = x.to(rstd.dtype) * rstd
        dy = grads[0].to(rstd.dtype)
        ctx.weight_grad.add_((dy * normed).flatten(0, -2).sum(0))
        dnormed = dy * (weight.to(rstd.dtype) + ctx.offset)
        dot = all_reduce((dnormed * normed).sum(-1, keepdim=True), ctx.group)
        dx = rstd * (dnormed - normed * (dot / (x.shape[-1] * ctx.group.size)))
        return dx.to(x.dtype), None, None, None, None, None
