"""Refuses a run whose weights, gradients and optimizer state exceed the memory of a GPU or of a host, before the first collective.

    every rank: bytes that it will keep allocated ─> sum over the ranks of its host, in the store
                ─> compared with the GPU, the limits of the process and the host ─> all start, or none

Ranks of a host share its memory. Activations are not counted: what does not fit without them cannot fit at all. Nothing is
refused that could run, so no flag starts such a run anyway.
"""

from __future__ import annotations

import socket
from collections.abc import Iterator

import torch
import torch.distributed as dist

from megatrain.config import ConfigError, Plan
from megatrain.config.environment import LaunchEnvironment
from megatrain.config.errors import MegatrainError
from megatrain.parallel.build_grid import build_grid
from megatrain.process.available_memory import available_bytes, process_bytes
from megatrain.training.launch.agreement import print_error
from megatrain.training.launch.memory_remedies import gigabytes, memory_fix
from megatrain.training.launch.ranks import grid_shape, local_gpu
from megatrain.training.planning.memory_plan import ResidentMemory, planned_resident_memory


def check_memory(plan: Plan, environment: LaunchEnvironment, store: dist.Store | None) -> int:
    """Return the bytes that this rank will keep allocated. All ranks call it; `store` is None for one rank.

    Raises:
        ConfigError: on all ranks; the memory of a GPU, of a process or of a host does not suffice.
    """
    held = planned_resident_memory(plan, build_grid(grid_shape(plan), environment.rank))
    on_host = held.on_host + (held.total if plan.config.training.device == "cpu" else 0)
    host, num_ranks = _of_host(on_host, environment, store)
    problem = next(_problems(plan, environment, held, on_host, host, num_ranks), None)
    error: MegatrainError | None = None
    if problem is not None:
        error = ConfigError(problem, fix=memory_fix(plan, of_state=True))
    if store is not None:
        error = _agreed(error, environment, store)
    if error is not None:
        raise error
    return held.total + held.on_host


def _problems(
    plan: Plan,
    environment: LaunchEnvironment,
    held: ResidentMemory,
    on_host: int,
    of_host: int,
    num_ranks: int,
) -> Iterator[str]:
    parts = "weights, gradients and optimizer state"
    if plan.config.training.device == "cuda":
        free, total = torch.cuda.mem_get_info(local_gpu(environment))
        if held.total > free:
            yield (
                f"rank {environment.rank} needs {gigabytes(held.total)} GB for {parts}, without activations, and"
                f" {gigabytes(free)} of the {gigabytes(total)} GB of its GPU are free"
            )
    limit = process_bytes()
    if on_host and limit is not None and on_host > limit:
        yield (
            f"rank {environment.rank} needs {gigabytes(on_host)} GB of host memory for {parts}, without activations, and"
            f" the limits of the process (ulimit -v, ulimit -d) leave {gigabytes(limit)} GB"
        )
    available = available_bytes()
    if on_host and of_host > available:
        ranks = f"the {num_ranks} ranks of {socket.gethostname()} need" if num_ranks > 1 else "the run needs"
        yield (
            f"{ranks} {gigabytes(of_host)} GB of host memory for {parts}, without activations, and"
            f" {gigabytes(available)} GB are available"
        )


def _of_host(on_host: int, environment: LaunchEnvironment, store: dist.Store | None) -> tuple[int, int]:
    """Return the sum of bytes over the ranks of this host, and their number."""
    if store is None:
        return on_host, 1
    name = socket.gethostname()
    store.add(f"memory of {name}", on_host)
    store.add(f"ranks of {name}", 1)
    if store.add("memory counted", 1) == environment.world_size:
        store.set("all memory counted", "yes")
    store.wait(["all memory counted"])
    return store.add(f"memory of {name}", 0), store.add(f"ranks of {name}", 0)


def _agreed(
    error: MegatrainError | None, environment: LaunchEnvironment, store: dist.Store
) -> MegatrainError | None:
    """Return an error on all ranks if one has one; the first rank with an error prints it, before any rank exits."""
    if error is not None:
        if store.add("memory problems", 1) == 1:
            print_error(error)
        error.is_reported = True
    if store.add("memory checked", 1) == environment.world_size:
        store.set("all memory checked", "yes")
    store.wait(["all memory checked"])
    if error is None and store.add("memory problems", 0):
        error = ConfigError("another rank has too little memory", fix="see the message of that rank")
        error.is_reported = True
    return error
