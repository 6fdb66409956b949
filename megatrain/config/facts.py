"""What the world outside the command line says: ranks, devices, the tokenizer, the checkpoint, the libraries.

Rank 0 gathers them (`training/facts.py`) and hands them to all ranks as JSON, so that every rank resolves the same plan.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from megatrain.config.errors import Problem


@dataclass(frozen=True, kw_only=True)
class StoredRun:
    """The checkpoint that a run continues."""

    path: str
    iteration: int
    consumed_train_samples: int
    config: Mapping[str, Mapping[str, Any]]
    """The resolved configuration that it was saved with, as `Config.to_dict` gives it."""
    tokenizer_fingerprint: str | None = None


@dataclass(frozen=True, kw_only=True)
class Facts:
    """Equal on all ranks. None: not known."""

    world_size: int = 1
    device: Literal["cpu", "cuda"] = "cpu"
    device_name: str | None = None
    devices_per_node: int | None = None
    """GPUs that a node's processes can see."""
    ranks_per_node: int | None = None
    vocab_size: int | None = None
    """Tokens of the tokenizer, before padding."""
    eod_id: int | None = None
    pad_id: int = -1
    """The tokenizer's padding id; -1: it has none."""
    special_ids: tuple[int, ...] = ()
    """Its ids with a role other than padding."""
    tokenizer_fingerprint: str | None = None
    checkpoint: StoredRun | None = None
    data_problems: tuple[Problem, ...] = ()
    """What was found wrong with input files."""
    libraries: Mapping[str, str] = field(default_factory=dict)
    """Version of each library that is installed."""

    def to_json(self) -> str:
        return json.dumps(dataclasses.asdict(self))

    @classmethod
    def from_json(cls, text: str) -> Facts:
        values = json.loads(text)
        if values["checkpoint"] is not None:
            values["checkpoint"] = StoredRun(**values["checkpoint"])
        values["special_ids"] = tuple(values["special_ids"])
        values["data_problems"] = tuple(Problem(**problem) for problem in values["data_problems"])
        return cls(**values)
