"""The linear layer of a router: fp32 products of bf16 factors, and fp32 factors as sums of three bf16 numbers."""

import pytest
import torch
from torch import Tensor

from megatrain.kernels.moe import router_linear
from megatrain.kernels.moe.router_linear import linear_backward, split_in_bf16

T, H, E = 50, 24, 6


def drawn(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(len(shape) + shape[0])).to(dtype)


def test_three_bf16_numbers_add_up_to_every_fp32_number() -> None:
    x = drawn(T, E) * 10.0 ** torch.arange(-20, T - 20)[:, None].clamp(max=20)
    parts = split_in_bf16(x).view(T, 3, E)
    assert parts.dtype == torch.bfloat16
    assert torch.equal(parts.double().sum(1), x.double())
    assert not torch.equal(parts[:, :2].double().sum(1), x.double())


def test_gradients_of_split_factors_are_those_of_fp32_products(monkeypatch: pytest.MonkeyPatch) -> None:
    """As tensor cores compute them; a CPU has no products with another dtype of the result."""

    def mm(a: Tensor, b: Tensor, *, out_dtype: torch.dtype) -> Tensor:
        return a.to(out_dtype) @ b.to(out_dtype)

    x, weight, dy = drawn(T, H, dtype=torch.bfloat16), drawn(E, H, dtype=torch.bfloat16), drawn(T, E)
    started = drawn(E, H)
    grad = started.clone()
    monkeypatch.setattr(router_linear, "is_fused", lambda _: True)
    monkeypatch.setattr(torch, "mm", mm)
    dx, accumulate = linear_backward(dy, x, weight)
    accumulate(grad)
    assert dx.dtype == torch.bfloat16
    torch.testing.assert_close(dx.double(), dy.double() @ weight.double(), rtol=2**-8, atol=1e-6)
    torch.testing.assert_close(grad, started + dy.t() @ x.float(), rtol=1e-5, atol=1e-5)
