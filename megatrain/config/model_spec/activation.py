"""Activations of MLPs: names of those with kernels, and the user's own functions."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Final, Literal

Activation = Literal["swiglu", "geglu_tanh", "quick_geglu", "quick_gelu", "gelu", "gelu_tanh", "squared_relu"]
"""Activation between the two linear layers of an MLP."""

GATED: Final[tuple[Activation, ...]] = ("swiglu", "geglu_tanh", "quick_geglu")


@dataclass(frozen=True)
class ActivationFunction:
    """An element-wise function of tensors, and its derivative."""

    name: str
    value: Callable[[Any], Any]
    derivative: Callable[[Any], Any]
    has_kernel: bool = False
    """True: the fused kernels implement it, under its name."""

    def __str__(self) -> str:
        return self.name if self.has_kernel else f"{self.name} (without a fused kernel)"
