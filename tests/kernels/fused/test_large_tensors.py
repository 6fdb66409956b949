"""Fused kernels on tensors with more than 2^31 elements, on a GPU with 48 GiB.

              element 2^31
|== ... ======|== ... ====|       parts at both ends and around element 2^31 are compared with the references
"""

import dataclasses

import pytest
import torch
from kernel_reference import reference
from torch import Tensor

from megatrain.kernels import activations, norms
from megatrain.kernels.activations import Activation
from megatrain.kernels.optimizer.adamw import AdamwStep, adamw
from megatrain.kernels.optimizer.shard_update import FlatUpdate, HyperparamRange

MEMORY = torch.cuda.get_device_properties(0).total_memory if torch.cuda.is_available() else 0
pytestmark = [
    pytest.mark.skipif(MEMORY < 48 << 30, reason="needs a GPU with 48 GiB"),
    pytest.mark.filterwarnings("default"),  # Triton's own
]
COLUMNS = 4096
BOUNDARY = 2**31 // COLUMNS
"""First row from element 2^31 on."""
ROWS = BOUNDARY + 3
PARTS = [slice(0, 2), slice(BOUNDARY - 2, BOUNDARY + 1), slice(ROWS - 1, ROWS)]


def drawn(*shape: int) -> Tensor:
    return torch.randn(*shape, device="cuda", dtype=torch.bfloat16)


def near(found: Tensor, expected: Tensor) -> None:
    """Assert equality within two roundings to bf16."""
    torch.testing.assert_close(found.double(), expected.double(), rtol=2**-7, atol=1e-5)


def test_activation() -> None:
    activation = Activation(fn=activations.SILU, is_gated=True)
    x, dy = drawn(ROWS, COLUMNS), drawn(ROWS, COLUMNS // 2)
    y = activations.activate(x, activation)
    given = [(x[part].double(), dy[part].double()) for part in PARTS]
    for part, (of_x, _) in zip(PARTS, given, strict=True):
        near(y[part], activations.activate(of_x, activation))
    del y
    dx = activations.activate_backward(dy, x, activation, recomputed=dy, overwrites_x=True)
    for part, (of_x, of_dy) in zip(PARTS, given, strict=True):
        near(dx[part], activations.activate_backward(of_dy, of_x, activation))
        near(dy[part], activations.activate(of_x, activation))


def test_activation_in_fp8() -> None:
    activation = Activation(fn=activations.SILU, is_gated=True)
    x, dy = drawn(ROWS, COLUMNS), drawn(ROWS, COLUMNS // 2)
    scale = torch.tensor([1 / 16, 16.0], device="cuda")
    given = [(x[part].double(), dy[part].double()) for part in PARTS]
    dx, codes = activations.activate_backward_cast(dy, x, activation, scale, torch.float8_e4m3fn)
    for part, (of_x, of_dy) in zip(PARTS, given, strict=True):
        near(dx[part], activations.activate_backward(of_dy, of_x, activation))
        expected = activations.activate(of_x, activation)
        torch.testing.assert_close(codes[:, part].t().double() / 16, expected, rtol=2**-3, atol=2**-10)


def test_norm() -> None:
    x, dy = drawn(ROWS, COLUMNS), drawn(ROWS, COLUMNS)
    weight = drawn(COLUMNS)
    found = norms.norm(x, None, weight, None, 1e-5)
    gradients = norms.norm_backward(dy, None, found, weight)
    for part in PARTS:
        expected = norms.norm(x[part].double(), None, weight.double(), None, 1e-5)
        near(found.y[part], expected.y)
        near(
            gradients.dx[part],
            norms.norm_backward(dy[part].double(), None, expected, weight.double()).dx,
        )


def test_adamw() -> None:
    size, numbers = 2**31 + 5000, AdamwStep(beta1=0.9, beta2=0.95, eps=1e-8, step=3)
    master = torch.randn(size, device="cuda")
    weight, grad, mean, mean_sq = (torch.empty(size, device="cuda", dtype=torch.bfloat16) for _ in range(4))
    for narrow in (grad, mean, mean_sq):
        narrow.normal_()
    mean_sq.abs_()
    ranges = (HyperparamRange(0, 2**31 + 7, 0.01, 0.1), HyperparamRange(2**31 + 7, size, 0.03, 0.0))
    update = FlatUpdate(
        master=master, grad=grad, weight=weight, ranges=ranges,
        grad_scale=torch.tensor(0.5, device="cuda"), is_finite=torch.tensor(True, device="cuda"),
    )  # fmt: skip
    expected = []
    for start, stop in ((0, 2000), (2**31 - 1000, 2**31 + 1000), (size - 2000, size)):
        part = slice(start, stop)
        own = tuple(
            dataclasses.replace(one, start=max(one.start, start) - start, stop=min(one.stop, stop) - start)
            for one in ranges
            if one.start < stop and one.stop > start
        )
        master_part, weight_part = master[part].clone(), weight[part].clone()
        states = mean[part].clone(), mean_sq[part].clone()
        step = dataclasses.replace(
            update, master=master_part, grad=grad[part], weight=weight_part, ranges=own
        )
        reference(adamw)(step, *states, numbers)
        expected.append((part, master_part, weight_part, *states))
    adamw(update, mean, mean_sq, numbers)
    for part, master_part, *narrow_parts in expected:
        torch.testing.assert_close(master[part], master_part, rtol=1e-5, atol=1e-5)
        for found, narrow_part in zip((weight, mean, mean_sq), narrow_parts, strict=True):
            near(found[part], narrow_part)
