"""Terms of a sum over two ranks, left to the operation that reads the sum: one pass over memory fewer."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from torch import Tensor
from torch.autograd import Function

from megatrain.kernels import norms


@dataclass
class PendingTerm:
    """The term of a sum that another rank sent, left to the operation that reads the sum; None: the sum is complete.

    The third send after its own overwrites the term.
    """

    value: Tensor | None = None

    def take(self) -> Tensor | None:
        """Return the term once."""
        value, self.value = self.value, None
        return value


def add_terms(x: Tensor, terms: Tensor) -> Tensor:
    """Add the sum of two terms, differentiably: [..., h] and [2, ..., h] -> [..., h]."""
    out: Tensor = _AddTerms.apply(x, terms)
    return out


class _AddTerms(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, terms: Tensor) -> Tensor:
        ctx.shape = terms.shape
        return norms.add_terms(x, terms)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor]:
        return grads[0], grads[0].expand(ctx.shape)
