"""One plan for all ranks, before any of them enters a collective; and no start where they do not agree.

    every rank: asked for the same as rank 0? ──> rank 0: facts, plan ──> every rank: the same plan ──> all may start

What one rank has alone (other flags, a file that cannot be read on its node, another version of the code or a library)
it tells itself, before anything follows from it. What all ranks find wrong is rank 0's to tell, once.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import platform
import sys
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import torch.distributed as dist

import megatrain
from megatrain.config import Facts, Plan, Request, resolve
from megatrain.config.environment import LaunchEnvironment, read_environment
from megatrain.config.errors import ConfigError, MegatrainError, Problem, describe
from megatrain.config.schema.tree import settings
from megatrain.config.schema.values import INVALID, is_resolved
from megatrain.training.launch.facts import gather_facts, library_versions
from megatrain.training.logging.status_file import write_status

_SECONDS_TO_END: Final = 10.0
_SAME_COMMAND: Final = "start all ranks with the same command line and the same files"
_SAME_SOFTWARE: Final = "give all hosts the same code and the same packages"


def agreed_plan(
    request: Request, environment: LaunchEnvironment, store: dist.Store | None
) -> tuple[Facts, Plan]:
    """Facts and plan, equal on all ranks; an error on any of them is an error on all."""
    try:
        if store is not None:
            _compare(request, environment, store)
        if store is None or environment.rank == 0:
            agreed = _plan_of_rank_0(request, environment, store)
        else:
            agreed = _plan_of_another_rank(request, store)
    except MegatrainError as error:
        if not error.is_reported:
            tell(error)
            error.is_reported = True
        if store is not None:
            store.set("may start", "no")
            _end_together(environment, store)
        raise
    if store is not None:
        if store.add("ready", 1) == environment.world_size:
            store.set("may start", "yes")
        if store.get("may start") != b"yes":
            elsewhere = _told_elsewhere(2)
            _end_together(environment, store)
            if environment.rank == 0:
                _write_failure(request, elsewhere)
            raise elsewhere
    return agreed


def _end_together(environment: LaunchEnvironment, store: dist.Store) -> None:
    """Rank 0 goes last: the store may be its own, and all ranks have yet to read in it that they shall end."""
    num_ended, deadline = store.add("ended", 1), time.monotonic() + _SECONDS_TO_END
    while environment.rank == 0 and num_ended < environment.world_size and time.monotonic() < deadline:
        time.sleep(0.05)
        num_ended = store.add("ended", 0)


def _compare(request: Request, environment: LaunchEnvironment, store: dist.Store) -> None:
    """Returns once all ranks were found to have been asked for the same, by the same software.

    Raises:
        ConfigError: they were not. Whoever differs from rank 0 has told it.
    """
    own = _Asked(
        num_ranks=environment.world_size,
        software=identity(),
        values=_values(request, environment),
        problems=[[problem.text, problem.fix] for problem in request.problems],
        is_complete=request.is_complete,
    )
    if environment.rank == 0:
        store.set("asked", json.dumps(dataclasses.asdict(own)))
    of_rank_0 = _Asked(**json.loads(store.get("asked")))
    error: MegatrainError | None = _difference(own, of_rank_0)
    if error is not None:
        tell(error)  # before another rank can end, upon which the launcher would stop this one
        error.is_reported = True
        store.set("not the same", "yes")
    if store.add("compared", 1) == of_rank_0.num_ranks:
        store.set("all have compared", "yes")
    store.wait(["all have compared"])
    if error is None and store.check(["not the same"]):
        error = _told_elsewhere(2)
        if environment.rank == 0:
            _write_failure(request, error)
    if error is not None:
        raise error


@dataclass(frozen=True, kw_only=True)
class _Asked:
    """What a rank was started with. Survives JSON as it is."""

    num_ranks: int
    software: dict[str, str]
    values: dict[str, Any]
    """By flag or variable, before anything is derived; without those that could not be understood."""
    problems: list[list[str]]
    """What was wrong with flags and files of settings, and what to do about each."""
    is_complete: bool


def _values(request: Request, environment: LaunchEnvironment) -> dict[str, Any]:
    given = {setting.flag: request.config.raw(setting.path) for setting in settings()}
    plain = {flag: _plain(value) for flag, value in given.items() if value is not INVALID}
    return plain | {
        "number of ranks": environment.world_size,
        "CUBLAS_WORKSPACE_CONFIG": environment.cublas_workspace or "not set",
    }


def _plain(value: Any) -> Any:
    if not is_resolved(value):
        return {"AUTO": "left open", "REQUIRED": "missing"}[repr(value)]
    return list(value) if isinstance(value, tuple) else value


def _difference(own: _Asked, of_rank_0: _Asked) -> ConfigError | None:
    """What is to be told of a rank that was not started as rank 0 was; what rank 0 alone has wrong, it tells itself."""
    if own.software != of_rank_0.software:
        return _differing(own.software, of_rank_0.software, fix=_SAME_SOFTWARE)
    problems = [Problem(*problem) for problem in own.problems if problem not in of_rank_0.problems]
    if problems:
        return ConfigError.of(problems)
    if not of_rank_0.is_complete:
        return None
    names = [name for name in own.values if name in of_rank_0.values]
    here, there = ({name: asked.values[name] for name in names} for asked in (own, of_rank_0))
    return _differing(here, there, fix=_SAME_COMMAND) if here != there else None


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
        error.is_reported = True
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
        error.is_reported = [str(problem) for problem in error.problems] == answer["problems"]
        raise
    if answer["config"] is None:
        raise _told_elsewhere(answer["exit_code"])
    return facts, plan


def _differing(here: Mapping[str, Any], there: Mapping[str, Any], *, fix: str) -> ConfigError:
    """With all that differs from rank 0, in one line."""
    said = [
        f"{name} is {here.get(name, 'missing')} on this rank and {there.get(name, 'missing')} on rank 0"
        for name in {**there, **here}
        if here.get(name) != there.get(name)
    ]
    return ConfigError("; ".join(said), fix=fix)


def identity() -> dict[str, str]:
    """What runs here: Python, libraries, and this program's own files."""
    digest = hashlib.sha256()
    folder = Path(megatrain.__file__).parent
    for path in sorted(folder.rglob("*.py")):
        digest.update(str(path.relative_to(folder)).encode() + b"\0" + path.read_bytes())
    return {
        "megatrain's code": f"{megatrain.__version__} ({digest.hexdigest()[:12]})",
        "Python": platform.python_version(),
        **library_versions(),
    }


def _told_elsewhere(exit_code: int) -> MegatrainError:
    error = MegatrainError("another rank could not start", fix="see its message")
    error.is_reported, error.exit_code = True, exit_code
    return error


def _write_failure(request: Request, error: MegatrainError) -> None:
    """`status.json` for a run that did not start, where --save names a folder that is there."""
    save = request.known("checkpoint.save")
    if save is not None and Path(save).is_dir():
        write_status(Path(save), exit_code=error.exit_code, reason=error.problems[0].text, iteration=None)


def tell(error: MegatrainError) -> None:
    """Print an error, under this rank's number where it is not rank 0."""
    rank = read_environment().rank
    sys.stdout.flush()
    print(f"{f'rank {rank}: ' if rank else ''}{describe(error)}", file=sys.stderr, flush=True)
