"""The manifest of many ranks in parts: each rank describes its own files next to them, and the root lists the parts.

    every rank: shards, fsync ─> part_00005.json, fsync ─> one line ─> rank 0: do all chunks tile all tensors? ─> manifest.json
    manifest.json    a manifest with "parts": {part: {"bytes", "crc32", "files": {file: bytes}, "name_keys"}}
    part_00005.json  "files" and "tensors" of a manifest, with the chunks of one rank

`name_keys` has the `name_key` of each tensor of a part. A rank that loads reads its own part, which has all that it needs unless the
layout has changed, and then the parts of the tensors that it lacks. Tools read all parts.

Rank 0 sees no chunk. That the chunks tile the tensors follows from sums of hashes: a box adds the hashes of its corners, with signs that
alternate along each edge, and the box at a tensor's first element subtracts those of the whole tensor. If each tensor and kind has one
such box, the total is zero exactly if `tiling_problem` finds none (but for a collision of 64-bit hashes).
"""

from __future__ import annotations

import hashlib
import itertools
import zlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Final

from megatrain.checkpoint.checked_files import read_small_file
from megatrain.checkpoint.errors import DamagedError
from megatrain.checkpoint.manifest import (
    VERSION_IN_PARTS,
    Chunk,
    Manifest,
    StoredFile,
    StoredKind,
    StoredPart,
    StoredTensor,
    canonical,
    check_tiling,
    decoded_tensors,
    encoded_tensors,
    name_key,
    read_root,
)
from megatrain.checkpoint.stored_values import check_kinds
from megatrain.parallel.layout import Box
from megatrain.storage.disk import Disk, write_file
from megatrain.storage.untrusted_json import InvalidError, json_object, parse_json

MAX_RANKS_OF_WHOLE: Final = 64
"""A checkpoint of more ranks has a manifest in parts."""
Reports = Sequence[Mapping[str, Any]]
"""Files of one rank, each as `save.file_report` describes it."""


def part_name(rank: int) -> str:
    return f"part_{rank:05d}.json"


def tensors_of(reports: Reports) -> tuple[dict[str, StoredFile], dict[str, StoredTensor]]:
    """Return files and tensors of reports, in their order."""
    files: dict[str, StoredFile] = {}
    shapes: dict[str, tuple[int, ...]] = {}
    chunks: dict[str, dict[tuple[str, str], list[Chunk]]] = {}
    for report in reports:
        files[report["name"]] = StoredFile(**report["file"])
        for name, shape, kind, dtype, key, box, checksums in report["chunks"]:
            chunk = Chunk(report["name"], key, tuple((start, stop) for start, stop in box), checksums)
            shapes[name] = tuple(shape)
            chunks.setdefault(name, {}).setdefault((kind, dtype), []).append(chunk)
    for name, kinds in chunks.items():
        assert len({kind for kind, _ in kinds}) == len(kinds), f"{name} has {list(kinds)}"
    return files, {
        name: StoredTensor(
            shapes[name], {kind: StoredKind(dtype, tuple(found)) for (kind, dtype), found in kinds.items()}
        )
        for name, kinds in chunks.items()
    }


def write_part(folder: Path, rank: int, reports: Reports, disk: Disk) -> dict[str, Any] | None:
    """Write the part of a rank; return its line for `merge_parts`, or None if the rank has no files."""
    if not reports:
        return None
    files, tensors = tensors_of(reports)
    text = canonical(encoded_tensors(files, tensors))
    write_file(disk, folder / part_name(rank), text)
    return {
        "name": part_name(rank),
        "bytes": len(text),
        "crc32": zlib.crc32(text),
        "files": {name: file.num_bytes for name, file in files.items()},
        "name_keys": "".join(sorted({name_key(name) for name in tensors})),
        "tiling": _tiling_sum(tensors),
        "origins": [
            (name, kind)
            for name, tensor in tensors.items()
            for kind, stored in tensor.kinds.items()
            for chunk in stored.chunks
            if _is_first(chunk.box)
        ],
    }


def merge_parts(lines: Sequence[Mapping[str, Any] | None], **contents: Any) -> Manifest:
    """Return the root of all parts; assert that the chunks of all ranks cover every tensor."""
    found = [line for line in lines if line is not None]
    origins = [(name, kind) for line in found for name, kind in line["origins"]]
    assert len(set(origins)) == len(origins), "chunks overlap at the first element of a tensor"
    kinds: dict[str, set[str]] = {}
    for name, kind in origins:
        kinds.setdefault(name, set()).add(kind)
    check_kinds(kinds, contents["state"], contents["config"])
    keys = set[str]().union(*(_split_keys(line["name_keys"]) for line in found))
    assert keys == {name_key(name) for name in kinds}, "a tensor lacks its first element"
    assert sum(line["tiling"] for line in found) % (1 << 64) == 0, "chunks overlap, or elements are missing"
    parts = {
        line["name"]: StoredPart(
            line["bytes"],
            line["crc32"],
            line["files"],
            frozenset(_split_keys(line["name_keys"])),
        )
        for line in found
    }
    return Manifest(files={}, tensors={}, parts=parts, **contents)


def read_part(path: Path, name: str, root: Manifest) -> tuple[dict[str, StoredFile], dict[str, StoredTensor]]:
    """Read and check a part of the checkpoint at `path`. Raises DamagedError."""
    file, stored = path / name, root.parts[name]
    text = read_small_file(file, max_bytes=stored.num_bytes)
    if len(text) != stored.num_bytes or zlib.crc32(text) != stored.crc32:
        raise DamagedError(f"{file}: the size or the checksum is not that in the manifest")
    try:
        content = json_object(parse_json(text, max_bytes=stored.num_bytes), "the part")
        files, tensors = decoded_tensors(content, VERSION_IN_PARTS, root.blocks)
        if {name: one.num_bytes for name, one in files.items()} != dict(stored.files):
            raise InvalidError("its files are not those in the manifest")
        if not {name_key(name) for name in tensors} <= stored.name_keys:
            raise InvalidError("its tensors are not those in the manifest")
    except (RecursionError, ValueError) as error:
        raise DamagedError(f"{file}: {str(error)[:500]}") from error
    return files, tensors


def read_manifest(path: Path) -> Manifest:
    """Read and check the manifest of the checkpoint at `path`, with all its parts.

    Raises:
        DamagedError: it is missing, or differs from what was written.
        MismatchError: another version of the program wrote it.
    """
    root = read_root(path)
    if not root.parts:
        return root
    whole = Parts(path, root)
    whole.read(root.parts)
    try:
        check_tiling(whole.tensors)
        check_kinds({name: tensor.kinds for name, tensor in whole.tensors.items()}, root.state, root.config)
    except InvalidError as error:
        raise DamagedError(f"{path}: {str(error)[:500]}") from error
    return replace(root, files=whole.files, tensors=whole.tensors)


class Parts:
    """The parts of a manifest that have been read, as one."""

    def __init__(self, path: Path, root: Manifest) -> None:
        self.path, self.root = path, root
        self.files: dict[str, StoredFile] = {}
        self.tensors: dict[str, StoredTensor] = {}
        self.names: set[str] = set()
        """Parts that have been read."""

    def with_tensor(self, name: str) -> Iterator[str]:
        """Yield the parts that may have chunks of a tensor and are not read."""
        key = name_key(name)
        return (
            part
            for part, stored in self.root.parts.items()
            if part not in self.names and key in stored.name_keys
        )

    def read(self, names: Iterator[str] | Mapping[str, StoredPart] | Sequence[str]) -> None:
        """Read parts that are not read yet. Raises DamagedError."""
        for part in names:
            if part in self.names:
                continue
            files, tensors = read_part(self.path, part, self.root)
            self.names.add(part)
            self.files |= files
            for name, tensor in tensors.items():
                self.tensors[name] = self._joined(part, name, self.tensors.get(name), tensor)

    def _joined(self, part: str, name: str, one: StoredTensor | None, other: StoredTensor) -> StoredTensor:
        if one is None:
            return other
        kinds = dict(one.kinds)
        for kind, stored in other.kinds.items():
            known = kinds.get(kind, StoredKind(stored.dtype, ()))
            if one.shape != other.shape or known.dtype != stored.dtype:
                raise DamagedError(f"{self.path / part}: {name} differs from other parts")
            kinds[kind] = StoredKind(stored.dtype, known.chunks + stored.chunks)
        return StoredTensor(one.shape, kinds)


def _tiling_sum(tensors: Mapping[str, StoredTensor]) -> int:
    """Return the sum of hashes of this rank's boxes (module docstring), modulo 2**64."""
    total = 0
    for name, tensor in tensors.items():
        whole: Box = tuple((0, size) for size in tensor.shape)
        for kind, stored in tensor.kinds.items():
            where = f"{name}\0{kind}\0{stored.dtype}\0{tensor.shape}\0".encode()
            for chunk in stored.chunks:
                total += _corner_sum(where, chunk.box)
                if _is_first(chunk.box):
                    total -= _corner_sum(where, whole)
    return total % (1 << 64)


def _corner_sum(where: bytes, box: Box) -> int:
    total = 0
    for corner in itertools.product(*(((start, 1), (stop, -1)) for start, stop in box)):
        place = where + repr([at for at, _ in corner]).encode()
        digest = int.from_bytes(hashlib.blake2b(place, digest_size=8).digest(), "little")
        total += -digest if sum(sign < 0 for _, sign in corner) % 2 else digest
    return total


def _is_first(box: Box) -> bool:
    return not any(start for start, _ in box)


def _split_keys(keys: str) -> list[str]:
    return [keys[start : start + 8] for start in range(0, len(keys), 8)]
