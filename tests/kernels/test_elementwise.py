"""Hand-written backward passes against autograd, in fp64."""

import torch

from megatrain.kernels import elementwise, rotary
from megatrain.kernels.wgrad import accumulate_weight_gradient


def _random(*shape: int, dtype: torch.dtype = torch.float64) -> torch.Tensor:
    return torch.randn(*shape, dtype=dtype, generator=torch.Generator().manual_seed(sum(shape)))


def test_rotation_keeps_lengths_and_turns_by_relative_position() -> None:
    cos, sin = rotary.tables(
        rotary.RotarySpec(base=10000.0), 8, 16, dtype=torch.float64, device=torch.device("cpu")
    )
    q, k = _random(1, 1, 1, 8).expand(16, 1, 1, 8), _random(2, 1, 1, 8)[:1].expand(16, 1, 1, 8)
    q, k = elementwise.rotate(q, cos, sin), elementwise.rotate(k, cos, sin)
    torch.testing.assert_close(q.norm(dim=-1), q[:1].norm(dim=-1).expand(16, 1, 1))
    scores = torch.einsum("ibnd,jbnd->ij", q, k)
    torch.testing.assert_close(scores[3, 1], scores[9, 7])


def test_the_turn_back_is_the_gradient_of_the_turn() -> None:
    cos, sin = rotary.tables(
        rotary.RotarySpec(base=10000.0), 8, 4, dtype=torch.float64, device=torch.device("cpu")
    )
    x, dy = _random(4, 1, 2, 8).requires_grad_(), _random(4, 1, 2, 8)
    elementwise.rotate(x, cos, sin).backward(dy)
    torch.testing.assert_close(elementwise.rotate(dy, cos, -sin), x.grad)


def test_weight_gradients_are_added_in_the_buffers_own_precision() -> None:
    dy, x = _random(64, 5, dtype=torch.bfloat16), _random(64, 7, dtype=torch.bfloat16)
    buffer = torch.ones(5, 7)
    accumulate_weight_gradient(buffer, dy, x)
    torch.testing.assert_close(buffer, 1 + dy.float().t() @ x.float())
