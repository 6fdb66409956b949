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
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import Tensor

from megatrain.checkpoint.disk import Disk, write_file
from megatrain.checkpoint.errors import CheckpointError, DamagedError, agree
from megatrain.checkpoint.find import TRACKER_NAME, folder_name, leftovers
from megatrain.checkpoint.finite import check_finite
from megatrain.checkpoint.manifest import (
    MANIFEST_NAME,
    Chunk,
    Manifest,
    StoredFile,
    StoredKind,
    StoredTensor,
    encode,
    tiling_problem,
)
from megatrain.checkpoint.tensor_file import check_size, dtype_name, write_tensor_file
from megatrain.optim.sharded import WEIGHT, ShardedOptimizer
from megatrain.parallel.grid import RankGrid
from megatrain.parallel.layout import Box, box_shape

_CHUNK_BYTES = 64 << 20
"""Largest chunk, and so the memory that reading a box needs."""
_FILE_BYTES = 4 << 30
"""A file gets no more chunks once it has this size."""
_SPACE_MARGIN = 1.1


@dataclass(frozen=True)
class PlannedChunk:
    """A part of this rank's state, to be written as one chunk."""

    name: str
    shape: tuple[int, ...]
    kind: str
    box: Box
    values: Tensor

    @property
    def key(self) -> str:
        return f"{self.kind}/{self.name}/" + ",".join(f"{start}-{stop}" for start, stop in self.box)

    @property
    def num_bytes(self) -> int:
        return self.values.numel() * self.values.element_size()


def save_checkpoint(
    folder: Path,
    *,
    iteration: int,
    consumed_train_samples: int,
    optimizer: ShardedOptimizer,
    grid: RankGrid,
    state: Mapping[str, Any],
    config: Mapping[str, Any],
    disk: Disk | None = None,
    with_optimizer: bool = True,
) -> Path:
    """Write the checkpoint of this iteration. All ranks call it and return once it is committed.

    Args:
        folder: folder on storage that all ranks share; created if missing.
        state, config: JSON values; those of rank 0 are stored.
        disk: writes the files.
        with_optimizer: also write optimizer state.

    Returns:
        The committed folder.

    Raises:
        CheckpointError: on all ranks; older checkpoints are intact.
    """
    disk = disk or Disk()
    kinds = optimizer.kinds if with_optimizer else (WEIGHT,)
    plan = plan_chunks(optimizer, grid, kinds)
    is_leader, final = grid.world.is_first, folder / folder_name(iteration)
    save_id = grid.messages.broadcast(secrets.token_hex(4))
    temporary = final.with_name(f"{final.name}.tmp-{save_id}")

    def check() -> int:
        check_finite((chunk.name, chunk.kind, chunk.values) for chunk in plan)
        return sum(chunk.num_bytes for chunk in plan)

    def begin(num_bytes: list[int]) -> None:
        begin_save(folder, temporary, sum(num_bytes), disk)

    def commit(reports: list[Any]) -> None:
        manifest = merge_reports(
            reports,
            iteration=iteration,
            consumed_train_samples=consumed_train_samples,
            optimizer_step_count=optimizer.step_count,
            state=state,
            config=config,
        )
        commit_save(temporary, final, manifest, disk)

    try:
        agree(check, grid.messages, then=begin)
        agree(lambda: write_rank_shards(temporary, grid.rank, plan, disk), grid.messages, then=commit)
    except CheckpointError as error:
        if is_leader:
            remove_failed_save(temporary, disk)
        problem = f"saving iteration {iteration} to {final} failed: {error.problems[0].text}"
        raise CheckpointError(problem, fix=error.problems[0].fix) from error
    if is_leader:
        remove_leftovers(folder, disk)
    return final


def plan_chunks(
    optimizer: ShardedOptimizer,
    grid: RankGrid,
    kinds: Sequence[str] | None = None,
    *,
    chunk_bytes: int = _CHUNK_BYTES,
) -> list[PlannedChunk]:
    """Return the chunks that this rank writes: each box of its shards, unless another rank writes its copy of the box."""
    plan: list[PlannedChunk] = []
    for kind in kinds or optimizer.kinds:
        for param, box, values in optimizer.owned(kind):
            if grid.owns(box.piece.copies, param.entry.layout.family):
                piece = box.piece
                plan += [
                    PlannedChunk(piece.name, piece.shape, kind, part, own)
                    for part, own in _split(box.box, values, chunk_bytes)
                ]
    return plan


def begin_save(folder: Path, temporary: Path, num_bytes: int, disk: Disk) -> None:
    """Create the temporary folder if there is enough space.

    Raises:
        CheckpointError: fewer than `num_bytes` and a margin are free.
    """
    is_new = not folder.exists()
    disk.make_folder(folder)
    if is_new:
        disk.sync_folder(folder.parent)
    needed, free = math.ceil(num_bytes * _SPACE_MARGIN), disk.free_bytes(folder)
    if needed > free:
        raise CheckpointError(
            f"{folder}: the checkpoint needs {needed} bytes, {free} bytes are free",
            fix="free some space, or delete old checkpoints; existing ones are intact",
        )
    disk.make_folder(temporary)


def write_rank_shards(
    temporary: Path, rank: int, plan: Sequence[PlannedChunk], disk: Disk, *, file_bytes: int = _FILE_BYTES
) -> list[dict[str, Any]]:
    """Write this rank's files; return the name, size, checksums and chunks of each, for `merge_reports`."""
    reports: list[dict[str, Any]] = []
    for number, part in enumerate(_split_into_files(plan, file_bytes)):
        name = f"shard_{rank:05d}.safetensors" if number == 0 else f"shard_{rank:05d}_{number}.safetensors"
        written = write_tensor_file(
            disk, temporary / name, [(chunk.key, chunk.values.view(box_shape(chunk.box))) for chunk in part]
        )
        rows = [
            (
                chunk.name,
                chunk.shape,
                chunk.kind,
                dtype_name(chunk.values.dtype),
                chunk.key,
                chunk.box,
                crc32s,
            )
            for chunk, crc32s in zip(part, written.crc32s, strict=True)
        ]
        file = {"num_bytes": written.num_bytes, "header_crc32": written.header_crc32}
        reports.append({"name": name, "file": file, "chunks": rows})
    return reports


def merge_reports(
    reports: Sequence[Sequence[Mapping[str, Any]]],
    *,
    iteration: int,
    consumed_train_samples: int,
    optimizer_step_count: int,
    state: Mapping[str, Any],
    config: Mapping[str, Any],
) -> Manifest:
    """Return the manifest of all ranks' files; assert that chunks cover every tensor."""
    files: dict[str, StoredFile] = {}
    shapes: dict[str, tuple[int, ...]] = {}
    chunks: dict[str, dict[tuple[str, str], list[Chunk]]] = {}
    for report in (report for rank_reports in reports for report in rank_reports):
        files[report["name"]] = StoredFile(**report["file"])
        for name, shape, kind, dtype, key, box, crc32s in report["chunks"]:
            chunk = Chunk(report["name"], key, tuple((start, stop) for start, stop in box), crc32s)
            shapes[name] = tuple(shape)
            chunks.setdefault(name, {}).setdefault((kind, dtype), []).append(chunk)
    has_optimizer = any(len(kinds) > 1 for kinds in chunks.values())
    for name, kinds in chunks.items():
        found_kinds = [kind for kind, _ in kinds]
        assert WEIGHT in found_kinds, f"{name} has {found_kinds}"
        assert (len(kinds) > 1) == has_optimizer, f"{name} has {found_kinds}"
        assert len(set(found_kinds)) == len(kinds), f"{name} has {list(kinds)}"
        for kind, found in kinds.items():
            problem = tiling_problem(shapes[name], [chunk.box for chunk in found])
            assert problem is None, f"{name}: {kind}: {problem}"
    return Manifest(
        iteration=iteration,
        consumed_train_samples=consumed_train_samples,
        optimizer_step_count=optimizer_step_count,
        state=state,
        config=config,
        files=files,
        tensors={
            name: StoredTensor(
                shapes[name],
                {kind: StoredKind(dtype, tuple(found)) for (kind, dtype), found in kinds.items()},
            )
            for name, kinds in chunks.items()
        },
    )


def commit_save(temporary: Path, final: Path, manifest: Manifest, disk: Disk) -> None:
    """Turn a folder with all shards into the checkpoint `final`, which replaces an older one of the iteration.

    Raises:
        CheckpointError: rank 0 does not see all files as they were written.
    """
    for name, stored in manifest.files.items():
        path = temporary / name
        try:
            check_size(path, path.lstat().st_size, stored)
        except (OSError, DamagedError) as error:
            raise CheckpointError(
                f"{path}: rank 0 does not see the file as it was written ({error})",
                fix="give --save a folder on storage that all nodes share",
            ) from error
    write_file(disk, temporary / MANIFEST_NAME, encode(manifest))
    disk.sync_folder(temporary)
    if final.exists() or final.is_symlink():
        disk.rename(final, final.with_name(f"{final.name}.old-{_save_id(temporary)}"))
    disk.rename(temporary, final)
    disk.sync_folder(final.parent)
    tracker = final.with_name(TRACKER_NAME)
    new_tracker = _temporary_tracker(temporary)
    write_file(disk, new_tracker, str(manifest.iteration).encode())
    disk.rename(new_tracker, tracker)
    disk.sync_folder(final.parent)


def remove_failed_save(temporary: Path, disk: Disk) -> None:
    """Remove the files of a failed save. Errors are ignored: the one that made it fail is raised."""
    for path in (temporary, _temporary_tracker(temporary)):
        with contextlib.suppress(OSError):
            disk.remove(path)


def remove_leftovers(folder: Path, disk: Disk) -> None:
    """Remove the files of saves that were interrupted. Errors are ignored: the next save tries again."""
    with contextlib.suppress(OSError, CheckpointError):
        for path in leftovers(folder):
            disk.remove(path)


def _save_id(temporary: Path) -> str:
    return temporary.name.rpartition("-")[2]


def _temporary_tracker(temporary: Path) -> Path:
    return temporary.with_name(f"{TRACKER_NAME}.tmp-{_save_id(temporary)}")


def _split(box: Box, values: Tensor, chunk_bytes: int) -> Iterator[tuple[Box, Tensor]]:
    """Yield boxes of bounded size that cover `box` in row-major order, each with its part of the flat values."""
    at, max_elements = 0, chunk_bytes // values.element_size()
    for part in split_box(box, max_elements):
        size = math.prod(box_shape(part))
        yield part, values[at : at + size]
        at += size


def split_box(box: Box, max_elements: int) -> Iterator[Box]:
    """Yield boxes of at most `max_elements` that cover `box`, each contiguous in it, in row-major order."""
    (start, stop), rest = box[0], box[1:]
    row_size = math.prod(box_shape(rest))
    if row_size > max_elements:
        for row in range(start, stop):
            for inner in split_box(rest, max_elements):
                yield ((row, row + 1), *inner)
        return
    step = max_elements // row_size
    for first in range(start, stop, step):
        yield ((first, min(first + step, stop)), *rest)


def _split_into_files(plan: Sequence[PlannedChunk], file_bytes: int) -> Iterator[list[PlannedChunk]]:
    part: list[PlannedChunk] = []
    num_bytes = 0
    for chunk in plan:
        part.append(chunk)
        num_bytes += chunk.num_bytes
        if num_bytes >= file_bytes:
            yield part
            part, num_bytes = [], 0
    if part:
        yield part
