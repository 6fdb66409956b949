"""Norms and the residual addition before them, against autograd in fp64."""

import pytest
import torch
from torch.nn import functional as F

from megatrain.kernels import norms


def _random(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("has_bias", [False, True])
@pytest.mark.parametrize("has_delta", [False, True])
@pytest.mark.parametrize("offset", [0.0, 1.0])
def test_a_norm_and_its_gradients_are_autograds(has_bias: bool, has_delta: bool, offset: float) -> None:
    x, weight = _random(5, 3, 8).requires_grad_(), _random(8, seed=1).requires_grad_()
    bias = _random(8, seed=2).requires_grad_() if has_bias else None
    delta = _random(5, 3, 8, seed=3) if has_delta else None
    dy, dtotal = _random(5, 3, 8, seed=4), _random(5, 3, 8, seed=5)
    total = x if delta is None else x + delta
    gain = weight + offset
    y = F.rms_norm(total, (8,), gain, 1e-5) if bias is None else F.layer_norm(total, (8,), gain, bias, 1e-5)
    torch.autograd.backward((y, total * dtotal), (dy, torch.ones_like(dtotal)))

    with torch.no_grad():
        output = norms.norm(x, delta, weight, bias, 1e-5, offset)
        found = norms.norm_backward(dy, dtotal, output, weight, offset)
        alone = norms.norm_backward(dy, None, output, weight, offset)
    torch.testing.assert_close(output.total, total.detach())
    torch.testing.assert_close(output.y, y.detach())
    torch.testing.assert_close(found.dx, x.grad)
    torch.testing.assert_close(alone.dx, x.grad - dtotal)
    of_parameters = [weight.grad] if bias is None else [weight.grad, bias.grad]
    torch.testing.assert_close(found.rows.sum(0), torch.cat(of_parameters))
