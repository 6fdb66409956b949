"""Start of a run on all ranks: launcher variables, one plan, process groups; and exit codes of errors.

    environment ─> store, rank watch ─> agreed plan ─> process groups ─> grid ─> the run ─> exit together

No rank enters a collective before all ranks have the same plan; after that, a failure of one rank exits all.
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
from megatrain.config.environment import (
    DETERMINISTIC_WORKSPACES,
    LaunchEnvironment,
    has_expandable_segments,
    read_environment,
    set_cublas_workspace,
    set_unless_given,
)
from megatrain.config.errors import ConfigError, MegatrainError
from megatrain.config.nccl_options import group_options
from megatrain.config.schema.pipeline_schedules import PIPELINE_SCHEDULES
from megatrain.parallel.build_grid import build_grid
from megatrain.parallel.collectives import all_reduce
from megatrain.parallel.grid import RankGrid
from megatrain.parallel.process_groups import collective_calls, destroy_groups, groups_of, make_group
from megatrain.parallel.rank_lists import DEFAULT_ORDER, STAGES_BEFORE_REPLICAS, GridShape, embedding_ranks
from megatrain.process.exit_deadline import exit_deadline
from megatrain.process.signals import Signals
from megatrain.training.checkpoint_copies import check_hf_folders
from megatrain.training.launch.agreement import agreed_plan, exit_after_others
from megatrain.training.launch.early_imports import check_triton_cache, start_imports
from megatrain.training.launch.flight_recorder import configure_flight_recorder
from megatrain.training.launch.out_of_memory import allocation_errors, is_out_of_memory, without_plan
from megatrain.training.launch.refusal import print_error, write_failure
from megatrain.training.launch.save_lock import SaveLocks
from megatrain.training.launch.stored_run import saved_folders
from megatrain.training.liveness.failure import exit_code_of
from megatrain.training.liveness.rank_watch import RankWatch
from megatrain.training.logging.console import Console, Phases
from megatrain.training.logging.trackers import is_tracker_hanging

_RENDEZVOUS_TIMEOUT = timedelta(hours=1)
"""Longest wait for other ranks to start, and for rank 0 to read the inputs."""


@dataclass(frozen=True, kw_only=True)
class Ranks:
    """This rank: plan, process groups and device."""

    request: Request
    plan: Plan
    facts: Facts
    grid: RankGrid
    device: torch.device
    local_rank: int
    """Rank within the host."""
    phases: Phases
    """Timer of start-up phases."""
    watch: RankWatch | None = None
    """Watch over the other ranks; None with a single rank, or if another program watches them."""
    signals: Signals | None = None
    """Stop signals of this process; None: another program handles them."""
    planned_bytes: int | None = None
    """Bytes that this rank keeps allocated for the whole run by its plan; None: not known."""

    @property
    def console(self) -> Console:
        """Console of this rank; only the main rank's prints."""
        return self.phases.console

    @property
    def is_main(self) -> bool:
        """This rank prints for the user and writes files."""
        return self.grid.rank == 0


def report_errors(run: Callable[[], int]) -> int:
    """Run, print errors, destroy the process groups and return the exit code.

    A failure of one of several ranks, W&B that hangs, and groups that cannot be destroyed in time end the process.
    """
    _raise_open_file_limit()
    is_failed = True
    try:
        exit_code, is_failed = run(), False
    except MegatrainError as error:
        if not error.is_reported:
            print_error(error)
        exit_code = exit_code_of(error)
    except BaseException as error:
        if isinstance(error, SystemExit) and not dist.is_initialized():
            raise
        exit_code = exit_code_of(error)
        if isinstance(error, KeyboardInterrupt):
            print("interrupted", file=sys.stderr)
        elif is_out_of_memory(error):
            print_error(without_plan(error))
        else:  # any other error: traceback, and an exit code for the launcher
            _print_traceback()
    if (is_failed and dist.is_initialized()) or is_tracker_hanging():
        # Destroying the process groups would wait for peers that are blocked in a collective with this rank.
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(exit_code)
    if dist.is_initialized():
        with exit_deadline(exit_code):
            destroy_groups()
    return exit_code


def _print_traceback() -> None:
    sys.stdout.flush()
    environment = read_environment()
    if environment.world_size > 1:
        print(f"rank {environment.rank} of {environment.world_size} failed:", file=sys.stderr)
    traceback.print_exc()


def _raise_open_file_limit() -> None:
    """Raise the limit of open files to the hard limit: a blend of a thousand datasets maps thousands of files."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != hard:
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))


PlannedBytes = Callable[[Plan, LaunchEnvironment, dist.Store | None], int]
"""Returns what this rank keeps allocated; raises a ConfigError on all ranks if it has not as much memory."""


@contextmanager
def joined_ranks(
    request: Request,
    phases: Phases | None = None,
    *,
    signals: Signals | None = None,
    check_memory: PlannedBytes | None = None,
    follow: Callable[[RankWatch], None] = lambda _: None,
) -> Iterator[Ranks]:
    """Resolve the plan and create the process groups; `report_errors` destroys them.

    Args:
        phases: continues an earlier timer.
        signals: stop signals of this process, which this rank reports to the others until it trains.
        check_memory: compares the plan with the memory of this rank's device and host.
        follow: called with the watch over the other ranks.

    Raises:
        MegatrainError: on every rank, before the first collective, if one rank finds a problem.
    """
    environment = read_environment()
    phases = phases or Phases(Console(is_quiet=environment.rank != 0))
    check_launch(environment, phases.console)
    with phases.phase("rendezvous with the other ranks"):
        store = join_store(environment) if environment.world_size > 1 else None
        watch = RankWatch(environment, store, lambda: phases.current) if store is not None else None
    locks = SaveLocks(saved_folders(request) if environment.rank == 0 else {}, phases.console.print)
    if watch is not None:
        follow(watch)
        watch.before_exit = locks.release
    if signals is not None:
        signals.before_exit = functools.partial(_stop_by_signal, locks, watch)
    with _start_failures(watch, locks), phases.phase("reading inputs and planning"):
        facts, plan = agreed_plan(request, environment, store, locks)
        planned = None if check_memory is None else _checked(check_memory, request, plan, environment, store)
    try:
        with allocation_errors(plan, lambda: phases.current, planned_bytes=planned):
            with phases.phase("joining process groups"):
                device, grid = _join_groups(plan, facts, environment, store, phases.console)
            if watch is not None:
                watch.heartbeat.start_seconds = plan.derived.startup_timeout_seconds
                watch.heartbeat.collective_calls = lambda: collective_calls(grid)
            yield Ranks(
                request=request,
                plan=plan,
                facts=facts,
                grid=grid,
                device=device,
                local_rank=environment.local_rank,
                phases=phases,
                watch=watch,
                signals=signals,
                planned_bytes=planned,
            )
        if store is not None:
            dist.barrier()  # a rank that exits early can abort the others
    except BaseException as error:
        if watch is not None:
            watch.fail(error)
        raise
    finally:
        phases.console.remove_bar()
        locks.release()
    if watch is not None:
        watch.leave()


@contextmanager
def _start_failures(watch: RankWatch | None, locks: SaveLocks) -> Iterator[None]:
    """Release the locks if the plan fails, and report an error that only this rank has."""
    try:
        yield
    except BaseException as error:
        if watch is not None and isinstance(error, MegatrainError):
            watch.leave()  # raised on all ranks, which exit on their own
        elif watch is not None:
            watch.fail(error)
        locks.release()
        raise


def _stop_by_signal(locks: SaveLocks, watch: RankWatch | None, exit_code: int, reason: str) -> None:
    """Release the locks, and end the other ranks, before a signal ends this process."""
    locks.release()
    if watch is not None:
        error = MegatrainError(reason, fix="run the same command again")
        error.exit_code = exit_code
        watch.fail(error)


def _checked(
    check_memory: PlannedBytes,
    request: Request,
    plan: Plan,
    environment: LaunchEnvironment,
    store: dist.Store | None,
) -> int:
    try:
        check_hf_folders(plan)
        return check_memory(plan, environment, store)
    except ConfigError as error:
        error.is_reported |= environment.rank > 0  # all ranks raise it
        if store is not None:
            exit_after_others(environment, store)
        if environment.rank == 0:
            write_failure(request, error)
        raise


def _join_groups(
    plan: Plan, facts: Facts, environment: LaunchEnvironment, store: dist.Store | None, console: Console
) -> tuple[torch.device, RankGrid]:
    """Select the device of this rank, and create and connect its process groups."""
    device = _select_device(plan, environment)
    set_cublas_workspace(plan.derived.cublas_workspace)
    if plan.config.training.deterministic_mode and device.type == "cuda":
        use_deterministic_operations()
    check_triton_cache(plan)
    start_imports(plan, console.print)
    if store is not None:
        _init_process_group(plan, environment, store, device)
    timeout = timedelta(seconds=plan.derived.startup_timeout_seconds)
    options = group_options(facts.nccl_options, plan.config.parallel.high_priority_stream_groups)
    make = functools.partial(make_group, timeout=timeout, options=options) if store is not None else None
    grid = build_grid(grid_shape(plan), environment.rank, make)
    _connect_groups(grid, device)
    return device, grid


def grid_shape(plan: Plan) -> GridShape:
    """Return the grid shape of a plan."""
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
        num_chunks=plan.derived.pipeline_chunks,
        is_v=PIPELINE_SCHEDULES[parallel.pipeline_schedule].is_v,
        ep=parallel.expert_model_parallel_size,
        ep_host=plan.config.experts.moe_alltoall_ranks_per_host,
        etp=None if plan.config.experts.num_experts is None else plan.derived.expert_tensor_parallel_size,
        pack_sizes=plan.derived.pack_group_sizes,
        order=STAGES_BEFORE_REPLICAS if parallel.use_tp_pp_dp_mapping else DEFAULT_ORDER,
        has_matrices=plan.config.optimizer.has_matrices,
    )
    if plan.later_embedding_stage is not None:
        is_tied = not plan.config.model.untie_embeddings_and_output_weights
        holders = embedding_ranks(shape.placement, is_tied=is_tied, later_stage=plan.later_embedding_stage)
        shape = dataclasses.replace(shape, embedding_ranks=holders)
    if parallel.data_parallel_sharding_strategy == "no_shard":
        return dataclasses.replace(shape, dp_copies=shape.replicas, expert_copies=shape.expert_replicas)
    instances = parallel.num_distributed_optimizer_instances
    return dataclasses.replace(shape, dp_copies=instances, expert_copies=instances)


def check_launch(environment: LaunchEnvironment, console: Console) -> None:
    """Print the launcher and its variables.

    Raises:
        ConfigError: the variables contradict each other, possibly those of this rank alone; or rank 0 may open too few files.
    """
    if environment.problems:
        raise ConfigError.of(environment.problems)
    files, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    if environment.rank == 0 and 0 <= files < environment.open_files:
        raise ConfigError(
            f"rank 0 may open {files:,} files, and the connections of {environment.world_size:,} ranks need"
            f" {environment.open_files:,}",
            fix=f"run `ulimit -n {environment.open_files}` on the host of rank 0, or set LimitNOFILE of the service that starts it",
        )
    if environment.launcher is not None:
        how = "variables set by hand" if environment.launcher == "hand" else environment.launcher
        console.print(f"> started by {how}: {environment.description}")
    elif environment.description:
        console.print(f"> one process: {environment.description}")


def join_store(environment: LaunchEnvironment) -> dist.Store:
    rank, world_size = environment.rank, environment.world_size
    if environment.store_port is not None:
        return dist.TCPStore(
            environment.host, environment.store_port, wait_for_workers=False, timeout=_RENDEZVOUS_TIMEOUT
        )
    try:
        store, _, _ = next(
            iter(dist.rendezvous(environment.rendezvous, rank, world_size, timeout=_RENDEZVOUS_TIMEOUT))
        )
    except dist.DistError as error:
        raise MegatrainError(
            f"rank {rank} of {world_size} cannot reach the rendezvous ({environment.description}): {error}",
            fix="set MASTER_ADDR to the host of rank 0 and MASTER_PORT to a free port of that host, on all ranks",
        ) from error
    prefixed: dist.Store = dist.PrefixStore(f"megatrain {environment.restart}", store)
    return prefixed


def _select_device(plan: Plan, environment: LaunchEnvironment) -> torch.device:
    if plan.config.training.device == "cpu":
        return torch.device("cpu")
    device = local_gpu(environment)
    torch.cuda.set_device(device)
    return device


def local_gpu(environment: LaunchEnvironment) -> torch.device:
    """Return the GPU of this rank."""
    sees_one_gpu = environment.binds_gpus and torch.cuda.device_count() == 1
    return torch.device("cuda", 0 if sees_one_gpu else environment.local_rank)


def _init_process_group(
    plan: Plan, environment: LaunchEnvironment, store: dist.Store, device: torch.device
) -> None:
    # Pipeline messages between two ranks have groups of their own, in which their order is what they need.
    set_unless_given("TORCH_NCCL_SHOW_EAGER_INIT_P2P_SERIALIZATION_WARNING", "false")
    if plan.derived.cuda_graphs and has_expandable_segments():
        # NCCL registers the buffers of a graph's collectives as one allocation each (pytorch issue 158029).
        set_unless_given("NCCL_GRAPH_REGISTER", "0")
    configure_flight_recorder(plan.config)
    if environment.store_port is not None:
        # NCCL's watchdog would end the process for the failure of another rank.
        set_unless_given("TORCH_NCCL_ASYNC_ERROR_HANDLING", "0")
    dist.init_process_group(
        plan.config.parallel.distributed_backend,
        store=store,
        rank=environment.rank,
        world_size=environment.world_size,
        timeout=timedelta(seconds=plan.derived.startup_timeout_seconds),
        device_id=device if device.type == "cuda" else None,
    )


def _connect_groups(grid: RankGrid, device: torch.device) -> None:
    """Run a collective in every group, so that a broken link fails at start and not during a step."""
    for group in groups_of(grid):
        count = all_reduce(torch.ones(1, device=device), group).item()
        assert count == group.size, f"{group.name} counts {count} of {group.size} ranks"


def use_deterministic_operations() -> None:
    """Make runs of a command on the same GPUs and versions bit-identical; call it before the first GEMM.

        the embedding's gradient (`index_add_`, atomics)     torch's deterministic kernel, which sorts rows first
        attention's backward pass                            deterministic mode of flash-attn-4 and of torch's flash kernels;
                                                             cuDNN's kernel is not used (`config/subjects/attention_kernel.py`)
        GEMMs (cuBLAS, shared work space)                    CUBLAS_WORKSPACE_CONFIG
        kernels of our own (`kernels/fused`)                 deterministic: sums over programs are a second pass
        sums of experts' outputs over ranks                  in the order of ranks: equal with either dispatcher on one host
        layers of Transformer Engine                         NVTE_ALLOW_NONDETERMINISTIC_ALGO=0; `local` computes attention
        any other operation                                  torch raises an error

    Sources: torch.use_deterministic_algorithms; cuBLAS, "Results Reproducibility".
    """
    set_cublas_workspace(DETERMINISTIC_WORKSPACES[0])
    set_unless_given("NVTE_ALLOW_NONDETERMINISTIC_ALGO", "0")
    torch.use_deterministic_algorithms(mode=True)
    # No kernel reads uninitialised memory.
    torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]
