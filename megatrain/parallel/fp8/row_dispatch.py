"""Rounding of dispatched rows to FP8, where no all-to-all sends them as codes: the same numbers under every layout.

    dispatch    tokens, rounded ─> experts
    combine     gradients of sums, rounded ─> experts

GEMMs of experts read the same numbers as without it (kernels/fp8/rows.py), their weight gradients rounded ones.
"""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor

from megatrain.kernels.conjugate import Conjugate
from megatrain.kernels.fp8.rows import cast_rows, decode_rows
from megatrain.kernels.moe.routing import Routing
from megatrain.parallel.expert_parallel import DispatchedTokens, FinishDispatch, TokenDispatcher


class RoundingDispatcher:
    """A dispatcher whose tokens, and gradients of sums, are rounded first. Implements `TokenDispatcher`."""

    def __init__(self, inner: TokenDispatcher) -> None:
        self.inner, self.overlaps_combine = inner, inner.overlaps_combine

    def begin_dispatch(self, x: Tensor, route: Callable[[], Routing]) -> FinishDispatch:
        return self.inner.begin_dispatch(Conjugate.apply(_rounded, _same, x), route)

    def begin_combine(self, out: Tensor, dispatched: DispatchedTokens) -> Callable[[], Tensor]:
        finish = self.inner.begin_combine(out, dispatched)
        return lambda: Conjugate.apply(_same, _rounded, finish())


def _rounded(x: Tensor) -> Tensor:
    return decode_rows(cast_rows(x), x.dtype)


def _same(x: Tensor) -> Tensor:
    return x.view_as(x)
