"""Routed experts in FP8: their products with a scale per row, under every recipe.

    fc1, fc2             rows and weights by rows
    input gradients      gradients by rows, weights by columns
    weight gradients     in the dtype of the weights

A scale per row, of one token or of one output of an expert, is the same under every layout: other tokens do not change it.
Ranks of etp hold parts of the inner channels: they reduce the largest values of rows over these.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal, NamedTuple

import torch
from torch import Tensor

from megatrain.kernels.fp8.rows import RowCast, cast_rows, decode_rows, grouped_gemm, row_amax
from megatrain.kernels.moe.grouped_gemm import GroupedProducts
from megatrain.parallel.batch import PassInfo
from megatrain.parallel.collectives import all_reduce
from megatrain.parallel.grid import RankGroup

Layer = Literal["fc1", "fc2"]


class WeightCast(NamedTuple):
    """The casts of a weight [e, o, i] for both products."""

    rows: RowCast
    """[e, o, i]."""
    columns: RowCast
    """Transposed, [e, i, o]."""


@dataclass
class Fp8GroupedGemms(GroupedProducts):
    """The products of this rank's experts, and the casts of their weights, which all micro-batches of a step use.

    Args:
        etp: ranks that hold a slice of each expert's inner channels.
        keeps_weights: see `Fp8Linear`.
        saves_codes: rows are rounded to FP8 before the dispatch, so that a pass saves their codes alone.
    """

    etp: RankGroup
    keeps_weights: bool
    saves_codes: bool = False
    _kept: dict[Layer, WeightCast] = field(default_factory=dict)

    def cast(self, rows: Tensor) -> RowCast:
        return cast_rows(rows)

    def saved(self, rows: Tensor, cast: RowCast) -> tuple[Tensor, ...]:
        return cast if self.saves_codes else (rows,)

    def restored(self, saved: Sequence[Tensor], dtype: torch.dtype) -> Tensor:
        return decode_rows(RowCast(*saved), dtype) if self.saves_codes else saved[0]

    def fc1(self, rows: RowCast, weight: Tensor, ends: Tensor, info: PassInfo) -> Tensor:
        """Compute rows W_g^T: [r, h] -> [r, f/etp]."""
        cast = self._weight_rows("fc1", weight, info)
        return grouped_gemm(rows, cast, ends, weight.dtype, fast=True)

    def fc2(self, rows: Tensor, weight: Tensor, ends: Tensor, info: PassInfo) -> Tensor:
        """Compute rows W_g^T: [r, f/etp] -> [r, h], a partial sum over etp."""
        cast = self._weight_rows("fc2", weight, info)
        return grouped_gemm(self._cast_parts(rows), cast, ends, rows.dtype, fast=True)

    def fc1_backward(self, dy: Tensor, weight: Tensor, ends: Tensor) -> Tensor:
        """Compute dy W_g: [r, f/etp] -> [r, h], a partial sum over etp."""
        cast = self._weight_columns("fc1", weight)
        return grouped_gemm(self._cast_parts(dy), cast, ends, dy.dtype, fast=False)

    def fc2_backward(self, dy: Tensor, weight: Tensor, ends: Tensor) -> Tensor:
        """Compute dy W_g: [r, h] -> [r, f/etp]."""
        cast = self._weight_columns("fc2", weight)
        return grouped_gemm(cast_rows(dy), cast, ends, dy.dtype, fast=False)

    def _weight_rows(self, layer: Layer, weight: Tensor, info: PassInfo) -> RowCast:
        """Return the cast for a forward pass. The first micro-batch casts again: the weight has changed since."""
        if info.microbatch > 0 and layer in self._kept:
            return self._kept[layer].rows
        rows = cast_rows(weight) if layer == "fc1" else self._cast_parts(weight)
        if self.keeps_weights and info.is_training:
            self._kept[layer] = WeightCast(rows, self._columns(layer, weight))
        else:
            self._kept.pop(layer, None)
        return rows

    def _weight_columns(self, layer: Layer, weight: Tensor) -> RowCast:
        kept = self._kept.get(layer)
        return self._columns(layer, weight) if kept is None else kept.columns

    def _columns(self, layer: Layer, weight: Tensor) -> RowCast:
        transposed = weight.transpose(1, 2).contiguous()
        return cast_rows(transposed) if layer == "fc2" else self._cast_parts(transposed)

    def _cast_parts(self, x: Tensor) -> RowCast:
        """Cast rows that ranks of etp hold in parts."""
        if self.etp.size == 1:
            return cast_rows(x)
        return cast_rows(x, all_reduce(row_amax(x), self.etp, "max"))
