"""Scales and rounding of NVFP4 tensors (kernels/fp8/nvfp4.py), the same under every layout.

    forward           inputs and weights, to nearest
    input gradient    gradients by stochastic rounding, and weights
    weight gradient   gradients and inputs after a Hadamard transform of each 16 tokens; gradients by stochastic rounding

The scale of a tensor belongs to all ranks that hold a part of it. Random numbers are keyed by layer, sample, token and output.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Literal

import torch
from torch import Tensor

from megatrain.kernels.fp8.blocks import Cast
from megatrain.kernels.fp8.gemms import Operand
from megatrain.kernels.fp8.nvfp4 import cast_row_blocks, cast_square_blocks, hadamard, tensor_scale
from megatrain.kernels.fp8.quantize import amax
from megatrain.kernels.random import fill_uniform, stream_key
from megatrain.parallel.batch import PassInfo
from megatrain.parallel.collectives import all_reduce
from megatrain.parallel.context_parallel import ContextParallel
from megatrain.parallel.grid import RankGroup
from megatrain.parallel.layout import ParamLayout


@dataclass(frozen=True)
class Nvfp4Scaling:
    """Rule for one tensor of a linear layer; see `Scaling`.

    Args:
        group: ranks that hold the tensor, each a part of it or all.
        name, seed: key of random numbers.
        layout: the weight of the layer, whose rows are the outputs.
    """

    kind: Literal["input", "weight", "gradient"]
    group: RankGroup
    name: str
    seed: int
    cp: ContextParallel
    layout: ParamLayout
    needs_amax: ClassVar[bool] = False

    def scale(self, x: Tensor, largest: Tensor | None = None) -> None:  # noqa: ARG002 (see `Scaling`)
        return

    def cast(
        self,
        x: Tensor,
        scale: Tensor | None,  # noqa: ARG002 (see `Scaling`)
        info: PassInfo,
        *,
        rows: bool = True,
        columns: bool = True,
    ) -> Cast:
        if self.kind == "weight":
            cast = cast_square_blocks(x, self._tensor_scale(x))
            return Cast(cast.rows if rows else None, cast.columns if columns else None)
        return Cast(
            self._row_blocks(x, self._random(x, info, "rows")) if rows else None,
            self._transformed(x, info) if columns else None,
        )

    def _transformed(self, x: Tensor, info: PassInfo) -> Operand:
        random = self._random(x, info, "columns")
        return self._row_blocks(hadamard(x.t().contiguous()), None if random is None else random.t())

    def _row_blocks(self, x: Tensor, random: Tensor | None) -> Operand:
        return cast_row_blocks(x, self._tensor_scale(x), random)

    def _tensor_scale(self, x: Tensor) -> Tensor:
        return tensor_scale(all_reduce(amax(x), self.group, "max"))

    def _random(self, x: Tensor, info: PassInfo, order: str) -> Tensor | None:
        """Return uniform numbers for the elements of a gradient, [tokens, outputs]; None: other tensors are rounded to nearest."""
        if self.kind != "gradient":
            return None
        numbers, total = _output_numbers(self.layout, x.device)
        tokens = self.cp.positions(x.shape[0], x.device)
        out = torch.empty(x.shape[0], total, device=x.device, dtype=torch.float64)
        key = stream_key(self.seed, f"{self.name}.{order}.{info.first_sample}")
        fill_uniform(out, tokens, key=key, low=0.0, high=1.0)
        return out[:, numbers]


def _output_numbers(layout: ParamLayout, device: torch.device) -> tuple[Tensor, int]:
    """Return the numbers of this rank's outputs among the outputs of all ranks, and the count of all."""
    parts, first = [], 0
    for piece in layout.pieces:
        start, stop = piece.box[0]
        parts.append(torch.arange(first + start, first + stop, device=device))
        first += piece.shape[0]
    return torch.cat(parts), first
