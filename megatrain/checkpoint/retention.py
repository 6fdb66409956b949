"""Remove older checkpoints once a newer one is committed and verified.

newest first   400 ── 300 ── 200 ── 100
               just committed: its manifest and file sizes are read again
                      newest older one that is valid: always kept, and the newest older one that this run wrote or loaded
                              multiple of --save-retain-interval, or among the --keep-last newest: kept
                                     removed: renamed away, then deleted, so that no half checkpoint remains

A run does not read the data of older checkpoints again: those that it wrote or loaded are known to be intact.

Nothing here raises an error: a checkpoint that cannot be removed stays, and a line says so.
"""

from __future__ import annotations

import fcntl
import secrets
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass
from io import FileIO
from pathlib import Path

from megatrain.checkpoint.checked_files import open_regular_file
from megatrain.checkpoint.errors import CheckpointError, DamagedError
from megatrain.checkpoint.find import (
    Candidate,
    check_folder,
    folder_name,
    is_of_megatron,
    list_candidates,
)
from megatrain.checkpoint.manifest import MANIFEST_NAME
from megatrain.storage.disk import Disk


@dataclass(frozen=True, kw_only=True)
class Retention:
    """The checkpoints that stay in a folder. Counts include the newest one."""

    keep_last: int | None = None
    """Number of valid checkpoints to keep; None: all, except those that `retain_interval` removes."""
    retain_interval: int | None = None
    """Checkpoints at multiples of this many iterations always stay. Without `keep_last`, each save removes only the checkpoint
    that it makes the third newest, so that a changed interval never removes checkpoints that were retained before. Megatron-LM
    removes the second newest."""

    @property
    def removes(self) -> bool:
        return self.keep_last is not None or self.retain_interval is not None


def remove_older(
    folder: Path, newest: int, rule: Retention, disk: Disk, *, intact: Collection[Path] = ()
) -> list[str]:
    """Remove the checkpoints that `rule` does not keep after iteration `newest` was committed; return a line for each.

    Args:
        intact: resolved folders of checkpoints that this process wrote or loaded. If `rule` keeps more than the newest
            checkpoint, the newest of these stays, too: a valid one may have damaged data.
    """
    if not rule.removes:
        return []
    try:
        check_folder(folder / folder_name(newest), newest)
        older = [candidate for candidate in list_candidates(folder) if candidate.iteration < newest]
    except CheckpointError as error:
        return [f"no older checkpoint is removed: {error.problems[0].text}"]
    is_alone = rule.keep_last == 1
    stays = None if is_alone else next((one.path for one in older if one.path.resolve() in intact), None)
    return [remove_candidate(one, disk) for one in superseded(older, rule) if one.path != stays]


def superseded(
    candidates: Sequence[Candidate],
    rule: Retention,
    *,
    num_newer: int = 1,
    is_valid: Callable[[Candidate], bool] | None = None,
) -> Iterator[Candidate]:
    """Yield the checkpoints that `rule` does not keep, newest first. Checkpoints of Megatron-LM stay.

    Args:
        candidates: newest first.
        num_newer: valid checkpoints that are newer than `candidates`.
        is_valid: whether a checkpoint counts as kept; the default looks at its manifest and file sizes.
    """
    is_narrow, counts = rule.keep_last is None, is_valid or _is_valid
    num_valid, keep = num_newer, rule.keep_last or 2
    for candidate in candidates:
        if is_of_megatron(candidate.path):
            continue
        if num_valid < keep:
            num_valid += counts(candidate)
            continue
        is_retained = rule.retain_interval is not None and candidate.iteration % rule.retain_interval == 0
        if not is_retained and candidate.path.exists():
            yield candidate
        if is_narrow:
            return


def hold(path: Path) -> FileIO | None:
    """Mark the checkpoint at `path` as being read, until the returned file is closed.

    Returns:
        None if the storage has no locks: the checkpoint is not protected then.
    """
    try:
        file = open_regular_file(path / MANIFEST_NAME)
    except DamagedError:
        return None
    try:
        fcntl.flock(file.fileno(), fcntl.LOCK_SH | fcntl.LOCK_NB)
    except OSError:
        file.close()
        return None
    return file


def remove_candidate(candidate: Candidate, disk: Disk) -> str:
    """Remove a checkpoint that is neither a link nor being read; return what happened, for the user."""
    path = candidate.path
    if path.is_symlink():
        return f"{path} is a link, and stays"
    if _is_held(path):
        return f"{path} is being read, and stays"
    try:
        remove_whole(path, disk)
    except OSError as error:
        return f"{path} could not be removed: {error.strerror} (errno {error.errno})"
    return f"removed {path}"


def remove_whole(path: Path, disk: Disk) -> None:
    """Rename a checkpoint away, durably, and delete it; if this is interrupted, the next save deletes the rest."""
    away = path.with_name(f"{path.name.split('.')[0]}.tmp-{secrets.token_hex(4)}")
    disk.rename(path, away)
    disk.sync_folder(path.parent)  # or a power failure could leave the old name with a part of the files
    disk.remove(away)


def _is_held(path: Path) -> bool:
    try:
        with (path / MANIFEST_NAME).open(
            "r+b"
        ) as file:  # NFS locks exclusively only what is open for writing
            fcntl.flock(file.fileno(), fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    except OSError:
        return False
    return False


def _is_valid(candidate: Candidate) -> bool:
    try:
        check_folder(candidate.path, candidate.iteration)
    except CheckpointError:
        return False
    return True
