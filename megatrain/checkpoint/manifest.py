"""The manifest of a checkpoint: its tensors and the files that store them. A folder with a valid manifest is a checkpoint.

    manifest.json   {"format": "megatrain", "version", "iteration", "consumed_train_samples", "optimizer_step_count",
                     "state": {...}, "config": {...},
                     "files":   {file: {"bytes", "header_crc32"}},
                     "tensors": {canonical name: {"shape", "kinds": {kind: {"dtype", "chunks": [
                                    {"file", "key", "box": [[start, stop], ...], "crc32"}]}}}},
                     "checksum": crc32 of the rest as canonical JSON (sorted keys, no spaces, ASCII)}

A manifest is untrusted input: every value is checked, and no file name leads out of the folder.
"""

from __future__ import annotations

import json
import math
import re
import zlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from megatrain.checkpoint.disk import read_small_file
from megatrain.checkpoint.errors import DamagedError, MismatchError
from megatrain.parallel.layout import Box, box_shape, intersect

MANIFEST_NAME = "manifest.json"
FORMAT, VERSION = "megatrain", 1
DTYPES = {"F64": torch.float64, "F32": torch.float32, "BF16": torch.bfloat16, "F16": torch.float16}
"""Dtypes by their safetensors names."""

_MAX_BYTES = 1 << 30
_MAX_ELEMENTS = 1 << 50
_MAX_DIMS = 8
_FILE_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.-]{0,200}\.safetensors")


@dataclass(frozen=True)
class Chunk:
    """A box of a tensor, stored contiguously under `key` of a file."""

    file: str
    key: str
    box: Box
    crc32: int


@dataclass(frozen=True)
class StoredKind:
    """One kind of state of a tensor: its chunks tile the shape."""

    dtype: str
    chunks: tuple[Chunk, ...]


@dataclass(frozen=True)
class StoredTensor:
    """A canonical tensor: weight and optimizer state, by kind."""

    shape: tuple[int, ...]
    kinds: Mapping[str, StoredKind]


@dataclass(frozen=True)
class StoredFile:
    """A file of chunks: its size in bytes and the crc32 of its header."""

    num_bytes: int
    header_crc32: int


@dataclass(frozen=True, kw_only=True)
class Manifest:
    """Everything in a checkpoint except tensor data."""

    iteration: int
    consumed_train_samples: int
    optimizer_step_count: int
    state: Mapping[str, Any]
    """JSON values that the caller of `save_checkpoint` stores."""
    config: Mapping[str, Any]
    """The resolved configuration of the run."""
    files: Mapping[str, StoredFile]
    tensors: Mapping[str, StoredTensor]
    checksum: int = 0
    """Crc32 as read; 0 before the manifest is written."""


def read_manifest(path: Path) -> Manifest:
    """Read and check the manifest of the checkpoint at `path`.

    Raises:
        DamagedError: it is missing, or differs from what was written.
        MismatchError: another version of the program wrote it.
    """
    file = path / MANIFEST_NAME
    text = read_small_file(file, max_bytes=_MAX_BYTES)
    try:
        return decode(text)
    except (_InvalidManifestError, RecursionError, ValueError) as error:
        raise DamagedError(f"{file}: {error}") from error
    except MismatchError as error:
        raise MismatchError(f"{file}: {error.problems[0].text}", fix=error.problems[0].fix) from error


def encode(manifest: Manifest) -> bytes:
    """Return the content of `manifest.json`."""
    tensors = {
        name: {
            "shape": tensor.shape,
            "kinds": {
                kind: {"dtype": stored.dtype, "chunks": [vars(chunk) for chunk in stored.chunks]}
                for kind, stored in tensor.kinds.items()
            },
        }
        for name, tensor in manifest.tensors.items()
    }
    files = {
        name: {"bytes": file.num_bytes, "header_crc32": file.header_crc32}
        for name, file in manifest.files.items()
    }
    own = ("iteration", "consumed_train_samples", "optimizer_step_count", "state", "config")
    content = {"format": FORMAT, "version": VERSION, "files": files, "tensors": tensors}
    content |= {name: getattr(manifest, name) for name in own}
    content = json.loads(json.dumps(content))  # converts keys to strings before they are sorted
    text = _canonical(content | {"checksum": zlib.crc32(_canonical(content))})
    assert len(text) <= _MAX_BYTES, f"a manifest of {len(text)} bytes exceeds what `read_manifest` reads"
    return text


def decode(text: bytes) -> Manifest:
    """Return the manifest that `encode` wrote; its errors do not name the file."""
    content = _dict(json.loads(text), "the manifest")
    checksum = _int(content, "checksum")
    del content["checksum"]
    if checksum != zlib.crc32(_canonical(content)):
        raise _InvalidManifestError("the checksum does not match the content")
    if content.get("format") != FORMAT or content.get("version") != VERSION:
        found = f"format {content.get('format')!r}, version {content.get('version')!r}"
        raise MismatchError(
            f"{found}; this program reads {FORMAT!r}, version {VERSION}", fix="use the program that wrote it"
        )
    files = {
        _file_name(name): StoredFile(_int(file, "bytes"), _int(file, "header_crc32"))
        for name, file in _items(content, "files")
    }
    tensors = {name: _tensor(name, tensor, files) for name, tensor in _items(content, "tensors")}
    return Manifest(
        iteration=_int(content, "iteration"),
        consumed_train_samples=_int(content, "consumed_train_samples"),
        optimizer_step_count=_int(content, "optimizer_step_count"),
        state=_dict(content.get("state"), "state"),
        config=_dict(content.get("config"), "config"),
        files=files,
        tensors=tensors,
        checksum=checksum,
    )


def tiling_problem(shape: Sequence[int], boxes: Sequence[Box]) -> str | None:
    """Return why the boxes do not cover each element of the shape exactly once, or None if they do.

    Boxes are sorted by their first dimension, so that only boxes that overlap in it are compared.
    """
    covered = sum(math.prod(box_shape(box)) for box in boxes)
    if covered != math.prod(shape):
        return f"chunks have {covered} elements, the tensor has {math.prod(shape)}"
    open_boxes: list[Box] = []
    for box in sorted(boxes):
        open_boxes = [other for other in open_boxes if other[0][1] > box[0][0]]
        for other in open_boxes:
            if intersect(box, other):
                return f"chunks {other} and {box} overlap"
        open_boxes.append(box)
    return None


class _InvalidManifestError(Exception):
    """An invalid value in a manifest."""


def _canonical(content: Any) -> bytes:
    return json.dumps(content, sort_keys=True, separators=(",", ":")).encode()


def _tensor(name: str, value: Any, files: Mapping[str, StoredFile]) -> StoredTensor:
    sizes = _list(_dict(value, name).get("shape"), f"{name}: shape")
    shape = tuple(_int({"size": size}, "size", least=1) for size in sizes)
    if not 1 <= len(shape) <= _MAX_DIMS or math.prod(shape) > _MAX_ELEMENTS:
        raise _InvalidManifestError(f"{name}: shape {shape}")
    kinds = {kind: _kind(f"{name}: {kind}", shape, stored, files) for kind, stored in _items(value, "kinds")}
    return StoredTensor(shape, kinds)


def _kind(where: str, shape: tuple[int, ...], value: Any, files: Mapping[str, StoredFile]) -> StoredKind:
    dtype = _text(value, "dtype")
    if dtype not in DTYPES:
        raise _InvalidManifestError(f"{where}: dtype {dtype}")
    chunks = tuple(
        _chunk(where, shape, chunk, files) for chunk in _list(value.get("chunks"), f"{where}: chunks")
    )
    problem = tiling_problem(shape, [chunk.box for chunk in chunks])
    if problem:
        raise _InvalidManifestError(f"{where}: {problem}")
    return StoredKind(dtype, chunks)


def _chunk(where: str, shape: tuple[int, ...], value: Any, files: Mapping[str, StoredFile]) -> Chunk:
    file = _text(value, "file")
    if file not in files:
        raise _InvalidManifestError(f"{where}: {file!r} is not among the files")
    pairs = [_list(pair, f"{where}: box") for pair in _list(value.get("box"), f"{where}: box")]
    box = tuple((int(pair[0]), int(pair[1])) for pair in pairs if [type(n) for n in pair] == [int, int])
    is_inside = len(box) == len(pairs) == len(shape) and all(
        0 <= start < stop <= size for (start, stop), size in zip(box, shape, strict=True)
    )
    if not is_inside:
        raise _InvalidManifestError(f"{where}: box {pairs} of a tensor of shape {shape}")
    return Chunk(file, _text(value, "key"), box, _int(value, "crc32"))


def _file_name(name: str) -> str:
    if not _FILE_NAME.fullmatch(name):
        raise _InvalidManifestError(f"{name!r} is not a valid file name")
    return name


def _items(value: Any, key: str) -> Iterator[tuple[str, Any]]:
    yield from _dict(_dict(value, key).get(key), key).items()


def _dict(value: Any, what: str) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise _InvalidManifestError(f"{what} is not a JSON object")
    return value


def _list(value: Any, what: str) -> list[Any]:
    if not isinstance(value, list):
        raise _InvalidManifestError(f"{what} is not a list")
    return value


def _text(value: Any, key: str) -> str:
    found = _dict(value, key).get(key)
    if not isinstance(found, str):
        raise _InvalidManifestError(f"{key} {found!r} is not a string")
    return found


def _int(value: Any, key: str, *, least: int = 0) -> int:
    found = _dict(value, key).get(key)
    if not isinstance(found, int) or isinstance(found, bool) or not least <= found < 1 << 63:
        raise _InvalidManifestError(f"{key} {found!r} is not an integer of at least {least}")
    return found
