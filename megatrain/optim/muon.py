"""Muon: momentum orthogonalized matrix by matrix; AdamW updates the rest of the model.

    gradient -> momentum (flat, on the rank of the shard) ─ all-to-all ─> owner: whole matrix -> Newton-Schulz
                                            master weights <─ all-to-all ─ owner

Adaptive Muon divides the scaled update by the root of its mean square, element by element, on the rank of the shard.
Sources: Jordan et al., https://kellerjordan.github.io/posts/muon/; Liu et al., arXiv:2502.16982 (scale and
weight decay); Si et al., arXiv:2507.11005 (AdaMuon).
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from megatrain.kernels.optimizer.newton_schulz import CoefficientType, orthogonalize
from megatrain.kernels.optimizer.shard_update import FlatUpdate
from megatrain.optim.matrices import LocalPart, Matrix
from megatrain.optim.matrix_update import MatrixUpdate, fp32_products, gradient_of, take_step
from megatrain.parallel.buckets import Shard
from megatrain.parallel.grid import RankGrid

ScaleMode = Literal["spectral", "unit_rms_norm", "shape_scaling"]


@dataclass(frozen=True)
class SecondMoment:
    """The mean square of updates, by which adaptive Muon divides them, as Megatron-LM does: without a correction of its bias."""

    beta2: float
    eps: float

    def normalized(self, update: Tensor, moment: Tensor) -> Tensor:
        """Update the moment in place; return the update divided by its root."""
        moment.lerp_(update.square(), 1 - self.beta2)
        return update / (moment.sqrt() + self.eps)


@dataclass(frozen=True, kw_only=True)
class MuonRule:
    """Hyperparameters of Muon."""

    momentum: float
    is_nesterov: bool
    num_steps: int
    coefficients: CoefficientType
    scale_mode: ScaleMode
    extra_scale: float
    splits_qkv: bool
    """True: queries, keys and values of a layer are separate matrices."""
    dtype: torch.dtype
    """Dtype of Newton-Schulz and of the communication; fp64 with fp64 weights."""
    has_tf32: bool = False
    """True: fp32 GEMMs on a GPU may use TF32."""
    second_moment: SecondMoment | None = None
    """None: Muon; else adaptive Muon."""

    def scale(self, shape: tuple[int, int]) -> float:
        """Return the factor on the learning rate for a matrix of this shape."""
        rows, columns = shape
        size = {
            "spectral": max(rows, columns),
            "unit_rms_norm": rows / columns,
            "shape_scaling": max(1.0, rows / columns),
        }[self.scale_mode]
        return self.extra_scale * math.sqrt(size)


class Muon(MatrixUpdate):
    """Muon for the matrices of one rank's shards.

    Args:
        rule: hyperparameters.
        shards, grid: see `MatrixUpdate`.
    """

    second_moment = "moment2_buffer"

    def __init__(self, rule: MuonRule, shards: Sequence[Shard], grid: RankGrid) -> None:
        super().__init__(shards, grid, splits_qkv=rule.splits_qkv)
        self.rule = rule
        if rule.second_moment is not None:
            self.kinds += (self.second_moment,)

    def dtype(self, master_dtype: torch.dtype) -> torch.dtype:
        """See `MatrixUpdate`."""
        return master_dtype if master_dtype == torch.float64 else self.rule.dtype

    def values(self, part: LocalPart, shard: FlatUpdate, moments: Mapping[str, Tensor]) -> Tensor:
        """Update the momentum of a part; return the values to orthogonalize."""
        buffer, grad = moments[self.momentum][part.elements], gradient_of(part, shard)
        buffer.lerp_(grad, 1 - self.rule.momentum)
        return grad.lerp(buffer, self.rule.momentum) if self.rule.is_nesterov else buffer

    def update(self, matrix: Matrix, values: Tensor, step: int) -> Tensor:  # noqa: ARG002 (equal for all)
        """Orthogonalize a matrix."""
        with fp32_products(has_tf32=self.rule.has_tf32):
            return orthogonalize(values[0], self.rule.coefficients, self.rule.num_steps)

    def apply(
        self, part: LocalPart, update: Tensor, shard: FlatUpdate, moments: Mapping[str, Tensor]
    ) -> None:
        """See `MatrixUpdate`."""
        scale, adaptive = self.rule.scale(part.matrix.shape), self.rule.second_moment
        if adaptive is not None:
            scaled = update.to(shard.master.dtype) * scale
            update, scale = adaptive.normalized(scaled, moments[self.second_moment][part.elements]), 1.0
        take_step(part, update, shard, scale)
