"""Muon on one rank against torch's, and the assignment of matrices to ranks."""

import functools

import pytest
import torch
from optimizer_helpers import (
    PARAMETERS,
    assert_unchanged_by_nan,
    drawn,
    matrices,
    optimizer_with,
    take_steps,
    weights,
)

from megatrain.kernels.optimizer.newton_schulz import orthogonalize, step_coefficients
from megatrain.optim.matrices import Matrix, assign_matrices
from megatrain.optim.muon import Muon, MuonRule, SecondMoment
from megatrain.optim.sharded import ShardedOptimizer

TORCH_RULE = MuonRule(
    momentum=0.95,
    is_nesterov=True,
    num_steps=5,
    coefficients="simple",
    scale_mode="shape_scaling",
    extra_scale=1.0,
    splits_qkv=True,
    dtype=torch.bfloat16,
)


def optimizer_of(rule: MuonRule) -> ShardedOptimizer:
    return optimizer_with(functools.partial(Muon, rule))


@pytest.mark.parametrize("splits_qkv", [True, False])
def test_matrices_follow_torchs_muon_and_the_rest_its_adamw(splits_qkv: bool) -> None:
    rule = MuonRule(**{**vars(TORCH_RULE), "splits_qkv": splits_qkv})
    optimizer = optimizer_of(rule)
    start = {name: value.clone() for name, value in weights(optimizer).items()}
    steps = drawn(optimizer)
    take_steps(optimizer, steps)
    for name, (kind, _) in PARAMETERS.items():
        found = matrices(name, weights(optimizer)[name], splits_qkv=splits_qkv)
        theirs = [torch.nn.Parameter(m.clone()) for m in matrices(name, start[name], splits_qkv=splits_qkv)]
        decay = 0.1 if theirs[0].dim() > 1 else 0.0
        one = (
            torch.optim.AdamW(theirs, lr=0.01, betas=(0.9, 0.95), eps=1e-8, weight_decay=decay)
            if kind != "matrix"
            else torch.optim.Muon(theirs, lr=0.01, weight_decay=decay, momentum=0.95)
        )
        for gradients in steps:
            split = matrices(name, gradients[name], splits_qkv=splits_qkv)
            for parameter, gradient in zip(theirs, split, strict=True):
                parameter.grad = gradient.clone()
            one.step()
        for ours, parameter in zip(found, theirs, strict=True):
            torch.testing.assert_close(ours, parameter.data, rtol=1e-6, atol=1e-6)


def test_adaptive_muon_divides_by_the_root_of_the_mean_square() -> None:
    """The order of Megatron-LM: orthogonalized, scaled by shape, divided by the root of the moment (arXiv:2507.11005)."""
    numbers = {**vars(TORCH_RULE), "second_moment": SecondMoment(0.9, 1e-8), "dtype": torch.float64}
    optimizer = optimizer_of(MuonRule(**numbers))
    assert [kind for kind in optimizer.kinds if "moment" in kind] == ["momentum_buffer", "moment2_buffer"]
    start = {name: value.double() for name, value in weights(optimizer).items()}
    steps = drawn(optimizer)
    take_steps(optimizer, steps)
    for name in ("fc1", "qkv", "down", "experts"):
        found = matrices(name, weights(optimizer)[name], splits_qkv=True)
        for number, one in enumerate(found):
            expected = matrices(name, start[name], splits_qkv=True)[number]
            momentum = moment = torch.zeros_like(expected)
            for gradients in steps:
                grad = matrices(name, gradients[name].double(), splits_qkv=True)[number]
                momentum = 0.95 * momentum + 0.05 * grad
                update = orthogonalize(0.05 * grad + 0.95 * momentum, "simple", 5)
                update = update * max(1.0, update.shape[0] / update.shape[1]) ** 0.5
                moment = 0.9 * moment + 0.1 * update.square()
                expected = expected * (1 - 0.01 * 0.1) - 0.01 * update / (moment.sqrt() + 1e-8)
            torch.testing.assert_close(one.double(), expected, rtol=1e-3, atol=1e-4)


def test_each_kind_of_state_covers_only_its_elements() -> None:
    optimizer = optimizer_of(TORCH_RULE)
    sizes = {kind: sum(values.numel() for _, _, values in optimizer.owned(kind)) for kind in optimizer.kinds}
    in_matrices, others = 48 * 12 + 32 * 12 + 12 * 24 + 24 * 12, 7 + 60
    assert sizes == {
        "weight": in_matrices + others,
        "exp_avg": others,
        "exp_avg_sq": others,
        "momentum_buffer": in_matrices,
    }
    held = sum(flat.numel() for kind in optimizer.kinds[1:] for flat in optimizer.state(kind))
    assert held < in_matrices + 2 * others + 3 * 128  # plus alignment of parameters


@pytest.mark.parametrize(
    ("mode", "tall", "wide"),
    [("spectral", 2.0, 2.0), ("unit_rms_norm", 2.0, 0.5), ("shape_scaling", 2.0, 1.0)],
)
def test_steps_are_scaled_by_shape(mode: str, tall: float, wide: float) -> None:
    rule = MuonRule(**{**vars(TORCH_RULE), "scale_mode": mode, "extra_scale": 0.5})
    assert (rule.scale((4, 1)), rule.scale((1, 4))) == (0.5 * tall, 0.5 * wide)


def test_a_step_that_is_not_finite_changes_nothing() -> None:
    assert_unchanged_by_nan(optimizer_of(TORCH_RULE))


@pytest.mark.parametrize("kind", ["quintic", "polar_express"])
@pytest.mark.parametrize("shape", [(40, 20), (20, 40)])
def test_singular_values_are_near_one(kind: str, shape: tuple[int, int]) -> None:
    x = torch.randn(shape, generator=torch.Generator().manual_seed(3), dtype=torch.float64)
    values = torch.linalg.svdvals(orthogonalize(x, kind, 5))
    assert (values.min() > 0.7) & (values.max() < 1.3)


def test_coefficients_start_over_or_repeat_the_last() -> None:
    quintic, polar = list(step_coefficients("quintic", 6)), list(step_coefficients("polar_express", 10))
    assert quintic[5] == quintic[0]
    assert polar[7] == polar[8] == polar[9] == (1.875, -1.25, 0.375)


@pytest.mark.parametrize("num_ranks", [1, 3, 8, 100])
def test_each_matrix_has_one_owner_and_costs_are_balanced(num_ranks: int) -> None:
    shapes = {
        "q": (64, 64),
        "k": (16, 64),
        "v": (16, 64),
        "proj": (64, 64),
        "fc1": (384, 64),
        "down": (64, 192),
    }
    all_matrices = {Matrix(f"{layer}.{name}", shape) for layer in range(12) for name, shape in shapes.items()}
    owned = assign_matrices(all_matrices, num_ranks)
    assert sorted(m.name for matrices in owned for m in matrices) == sorted(m.name for m in all_matrices)
    costs = [sum(m.cost for m in matrices) for matrices in owned]
    fair, largest = sum(costs) / num_ranks, max(m.cost for m in all_matrices)
    assert max(costs) <= fair + largest
    assert assign_matrices(set(all_matrices), num_ranks) == owned
