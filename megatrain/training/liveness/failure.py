"""Failures of ranks, and the root cause among several.

A rank that dies breaks the collectives of the others. So a failed collective is not the root cause if another failure is
known, and neither is an error that another rank reports.
"""

from __future__ import annotations

import json
import os
import signal
import socket
from collections.abc import Sequence
from dataclasses import asdict, dataclass, fields
from typing import Any, Final, Literal, get_args

from megatrain.config.environment import LaunchEnvironment
from megatrain.config.errors import MegatrainError
from megatrain.storage.untrusted_json import Check, flag, integer, list_of, record, text

_COLLECTIVE_ERRORS = ("gloo", "NCCL", "Application timeout caused pair closure")  # the last is gloo's too
Kind = Literal["died", "error", "late", "collective", "reported elsewhere"]
"""Process died without a report; error of this rank; no progress; failed collective; error that another rank reports."""

_MAX_SUMMARY_CHARACTERS = 300
_MAX_DETAILS = 30_000
_MAX_RANKS_SHOWN = 8
LOCATION: Final[dict[str, Check]] = {
    "rank": integer(),
    "world_size": integer(1),
    "local_rank": integer(),
    "host": text(max_characters=300),
    "pid": integer(),
}
"""Fields that identify the process of a rank."""
_FAILURE: Final = record(
    {
        **LOCATION,
        "kind": text(get_args(Kind)),
        "summary": text(max_characters=2 * _MAX_SUMMARY_CHARACTERS),
        "exit_code": integer(1, 255),
        "unreported": list_of(integer()),
        "details": text(max_characters=_MAX_DETAILS),
        "is_final": flag,
    }
)


@dataclass(frozen=True, kw_only=True)
class Failure:
    """The failure of one rank."""

    kind: Kind
    rank: int
    world_size: int
    local_rank: int
    host: str
    pid: int
    summary: str = ""
    """The error in one line."""
    exit_code: int = 1
    unreported: Sequence[int] = ()
    """For a failed collective: ranks that are alive and reported no failure."""
    details: str = ""
    """Further lines for the log."""
    is_final: bool = False
    """The same command would fail again: --inprocess-restart ends the job."""

    @property
    def is_root_cause(self) -> bool:
        """No later report can be a better explanation."""
        return self.kind in ("died", "error", "late")

    def to_json(self) -> str:
        return json.dumps(asdict(self))

    def __str__(self) -> str:
        where = f"rank {self.rank} of {self.world_size} on {self.host}"
        if self.kind == "died":
            return (
                f"{where} (process {self.pid}) died without an error: it was killed, perhaps for lack of memory, or crashed"
                " outside of Python"
            )
        if self.kind == "late":
            return self.summary
        return "; ".join(filter(None, (f"{where} failed: {self.summary}", self.others)))

    @property
    def report(self) -> str:
        """The failure with its details, for the log."""
        return "\n".join(filter(None, (str(self), self.details)))

    @property
    def others(self) -> str:
        """A sentence about other ranks, which a traceback does not show; empty if there is none."""
        if not self.unreported:
            return ""
        return f"no failure report from {format_ranks(self.unreported)}, which may hang"


def format_ranks(ranks: Sequence[int]) -> str:
    """Return `rank 3`, `ranks 3, 7`, or the first ranks of many."""
    shown, more = ranks[:_MAX_RANKS_SHOWN], len(ranks) - _MAX_RANKS_SHOWN
    return f"rank{'s' * (len(ranks) > 1)} {', '.join(map(str, shown))}" + f" and {more} more" * (more > 0)


def process_location(environment: LaunchEnvironment) -> dict[str, Any]:
    """Return the fields of a `Failure` that identify this process."""
    return {
        "rank": environment.rank,
        "world_size": environment.world_size,
        "local_rank": environment.local_rank,
        "host": socket.gethostname(),
        "pid": os.getpid(),
    }


def describe_failure(error: BaseException, environment: LaunchEnvironment) -> Failure:
    """Return the failure of this rank for an exception."""
    summary = f"{type(error).__name__}: {error}"
    if isinstance(error, MegatrainError):
        summary = error.problems[0].text
    elif isinstance(error, SystemExit):
        summary = f"sys.exit({error.code!r}) during the run"
    return Failure(
        kind=_kind(error),
        summary=" ".join(_printable(summary).split())[:_MAX_SUMMARY_CHARACTERS],
        exit_code=exit_code_of(error),
        is_final=is_final(error),
        **process_location(environment),
    )


def is_final(error: BaseException) -> bool:
    """Return whether an error is one of the command, its input or the user, and not of a process or a device."""
    return isinstance(error, MegatrainError | SystemExit | KeyboardInterrupt)


def checked_failure(values: Any) -> Failure:
    """Build a failure from a message of another rank or of the server. Raises ValueError; 0 is no exit code of a failure."""
    _FAILURE(values, "failure")
    return Failure(**{field.name: values[field.name] for field in fields(Failure)})


def exit_code_of(error: BaseException) -> int:
    """Return the exit code of a process that ends with this exception: 1 to 255."""
    if isinstance(error, MegatrainError):
        return error.exit_code
    if isinstance(error, SystemExit) and isinstance(error.code, int):
        return error.code % 256 or 1
    return 128 + signal.SIGINT if isinstance(error, KeyboardInterrupt) else 1


def root_cause(failures: Sequence[Failure]) -> Failure:
    """Return the failure that caused the others; failures are in the order of their reports."""
    order: tuple[Kind, ...] = ("error", "late", "collective", "reported elsewhere")
    return min(failures, key=lambda failure: order.index(failure.kind) if failure.kind in order else 0)


def _printable(text: str) -> str:
    """Replace halves of surrogate pairs, as in file names that are not UTF-8."""
    return text.encode("utf-8", "backslashreplace").decode()


def _kind(error: BaseException) -> Kind:
    if isinstance(error, MegatrainError):
        return "reported elsewhere" if error.is_reported else "error"
    import torch.distributed as dist  # noqa: PLC0415 (a refused start does not import torch)

    is_collective = isinstance(error, dist.DistError | ConnectionError) or (
        isinstance(error, RuntimeError) and any(words in str(error) for words in _COLLECTIVE_ERRORS)
    )
    return "collective" if is_collective else "error"
