"""Activations against torch's own, and their gradients against autograd, in fp64."""

import pytest
import torch
from torch.nn import functional as F

from megatrain.kernels import activations as a
from megatrain.kernels.activations import Activation


def _random(*shape: int) -> torch.Tensor:
    return 2 * torch.randn(*shape, dtype=torch.float64, generator=torch.Generator().manual_seed(sum(shape)))


PLAIN = {
    "gelu": (a.GELU, F.gelu),
    "gelu_tanh": (a.GELU_TANH, lambda x: F.gelu(x, approximate="tanh")),
    "quick_gelu": (a.QUICK_GELU, lambda x: x * torch.sigmoid(1.702 * x)),
    "silu": (a.SILU, F.silu),
    "squared_relu": (a.SQUARED_RELU, lambda x: F.relu(x) ** 2),
}


@pytest.mark.parametrize("name", PLAIN)
def test_an_activation_function_and_its_derivative_are_torchs(name: str) -> None:
    activation_fn, plain = PLAIN[name]
    x, dy = _random(4, 3, 10).requires_grad_(), _random(4, 3, 10)
    expected = plain(x)
    expected.backward(dy)
    check(x, dy, Activation(fn=activation_fn), expected)


@pytest.mark.parametrize("name", PLAIN)
@pytest.mark.parametrize(("clamp", "offset"), [(None, 0.0), (1.5, 0.0), (None, 1.0), (1.5, 1.0)])
def test_a_gated_activation_and_its_gradient_are_autograds(
    name: str, clamp: float | None, offset: float
) -> None:
    activation_fn, plain = PLAIN[name]
    x, dy = _random(5, 2, 16).requires_grad_(), _random(5, 2, 8)
    gate, up = x.chunk(2, -1)
    if clamp is not None:
        gate, up = gate.clamp(max=clamp), up.clamp(-clamp, clamp)
    expected = plain(gate) * (up + offset)
    expected.backward(dy)
    check(x, dy, Activation(fn=activation_fn, is_gated=True, clamp=clamp, offset=offset), expected)


@pytest.mark.parametrize("name", PLAIN)
@pytest.mark.parametrize("is_gated", [False, True])
def test_a_weighted_activation_and_its_gradients_are_autograds(name: str, is_gated: bool) -> None:
    activation_fn, plain = PLAIN[name]
    x, weights, dy = (
        _random(5, 16).requires_grad_(),
        _random(5).requires_grad_(),
        _random(5, 8 if is_gated else 16),
    )
    gate, up = x.chunk(2, -1)
    expected = (plain(gate) * up if is_gated else plain(x)) * weights[:, None]
    expected.backward(dy)
    activation = Activation(fn=activation_fn, is_gated=is_gated)
    found = a.activate_weighted(x.detach(), weights.detach(), activation)
    torch.testing.assert_close(found, expected.detach(), rtol=1e-12, atol=1e-14)
    gradients = a.activate_weighted_backward(dy, x.detach(), weights.detach(), activation)
    torch.testing.assert_close(gradients, (x.grad, weights.grad), rtol=1e-12, atol=1e-13)
    assert torch.equal(dy, found)  # overwritten with the result


@pytest.mark.parametrize("name", PLAIN)
def test_derivatives_are_finite_where_squares_overflow(name: str) -> None:
    x, activation = torch.tensor([-1e20, 1e20]), Activation(fn=PLAIN[name][0])
    dx = a.activate_backward(torch.ones(2), x, activation)
    assert torch.equal(dx, torch.tensor([0.0, 2e20 if name == "squared_relu" else 1.0]))


def check(x: torch.Tensor, dy: torch.Tensor, activation: Activation, expected: torch.Tensor) -> None:
    recomputed = torch.empty_like(dy)
    found, gradient = (
        a.activate(x.detach(), activation),
        a.activate_backward(dy, x.detach(), activation, recomputed=recomputed),
    )
    torch.testing.assert_close(found, expected.detach(), rtol=1e-12, atol=1e-14)
    torch.testing.assert_close(gradient, x.grad, rtol=1e-12, atol=1e-14)
    assert torch.equal(recomputed, found)


def test_bf16_input_is_computed_in_fp32() -> None:
    x = _random(64, 8).bfloat16()
    expected = F.gelu(x.float(), approximate="tanh").bfloat16()
    assert torch.equal(a.activate(x, Activation(fn=a.GELU_TANH)), expected)
