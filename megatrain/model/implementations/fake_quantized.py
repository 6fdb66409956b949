"""Linear layers whose weights and inputs are rounded as `megatrain quantize` will round them (--qat): the modules of `local` else.

    forward    y = Q(x) Q(W)^T, with scales from the largest values now          backward    straight through both roundings

A scale covers an output, a group of inputs or a token, over all tensor ranks, so that it does not depend on the layout. The weights
that train are those before rounding. Each pass of training takes their scales anew and keeps them as tensors of the checkpoint;
evaluations and exports round the weights with the scales that are kept.
Source: Jacob et al., arXiv:1712.05877; Bengio et al., arXiv:1308.3432 (the gradient).
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function

from megatrain.config.schema.quantization import SCALE_PREFIX, NumberFormat, QuantizationFormat
from megatrain.kernels.activations import Activation, activate, activate_backward
from megatrain.kernels.conjugate import Conjugate
from megatrain.kernels.dtypes import accumulation_dtype
from megatrain.kernels.quantization.rounding import amax_of, round_trip, scales_for
from megatrain.model.implementations.local import LocalColumnLinear, LocalRowLinear, bias_of
from megatrain.model.implementations.local_builder import LocalBuilder
from megatrain.parallel.batch import PassInfo
from megatrain.parallel.collectives import all_reduce
from megatrain.parallel.grid import RankGroup
from megatrain.parallel.layout import Init, ParamLayout, Piece
from megatrain.parallel.tensor_parallel import column_linear, row_linear

_SCALE = "weight_scale"


def fake_quantized_builder(numbers: QuantizationFormat) -> Callable[..., LocalBuilder]:
    """Return what makes a builder whose linear layers are rounded, given the arguments of `LocalBuilder`."""
    column = functools.partial(FakeQuantizedColumnLinear, numbers=numbers)
    row = functools.partial(FakeQuantizedRowLinear, numbers=numbers)
    return functools.partial(LocalBuilder, column=column, row=row)


def scale_layout(weight: ParamLayout, numbers: NumberFormat, group: RankGroup | None) -> ParamLayout:
    """Return the layout of the scales of a weight, [o, 1] or [o, groups]. `group`: see `scales_now`."""
    size = numbers.group_size
    copies = () if group is None or size is not None else (group.name,)

    def of(piece: Piece) -> Piece:
        rows, (start, stop) = piece.box
        return dataclasses.replace(
            piece,
            name=f"{SCALE_PREFIX}{piece.name}",
            shape=(piece.shape[0], piece.shape[1] // size if size else 1),
            box=(rows, (start // size, stop // size) if size else (0, 1)),
            copies=(*piece.copies, *copies),
            grad_sum_groups=(),
        )

    return ParamLayout(
        shape=(weight.shape[0], weight.shape[1] // size if size else 1),
        pieces=tuple(map(of, weight.pieces)),
        init=Init(),
        decays=False,
        kind="scale",
        is_trained=False,
    )


class FakeQuantizedColumnLinear(LocalColumnLinear):
    """Residual addition, norm if there is one, and column-parallel linear layer."""

    weight_scale: Tensor

    def __init__(self, *layer: Any, numbers: QuantizationFormat, recompute_norm: bool, fp8: None) -> None:
        """Take the arguments of `LocalColumnLinear`, and the format."""
        super().__init__(*layer, recompute_norm=recompute_norm, fp8=fp8)
        _, linear, _, dtype = layer
        self.format = numbers
        self.add_weight(_SCALE, scale_layout(linear.weight, numbers.weights, None), dtype)

    def forward(self, hidden: Tensor, delta: Tensor | None, info: PassInfo) -> tuple[Tensor, Tensor]:
        hidden, normed = self.norm.add_and_norm(hidden, delta)
        recompute_fn = functools.partial(self._recompute, hidden.detach()) if self.recompute_norm else None
        x, weight = self._rounded_input(normed), rounded_weight(self, self.format.weights, info)
        grad = self.weight_grads.get("weight")
        return hidden, column_linear(x, weight, grad, self.tp, info, bias_of(self), recompute_fn=recompute_fn)

    def _rounded_input(self, x: Tensor) -> Tensor:
        return x if self.format.inputs is None else straight_through(x, self.format.inputs)

    @torch.no_grad()
    def _recompute(self, total: Tensor) -> Tensor:
        return self._rounded_input(self.norm.recompute(total))


class FakeQuantizedRowLinear(LocalRowLinear):
    """Activation, if there is one, and row-parallel linear layer; its inputs are rounded after the activation."""

    weight_scale: Tensor

    def __init__(self, *layer: Any, numbers: QuantizationFormat) -> None:
        """Take the arguments of `LocalRowLinear`, and the format."""
        super().__init__(*layer)
        linear, tp, dtype, _ = layer
        self.format = numbers
        self.add_weight(_SCALE, scale_layout(linear.weight, numbers.weights, tp.group), dtype)

    def forward(self, x: Tensor, info: PassInfo) -> Tensor:
        activation, group, again = self.activation, self.tp.group, None
        if self.format.inputs is not None:
            if activation is not None:
                again = functools.partial(self._recompute, x.detach()) if activation.is_recomputed else None
                x = apply_activation(x, activation)
            x, activation = straight_through(x, self.format.inputs, group), None
        weight, grad = rounded_weight(self, self.format.weights, info, group), self.weight_grads.get("weight")
        return row_linear(
            x,
            weight,
            grad,
            self.tp,
            info,
            bias_of(self),
            activation=activation,
            recompute_fn=again,
            returns_partial_sums=self.returns_partial_sums,
        )

    @torch.no_grad()
    def _recompute(self, x: Tensor) -> Tensor:
        assert self.activation is not None
        assert self.format.inputs is not None
        return rounded(activate(x, self.activation), self.format.inputs, self.tp.group)


@torch.no_grad()
def rounded_weight(
    layer: FakeQuantizedColumnLinear | FakeQuantizedRowLinear,
    numbers: NumberFormat,
    info: PassInfo,
    group: RankGroup | None = None,
) -> Tensor:
    """Return the weight as its quantized form stands for it; see `scales_now`."""
    wide = layer.weight.to(accumulation_dtype(layer.weight.dtype))
    scales = scales_now(wide, numbers, layer.weight.dtype, group)
    kept: Tensor = layer.weight_scale.data  # hides the write from autograd
    if info.is_training:
        kept.copy_(scales)
    else:
        scales = torch.where(kept == 0, scales, kept.to(wide.dtype))  # 0: there was no pass of training
    return round_trip(wide, scales, numbers).to(layer.weight.dtype)


def scales_now(x: Tensor, numbers: NumberFormat, dtype: torch.dtype, group: RankGroup | None) -> Tensor:
    """Return the scales of values [..., c], rounded to `dtype`.

    Args:
        group: ranks that hold other columns of the same rows; None: this rank has them all.
    """
    amax = amax_of(x, numbers)
    if group is not None and numbers.group_size is None:
        amax = all_reduce(amax.contiguous(), group, "max")
    return scales_for(amax, numbers, x.dtype, dtype)


@torch.no_grad()
def rounded(x: Tensor, numbers: NumberFormat, group: RankGroup | None = None) -> Tensor:
    """Return values [..., c] as their quantized form stands for them, in their dtype; `group`: see `scales_now`."""
    wide = x.to(accumulation_dtype(x.dtype))
    return round_trip(wide, scales_now(wide, numbers, x.dtype, group), numbers).to(x.dtype)


def straight_through(x: Tensor, numbers: NumberFormat, group: RankGroup | None = None) -> Tensor:
    """Return `rounded` inputs, whose gradient is that of the inputs."""
    out: Tensor = Conjugate.apply(lambda x: rounded(x, numbers, group), lambda dy: dy, x)
    return out


def apply_activation(x: Tensor, activation: Activation) -> Tensor:
    """Apply the activation of an MLP: [..., i], or gated [..., 2 i], -> [..., i]."""
    out: Tensor = _ApplyActivation.apply(x, activation)
    return out


class _ApplyActivation(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, activation: Activation) -> Tensor:
        ctx.save_for_backward(x)
        ctx.activation = activation
        return activate(x, activation)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        (x,) = ctx.saved_tensors
        return activate_backward(grads[0], x, ctx.activation), None
