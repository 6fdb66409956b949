"""What can be wrong with a checkpoint, and how the ranks come to one view of it.

    every rank: work -> its result or its error -> gather -> all go on with the results, or all raise

CheckpointError     could not be written or read
  DamagedError      is not what was written: an older one may do instead
  MismatchError     is whole, but not of this model: no other one would do either
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from megatrain.config.errors import MegatrainError
from megatrain.parallel.messages import Messages


class CheckpointError(MegatrainError):
    """A checkpoint could not be written or read."""


class DamagedError(CheckpointError):
    """A checkpoint is not what was once written. The problem names the file, and the tensor where there is one."""

    def __init__(self, problem: str) -> None:
        super().__init__(problem, fix="load an older checkpoint, or restore this one from a backup")


class MismatchError(CheckpointError):
    """A whole checkpoint that this model or this program cannot take."""


def agree(
    work: Callable[[], Any], messages: Messages, then: Callable[[list[Any]], Any] = lambda _: None
) -> Any:
    """Do `work` on every rank, and `then` on rank 0 with all results (anything that JSON holds), by rank.

    Returns:
        What `then` returns, on all ranks.

    Raises:
        CheckpointError: on all ranks, where any failed: a mismatch before damage before the rest.
    """
    value, failure = None, None
    try:
        value = work()
    except Exception as error:  # noqa: BLE001 (whatever happened here, the others wait for an answer)
        failure = error
    answers = messages.gather({"value": value, "failure": _described(failure)})
    failures = [(*answer["failure"], rank) for rank, answer in enumerate(answers) if answer["failure"]]
    result = None
    if answers and not failures:
        try:
            result = then([answer["value"] for answer in answers])
        except Exception as error:  # noqa: BLE001
            failure = error
            failures = [(*described, 0) for described in [_described(error)] if described]
    worst = min(failures, key=lambda described: described[0], default=None)
    result, worst = messages.share([result, worst])
    if worst is None:
        return result
    severity, problem, fix, rank = worst
    where = f"rank {rank}: " if messages.size > 1 else ""
    if severity == 0:
        raise MismatchError(where + problem, fix=fix) from failure
    if severity == 1:
        raise DamagedError(where + problem) from failure
    raise CheckpointError(where + problem, fix=fix) from failure


def _described(failure: Exception | None) -> tuple[int, str, str] | None:
    """How grave, what is wrong, what to do. The least number wins."""
    if failure is None:
        return None
    severity = 0 if isinstance(failure, MismatchError) else 1 if isinstance(failure, DamagedError) else 2
    if isinstance(failure, MegatrainError):
        return severity, failure.problems[0].text, failure.problems[0].fix
    if isinstance(failure, OSError):
        name = f"{failure.filename}: " if failure.filename else ""
        fix = "free space or mend the storage, and see that all nodes share the folder; older checkpoints are intact"
        return severity, f"{name}{failure.strerror or failure} (errno {failure.errno})", fix
    return (
        severity,
        f"{type(failure).__name__}: {failure}",
        "this is a bug: please report it with the traceback",
    )
