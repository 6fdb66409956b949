"""From a request to joined ranks: facts, plan, process groups; and from errors to exit codes.

    rank 0: facts, plan ──store──> every rank: the same plan, or an error ──> all may start ──> process groups ──> grid

What all ranks find wrong is rank 0's to tell, once; what one rank finds alone (a file that is not on its node, other
flags) it tells itself. Nobody enters a collective before all may.
"""

from __future__ import annotations

import functools
import json
import os
import resource
import sys
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from megatrain.config import Facts, Plan, Request, resolve
from megatrain.config.environment import LaunchEnvironment, read_environment
from megatrain.config.errors import ConfigError, MegatrainError, describe
from megatrain.config.tree import flag_of, settings
from megatrain.parallel.collectives import all_reduce
from megatrain.parallel.grid import DEFAULT_ORDER, STAGES_BEFORE_REPLICAS, GridShape, RankGrid
from megatrain.parallel.groups import groups_of, make_group
from megatrain.training.console import Console
from megatrain.training.facts import gather_facts
from megatrain.training.failure import exit_code_of
from megatrain.training.metrics import write_status
from megatrain.training.phases import Phases
from megatrain.training.rank_watch import RankWatch

_TO_MEET = timedelta(hours=1)
"""How long ranks wait for others to start, and for rank 0 to read the inputs."""


@dataclass(frozen=True, kw_only=True)
class Ranks:
    """This process among its peers, with the plan that all of them follow."""

    request: Request
    plan: Plan
    facts: Facts
    grid: RankGrid
    device: torch.device
    local_rank: int
    """Among the ranks of its host."""
    phases: Phases
    """Times what this rank does."""
    watch: RankWatch | None = None
    """Over the other ranks; None: there are none, or another program watches them."""

    @property
    def console(self) -> Console:
        """Where this rank prints; only the main rank's prints anything."""
        return self.phases.console

    @property
    def is_main(self) -> bool:
        """Whether this rank tells the user what happens."""
        return self.grid.rank == 0


def report_errors(run: Callable[[], int]) -> int:
    """Run, and turn errors into a message and an exit code. A rank that fails among others ends its process at once."""
    _allow_many_files()
    try:
        return run()
    except MegatrainError as error:
        if not error.is_told:
            tell(error)
        exit_code = exit_code_of(error)
    except (Exception, SystemExit) as error:
        if isinstance(error, SystemExit) and not dist.is_initialized():
            raise
        _print_traceback()  # whatever it was, it is printed, and the launcher hears of it
        exit_code = exit_code_of(error)
    if dist.is_initialized():
        # Leaving the process groups in order would wait for peers that wait for this rank in a collective.
        sys.stderr.flush()
        os._exit(exit_code)
    return exit_code


def _print_traceback() -> None:
    sys.stdout.flush()
    environment = read_environment()
    if environment.world_size > 1:
        print(f"rank {environment.rank} of {environment.world_size} failed:", file=sys.stderr)
    traceback.print_exc()


def _allow_many_files() -> None:
    """Raise the limit of open files as far as this user may: a blend of a thousand datasets maps thousands."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != hard:
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))


def tell(error: MegatrainError) -> None:
    """Print an error, under this rank's number where it is not rank 0."""
    rank = read_environment().rank
    sys.stdout.flush()
    print(f"{f'rank {rank}: ' if rank else ''}{describe(error)}", file=sys.stderr, flush=True)


@contextmanager
def joined_ranks(request: Request, phases: Phases | None = None) -> Iterator[Ranks]:
    """Resolve the plan, join the process groups, and leave them at the end. `phases`: those before, if there were.

    Raises:
        MegatrainError: before the first collective, on every rank, whichever of them found the problem.
    """
    environment = read_environment()
    phases = phases or Phases(Console(is_quiet=environment.rank != 0))
    _check_launch(environment, phases.console)
    with phases.phase("meeting the other ranks"):
        store = _join_store(environment) if environment.world_size > 1 else None
        watch = RankWatch(environment, store) if store is not None else None
    try:
        with phases.phase("reading inputs and planning"):
            facts, plan = _agreed_plan(request, environment, store)
    except BaseException as error:
        if watch is not None and isinstance(error, MegatrainError):
            watch.leave()  # all ranks have one, and end by themselves
        elif watch is not None:
            watch.fail(error)
        raise
    try:
        with phases.phase("joining process groups"):
            device = _own_device(plan, environment)
            if store is not None:
                _join_world(plan, environment, store, device)
            timeout = timedelta(seconds=plan.derived.startup_timeout_seconds)
            make = functools.partial(make_group, timeout=timeout) if store is not None else None
            grid = RankGrid.build(grid_shape(plan), environment.rank, make)
            _warm(grid, device)
        yield Ranks(
            request=request,
            plan=plan,
            facts=facts,
            grid=grid,
            device=device,
            local_rank=environment.local_rank,
            phases=phases,
            watch=watch,
        )
        if store is not None:
            dist.barrier()  # without it, an early leaver can abort the others
    except BaseException as error:
        if watch is not None:
            watch.fail(error)
        raise
    finally:
        phases.console.remove_bar()
    if watch is not None:
        watch.leave()
        dist.destroy_process_group()


def grid_shape(plan: Plan) -> GridShape:
    """The axes that a plan asks for."""
    parallel = plan.config.parallel
    return GridShape(
        tp=parallel.tensor_model_parallel_size,
        kv_copies=plan.derived.kv_copies,
        dp=plan.derived.data_parallel_size,
        pp=parallel.pipeline_model_parallel_size,
        order=STAGES_BEFORE_REPLICAS if parallel.use_tp_pp_dp_mapping else DEFAULT_ORDER,
        dp_copies=1 if parallel.use_distributed_optimizer else plan.derived.data_parallel_size,
    )


def _check_launch(environment: LaunchEnvironment, console: Console) -> None:
    """Say what the launcher said. Where that makes no sense, one rank tells it."""
    if environment.problems:
        error = ConfigError.of(environment.problems)
        error.is_told = environment.rank != 0
        raise error
    if environment.launcher is not None:
        how = "variables set by hand" if environment.launcher == "hand" else environment.launcher
        console.say(f"> started by {how}: {environment.taken}")
    elif environment.taken:
        console.say(f"> one process: {environment.taken}")


def _join_store(environment: LaunchEnvironment) -> dist.Store:
    rank, world_size = environment.rank, environment.world_size
    try:
        store, _, _ = next(iter(dist.rendezvous(environment.rendezvous, rank, world_size, timeout=_TO_MEET)))
    except dist.DistError as error:
        raise MegatrainError(
            f"rank {rank} of {world_size} found no meeting place with the others ({environment.taken}): {error}",
            fix="set MASTER_ADDR to the host of rank 0, and MASTER_PORT to a port that is free there, on all ranks",
        ) from error
    joined: dist.Store = dist.PrefixStore("megatrain", store)
    return joined


def _agreed_plan(
    request: Request, environment: LaunchEnvironment, store: dist.Store | None
) -> tuple[Facts, Plan]:
    """Facts and plan, equal on all ranks; an error on any of them is an error on all."""
    try:
        if store is None or environment.rank == 0:
            agreed = _plan_of_rank_0(request, environment, store)
        else:
            agreed = _plan_of_another_rank(request, store)
    except MegatrainError as error:
        if not error.is_told:
            tell(error)
            error.is_told = True
        if store is not None:
            store.set("may start", "no")
        raise
    if store is not None:
        if store.add("ready", 1) == environment.world_size:
            store.set("may start", "yes")
        if store.get("may start") != b"yes":
            elsewhere = _told_elsewhere(2)
            if environment.rank == 0:
                _write_failure(request, elsewhere)
            raise elsewhere
    return agreed


def _plan_of_rank_0(
    request: Request, environment: LaunchEnvironment, store: dist.Store | None
) -> tuple[Facts, Plan]:
    """Facts are rank 0's alone, so that thousands of ranks neither read the same files nor disagree about them."""
    answer: dict[str, Any] = {"facts": None, "config": None, "problems": [], "exit_code": 0}
    try:
        facts = gather_facts(request, environment)
        answer["facts"] = facts.to_json()
        plan = resolve(request, facts)
        answer["config"] = plan.config.to_dict()
    except MegatrainError as error:
        tell(error)  # before another rank can end, upon which the launcher would stop this one
        error.is_told = True
        _write_failure(request, error)
        answer |= {"problems": [str(problem) for problem in error.problems], "exit_code": error.exit_code}
        raise
    finally:
        if store is not None:
            store.set("rank 0", json.dumps(answer))
    return facts, plan


def _plan_of_another_rank(request: Request, store: dist.Store) -> tuple[Facts, Plan]:
    answer = json.loads(store.get("rank 0"))
    if answer["facts"] is None:
        raise _told_elsewhere(answer["exit_code"])
    facts = Facts.from_json(answer["facts"])
    try:
        plan = resolve(request, facts)
    except ConfigError as error:
        error.is_told = [str(problem) for problem in error.problems] == answer["problems"]
        raise
    if answer["config"] is None:
        raise _told_elsewhere(answer["exit_code"])
    own = plan.config.to_dict()
    for setting in settings():
        here, there = own[setting.section][setting.name], answer["config"][setting.section][setting.name]
        if here != there:
            raise ConfigError(
                f"{flag_of(setting.name)} is {here} on this rank and {there} on rank 0",
                fix="start all ranks with the same command line and the same files",
            )
    return facts, plan


def _told_elsewhere(exit_code: int) -> MegatrainError:
    error = MegatrainError("another rank could not start", fix="see its message")
    error.is_told, error.exit_code = True, exit_code
    return error


def _write_failure(request: Request, error: MegatrainError) -> None:
    """`status.json` for a run that did not start, where --save names a folder that is there."""
    save = request.known("checkpoint.save")
    if save is not None and Path(save).is_dir():
        write_status(Path(save), exit_code=error.exit_code, reason=error.problems[0].text, iteration=None)


def _own_device(plan: Plan, environment: LaunchEnvironment) -> torch.device:
    if plan.derived.device == "cpu":
        return torch.device("cpu")
    is_alone = environment.binds_gpus and torch.cuda.device_count() == 1
    device = torch.device("cuda", 0 if is_alone else environment.local_rank)
    torch.cuda.set_device(device)
    return device


def _join_world(plan: Plan, environment: LaunchEnvironment, store: dist.Store, device: torch.device) -> None:
    dist.init_process_group(
        plan.config.parallel.distributed_backend,
        store=store,
        rank=environment.rank,
        world_size=environment.world_size,
        timeout=timedelta(seconds=plan.derived.startup_timeout_seconds),
        device_id=device if device.type == "cuda" else None,
    )


def _warm(grid: RankGrid, device: torch.device) -> None:
    """Connect every group now, so that a broken link shows at start and not in the middle of a step."""
    for group in groups_of(grid):
        on = torch.device("cpu") if group.name == "messages" else device
        count = all_reduce(torch.ones(1, device=on), group).item()
        assert count == group.size, f"{group.name} counts {count} of {group.size} ranks"
