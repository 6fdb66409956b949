"""From a request to joined ranks: the launcher's word, one plan, process groups; and from errors to exit codes.

    environment ─> store, watch over the ranks ─> agreed plan ─> process groups ─> grid ─> the run ─> leave together

Nobody enters a collective before all ranks have the same plan; whoever fails afterwards ends all.
"""

from __future__ import annotations

import dataclasses
import functools
import os
import resource
import sys
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta

import torch
import torch.distributed as dist

from megatrain.config import Facts, Plan, Request
from megatrain.config.environment import LaunchEnvironment, read_environment
from megatrain.config.errors import ConfigError, MegatrainError
from megatrain.parallel.build_grid import build_grid
from megatrain.parallel.collectives import all_reduce
from megatrain.parallel.grid import RankGrid
from megatrain.parallel.process_groups import groups_of, make_group
from megatrain.parallel.rank_lists import DEFAULT_ORDER, STAGES_BEFORE_REPLICAS, GridShape
from megatrain.training.launch.agreement import agreed_plan, tell
from megatrain.training.launch.determinism import use_deterministic_operations
from megatrain.training.launch.early_imports import begin_imports, require_triton_cache
from megatrain.training.launch.failure import exit_code_of
from megatrain.training.launch.rank_watch import RankWatch
from megatrain.training.logging.console import Console, Phases

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
        if not error.is_reported:
            tell(error)
        exit_code = exit_code_of(error)
    except BaseException as error:
        if not (isinstance(error, Exception) or dist.is_initialized()):
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
            facts, plan = agreed_plan(request, environment, store)
    except BaseException as error:
        if watch is not None and isinstance(error, MegatrainError):
            watch.leave()  # all ranks have one, and end by themselves
        elif watch is not None:
            watch.fail(error)
        raise
    try:
        with phases.phase("joining process groups"):
            device = _own_device(plan, environment)
            if plan.config.training.deterministic_mode and device.type == "cuda":
                use_deterministic_operations()
            require_triton_cache(plan)
            begin_imports(plan, phases.console.print)
            if store is not None:
                _join_world(plan, environment, store, device)
            timeout = timedelta(seconds=plan.derived.startup_timeout_seconds)
            make = functools.partial(make_group, timeout=timeout) if store is not None else None
            grid = build_grid(grid_shape(plan), environment.rank, make)
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
    shape = GridShape(
        tp=parallel.tensor_model_parallel_size,
        kv_copies=plan.derived.kv_copies,
        cp=parallel.context_parallel_size,
        cp_heads=parallel.hierarchical_context_parallel_sizes[0]
        if any("+" in way for way in plan.derived.cp_comm_types)
        else 1,
        dp=plan.derived.data_parallel_size,
        pp=parallel.pipeline_model_parallel_size,
        ep=parallel.expert_model_parallel_size,
        etp=None if plan.config.experts.num_experts is None else plan.derived.expert_tensor_parallel_size,
        order=STAGES_BEFORE_REPLICAS if parallel.use_tp_pp_dp_mapping else DEFAULT_ORDER,
        has_matrices=plan.config.optimizer.optimizer == "muon",
    )
    if parallel.data_parallel_sharding_strategy == "no_shard":
        return dataclasses.replace(shape, dp_copies=shape.replicas, expert_copies=shape.expert_replicas)
    instances = parallel.num_distributed_optimizer_instances
    return dataclasses.replace(shape, dp_copies=instances, expert_copies=instances)


def _check_launch(environment: LaunchEnvironment, console: Console) -> None:
    """Say what the launcher said. Where that makes no sense, one rank tells it."""
    if environment.problems:
        error = ConfigError.of(environment.problems)
        error.is_reported = environment.rank != 0
        raise error
    if environment.launcher is not None:
        how = "variables set by hand" if environment.launcher == "hand" else environment.launcher
        console.print(f"> started by {how}: {environment.taken}")
    elif environment.taken:
        console.print(f"> one process: {environment.taken}")


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


def _own_device(plan: Plan, environment: LaunchEnvironment) -> torch.device:
    if plan.config.training.device == "cpu":
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
        count = all_reduce(torch.ones(1, device=device), group).item()
        assert count == group.size, f"{group.name} counts {count} of {group.size} ranks"
