"""Norms as data."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

NormPosition = Literal["pre", "post", "both"]
"""pre: x + f(norm x); post: x + norm(f x); both: x + norm(f(norm x))."""


@dataclass(frozen=True, kw_only=True)
class NormSpec:
    """Every norm of a model; those of queries and keys have options of their own in `AttentionSpec`."""

    kind: Literal["LayerNorm", "RMSNorm"] = "RMSNorm"
    epsilon: float = 1e-5
    is_stored_minus_one: bool = False
    """Weights are stored as weight - 1 (`--apply-layernorm-1p`)."""

    @property
    def has_bias(self) -> bool:
        return self.kind == "LayerNorm"
