"""What a user asked for: the values given, where each was given, and what is wrong with how it was said."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from megatrain.config.errors import Problem
from megatrain.config.schema.tree import Config, Origin
from megatrain.config.schema.values import is_resolved


@dataclass(frozen=True)
class Given:
    """A value that a flag or a YAML file sets. INVALID if it could not be understood."""

    path: str
    value: Any
    origin: Origin


@dataclass(frozen=True)
class Request:
    """The outcome of parsing. `config` may still hold AUTO, REQUIRED and INVALID; `resolve` reports and removes them."""

    config: Config
    origins: Mapping[str, Origin]
    """By path, such as `model.num_layers`: of every setting."""
    problems: tuple[Problem, ...] = ()
    notes: tuple[str, ...] = ()
    """What there is to say about flags of Megatron-LM's that are accepted without setting anything."""
    is_complete: bool = True
    """False where a file of settings could not be read: nothing else can be judged then."""

    def known(self, path: str) -> Any | None:
        """The value at this path, or None where it is open, missing or not understood: for gathering facts."""
        value = self.config.raw(path)
        return value if is_resolved(value) else None

    def fewest_ranks(self) -> int:
        """As many as hold the model once, as far as is known: all of its dense layers, and all of its experts."""
        tp, cp, pp, ep = (
            self.known(f"parallel.{name}_parallel_size") or 1
            for name in ("tensor_model", "context", "pipeline_model", "expert_model")
        )
        etp = self.known("parallel.expert_tensor_parallel_size") or tp
        return math.lcm(tp * cp * pp, etp * ep * pp)
