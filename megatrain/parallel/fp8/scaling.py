"""Scales of FP8 tensors: the recipes of --fp8-recipe.

    tensorwise    scale from the largest value of this tensor
    delayed       scale from the largest values of earlier steps (amax_history.py): one pass over the tensor, not two
    blockwise     scales from the largest values of blocks (kernels/fp8/blocks.py): one pass over the tensor
    mxfp8         the same with blocks of 32 values, of weights too; on GPUs by Transformer Engine
    nvfp4         values of 4 bits in blocks of 16 (nvfp4.py, the recipe of --fp4-recipe); on CPUs only

A scale of a tensor belongs to the whole tensor of a micro-batch, not to a rank's part of it: largest values are reduced over
the tensor and context ranks before the cast, so that a split computes the same codes as one process. Blocks need no reduction
where each lies within a rank. Scales stay on the device.
"""

from __future__ import annotations

import re
from collections.abc import Container, Mapping
from dataclasses import dataclass, field
from typing import ClassVar, Final, Literal, Protocol

import torch
from torch import Tensor

from megatrain.kernels.fp8.blocks import (
    Cast,
    accumulate_block_gemm,
    block_gemm,
    cast_blocks,
    cast_square_blocks,
    row_block_gemm_reference,
)
from megatrain.kernels.fp8.gemms import Operand, accumulate_gemm, gemm
from megatrain.kernels.fp8.nvfp4 import BLOCK as NVFP4_BLOCK
from megatrain.kernels.fp8.quantize import (
    Amax,
    Codes,
    amax,
    current_scale,
    quantize,
    scale_of_one,
    transposed,
)
from megatrain.kernels.linear import FirstWrite
from megatrain.parallel.batch import PassInfo
from megatrain.parallel.collectives import all_reduce
from megatrain.parallel.context_parallel import ContextParallel
from megatrain.parallel.fp8.amax_history import AmaxHistory
from megatrain.parallel.fp8.nvfp4 import Nvfp4Scaling
from megatrain.parallel.grid import RankGroup
from megatrain.parallel.layout import ParamLayout

_EXPERT: Final = re.compile(r"\.experts\.\d+\.")
"""Number of an expert in a name: all experts of a layer have one recipe."""


class Scaling(Protocol):
    """Rule for the scales of one tensor of a linear layer."""

    needs_amax: ClassVar[bool]
    """True if scales always follow from the tensor's largest absolute value."""

    def scale(self, x: Tensor, largest: Tensor | None = None) -> Tensor | None:
        """Return the scale of a tensor from this rank's part of it, fp32 [2]; None: the cast computes scales of blocks.

        Args:
            largest: fp32 []: largest absolute value of `x`, if known; overwritten by that of all ranks.
        """
        ...

    def cast(
        self, x: Tensor, scale: Tensor | None, info: PassInfo, *, rows: bool = True, columns: bool = True
    ) -> Cast:
        """Cast a matrix [r, c] with a scale that `scale` returned."""
        ...


@dataclass(frozen=True)
class CurrentScaling:
    """Scale from the largest value of the tensor itself. Implements `Scaling`.

    Args:
        group: ranks that hold the tensor, each a part of it or all.
    """

    dtype: torch.dtype
    group: RankGroup
    needs_amax: ClassVar[bool] = True

    def scale(self, x: Tensor, largest: Tensor | None = None) -> Tensor:
        if self.group.size > 1:
            largest = all_reduce(amax(x) if largest is None else largest, self.group, "max")
        return current_scale(x, self.dtype) if largest is None else scale_of_one(largest, self.dtype)

    def cast(
        self,
        x: Tensor,
        scale: Tensor | None,
        info: PassInfo,  # noqa: ARG002 (see `Scaling`)
        *,
        rows: bool = True,
        columns: bool = True,
    ) -> Cast:
        assert scale is not None
        return _with_scale(quantize(x, scale, self.dtype, rows=rows, columns=columns), scale)


@dataclass(frozen=True)
class DelayedScaling:
    """Scale from the history of the tensor; evaluation adds nothing to it. Implements `Scaling`."""

    current: CurrentScaling
    """Scaling of a tensor without history."""
    history: AmaxHistory
    number: int
    """Number of the tensor in the history."""
    notes_casts: bool = True
    """Casts add to the history; else `note` does."""
    needs_amax: ClassVar[bool] = False

    def note(self, amax: Tensor) -> None:
        """Add a largest absolute value, fp32 [], to the values of this step."""
        seen = self.history.seen(self.number)
        seen.copy_(torch.maximum(seen, amax))

    def scale(self, x: Tensor, largest: Tensor | None = None) -> Tensor:
        known = self.history.scale(self.number)
        return self.current.scale(x, largest) if known is None else known

    def cast(
        self, x: Tensor, scale: Tensor | None, info: PassInfo, *, rows: bool = True, columns: bool = True
    ) -> Cast:
        assert scale is not None
        is_noted = info.is_training and self.notes_casts
        seen = self.history.seen(self.number) if is_noted else None
        codes = quantize(x, scale, self.current.dtype, rows=rows, columns=columns, seen=seen)
        return _with_scale(codes, scale)


def _with_scale(codes: Codes, scale: Tensor) -> Cast:
    rows, columns = (None if each is None else Operand(each, scale) for each in codes)
    return Cast(rows, columns)


@dataclass(frozen=True)
class BlockScaling:
    """Scales from the largest values of blocks. Implements `Scaling`.

    Args:
        block: elements per block.
        is_square: blocks have that many rows too, as blocks of weights.
    """

    dtype: torch.dtype
    block: int
    is_square: bool
    needs_amax: ClassVar[bool] = False

    def scale(self, x: Tensor, largest: Tensor | None = None) -> None:  # noqa: ARG002 (see `Scaling`)
        return

    def cast(
        self,
        x: Tensor,
        scale: Tensor | None,  # noqa: ARG002 (see `Scaling`)
        info: PassInfo,  # noqa: ARG002
        *,
        rows: bool = True,
        columns: bool = True,
    ) -> Cast:
        cast = cast_square_blocks if self.is_square else cast_blocks
        return cast(x, self.dtype, self.block, rows=rows, columns=columns)


@dataclass
class Fp8Linear:
    """The FP8 tensors of a linear layer, and the casts of its weight, which all micro-batches of a step use.

    Args:
        has_fp8_wgrad: the weight gradient is a GEMM of FP8 matrices too.
        keeps_weight: the casts of the weight stay in memory until the next step; else each pass casts. With one scale the
            codes stay in one order, which backward passes transpose.
        block: elements per block; None: a tensor has one scale.
        has_square_blocks: the weight has blocks of rows and columns, not of one row.
    """

    input: Scaling
    weight: Scaling
    gradient: Scaling
    has_fp8_wgrad: bool = True
    keeps_weight: bool = True
    block: int | None = None
    has_square_blocks: bool = True
    dy_amax: Amax | None = None
    """Largest value of the gradient of its output; None: nothing leaves it."""
    first_write: FirstWrite = field(default_factory=FirstWrite)
    """State of the gradient of its weight."""
    _kept: Cast | None = None

    @property
    def gathers_codes(self) -> bool:
        """True if ranks gather codes, not values: row codes of a tensor with one scale give its transposed codes."""
        return self.block is None

    def gradient_scale(self, dy: Tensor) -> Tensor | None:
        """Return the scale of the gradient of its output; see `Scaling.scale`."""
        return self.gradient.scale(dy, None if self.dy_amax is None else self.dy_amax.take())

    def cast_weight(self, weight: Tensor, info: PassInfo) -> Operand:
        """Return the cast for a forward pass. The first micro-batch casts again: the weight has changed since."""
        cast = self._kept
        if cast is None or info.microbatch == 0:
            columns = self.keeps_weight and info.is_training and self.block is not None
            cast = self.weight.cast(weight, self.weight.scale(weight), info, columns=columns)
            self._kept = cast if self.keeps_weight else None
        assert cast.rows is not None
        return cast.rows

    def weight_columns(self, weight: Tensor, scale: Tensor, info: PassInfo) -> Operand:
        """Return the transposed cast, for the backward pass of the forward pass whose cast has this scale."""
        kept = self._kept or self.weight.cast(weight, scale, info, rows=False)
        if kept.columns is not None:
            return kept.columns
        assert kept.rows is not None
        return kept.rows._replace(codes=transposed(kept.rows.codes))

    def gemm(
        self, x: Operand, weight: Operand, dtype: torch.dtype, bias: Tensor | None = None, *, fast: bool
    ) -> Tensor:
        """Return x weight^T + bias; see `gemm`. Partial sums of blocks always keep all bits."""
        if self.block is None:
            return gemm(x, weight, dtype, bias, fast=fast)
        if not self.has_square_blocks:
            return row_block_gemm_reference(x, weight, dtype, bias, self.block)
        return block_gemm(x, weight, dtype, bias, self.block)

    def accumulate(self, total: Tensor, dy: Operand, x: Operand) -> None:
        """Compute total += dy x^T; see `accumulate_gemm`."""
        is_zero = self.first_write.take()
        if self.block is None:
            accumulate_gemm(total, dy, x, is_zero=is_zero)
        else:
            accumulate_block_gemm(total, dy, x, self.block, is_zero=is_zero)


@dataclass(frozen=True, kw_only=True)
class Fp8Recipe:
    """Builder of the FP8 tensors of linear layers.

    Args:
        name: value of --fp8-recipe, or of --fp4-recipe.
        format: `e4m3` for all tensors; `hybrid`: gradients in e5m2; `e2m1` with nvfp4.
        tokens: ranks that process the same micro-batch.
        tp: ranks over which weights are split.
        has_fp8_wgrad, keeps_weights: see `Fp8Linear`.
        history: largest values of earlier steps, for delayed scaling; None: scales follow from the tensors themselves.
        block: elements per block, for blockwise scaling; None: a tensor has one scale.
        gathers_weights: weights are all-gathered in FP8 (weight_gather.py).
        casts_before_dispatch: tokens are rounded before they are sent to experts, and gradients of their sums (row_dispatch.py).
        cp: context ranks, and `seed` of stochastic rounding, for nvfp4.
    """

    name: Literal["tensorwise", "delayed", "blockwise", "mxfp8", "nvfp4"]
    format: Literal["e4m3", "hybrid", "e2m1"]
    tokens: RankGroup
    tp: RankGroup
    has_fp8_wgrad: bool
    keeps_weights: bool
    history: AmaxHistory | None = None
    block: int | None = None
    gathers_weights: bool = False
    casts_before_dispatch: bool = False
    cp: ContextParallel | None = None
    seed: int = 0

    def linear(self, name: str, layout: ParamLayout | None = None) -> Fp8Linear:
        """Build the tensors of the layer whose weight has this canonical name, and for nvfp4 this layout."""
        if self.name == "nvfp4":
            return self._nvfp4_linear(name, layout)
        of_input, of_weight, of_gradient = self.tensors(name)
        return Fp8Linear(
            self._scaling(*of_input, self.tokens),
            self._scaling(*of_weight, self.tp, is_weight=True),
            self._scaling(*of_gradient, self.tokens),
            self.has_fp8_wgrad,
            self.keeps_weights,
            self.block,
            self.name != "mxfp8",
        )

    def _nvfp4_linear(self, name: str, layout: ParamLayout | None) -> Fp8Linear:
        assert self.cp is not None
        assert layout is not None
        common = (name, self.seed, self.cp, layout)
        return Fp8Linear(
            Nvfp4Scaling("input", self.tokens, *common),
            Nvfp4Scaling("weight", self.tp, *common),
            Nvfp4Scaling("gradient", self.tokens, *common),
            self.has_fp8_wgrad,
            self.keeps_weights,
            NVFP4_BLOCK,
        )

    def tensors(self, name: str) -> tuple[tuple[str, torch.dtype], ...]:
        """Return name and format of input, weight and output gradient of the layer whose weight has this canonical name."""
        e4m3 = torch.float8_e4m3fn
        is_e4m3 = (
            self.format == "e4m3" or self.name == "blockwise"
        )  # GPUs multiply blocks of 128 in E4M3 only
        gradients = e4m3 if is_e4m3 else torch.float8_e5m2
        return (f"{name}.input", e4m3), (name, e4m3), (f"{name}.output_gradient", gradients)

    def _scaling(
        self, name: str, dtype: torch.dtype, group: RankGroup, *, is_weight: bool = False
    ) -> Scaling:
        if self.block is not None:
            return BlockScaling(dtype, self.block, is_weight and self.name != "mxfp8")
        current = CurrentScaling(dtype, group)
        if self.history is None:
            return current
        notes_casts = not (is_weight and self.gathers_weights)
        return DelayedScaling(current, self.history, self.history.add(name, dtype), notes_casts)


@dataclass(frozen=True, kw_only=True)
class Fp8Recipes:
    """The recipe of each linear layer.

    Args:
        default: the recipe of `layers`.
        layers: numbers of the layers in FP8; layers of multi-token prediction follow the others.
        by_weight: recipes of all linear layers, by canonical name of the weight, in place of these; None: the dtype of the weights.
        history: shared by all recipes with delayed scaling.
    """

    default: Fp8Recipe
    layers: Container[int]
    by_weight: Mapping[str, Fp8Recipe | None] | None
    history: AmaxHistory

    def recipe(self, layer: int, name: str) -> Fp8Recipe | None:
        """Return the recipe of a linear layer; None: it is not in FP8.

        Args:
            layer: number of its layer.
            name: canonical name of its weight.
        """
        if self.by_weight is not None:
            return self.by_weight[_EXPERT.sub(".experts.", name)]
        return self.default if layer in self.layers else None
