"""Save a checkpoint: every rank writes its shards to a temporary folder, rank 0 commits it.

    plan -> state finite? -> enough space? -> iter_0000100.tmp-<id>/ -> shards, fsync -> manifest, fsync -> fsync of the folder
         -> rename to iter_0000100/ -> fsync of the parent -> tracker -> leftovers of failed saves are removed

The rename is atomic: before it there is no new checkpoint, after it a complete one. An error on one rank is raised on all,
and leaves older checkpoints intact.
"""

from __future__ import annotations

import contextlib
import math
import secrets
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from megatrain.checkpoint.chunks import FILE_BYTES, PlannedChunk, plan_chunks, split_into_files
from megatrain.checkpoint.errors import STORAGE_FIX, CheckpointError, DamagedError, NotFiniteStateError, agree
from megatrain.checkpoint.find import CHECKS_AT_A_TIME, TRACKER_NAME, folder_name, is_of_megatron, leftovers
from megatrain.checkpoint.finite import check_finite, check_finite_values
from megatrain.checkpoint.manifest import MANIFEST_NAME, Manifest, check_tiling, encode
from megatrain.checkpoint.parts import MAX_RANKS_OF_WHOLE, merge_parts, tensors_of, write_part
from megatrain.checkpoint.retention import remove_whole
from megatrain.checkpoint.shard_file import WrittenFile, one_ahead, write_shard_file
from megatrain.checkpoint.stored_values import check_kinds
from megatrain.checkpoint.tensor_file import bytes_of, check_size
from megatrain.optim.sharded import ShardedOptimizer
from megatrain.parallel.grid import RankGrid
from megatrain.storage.disk import Disk, write_file
from megatrain.storage.files import describe_write_error

SPACE_MARGIN = 1.1
"""Free bytes that a save requires, relative to the bytes of its tensors."""
_FILES_AT_A_TIME = 2
"""Files that a rank writes at the same time while training waits."""


class DirectWriter:
    """Writes a rank's shards from where they are, while training waits. `BackgroundWriter` has the same methods.

    Args:
        kinds: kinds of state that are saved.
        disk: writes the files.
        verifies: read every file again after it is written.
    """

    is_in_background = False
    is_ready = True
    """`commit` does not wait for another process."""

    def __init__(
        self,
        optimizer: ShardedOptimizer,
        grid: RankGrid,
        kinds: Sequence[str],
        *,
        disk: Disk | None = None,
        verifies: bool = False,
    ) -> None:
        self.optimizer, self.grid, self.kinds = optimizer, grid, tuple(kinds)
        self.disk, self.verifies = disk or Disk(), verifies
        self._pending: tuple[Save, list[PlannedChunk]] | None = None

    def begin(self, save: Save) -> None:
        """Begin a save. All ranks call it.

        Raises:
            CheckpointError: on all ranks.
        """
        plan = plan_chunks(self.optimizer, self.grid, self.kinds)
        save.begin(plan)
        self._pending = save, plan

    def commit(self) -> Path:
        """Write the current state and commit the save; return its folder. All ranks call it.

        Raises:
            CheckpointError: on all ranks; older checkpoints are intact.
        """
        assert self._pending is not None
        save, plan = self._pending
        return save.commit(
            lambda: write_rank_shards(save.temporary, self.grid.rank, plan, self.disk, verifies=self.verifies)
        )


class Save:
    """One save, in two steps that all ranks make together; between them every rank writes its shards to `temporary`.

    Args:
        folder: folder on storage that all ranks share; created if missing.
        optimizer_step_count: of the state that is saved.
        state, config: JSON values; the values of rank 0 are stored.
        disk: of rank 0: creates the folder and commits.
    """

    def __init__(
        self,
        folder: Path,
        *,
        iteration: int,
        consumed_train_samples: int,
        optimizer_step_count: int,
        grid: RankGrid,
        state: Mapping[str, Any],
        config: Mapping[str, Any],
        disk: Disk | None = None,
    ) -> None:
        self.folder, self.iteration, self.grid, self.disk = folder, iteration, grid, disk or Disk()
        self.final = folder / folder_name(iteration)
        save_id = grid.messages.broadcast(secrets.token_hex(4))
        self.temporary = self.final.with_name(f"{self.final.name}.tmp-{save_id}")
        self.is_committing = grid.world.is_first
        """This rank creates, commits and removes checkpoints in the folder."""
        self.committed_bytes = 0
        """Size of the files of all ranks, once they are committed."""
        self._num_bytes: int | None = None
        """Free bytes that the save requires."""
        self._contents: dict[str, Any] = {
            "iteration": iteration,
            "consumed_train_samples": consumed_train_samples,
            "optimizer_step_count": optimizer_step_count,
            "state": state,
            "config": config,
        }

    def begin(self, plan: Sequence[PlannedChunk], prepare: Callable[[], None] = lambda: None) -> None:
        """Check what this rank writes and the free space, and create the temporary folder.

        Args:
            prepare: prepares what will write the shards of this rank.

        Raises:
            NotFiniteStateError: on all ranks; state is infinite or NaN.
            CheckpointError: on all ranks.
        """

        def create(sizes: list[int]) -> int:
            self._num_bytes = math.ceil(sum(sizes) * SPACE_MARGIN)
            with self._sized_errors():
                begin_save(self.folder, self.temporary, sum(sizes), self.disk)
            return self._num_bytes

        with self._cleaned_up():
            self._num_bytes = agree(lambda: self._checked(plan, prepare), self.grid.messages, then=create)

    def commit(self, written: Callable[[], list[dict[str, Any]]]) -> Path:
        """Commit the shards of all ranks and return the folder.

        Args:
            written: returns this rank's reports for `merge_reports`, or raises its error; it may write or wait.

        Raises:
            CheckpointError: on all ranks; the files of this save are removed.
        """
        is_in_parts = self.grid.world.size > MAX_RANKS_OF_WHOLE
        rank = self.grid.rank

        def write() -> Any:
            with self._sized_errors():
                reports = written()
                return write_part(self.temporary, rank, reports, self.disk) if is_in_parts else reports

        def commit(found: list[Any]) -> int:
            manifest = (merge_parts if is_in_parts else merge_reports)(found, **self._contents)
            with self._sized_errors():
                commit_save(self.temporary, self.final, manifest, self.disk)
            return sum(manifest.sizes.values())

        with self._cleaned_up():
            self.committed_bytes = agree(write, self.grid.messages, then=commit)
        if self.is_committing:
            remove_leftovers(self.folder, self.disk)
        return self.final

    def _checked(self, plan: Sequence[PlannedChunk], prepare: Callable[[], None]) -> int:
        """Prepare and check what this rank writes; return its size."""
        prepare()
        check_finite((chunk.name, chunk.kind, chunk.values) for chunk in plan)
        check_finite_values(self._contents["state"], "state")
        return sum(chunk.num_bytes for chunk in plan)

    @contextlib.contextmanager
    def _sized_errors(self) -> Iterator[None]:
        """Add the needed and the free bytes to the error of a full disk."""
        try:
            yield
        except OSError as error:
            text = describe_write_error(error, self.final, needed_bytes=self._num_bytes)
            raise CheckpointError(text, fix=STORAGE_FIX) from error

    @contextlib.contextmanager
    def _cleaned_up(self) -> Iterator[None]:
        """Remove the files of this save on an error, and add what failed to the message."""
        try:
            yield
        except CheckpointError as error:
            if self.is_committing:
                remove_failed_save(self.temporary, self.disk)
            problem = f"saving iteration {self.iteration} to {self.final} failed: {error.problems[0].text}"
            kind = NotFiniteStateError if isinstance(error, NotFiniteStateError) else CheckpointError
            raise kind(problem, fix=error.problems[0].fix) from error


def begin_save(folder: Path, temporary: Path, num_bytes: int, disk: Disk) -> None:
    """Create the temporary folder if there is enough space.

    Raises:
        CheckpointError: fewer than `num_bytes` and a margin are free.
    """
    new = [path for path in (folder, *folder.parents) if not path.exists()]
    disk.make_folder(folder)
    for path in new:
        disk.sync_folder(path.parent)
    needed, free = math.ceil(num_bytes * SPACE_MARGIN), disk.free_bytes(folder)
    if needed > free:
        raise CheckpointError(
            f"{folder}: the checkpoint needs {needed:,} bytes, {free:,} bytes are free",
            fix="free some space, or delete old checkpoints; existing ones are intact",
        )
    disk.make_folder(temporary)


def write_rank_shards(
    temporary: Path,
    rank: int,
    plan: Sequence[PlannedChunk],
    disk: Disk,
    *,
    file_bytes: int = FILE_BYTES,
    verifies: bool = False,
) -> list[dict[str, Any]]:
    """Write this rank's files, some at a time; return a report of each."""

    def write(file: tuple[str, list[PlannedChunk]]) -> dict[str, Any]:
        name, part = file
        entries = [chunk.entry for chunk in part]
        data = copied_ahead(part, host_buffers(part))
        return file_report(
            name, part, write_shard_file(disk, temporary / name, entries, data, verifies=verifies)
        )

    # One thread fills the page cache more slowly than many disks write.
    with ThreadPoolExecutor(_FILES_AT_A_TIME) as pool:
        return list(pool.map(write, split_into_files(plan, rank, file_bytes)))


def host_buffers(part: Sequence[PlannedChunk]) -> list[Tensor]:
    """Return memory for two chunks of a GPU, pinned; torch keeps it for the next file."""
    sizes = [chunk.num_bytes for chunk in part if not chunk.values.is_cpu]
    is_pinned = any(chunk.values.is_cuda for chunk in part)
    return (
        [torch.empty(max(sizes), dtype=torch.uint8, pin_memory=is_pinned) for _ in range(2)] if sizes else []
    )


def copied_ahead(part: Sequence[PlannedChunk], buffers: Sequence[Tensor]) -> Iterator[memoryview]:
    """Yield the bytes of each chunk, from its buffer if there are any, while the next one is copied."""

    def copied(number: int) -> memoryview:
        values = part[number].values.detach()
        data = values.view(-1).view(torch.uint8)
        is_copied = buffers and (not values.is_cpu or len(data) <= len(buffers[0]))
        return bytes_of(buffers[number % 2][: len(data)].copy_(data) if is_copied else data)

    return one_ahead(copied, len(part))


def file_report(name: str, part: Sequence[PlannedChunk], written: WrittenFile) -> dict[str, Any]:
    """Return the name, size, checksums and chunks of a file, for `merge_reports`."""
    rows = [
        (chunk.name, chunk.shape, chunk.kind, chunk.entry.dtype, chunk.key, chunk.box, checksums)
        for chunk, checksums in zip(part, written.checksums, strict=True)
    ]
    file = {"num_bytes": written.num_bytes, "header_crc32": written.header_crc32}
    return {"name": name, "file": file, "chunks": rows}


def merge_reports(reports: Sequence[Sequence[Mapping[str, Any]]], **contents: Any) -> Manifest:
    """Return the manifest of all ranks' files, with these other fields. Raises InvalidError unless chunks cover every tensor."""
    files, tensors = tensors_of([report for of_rank in reports for report in of_rank])
    kinds = {name: tensor.kinds for name, tensor in tensors.items()}
    check_kinds(kinds, contents["state"], contents["config"])
    check_tiling(tensors)
    return Manifest(files=files, tensors=tensors, **contents)


def commit_save(
    temporary: Path, final: Path, manifest: Manifest, disk: Disk, *, replaces: bool = True
) -> None:
    """Turn a folder with all shards into the checkpoint `final`.

    Args:
        replaces: it replaces an older one of the iteration; otherwise an older one is an OSError.

    Raises:
        CheckpointError: rank 0 does not see all files as they were written.
    """
    with ThreadPoolExecutor(CHECKS_AT_A_TIME) as pool:
        for _ in pool.map(lambda file: check_written(temporary / file[0], file[1]), manifest.sizes.items()):
            pass
    write_file(disk, temporary / MANIFEST_NAME, encode(manifest))
    disk.sync_folder(temporary)
    rename_whole(temporary, final, manifest.iteration, disk, replaces=replaces)


def check_written(path: Path, num_bytes: int) -> None:
    """Raise CheckpointError unless this rank sees the file of another rank as it was written."""
    try:
        check_size(path, path.lstat().st_size, num_bytes)
    except (OSError, DamagedError) as error:
        raise CheckpointError(
            f"{path}: rank 0 does not see the file as it was written ({error})",
            fix="give --save a folder on storage that all nodes share",
        ) from error


def rename_whole(temporary: Path, final: Path, iteration: int, disk: Disk, *, replaces: bool = True) -> None:
    """Give a complete temporary folder its name, and name it in the tracker.

    Raises:
        CheckpointError: a link took the place of the temporary folder.
    """
    if temporary.is_symlink():
        raise CheckpointError(
            f"{temporary}: a link took the place of the folder that the save had created",
            fix="find the program that changes --save; older checkpoints are intact",
        )
    if replaces and (final.exists() or final.is_symlink()):
        kind = "megatron" if is_of_megatron(final) else "old"  # the former is never removed
        disk.rename(final, final.with_name(f"{final.name}.{kind}-{_save_id(temporary)}"))
    disk.rename(temporary, final)
    disk.sync_folder(final.parent)
    tracker = final.with_name(TRACKER_NAME)
    new_tracker = _temporary_tracker(temporary)
    write_file(disk, new_tracker, str(iteration).encode())
    disk.rename(new_tracker, tracker)
    disk.sync_folder(final.parent)


def remove_failed_save(temporary: Path, disk: Disk) -> None:
    """Remove the files of a failed save. Errors are ignored: the one that made it fail is raised."""
    for path in (temporary, _temporary_tracker(temporary)):
        with contextlib.suppress(OSError):
            disk.remove(path)


def remove_leftovers(folder: Path, disk: Disk) -> None:
    """Remove the files of saves that were interrupted, and replaced checkpoints. Errors are ignored: the next save tries again.

    A checkpoint that was renamed for a replacement that never came gets its name back.
    """
    with contextlib.suppress(OSError):
        for path in list(leftovers(folder)):
            with contextlib.suppress(OSError):
                final = path.with_name(path.name.partition(".old-")[0])
                if final == path or ".tmp-" in path.name:
                    disk.remove(path)
                elif final.exists():
                    remove_whole(path, disk)
                else:
                    disk.rename(path, final)


def _save_id(temporary: Path) -> str:
    return temporary.name.rpartition("-")[2]


def _temporary_tracker(temporary: Path) -> Path:
    return temporary.with_name(f"{TRACKER_NAME}.tmp-{_save_id(temporary)}")
