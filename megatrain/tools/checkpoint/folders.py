"""`megatrain checkpoint ls | verify | prune`: the checkpoints of a folder."""

from __future__ import annotations

import argparse
import dataclasses
import json
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from megatrain.checkpoint.find import (
    OF_MEGATRON,
    Candidate,
    base_folder,
    find_checkpoints,
    leftovers,
    node_files,
)
from megatrain.checkpoint.manifest import MANIFEST_NAME, Manifest
from megatrain.checkpoint.parts import read_manifest
from megatrain.checkpoint.reader import verify as verify_files
from megatrain.checkpoint.retention import Retention, remove_candidate, superseded
from megatrain.config.errors import ConfigError, NoCheckpointError
from megatrain.storage.disk import Disk
from megatrain.tools.checkpoint.source import Progress, no_checkpoint, size_text
from megatrain.tools.subcommands import duration

DAMAGED = 3
"""Exit code of `verify` if a checkpoint is damaged, as of a run that finds no valid one."""


@dataclass(frozen=True, kw_only=True)
class Entry:
    """A folder that is, or may become, a checkpoint."""

    path: str
    status: Literal["committed", "partial", "damaged", "Megatron"]
    num_bytes: int
    iteration: int | None = None
    consumed_train_samples: int | None = None
    age_seconds: float | None = None
    """Seconds since the checkpoint was written."""
    problem: str | None = None
    elsewhere: str | None = None
    """A sentence about the files of a local checkpoint that are on other nodes only."""


def ls(arguments: argparse.Namespace) -> None:
    """List the checkpoints of a folder: committed, partial or damaged."""
    entries = list(entries_of(arguments.folder))
    if arguments.json:
        print(json.dumps([dataclasses.asdict(entry) for entry in entries]))
        return
    if not entries:
        raise no_checkpoint(arguments.folder)
    print(f"{'iteration':>10}  {'status':<9}  {'size':>10}  {'samples':>12}  {'age':>12}  folder")
    for entry in entries:
        number = "" if entry.iteration is None else str(entry.iteration)
        samples = "" if entry.consumed_train_samples is None else str(entry.consumed_train_samples)
        age = "" if entry.age_seconds is None else duration(entry.age_seconds)
        print(
            f"{number:>10}  {entry.status:<9}  {size_text(entry.num_bytes):>10}  {samples:>12}"
            f"  {age:>12}  {Path(entry.path).name}"
        )
        for note in filter(None, (entry.problem, entry.elsewhere)):
            print(f"{'':>10}  {note}")


def entries_of(folder: Path) -> Iterator[Entry]:
    """Yield the checkpoints and unfinished saves in a folder, by iteration."""
    for found in sorted(find_checkpoints(folder), key=lambda candidate: candidate.iteration):
        manifest = None if found.problem else read_manifest(found.path)
        yield Entry(
            path=str(found.path),
            status=_status(found),
            num_bytes=_size(found.path),
            iteration=found.iteration,
            consumed_train_samples=None if manifest is None else manifest.consumed_train_samples,
            age_seconds=_age(found.path / MANIFEST_NAME),
            problem=found.problem,
            elsewhere=None if manifest is None else _elsewhere(found.path, manifest),
        )
    is_folder = folder.is_dir() and base_folder(folder) == folder
    for path in sorted(leftovers(folder)) if is_folder else ():
        if path.is_dir() and ".tmp-" in path.name:
            note = "a save that is running or was interrupted; the next save removes it"
            yield Entry(
                path=str(path), status="partial", num_bytes=_size(path), age_seconds=_age(path), problem=note
            )


def _elsewhere(path: Path, manifest: Manifest) -> str | None:
    here, total = len(node_files(path, manifest)), len(manifest.sizes)
    return None if here == total else f"{here} of {total} files are on this node, the others on other nodes"


def _status(found: Candidate) -> Literal["committed", "damaged", "Megatron"]:
    if found.problem == OF_MEGATRON:
        return "Megatron"
    return "damaged" if found.problem else "committed"


def verify(arguments: argparse.Namespace) -> int:
    """Read all data and compare it with the checksums."""
    found = [one for one in find_checkpoints(arguments.path) if one.problem != OF_MEGATRON]
    if not found:
        raise no_checkpoint(arguments.path)
    num_damaged = 0
    for candidate in reversed(found):
        problems = _problems(candidate)
        num_damaged += bool(problems)
        print(f"{candidate.path}: {'damaged' if problems else 'intact'}, {size_text(_size(candidate.path))}")
        elsewhere = None if problems else _elsewhere(candidate.path, read_manifest(candidate.path))
        for line in filter(None, (*problems, elsewhere)):
            print(f"  {line}")
    if num_damaged:
        print(f"{num_damaged} of {len(found)} checkpoints are damaged")
        print("  fix: restore them from a backup, or remove them; loading uses the newest intact one")
    return DAMAGED if num_damaged else 0


def _problems(candidate: Candidate) -> list[str]:
    """Read every byte of a checkpoint; return what is wrong with it."""
    if candidate.problem:
        return [candidate.problem]
    with Progress(f"verifying {candidate.path.name}", _size(candidate.path)) as progress:
        return verify_files(candidate.path, progress.add)


def prune(arguments: argparse.Namespace) -> None:
    """Remove older checkpoints.

    The newest N whose data are intact stay; --dry-run prints the others.

    Raises:
        NoCheckpointError: none is intact.
    """
    folder = arguments.folder
    if arguments.keep_last < 2:
        raise ConfigError(
            f"--keep-last {arguments.keep_last}: the newest two checkpoints always stay",
            fix="use --keep-last 2",
        )
    found = find_checkpoints(folder)
    if base_folder(folder) != folder or all(one.problem for one in found):
        raise no_checkpoint(folder)
    rule = Retention(keep_last=arguments.keep_last, retain_interval=arguments.retain_interval)
    intact: list[Path] = []

    def is_intact(candidate: Candidate) -> bool:
        problems = _problems(candidate)
        if problems:
            print(f"{candidate.path} is damaged, does not count and stays: {problems[0]}")
        else:
            intact.append(candidate.path)
        return not problems

    removed = list(superseded(found, rule, num_newer=0, is_valid=is_intact))
    if not intact:
        raise NoCheckpointError(
            f"{folder}: every checkpoint is damaged; nothing is removed",
            fix=f"restore one from a backup; `megatrain checkpoint verify {folder}` names all damage",
        )
    for candidate in reversed(removed):
        size = size_text(_size(candidate.path))
        print(
            f"would remove {candidate.path}, {size}"
            if arguments.dry_run
            else remove_candidate(candidate, Disk())
        )
    if not removed:
        print(f"nothing to remove in {folder}")


def _size(path: Path) -> int:
    """Return the bytes of the files in a folder."""
    try:
        return sum(file.lstat().st_size for file in path.iterdir())
    except OSError:
        return 0


def _age(path: Path) -> float | None:
    try:
        return max(0.0, time.time() - path.lstat().st_mtime)
    except OSError:
        return None
