"""What the launcher says about this process. The one place that reads the environment."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class LaunchEnvironment:
    """One process among those that were started together, as torchrun numbers them; alone without a launcher."""

    rank: int = 0
    world_size: int = 1
    local_rank: int = 0
    local_world_size: int = 1


def read_environment(environment: Mapping[str, str] | None = None) -> LaunchEnvironment:
    """torchrun's RANK, WORLD_SIZE, LOCAL_RANK and LOCAL_WORLD_SIZE; one process where they are not set."""
    values = os.environ if environment is None else environment
    return LaunchEnvironment(
        rank=int(values.get("RANK", "0")),
        world_size=int(values.get("WORLD_SIZE", "1")),
        local_rank=int(values.get("LOCAL_RANK", "0")),
        local_world_size=int(values.get("LOCAL_WORLD_SIZE", "1")),
    )
