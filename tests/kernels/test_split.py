"""The gradient of split channels is one tensor, into which kernels may write their parts."""

from typing import Any

import torch
from torch import Tensor

from megatrain.kernels.qkv import Place, split_channels


class _Doubled(torch.autograd.Function):
    """2 x, with the gradient in its place, as a kernel writes it."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, place: Place) -> Tensor:
        ctx.place = place
        return 2 * x

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor, None]:
        return ctx.place().copy_(2 * dy), None


def test_gradients_in_their_places_are_not_copied_and_others_are() -> None:
    x, weights = torch.randn(3, 2, 9, requires_grad=True), torch.randn(3, 2, 9)
    for _ in range(2):
        (first, second, third), places = split_channels(x, [4, 3, 2])
        y = torch.cat((_Doubled.apply(first, places[0]), second, _Doubled.apply(third, places[2])), dim=-1)
        (gradient,) = torch.autograd.grad((y * weights).sum(), x)
        scales = torch.tensor([2.0] * 4 + [1.0] * 3 + [2.0] * 2)
        assert torch.equal(gradient, weights * scales)


def test_a_part_without_a_gradient_has_zeros() -> None:
    x = torch.randn(3, 1, 5, requires_grad=True)
    (first, _), places = split_channels(x, [2, 3])
    (gradient,) = torch.autograd.grad(_Doubled.apply(first, places[0]).sum(), x)
    assert torch.equal(gradient, torch.tensor([2.0, 2.0, 0.0, 0.0, 0.0]).expand(3, 1, 5))


def test_passes_in_flight_have_gradients_of_their_own() -> None:
    x = torch.randn(2, 1, 4, requires_grad=True)
    parts = [split_channels(x, [3, 1]) for _ in range(2)]
    losses = [(_Doubled.apply(first, places[0]) * k).sum() for k, ((first, _), places) in enumerate(parts, 1)]
    gradients = [torch.autograd.grad(loss, x)[0] for loss in reversed(losses)]
    assert [gradient[0, 0].tolist() for gradient in gradients] == [[4.0] * 3 + [0.0], [2.0] * 3 + [0.0]]
