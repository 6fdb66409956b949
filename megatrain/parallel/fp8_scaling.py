"""Scales of FP8 tensors: the recipes of --fp8-recipe.

    tensorwise    scale from the largest value of this tensor
    delayed       scale from the largest values of earlier steps (amax_history.py): one pass over the tensor, not two

A scale belongs to the whole tensor of a micro-batch, not to a rank's part of it: largest values are reduced over the
tensor and context ranks before the cast, so that a split computes the same codes as one process. Scales stay on the device.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, Protocol

import torch
from torch import Tensor

from megatrain.kernels.fp8.quantize import Codes, amax, current_scale, quantize, scale_of
from megatrain.parallel.batch import PassInfo
from megatrain.parallel.collectives import all_reduce
from megatrain.parallel.grid import RankGroup


class Scaling(Protocol):
    """Rule for the scale of one tensor of a linear layer."""

    def scale(self, x: Tensor) -> Tensor:
        """Return the scale of the tensor of which this rank holds the part `x`, fp32 [2]."""
        ...

    def cast(self, x: Tensor, scale: Tensor, *, rows: bool = True, columns: bool = True) -> Codes:
        """Cast a matrix [r, c] with a scale that `scale` returned."""
        ...


@dataclass(frozen=True)
class CurrentScaling:
    """Scale from the largest value of the tensor itself.

    Args:
        group: ranks that hold the tensor, each a part of it or all.
    """

    dtype: torch.dtype
    group: RankGroup

    def scale(self, x: Tensor) -> Tensor:
        """See `Scaling`."""
        if self.group.size == 1:
            return current_scale(x, self.dtype)
        return scale_of(all_reduce(amax(x), self.group, "max"), self.dtype)

    def cast(self, x: Tensor, scale: Tensor, *, rows: bool = True, columns: bool = True) -> Codes:
        """See `Scaling`."""
        return quantize(x, scale, self.dtype, rows=rows, columns=columns)


@dataclass
class Fp8Linear:
    """The FP8 tensors of a linear layer, and the casts of its weight, which all micro-batches of a step use.

    Args:
        has_fp8_wgrad: the weight gradient is a product of FP8 matrices too.
        keeps_weight: the casts of the weight stay in memory until the next step; else each pass casts.
    """

    input: Scaling
    weight: Scaling
    gradient: Scaling
    has_fp8_wgrad: bool = True
    keeps_weight: bool = True
    _kept: tuple[Codes, Tensor] | None = None

    def cast_weight(self, weight: Tensor, info: PassInfo) -> tuple[Codes, Tensor]:
        """Return codes and scale for a forward pass. The first micro-batch casts again: the weight has changed since."""
        if self._kept is not None and info.microbatch > 0:
            return self._kept
        scale = self.weight.scale(weight)
        codes = self.weight.cast(weight, scale, columns=self.keeps_weight and info.is_training)
        self._kept = (codes, scale) if self.keeps_weight else None
        return codes, scale

    def weight_columns(self, weight: Tensor, scale: Tensor) -> Tensor:
        """Return the transposed codes, for the backward pass of the forward pass that returned `scale`."""
        columns = self._kept[0].columns if self._kept is not None else None
        return columns if columns is not None else _columns_of(self.weight.cast(weight, scale, rows=False))


def _columns_of(codes: Codes) -> Tensor:
    assert codes.columns is not None
    return codes.columns


@dataclass(frozen=True, kw_only=True)
class Fp8Recipe:
    """Builder of the FP8 tensors of linear layers.

    Args:
        format: `e4m3` for all tensors; `hybrid`: gradients in e5m2.
        tokens: ranks that process the same micro-batch.
        tp: ranks over which weights are split.
    """

    format: Literal["e4m3", "hybrid"]
    tokens: RankGroup
    tp: RankGroup
    has_fp8_wgrad: bool
    keeps_weights: bool

    def linear(self, name: str) -> Fp8Linear:  # noqa: ARG002
        """Build the tensors of the layer with this canonical name of its weight."""
        e4m3 = torch.float8_e4m3fn
        gradients = e4m3 if self.format == "e4m3" else torch.float8_e5m2
        return Fp8Linear(
            CurrentScaling(e4m3, self.tokens),
            CurrentScaling(e4m3, self.tp),
            CurrentScaling(gradients, self.tokens),
            self.has_fp8_wgrad,
            self.keeps_weights,
        )
