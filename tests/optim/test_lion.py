"""Lion against its formula, program 1 of Chen et al., arXiv:2302.06675."""

import pytest
import torch

from megatrain.kernels.optimizer.lion import lion
from megatrain.kernels.optimizer.shard_update import FlatUpdate, HyperparamRange

RANGES = (HyperparamRange(0, 5, lr=0.1, weight_decay=0.5), HyperparamRange(5, 12, lr=0.01, weight_decay=0.0))


def update_of(master, grad, weight, *, is_finite=True):
    scale = torch.tensor(0.25, dtype=master.dtype)
    return FlatUpdate(
        master=master,
        grad=grad,
        weight=weight,
        ranges=RANGES,
        grad_scale=scale,
        is_finite=torch.tensor(is_finite),
    )


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_steps_follow_the_formula(dtype):
    generator = torch.Generator().manual_seed(0)
    master = torch.randn(12, generator=generator, dtype=torch.float64)
    mean, weight = torch.zeros(12, dtype=torch.float64), torch.zeros(12, dtype=dtype)
    lr, decay = (
        torch.tensor(x, dtype=torch.float64) for x in ([0.1] * 5 + [0.01] * 7, [0.5] * 5 + [0.0] * 7)
    )
    expected, momentum = master.clone(), mean.clone()
    for _ in range(4):
        grad = torch.randn(12, generator=generator, dtype=torch.float64)
        grad[3] = 0
        lion(update_of(master, grad, weight), mean, beta1=0.9, beta2=0.6)
        step = torch.sign(0.9 * momentum + 0.1 * grad / 4)
        expected -= lr * (step + decay * expected)
        momentum = 0.6 * momentum + 0.4 * grad / 4
        torch.testing.assert_close(master, expected, rtol=1e-14, atol=1e-14)
        torch.testing.assert_close(mean, momentum, rtol=1e-14, atol=1e-14)
        assert torch.equal(weight, master.to(dtype))


def test_a_step_that_is_not_finite_changes_nothing():
    master, mean = torch.ones(12), torch.full((12,), 0.5, dtype=torch.bfloat16)
    lion(update_of(master, torch.full((12,), torch.nan), master, is_finite=False), mean, beta1=0.9, beta2=0.9)
    assert torch.equal(master, torch.ones(12))
    assert mean.eq(0.5).all()
