"""Newton-Schulz iteration: an odd matrix polynomial, applied repeatedly, that moves singular values towards 1.

    X <- X / |X|        X <- a X + (b A + c A A) X  with  A = X X^T        for each (a, b, c)

Source: Jordan et al., https://kellerjordan.github.io/posts/muon/. The arithmetic equals `torch.optim.Muon`.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import Literal

import torch
from torch import Tensor

CoefficientType = Literal["simple", "quintic", "polar_express"]

COEFFICIENTS: dict[CoefficientType, tuple[tuple[float, float, float], ...]] = {
    "simple": ((3.4445, -4.7750, 2.0315),),
    "quintic": (
        (4.0848, -6.8946, 2.9270),
        (3.9505, -6.3029, 2.6377),
        (3.7418, -5.5913, 2.3037),
        (2.8769, -3.1427, 1.2046),
        (2.8366, -3.0525, 1.2012),
    ),
    "polar_express": (
        (8.2051, -22.9019, 16.4607),
        (4.0664, -2.8612, 0.5184),
        (3.9096, -2.8234, 0.5250),
        (3.2856, -2.4153, 0.4853),
        (2.2779, -1.6198, 0.3985),
        (1.8726, -1.2307, 0.3585),
        (1.8564, -1.2132, 0.3568),
        (1.8750, -1.2500, 0.3750),
    ),
}
"""Coefficients (a, b, c) of each step. simple: Jordan et al.; quintic: https://leloykun.github.io/ponder/muon-opt-coeffs/;
polar_express: arXiv:2505.16932, the first five with its safety factor of 1.01."""

_EPS = 1e-7


def step_coefficients(kind: CoefficientType, num_steps: int) -> Iterator[tuple[float, float, float]]:
    """Return the coefficients of `num_steps` steps: polar_express repeats its last, the others start over."""
    known = COEFFICIENTS[kind]
    more = itertools.repeat(known[-1]) if kind == "polar_express" else itertools.cycle(known)
    return itertools.islice(itertools.chain(known, more), num_steps)


def orthogonalize(x: Tensor, kind: CoefficientType, num_steps: int) -> Tensor:
    """Return the matrix [m, n] with singular values near 1, computed in the dtype of `x`.

    Needs memory for three matrices of its size, less if it is far from square.
    """
    is_tall = x.shape[0] > x.shape[1]
    x = x.T if is_tall else x
    x = x / x.norm().clamp(min=_EPS)
    for a, b, c in step_coefficients(kind, num_steps):
        gram = x @ x.T
        x = torch.addmm(x, torch.addmm(gram, gram, gram, beta=b, alpha=c), x, beta=a)
    return x.T if is_tall else x
