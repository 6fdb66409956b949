"""A run that does not start: what it prints, and its record in `status.json`. Does not import torch."""

from __future__ import annotations

import contextlib
import sys
from pathlib import Path

from megatrain.config import Request
from megatrain.config.environment import read_environment
from megatrain.config.errors import ConfigError, MegatrainError, describe
from megatrain.training.launch.save_lock import other_owner
from megatrain.training.logging.status_file import write_refused_start


def refuse(request: Request) -> int:
    """Report the problems of the command line; return the exit code. What follows from facts is not checked yet."""
    error = ConfigError.of(tuple(dict.fromkeys(request.problems)))
    print_error(error)
    write_failure(request, error)
    return error.exit_code


def write_failure(request: Request, error: MegatrainError) -> None:
    """Record in `status.json` that the run did not start, if the folder of --save exists and no other run uses it."""
    save = request.known("checkpoint.save")
    with contextlib.suppress(OSError):  # `error` is printed, and may be about this folder
        if save is not None and Path(save).is_dir() and other_owner(Path(save)) is None:
            write_refused_start(Path(save), exit_code=error.exit_code, reason=error.problems[0].text)


def print_error(error: MegatrainError) -> None:
    """Print an error; ranks other than 0 prefix their number."""
    rank = read_environment().rank
    sys.stdout.flush()
    print(f"{f'rank {rank}: ' if rank else ''}{describe(error)}", file=sys.stderr, flush=True)
