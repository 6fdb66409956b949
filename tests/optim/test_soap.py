"""SOAP against its formulas and Adam, and the tensors that its matrices own."""

import math

import pytest
import torch
from optimizer_helpers import (
    HYPERPARAMS,
    PARAMETERS,
    assert_unchanged_by_nan,
    drawn,
    matrices,
    optimizer_with,
    take_steps,
    weights,
)
from torch import Tensor

from megatrain.optim.sharded import ShardedOptimizer
from megatrain.optim.soap import MatrixState, Side, Soap, SoapRule

RULE = SoapRule(beta1=0.9, beta2=0.95, eps=1e-8, shampoo_beta=0.9, frequency=3, max_dim=30)
IN_MATRICES = [name for name, (kind, _) in PARAMETERS.items() if kind == "matrix"]


def optimizer_of(rule: SoapRule, dtype: torch.dtype = torch.float64) -> ShardedOptimizer:
    return optimizer_with(
        lambda shards, grid: Soap(rule, shards, grid, device=torch.device("cpu"), dtype=dtype), dtype
    )


def reference(weight: Tensor, gradients: list[Tensor], rule: SoapRule) -> Tensor:
    """Algorithms 3 and 4 of arXiv:2409.11321, with Adam's corrections of bias, damped power iterations and sorted bases.

    Sides above `max_dim` keep the identity; each of the first steps has a power iteration.
    """
    (m, n), lr, decay = weight.shape, HYPERPARAMS.lr, HYPERPARAMS.weight_decay
    left, right = torch.zeros(m, m).double(), torch.zeros(n, n).double()
    q_left, q_right = torch.eye(m).double(), torch.eye(n).double()
    first, second = torch.zeros_like(weight), torch.zeros_like(weight)
    for t, g in enumerate(gradients, start=1):
        rotated = q_left.T @ g @ q_right
        first = rule.beta1 * first + (1 - rule.beta1) * g
        second = rule.beta2 * second + (1 - rule.beta2) * rotated**2
        moment = q_left.T @ first @ q_right / (1 - rule.beta1**t)
        step = moment / ((second / (1 - rule.beta2**t)) ** 0.5 + rule.eps)
        weight = weight * (1 - lr * decay) - lr * q_left @ step @ q_right.T
        left = rule.shampoo_beta * left + (1 - rule.shampoo_beta) * g @ g.T
        right = rule.shampoo_beta * right + (1 - rule.shampoo_beta) * g.T @ g
        if t < rule.frequency or t % rule.frequency == 0:
            if m <= rule.max_dim:
                q_left, order = iterated(left, q_left)
                second = second[order]
            if n <= rule.max_dim:
                q_right, order = iterated(right, q_right)
                second = second[:, order]
    return weight


def iterated(covariance: Tensor, basis: Tensor) -> tuple[Tensor, list[int]]:
    """Gram-Schmidt of a damped power iteration, by falling eigenvalues; those within a 1024th of an octave keep their order."""
    size, mean = len(basis), covariance.trace() / len(basis)
    values = [float(basis[:, i] @ covariance @ basis[:, i] / mean) for i in range(size)]
    order = sorted(range(size), key=lambda i: -round(1024 * math.log2(max(values[i], 1e-3))))
    images = (covariance / mean + 1e-3 * torch.eye(size).double()) @ basis
    columns: list[Tensor] = []
    for i in order:
        vector = images[:, i]
        for _ in range(2):
            for known in columns:
                vector = vector - (known @ vector) * known
        columns.append(vector / vector.norm())
    return torch.stack(columns, dim=1), order


@pytest.mark.parametrize("max_dim", [0, 20, 100])
def test_weights_follow_the_paper(max_dim: int) -> None:
    rule = SoapRule(**{**vars(RULE), "max_dim": max_dim})
    optimizer = optimizer_of(rule)
    start = {name: value.clone() for name, value in weights(optimizer).items()}
    steps = drawn(optimizer, 8)
    take_steps(optimizer, steps)
    for name in IN_MATRICES:
        found = matrices(name, weights(optimizer)[name], splits_qkv=True)
        for number, one in enumerate(found):
            gradients = [matrices(name, of_step[name].double(), splits_qkv=True)[number] for of_step in steps]
            first = matrices(name, start[name], splits_qkv=True)[number]
            expected = reference(first, gradients, rule)
            torch.testing.assert_close(one, expected, rtol=1e-11, atol=1e-11)
            assert (one - first).abs().max() > 0.01


def test_without_bases_it_is_adamw() -> None:
    optimizer = optimizer_of(SoapRule(**{**vars(RULE), "max_dim": 0}))
    start = {name: value.clone() for name, value in weights(optimizer).items()}
    steps = drawn(optimizer, 3)
    take_steps(optimizer, steps)
    for name, value in weights(optimizer).items():
        theirs = torch.nn.Parameter(start[name])
        decay = 0.1 if theirs.dim() > 1 else 0.0
        adamw = torch.optim.AdamW([theirs], lr=0.01, betas=(0.9, 0.95), eps=1e-8, weight_decay=decay)
        for gradients in steps:
            theirs.grad = gradients[name].double()
            adamw.step()
        torch.testing.assert_close(value, theirs.data, rtol=1e-12, atol=1e-12)


def test_bases_become_eigenvectors() -> None:
    generator = torch.Generator().manual_seed(0)
    axes = torch.linalg.qr(torch.randn(12, 12, generator=generator, dtype=torch.float64))[0]
    values = 2.0 ** -torch.arange(12).double()
    side = Side(axes @ values.diag() @ axes.T, torch.eye(12).double())
    for _ in range(60):
        side.refresh()
    torch.testing.assert_close((side.basis.T @ axes).abs(), torch.eye(12).double(), rtol=0, atol=1e-9)


def test_singular_covariances_do_not_amplify_rounding() -> None:
    """Gradients of few tokens: an eigendecomposition would draw the basis of the null space from rounding errors.

    A third of parity's bound passes; a damping of 1e-4 would give more than the bound.
    """
    generator = torch.Generator().manual_seed(4)
    states = [MatrixState.initial((256, 64), 1000, torch.device("cpu"), torch.float64) for _ in range(2)]
    for _ in range(4):
        outputs, inputs = (torch.randn(8, n, generator=generator, dtype=torch.float64) for n in (256, 64))
        noise = 1e-15 * torch.randn(256, 64, generator=generator, dtype=torch.float64)
        gradient = outputs.T @ inputs
        for state, value in zip(states, (gradient, gradient + noise), strict=True):
            state.accumulate(value, 0.9)
            state.refresh()
    for (name, one), (_, other) in zip(*(state.tensors() for state in states), strict=True):
        difference = (one - other).abs().max() / one.abs().max().clamp(min=1)
        assert difference < 3e-11, name


def test_a_matrix_without_gradients_keeps_its_bases() -> None:
    side = Side(torch.zeros(6, 6), torch.linalg.qr(torch.randn(6, 6))[0])
    before = side.basis.clone()
    side.refresh()
    torch.testing.assert_close(side.basis, before)


def test_each_matrix_owns_its_tensors() -> None:
    optimizer = optimizer_of(RULE)
    found = {box.piece.name: values.numel() for _, box, values in optimizer.owned("factor")}
    assert optimizer.matrices is not None
    matrices = sum(values.numel() for _, _, values in optimizer.owned("momentum_buffer"))
    assert optimizer.matrices.factors_per_element == pytest.approx(sum(found.values()) / matrices)
    assert found["soap.q.left_covariance"] == found["soap.q.left_basis"] == 16 * 16
    assert found["soap.q.right_basis"] == 12 * 12
    assert found["soap.gate+up.exp_avg_sq"] == 48 * 12
    assert "soap.gate+up.left_basis" not in found, "48 rows exceed the limit"
    assert {"soap.0.gate+0.up.left_basis", "soap.1.gate+1.up.left_basis"} <= found.keys()


def test_a_step_that_is_not_finite_changes_nothing() -> None:
    optimizer = optimizer_of(RULE)
    take_steps(optimizer, drawn(optimizer, 1))
    assert_unchanged_by_nan(optimizer)


def test_rounding_does_not_order_equal_eigenvalues() -> None:
    """Another order gives another basis, by as much as the damping."""
    gradient = torch.tensor([1.0, -1.0, 0.0, 0.0]).double()
    bases = []
    for size in (-1e-15, 1e-15):
        side = Side(gradient.outer(gradient) + size * gradient.diag(), torch.eye(4).double())
        side.refresh()
        bases.append(side.basis)
    torch.testing.assert_close(bases[0], bases[1], rtol=0, atol=1e-10)
