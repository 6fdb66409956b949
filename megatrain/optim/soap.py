"""SOAP: Adam in the eigenbasis of Shampoo's covariances, matrix by matrix; AdamW updates the rest of the model.

    gradient G, momentum M (flat, on the rank of the shard) ─ all-to-all ─> owner: whole matrices
        G' = Ql^T G Qr, M' = Ql^T M Qr -> V = mean of G'^2 -> Ql (M' / sqrt(V)) Qr^T ─ all-to-all ─> master weights
        L = mean of G G^T, R = mean of G^T G; every few steps a power iteration moves Ql, Qr to their eigenvectors

The owner of a matrix holds L, R, Ql, Qr and V: tensors of shapes of their own, which checkpoints store under names of
their own, and which another layout gives to another owner.

Source: Vyas et al., arXiv:2409.11321, algorithms 3 and 4, which leave the first step open. Here bases start as the
identity, so that the first step is Adam's, and in the first `frequency` steps each step has a power iteration. Gradients
of few tokens leave L and R singular; `_DAMPING` keeps the basis of their null space, which an eigendecomposition would
take from rounding errors, different under every layout.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Final

import torch
from torch import Tensor

from megatrain.kernels.optimizer.shard_update import FlatUpdate
from megatrain.optim.matrices import LocalPart, Matrix
from megatrain.optim.matrix_update import MatrixUpdate, fp32_products, gradient_of, take_step
from megatrain.parallel.buckets import Shard
from megatrain.parallel.grid import RankGrid
from megatrain.parallel.layout import BoxRange, Init, ParamLayout, Piece, whole_box
from megatrain.parallel.rank_lists import Family

FACTOR: Final = "factor"
"""The kind of state of a tensor that belongs to a matrix, by its name in checkpoints."""
FACTOR_PREFIX: Final = "soap."
"""Start of the names of such tensors."""
_DAMPING: Final = 1e-3
"""Added to the eigenvalues in a power iteration, relative to their mean. Smaller ones keep their order. Rounding of the largest
eigenvalue, divided by this, is the rounding of the bases."""
_STEPS: Final = 1024
"""Parts of an octave in which eigenvalues are equal, and keep their order: rounding does not decide between equal ones, such as
those of the rows of a router whose tokens all choose the same two experts."""


@dataclass(frozen=True, kw_only=True)
class SoapRule:
    """Hyperparameters of SOAP."""

    beta1: float
    beta2: float
    eps: float
    shampoo_beta: float
    frequency: int
    """Steps between power iterations."""
    max_dim: int
    """A larger side of a matrix keeps the identity as its basis."""


@dataclass(frozen=True)
class Side:
    """The covariance of the rows or columns of gradients, and an approximation of its eigenvectors, the largest first."""

    covariance: Tensor
    basis: Tensor

    def refresh(self) -> Tensor:
        """Move the basis by a power iteration, in place; return the new order of its vectors."""
        mean = self.covariance.diagonal().mean().clamp(min=torch.finfo(self.basis.dtype).tiny)
        product = (self.covariance / mean) @ self.basis
        eigenvalues = (self.basis * product).sum(dim=0).clamp(min=_DAMPING)
        order = (eigenvalues.log2() * _STEPS).round().argsort(descending=True, stable=True)
        basis, scales = torch.linalg.qr((product + _DAMPING * self.basis)[:, order])
        self.basis.copy_(torch.where(scales.diagonal() < 0, -basis, basis))
        return order


@dataclass(frozen=True)
class MatrixState:
    """The state of a matrix that its owner holds."""

    left: Side | None
    right: Side | None
    exp_avg_sq: Tensor
    """Second moment of the gradient in the eigenbases."""

    @classmethod
    def initial(
        cls, shape: tuple[int, int], max_dim: int, device: torch.device, dtype: torch.dtype
    ) -> MatrixState:
        def side(size: int) -> Side | None:
            if size > max_dim:
                return None
            zeros = torch.zeros(size, size, device=device, dtype=dtype)
            return Side(zeros, torch.eye(size, device=device, dtype=dtype))

        return cls(side(shape[0]), side(shape[1]), torch.zeros(shape, device=device, dtype=dtype))

    def tensors(self) -> Iterator[tuple[str, Tensor]]:
        """Yield all tensors, with their names in checkpoints."""
        for name, side in (("left", self.left), ("right", self.right)):
            if side is not None:
                yield f"{name}_covariance", side.covariance
                yield f"{name}_basis", side.basis
        yield "exp_avg_sq", self.exp_avg_sq

    def rotated(self, value: Tensor) -> Tensor:
        """Return a matrix in the eigenbases."""
        value = value if self.left is None else self.left.basis.T @ value
        return value if self.right is None else value @ self.right.basis

    def rotated_back(self, value: Tensor) -> Tensor:
        """Return a matrix of the eigenbases in its own."""
        value = value if self.left is None else self.left.basis @ value
        return value if self.right is None else value @ self.right.basis.T

    def accumulate(self, gradient: Tensor, beta: float) -> None:
        """Update the covariances."""
        for side, value in ((self.left, gradient), (self.right, gradient.T)):
            if side is not None:
                side.covariance.lerp_(value @ value.T, 1 - beta)

    def refresh(self) -> None:
        """Move the bases, and the second moment with the order of their vectors."""
        for dim, side in enumerate((self.left, self.right)):
            if side is not None:
                self.exp_avg_sq.copy_(self.exp_avg_sq.index_select(dim, side.refresh()))


class Soap(MatrixUpdate):
    """SOAP for the matrices of one rank's shards.

    Args:
        rule: hyperparameters.
        shards, grid: see `MatrixUpdate`.
        dtype: dtype of master weights, and of all state and arithmetic.
    """

    factor_kind = FACTOR
    num_values = 2

    def __init__(
        self,
        rule: SoapRule,
        shards: Sequence[Shard],
        grid: RankGrid,
        *,
        device: torch.device,
        dtype: torch.dtype,
    ) -> None:
        super().__init__(shards, grid, splits_qkv=True)
        self.rule = rule
        self._states: dict[Matrix, tuple[Family, MatrixState]] = {
            matrix: (family, MatrixState.initial(matrix.shape, rule.max_dim, device, dtype))
            for family, group in self.groups.items()
            for matrix in self.owned[family][group.rank]
        }

    def dtype(self, master_dtype: torch.dtype) -> torch.dtype:
        """See `MatrixUpdate`."""
        return master_dtype

    @property
    def factors_per_element(self) -> float:
        """See `MatrixUpdate`."""
        shapes = [one.shape for owned in self.owned.values() for of_rank in owned for one in of_rank]
        sides = sum(2 * side**2 for shape in shapes for side in shape if side <= self.rule.max_dim)
        return 1.0 + sides / max(sum(map(math.prod, shapes)), 1)

    def factors(self) -> Iterator[tuple[ParamLayout, BoxRange, Tensor]]:
        """See `MatrixUpdate`."""
        for matrix, (family, state) in self._states.items():
            for name, tensor in state.tensors():
                shape = tuple(tensor.shape)
                piece = Piece(f"{FACTOR_PREFIX}{matrix.name}.{name}", shape, whole_box(shape))
                layout = ParamLayout(shape=shape, pieces=(piece,), init=Init(), family=family)
                yield layout, BoxRange(piece, piece.box, 0), tensor.view(-1)

    def values(self, part: LocalPart, shard: FlatUpdate, moments: Mapping[str, Tensor]) -> Tensor:
        """Update the momentum of a part; return gradient and momentum."""
        momentum, gradient = moments[self.momentum][part.elements], gradient_of(part, shard)
        momentum.lerp_(gradient, 1 - self.rule.beta1)
        return torch.stack([gradient, momentum])

    def update(self, matrix: Matrix, values: Tensor, step: int) -> Tensor:
        """Return Adam's update in the eigenbases of the steps before; then update these."""
        rule, (_, state), (gradient, momentum) = self.rule, self._states[matrix], values
        with fp32_products(has_tf32=False):
            state.exp_avg_sq.lerp_(state.rotated(gradient).square(), 1 - rule.beta2)
            root = (state.exp_avg_sq / (1 - rule.beta2**step)).sqrt()
            update = state.rotated(momentum) / (1 - rule.beta1**step) / (root + rule.eps)
            update = state.rotated_back(update)
            state.accumulate(gradient, rule.shampoo_beta)
            if step < rule.frequency or step % rule.frequency == 0:
                state.refresh()
        return update

    def apply(
        self,
        part: LocalPart,
        update: Tensor,
        shard: FlatUpdate,
        moments: Mapping[str, Tensor],  # noqa: ARG002 (`values` has updated them)
    ) -> None:
        """See `MatrixUpdate`."""
        take_step(part, update, shard)
