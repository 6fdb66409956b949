"""Another accumulation order: the same GEMMs, with the summands of every product in a random order.

    mm(a [m, k], b [k, n])  ─>  mm(a[:, order], b[order])      equal but for rounding

Kernels, libraries and processors differ in nothing else, so runs in several orders show the rounding noise of a run. Where factors
are rounded to TF32, the last bit of a sum decides 1 part in 2,000, and the noise differs between models and iterations by a factor
of 100: `assert_within_noise` measures it instead of assuming it.
"""

from collections.abc import Mapping, Sequence
from typing import Any, Final

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

aten = torch.ops.aten
FACTORS = {
    aten.mm.default: 0,
    aten.mm.out: 0,
    aten.bmm.default: 0,
    aten.bmm.out: 0,
    aten.addmm.default: 1,
    aten.addmm.out: 1,
    aten.addmm_.default: 1,
    aten.baddbmm.default: 1,
    aten.baddbmm.out: 1,
    aten.baddbmm_.default: 1,
}
"""Products, and the position of their left factor among the arguments; the right factor is next to it."""


class AnotherOrder(TorchDispatchMode):
    """Permute the summands of all products of this thread; `num_products` counts them."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        self.generator = torch.Generator().manual_seed(seed)
        self.num_products = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func not in FACTORS:
            return func(*args, **(kwargs or {}))
        self.num_products += 1
        place = FACTORS[func]
        left, right = args[place : place + 2]
        order = torch.randperm(left.shape[-1], generator=self.generator)
        permuted: list[Tensor] = [left[..., order], right[..., order, :]]
        return func(*args[:place], *permuted, *args[place + 2 :], **(kwargs or {}))


SEEDS: Final = (0, 1, 2, 3)
"""Of the orders in which a run is repeated."""
TIMES: Final = 4
"""Largest distance to a recording, in spreads of the runs, as in `megatrain parity` in fp32."""
ROUNDINGS: Final = 2 * 2**-23
"""Two roundings of fp32, in which a recording stores its numbers."""

Numbers = Mapping[str, float]
"""The numbers of an iteration by name."""


def assert_within_noise(
    found: Sequence[Numbers], in_orders: Sequence[Sequence[Numbers]], recorded: Sequence[Numbers]
) -> None:
    """Assert that a run has the recorded numbers of each iteration.

    The bound of a number is `TIMES` the largest spread (maximum minus minimum over the runs in all orders) up to this iteration, because
    noise stays in the weights, and `ROUNDINGS` of its size.
    """
    spread = dict.fromkeys(recorded[0], 0.0)
    for number, expected in enumerate(recorded):
        for name, value in expected.items():
            values = [run[number][name] for run in in_orders]
            spread[name] = max(spread[name], max(values) - min(values))
            bound = TIMES * spread[name] + ROUNDINGS * abs(value)
            distance = abs(found[number][name] - value)
            assert distance <= bound, (
                f"{name} of iteration {number + 1} of the recording: {found[number][name]!r} instead of {value!r},"
                f" {distance / abs(value):.1e} off where {bound / abs(value):.1e} is allowed"
            )


def assert_near(
    found: Tensor, in_orders: Sequence[Tensor], recorded: Tensor, *, absolute: float, name: str
) -> None:
    """Assert the same of the elements of a tensor; spread and rounding are those of its largest element."""
    spread = max(float((other - found).abs().max()) for other in in_orders)
    bound = TIMES * spread + ROUNDINGS * float(recorded.abs().max()) + absolute
    distance = float((found - recorded).abs().max())
    assert distance <= bound, f"{name}: {distance:.1e} off where {bound:.1e} is allowed"
