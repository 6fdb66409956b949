"""The weight gradient against its definition."""

import torch

from megatrain.kernels.wgrad import accumulate_weight_gradient


def _random(*shape: int, dtype: torch.dtype = torch.float64) -> torch.Tensor:
    return torch.randn(*shape, dtype=dtype, generator=torch.Generator().manual_seed(sum(shape)))


def test_weight_gradients_are_added_in_the_buffers_own_precision() -> None:
    dy, x = _random(64, 5, dtype=torch.bfloat16), _random(64, 7, dtype=torch.bfloat16)
    buffer = torch.ones(5, 7)
    accumulate_weight_gradient(buffer, dy, x)
    torch.testing.assert_close(buffer, 1 + dy.float().t() @ x.float())
