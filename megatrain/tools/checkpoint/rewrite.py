"""`megatrain checkpoint reshard | export-weights`: write the tensors of a checkpoint into other files.

reshard          source ─> boxes of at most 64 MB ─> N files of equal size ─> committed as a save commits
export-weights   source ─> rows of weights, 64 MB ─> model-00001-of-00002.safetensors, model.safetensors.index.json

One piece is written while a thread reads the next one: two are in memory.
"""

from __future__ import annotations

import argparse
import contextlib
import errno
import json
import math
import secrets
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from megatrain.checkpoint.adaptation import merged
from megatrain.checkpoint.chunks import CHUNK_BYTES, chunk_key, split_box
from megatrain.checkpoint.errors import CheckpointError
from megatrain.checkpoint.find import base_folder, folder_name
from megatrain.checkpoint.manifest import DTYPES
from megatrain.checkpoint.reader import CheckpointReader, TensorReader
from megatrain.checkpoint.save import begin_save, commit_save, merge_reports, remove_failed_save
from megatrain.checkpoint.shard_file import ChunkEntry, one_ahead, write_shard_file
from megatrain.checkpoint.stored_values import FIELDS
from megatrain.checkpoint.tensor_file import bytes_of
from megatrain.config.errors import ConfigError
from megatrain.interop.hf.folder import INDEX_NAME
from megatrain.parallel.layout import box_shape, whole_box
from megatrain.storage.disk import Disk, write_file
from megatrain.tools.checkpoint.source import Progress, TensorPart, opened, size_text

_FILE_BYTES = 5 << 30
DTYPE_NAMES = {"fp32": "F32", "bf16": "BF16", "fp16": "F16"}


def reshard(arguments: argparse.Namespace) -> None:
    """Write a checkpoint again, with another number of files."""
    with opened(arguments.source) as reader:
        write_checkpoint(reader, arguments.target, arguments.files)


def merge_lora(arguments: argparse.Namespace) -> None:
    """Write the weights with the adapters of --lora-rank merged into them, as a checkpoint."""
    with opened(arguments.source) as reader:
        if merged(reader) is reader:
            raise ConfigError(f"{reader.path} has no adapters", fix="use the checkpoint as it is")
        write_checkpoint(merged(reader), arguments.target, None)


def write_checkpoint(reader: TensorReader, target: Path, num_files: int | None) -> None:
    """Write all that `reader` reads as a checkpoint in the folder `target`; it is committed as a save is.

    Args:
        num_files: None: files of about 5 GB.
    """
    final = target / folder_name(reader.manifest.iteration)
    if base_folder(target) != target or final.exists():
        raise ConfigError(
            f"{final if final.exists() else target} is a checkpoint", fix="name another target folder"
        )
    parts = list(_boxes(reader))
    total = sum(part.num_bytes for part in parts)
    files = _balanced(parts, num_files or math.ceil(total / _FILE_BYTES))
    disk = Disk()
    with _temporary_folder(final, total, target, disk) as temporary:
        _write_files(reader, files, temporary, final, disk)
    print(f"{final}: {len(files)} {'file' if len(files) == 1 else 'files'}, {size_text(total)}")


def export_weights(arguments: argparse.Namespace) -> None:
    """Write the weights as plain safetensors files with an index."""
    with opened(arguments.source) as reader:
        weights = list(_whole_weights(reader, DTYPE_NAMES.get(arguments.dtype)))
        write_weights(reader, weights, arguments.target, max_file_gb=arguments.max_file_gb)


def write_weights(
    reader: TensorReader,
    weights: Sequence[TensorPart],
    target: Path,
    *,
    max_file_gb: float,
    others: Mapping[str, bytes] | None = None,
    is_read_whole: Callable[[str], bool] = lambda _: False,
) -> None:
    """Write whole tensors as safetensors files with an index.

    Args:
        is_read_whole: whether `reader` reads a tensor, by name, only as a whole; others are read in pieces.
        target: the folder; it appears when it is complete.
        others: more files, by name.
    """
    require_absent(target)
    files, disk = list(_filled(weights, round(max_file_gb * 1e9))), Disk()
    num_bytes = sum(part.num_bytes for part in weights)
    with new_folder(target, num_bytes, disk) as temporary:
        pieces = [[piece for part in file for piece in _pieces(part, is_read_whole)] for file in files]
        _write_weights(reader, files, pieces, temporary, disk)
        for name, data in (others or {}).items():
            write_file(disk, temporary / name, data)
    print(f"{target}: {len(weights)} weights, {size_text(num_bytes)}")


def require_absent(target: Path) -> None:
    """Raise ConfigError if the target exists."""
    if target.exists():
        raise ConfigError(f"{target} exists", fix="name a folder that does not exist yet")


@contextlib.contextmanager
def new_folder(final: Path, num_bytes: int, disk: Disk) -> Iterator[Path]:
    """Create a folder with space for `num_bytes`, which gets the name `final` once it is written; see `_temporary_folder`."""
    with _temporary_folder(final, num_bytes, final, disk) as temporary:
        yield temporary
        disk.sync_folder(temporary)
        disk.rename(temporary, final)
        disk.sync_folder(final.parent)


@contextlib.contextmanager
def _temporary_folder(final: Path, num_bytes: int, target: Path, disk: Disk) -> Iterator[Path]:
    """Create a folder next to `final` with space for `num_bytes`; remove it if writing fails.

    Raises:
        CheckpointError: too little space is free, or writing to `target` failed.
        ConfigError: another process has created `final`.
    """
    temporary = final.with_name(f"{final.name}.tmp-{secrets.token_hex(4)}")
    try:
        begin_save(final.parent, temporary, num_bytes, disk)
        yield temporary
    except BaseException as error:
        remove_failed_save(temporary, disk)
        if isinstance(error, OSError) and error.errno in (errno.ENOTEMPTY, errno.EEXIST, errno.ENOTDIR):
            raise ConfigError(
                f"{final}: another process has created it", fix="name another target folder"
            ) from error
        if isinstance(error, OSError):
            raise CheckpointError(
                f"{error.filename or target}: {error.strerror} (errno {error.errno})",
                fix="free space or repair the storage of the target, or name another; the source is unchanged",
            ) from error
        raise


def _write_files(
    reader: TensorReader, files: Sequence[Sequence[TensorPart]], temporary: Path, final: Path, disk: Disk
) -> None:
    reports: list[dict[str, Any]] = []
    with Progress("writing", sum(part.num_bytes for parts in files for part in parts)) as progress:
        for number, parts in enumerate(files):
            name = f"shard_{number:05d}.safetensors"
            entries = [
                ChunkEntry(
                    chunk_key(part.kind, part.name, part.box), part.dtype, box_shape(part.box), part.num_bytes
                )
                for part in parts
            ]
            written = write_shard_file(disk, temporary / name, entries, _data(reader, parts, progress))
            rows = [
                (part.name, part.shape, part.kind, part.dtype, entry.key, part.box, checksums)
                for part, entry, checksums in zip(parts, entries, written.checksums, strict=True)
            ]
            file = {"num_bytes": written.num_bytes, "header_crc32": written.header_crc32}
            reports.append({"name": name, "file": file, "chunks": rows})
    manifest = merge_reports([reports], **{name: getattr(reader.manifest, name) for name in FIELDS})
    commit_save(temporary, final, manifest, disk, replaces=False)


def _write_weights(
    reader: TensorReader,
    files: Sequence[Sequence[TensorPart]],
    pieces: Sequence[Sequence[TensorPart]],
    temporary: Path,
    disk: Disk,
) -> None:
    weight_map: dict[str, str] = {}
    total = sum(part.num_bytes for parts in files for part in parts)
    with Progress("writing", total) as progress:
        for number, (parts, pieces_of_file) in enumerate(zip(files, pieces, strict=True), 1):
            name = f"model-{number:05d}-of-{len(files):05d}.safetensors"
            entries = [ChunkEntry(part.name, part.dtype, part.shape, part.num_bytes) for part in parts]
            # Old versions of transformers refuse files without this entry.
            write_shard_file(
                disk,
                temporary / name,
                entries,
                _data(reader, pieces_of_file, progress),
                metadata={"format": "pt"},
            )
            weight_map |= dict.fromkeys((part.name for part in parts), name)
    index = {"metadata": {"total_size": total}, "weight_map": weight_map}
    write_file(disk, temporary / INDEX_NAME, json.dumps(index, indent=2).encode())


def _data(reader: TensorReader, parts: Sequence[TensorPart], progress: Progress) -> Iterator[memoryview]:
    """Yield the bytes of each part; while one is in use, the next is read."""
    size = max(part.stored_bytes(reader) for part in parts)
    buffers = [torch.empty(size, dtype=torch.uint8) for _ in range(2)]
    produced = one_ahead(lambda number: _bytes(reader, parts[number], buffers[number % 2]), len(parts))
    for part, data in zip(parts, produced, strict=True):
        yield data
        progress.add(part.num_bytes)


def _bytes(reader: TensorReader, part: TensorPart, buffer: Tensor) -> memoryview:
    """Return the bytes of a part in its dtype, in `buffer` if it is stored so."""
    values = part.read(reader, buffer)
    converted = values.to(DTYPES[part.dtype])
    if converted is not values and not bool(converted.isfinite().all()) and bool(values.isfinite().all()):
        raise ConfigError(
            f"{part.name} has values up to {float(values.abs().max()):g}, which {part.dtype} cannot represent",
            fix="use --dtype bf16 or fp32",
        )
    return bytes_of(converted)


def _pieces(part: TensorPart, is_read_whole: Callable[[str], bool]) -> Iterator[TensorPart]:
    """Yield rows of a whole tensor, of at most 64 MB as far as a row is not larger."""
    num_rows = part.shape[0] if part.shape else 1
    step = max(1, CHUNK_BYTES * num_rows // max(part.num_bytes, 1))
    if step >= num_rows or is_read_whole(part.name):
        yield part
        return
    for start in range(0, num_rows, step):
        yield replace(part, box=((start, min(start + step, num_rows)), *part.box[1:]))


def _boxes(reader: TensorReader) -> Iterator[TensorPart]:
    """Yield boxes of bounded size that cover all tensors, by kind and name."""
    manifest = reader.manifest
    kinds = {kind: None for tensor in manifest.tensors.values() for kind in tensor.kinds}
    for kind in kinds:
        for name, tensor in sorted(manifest.tensors.items()):
            if kind in tensor.kinds:
                dtype = tensor.kinds[kind].dtype
                for box in split_box(whole_box(tensor.shape), CHUNK_BYTES // DTYPES[dtype].itemsize):
                    yield TensorPart(name, kind, tensor.shape, dtype, box)


def _whole_weights(reader: CheckpointReader, dtype: str | None) -> Iterator[TensorPart]:
    for name, tensor in sorted(reader.manifest.tensors.items()):
        if "weight" not in tensor.kinds:
            continue
        stored = tensor.kinds["weight"]
        yield TensorPart(name, "weight", tensor.shape, dtype or stored.dtype, whole_box(tensor.shape))


def _balanced(parts: Sequence[TensorPart], num_files: int) -> list[list[TensorPart]]:
    """Split the parts, in order, into files of nearly equal size; fewer files if there are fewer parts."""
    num_files = min(num_files, len(parts))
    per_file = math.ceil(sum(part.num_bytes for part in parts) / num_files)
    files: list[list[TensorPart]] = [[] for _ in range(num_files)]
    done = 0
    for part in parts:
        files[min(done // per_file, num_files - 1)].append(part)
        done += part.num_bytes
    return [file for file in files if file]


def _filled(parts: Sequence[TensorPart], max_bytes: int) -> Iterator[list[TensorPart]]:
    """Yield files of at most `max_bytes`, or of a single larger tensor."""
    file: list[TensorPart] = []
    for part in parts:
        if file and sum(other.num_bytes for other in file) + part.num_bytes > max_bytes:
            yield file
            file = []
        file.append(part)
    yield file
