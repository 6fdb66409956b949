"""Scale and softcap of logits."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class LogitScaling:
    """Logits from products with the output weight: cap * tanh(scale * product / cap)."""

    scale: float
    cap: float | None
    """Softcap; None: logits are scale * product."""

    def logits(self, products: Tensor) -> Tensor:
        """Compute the logits; `products` is overwritten."""
        if self.scale != 1.0:
            products *= self.scale
        return products if self.cap is None else torch.tanh(products / self.cap) * self.cap

    def softcap_derivative(self, logits: Tensor) -> Tensor | None:
        """Return the derivative of the logits with respect to scale * product; None: it is 1."""
        return None if self.cap is None else 1 - (logits / self.cap).square()
