"""Which checkpoints a folder holds.

<save>/iter_0000100/                            a checkpoint, if its manifest and the sizes of its files are right
<save>/iter_0000100.old-<id>/                   the same, while a new one of this iteration takes its place
<save>/iter_0000100.tmp-<id>/                   being written, or left by a run that died
<save>/latest_checkpointed_iteration.txt        the newest iteration: a hint, as in Megatron-LM
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from megatrain.checkpoint.disk import read_small
from megatrain.checkpoint.errors import CheckpointError, DamagedError, MismatchError
from megatrain.checkpoint.manifest import Manifest, read_manifest
from megatrain.checkpoint.tensor_file import check_size

TRACKER_NAME = "latest_checkpointed_iteration.txt"
_FOLDER = re.compile(r"iter_(\d{7,15})(\.old-[0-9a-f]+)?")
_LEFTOVER = re.compile(rf"(iter_\d+|{re.escape(TRACKER_NAME)})\.(tmp|old)-.*")


@dataclass(frozen=True)
class Candidate:
    """A folder that may be a checkpoint. `problem` says why it is none."""

    iteration: int
    path: Path
    problem: str | None = None


def folder_name(iteration: int) -> str:
    return f"iter_{iteration:07d}"


def find_checkpoints(folder: Path) -> list[Candidate]:
    """Every checkpoint in `folder`, newest first, good or not; values of tensors are not read."""
    return [
        Candidate(found.iteration, found.path, found.problem or _problem_of(found))
        for found in list_candidates(folder)
    ]


def newest_valid(folder: Path) -> Candidate | None:
    """The newest checkpoint whose manifest and sizes of files are right."""
    found = (Candidate(c.iteration, c.path, c.problem or _problem_of(c)) for c in list_candidates(folder))
    return next((candidate for candidate in found if candidate.problem is None), None)


def list_candidates(folder: Path) -> list[Candidate]:
    """By name alone, newest first. An iteration that the tracker names and that is missing counts as a bad one."""
    try:
        names = sorted(path.name for path in folder.iterdir())
    except FileNotFoundError:
        return []
    except OSError as error:
        raise CheckpointError(f"{folder}: {error.strerror}", fix="give a folder that can be read") from error
    found = [
        Candidate(int(match[1]), folder / name)
        for name in names
        if (match := _FOLDER.fullmatch(name)) and name.split(".")[0] == folder_name(int(match[1]))
    ]
    hint = _tracked_iteration(folder)
    if hint is not None and hint not in {candidate.iteration for candidate in found}:
        missing = f"{TRACKER_NAME} names it, but there is no such folder"
        found.append(Candidate(hint, folder / folder_name(hint), missing))
    return sorted(found, key=lambda candidate: (-candidate.iteration, candidate.path.name))


def leftovers(folder: Path) -> Iterator[Path]:
    """What saves that were not finished, or whose purpose is served, have left."""
    yield from (path for path in folder.iterdir() if _LEFTOVER.fullmatch(path.name))


def check_folder(path: Path, iteration: int) -> Manifest:
    """The manifest of a checkpoint, once it and the sizes of all files are right.

    Raises:
        DamagedError, MismatchError: as `read_manifest`; or a file is missing or of the wrong size.
    """
    if path.is_symlink():
        raise DamagedError(f"{path}: a link, not a folder")
    manifest = read_manifest(path)
    if manifest.iteration != iteration:
        raise DamagedError(f"{path}: its manifest is of iteration {manifest.iteration}")
    for name, stored in manifest.files.items():
        try:
            check_size(path / name, (path / name).lstat().st_size, stored)
        except OSError as error:
            raise DamagedError(f"{path / name}: {error.strerror}") from error
    return manifest


def _problem_of(candidate: Candidate) -> str | None:
    try:
        check_folder(candidate.path, candidate.iteration)
    except (DamagedError, MismatchError) as error:
        return error.problems[0].text
    return None


def _tracked_iteration(folder: Path) -> int | None:
    """What the tracker names, or None where it is missing or makes no sense."""
    try:
        text = read_small(folder / TRACKER_NAME, most_bytes=100).decode("ascii").strip()
    except (DamagedError, UnicodeDecodeError):
        return None
    return int(text) if text.isdigit() and len(text) <= 15 else None
