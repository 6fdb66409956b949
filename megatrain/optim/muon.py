"""Muon: momentum orthogonalized matrix by matrix; AdamW updates the rest of the model.

    gradient -> momentum (flat, on the rank of the shard) ─ all-to-all ─> owner: whole matrix -> Newton-Schulz
                                            master weights <─ all-to-all ─ owner

Matrices are whole under every layout, so that the result equals one process. Ranks orthogonalize different matrices
concurrently. Adaptive Muon divides the scaled update by the root of its mean square, element by element, on the rank of
the shard. Sources: Jordan et al., https://kellerjordan.github.io/posts/muon/; Liu et al., arXiv:2502.16982 (scale and
weight decay); Si et al., arXiv:2507.11005 (AdaMuon).
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from megatrain.kernels.optimizer.newton_schulz import CoefficientType, orthogonalize
from megatrain.kernels.optimizer.shard_update import FlatUpdate
from megatrain.optim.muon_matrices import LocalPart, Round, local_parts, plan_rounds
from megatrain.parallel.buckets import Shard
from megatrain.parallel.collectives import all_to_all
from megatrain.parallel.grid import RankGrid, RankGroup
from megatrain.parallel.layout import Box
from megatrain.parallel.rank_lists import Family

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


class Muon:
    """Muon for the matrices of one rank's shards.

    Args:
        rule: hyperparameters.
        shards: of this rank.
        grid: rank grid; each family has a group of ranks that share its matrices.
    """

    momentum, second_moment = "momentum_buffer", "moment2_buffer"

    def __init__(self, rule: MuonRule, shards: Sequence[Shard], grid: RankGrid) -> None:
        self.rule = rule
        self.kinds: tuple[str, ...] = (self.momentum,)
        """Names of the state of an element of a matrix, as in checkpoints."""
        if rule.second_moment is not None:
            self.kinds += (self.second_moment,)
        families: tuple[Family, ...] = ("dense", "expert") if grid.shape.has_experts else ("dense",)
        self._parts = {
            family: list(local_parts(shards, grid, family, splits_qkv=rule.splits_qkv)) for family in families
        }
        self.groups = {family: grid.family(family).matrix for family in families}
        self._rounds: list[tuple[RankGroup, Round]] | None = None

    def step(self, shards: Sequence[FlatUpdate], moments: Mapping[str, Sequence[Tensor]]) -> None:
        """Update the matrices of all shards; called by all ranks. On a GPU the host synchronizes to read `is_finite`.

        Args:
            shards: updates of all shards, as for the element-wise rule.
            moments: state of each shard's matrices, which come first in it, by kind.
        """
        if shards[0].master.is_meta or not shards[0].is_finite:
            return
        if self._rounds is None:
            self._rounds = [
                (group, one)
                for family, group in self.groups.items()
                for one in plan_rounds(self._parts[family], group, shards[0].master.device)
            ]
        master_dtype = shards[0].master.dtype
        dtype = master_dtype if master_dtype == torch.float64 else self.rule.dtype
        for group, one in self._rounds:
            self._run(one, group, shards, moments, dtype)

    def _run(
        self,
        one: Round,
        group: RankGroup,
        shards: Sequence[FlatUpdate],
        moments: Mapping[str, Sequence[Tensor]],
        dtype: torch.dtype,
    ) -> None:
        """Run one round: send momenta to the owners, orthogonalize, and send the updates back."""
        momenta, sent, to_ranks = moments[self.momentum], [], []
        for parts in one.held_parts:
            values = [(p, self._momentum(p, shards[p.shard], momenta[p.shard])) for p in parts]
            sent += [value.to(dtype) for p, value in values if p.is_sent]
            to_ranks.append(sum(p.numel for p in parts if p.is_sent))
        from_ranks = [sum(p.numel for p in parts if p.is_sent) for parts in one.matrix_parts]
        received = all_to_all(_concatenated(sent, shards[0].master, dtype), to_ranks, from_ranks, group)
        outgoing = self._orthogonalize(one, received)
        to_ranks = [sum(p.numel for p in parts) for parts in one.matrix_parts]
        from_ranks = [sum(p.numel for p in parts) for parts in one.held_parts]
        updates = all_to_all(_concatenated(outgoing, shards[0].master, dtype), to_ranks, from_ranks, group)
        held = [p for parts in one.held_parts for p in parts]
        for p, value in zip(held, updates.split([p.numel for p in held]), strict=True):
            of_shard = {kind: moments[kind][p.shard] for kind in self.kinds}
            self._apply(p, value, shards[p.shard], of_shard)

    def _momentum(self, part: LocalPart, shard: FlatUpdate, momentum: Tensor) -> Tensor:
        """Update the momentum of a part; return the values to orthogonalize."""
        buffer = momentum[part.elements]
        grad = shard.grad[part.elements].to(shard.master.dtype) * shard.grad_scale
        buffer.lerp_(grad, 1 - self.rule.momentum)
        return grad.lerp(buffer, self.rule.momentum) if self.rule.is_nesterov else buffer

    def _orthogonalize(self, one: Round, received: Tensor) -> list[Tensor]:
        """Orthogonalize this rank's matrix; return it as the parts that all ranks hold."""
        if one.matrix is None:
            return []
        whole = received.new_empty(one.matrix.shape)
        sent = [p for parts in one.matrix_parts for p in parts if p.is_sent]
        for p, value in zip(sent, received.split([p.numel for p in sent]), strict=True):
            target = whole[_slices(p.box)]
            target.copy_(value.view(target.shape))
        with _fp32_products(has_tf32=self.rule.has_tf32):
            whole = orthogonalize(whole, self.rule.coefficients, self.rule.num_steps)
        return [whole[_slices(p.box)].reshape(-1) for parts in one.matrix_parts for p in parts]

    def _apply(
        self, part: LocalPart, value: Tensor, shard: FlatUpdate, moments: Mapping[str, Tensor]
    ) -> None:
        scale, adaptive = self.rule.scale(part.matrix.shape), self.rule.second_moment
        if adaptive is not None:
            scaled = value.to(shard.master.dtype) * scale
            value, scale = adaptive.normalized(scaled, moments[self.second_moment][part.elements]), 1.0
        master = shard.master[part.elements]
        (hyperparams,) = {one for one in shard.ranges if one.start <= part.elements.start < one.stop}
        master.mul_(1 - hyperparams.lr * hyperparams.weight_decay)
        master.add_(value, alpha=-hyperparams.lr * scale)
        if shard.has_separate_weight:
            shard.weight[part.elements].copy_(master)


@contextlib.contextmanager
def _fp32_products(*, has_tf32: bool) -> Iterator[None]:
    """Compute fp32 GEMMs in full precision, or allow TF32, within the context."""
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("high" if has_tf32 else "highest")
    try:
        yield
    finally:
        torch.set_float32_matmul_precision(before)


def _concatenated(values: list[Tensor], like: Tensor, dtype: torch.dtype) -> Tensor:
    return torch.cat(values) if values else like.new_empty(0, dtype=dtype)


def _slices(box: Box) -> tuple[slice, slice]:
    rows, columns = box
    return slice(*rows), slice(*columns)
