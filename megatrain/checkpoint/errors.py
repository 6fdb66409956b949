"""Errors of checkpoints, raised on all ranks together.

    every rank: work -> result or error -> gather -> all ranks continue, or all raise

CheckpointError        the checkpoint could not be written or read
  DamagedError         the files differ from what was written: an older checkpoint may be intact
    DamagedImportError   the same, in a folder of another program
  MismatchError        an intact checkpoint of another model or program: older ones do not fit either
  NoFolderError        a path that a command names is no folder
  NotFiniteStateError  weights or optimizer state must not become a checkpoint: the next save fails, too
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final

from megatrain.config.errors import MegatrainError
from megatrain.parallel.messages import Messages

LOAD_FIX = "load it into the model that it was saved from"
STORAGE_FIX = "free space or repair the storage, and check that all nodes share the folder; older checkpoints are intact"


class CheckpointError(MegatrainError):
    """A checkpoint could not be written or read."""


class DamagedError(CheckpointError):
    """The files of a checkpoint differ from what was written. The problem names the file, and the tensor if there is one."""

    def __init__(
        self, problem: str, *, fix: str = "load an older checkpoint, or restore this one from a backup"
    ) -> None:
        super().__init__(problem, fix=fix)


class DamagedImportError(DamagedError):
    """Files of another program that are damaged or hostile: the command was given the wrong folder."""

    exit_code = 2

    def __init__(
        self, problem: str, *, fix: str = "restore the checkpoint from a backup, or choose another one"
    ) -> None:
        super().__init__(problem, fix=fix)


class MismatchError(CheckpointError):
    """An intact checkpoint of another model or a newer program: the command and the checkpoint do not fit."""

    exit_code = 2


class NoFolderError(CheckpointError):
    """A path that a command names is no folder."""

    exit_code = 2


class NotFiniteStateError(CheckpointError):
    """Weights or other state that no run can continue with."""


_BY_SEVERITY: Final[tuple[type[CheckpointError], ...]] = (
    MismatchError,
    DamagedError,
    NotFiniteStateError,
    CheckpointError,
)
"""The worst first."""


def agree(
    work: Callable[[], Any], messages: Messages, then: Callable[[list[Any]], Any] = lambda _: None
) -> Any:
    """Run `work` on every rank, then `then` on rank 0 with the list of all results, which are JSON values.

    Returns:
        The result of `then`, on all ranks.

    Raises:
        CheckpointError: on all ranks if one fails, of the worst class: mismatch, damage, state that is not finite, others.
    """
    value, failure = None, None
    try:
        value = work()
    except Exception as error:  # noqa: BLE001 (the other ranks wait for an answer)
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
    result, worst = messages.broadcast([result, worst])
    if worst is None:
        return result
    severity, problem, fix, rank = worst
    where = f"rank {rank}: " if messages.size > 1 else ""
    raise _BY_SEVERITY[severity](where + problem, fix=fix) from failure


def _described(failure: Exception | None) -> tuple[int, str, str] | None:
    """Return severity (0 is the worst), problem and fix, or None without a failure."""
    if failure is None:
        return None
    severity = next(
        (n for n, kind in enumerate(_BY_SEVERITY) if isinstance(failure, kind)), len(_BY_SEVERITY) - 1
    )
    if isinstance(failure, MegatrainError):
        return severity, failure.problems[0].text, failure.problems[0].fix
    if isinstance(failure, OSError):
        name = f"{failure.filename}: " if failure.filename else ""
        return severity, f"{name}{failure.strerror or failure} (errno {failure.errno})", STORAGE_FIX
    return (
        severity,
        f"{type(failure).__name__}: {failure}",
        "report this bug with the traceback",
    )
