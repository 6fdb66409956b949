"""How a rank came to its end, as the others hear of it; and which of several ends was the first.

A rank that dies makes others fail: their collectives break. So a broken collective is never the reason while another
end is known, and neither is an error that all ranks agree to tell on one of them.
"""

from __future__ import annotations

import json
import os
import signal
import socket
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any, Literal

import torch.distributed as dist

from megatrain.config.environment import LaunchEnvironment
from megatrain.config.errors import MegatrainError

Kind = Literal["vanished", "error", "lost peer", "told elsewhere"]
"""No word at all; an error of its own; a collective that broke; an error that another rank tells."""

_MAX_SUMMARY_CHARACTERS = 300
_MAX_RANKS_TOLD = 8


@dataclass(frozen=True, kw_only=True)
class Failure:
    """The end of one rank."""

    kind: Kind
    rank: int
    world_size: int
    local_rank: int
    host: str
    pid: int
    summary: str = ""
    """One line."""
    exit_code: int = 1
    silent: Sequence[int] = ()
    """Where a collective broke: ranks that have failed in none, and did not end."""

    @property
    def is_reason(self) -> bool:
        """Whether nothing that is still to be heard of can be a better reason."""
        return self.kind in ("vanished", "error")

    def to_json(self) -> str:
        return json.dumps(asdict(self))

    def __str__(self) -> str:
        where = f"rank {self.rank} of {self.world_size} on {self.host}"
        if self.kind == "vanished":
            return (
                f"{where} (process {self.pid}) ended without a word: it was killed, for lack of memory perhaps, or crashed"
                " outside of Python"
            )
        return "; ".join(filter(None, (f"{where} failed: {self.summary}", self.others)))

    @property
    def others(self) -> str:
        """What there is to say about other ranks, which a traceback does not show."""
        return f"no failure was heard of from {named(self.silent)}, which may hang" if self.silent else ""


def named(ranks: Sequence[int]) -> str:
    """`rank 3`, `ranks 3, 7`, or the first of many."""
    shown, more = ranks[:_MAX_RANKS_TOLD], len(ranks) - _MAX_RANKS_TOLD
    return f"rank{'s' * (len(ranks) > 1)} {', '.join(map(str, shown))}" + f" and {more} more" * (more > 0)


def place_of(environment: LaunchEnvironment) -> dict[str, Any]:
    """What a `Failure` says about where it was."""
    return {
        "rank": environment.rank,
        "world_size": environment.world_size,
        "local_rank": environment.local_rank,
        "host": socket.gethostname(),
        "pid": os.getpid(),
    }


def describe_failure(error: BaseException, environment: LaunchEnvironment) -> Failure:
    """The end of this rank by an exception."""
    summary = f"{type(error).__name__}: {error}"
    if isinstance(error, MegatrainError):
        summary = error.problems[0].text
    elif isinstance(error, SystemExit):
        summary = f"sys.exit({error.code!r}) in the middle of the run"
    return Failure(
        kind=_kind(error),
        summary=" ".join(summary.split())[:_MAX_SUMMARY_CHARACTERS],
        exit_code=exit_code_of(error),
        **place_of(environment),
    )


def exit_code_of(error: BaseException) -> int:
    """Of a process that ends by this exception; never 0."""
    if isinstance(error, MegatrainError):
        return error.exit_code
    if isinstance(error, SystemExit) and isinstance(error.code, int):
        return error.code or 1
    return 128 + signal.SIGINT if isinstance(error, KeyboardInterrupt) else 1


def first_of(failures: Sequence[Failure]) -> Failure:
    """The end that made the others, of those that were heard of in this order."""
    order: tuple[Kind, ...] = ("error", "lost peer", "told elsewhere")
    return min(failures, key=lambda failure: order.index(failure.kind) if failure.kind in order else 0)


def _kind(error: BaseException) -> Kind:
    if isinstance(error, MegatrainError):
        return "told elsewhere" if error.is_told else "error"
    is_lost = isinstance(error, dist.DistError | ConnectionError) or (
        isinstance(error, RuntimeError) and ("gloo" in str(error) or "NCCL" in str(error))
    )
    return "lost peer" if is_lost else "error"
