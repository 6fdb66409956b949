"""Weight gradients against their definition."""

import pytest
import torch

from megatrain.kernels.linear import accumulate_weight_gradient

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


def _random(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(DEVICE)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("tokens", [64, 4096, 0])
def test_weight_gradients_accumulate_in_the_precision_of_the_buffer(dtype: torch.dtype, tokens: int) -> None:
    dy, x = _random(tokens, 48).to(dtype), _random(tokens, 80, seed=1).to(dtype)
    buffer = _random(48, 80, seed=2)
    expected = buffer.double() + dy.double().t() @ x.double()
    accumulate_weight_gradient(buffer, dy, x)
    error = (buffer.double() - expected).abs().max() / expected.abs().max()
    assert error < 2e-5
