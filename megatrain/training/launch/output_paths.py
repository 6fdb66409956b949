"""Problems of output paths that are visible before anything is built; nothing is written.

The lock of `--save` (`save_lock.py`) is the first file of a run: it finds a folder that is full, read-only or forbidden.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

from megatrain.config import Request
from megatrain.config.errors import Problem
from megatrain.config.schema.tree import flag_of
from megatrain.training.logging.metrics_file import is_metrics_file, metrics_path

_FOLDERS = ("checkpoint.save", "checkpoint.load", "logging.tensorboard_dir", "logging.wandb_save_dir")
_CREATED = ("checkpoint.save", "logging.metrics_file", "logging.tensorboard_dir")


def path_problems(request: Request) -> Iterator[Problem]:
    """Yield a problem for each folder that is none or is unreadable, path that cannot be created, and file of other content."""
    for name in dict.fromkeys((*_FOLDERS, *_CREATED)):
        given, flag = request.known(name), flag_of(name)
        if given is None:
            continue
        try:
            if name in _FOLDERS:
                yield from _folder_problems(Path(given), flag)
            if name in _CREATED:
                yield from _parent_problems(Path(given), flag)
        except OSError as error:
            yield _unreadable(error, f"{flag} {given}")
    stop_file = request.known("resilience.exit_file")
    try:
        if stop_file is not None and Path(stop_file).exists():
            yield Problem(
                f"--exit-file {stop_file} exists, so that the run would stop at once", "remove the file"
            )
    except OSError as error:
        yield _unreadable(error, f"--exit-file {stop_file}")
    given, save = request.known("logging.metrics_file"), request.known("checkpoint.save")
    path = metrics_path(save, given)
    try:
        if path is not None:
            yield from _metrics_problems(path, is_given=given is not None)
    except OSError as error:
        if given is not None:
            yield _unreadable(error, f"--metrics-file {path}")


def _metrics_problems(path: Path, *, is_given: bool) -> Iterator[Problem]:
    """Yield a problem if the metrics cannot be written to this file; `is_given`: the user named it."""
    if path.is_dir():
        yield Problem(f"--metrics-file {path} is a folder", "name a file")
    elif path.exists() and not path.is_file():  # its content may have no end
        what = "--metrics-file" if is_given else "--save"
        yield Problem(f"{what}: {path} is not a regular file", "remove it, or give --metrics-file a file")
    elif is_given and not is_metrics_file(path):
        yield Problem(f"--metrics-file {path} has other content, which would be lost", "name another file")


def _folder_problems(path: Path, flag: str) -> Iterator[Problem]:
    """Yield a problem if the path exists and is not a readable folder."""
    if path.is_symlink() and not path.exists():
        fix = f"create {path.readlink()}, or give {flag} another folder"
        yield Problem(f"{flag} {path} is a link to {path.readlink()}, which does not exist", fix)
    elif path.exists() and not path.is_dir():
        yield Problem(f"{flag} {path} is not a folder", f"give {flag} a folder")
    elif path.exists():
        os.scandir(path).close()


def _parent_problems(path: Path, flag: str) -> Iterator[Problem]:
    """Yield a problem if the nearest parent that exists is not a folder."""
    parents = path.absolute().parents
    barrier = next(parent for parent in parents if parent.is_symlink() or parent.exists())
    if not barrier.is_dir():
        what = "a link to nothing" if barrier.is_symlink() else "not a folder"
        yield Problem(f"{flag} {path} cannot be created: {barrier} is {what}", f"give {flag} another path")


def _unreadable(error: OSError, what: str) -> Problem:
    return Problem(
        f"{what} cannot be read: {error.filename}: {error.strerror} (errno {error.errno})",
        "make it readable for this user, or give another path",
    )
