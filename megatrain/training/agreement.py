"""One plan for all ranks, before any of them enters a collective; and no start where they do not agree.

    rank 0: facts, plan ──store──> every rank: the same plan, or an error ──> all may start

What all ranks find wrong is rank 0's to tell, once; what one rank finds alone (a file that is not on its node, other
flags, another version of the code or a library) it tells itself.
"""

from __future__ import annotations

import hashlib
import json
import platform
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

import torch.distributed as dist

import megatrain
from megatrain.config import Facts, Plan, Request, resolve
from megatrain.config.environment import LaunchEnvironment, read_environment
from megatrain.config.errors import ConfigError, MegatrainError, describe
from megatrain.config.tree import flag_of, settings
from megatrain.training.facts import gather_facts, library_versions
from megatrain.training.metrics import write_status

_SECONDS_TO_END: Final = 10.0
_SAME_COMMAND: Final = "start all ranks with the same command line and the same files"
_SAME_SOFTWARE: Final = "give all hosts the same code and the same packages"


def agreed_plan(
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


def failed_before(store: dist.Store) -> MegatrainError | None:
    """For a rank that comes so late that the others have ended: what they ended with, if they could not start."""
    if not store.check(["may start", "rank 0"]) or store.get("may start") == b"yes":
        return None
    return _told_elsewhere(json.loads(store.get("rank 0"))["exit_code"] or 2)


def _end_together(environment: LaunchEnvironment, store: dist.Store) -> None:
    """Rank 0 goes last: the store may be its own, and all ranks have yet to read in it that they shall end."""
    num_ended, deadline = store.add("ended", 1), time.monotonic() + _SECONDS_TO_END
    while environment.rank == 0 and num_ended < environment.world_size and time.monotonic() < deadline:
        time.sleep(0.05)
        num_ended = store.add("ended", 0)


def _plan_of_rank_0(
    request: Request, environment: LaunchEnvironment, store: dist.Store | None
) -> tuple[Facts, Plan]:
    """Facts are rank 0's alone, so that thousands of ranks neither read the same files nor disagree about them."""
    answer: dict[str, Any] = {"facts": None, "config": None, "problems": [], "exit_code": 0}
    answer["identity"] = identity() if store is not None else {}
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
    _require_same(identity(), answer["identity"], fix=_SAME_SOFTWARE)
    facts = Facts.from_json(answer["facts"])
    try:
        plan = resolve(request, facts)
    except ConfigError as error:
        error.is_told = [str(problem) for problem in error.problems] == answer["problems"]
        raise
    if answer["config"] is None:
        raise _told_elsewhere(answer["exit_code"])
    own = plan.config.to_dict()
    here = {flag_of(setting.name): own[setting.section][setting.name] for setting in settings()}
    there = {flag_of(s.name): answer["config"][s.section][s.name] for s in settings()}
    _require_same(here, there, fix=_SAME_COMMAND)
    return facts, plan


def _require_same(here: Mapping[str, Any], there: Mapping[str, Any], *, fix: str) -> None:
    """Raises ConfigError with all that differs from rank 0, in one line."""
    names = [name for name in {**there, **here} if here.get(name) != there.get(name)]
    if names:
        said = [
            f"{name} is {here.get(name, 'missing')} on this rank and {there.get(name, 'missing')} on rank 0"
            for name in names
        ]
        raise ConfigError("; ".join(said), fix=fix)


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
    error.is_told, error.exit_code = True, exit_code
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
