"""Muon: momentum, made orthogonal matrix by matrix; the rest of the model moves by AdamW.

    gradient -> momentum (flat, on the rank that holds it) ─ parts ─> owner: whole matrix -> Newton-Schulz
                                             master weights <─ parts ─ owner

A matrix is whole whatever the layout, so that the result is that of one process. Ranks work on different matrices at
the same time. Source: Jordan et al., https://kellerjordan.github.io/posts/muon/; Liu et al., arXiv:2502.16982 (scale
and weight decay).
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from megatrain.kernels.optimizer.newton_schulz import CoefficientType, orthogonalize
from megatrain.kernels.optimizer.shard_update import FlatUpdate
from megatrain.optim.muon_matrices import OwnPart, Round, own_parts, plan_rounds
from megatrain.parallel.buffers import Shard
from megatrain.parallel.collectives import all_to_all
from megatrain.parallel.grid import RankGrid, RankGroup
from megatrain.parallel.layout import Box
from megatrain.parallel.rank_lists import Family

ScaleMode = Literal["spectral", "unit_rms_norm", "shape_scaling"]


@dataclass(frozen=True, kw_only=True)
class MuonRule:
    """The numbers of Muon."""

    momentum: float
    is_nesterov: bool
    num_steps: int
    coefficients: CoefficientType
    scale_mode: ScaleMode
    extra_scale: float
    splits_qkv: bool
    """Whether queries, keys and values of a layer are matrices each."""
    dtype: torch.dtype
    """Of Newton-Schulz, and of what travels; fp64 weights keep to fp64."""
    has_tf32: bool = False
    """Whether products in fp32 may round their factors to TF32, on a GPU."""

    def scale(self, shape: tuple[int, int]) -> float:
        """How long a step is for a matrix of this shape, beside the learning rate."""
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
        rule: its numbers.
        shards: of this rank.
        grid: whose families have ranks that hold matrices together.
    """

    kind = "momentum_buffer"

    def __init__(self, rule: MuonRule, shards: Sequence[Shard], grid: RankGrid) -> None:
        self.rule = rule
        families: tuple[Family, ...] = ("dense", "expert") if grid.shape.has_experts else ("dense",)
        self._parts = {
            family: list(own_parts(shards, grid, family, splits_qkv=rule.splits_qkv)) for family in families
        }
        self.groups = {family: grid.family(family).matrix for family in families}
        self._rounds: list[tuple[RankGroup, Round]] | None = None

    def step(self, shards: Sequence[FlatUpdate], momenta: Sequence[Tensor]) -> None:
        """Update the matrices in all shards; called by all ranks. On a GPU the host waits for it to begin.

        Args:
            shards: as the rule for the rest has them.
            momenta: of each shard's matrices, which stand first in it.
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
            self._run(one, group, shards, momenta, dtype)

    def _run(
        self,
        one: Round,
        group: RankGroup,
        shards: Sequence[FlatUpdate],
        momenta: Sequence[Tensor],
        dtype: torch.dtype,
    ) -> None:
        sent, to_ranks = [], []
        for parts in one.held:
            values = [(p, self._momentum(p, shards[p.shard], momenta[p.shard])) for p in parts]
            sent += [value.to(dtype) for p, value in values if p.is_sent]
            to_ranks.append(sum(p.numel for p in parts if p.is_sent))
        from_ranks = [sum(p.numel for p in parts if p.is_sent) for parts in one.wanted]
        arrived = all_to_all(_joined(sent, shards[0].master, dtype), to_ranks, from_ranks, group)
        back = self._work(one, arrived)
        to_ranks = [sum(p.numel for p in parts) for parts in one.wanted]
        from_ranks = [sum(p.numel for p in parts) for parts in one.held]
        updates = all_to_all(_joined(back, shards[0].master, dtype), to_ranks, from_ranks, group)
        held = [p for parts in one.held for p in parts]
        for p, value in zip(held, updates.split([p.numel for p in held]), strict=True):
            self._apply(p, value, shards[p.shard])

    def _momentum(self, part: OwnPart, shard: FlatUpdate, momentum: Tensor) -> Tensor:
        """Bring the momentum of a part up to date; what is to be made orthogonal."""
        buffer = momentum[part.place]
        grad = shard.grad[part.place].to(shard.master.dtype) * shard.grad_scale
        buffer.lerp_(grad, 1 - self.rule.momentum)
        return grad.lerp(buffer, self.rule.momentum) if self.rule.is_nesterov else buffer

    def _work(self, one: Round, arrived: Tensor) -> list[Tensor]:
        """Newton-Schulz on this rank's matrix, in the parts that all ranks hold."""
        if one.matrix is None:
            return []
        whole = arrived.new_empty(one.matrix.shape)
        sent = [p for parts in one.wanted for p in parts if p.is_sent]
        for p, value in zip(sent, arrived.split([p.numel for p in sent]), strict=True):
            place = whole[_place(p.box)]
            place.copy_(value.view(place.shape))
        with _fp32_products(has_tf32=self.rule.has_tf32):
            whole = orthogonalize(whole, self.rule.coefficients, self.rule.num_steps)
        return [whole[_place(p.box)].reshape(-1) for parts in one.wanted for p in parts]

    def _apply(self, part: OwnPart, value: Tensor, shard: FlatUpdate) -> None:
        master = shard.master[part.place]
        (run,) = {run for run in shard.runs if run.start <= part.place.start < run.stop}
        master.mul_(1 - run.lr * run.weight_decay)
        master.add_(value, alpha=-run.lr * self.rule.scale(part.matrix.shape))
        if shard.has_separate_weight:
            shard.weight[part.place].copy_(master)


@contextlib.contextmanager
def _fp32_products(*, has_tf32: bool) -> Iterator[None]:
    """Within, products of fp32 matrices are exact, or may round their factors to TF32."""
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("high" if has_tf32 else "highest")
    try:
        yield
    finally:
        torch.set_float32_matmul_precision(before)


def _joined(values: list[Tensor], like: Tensor, dtype: torch.dtype) -> Tensor:
    return torch.cat(values) if values else like.new_empty(0, dtype=dtype)


def _place(box: Box) -> tuple[slice, slice]:
    rows, columns = box
    return slice(*rows), slice(*columns)
