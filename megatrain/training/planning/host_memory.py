"""Host memory of a run, per rank and per host: all of a run on CPUs, offloaded state and activations, and the copies of --async-save.

engine of each pipeline stage ─> the chunks that its first rank writes ─> bytes of their copy ─┬─> sum over the ranks of a host
memory of each pipeline stage ─> bytes that lie in host memory ────────────────────────────────┘

Ranks with copies of a tensor share its writing, so the ranks of a stage need about the same.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

import torch

from megatrain.checkpoint.background import host_bytes
from megatrain.checkpoint.chunks import plan_chunks
from megatrain.config import Plan
from megatrain.config.environment import LaunchEnvironment
from megatrain.process.available_memory import available_bytes
from megatrain.training.checkpoints import saved_kinds
from megatrain.training.engine import Engine
from megatrain.training.launch.ranks import grid_shape
from megatrain.training.planning.memory_limit import HostUse
from megatrain.training.planning.memory_plan import StageMemory
from megatrain.training.saving import saves_in_background

_USUAL_RANKS_PER_HOST: Final = 8


@dataclass(frozen=True, kw_only=True)
class HostMemory(HostUse):
    """Bytes of host memory that --async-save allocates at start, for the whole run."""

    kinds: tuple[str, ...]
    """Kinds of state that are copied."""
    per_rank: tuple[int, ...]
    """Copy of the first rank of each pipeline stage."""


def host_memory(plan: Plan, engines: Sequence[Engine], environment: LaunchEnvironment) -> HostMemory | None:
    """Return the host memory of a run; None if it does not save in the background.

    Args:
        engines: one engine of each stage, on the meta device.
        environment: of this process, as it was launched.
    """
    if not saves_in_background(plan):
        return None
    kinds = saved_kinds(plan, engines[0])
    per_rank = [host_bytes(plan_chunks(engine.optimizer, engine.grid, kinds)) for engine in engines]
    host = _use(plan, per_rank, environment)
    return HostMemory(kinds=kinds, per_rank=tuple(per_rank), **dataclasses.asdict(host))


def host_use(
    plan: Plan, memory: Sequence[StageMemory], copies: HostMemory | None, environment: LaunchEnvironment
) -> HostUse | None:
    """Return all host memory of a run, from the memory of its stages; None if everything lies on GPUs."""
    is_on_cpu = plan.config.training.device == "cpu"
    per_rank = [stage.held.on_host + stage.activations_on_host + stage.total * is_on_cpu for stage in memory]
    if copies is not None:
        per_rank = [sum(both) for both in zip(per_rank, copies.per_rank, strict=True)]
    return _use(plan, per_rank, environment) if any(per_rank) else None


def _use(plan: Plan, per_rank: Sequence[int], environment: LaunchEnvironment) -> HostUse:
    """Return the largest sum over the ranks of a host; `per_rank` has the bytes of a rank of each stage."""
    ranks_per_host, reason = _ranks_per_host(plan, environment)
    stage_of = {
        rank: stage
        for stage, ranks in enumerate(grid_shape(plan).rank_lists("tp-cp-ep-dp"))
        for rank in ranks
    }
    of_ranks = [per_rank[stage_of[rank]] for rank in range(plan.derived.world_size)]
    hosts = (of_ranks[first : first + ranks_per_host] for first in range(0, len(of_ranks), ranks_per_host))
    return HostUse(
        ranks_per_host=ranks_per_host,
        reason=reason,
        per_host=max(map(sum, hosts)),
        available=available_bytes(),
    )


def _ranks_per_host(plan: Plan, environment: LaunchEnvironment) -> tuple[int, str]:
    world_size = plan.derived.world_size
    if environment.world_size > 1:
        return min(environment.local_world_size, world_size), "as launched"
    if plan.config.training.device == "cuda" and torch.cuda.device_count():
        return min(torch.cuda.device_count(), world_size), "as many as this host has GPUs"
    if world_size <= _USUAL_RANKS_PER_HOST:
        return world_size, "all on one host"
    return _USUAL_RANKS_PER_HOST, "an assumption"
