"""The manifest of a checkpoint: its tensors and the files that store them. A folder with a valid manifest is a checkpoint.

    manifest.json   {"format": "megatrain", "version", "iteration", "consumed_train_samples", "optimizer_step_count",
                     "state": {...}, "config": {...}, "block_bytes",
                     "files":   {file: {"bytes", "header_crc32"}},
                     "tensors": {canonical name: {"shape", "kinds": {kind: {"dtype", "chunks": [
                                    {"file", "key", "box": [[start, stop], ...], "checksums"}]}}}},
                     "checksum": crc32 of the rest as canonical JSON (sorted keys, no spaces, ASCII)}

A checkpoint of many ranks is version 4, with `"parts"` instead of files and tensors: a part next to the shards of each rank has those of
the rank (parts.py). Smaller ones are version 3.

`checksums` has eight hexadecimal digits for each block of `block_bytes` of the chunk (block_checksums.py). In version 2 these are
`crc32s` of the blocks; in version 1, `crc32` is the checksum of the whole chunk.
A manifest is untrusted input: every value is checked, and no file name leads out of the folder.
"""

from __future__ import annotations

import itertools
import json
import math
import re
import zlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

import torch

from megatrain.checkpoint.block_checksums import BLOCKS, BlockFormat, checksum_of_sums
from megatrain.checkpoint.checked_files import read_small_file
from megatrain.checkpoint.errors import DamagedError, MismatchError
from megatrain.checkpoint.stored_values import FIELDS, check_stored_values, make_lists
from megatrain.config.model_spec.distillation import PROJECTION_PREFIX
from megatrain.config.schema.quantization import SCALE_PREFIX
from megatrain.optim.soap import FACTOR_PREFIX
from megatrain.parallel.layout import Box, box_shape
from megatrain.storage.untrusted_json import InvalidError, json_object, parse_json, shown

MANIFEST_NAME = "manifest.json"
FORMAT, VERSION, VERSION_IN_PARTS = "megatrain", 3, 4
DTYPES = {"F64": torch.float64, "F32": torch.float32, "BF16": torch.bfloat16, "F16": torch.float16}
"""Dtypes by their safetensors names."""

MAX_BYTES = 1 << 29
_MAX_ELEMENTS = 1 << 50
_MAX_CHUNK_ELEMENTS = 1 << 28
"""A chunk is read into memory; a save writes chunks of at most 64 MiB."""
_MAX_DIMS = 5
_MAX_CHARACTERS = 1 << 20
"""Limit of a name, a key, or the checksums of a chunk."""
_MAX_REASON = 500
"""Characters of a reason, which may name what the manifest names."""
_WHOLE_CHUNK = 1 << 62
"""Bytes of a block in version 1: a chunk has one checksum."""
_MIN_BLOCK_BYTES, _MAX_BLOCK_BYTES = 1 << 10, 1 << 30
_CHECKSUMS = re.compile(r"([0-9a-f]{8})+")
_FILE_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.-]{0,200}\.safetensors")
_PART_NAME = re.compile(r"part_[0-9]{5,9}\.json")
_NAME_KEYS = re.compile(r"([0-9a-f]{8})*")


OF_TRAINING: Final = (PROJECTION_PREFIX, SCALE_PREFIX, FACTOR_PREFIX)
"""Starts of the names of tensors that serve a training alone: projections of a distillation, scales of --qat, state of SOAP's matrices."""


@dataclass(frozen=True)
class Chunk:
    """A box of a tensor, stored contiguously under `key` of a file."""

    file: str
    key: str
    box: Box
    checksums: str
    """Checksum of each block, eight hexadecimal digits each."""


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


@dataclass(frozen=True)
class StoredPart:
    """A file with the files and tensors that one rank has written."""

    num_bytes: int
    crc32: int
    files: Mapping[str, int]
    """Size in bytes of each file that it describes."""
    name_keys: frozenset[str]
    """`name_key` of each tensor that it has chunks of."""


@dataclass(frozen=True, kw_only=True)
class Manifest:
    """Everything in a checkpoint except tensor data."""

    iteration: int
    consumed_train_samples: int
    optimizer_step_count: int
    state: Mapping[str, Any]
    """JSON values that the run stores, besides tensors and its configuration."""
    config: Mapping[str, Any]
    """The resolved configuration of the run."""
    files: Mapping[str, StoredFile]
    tensors: Mapping[str, StoredTensor]
    parts: Mapping[str, StoredPart] = field(default_factory=dict)
    """Parts by file name; none: it is whole. `read_root` leaves files and tensors of the parts out."""
    blocks: BlockFormat = BLOCKS
    """Format of the blocks of a chunk, each with a checksum."""
    checksum: int = 0
    """Crc32 as read; 0 before the manifest is written."""

    @classmethod
    def of_weights(
        cls,
        *,
        state: Mapping[str, Any],
        config: Mapping[str, Any],
        tensors: Mapping[str, StoredTensor],
        checksum: int = 0,
    ) -> Manifest:
        """Return the manifest of weights that no run of ours has saved: iteration 0, no optimizer, no files."""
        return cls(
            iteration=0, consumed_train_samples=0, optimizer_step_count=0, state=state, config=config, files={},
            tensors=tensors, checksum=checksum,
        )  # fmt: skip

    @property
    def sizes(self) -> dict[str, int]:
        """Size in bytes of each file of the checkpoint but this one, and those of local checkpoints."""
        if not self.parts:
            return {name: file.num_bytes for name, file in self.files.items()}
        parts = {name: part.num_bytes for name, part in self.parts.items()}
        return parts | {name: size for part in self.parts.values() for name, size in part.files.items()}

    @property
    def model_tensors(self) -> Mapping[str, StoredTensor]:
        """Tensors of the model: all but those that serve the training alone."""
        return {name: one for name, one in self.tensors.items() if not name.startswith(OF_TRAINING)}


def name_key(name: str) -> str:
    """Return the key of a tensor's name in the list of a part; other names may have the same."""
    return f"{zlib.crc32(name.encode()):08x}"


def read_root(path: Path) -> Manifest:
    """Read and check the manifest of the checkpoint at `path`, and none of its parts. `parts.read_manifest` reads these, too.

    Raises:
        DamagedError: it is missing, or differs from what was written.
        MismatchError: another version of the program wrote it.
    """
    file = path / MANIFEST_NAME
    text = read_small_file(file, max_bytes=MAX_BYTES)
    try:
        return decode(text)
    except (RecursionError, ValueError) as error:
        raise DamagedError(f"{file}: {str(error)[:_MAX_REASON]}") from error
    except MismatchError as error:
        raise MismatchError(f"{file}: {error.problems[0].text}", fix=error.problems[0].fix) from error


def encode(manifest: Manifest) -> bytes:
    """Return the content of `manifest.json`.

    Raises:
        InvalidError: `read_root` would call the checkpoint damaged.
    """
    assert manifest.blocks == BLOCKS, "older formats are only read"
    content: dict[str, Any] = {"format": FORMAT, "block_bytes": BLOCKS.num_bytes}
    if manifest.parts:
        content |= {"version": VERSION_IN_PARTS, "parts": _encoded_parts(manifest.parts)}
    else:
        content |= {"version": VERSION, **encoded_tensors(manifest.files, manifest.tensors)}
    content |= {name: getattr(manifest, name) for name in FIELDS}
    content = json.loads(json.dumps(content))  # converts keys to strings before they are sorted
    check_stored_values(content)
    text = canonical(content | {"checksum": zlib.crc32(canonical(content))})
    assert len(text) <= MAX_BYTES, f"a manifest of {len(text)} bytes exceeds what `read_root` reads"
    return text


def encoded_tensors(
    files: Mapping[str, StoredFile], tensors: Mapping[str, StoredTensor]
) -> dict[str, dict[str, Any]]:
    """Return the JSON values of files and tensors."""
    return {
        "files": {
            name: {"bytes": file.num_bytes, "header_crc32": file.header_crc32} for name, file in files.items()
        },
        "tensors": {
            name: {
                "shape": tensor.shape,
                "kinds": {
                    kind: {"dtype": stored.dtype, "chunks": [vars(chunk) for chunk in stored.chunks]}
                    for kind, stored in tensor.kinds.items()
                },
            }
            for name, tensor in tensors.items()
        },
    }


def _encoded_parts(parts: Mapping[str, StoredPart]) -> dict[str, Any]:
    return {
        name: {
            "bytes": part.num_bytes,
            "crc32": part.crc32,
            "files": part.files,
            "name_keys": "".join(sorted(part.name_keys)),
        }
        for name, part in parts.items()
    }


def decode(text: bytes) -> Manifest:
    """Return the manifest that `encode` wrote; its errors do not name the file."""
    content = json_object(parse_json(text, max_bytes=MAX_BYTES), "the manifest")
    checksum = _int(content, "checksum")
    del content["checksum"]
    if checksum != zlib.crc32(canonical(content)):
        raise InvalidError("the checksum does not match the content")
    version: Any = content.get("version")
    if content.get("format") != FORMAT or version not in range(1, VERSION_IN_PARTS + 1):
        raise MismatchError(
            f"format {shown(content.get('format'))}, version {shown(version)}; this program reads {FORMAT!r}, up to version {VERSION_IN_PARTS}",
            fix="use the program that wrote it",
        )
    blocks = _blocks(content, version)
    parts = dict(_parts(content)) if version == VERSION_IN_PARTS else {}
    files, tensors = ({}, {}) if parts else decoded_tensors(content, version, blocks)
    check_tiling(tensors)
    make_lists(content)
    check_stored_values(content)
    return Manifest(
        iteration=content["iteration"],
        consumed_train_samples=content["consumed_train_samples"],
        optimizer_step_count=content["optimizer_step_count"],
        state=content["state"],
        config=content["config"],
        files=files,
        tensors=tensors,
        parts=parts,
        blocks=blocks,
        checksum=checksum,
    )


def decoded_tensors(
    content: Any, version: int, blocks: BlockFormat
) -> tuple[dict[str, StoredFile], dict[str, StoredTensor]]:
    """Return files and tensors from their JSON values; the chunks of a tensor need not cover it. Raises InvalidError."""
    files = {
        _file_name(name): StoredFile(_int(file, "bytes"), _int(file, "header_crc32"))
        for name, file in _items(content, "files")
    }
    stored = _Stored(version, files, blocks)
    return files, {name: _tensor(name, tensor, stored) for name, tensor in _items(content, "tensors")}


def check_tiling(tensors: Mapping[str, StoredTensor]) -> None:
    """Raise InvalidError unless the chunks of each kind cover each tensor exactly once."""
    for name, tensor in tensors.items():
        for kind, stored in tensor.kinds.items():
            problem = tiling_problem(tensor.shape, [chunk.box for chunk in stored.chunks])
            if problem:
                raise InvalidError(f"{name}: {kind}: {problem}")


def _parts(content: Any) -> Iterator[tuple[str, StoredPart]]:
    """Yield name and entry of each part. Raises InvalidError."""
    known: set[str] = set()
    for name, part in _items(content, "parts"):
        files = {
            _file_name(file): _int(dict(_items(part, "files")), file) for file, _ in _items(part, "files")
        }
        if not _PART_NAME.fullmatch(name) or known & files.keys():
            raise InvalidError(f"{shown(name)} is not a valid part")
        known |= files.keys()
        keys = _text(part, "name_keys")
        if not _NAME_KEYS.fullmatch(keys):
            raise InvalidError(f"{name}: name_keys {shown(keys)}")
        key_set = frozenset(keys[start : start + 8] for start in range(0, len(keys), 8))
        yield name, StoredPart(_int(part, "bytes"), _int(part, "crc32"), files, key_set)
    if not known:
        raise InvalidError("no part has a file")


def tiling_problem(shape: Sequence[int], boxes: Sequence[Box]) -> str | None:
    """Return why the boxes do not cover each element of the shape exactly once, or None if they do.

    The corners of a box, with signs that alternate along each edge, are the mixed derivative of its indicator function. So the
    boxes tile the shape exactly if their signed corners sum to the corners of the shape; time is linear in the number of boxes.
    """
    covered = sum(math.prod(box_shape(box)) for box in boxes)
    if covered != math.prod(shape):
        return f"chunks have {covered} elements, the tensor has {math.prod(shape)}"
    signs = [math.prod(edge) for edge in itertools.product((1, -1), repeat=len(shape))]
    corners = dict(zip(itertools.product(*((0, size) for size in shape)), signs, strict=True))
    for box in boxes:
        for corner, sign in zip(itertools.product(*box), signs, strict=True):
            corners[corner] = corners.get(corner, 0) - sign
    wrong = min((corner for corner, count in corners.items() if count), default=None)
    return f"chunks overlap at or near element {list(wrong)}" if wrong is not None else None


def canonical(content: Any) -> bytes:
    """Return JSON with sorted keys, without spaces, in ASCII."""
    return json.dumps(content, sort_keys=True, separators=(",", ":")).encode()


@dataclass(frozen=True)
class _Stored:
    """Files and format that the chunks of a manifest refer to."""

    version: int
    files: Mapping[str, StoredFile]
    blocks: BlockFormat

    def checksums(self, chunk: Any) -> str:
        """Return the checksums of a chunk by their name in this version."""
        if self.version == 1:
            return f"{_int(chunk, 'crc32'):08x}"
        return _text(chunk, "crc32s" if self.version == 2 else "checksums")


def _blocks(content: Any, version: int) -> BlockFormat:
    if version == 1:
        return BlockFormat(_WHOLE_CHUNK, zlib.crc32)
    block_bytes = _int(content, "block_bytes", least=_MIN_BLOCK_BYTES)
    if block_bytes > _MAX_BLOCK_BYTES or block_bytes % 8:
        raise InvalidError(f"block_bytes {block_bytes} is not a valid size of blocks")
    return BlockFormat(block_bytes, zlib.crc32 if version == 2 else checksum_of_sums)


def _tensor(name: str, value: Any, stored: _Stored) -> StoredTensor:
    sizes = _list(json_object(value, name).get("shape"), f"{name}: shape")
    shape = tuple(_int({"size": size}, "size", least=1) for size in sizes)
    if not 1 <= len(shape) <= _MAX_DIMS or math.prod(shape) > _MAX_ELEMENTS:
        raise InvalidError(f"{name}: shape {shape}")
    kinds = {kind: _kind(f"{name}: {kind}", shape, found, stored) for kind, found in _items(value, "kinds")}
    return StoredTensor(shape, kinds)


def _kind(where: str, shape: tuple[int, ...], value: Any, stored: _Stored) -> StoredKind:
    dtype = _text(value, "dtype")
    if dtype not in DTYPES:
        raise InvalidError(f"{where}: dtype {dtype}")
    num_in_block = stored.blocks.num_bytes // DTYPES[dtype].itemsize
    chunks = tuple(
        _chunk(where, shape, chunk, stored, num_in_block)
        for chunk in _list(value.get("chunks"), f"{where}: chunks")
    )
    return StoredKind(dtype, chunks)


def _chunk(where: str, shape: tuple[int, ...], value: Any, stored: _Stored, num_in_block: int) -> Chunk:
    file = _text(value, "file")
    if file not in stored.files:
        raise InvalidError(f"{where}: {shown(file)} is not among the files")
    pairs = [_list(pair, f"{where}: box") for pair in _list(value.get("box"), f"{where}: box")]
    box = tuple((int(pair[0]), int(pair[1])) for pair in pairs if [type(n) for n in pair] == [int, int])
    is_inside = len(box) == len(pairs) == len(shape) and all(
        0 <= start < stop <= size for (start, stop), size in zip(box, shape, strict=True)
    )
    if not is_inside or math.prod(box_shape(box)) > _MAX_CHUNK_ELEMENTS:
        raise InvalidError(f"{where}: box {shown(pairs)} of a tensor of shape {shape}")
    checksums = stored.checksums(value)
    num_blocks = -(-math.prod(box_shape(box)) // num_in_block)
    if not _CHECKSUMS.fullmatch(checksums) or len(checksums) != 8 * num_blocks:
        raise InvalidError(f"{where}: checksums {checksums[:80]!r} of {num_blocks} blocks")
    return Chunk(file, _text(value, "key"), box, checksums)


def _file_name(name: str) -> str:
    if not _FILE_NAME.fullmatch(name):
        raise InvalidError(f"{shown(name)} is not a valid file name")
    return name


def _items(value: Any, key: str) -> Iterator[tuple[str, Any]]:
    yield from json_object(json_object(value, key).get(key), key).items()


def _list(value: Any, what: str) -> list[Any]:
    if not isinstance(value, list):
        raise InvalidError(f"{what} is not a list")
    return value


def _text(value: Any, key: str) -> str:
    found = json_object(value, key).get(key)
    if not isinstance(found, str) or len(found) > _MAX_CHARACTERS:
        raise InvalidError(f"{key} {shown(found)} is not a string of at most {_MAX_CHARACTERS} characters")
    return found


def _int(value: Any, key: str, *, least: int = 0) -> int:
    found = json_object(value, key).get(key)
    if not isinstance(found, int) or isinstance(found, bool) or not least <= found < 1 << 63:
        raise InvalidError(f"{key} {shown(found)} is not an integer of at least {least}")
    return found
