"""The scaling law of a family of runs, fitted to their final losses.

    L(N, D) = E + A / N^a + B / D^b        N parameters, D tokens

Source: Hoffmann et al., Training Compute-Optimal Large Language Models, arXiv:2203.15556, eq. 2 and appendix D.2: the logarithm of
the loss is fitted with a Huber loss of the residuals, from a grid of starts. A second fit has a threshold of twice the typical
residual, if that is larger: the noise of the runs then counts as squares, and outliers do not.

Intervals are profiles: a number is held at other values, the other numbers are fitted again, and it may be any value with

    2 (rho - rho of the fit) <= tau^2 t^2        tau^2 = sum psi^2 / (n - 5) / mean psi'        t: 95 % quantile of Student's t, n - 5

Sources: Bates and Watts, Nonlinear Regression Analysis and Its Applications (1988), section 6.1, of profile t intervals; Schrader and
Hettmansperger, Robust analysis of variance based upon a likelihood ratio criterion (1980), of tau. All fits step at once
(Levenberg and Marquardt).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from math import inf
from typing import Final, TypeAlias

import numpy as np
import numpy.typing as npt

Floats: TypeAlias = npt.NDArray[np.float64]
Probe: TypeAlias = Callable[[Floats], tuple[Floats, Floats]]
"""From fits [fits, 5] to a number of each [fits] and its gradients [fits, 5]."""

MIN_RUNS: Final = 6
"""The law has five numbers."""
MIN_LEVELS: Final = 3
"""Fewest different sizes, and token counts: two fit any exponent."""
_NUMBERS: Final = 5
_DELTA: Final = 1e-3
"""Least residual from which the Huber loss is linear."""
_STEPS, _STALLED_STEPS, _LEAST_GAIN = 300, 10, 1e-6
"""Most steps, and steps without a gain of this fraction after which a fit has converged."""
_EXPONENTS: Final = (0.1, 0.3, 0.5, 0.8, 1.2)
_SHARES_OF_E: Final = (0.2, 0.6, 0.9)
_LARGEST_EXPONENT: Final = 3.0
_PINS: Final = np.geomspace(1e-5, 6, 24)
"""Distances from the fitted number at which a profile holds it."""
_STIFFNESS: Final = 100.0
"""Weight of the square that holds it; the number that results counts, not the one that was wished."""
_T95: Final = (6.314, 2.920, 2.353, 2.132, 2.015, 1.943, 1.895, 1.860, 1.833, 1.812)
"""95 % quantiles of Student's t of 1 to 10 degrees of freedom."""
_Z95: Final = 1.644854


@dataclass(frozen=True)
class Point:
    """A finished run."""

    name: str
    parameters: int
    tokens: int
    loss: float


@dataclass(frozen=True)
class Runs:
    """The points that are fitted."""

    x: Floats
    """log N and log D, centered, [2, points]."""
    y: Floats
    """log of the losses."""
    delta: float = _DELTA
    """Residual from which the Huber loss is linear."""

    def misfits(self, fits: Floats) -> Floats:
        """Return rho, the Huber loss of each fit."""
        size = np.abs(_log_losses(fits, self.x)[0] - self.y)
        rho = np.where(size < self.delta, size**2 / 2, self.delta * (size - self.delta / 2))
        total: Floats = rho.sum(axis=1)
        return total

    def allowance(self, fit: Floats) -> float:
        """Return how much more a profile may misfit than the fit within its 90 % interval."""
        residual = np.abs(_log_losses(fit[None], self.x)[0][0] - self.y)
        freedom = len(residual) - _NUMBERS
        squares = (np.minimum(residual, self.delta) ** 2).sum() / freedom
        return float(squares / (residual < self.delta).mean() * student_t95(freedom) ** 2 / 2)


@dataclass(frozen=True)
class Law:
    """The law, and the points that it was fitted to."""

    numbers: Floats
    """[5]: log E, log of A / N0^a, log of B / D0^b, a, b."""
    center: Floats
    """log N0, log D0."""
    runs: Runs

    def loss(self, parameters: float, tokens: float) -> float:
        """Return the predicted loss."""
        return float(np.exp(self._log_loss_at(parameters, tokens)(self.numbers[None])[0][0]))

    def predict(self, parameters: float, tokens: float) -> tuple[float, float, float]:
        """Return the loss, and the limits of its 90 % interval."""
        value, low, high = np.exp(self._profile(self._log_loss_at(parameters, tokens)))
        return float(value), float(low), float(high)

    @property
    def coefficients(self) -> dict[str, tuple[float, float, float]]:
        """E, A, B, a and b, each with the limits of its 90 % interval."""
        (n0, d0), found = self.center, {}
        for name, row in {
            "E": (1, 0, 0, 0, 0), "A": (0, 1, 0, n0, 0), "B": (0, 0, 1, 0, d0), "a": (0, 0, 0, 1, 0), "b": (0, 0, 0, 0, 1),
        }.items():  # fmt: skip
            limits = self._profile(_linear(np.array(row, dtype=np.float64)))
            with np.errstate(over="ignore"):
                value, low, high = map(float, limits if name in "ab" else np.exp(limits))
            found[name] = (value, low, high)
        return found

    def best_size(self, flops: float) -> tuple[float, float]:
        """Return the parameters and the tokens of the least loss for 6 N D FLOPs (eq. 4 of the paper)."""
        _, log_a, log_b, a, b = self.numbers
        (n0, d0), product = self.center, np.log(flops / 6)
        log_n = (np.log(a / b) + log_a + a * n0 - log_b + b * (product - d0)) / (a + b)
        return float(np.exp(log_n)), float(np.exp(product - log_n))

    def _log_loss_at(self, parameters: float, tokens: float) -> Probe:
        at = np.log([[parameters], [tokens]]) - self.center[:, None]

        def log_loss(fits: Floats) -> tuple[Floats, Floats]:
            log_losses, shares = _log_losses(fits, at)
            return log_losses[:, 0], _gradients(shares, at)[:, :, 0]

        return log_loss

    def _profile(self, probe: Probe) -> Floats:
        """Return a number of the fit, and the limits of its 90 % interval; infinite where no value misfits."""
        value = float(probe(self.numbers[None])[0][0])
        pins = value + np.concatenate((-_PINS, _PINS))
        fits, _ = _descend(np.repeat(self.numbers[None], len(pins), axis=0), self.runs, (probe, pins))
        values = probe(fits)[0]
        worse = np.sqrt((self.runs.misfits(fits) - self.runs.misfits(self.numbers[None])).clip(0))
        limit, half = np.sqrt(self.runs.allowance(self.numbers)), len(_PINS)
        ends = [
            _crossing(value, values[side], worse[side], limit) for side in (slice(half), slice(half, None))
        ]
        return np.array([value, *ends])


def _crossing(value: float, values: Floats, worse: Floats, limit: float) -> float:
    """Return where the root of the misfit, 0 at `value`, first exceeds a limit; it is nearly linear."""
    before, least = value, 0.0
    for at, misfit in zip(values, worse, strict=True):
        if misfit > limit:
            return float(before + (at - before) * (limit - least) / (misfit - least))
        before, least = at, misfit
    is_free = abs(before - value) > _PINS[-1] / 2
    return float(np.copysign(inf, before - value)) if is_free else float(before)


def student_t95(freedom: int) -> float:
    """Return the 95 % quantile of Student's t (Abramowitz and Stegun, 26.7.5, above 10 degrees of freedom)."""
    if freedom <= len(_T95):
        return _T95[freedom - 1]
    z = _Z95
    return z + (z**3 + z) / (4 * freedom) + (5 * z**5 + 16 * z**3 + 3 * z) / (96 * freedom**2)


def fit(points: Sequence[Point]) -> Law:
    """Fit the law to points, which have enough sizes and token counts."""
    x = np.log([[point.parameters for point in points], [point.tokens for point in points]])
    y = np.log([point.loss for point in points])
    center = x.mean(axis=1)
    runs = Runs(x - center[:, None], y)
    starts = np.array(
        [
            [np.log(share) + y.min(), *[np.log((1 - share) / 2) + y.mean()] * 2, a, b]
            for share in _SHARES_OF_E
            for a in _EXPONENTS
            for b in _EXPONENTS
        ]
    )
    fits, misfits = _descend(starts, runs)
    robust = fits[misfits.argmin()]
    residual = np.sort(np.abs(_log_losses(robust[None], runs.x)[0][0] - y))
    typical = residual[
        -1 - (len(points) - _NUMBERS) // 4
    ]  # a quarter of the degrees of freedom may be outliers
    runs = replace(runs, delta=max(_DELTA, 2 * float(typical)))
    fits, misfits = _descend(fits, runs)
    return Law(fits[misfits.argmin()], center, runs)


def _linear(row: Floats) -> Probe:
    """Return the probe of a sum of the five numbers, with these factors."""
    return lambda fits: (fits @ row, np.broadcast_to(row, fits.shape))


def _log_losses(fits: Floats, x: Floats) -> tuple[Floats, Floats]:
    """Return the logarithm of the losses [fits, points], and the share of each of the three terms [fits, 3, points]."""
    terms = np.stack(
        (
            np.broadcast_to(fits[:, :1], (len(fits), x.shape[1])),
            fits[:, 1:2] - fits[:, 3:4] * x[0],
            fits[:, 2:3] - fits[:, 4:5] * x[1],
        ),
        axis=1,
    )
    top = terms.max(axis=1)
    scaled = np.exp(terms - top[:, None])
    total = scaled.sum(axis=1)
    return top + np.log(total), scaled / total[:, None]


def _gradients(shares: Floats, x: Floats) -> Floats:
    """Return the derivatives of the log losses by the five numbers, [fits, 5, points]."""
    return np.concatenate((shares, -shares[:, 1:2] * x[0], -shares[:, 2:3] * x[1]), axis=1)


def _descend(fits: Floats, runs: Runs, held: tuple[Probe, Floats] | None = None) -> tuple[Floats, Floats]:
    """Minimize the Huber loss from each start; return the fits [starts, 5] and what they minimize.

    Args:
        held: a number that a stiff square holds at the values [starts].
    """
    damping, stalled = np.full(len(fits), 1e-2), 0
    losses, gradient, curvature = _system(fits, runs, held)
    for _ in range(_STEPS):
        scale = damping[:, None] * (np.einsum("sii->si", curvature) + 1e-9)
        step = np.linalg.solve(curvature + scale[:, :, None] * np.eye(_NUMBERS), gradient[..., None])[..., 0]
        tried = fits - np.clip(step, -1, 1)
        tried[:, 3:] = tried[:, 3:].clip(0, _LARGEST_EXPONENT)
        new_losses, new_gradient, new_curvature = _system(tried, runs, held)
        better = new_losses < losses
        stalled = 0 if (new_losses < (1 - _LEAST_GAIN) * losses).any() else stalled + 1
        fits = np.where(better[:, None], tried, fits)
        losses = np.where(better, new_losses, losses)
        gradient = np.where(better[:, None], new_gradient, gradient)
        curvature = np.where(better[:, None, None], new_curvature, curvature)
        damping = np.where(better, damping / 3, damping * 4).clip(1e-9, 1e9)
        if stalled == _STALLED_STEPS:
            break
    return fits, losses


def _system(fits: Floats, runs: Runs, held: tuple[Probe, Floats] | None) -> tuple[Floats, Floats, Floats]:
    """Return what is minimized, its gradients [starts, 5] and Gauss-Newton curvatures [starts, 5, 5]."""
    log_losses, shares = _log_losses(fits, runs.x)
    residual = log_losses - runs.y
    influence = np.minimum(1, runs.delta / np.maximum(np.abs(residual), 1e-300))
    jacobian = _gradients(shares, runs.x)
    losses = runs.misfits(fits)
    gradient = np.einsum("sp,skp->sk", influence * residual, jacobian)
    curvature = np.einsum("sp,skp,slp->skl", influence, jacobian, jacobian)
    if held is not None:
        probe, pins = held
        values, slopes = probe(fits)
        away = values - pins
        losses = losses + _STIFFNESS * away**2 / 2
        gradient = gradient + _STIFFNESS * away[:, None] * slopes
        curvature = curvature + _STIFFNESS * slopes[:, :, None] * slopes[:, None]
    return losses, gradient, curvature
