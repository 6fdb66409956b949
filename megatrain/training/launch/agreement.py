"""One plan for all ranks, before the first collective; the run does not start if ranks differ.

    every rank: same settings and software as rank 0? ──> rank 0: facts, plan ──> every rank: the same plan ──> start

A problem of a single rank (other flags, an unreadable file, another version of the code or of a library) is reported by that
rank. Only rank 0 reports problems that all ranks share.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import platform
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import torch.distributed as dist

import megatrain
from megatrain.config import Facts, Plan, Request, resolve
from megatrain.config.environment import LaunchEnvironment
from megatrain.config.errors import ConfigError, MegatrainError, Problem
from megatrain.config.schema.tree import settings
from megatrain.config.schema.values import INVALID, is_resolved
from megatrain.training.launch.facts import gather_facts, library_versions
from megatrain.training.launch.local_checkpoints import share_newest_manifest
from megatrain.training.launch.refusal import print_error, write_failure
from megatrain.training.launch.save_lock import SaveLocks
from megatrain.training.launch.user_files import require_results, results_of, with_own_files

_SECONDS_TO_EXIT: Final = 10.0
_SAME_COMMAND: Final = "start all ranks with the same command line and the same files"
_SAME_SOFTWARE: Final = "install the same code and packages on all hosts"


def agreed_plan(
    request: Request, environment: LaunchEnvironment, store: dist.Store | None, locks: SaveLocks
) -> tuple[Facts, Plan]:
    """Return facts and plan, equal on all ranks; an error on one rank is raised on all. Rank 0 then holds the locks."""
    try:
        if store is not None:
            _compare_with_rank_0(request, environment, store)
        if store is None or environment.rank == 0:
            agreed = _plan_of_rank_0(request, environment, store, locks)
        else:
            agreed = _plan_of_another_rank(request, environment, store)
    except MegatrainError as error:
        if not error.is_reported:
            _report(error)
        if store is not None:
            store.set("start", "no")
            exit_after_others(environment, store)
        raise
    if store is not None:
        if store.add("ready", 1) == environment.world_size:
            store.set("start", "yes")
        if store.get("start") != b"yes":
            elsewhere = _reported_elsewhere(2)
            exit_after_others(environment, store)
            if environment.rank == 0:
                write_failure(request, elsewhere)
            raise elsewhere
    return agreed


def exit_after_others(environment: LaunchEnvironment, store: dist.Store) -> None:
    """Keep rank 0 alive until the others have read the outcome: the store may be in its process."""
    num_exited, deadline = store.add("exited", 1), time.monotonic() + _SECONDS_TO_EXIT
    while environment.rank == 0 and num_exited < environment.world_size and time.monotonic() < deadline:
        time.sleep(0.05)
        num_exited = store.add("exited", 0)


def _compare_with_rank_0(request: Request, environment: LaunchEnvironment, store: dist.Store) -> None:
    """Compare settings and software of all ranks with rank 0.

    Raises:
        ConfigError: on all ranks if one differs; the ranks that differ have reported it.
    """
    own = _StartSettings(
        num_ranks=environment.world_size,
        software=identity(),
        values=_values(request, environment),
        problems=[[problem.text, problem.fix] for problem in request.problems],
        is_complete=request.is_complete,
    )
    if environment.rank == 0:
        store.set("settings", json.dumps(dataclasses.asdict(own)))
    of_rank_0 = _StartSettings(**json.loads(store.get("settings")))
    error: MegatrainError | None = _difference(own, of_rank_0)
    if error is not None:
        _report(error)
        store.set("differ", "yes")
    if store.add("compared", 1) == of_rank_0.num_ranks:
        store.set("all compared", "yes")
    store.wait(["all compared"])
    if error is None and store.check(["differ"]):
        error = _reported_elsewhere(2)
        if environment.rank == 0:
            write_failure(request, error)
    if error is not None:
        raise error


@dataclass(frozen=True, kw_only=True)
class _StartSettings:
    """Settings and software of a rank, as JSON values."""

    num_ranks: int
    software: dict[str, str]
    values: dict[str, Any]
    """Given values by flag or variable; invalid ones are left out."""
    problems: list[list[str]]
    """Problem and fix of each invalid flag or file."""
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
        return {"AUTO": "not set", "REQUIRED": "missing"}[repr(value)]
    return list(value) if isinstance(value, tuple) else value


def _difference(own: _StartSettings, of_rank_0: _StartSettings) -> ConfigError | None:
    """Return the error of a rank that differs from rank 0, or None. Problems of rank 0 alone are left to rank 0."""
    if own.software != of_rank_0.software:
        return _difference_error(own.software, of_rank_0.software, fix=_SAME_SOFTWARE)
    problems = [Problem(*problem) for problem in own.problems if problem not in of_rank_0.problems]
    if problems:
        return ConfigError.of(problems)
    if not of_rank_0.is_complete:
        return None
    names = [name for name in own.values if name in of_rank_0.values]
    here, there = ({name: asked.values[name] for name in names} for asked in (own, of_rank_0))
    return _difference_error(here, there, fix=_SAME_COMMAND) if here != there else None


def _plan_of_rank_0(
    request: Request, environment: LaunchEnvironment, store: dist.Store | None, locks: SaveLocks
) -> tuple[Facts, Plan]:
    """Gather the facts and store them with the plan: only rank 0 reads files, so that ranks cannot disagree about them."""
    answer: dict[str, Any] = {"facts": None, "config": None, "results": {}, "problems": [], "exit_code": 0}
    try:
        share_newest_manifest(request, environment, store)
        facts = gather_facts(request, environment)
        answer["facts"] = facts.to_json()
        plan = resolve(request, facts)
        if facts.untokenized:  # after all other problems are reported
            facts = gather_facts(request, environment, tokenizes=True)
            answer["facts"] = facts.to_json()
            plan = resolve(request, facts)
        answer["results"] = results_of(plan)
        locks.acquire()
        answer["config"] = plan.config.to_dict()
    except MegatrainError as error:
        _report(error)
        answer |= {"problems": [str(problem) for problem in error.problems], "exit_code": error.exit_code}
        write_failure(request, error)
        raise
    finally:
        if store is not None:
            store.set("rank 0", json.dumps(answer))
    return facts, plan


def _plan_of_another_rank(
    request: Request, environment: LaunchEnvironment, store: dist.Store
) -> tuple[Facts, Plan]:
    share_newest_manifest(request, environment, store)
    answer = json.loads(store.get("rank 0"))
    if answer["facts"] is None:
        raise _reported_elsewhere(answer["exit_code"])
    try:
        facts = with_own_files(request, Facts.from_json(answer["facts"]))
        plan = resolve(request, facts)
    except ConfigError as error:
        error.is_reported = [str(problem) for problem in error.problems] == answer["problems"]
        raise
    if answer["config"] is None:
        raise _reported_elsewhere(answer["exit_code"])
    require_results(plan, answer["results"])
    return facts, plan


def _difference_error(here: Mapping[str, Any], there: Mapping[str, Any], *, fix: str) -> ConfigError:
    """Return an error that lists all differences from rank 0 in one line."""
    differences = [
        f"{name} is {here.get(name, 'missing')} on this rank and {there.get(name, 'missing')} on rank 0"
        for name in {**there, **here}
        if here.get(name) != there.get(name)
    ]
    return ConfigError("; ".join(differences), fix=fix)


def identity() -> dict[str, str]:
    """Return the versions of Python, libraries and megatrain's own files."""
    digest = hashlib.sha256()
    folder = Path(megatrain.__file__).parent
    for path in sorted(folder.rglob("*.py")):
        digest.update(str(path.relative_to(folder)).encode() + b"\0" + path.read_bytes())
    return {
        "megatrain's code": f"{megatrain.__version__} ({digest.hexdigest()[:12]})",
        "Python": platform.python_version(),
        **library_versions(),
    }


def _report(error: MegatrainError) -> None:
    """Print an error before another rank exits: the launcher then kills this one."""
    print_error(error)
    error.is_reported = True


def _reported_elsewhere(exit_code: int) -> MegatrainError:
    error = MegatrainError(
        "another rank could not start", fix="see the message of that rank", is_reported=True
    )
    error.exit_code = exit_code
    return error
