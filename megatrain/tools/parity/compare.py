"""Distance between the answers of a layout's ranks and the answers of one process."""

from __future__ import annotations

import math
from collections.abc import Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import numpy.typing as npt

from megatrain.parallel.layout import Box
from megatrain.tools.parity.measure import Measured, Part

TOLERANCE = 1e-10
_Whole = dict[str, npt.NDArray[np.float64]]
"""Whole tensors by name."""


@dataclass(frozen=True)
class Distance:
    """Relative differences of two answers, each relative to the largest value of its tensor."""

    loss: float
    norm: float
    gradient: float
    gradient_name: str
    weight: float
    weight_name: str
    parts_norm: float
    """Relative difference of the first step's gradient norm if the differences of its parts did not cancel."""

    @property
    def numbers(self) -> tuple[float, float, float, float]:
        return self.loss, self.norm, self.gradient, self.weight

    @property
    def is_good(self) -> bool:
        return max(self.numbers) <= TOLERANCE

    @property
    def names(self) -> str:
        """The tensors with the largest differences."""
        return f"gradient {self.gradient_name}, weight {self.weight_name}"


def judge(reference: Measured, answers: Sequence[Measured]) -> Distance:
    """Compare the ranks' answers with one process's. Some rank must hold every element."""
    return distance([reference], answers, without_gradient(reference))


def distance(reference: Sequence[Measured], answers: Sequence[Measured], idle: AbstractSet[str]) -> Distance:
    """Compare the answers of two numbers of ranks. `idle`: tensors without gradient."""
    whole = _whole([part for one in reference for part in one.gradients])
    gradients = [part for one in answers for part in one.gradients]
    gradient, gradient_name = _furthest(whole, gradients, idle)
    weights = [part for one in answers for part in one.weights]
    weight, weight_name = _furthest(
        _whole([part for one in reference for part in one.weights]), weights, idle
    )
    return Distance(
        loss=_relative([one.losses for one in answers], reference[0].losses),
        norm=_relative([one.norms for one in answers], reference[0].norms),
        gradient=gradient,
        gradient_name=gradient_name,
        weight=weight,
        weight_name=weight_name,
        parts_norm=_parts_norm(whole, gradients),
    )


def first_step(answers: Sequence[Measured]) -> list[Measured]:
    """Return the answers after the first step, with the optimizers' master weights."""
    return [
        replace(one, losses=one.losses[:1], norms=one.norms[:1], weights=one.first_weights) for one in answers
    ]


def names_without_gradient(reference: Measured) -> frozenset[str]:
    """Return the tensors whose gradient is zero in all elements: nothing reads them."""
    seen = {part.name for part in reference.gradients if np.any(part.values)}
    return frozenset(part.name for part in reference.gradients) - seen


def without_gradient(reference: Measured) -> frozenset[str]:
    """Return the tensors whose gradient is zero up to rounding, such as key biases, which a softmax ignores.

    They are compared relative to the largest value of all tensors, since their own values are rounding noise.
    """
    largest: dict[str, float] = {}
    for part in reference.gradients:
        largest[part.name] = max(largest.get(part.name, 0.0), float(np.max(np.abs(part.values), initial=0.0)))
    return frozenset(name for name, value in largest.items() if value <= 1e-12 * max(largest.values()))


def _furthest(whole: _Whole, parts: Sequence[Part], idle: AbstractSet[str]) -> tuple[float, str]:
    is_seen = {name: np.zeros(values.shape, dtype=bool) for name, values in whole.items()}
    largest = {name: float(np.nanmax(np.abs(values), initial=0.0)) for name, values in whole.items()}
    largest.update(dict.fromkeys(idle, max(largest.values())))
    worst, worst_name = 0.0, "-"
    for part in parts:
        expected = whole[part.name][_slices(part.box)]
        is_seen[part.name][_slices(part.box)] = True
        error = float(np.max(np.abs(part.values - expected)) / max(largest[part.name], 1e-300))
        if not error <= worst:
            worst, worst_name = _finite(error), part.name
    missing = [name for name, seen in is_seen.items() if not seen.all()]
    return (float("inf"), f"{missing[0]} is held by no rank") if missing else (worst, worst_name)


def _parts_norm(whole: _Whole, parts: Sequence[Part]) -> float:
    expected = [float(np.sum(whole[part.name][_slices(part.box)] ** 2)) for part in parts]
    found = [float(np.sum(part.values**2)) for part in parts]
    together = math.hypot(*(a - b for a, b in zip(found, expected, strict=True)))
    return _finite(together / max(2 * sum(expected), 1e-300))


def _whole(parts: Sequence[Part]) -> _Whole:
    whole: _Whole = {}
    for part in parts:
        shape = tuple(max(p.box[d][1] for p in parts if p.name == part.name) for d in range(len(part.box)))
        whole.setdefault(part.name, np.full(shape, np.nan))[_slices(part.box)] = part.values
    return whole


def _slices(box: Box) -> tuple[slice, ...]:
    return tuple(slice(start, stop) for start, stop in box)


def _relative(found: Any, expected: Any) -> float:
    error = np.max(np.abs(np.asarray(found) - np.asarray(expected)) / np.abs(np.asarray(expected)))
    return _finite(float(error))


def _finite(error: float) -> float:
    """Return infinity for NaN."""
    return float("inf") if math.isnan(error) else error
