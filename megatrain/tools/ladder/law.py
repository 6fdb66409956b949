"""The scaling law of a family of runs, fitted to their final losses.

    L(N, D) = E + A / N^a + B / D^b        N parameters, D tokens

Source: Hoffmann et al., Training Compute-Optimal Large Language Models, arXiv:2203.15556, eq. 2 and appendix D.2: the logarithm of
the loss is fitted with a Huber loss of the residuals, from a grid of starts, and resampled points give the interval. The steps are
Levenberg-Marquardt's, of all starts and samples at once.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final, TypeAlias

import numpy as np
import numpy.typing as npt

Floats: TypeAlias = npt.NDArray[np.float64]

MIN_RUNS: Final = 6
"""The law has five numbers."""
MIN_LEVELS: Final = 3
"""Fewest different sizes, and token counts: two fit any exponent."""
NUM_SAMPLES: Final = 500
_DELTA: Final = 1e-3
"""Residual from which the Huber loss is linear."""
_STEPS, _STALLED_STEPS, _LEAST_GAIN = 300, 10, 1e-6
"""Most steps, and steps without a gain of this fraction after which a fit has converged."""
_EXPONENTS: Final = (0.1, 0.3, 0.5, 0.8, 1.2)
_SHARES_OF_E: Final = (0.2, 0.6, 0.9)
_LARGEST_EXPONENT: Final = 3.0


@dataclass(frozen=True)
class Point:
    """A finished run."""

    name: str
    parameters: int
    tokens: int
    loss: float


@dataclass(frozen=True)
class Law:
    """Fits of the law: the first to all points, the others to resampled ones."""

    fits: Floats
    """[fits, 5]: log E, log of A / N0^a, log of B / D0^b, a, b."""
    center: Floats
    """log N0, log D0."""

    def losses(self, parameters: float, tokens: float) -> Floats:
        """Return the loss that each fit predicts."""
        at = np.log([[parameters], [tokens]]) - self.center[:, None]
        return np.exp(_log_losses(self.fits, at)[0])[:, 0]

    def predict(self, parameters: float, tokens: float) -> tuple[float, float, float]:
        """Return the loss, and the limits of its 90 % interval over resampled points."""
        return _with_limits(self.losses(parameters, tokens))

    @property
    def coefficients(self) -> dict[str, tuple[float, float, float]]:
        """E, A, B, a and b, each with the limits of its 90 % interval."""
        log_e, log_a, log_b, a, b = self.fits.T
        with np.errstate(over="ignore"):
            values = {
                "E": np.exp(log_e), "A": np.exp(log_a + a * self.center[0]), "B": np.exp(log_b + b * self.center[1]),
                "a": a, "b": b,
            }  # fmt: skip
        return {name: _with_limits(value) for name, value in values.items()}

    def best_size(self, flops: float) -> tuple[float, float]:
        """Return the parameters and the tokens of the least loss for 6 N D FLOPs (eq. 4 of the paper)."""
        _, log_a, log_b, a, b = self.fits[0]
        (n0, d0), product = self.center, np.log(flops / 6)
        log_n = (np.log(a / b) + log_a + a * n0 - log_b + b * (product - d0)) / (a + b)
        return float(np.exp(log_n)), float(np.exp(product - log_n))


def _with_limits(values: Floats) -> tuple[float, float, float]:
    """Return the value of the first fit, and the limits of the 90 % interval of the others."""
    low, high = np.quantile(values[1:], (0.05, 0.95))
    return float(values[0]), float(low), float(high)


def fit(points: Sequence[Point], *, seed: int = 0, num_samples: int = NUM_SAMPLES) -> Law:
    """Fit the law to points, and to `num_samples` resamplings of them. The points have enough sizes and token counts."""
    x = np.log([[point.parameters for point in points], [point.tokens for point in points]])
    y = np.log([point.loss for point in points])
    center = x.mean(axis=1)
    x = x - center[:, None]
    whole = np.ones(len(points))
    starts = np.array(
        [
            [np.log(share) + y.min(), *[np.log((1 - share) / 2) + y.mean()] * 2, a, b]
            for share in _SHARES_OF_E
            for a in _EXPONENTS
            for b in _EXPONENTS
        ]
    )
    fits, losses = _descend(starts, x, y, np.broadcast_to(whole, (len(starts), len(points))))
    best = fits[losses.argmin()][None]
    counts = np.random.default_rng(seed).multinomial(len(points), whole / len(points), size=num_samples)
    samples, _ = _descend(np.repeat(best, num_samples, axis=0), x, y, counts.astype(np.float64))
    return Law(np.concatenate((best, samples)), center)


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


def _descend(fits: Floats, x: Floats, y: Floats, weights: Floats) -> tuple[Floats, Floats]:
    """Minimize the Huber loss from each start; return the fits and their losses.

    Args:
        fits: [starts, 5].
        x, y: logarithms, centered [2, points] and [points].
        weights: how often each point counts, [starts, points].
    """
    damping, stalled = np.full(len(fits), 1e-2), 0
    losses, gradient, curvature = _system(fits, x, y, weights)
    for _ in range(_STEPS):
        scale = damping[:, None] * (np.einsum("sii->si", curvature) + 1e-9)
        step = np.linalg.solve(curvature + scale[:, :, None] * np.eye(5), gradient[..., None])[..., 0]
        tried = fits - np.clip(step, -1, 1)
        tried[:, 3:] = tried[:, 3:].clip(0, _LARGEST_EXPONENT)
        new_losses, new_gradient, new_curvature = _system(tried, x, y, weights)
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


def _system(fits: Floats, x: Floats, y: Floats, weights: Floats) -> tuple[Floats, Floats, Floats]:
    """Return the Huber losses, their gradients [starts, 5] and Gauss-Newton curvatures [starts, 5, 5]."""
    log_losses, shares = _log_losses(fits, x)
    residual = log_losses - y
    size = np.abs(residual)
    losses = np.where(size < _DELTA, residual**2 / 2, _DELTA * (size - _DELTA / 2)) * weights
    influence = weights * np.minimum(1, _DELTA / np.maximum(size, 1e-300))
    jacobian = np.concatenate((shares, -shares[:, 1:2] * x[0], -shares[:, 2:3] * x[1]), axis=1)
    gradient = np.einsum("sp,skp->sk", influence * residual, jacobian)
    return losses.sum(axis=1), gradient, np.einsum("sp,skp,slp->skl", influence, jacobian, jacobian)
