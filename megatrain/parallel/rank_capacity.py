"""Memory of the experts of a rank for the assignments that other ranks send.

    capacity          rows of a layer's experts: a factor times an even load
    load              assignments of a micro-batch, counted on the device; those above the capacity have no row
    end of the step   if a load was above its capacity: capacities grow, and all ranks compute the step again

Nothing is dropped: gradients of a step that is computed again are not used. Passes without gradients save no rows, and have
memory for every assignment.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Final

import torch
from torch import Tensor

from megatrain.kernels.host_copy import HostCopy
from megatrain.parallel.collectives import all_reduce
from megatrain.parallel.grid import RankGroup

_MARGIN: Final = 1.25
"""A capacity grows to this multiple of the largest load so far, since loads of later steps are larger."""
_MULTIPLE: Final = 16
"""Divisor of capacities, so that kernels are not compiled again: see `kernels.fused.launching.jit`."""


class RankCapacity:
    """The capacity of one layer on this rank, as a multiple of an even load."""

    def __init__(self, factor: float) -> None:
        self.factor = factor
        self.fill: Tensor | None = None
        """Largest load so far, as a multiple of the capacity, fp64 [] on the device; None: there was none."""

    def num_rows(self, even_load: int, at_most: int) -> int:
        """Return the number of rows to allocate for a micro-batch with `at_most` possible assignments."""
        if not torch.is_grad_enabled():
            return at_most
        return min(math.ceil(self.factor * even_load / _MULTIPLE) * _MULTIPLE, at_most)

    def record(self, load: Tensor, num_rows: int) -> None:
        """Compare the load of a micro-batch with its rows, on the device."""
        fill = load.double() / max(num_rows, 1)
        if self.fill is None:
            self.fill = torch.zeros_like(fill)
        torch.maximum(self.fill, fill, out=self.fill)  # in place: a CUDA graph repeats it

    def grow(self, fill: float) -> None:
        """Enlarge the memory to the largest load so far, which filled this multiple of the capacity."""
        self.factor *= max(fill * _MARGIN, 1)
        if self.fill is not None:
            self.fill.zero_()


class RankCapacities:
    """The capacities of all layers of this rank. Ranks need not have the same ones.

    Args:
        factor: of each layer at first.
    """

    def __init__(self, factor: float) -> None:
        self.factor = factor
        self.layers: list[RankCapacity] = []

    def add_layer(self) -> RankCapacity:
        """Add a layer; returns its capacity."""
        self.layers.append(RankCapacity(self.factor))
        return self.layers[-1]

    def begin_check(self, world: RankGroup, device: torch.device) -> Callable[[], bool]:
        """Begin to compare the loads of all ranks with their capacities; all ranks call it after the passes of a step.

        Returns:
            A function that waits for the device. It returns True on all ranks if a load was above its capacity: capacities
            have grown, and the step must be computed again.
        """
        used = [(layer, layer.fill) for layer in self.layers if layer.fill is not None]
        fills = torch.stack(
            [torch.zeros((), dtype=torch.float64, device=device), *(fill for _, fill in used)]
        )
        largest = all_reduce(fills.max(), world, "max")
        if device.type == "meta":
            return lambda: False
        copy = HostCopy(torch.cat((largest[None], fills)))

        def finish() -> bool:
            most, _, *own = copy.read()
            if most <= 1:
                return False
            for (layer, _), fill in zip(used, own, strict=True):
                layer.grow(fill)
            return True

        return finish
