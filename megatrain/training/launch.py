"""From a request to joined ranks: facts, plan, process groups; and from errors to exit codes.

    rank 0 gathers facts ──store──> every rank resolves the same plan ──> process groups ──> grid

Nothing is printed twice: a configuration error is rank 0's to tell, and the other ranks end without a word.
"""

from __future__ import annotations

import dataclasses
import json
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from megatrain.config import Facts, Plan, Request, resolve
from megatrain.config.environment import LaunchEnvironment, read_environment
from megatrain.config.errors import MegatrainError
from megatrain.parallel.collectives import all_reduce
from megatrain.parallel.grid import GridShape, RankGrid
from megatrain.training.facts import gather_facts

_SECONDS_FOR_RANK_0 = 15
"""How long another rank waits with its own end, so that a launcher does not stop rank 0 before it has told why."""


@dataclass(frozen=True, kw_only=True)
class Ranks:
    """This process among its peers, with the plan that all of them follow."""

    plan: Plan
    facts: Facts
    grid: RankGrid
    device: torch.device

    @property
    def is_main(self) -> bool:
        """Whether this rank tells the user what happens."""
        return self.grid.rank == 0


def report_errors(run: Callable[[], int]) -> int:
    """Run, and turn errors that are meant for the user into a message and their exit code."""
    try:
        return run()
    except MegatrainError as error:
        if read_environment().rank == 0:
            sys.stdout.flush()
            print(describe_error(error), file=sys.stderr, flush=True)
        else:
            time.sleep(_SECONDS_FOR_RANK_0)
        return error.exit_code


def describe_error(error: MegatrainError) -> str:
    """All problems, numbered where they are several."""
    problems = error.problems
    if len(problems) == 1:
        return f"error: {problems[0]}"
    lines = [f"error: {len(problems)} problems, nothing was started"]
    lines += [f"{number}. {problem}".replace("\n", "\n   ") for number, problem in enumerate(problems, 1)]
    return "\n".join(lines)


@contextmanager
def joined_ranks(request: Request) -> Iterator[Ranks]:
    """Resolve the plan, join the process groups, and leave them at the end.

    Raises:
        ConfigError: before the first collective, on every rank.
    """
    environment = read_environment()
    store = _join_store(environment) if environment.world_size > 1 else None
    facts = _shared_facts(request, environment, store)
    plan = resolve(request, facts)
    device = _own_device(plan, environment)
    make_handle = _join_groups(plan, environment, store, device) if store is not None else None
    parallel = plan.config.parallel
    shape = GridShape(
        tp=parallel.tensor_model_parallel_size,
        dp=plan.derived.data_parallel_size,
        pp=parallel.pipeline_model_parallel_size,
    )
    grid = RankGrid.build(shape, environment.rank, make_handle)
    _warm(grid, device)
    try:
        yield Ranks(plan=plan, facts=facts, grid=grid, device=device)
        if store is not None:
            dist.barrier()  # without it, an early leaver can abort the others
    finally:
        if dist.is_initialized():
            dist.destroy_process_group()


def _join_store(environment: LaunchEnvironment) -> dist.Store:
    store, _, _ = next(iter(dist.rendezvous("env://", environment.rank, environment.world_size)))
    joined: dist.Store = dist.PrefixStore("megatrain", store)
    return joined


def _shared_facts(request: Request, environment: LaunchEnvironment, store: dist.Store | None) -> Facts:
    """Facts are rank 0's, so that thousands of ranks neither read the same files nor disagree about them."""
    if store is None:
        return gather_facts(request, environment)
    if environment.rank == 0:
        try:
            facts = gather_facts(request, environment).to_json()
        except MegatrainError as error:
            store.set("facts", json.dumps({"exit_code": error.exit_code}))
            raise
        store.set("facts", json.dumps({"facts": facts}))
    answer: dict[str, Any] = json.loads(store.get("facts"))
    if "exit_code" in answer:
        failed = MegatrainError("rank 0 could not gather the facts", fix="see its message")
        failed.exit_code = answer["exit_code"]
        raise failed
    return Facts.from_json(answer["facts"])


def _own_device(plan: Plan, environment: LaunchEnvironment) -> torch.device:
    if plan.derived.device == "cpu":
        return torch.device("cpu")
    device = torch.device("cuda", environment.local_rank)
    torch.cuda.set_device(device)
    return device


def _join_groups(
    plan: Plan, environment: LaunchEnvironment, store: dist.Store, device: torch.device
) -> Callable[[Sequence[int]], Any]:
    timeout = timedelta(minutes=plan.config.parallel.distributed_timeout_minutes)
    dist.init_process_group(
        plan.config.parallel.distributed_backend,
        store=store,
        rank=environment.rank,
        world_size=environment.world_size,
        timeout=timeout,
        device_id=device if device.type == "cuda" else None,
    )
    return lambda ranks: dist.new_group(list(ranks), timeout=timeout)


def _warm(grid: RankGrid, device: torch.device) -> None:
    """Connect every group now, so that a broken link shows at start and not in the middle of a step."""
    for field in dataclasses.fields(RankGrid):
        group = getattr(grid, field.name)
        if hasattr(group, "handle"):
            all_reduce(torch.ones(1, device=device), group)
