"""Updates of whole matrices: gathered from flat shards on one owner each, and sent back.

    values (flat, on the rank of the shard) ─ all-to-all ─> owner: whole matrix -> update
                            master weights <─ all-to-all ─ owner

Matrices are whole under every layout, so that the result equals one process. Ranks update different matrices
concurrently.
"""

from __future__ import annotations

import contextlib
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import ClassVar

import torch
from torch import Tensor

from megatrain.kernels.optimizer.shard_update import FlatUpdate
from megatrain.optim.matrices import (
    LocalPart,
    Matrix,
    Part,
    Round,
    assign_matrices,
    local_parts,
    matrices_of,
    plan_rounds,
)
from megatrain.parallel.buckets import Shard
from megatrain.parallel.collectives import all_to_all
from megatrain.parallel.grid import RankGrid, RankGroup
from megatrain.parallel.layout import Box, BoxRange, ParamLayout
from megatrain.parallel.rank_lists import Family


class MatrixUpdate(ABC):
    """An update of the matrices of one rank's shards.

    Args:
        shards: of this rank.
        grid: rank grid; each family has a group of ranks that share its matrices.
        splits_qkv: queries, keys and values of a layer are separate matrices.
    """

    momentum: ClassVar[str] = "momentum_buffer"
    factor_kind: str | None = None
    """Kind of the tensors of `factors`, as in checkpoints; None: there are none."""
    num_values = 1
    """Values that an owner gets of each element."""

    def __init__(self, shards: Sequence[Shard], grid: RankGrid, *, splits_qkv: bool) -> None:
        self.kinds: tuple[str, ...] = (self.momentum,)
        """Names of the state of an element of a matrix, as in checkpoints."""
        families: tuple[Family, ...] = ("dense", "expert") if grid.shape.has_experts else ("dense",)
        self._parts = {
            family: list(local_parts(shards, grid, family, splits_qkv=splits_qkv)) for family in families
        }
        self.groups = {family: grid.family(family).matrix for family in families}
        self.owned = {
            family: assign_matrices(matrices_of(shards, family, splits_qkv=splits_qkv), group.size)
            for family, group in self.groups.items()
        }
        """Matrices of each rank of a family's group."""
        self._rounds: list[tuple[RankGroup, Round]] | None = None

    @abstractmethod
    def dtype(self, master_dtype: torch.dtype) -> torch.dtype:
        """Return the dtype of what is sent."""

    @abstractmethod
    def values(self, part: LocalPart, shard: FlatUpdate, moments: Mapping[str, Tensor]) -> Tensor:
        """Update the state of a part's elements; return what its owner gets: [num_values, numel]."""

    @abstractmethod
    def update(self, matrix: Matrix, values: Tensor, step: int) -> Tensor:
        """Return the update of a whole matrix from `values` [num_values, rows, columns]."""

    @abstractmethod
    def apply(
        self, part: LocalPart, update: Tensor, shard: FlatUpdate, moments: Mapping[str, Tensor]
    ) -> None:
        """Apply the update of a part to its master weights."""

    @property
    def factors_per_element(self) -> float:
        """Elements of the factors of all matrices of a stage, per element of these."""
        return 0.0

    def factors(self) -> Iterator[tuple[ParamLayout, BoxRange, Tensor]]:
        """Yield the tensors of state of this rank's matrices that have shapes of their own."""
        yield from ()

    def step(self, shards: Sequence[FlatUpdate], moments: Mapping[str, Sequence[Tensor]], step: int) -> None:
        """Update the matrices of all shards; called by all ranks. On a GPU the host synchronizes to read `is_finite`.

        Args:
            shards: updates of all shards, as for the element-wise rule.
            moments: state of each shard's matrices, which come first in it, by kind.
            step: number of the step, from 1.
        """
        if shards[0].master.is_meta or not shards[0].is_finite:
            return
        if self._rounds is None:
            self._rounds = [
                (group, one)
                for family, group in self.groups.items()
                for one in plan_rounds(
                    self._parts[family], self.owned[family], group, shards[0].master.device
                )
            ]
        for group, one in self._rounds:
            self._run(one, group, shards, moments, step)

    def _run(
        self,
        one: Round,
        group: RankGroup,
        shards: Sequence[FlatUpdate],
        moments: Mapping[str, Sequence[Tensor]],
        step: int,
    ) -> None:
        """Run one round: send values to the owners, update the matrices, and send the updates back."""
        like = shards[0].master.new_empty(0, dtype=self.dtype(shards[0].master.dtype))
        of_shard = [{kind: moments[kind][n] for kind in self.kinds} for n in range(len(shards))]
        held = [p for parts in one.held_parts for p in parts]
        sent = []
        for p in held:  # also those that another rank sends: their state moves too
            values = self.values(p, shards[p.shard], of_shard[p.shard]).to(like.dtype).view(-1)
            sent += [values] if p.is_sent else []
        to_ranks, from_ranks = (
            [self.num_values * _numel(p for p in parts if p.is_sent) for parts in of_ranks]
            for of_ranks in (one.held_parts, one.matrix_parts)
        )
        received = all_to_all(torch.cat([like, *sent]), to_ranks, from_ranks, group)
        outgoing = self._updated(one, received, step)
        to_ranks, from_ranks = [*map(_numel, one.matrix_parts)], [*map(_numel, one.held_parts)]
        updates = all_to_all(torch.cat([like, *outgoing]), to_ranks, from_ranks, group)
        for p, update in zip(held, updates.split([p.numel for p in held]), strict=True):
            self.apply(p, update, shards[p.shard], of_shard[p.shard])

    def _updated(self, one: Round, received: Tensor, step: int) -> list[Tensor]:
        """Update this rank's matrix; return its update as the parts that all ranks hold."""
        if one.matrix is None:
            return []
        whole = received.new_empty(self.num_values, *one.matrix.shape)
        sent = [p for parts in one.matrix_parts for p in parts if p.is_sent]
        sizes = [self.num_values * p.numel for p in sent]
        for p, values in zip(sent, received.split(sizes), strict=True):
            target = whole[:, *_slices(p.box)]
            target.copy_(values.view(target.shape))
        update = self.update(one.matrix, whole, step).to(received.dtype)
        return [update[_slices(p.box)].reshape(-1) for parts in one.matrix_parts for p in parts]


@contextlib.contextmanager
def fp32_products(*, has_tf32: bool) -> Iterator[None]:
    """Compute fp32 GEMMs in full precision, or allow TF32, within the context."""
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("high" if has_tf32 else "highest")
    try:
        yield
    finally:
        torch.set_float32_matmul_precision(before)


def take_step(part: LocalPart, update: Tensor, shard: FlatUpdate, scale: float = 1.0) -> None:
    """Decay a part's master weights and subtract the learning rate times the scaled update."""
    master = shard.master[part.elements]
    (hyperparams,) = {one for one in shard.ranges if one.start <= part.elements.start < one.stop}
    master.mul_(1 - hyperparams.lr * hyperparams.weight_decay)
    master.add_(update, alpha=-hyperparams.lr * scale)
    if shard.has_separate_weight:
        shard.weight[part.elements].copy_(master)


def gradient_of(part: LocalPart, shard: FlatUpdate) -> Tensor:
    """Return the clipped gradient of a part in the dtype of master weights, flat."""
    return shard.grad[part.elements].to(shard.master.dtype) * shard.grad_scale


def _numel(parts: Iterable[Part]) -> int:
    return sum(p.numel for p in parts)


def _slices(box: Box) -> tuple[slice, slice]:
    rows, columns = box
    return slice(*rows), slice(*columns)
