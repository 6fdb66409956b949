"""Environment variables: those of the launcher, and those of libraries. No other module reads or sets any.

    torchrun   RANK WORLD_SIZE LOCAL_RANK LOCAL_WORLD_SIZE, with its own store
    mpirun     OMPI_COMM_WORLD_RANK ... (Open MPI), PMI_RANK ... and MPI_LOCALRANKID ... (MPICH, Intel MPI)
    srun       SLURM_PROCID SLURM_STEP_NUM_TASKS SLURM_LOCALID, first host of SLURM_STEP_NODELIST, port from SLURM_JOB_ID
    by hand    RANK WORLD_SIZE, and optionally LOCAL_RANK LOCAL_WORLD_SIZE
    none       one process

The first launcher with all its variables set is used; "by hand" precedes all but torchrun. MASTER_ADDR and MASTER_PORT
have precedence for the rendezvous. Variables of a batch script alone (SLURM_* without SLURM_STEP_ID) are ignored.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from megatrain.config.errors import Problem

DEFAULT_PORT = 29500
NO_WORKSPACE = ":0:0"
"""CUBLAS_WORKSPACE_CONFIG without a workspace."""
DETERMINISTIC_WORKSPACES = (":4096:8", ":16:8")
"""Values with which cuBLAS is deterministic; the first has buffers as large as on Hopper by default."""
_WORKSPACE, _WORKSPACE_OF_LT = "CUBLAS_WORKSPACE_CONFIG", "CUBLASLT_WORKSPACE_SIZE"
_OWN_WORKSPACE = "MEGATRAIN_CUBLAS_WORKSPACE"
"""Set with `_WORKSPACE` by a rank, and no user: ranks join again after a restart in the job."""
_FIRST_DERIVED_PORT, _NUM_DERIVED_PORTS = 15000, 15000
"""Range of ports below the ephemeral ports of operating systems."""
_SHORTEST_SECRET = 6
_SUPERVISOR, _GENERATION = "MEGATRAIN_SUPERVISOR", "MEGATRAIN_GENERATION"


@dataclass(frozen=True, kw_only=True)
class LaunchEnvironment:
    """Rank of this process and rendezvous of all; one process without a launcher."""

    rank: int = 0
    world_size: int = 1
    local_rank: int = 0
    """Rank among those of its host."""
    local_world_size: int = 1
    launcher: str | None = None
    """Name of the launcher; None: a single process."""
    rendezvous: str = "env://"
    """Init method for torch.distributed."""
    host: str = "127.0.0.1"
    """Host of rank 0."""
    port: int = DEFAULT_PORT
    """Port of the rendezvous."""
    error_file: str | None = None
    """File in which torchrun expects the reason of a failure."""
    restart: int = 0
    """Number of times that torchrun has started the ranks again (--max-restarts); its store keeps the keys of earlier starts."""
    binds_gpus: bool = False
    """True if each process sees only its own GPU."""
    cublas_workspace: str | None = None
    """CUBLAS_WORKSPACE_CONFIG; None: not set."""
    description: str = ""
    """Variables in effect, for the log."""
    supervisor: int | None = None
    """Port of the rendezvous of generations, 0 for all but the first process of the job; None: no supervisor (--inprocess-restart)."""
    store_port: int | None = None
    """Port of the store of this process's generation; None: the launcher's store."""
    problems: tuple[Problem, ...] = ()

    @property
    def open_files(self) -> int:
        """Files that rank 0 may open: two connections of each rank to the store, one to the watch server, and its own."""
        return 3 * self.world_size + 512


@dataclass
class _Variables:
    """The environment, and the problems found in it."""

    values: Mapping[str, str]
    problems: list[Problem] = field(default_factory=list)

    def has(self, *names: str) -> bool:
        return all(self.values.get(name, "") != "" for name in names)

    def first(self, *names: str) -> str | None:
        """Return the first of these names that is set."""
        return next((name for name in names if self.has(name)), None)

    def count(self, name: str, otherwise: int = 0) -> int:
        """Return a variable as a whole number; `otherwise` if it is not set."""
        text = self.values.get(name, "")
        if text.isdecimal():
            return int(text)
        if text:
            self.problems.append(Problem(f"{name} is {text!r}, not a whole number", f"set or unset {name}"))
        return otherwise


def read_environment(environment: Mapping[str, str] | None = None) -> LaunchEnvironment:
    """Return the launch environment of this process."""
    variables = _Variables(os.environ if environment is None else environment)
    sources = tuple(_sources(variables))
    found = _from_launcher(sources[0], variables) if sources else _single_process(variables)
    if sources:
        _check(found, sources, variables)
    if variables.has(_GENERATION):
        rank, world_size, port = map(int, variables.values[_GENERATION].split())
        found = replace(found, rank=rank, world_size=world_size, store_port=port)
    return replace(
        found,
        cublas_workspace=None if variables.has(_OWN_WORKSPACE) else variables.values.get(_WORKSPACE),
        supervisor=variables.count(_SUPERVISOR) if variables.has(_SUPERVISOR) else None,
        problems=tuple(variables.problems),
    )


def supervised(port: int) -> dict[str, str]:
    """Return the variables of a process that a supervisor starts; `port`: see `LaunchEnvironment.supervisor`."""
    return {**os.environ, _SUPERVISOR: str(port)}


def enter_generation(*, rank: int, world_size: int, store_port: int) -> None:
    """Make this process a rank of a generation: `read_environment` returns these numbers instead of the launcher's."""
    os.environ[_GENERATION] = f"{rank} {world_size} {store_port}"


@dataclass(frozen=True)
class _Source:
    """Variable names of a launcher."""

    launcher: str
    rank: str
    world_size: str
    local_rank: str
    local_world_size: str = ""


_BY_HAND = _Source("hand", "RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE")
_MPI = (
    _Source("mpirun", *(f"OMPI_COMM_WORLD_{name}" for name in ("RANK", "SIZE", "LOCAL_RANK", "LOCAL_SIZE"))),
    _Source("mpirun", "PMI_RANK", "PMI_SIZE", "MPI_LOCALRANKID", "MPI_LOCALNRANKS"),
)


def set_unless_given(variable: str, value: str) -> str:
    """Set a variable for a library unless the user has set it. Return its value."""
    return os.environ.setdefault(variable, value)


def set_cublas_workspace(value: str | None) -> None:
    """Set the workspace of GEMMs unless the user has set it; None: cuBLAS's default. torch reads it at the first GEMM of a process."""
    is_own = _OWN_WORKSPACE in os.environ
    if _WORKSPACE in os.environ and not is_own:
        return
    if is_own:
        for name in (_OWN_WORKSPACE, _WORKSPACE, _WORKSPACE_OF_LT):
            os.environ.pop(name, None)
    if value is not None:
        os.environ[_OWN_WORKSPACE] = os.environ[_WORKSPACE] = value
    if value == NO_WORKSPACE:
        set_unless_given(_WORKSPACE_OF_LT, "0")


def has_expandable_segments() -> bool:
    """Return whether the user has set that torch's allocator extends memory in pieces."""
    names = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF")
    return any("expandable_segments:True" in os.environ.get(name, "") for name in names)


def without_secrets(text: str) -> str:
    """Return an error of another program without keys of the environment and passwords of URLs, which it may quote."""
    for name, value in os.environ.items():
        if re.search("KEY|TOKEN|PASSWORD|SECRET", name, re.IGNORECASE) and len(value) >= _SHORTEST_SECRET:
            text = text.replace(value, f"<{name}>")
    return re.sub(r"://[^/@\s]*@", "://", text)


def user_cache() -> Path | None:
    """Return the cache folder of the user: XDG_CACHE_HOME, or .cache in HOME; None: neither is set."""
    folder, home = os.environ.get("XDG_CACHE_HOME"), os.environ.get("HOME")
    if folder:
        return Path(folder)
    return Path(home) / ".cache" if home else None


def triton_cache() -> str | None:
    """Return the cache folder of Triton, by its knobs.py; None: the cache has a custom manager."""
    if "TRITON_CACHE_MANAGER" in os.environ:
        return None
    home = os.environ.get("TRITON_HOME", os.path.expanduser("~/"))  # noqa: PTH111 (it does not fail without a home)
    return os.environ.get("TRITON_CACHE_DIR", str(Path(home) / ".triton" / "cache"))


def _sources(variables: _Variables) -> Iterator[_Source]:
    """Iterate over the launchers whose variables are set, in order of precedence."""
    if variables.has("RANK", "WORLD_SIZE"):
        is_torchrun = variables.has("TORCHELASTIC_RUN_ID")
        yield replace(_BY_HAND, launcher="torchrun") if is_torchrun else _BY_HAND
    for source in _MPI:
        if variables.has(source.rank, source.world_size, source.local_rank):
            yield source
    if variables.has("SLURM_PROCID") and variables.first("SLURM_STEP_ID", "SLURM_STEPID"):
        size = variables.first("SLURM_STEP_NUM_TASKS", "SLURM_NTASKS") or "SLURM_NTASKS"
        yield _Source("srun", "SLURM_PROCID", size, "SLURM_LOCALID")


def _from_launcher(source: _Source, variables: _Variables) -> LaunchEnvironment:
    rank, world_size = variables.count(source.rank), variables.count(source.world_size, 1)
    node_size = _tasks_of_node(variables, world_size) if source.launcher == "srun" else world_size
    found = LaunchEnvironment(
        rank=rank,
        world_size=world_size,
        local_rank=variables.count(source.local_rank, rank),
        local_world_size=variables.count(source.local_world_size, node_size),
        launcher=source.launcher,
        error_file=variables.values.get("TORCHELASTIC_ERROR_FILE"),
        restart=variables.count("TORCHELASTIC_RESTART_COUNT") if source.launcher == "torchrun" else 0,
        binds_gpus=source.launcher != "torchrun"
        and (
            variables.has("SLURM_GPUS_PER_TASK") or "gpu" in variables.values.get("SLURM_TRES_PER_TASK", "")
        ),
    )
    host, port, reason = _rendezvous(found, variables)
    description = (
        f"{source.rank} {rank}, {source.world_size} {world_size}; rendezvous at {host}:{port} ({reason})"
    )
    rendezvous = f"tcp://{host}:{port}"
    if source.launcher == "torchrun":
        rendezvous = "env://"
        description += _idle_nodes(found, variables)
    return replace(found, host=host, port=port, rendezvous=rendezvous, description=description)


def _idle_nodes(found: LaunchEnvironment, variables: _Variables) -> str:
    """Return that a job has more nodes than its torchrun; with srun, each of them trains a run of its own."""
    name = variables.first("SLURM_STEP_NUM_NODES", "SLURM_JOB_NUM_NODES", "SLURM_NNODES")
    nodes, used = variables.count(name) if name else 1, found.world_size // max(found.local_world_size, 1)
    return f"; {name} is {nodes}, and torchrun (--nnodes) has {max(used, 1)}" if nodes > max(used, 1) else ""


def _single_process(variables: _Variables) -> LaunchEnvironment:
    """Return the environment of one process. Report variables of an incomplete launch."""
    size = variables.count("WORLD_SIZE", 1)
    if size > 1:
        variables.problems.append(
            Problem(
                f"WORLD_SIZE is {size}, and RANK is not set",
                "set RANK for each process, start them with torchrun, srun or mpirun, or unset WORLD_SIZE",
            )
        )
    tasks = variables.count("SLURM_NTASKS", 1) if variables.has("SLURM_JOB_ID") else 1
    description = f"the Slurm job has {tasks} tasks, and srun did not start this process" if tasks > 1 else ""
    return LaunchEnvironment(description=description)


def _check(found: LaunchEnvironment, sources: Sequence[_Source], variables: _Variables) -> None:
    """Report a rank out of range, and variables of another launcher that differ."""
    used = sources[0]
    if not 0 <= found.rank < found.world_size:
        variables.problems.append(
            Problem(
                f"{used.rank} {found.rank} is not below {used.world_size} {found.world_size}",
                f"number the ranks from 0 to {found.world_size - 1}",
            )
        )
    if used.launcher == "torchrun":
        return  # srun may start one torchrun per node: their counts differ
    # mpirun in a Slurm job starts its daemons with srun, whose variables then do not describe ranks.
    other = next(iter(sources[1:]), None) if used is _BY_HAND else _BY_HAND
    if other is None:
        return
    for used_name, name, value in (
        (used.world_size, other.world_size, found.world_size),
        (used.rank, other.rank, found.rank),
    ):
        if variables.has(name) and variables.count(name) != value:
            by_hand = used_name if used is _BY_HAND else name
            variables.problems.append(
                Problem(f"{used_name} is {value}, and {name} is {variables.values[name]}", f"unset {by_hand}")
            )


def _rendezvous(found: LaunchEnvironment, variables: _Variables) -> tuple[str, int, str]:
    """Return host and port of rank 0, and the variables that they are from."""
    nodes = variables.first("SLURM_STEP_NODELIST", "SLURM_JOB_NODELIST")
    job = variables.first("SLURM_JOB_ID", "SLURM_JOBID", "PBS_JOBID", "LSB_JOBID")
    host, source = variables.values.get("MASTER_ADDR", ""), "MASTER_ADDR"
    if not host and nodes and found.launcher != "hand":
        host, source = first_host(variables.values[nodes]), nodes
    if not host and found.local_world_size >= found.world_size:
        host, source = "127.0.0.1", "all ranks are on one host"
    if not host:
        variables.problems.append(
            Problem(
                f"MASTER_ADDR is not set, and {found.world_size} ranks on several hosts have no rendezvous",
                "set MASTER_ADDR to the host of rank 0, such as with mpirun -x MASTER_ADDR=HOST",
            )
        )
    if variables.has("MASTER_PORT"):
        return host, variables.count("MASTER_PORT"), f"{source}, MASTER_PORT"
    digits = re.match(r"\d+", variables.values[job]) if job else None
    if digits:
        port = _FIRST_DERIVED_PORT + int(digits[0]) % _NUM_DERIVED_PORTS
        return host, port, f"{source}, {job}"
    return host, DEFAULT_PORT, source


def first_host(nodes: str) -> str:
    """Return the first host of Slurm's compressed list: `gpu[007-010,12],login1` -> `gpu007`."""
    first = re.match(r"(?:[^,\[]|\[[^\]]*\])*", nodes)
    assert first is not None, "the pattern matches the empty string"
    return re.sub(r"\[(\w+)[^\]]*\]", r"\1", first[0])


def _tasks_of_node(variables: _Variables, world_size: int) -> int:
    """Return the number of tasks of this node, from a list such as `8(x3),4`."""
    name = variables.first("SLURM_STEP_TASKS_PER_NODE", "SLURM_TASKS_PER_NODE")
    counts: list[int] = []
    for count, times in re.findall(r"(\d+)(?:\(x(\d+)\))?", variables.values[name] if name else ""):
        counts += [int(count)] * int(times or 1)
    node = variables.count("SLURM_NODEID")
    return counts[node] if node < len(counts) else world_size
