"""Another accumulation order: the same matrix products, with the summands of every product in a random order.

    mm(a [m, k], b [k, n])  ─>  mm(a[:, order], b[order])      equal but for rounding

Runs in several orders show the rounding noise of a run on this processor: kernels and libraries differ in nothing else.
"""

from typing import Any

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
