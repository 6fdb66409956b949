"""Planted faults of FP8 that parity must find."""

from __future__ import annotations

import re
from contextlib import AbstractContextManager
from typing import Any
from unittest import mock

import torch
from torch import Tensor

from megatrain.kernels.fp8 import blocks, rows
from megatrain.kernels.fp8.gemms import Operand
from megatrain.kernels.fp8.rows import RowCast
from megatrain.kernels.linear import FirstWrite
from megatrain.parallel import expert_parallel
from megatrain.parallel.batch import PassInfo
from megatrain.parallel.data_parallel import WeightAllGather
from megatrain.parallel.fp8 import amax_history, experts, nvfp4, row_dispatch, scaling, weight_gather
from megatrain.parallel.fp8.scaling import Fp8Linear, Fp8Recipe, Fp8Recipes
from megatrain.parallel.layout import ParamLayout
from megatrain.tools.parity.runs.program import Patch


def _scales_of_a_part() -> AbstractContextManager[Any]:
    return mock.patch.object(scaling, "all_reduce", lambda x, _group, _op: x)


def _scales_of_a_part_of_a_row() -> AbstractContextManager[Any]:
    return mock.patch.object(experts, "all_reduce", lambda x, _group, _op: x)


def _history_of_a_replica() -> AbstractContextManager[Any]:
    return mock.patch.object(amax_history, "all_reduce", lambda x, _group, _op: x)


def _stale_weight_cast() -> AbstractContextManager[Any]:
    cast_weight = Fp8Linear.cast_weight

    def once(self: Fp8Linear, weight: Tensor, info: PassInfo) -> Operand:
        return cast_weight(self, weight, PassInfo(microbatch=1, is_training=info.is_training))

    return mock.patch.object(Fp8Linear, "cast_weight", once)


def _gather_with_scales_of_a_shard() -> AbstractContextManager[Any]:
    return mock.patch.object(weight_gather, "all_reduce", lambda x, _group, _op: x)


def _gather_with_scales_of_the_last_step() -> AbstractContextManager[Any]:
    return mock.patch.object(weight_gather.Fp8WeightGather, "all_gather", WeightAllGather.all_gather)


def _random_numbers_of_a_rank() -> AbstractContextManager[Any]:
    """Count the outputs of each rank from 0 on."""

    def alone(layout: ParamLayout, device: torch.device) -> tuple[Tensor, int]:
        return torch.arange(layout.shape[0], device=device), layout.shape[0]

    return mock.patch.object(nvfp4, "_output_numbers", alone)


def _scales_of_other_tokens() -> AbstractContextManager[Any]:
    """Scale transposed casts as if blocks began one token earlier, as in a part of the tokens without whole blocks."""
    cast_blocks = blocks.cast_blocks

    def shifted(x: Tensor, *args: Any, rows: bool = True, columns: bool = True) -> blocks.Cast:
        cast = cast_blocks(x, *args, rows=rows, columns=columns)
        other = cast_blocks(x.roll(1, 0), *args, rows=False).columns
        assert other is not None
        return cast._replace(columns=other._replace(codes=other.codes.roll(-1, 1)) if columns else None)

    return mock.patch.object(scaling, "cast_blocks", shifted)


def _recipes_by_number_within_a_stage() -> AbstractContextManager[Any]:
    """Name layers as each of two stages counts them."""
    recipe = Fp8Recipes.recipe

    def within(self: Fp8Recipes, layer: int, name: str) -> Fp8Recipe | None:
        return recipe(self, layer, re.sub(r"layers\.\d+", f"layers.{layer % 2}", name))

    return mock.patch.object(Fp8Recipes, "recipe", within)


def _sent_with_scales_of_other_rows() -> AbstractContextManager[Any]:
    """Send each token with the scale of the one before."""
    pack_rows = rows.pack_rows

    def shifted(cast: RowCast) -> Tensor:
        return pack_rows(cast._replace(scale=cast.scale.roll(1, 0)))

    return mock.patch.object(expert_parallel, "pack_rows", shifted)


def _sent_in_values() -> AbstractContextManager[Any]:
    """Send tokens and gradients that are not rounded."""
    return mock.patch.object(row_dispatch, "_rounded", torch.clone)


def _each_gradient_overwritten() -> AbstractContextManager[Any]:
    return mock.patch.object(FirstWrite, "take", return_value=True)


FP8_FAULTS: dict[str, tuple[Patch, str]] = {
    "FP8 scale from the largest value of a rank's part": (_scales_of_a_part, "tp2 sp fp8tensorwise"),
    "FP8 history of a replica's own values": (_history_of_a_replica, "dp2 fp8delayed"),
    "FP8 cast of the last step's weight": (_stale_weight_cast, "tp2 sp fp8tensorwise"),
    "FP8 scales of an etp rank's part of a row": (
        _scales_of_a_part_of_a_row,
        "tp2 sp mixtral etp2 fp8tensorwise",
    ),
    "FP8 gradients of the last micro-batch alone": (_each_gradient_overwritten, "dp2 fp8tensorwise"),
    "FP8 scales of other blocks of tokens": (_scales_of_other_tokens, "tp2 sp fp8blockwise"),
    "FP8 gather of weights with scales of a rank's shard": (
        _gather_with_scales_of_a_shard,
        "dp2 zero1 overlap fp8gather",
    ),
    "FP8 gather of weights with scales of the last step": (
        _gather_with_scales_of_the_last_step,
        "dp2 zero3 overlap fp8gather",
    ),
    "FP8 scales of other tokens in a dispatch": (
        _sent_with_scales_of_other_rows,
        "dp2 mixtral ep2 alltoall fp8dispatch",
    ),
    "FP8 dispatch without rounding on ranks that gather tokens": (
        _sent_in_values,
        "dp2 mixtral ep2 fp8dispatch",
    ),
    "NVFP4 rounding by a rank's own numbers of outputs": (_random_numbers_of_a_rank, "tp2 nvfp4"),
    "FP8 recipes of layers by their number within a stage": (
        _recipes_by_number_within_a_stage,
        "pp2 fp8modules",
    ),
}
