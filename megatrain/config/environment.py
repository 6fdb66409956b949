"""What the launcher says about this process. The one place that reads the environment, or sets it for libraries.

    torchrun   RANK WORLD_SIZE LOCAL_RANK LOCAL_WORLD_SIZE, with its own store
    mpirun     OMPI_COMM_WORLD_RANK ... (Open MPI), PMI_RANK ... and MPI_LOCALRANKID ... (MPICH, Intel MPI)
    srun       SLURM_PROCID SLURM_STEP_NUM_TASKS SLURM_LOCALID, first host of SLURM_STEP_NODELIST, port from SLURM_JOB_ID
    by hand    RANK WORLD_SIZE, and where they are wanted LOCAL_RANK LOCAL_WORLD_SIZE
    nothing    one process

The first of these whose variables are there is taken, by hand before all but torchrun. MASTER_ADDR and MASTER_PORT win
where they are set. A batch script's own variables (SLURM_* without SLURM_STEP_ID) start nothing.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from megatrain.config.errors import Problem

DEFAULT_PORT = 29500
_FIRST_DERIVED_PORT, _NUM_DERIVED_PORTS = 15000, 15000
"""Below those that systems hand out by themselves."""


@dataclass(frozen=True, kw_only=True)
class LaunchEnvironment:
    """One process among those that were started together; alone without a launcher."""

    rank: int = 0
    world_size: int = 1
    local_rank: int = 0
    """Among the ranks of its host."""
    local_world_size: int = 1
    launcher: str | None = None
    """None: nothing started several processes."""
    rendezvous: str = "env://"
    """Where the ranks meet, as torch.distributed names it."""
    host: str = "127.0.0.1"
    """Of rank 0."""
    error_file: str | None = None
    """Where torchrun looks for the reason of a failure."""
    binds_gpus: bool = False
    """Whether each process sees its own GPU alone."""
    cublas_workspace: str | None = None
    """CUBLAS_WORKSPACE_CONFIG, if it is set."""
    taken: str = ""
    """Which variables were believed, for the user."""
    problems: tuple[Problem, ...] = ()


@dataclass
class _Variables:
    """The environment, and what was found wrong in it."""

    values: Mapping[str, str]
    problems: list[Problem] = field(default_factory=list)

    def has(self, *names: str) -> bool:
        return all(self.values.get(name, "") != "" for name in names)

    def first(self, *names: str) -> str | None:
        """The name among these that is set."""
        return next((name for name in names if self.has(name)), None)

    def count(self, name: str, otherwise: int = 0) -> int:
        """A whole number from zero on, or `otherwise` where there is none."""
        text = self.values.get(name, "")
        if text.isdecimal():
            return int(text)
        if text:
            self.problems.append(Problem(f"{name} is {text!r}, not a whole number", f"set or unset {name}"))
        return otherwise


def read_environment(environment: Mapping[str, str] | None = None) -> LaunchEnvironment:
    """What started this process, and its place among the others."""
    variables = _Variables(os.environ if environment is None else environment)
    sources = tuple(_sources(variables))
    found = _found(sources[0], variables) if sources else _alone(variables)
    if sources:
        _check(found, sources, variables)
    workspace = variables.values.get("CUBLAS_WORKSPACE_CONFIG")
    return replace(found, cublas_workspace=workspace, problems=tuple(variables.problems))


@dataclass(frozen=True)
class _Source:
    """The names of one launcher's variables."""

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
    """Tell a library that reads the environment, unless the user has; what it will read."""
    return os.environ.setdefault(variable, value)


def user_cache() -> Path | None:
    """Where programs keep what they can make again: XDG_CACHE_HOME, or .cache in HOME; None: neither is set."""
    folder, home = os.environ.get("XDG_CACHE_HOME"), os.environ.get("HOME")
    if folder:
        return Path(folder)
    return Path(home) / ".cache" if home else None


def triton_cache() -> str | None:
    """Where Triton keeps what it compiles, by its knobs.py; None: another manager than its own takes care of that."""
    if "TRITON_CACHE_MANAGER" in os.environ:
        return None
    home = os.environ.get("TRITON_HOME", os.path.expanduser("~/"))  # noqa: PTH111 (it does not fail without a home)
    return os.environ.get("TRITON_CACHE_DIR", str(Path(home) / ".triton" / "cache"))


def _sources(variables: _Variables) -> Iterator[_Source]:
    """Everything that claims to know this process's place, the most trustworthy first."""
    if variables.has("RANK", "WORLD_SIZE"):
        is_torchrun = variables.has("TORCHELASTIC_RUN_ID")
        yield replace(_BY_HAND, launcher="torchrun") if is_torchrun else _BY_HAND
    for source in _MPI:
        if variables.has(source.rank, source.world_size, source.local_rank):
            yield source
    if variables.has("SLURM_PROCID") and variables.first("SLURM_STEP_ID", "SLURM_STEPID"):
        size = variables.first("SLURM_STEP_NUM_TASKS", "SLURM_NTASKS") or "SLURM_NTASKS"
        yield _Source("srun", "SLURM_PROCID", size, "SLURM_LOCALID")


def _found(source: _Source, variables: _Variables) -> LaunchEnvironment:
    rank, world_size = variables.count(source.rank), variables.count(source.world_size, 1)
    of_node = _tasks_of_node(variables, world_size) if source.launcher == "srun" else world_size
    found = LaunchEnvironment(
        rank=rank,
        world_size=world_size,
        local_rank=variables.count(source.local_rank, rank),
        local_world_size=variables.count(source.local_world_size, of_node),
        launcher=source.launcher,
        error_file=variables.values.get("TORCHELASTIC_ERROR_FILE"),
        binds_gpus=variables.has("SLURM_GPUS_PER_TASK")
        or "gpu" in variables.values.get("SLURM_TRES_PER_TASK", ""),
    )
    host, port, reason = _meeting_place(found, variables)
    taken = f"{source.rank} {rank}, {source.world_size} {world_size}; they meet at {host}:{port} ({reason})"
    rendezvous = "env://" if source.launcher == "torchrun" else f"tcp://{host}:{port}"
    return replace(found, host=host, rendezvous=rendezvous, taken=taken)


def _alone(variables: _Variables) -> LaunchEnvironment:
    """One process, unless something says half of what starts several."""
    size = variables.count("WORLD_SIZE", 1)
    if size > 1:
        variables.problems.append(
            Problem(
                f"WORLD_SIZE is {size}, and RANK is not set",
                "set RANK for each process, start them with torchrun, srun or mpirun, or unset WORLD_SIZE",
            )
        )
    tasks = variables.count("SLURM_NTASKS", 1) if variables.has("SLURM_JOB_ID") else 1
    taken = f"the Slurm job has {tasks} tasks, and srun did not start this process" if tasks > 1 else ""
    return LaunchEnvironment(taken=taken)


def _check(found: LaunchEnvironment, sources: Sequence[_Source], variables: _Variables) -> None:
    """What was taken makes sense, and what else there is agrees with it."""
    taken = sources[0]
    if not 0 <= found.rank < found.world_size:
        variables.problems.append(
            Problem(
                f"{taken.rank} {found.rank} is no rank of {taken.world_size} {found.world_size}",
                f"number the ranks from 0 to {found.world_size - 1}",
            )
        )
    if taken.launcher == "torchrun":
        return  # srun may start one torchrun a node: the two count different things
    # An mpirun in a Slurm job starts its daemons by srun, whose variables then say nothing about ranks.
    other = next(iter(sources[1:]), None) if taken is _BY_HAND else _BY_HAND
    if other is None:
        return
    for own, name, value in (
        (taken.world_size, other.world_size, found.world_size),
        (taken.rank, other.rank, found.rank),
    ):
        if variables.has(name) and variables.count(name) != value:
            by_hand = own if taken is _BY_HAND else name
            variables.problems.append(
                Problem(f"{own} is {value}, and {name} is {variables.values[name]}", f"unset {by_hand}")
            )


def _meeting_place(found: LaunchEnvironment, variables: _Variables) -> tuple[str, int, str]:
    """Where rank 0 waits for the others, and which variables say so."""
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
                f"MASTER_ADDR is not set, and {found.world_size} ranks on several hosts do not know where to meet",
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
    """The first host of Slurm's short form: `gpu[007-010,12],login1` -> `gpu007`."""
    first = re.match(r"(?:[^,\[]|\[[^\]]*\])*", nodes)
    assert first is not None, "it matches the empty text too"
    return re.sub(r"\[(\w+)[^\]]*\]", r"\1", first[0])


def _tasks_of_node(variables: _Variables, world_size: int) -> int:
    """Tasks of this process's node, from a list such as `8(x3),4`."""
    name = variables.first("SLURM_STEP_TASKS_PER_NODE", "SLURM_TASKS_PER_NODE")
    counts: list[int] = []
    for count, times in re.findall(r"(\d+)(?:\(x(\d+)\))?", variables.values[name] if name else ""):
        counts += [int(count)] * int(times or 1)
    node = variables.count("SLURM_NODEID")
    return counts[node] if node < len(counts) else world_size
