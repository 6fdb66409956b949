"""Scales of FP8 tensors: the recipes of --fp8-recipe.

    tensorwise    scale from the largest value of this tensor
    delayed       scale from the largest values of earlier steps (amax_history.py): one pass over the tensor, not two
    blockwise     a scale per block, and
    mxfp8         a power of two per 32 values, both by Transformer Engine (model/implementations/transformer_engine_fp8.py)

A scale belongs to the whole tensor of a micro-batch, not to a rank's part of it: largest values are reduced over the
tensor and context ranks before the cast, so that a split computes the same codes as one process. Scales stay on the device.
"""

from __future__ import annotations

from collections.abc import Container
from dataclasses import dataclass
from typing import Literal, Protocol

import torch
from torch import Tensor

from megatrain.kernels.fp8.quantize import Codes, amax, current_scale, quantize, scale_of_one, transposed
from megatrain.parallel.batch import PassInfo
from megatrain.parallel.collectives import all_reduce
from megatrain.parallel.fp8.amax_history import AmaxHistory
from megatrain.parallel.grid import RankGroup


class Scaling(Protocol):
    """Rule for the scale of one tensor of a linear layer."""

    def scale(self, x: Tensor) -> Tensor:
        """Return the scale of a tensor from this rank's part of it, fp32 [2]."""
        ...

    def cast(
        self, x: Tensor, scale: Tensor, info: PassInfo, *, rows: bool = True, columns: bool = True
    ) -> Codes:
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
        return scale_of_one(all_reduce(amax(x), self.group, "max"), self.dtype)

    def cast(
        self,
        x: Tensor,
        scale: Tensor,
        info: PassInfo,  # noqa: ARG002 (see `Scaling`)
        *,
        rows: bool = True,
        columns: bool = True,
    ) -> Codes:
        """See `Scaling`."""
        return quantize(x, scale, self.dtype, rows=rows, columns=columns)


@dataclass(frozen=True)
class DelayedScaling:
    """Scale from the history of the tensor; evaluation adds nothing to it."""

    current: CurrentScaling
    """Scaling of a tensor without history."""
    history: AmaxHistory
    number: int
    """Number of the tensor in the history."""

    def scale(self, x: Tensor) -> Tensor:
        """See `Scaling`."""
        known = self.history.scale(self.number)
        return self.current.scale(x) if known is None else known

    def cast(
        self, x: Tensor, scale: Tensor, info: PassInfo, *, rows: bool = True, columns: bool = True
    ) -> Codes:
        """See `Scaling`."""
        seen = self.history.seen(self.number) if info.is_training else None
        return quantize(x, scale, self.current.dtype, rows=rows, columns=columns, seen=seen)


@dataclass
class Fp8Linear:
    """The FP8 tensors of a linear layer, and the casts of its weight, which all micro-batches of a step use.

    Args:
        has_fp8_wgrad: the weight gradient is a product of FP8 matrices too.
        keeps_weight: the codes of the weight stay in memory until the next step, in one order, which backward passes
            transpose; else each pass casts.
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
        codes = self.weight.cast(weight, scale, info, columns=False)
        self._kept = (codes, scale) if self.keeps_weight else None
        return codes, scale

    def weight_columns(self, weight: Tensor, scale: Tensor, info: PassInfo) -> Tensor:
        """Return the transposed codes, for the backward pass of the forward pass that returned `scale`."""
        if self._kept is not None:
            assert self._kept[0].rows is not None
            return transposed(self._kept[0].rows)
        columns = self.weight.cast(weight, scale, info, rows=False).columns
        assert columns is not None
        return columns


@dataclass(frozen=True, kw_only=True)
class Fp8Recipe:
    """Builder of the FP8 tensors of linear layers.

    Args:
        name: value of --fp8-recipe; `linear` builds the tensors of the first two.
        format: `e4m3` for all tensors; `hybrid`: gradients in e5m2.
        layers: numbers of the layers that it applies to; those of multi-token prediction follow the others.
        tokens: ranks that process the same micro-batch.
        tp: ranks over which weights are split.
        has_fp8_wgrad, keeps_weights: see `Fp8Linear`.
        history: largest values of earlier steps, for delayed scaling; None: scales are those of the tensors themselves.
    """

    name: Literal["tensorwise", "delayed", "blockwise", "mxfp8"]
    format: Literal["e4m3", "hybrid"]
    layers: Container[int]
    tokens: RankGroup
    tp: RankGroup
    has_fp8_wgrad: bool
    keeps_weights: bool
    history: AmaxHistory | None = None

    def linear(self, name: str) -> Fp8Linear:
        """Build the tensors of the layer whose weight has this canonical name."""
        assert self.name in ("tensorwise", "delayed"), "a rule refuses block scales of local"
        of_input, of_weight, of_gradient = self.tensors(name)
        return Fp8Linear(
            self._scaling(*of_input, self.tokens),
            self._scaling(*of_weight, self.tp),
            self._scaling(*of_gradient, self.tokens),
            self.has_fp8_wgrad,
            self.keeps_weights,
        )

    def tensors(self, name: str) -> tuple[tuple[str, torch.dtype], ...]:
        """Return name and format of input, weight and output gradient of the layer whose weight has this canonical name."""
        e4m3 = torch.float8_e4m3fn
        gradients = e4m3 if self.format == "e4m3" else torch.float8_e5m2
        return (f"{name}.input", e4m3), (name, e4m3), (f"{name}.output_gradient", gradients)

    def finish_step(self) -> None:
        """Compute the scales of the next step, at the end of a step."""
        if self.history is not None:
            self.history.finish_step()

    def _scaling(self, name: str, dtype: torch.dtype, group: RankGroup) -> Scaling:
        current = CurrentScaling(dtype, group)
        if self.history is None:
            return current
        return DelayedScaling(current, self.history, self.history.add(name, dtype))
