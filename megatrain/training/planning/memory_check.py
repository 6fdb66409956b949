"""Refuses a run that exceeds the memory of a GPU or of a host, before the first collective.

    every rank: bytes that it will keep allocated ─> sum over the ranks of its host
                ─> compared with the GPU, the limits of the process and the host ─> all start, or none

Ranks of a host share its memory. Activations are not counted: what does not fit without them cannot fit at all. Nothing is
refused that could run, so no flag starts such a run anyway. Only where a flag that would save memory has no effect, or
activations are offloaded, does a rank plan its whole step, as a dry run does.
"""

from __future__ import annotations

import socket
from collections.abc import Iterator

import torch
import torch.distributed as dist

from megatrain.config import ConfigError, Plan
from megatrain.config.environment import LaunchEnvironment
from megatrain.parallel.build_grid import build_grid
from megatrain.parallel.messages import Messages
from megatrain.process.available_memory import available_bytes, process_bytes
from megatrain.training.launch.memory_remedies import gigabytes, memory_fix
from megatrain.training.launch.ranks import grid_shape, local_gpu
from megatrain.training.launch.refusal import print_error
from megatrain.training.planning.memory_limit import ignored_flag
from megatrain.training.planning.memory_plan import (
    ResidentMemory,
    StageMemory,
    planned_rank_memory,
    planned_resident_memory,
)


def check_memory(plan: Plan, environment: LaunchEnvironment, store: dist.Store | None) -> int:
    """Return the bytes that this rank will keep allocated. All ranks call it; `store` is None for one rank.

    Raises:
        ConfigError: on all ranks; the memory of a GPU, of a process or of a host does not suffice.
    """
    held = planned_resident_memory(plan, build_grid(grid_shape(plan), environment.rank))
    training = plan.config.training
    needs_step = training.offloads_activations or (
        training.device == "cuda" and ignored_flag(plan) is not None
    )
    step = planned_rank_memory(plan, build_grid(grid_shape(plan), environment.rank)) if needs_step else None
    on_host = held.on_host + (held.total if plan.config.training.device == "cpu" else 0)
    on_host += step.activations_on_host if step is not None else 0
    messages, host = Messages(environment.rank, 1, None), socket.gethostname()
    if store is not None:
        messages = Messages(environment.rank, environment.world_size, dist.PrefixStore("memory", store))
    num_bytes, num_ranks = messages.gather_and_broadcast([host, on_host], _of_hosts)[host]
    found = messages.gather(
        next(_problems(plan, environment, held, step, on_host, num_bytes, num_ranks), None)
    )
    problem, fix = next(filter(None, found), None), memory_fix(plan, of_state=step is None)
    if problem is not None and store is not None:
        # Before another rank exits: the launcher then kills this one.
        print_error(ConfigError(problem, fix=fix))
    problem = messages.broadcast(problem)
    if problem is not None:
        raise ConfigError(problem, fix=fix, is_reported=store is not None)
    return held.total + held.on_host


def _problems(
    plan: Plan,
    environment: LaunchEnvironment,
    held: ResidentMemory,
    step: StageMemory | None,
    on_host: int,
    of_host: int,
    num_ranks: int,
) -> Iterator[str]:
    """Yield what this rank lacks. `on_host`: its bytes of host memory; `of_host`: bytes of all ranks of this host."""
    parts = "weights, gradients and optimizer state"
    is_offloaded = step is not None and step.activations_on_host > 0
    whole = "and offloaded activations" if is_offloaded else "without activations"
    if plan.config.training.device == "cuda":
        free, total = torch.cuda.mem_get_info(local_gpu(environment))
        if held.total > free:
            yield (
                f"rank {environment.rank} needs {gigabytes(held.total)} GB for {parts}, without activations, and"
                f" {gigabytes(free)} of the {gigabytes(total)} GB of its GPU are free"
            )
        ignored = ignored_flag(plan)
        if step is not None and ignored is not None and step.total > free:
            yield (
                f"{ignored}; rank {environment.rank} needs {gigabytes(step.total)} GB at the peak of a step, and"
                f" {gigabytes(free)} of the {gigabytes(total)} GB of its GPU are free"
            )
    limit = process_bytes()
    if on_host and limit is not None and on_host > limit:
        yield (
            f"rank {environment.rank} needs {gigabytes(on_host)} GB of host memory for {parts}, {whole}, and"
            f" the limits of the process (ulimit -v, ulimit -d) leave {gigabytes(limit)} GB"
        )
    available = available_bytes()
    if on_host and of_host > available:
        ranks = f"the {num_ranks} ranks of {socket.gethostname()} need" if num_ranks > 1 else "the run needs"
        yield (
            f"{ranks} {gigabytes(of_host)} GB of host memory for {parts}, {whole}, and"
            f" {gigabytes(available)} GB are available"
        )


def _of_hosts(of_ranks: list[tuple[str, int]]) -> dict[str, tuple[int, int]]:
    """Return the bytes and the number of the ranks of each host."""
    found: dict[str, list[int]] = {}
    for host, num_bytes in of_ranks:
        found.setdefault(host, []).append(num_bytes)
    return {host: (sum(of_host), len(of_host)) for host, of_host in found.items()}
