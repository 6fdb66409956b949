"""Find the checkpoints in a folder, or the one checkpoint FOLDER/iter_0000100.

<save>/iter_0000100/                            a checkpoint, if its manifest and file sizes are valid
<save>/iter_0000100.old-<id>/                   a checkpoint that a new one of the same iteration is replacing
<save>/iter_0000100.tmp-<id>/                   being written, or left by a run that was killed
<save>/release/                                 weights that a converter of Megatron-LM wrote, from which a run starts
<save>/latest_checkpointed_iteration.txt        tracker: the newest iteration, as in Megatron-LM; only a hint
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from megatrain.checkpoint.checked_files import read_small_file
from megatrain.checkpoint.errors import CheckpointError, DamagedError, MismatchError, NoFolderError
from megatrain.checkpoint.manifest import MANIFEST_NAME, Manifest, read_root
from megatrain.checkpoint.tensor_file import check_size
from megatrain.storage.untrusted_json import list_of, parse_json, text

RELEASE_NAME = "release"
"""Folder of weights without an iteration, which Megatron-LM's converters write."""
NODE_FILES_NAME = "node_files.json"
"""Names of the files in this folder, if a local checkpoint has more on other nodes."""
TRACKER_NAME = "latest_checkpointed_iteration.txt"
OF_MEGATRON: Final = "a checkpoint of Megatron-LM, which pretrain.py, `megatrain generate` and `megatrain convert megatron-to-megatrain` read"
_MAX_LIST_BYTES = 1 << 26
CHECKS_AT_A_TIME = 16
"""Files whose size is asked for at the same time: each answer of a shared file system takes a while."""
_FOLDER = re.compile(r"iter_(\d{7,15})(\.(?:old|megatron)-[0-9a-f]+)?")
_LEFTOVER = re.compile(rf"(iter_\d+|{re.escape(TRACKER_NAME)})\.(tmp|old)-.*|\.rank-[0-9a-f]+-\d+")


@dataclass(frozen=True)
class Candidate:
    """A folder that may be a checkpoint; `problem` says why it is not one."""

    iteration: int
    path: Path
    problem: str | None = None


def folder_name(iteration: int) -> str:
    return f"iter_{iteration:07d}"


def base_folder(path: Path) -> Path:
    """Return FOLDER for FOLDER/iter_0000100, and other paths as they are."""
    return path.parent if _chosen_iteration(path) is not None else path


def find_checkpoints(folder: Path) -> list[Candidate]:
    """Return all checkpoints in `folder`, valid or not, newest first; tensor data is not read."""
    return [
        Candidate(found.iteration, found.path, found.problem or _problem_of(found))
        for found in list_candidates(folder)
    ]


def newest_valid(folder: Path) -> Candidate | None:
    """Return the newest checkpoint whose manifest and file sizes are valid, or None."""
    found = (Candidate(c.iteration, c.path, c.problem or _problem_of(c)) for c in list_candidates(folder))
    return next((candidate for candidate in found if candidate.problem is None), None)


def list_candidates(folder: Path) -> list[Candidate]:
    """Return all candidates by name, newest first. If the tracker names a missing iteration, it counts as invalid.

    For FOLDER/iter_0000100 that one alone, if it exists.

    Raises:
        CheckpointError: the folder cannot be read.
    """
    chosen = _chosen_iteration(folder)
    if chosen is not None:
        return [Candidate(chosen, folder)] if folder.exists() else []
    try:
        names = sorted(path.name for path in folder.iterdir())
    except FileNotFoundError:
        return []
    except NotADirectoryError as error:
        raise NoFolderError(
            f"{folder} is a file, not a folder", fix="name a folder of checkpoints"
        ) from error
    except OSError as error:
        raise CheckpointError(f"{folder}: {error.strerror}", fix="make the folder readable") from error
    found = [
        Candidate(int(match[1]), folder / name)
        for name in names
        if (match := _FOLDER.fullmatch(name)) and name.split(".")[0] == folder_name(int(match[1]))
    ]
    if RELEASE_NAME in names and is_of_megatron(folder / RELEASE_NAME):
        found.append(Candidate(0, folder / RELEASE_NAME))
    hint = _tracked_iteration(folder)
    if hint is not None and hint not in {candidate.iteration for candidate in found}:
        missing = f"{TRACKER_NAME} names it, but the folder is missing"
        found.append(Candidate(hint, folder / folder_name(hint), missing))
    return sorted(found, key=lambda candidate: (-candidate.iteration, candidate.path.name))


def leftovers(folder: Path) -> Iterator[Path]:
    """Yield the files and folders of interrupted saves, and replaced checkpoints."""
    yield from (path for path in folder.iterdir() if _LEFTOVER.fullmatch(path.name))


def newest_of_megatron(path: Path) -> Path | None:
    """Return the newest checkpoint of Megatron-LM in a folder, or the one at `path`; None if there is none."""
    if is_of_megatron(path):
        return path
    found = list_candidates(path) if path.is_dir() else []
    return next((one.path for one in found if is_of_megatron(one.path)), None)


def is_of_megatron(path: Path) -> bool:
    """Return whether Megatron-LM wrote the checkpoint at `path`, by the names of its files. None of them is opened."""
    names = (".metadata", "common.pt", "mp_rank_00", "mp_rank_00_000", "mp_rank_00_000_000")
    try:
        return not (path / MANIFEST_NAME).exists() and any((path / name).exists() for name in names)
    except PermissionError:
        return False  # `check_folder` says why it cannot be read


def check_folder(path: Path, iteration: int) -> Manifest:
    """Check the manifest and file sizes of a checkpoint, and return the manifest, without its parts.

    Raises:
        DamagedError, MismatchError: see `read_root`; or a file is missing or has another size.
    """
    if path.is_symlink():
        raise DamagedError(f"{path}: a link, not a folder")
    manifest = read_root(path)
    if manifest.iteration != iteration:
        raise DamagedError(f"{path}: the manifest is of iteration {manifest.iteration}")
    sizes = manifest.sizes

    def check(name: str) -> None:
        try:
            check_size(path / name, (path / name).lstat().st_size, sizes[name])
        except OSError as error:
            raise DamagedError(f"{path / name}: {error.strerror}") from error

    with ThreadPoolExecutor(CHECKS_AT_A_TIME) as pool:
        for _ in pool.map(check, node_files(path, manifest)):
            pass
    return manifest


def node_files(path: Path, manifest: Manifest) -> list[str]:
    """Return the files and parts of a checkpoint that are in its folder: all, unless it is divided over the disks of several nodes.

    Raises:
        DamagedError: the list is damaged.
    """
    file = path / NODE_FILES_NAME
    if not file.exists():
        return list(manifest.sizes)
    try:
        names: list[str] = parse_json(
            read_small_file(file, max_bytes=_MAX_LIST_BYTES), max_bytes=_MAX_LIST_BYTES
        )
        list_of(text(max_characters=300))(names, NODE_FILES_NAME)
    except (RecursionError, ValueError) as error:
        raise DamagedError(f"{file}: {str(error)[:500]}") from error
    if unknown := sorted(set(names) - set(manifest.sizes)):
        raise DamagedError(f"{file}: {unknown[0]} is not a file of this checkpoint")
    return names


def _problem_of(candidate: Candidate) -> str | None:
    if is_of_megatron(candidate.path):
        return OF_MEGATRON
    try:
        check_folder(candidate.path, candidate.iteration)
    except (DamagedError, MismatchError) as error:
        return error.problems[0].text
    return None


def _chosen_iteration(path: Path) -> int | None:
    """Return the iteration of a path FOLDER/iter_0000100; None for other paths."""
    match = _FOLDER.fullmatch(path.name)
    return int(match[1]) if match and path.name == folder_name(int(match[1])) else None


def _tracked_iteration(folder: Path) -> int | None:
    """Return the iteration in the tracker, or None if it is missing or invalid."""
    try:
        text = read_small_file(folder / TRACKER_NAME, max_bytes=100).decode("ascii").strip()
    except (DamagedError, UnicodeDecodeError):
        return None
    return int(text) if text.isdigit() and len(text) <= 15 else None
