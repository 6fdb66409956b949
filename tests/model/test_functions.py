"""The autograd functions: outputs, gradients of inputs, and those of weights in the buffers, against plain torch in fp64."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from megatrain.kernels.activations import QUICK_GELU, Activation
from megatrain.kernels.random import keep_mask
from megatrain.model import functions
from megatrain.model.implementations.dropout import LocalDropout
from megatrain.model.implementations.split_norm import split_rms_norm
from megatrain.parallel.batch import PassInfo
from megatrain.parallel.context_parallel import ContextParallel
from megatrain.parallel.grid import RankGroup
from megatrain.parallel.layout import ShardedModule
from megatrain.parallel.tensor_parallel import Bias, TensorParallel, row_linear

ALONE = RankGroup("tp", (0,), 0)
CP = ContextParallel(RankGroup("cp", (0,), 0))


def _random(*shape: int) -> Tensor:
    return torch.randn(*shape, dtype=torch.float64, generator=torch.Generator().manual_seed(sum(shape)))


def module_with(**weights: Tensor) -> ShardedModule:
    module = ShardedModule()
    for name, value in weights.items():
        module.register_parameter(name, torch.nn.Parameter(value.detach().clone()))
        module.weight_grads[name] = torch.ones_like(value)
    return module


WEIGHT, BIAS = _random(16), _random(1, 16)[0]
FUNCTIONS: dict[str, tuple[Callable[..., Tensor], Callable[..., Tensor]]] = {
    "norm": (
        lambda x, own: sum(functions.norm(x, None, own, 1e-5, 1.0)),
        lambda x, weight, bias: x + F.layer_norm(x, (16,), weight + 1, bias, 1e-5),
    ),
    "norm of a sum": (
        lambda x, own: functions.norm(x, 2 * x, own, 1e-5, 0.0)[1],
        lambda x, weight, bias: F.layer_norm(3 * x, (16,), weight, bias, 1e-5),
    ),
    "split_rms_norm": (
        lambda x, own: split_rms_norm(x, own, 1e-5, 0.0, ALONE),
        lambda x, weight, bias: F.rms_norm(x, (16,), weight, 1e-5) + 0 * bias,
    ),
    "as_leaf": (
        lambda x, own: x * functions.as_leaf(own.weight, own.weight_grads["weight"]),
        lambda x, weight, bias: x * weight + 0 * bias,
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", FUNCTIONS)
def test_a_function_and_its_gradients_are_those_of_plain_torch(name: str) -> None:
    function, plain = FUNCTIONS[name]
    x, upstream = _random(5, 3, 16), _random(3, 5, 16).view(5, 3, 16)
    theirs = [one.clone().requires_grad_() for one in (x, WEIGHT, BIAS)]
    expected = plain(*theirs)
    expected.backward(upstream)
    own, ours = module_with(weight=WEIGHT, bias=BIAS), x.clone().requires_grad_()
    found = function(ours, own)
    found.backward(upstream)
    torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-13)
    torch.testing.assert_close(ours.grad, theirs[0].grad, rtol=1e-11, atol=1e-12)
    for weight, their in zip(("weight", "bias"), theirs[1:], strict=True):
        torch.testing.assert_close(own.weight_grads[weight] - 1, their.grad, rtol=1e-11, atol=1e-12)


@pytest.mark.parametrize("frozen", ["weight", "bias"])
def test_a_norm_with_one_frozen_parameter_has_the_gradient_of_the_other(frozen: str) -> None:
    found = []
    for is_frozen in (False, True):
        own = module_with(weight=WEIGHT, bias=BIAS)
        if is_frozen:
            del own.weight_grads[frozen]
        functions.norm(_random(5, 3, 16).requires_grad_(), None, own, 1e-5, 0.0)[1].square().sum().backward()
        found.append(own.weight_grads)
    (trained,) = found[1]
    assert torch.equal(found[1][trained], found[0][trained])


def test_an_activation_and_a_linear_layer_match_plain_torch() -> None:
    activation = Activation(fn=QUICK_GELU, is_gated=True, clamp=0.5, offset=1)
    x, weight, bias, upstream = _random(5, 3, 32), _random(7, 16), _random(7), _random(5, 3, 7)
    theirs = [one.clone().requires_grad_() for one in (x, weight, bias)]
    gate, up = theirs[0].chunk(2, -1)
    gate = gate.clamp(max=0.5)
    expected = F.linear(gate * torch.sigmoid(1.702 * gate) * (up.clamp(-0.5, 0.5) + 1), *theirs[1:])
    expected.backward(upstream)
    ours, grad, bias_grad = x.clone().requires_grad_(), torch.ones_like(weight), torch.ones_like(bias)
    tp = TensorParallel(ALONE, ALONE, sequence_parallel=False)
    found = row_linear(ours, weight, grad, tp, PassInfo(), Bias(bias, bias_grad), activation=activation)
    found.backward(upstream)
    torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-13)
    torch.testing.assert_close(ours.grad, theirs[0].grad, rtol=1e-11, atol=1e-12)
    torch.testing.assert_close(grad - 1, theirs[1].grad, rtol=1e-11, atol=1e-12)
    torch.testing.assert_close(bias_grad - 1, theirs[2].grad, rtol=1e-11, atol=1e-12)


def test_dropout_applies_its_mask_and_scales_the_rest() -> None:
    x = torch.ones(6, 2, 16, dtype=torch.float64, requires_grad=True)
    tp = TensorParallel(ALONE, ALONE, sequence_parallel=False)
    dropout, info = LocalDropout(0.25, 5, tp, CP), PassInfo(first_sample=4)
    out = dropout(x, info)
    out.backward(torch.ones_like(out))
    rows = torch.tensor([4, 5]) * 6 + torch.arange(6)[:, None]
    expected = keep_mask(rows, 16, key=5, p=0.25) / 0.75
    torch.testing.assert_close(out, expected.double())
    torch.testing.assert_close(x.grad, expected.double())
    for is_training in (True, False):
        info = PassInfo(first_sample=4, is_training=is_training)
        own, residual = x.detach().requires_grad_(), torch.rand_like(x, requires_grad=True)
        total, upstream = dropout(own, info, residual), torch.rand_like(x)
        total.backward(upstream)
        factor = expected if is_training else 1
        torch.testing.assert_close(total, residual + own * factor)
        torch.testing.assert_close(own.grad, upstream * factor)
        assert torch.equal(residual.grad, upstream)
    assert torch.equal(dropout(x, info), x)


def test_dropout_of_a_part_of_the_sequence_is_a_part_of_the_whole() -> None:
    x = torch.ones(8, 2, 16, dtype=torch.float64)
    whole = LocalDropout(0.5, 5, TensorParallel(ALONE, ALONE, sequence_parallel=False), CP)(x, PassInfo())
    for rank in range(4):
        tp = TensorParallel(RankGroup("tp", (0, 1, 2, 3), rank), ALONE, sequence_parallel=True)
        assert torch.equal(LocalDropout(0.5, 5, tp, CP)(x[:2], PassInfo()), whole[2 * rank : 2 * rank + 2])
