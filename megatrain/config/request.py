"""The parsed command line and YAML files, before any value is derived or checked against others.

argv ── parse ──> Request ── resolve (with Facts) ──> Plan
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from megatrain.config.errors import Problem
from megatrain.config.plan_note import PlanNote
from megatrain.config.schema.tree import Config, Origin
from megatrain.config.schema.values import is_resolved


@dataclass(frozen=True)
class Given:
    """A setting that a flag or a YAML file sets; its value is INVALID if it could not be parsed."""

    path: str
    value: Any
    origin: Origin


@dataclass(frozen=True)
class Request:
    """The result of parsing. `config` may contain AUTO, REQUIRED and INVALID, which `resolve` derives or reports."""

    config: Config
    origins: Mapping[str, Origin]
    """Origin of every setting, by path such as `model.num_layers`."""
    problems: tuple[Problem, ...] = ()
    """Problems found while parsing."""
    notes: tuple[PlanNote, ...] = ()
    """Notes on Megatron-LM flags that are accepted and set nothing."""
    is_complete: bool = True
    """False if a --config file could not be read: other problems would be misleading then."""

    def known(self, path: str) -> Any | None:
        """Return the value at a path; None if it is open, missing or invalid. For gathering facts before `resolve`."""
        value = self.config.raw(path)
        return value if is_resolved(value) else None

    def fewest_ranks(self) -> int:
        """Return the smallest number of ranks for one replica of the model, its dense layers and its experts."""
        tp, cp, pp, ep = (
            self.known(f"parallel.{name}_parallel_size") or 1
            for name in ("tensor_model", "context", "pipeline_model", "expert_model")
        )
        if self.known("experts.num_experts") is None:
            return int(tp * cp * pp)
        etp = self.known("parallel.expert_tensor_parallel_size") or tp
        return math.lcm(tp * cp * pp, etp * ep * pp)
