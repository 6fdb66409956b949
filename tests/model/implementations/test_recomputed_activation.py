"""A linear layer that recomputes the activation before it has the bits of one that saves its result."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from megatrain.kernels.activations import GELU, SILU, Activation
from megatrain.parallel.batch import PassInfo
from megatrain.parallel.grid import RankGroup
from megatrain.parallel.tensor_parallel import TensorParallel, row_linear

pytestmark = pytest.mark.filterwarnings("ignore:Attempting to run cuBLAS:UserWarning")
ACTIVATIONS = [Activation(fn=GELU), Activation(fn=SILU, is_gated=True)]
DEVICES = [
    "cpu",
    pytest.param("cuda", marks=pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")),
]


def found(activation: Activation, device: str) -> tuple[list[Tensor], int]:
    """Return output and gradients, and the number of saved elements."""
    torch.manual_seed(0)
    x = torch.randn(6, 2, 32 if activation.is_gated else 16).to(device).requires_grad_()
    weight = torch.randn(8, 16).to(device)
    weight_grad, saved = torch.zeros_like(weight), []
    alone = RankGroup("alone", (0,), 0)
    tp = TensorParallel(alone, alone, sequence_parallel=False)
    with torch.autograd.graph.saved_tensors_hooks(lambda t: saved.append(t.numel()) or t, lambda t: t):
        y = row_linear(x.clone(), weight, weight_grad, tp, PassInfo(), activation=activation)
    y.backward(torch.randn(6, 2, 8).to(device))
    return [y.detach(), x.grad, weight_grad], sum(saved)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("activation", ACTIVATIONS, ids=["plain", "gated"])
def test_the_bits_are_the_same(activation: Activation, device: str) -> None:
    kept, num_kept = found(activation, device)
    again, num_again = found(replace(activation, is_recomputed=True), device)
    assert all(torch.equal(x, y) for x, y in zip(kept, again, strict=True))
    assert num_kept - num_again == 6 * 2 * 16
