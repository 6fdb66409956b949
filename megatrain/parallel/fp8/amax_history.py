"""Largest absolute values of FP8 tensors in earlier steps, from which delayed scaling takes its scales.

    cast in a pass  ─> seen: largest value of this rank's parts in this step
    end of the step ─> maximum over all ranks of the stage ─> history [tensors, steps] ─> scales of the next step

All micro-batches of a step use the same scales, and every rank that holds a tensor has the same history, so that neither
depends on the layout. A tensor without history, as in the first step, has the scale of its current values.

A library that casts tensors itself records the largest values and reads the scales in memory of its own (`LibraryTensor`).

Source: Micikevicius et al., arXiv:2209.05433; Transformer Engine has the same rule, with a step per micro-batch.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Final, Literal, NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import pad

from megatrain.kernels.fp8.quantize import scale_of
from megatrain.parallel.collectives import all_reduce
from megatrain.parallel.grid import RankGroup

_ROW: Final = 4
"""Numbers from one tensor's scale to the next one's: GEMMs need 16 bytes, see `Operand`."""
Entries = list[tuple[int, float]]
"""Steps since the last one, and the largest value of that step."""


class LibraryTensor(NamedTuple):
    """The numbers of a tensor that a library casts, in the library's memory."""

    seen: Tensor
    """Largest value in this step so far, fp32 []: casts increase it in place."""
    scale: Tensor
    """Factor before the cast, fp32 []; 1 without history."""


class AmaxHistory:
    """Histories of this rank's tensors.

    Args:
        length: steps that are kept.
        algorithm: the largest value that decides a scale: the one of the last step, or the maximum of all kept.
        margin: see `scale_of`.
        groups: groups over which values are reduced, one after the other: together the ranks of the stage.
    """

    def __init__(
        self,
        length: int,
        algorithm: Literal["most_recent", "max"],
        margin: int,
        groups: Sequence[RankGroup],
        device: torch.device,
    ) -> None:
        self.length, self.algorithm, self.margin, self.groups = length, algorithm, margin, groups
        self.names: list[str] = []
        self._is_known: list[bool] = []
        self._amaxes = torch.zeros(0, length, device=device)
        """[tensors, steps], the last step first; 0: no value."""
        self._seen = torch.zeros(0, device=device)
        self._scales = torch.zeros(0, _ROW, device=device)
        self._largest = torch.zeros(0, device=device)
        """Largest number of each tensor's format."""
        self._of_library: dict[int, LibraryTensor] = {}

    def add(self, name: str, dtype: torch.dtype, library: LibraryTensor | None = None) -> int:
        """Add a tensor with its FP8 format; return its number. Tensors are added before the first step.

        Args:
            library: where the library that casts the tensor keeps its numbers.
        """
        if library is not None:
            self._of_library[len(self.names)] = library
        self.names.append(name)
        self._is_known.append(False)
        device, count = self._seen.device, len(self.names)
        self._largest = torch.cat((self._largest, self._largest.new_tensor([torch.finfo(dtype).max])))
        self._amaxes = torch.zeros(count, self.length, device=device)
        self._seen = torch.zeros(count, device=device)
        self._scales = torch.zeros(count, _ROW, device=device)
        return count - 1

    def seen(self, number: int) -> Tensor:
        """Return the largest value of a tensor in this step so far, fp32 []: casts increase it in place."""
        return self._seen[number]

    def scale(self, number: int) -> Tensor | None:
        """Return the scale of a tensor in this step, fp32 [2]; None: it has no history."""
        return self._scales[number, :2] if self._is_known[number] else None

    def finish_step(self) -> None:
        """Add the largest values of this step. One that is 0 or not finite repeats the value before it."""
        if not self.names:
            return
        self._read_library()
        for group in self.groups:
            all_reduce(self._seen, group, "max")
        is_usable = self._seen.isfinite() & (self._seen > 0)
        newest = torch.where(is_usable, self._seen, self._amaxes[:, 0])
        self._amaxes = torch.cat((newest[:, None], self._amaxes[:, :-1]), dim=1)
        self._seen.zero_()
        self._is_known = [True] * len(self.names)
        self._update_scales()

    def snapshot(self) -> Callable[[], None]:
        """Return a function that restores the present history, and forgets the largest values of passes since then."""
        amaxes, is_known = self._amaxes, list(self._is_known)

        def restore() -> None:
            self._read_library()
            self._seen.zero_()
            self._amaxes, self._is_known = amaxes, list(is_known)
            self._update_scales()

        return restore

    def state(self) -> dict[str, Entries]:
        """Return the values that can still decide a scale, by name: those that are larger than all later ones."""
        return {
            name: _decisive(row)
            for name, row, is_known in zip(self.names, self._amaxes.tolist(), self._is_known, strict=True)
            if is_known
        }

    def restore(self, state: Mapping[str, Sequence[Sequence[float]]]) -> None:
        """Restore what `state` returned, under any layout. Tensors that it does not name have no history."""
        self._read_library()
        self._seen.zero_()  # of steps before the restored one
        rows = torch.zeros(self._amaxes.shape)
        for number, name in enumerate(self.names):
            self._is_known[number] = name in state
            for age, value in state.get(name, ()):
                if age < self.length:
                    rows[number, int(age)] = value
        self._amaxes.copy_(rows)
        self._update_scales()

    def _update_scales(self) -> None:
        """Compute the scales of the next step."""
        decisive = self._amaxes.amax(dim=1) if self.algorithm == "max" else self._amaxes[:, 0]
        # In place: CUDA graphs read them here.
        self._scales.copy_(pad(scale_of(decisive, self._largest, self.margin), (0, _ROW - 2)))
        if self._of_library:
            scales = self._scales[:, 1].unbind()
            torch._foreach_copy_(
                [one.scale for one in self._of_library.values()],
                [scales[number] for number in self._of_library],
            )

    def _read_library(self) -> None:
        """Move the largest values of the library's tensors to `_seen`."""
        if self._of_library:
            seen, of_library = self._seen.unbind(), [one.seen for one in self._of_library.values()]
            torch._foreach_copy_([seen[number] for number in self._of_library], of_library)
            torch._foreach_zero_(of_library)


def _decisive(row: Sequence[float]) -> Entries:
    found: Entries = []
    largest = 0.0
    for age, value in enumerate(row):
        if value > largest:
            found.append((age, value))
            largest = value
    return found
