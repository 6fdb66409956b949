"""Which experts a token visits."""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor


class Routes(NamedTuple):
    """The experts that each of t tokens visits, all on the tokens' device."""

    experts: Tensor
    """Global numbers of experts, a token's all different, int64 [t, k]."""
    weights: Tensor
    """What their results are multiplied by, [t, k], differentiable."""
    kept: Tensor | None = None
    """False where an expert has no room for a token, bool [t, k]; None: nothing is dropped."""
