"""A folder of the transformers library: config.json and safetensors files, untrusted.

    model.safetensors.index.json    tensor ─> file          (absent: model.safetensors alone)
    *.safetensors                   header: tensor ─> dtype, shape, first and last byte

Sizes are bounded, files stay in the folder, and the ranges of a file's tensors are compared with its size before data is read.
There are no checksums: wrong data is not found.
"""

from __future__ import annotations

import functools
import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import torch
from torch import Tensor

from megatrain.checkpoint.checked_files import open_regular_file, read_into, read_small_file
from megatrain.checkpoint.errors import DamagedError
from megatrain.checkpoint.find import OF_MEGATRON, newest_of_megatron
from megatrain.checkpoint.manifest import DTYPES
from megatrain.checkpoint.tensor_file import MAX_HEADER_BYTES, bytes_of
from megatrain.config.errors import InputError
from megatrain.data.tokenizers.files import hub_fix
from megatrain.interop.hf.config_file import CONFIG_NAME, ConfigFile
from megatrain.storage.untrusted_json import (
    InvalidError,
    integer,
    json_object,
    list_of,
    parse_json,
    record,
    text,
)

INDEX_NAME: Final = "model.safetensors.index.json"
SINGLE_NAME: Final = "model.safetensors"
TOKENIZER_NAME: Final = "tokenizer.json"
_MAX_CONFIG_BYTES: Final = 1 << 20
_FILE_NAME: Final = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.-]{0,200}\.safetensors")
_SIZE: Final = integer(0, 1 << 50)
_ENTRY: Final = record(
    {
        "dtype": text(max_characters=20),
        "shape": list_of(_SIZE, most=5),
        "data_offsets": list_of(_SIZE, most=2),
    }
)
_BYTE: Final = "U8"
_BLOCKS, _SCALES = "_blocks", "_scales"
_BYTES_PER_BLOCK: Final = 16
_MAGNITUDES: Final = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
"""Values of the codes 0 to 7 (E2M1); the fourth bit is the sign."""
_EXPONENT_BIAS: Final = 127
_GET_AGAIN: Final = "download or copy the folder again"


@dataclass(frozen=True)
class StoredTensor:
    """A tensor of a file. `start`: its first byte, counted from the start of the file."""

    file: Path
    dtype: str
    shape: tuple[int, ...]
    start: int


@dataclass(frozen=True)
class PackedTensor(StoredTensor):
    """A tensor [experts, columns, rows] in bf16 that MXFP4 blocks and scales represent; see mxfp4.py."""

    blocks: StoredTensor
    scales: StoredTensor


class HfFolder:
    """The config.json of a folder, its tensors by name, and access to their data.

    Raises:
        InputError: on opening or reading, if the folder is no such folder, or damaged.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        if not (path / CONFIG_NAME).exists():
            raise InputError(
                f"{path}: has no {CONFIG_NAME}",
                fix="name a folder that save_pretrained of transformers wrote"
                + hub_fix(path)
                + (f"; {path} has {OF_MEGATRON}" if newest_of_megatron(path) else ""),
            )
        self.config = ConfigFile(path / CONFIG_NAME, self._json(CONFIG_NAME, _MAX_CONFIG_BYTES))

    @functools.cached_property
    def tensors(self) -> dict[str, StoredTensor]:
        """Tensors of all files by name, from the headers."""
        tensors: dict[str, StoredTensor] = {}
        for name, listed in self._files().items():
            found = self._header(name)
            if listed is not None and listed != found.keys():
                wrong = min(listed ^ found.keys())
                raise self._damaged(
                    name, f"{wrong[:200]!r} is in {'the index' if wrong in listed else 'the file'} alone"
                )
            tensors |= found
        return self._packed(tensors) if self.config.has_mxfp4 else tensors

    def rows(self, name: str, start: int, stop: int) -> Tensor:
        """Return rows of a tensor as stored.

        Raises:
            InputError: its dtype is not a floating-point number of 16 bits or more.
        """
        stored, dtype = self.tensors[name], self.dtype(name)
        if isinstance(stored, PackedTensor):
            parts = (self._rows(part, start, stop, torch.uint8) for part in (stored.blocks, stored.scales))
            return decode_mxfp4(*parts).transpose(1, 2)
        return self._rows(stored, start, stop, dtype)

    def read_rows(self, name: str, start: int, out: Tensor) -> None:
        """Read rows into `out`, which is contiguous and has their dtype."""
        self._read(self.tensors[name], start, out)

    def _rows(self, stored: StoredTensor, start: int, stop: int, dtype: torch.dtype) -> Tensor:
        out = torch.empty((stop - start, *stored.shape[1:]), dtype=dtype)
        self._read(stored, start, out)
        return out

    def _read(self, stored: StoredTensor, start: int, out: Tensor) -> None:
        row_bytes = math.prod(stored.shape[1:]) * out.itemsize
        try:
            with open_regular_file(stored.file) as file:
                read_into(file, bytes_of(out), stored.start + start * row_bytes, stored.file)
        except DamagedError as error:
            raise InputError(error.problems[0].text, fix=_GET_AGAIN) from error

    def dtype(self, name: str) -> torch.dtype:
        """Return the dtype of a tensor with weights."""
        stored = self.tensors[name]
        if stored.dtype not in DTYPES:
            raise InputError(
                f"{stored.file}: {name} has the dtype {stored.dtype!r}, which is not read",
                fix=f"store the weights as {', '.join(DTYPES)}",
            )
        return DTYPES[stored.dtype]

    def _packed(self, tensors: Mapping[str, StoredTensor]) -> dict[str, StoredTensor]:
        """Replace each pair X_blocks and X_scales by X."""
        found = dict(tensors)
        for name, scales in tensors.items():
            whole = name.removesuffix(_SCALES)
            if whole == name or (blocks := tensors.get(whole + _BLOCKS)) is None:
                continue
            is_pair = len(scales.shape) == 3 and blocks.shape == (*scales.shape, _BYTES_PER_BLOCK)
            if not is_pair or {blocks.dtype, scales.dtype} != {_BYTE}:
                raise self._damaged(
                    blocks.file.name,
                    f"{name_text(whole)}: {blocks.dtype} {list(blocks.shape)} with scales {scales.dtype} {list(scales.shape)}",
                )
            experts, rows, num_blocks = scales.shape
            shape = (experts, 2 * _BYTES_PER_BLOCK * num_blocks, rows)
            del found[name], found[whole + _BLOCKS]
            found[whole] = PackedTensor(blocks.file, "BF16", shape, blocks.start, blocks, scales)
        return found

    def _files(self) -> Mapping[str, set[str] | None]:
        """Return the names of the files, each with its tensors by the index; None without an index."""
        if not (self.path / INDEX_NAME).exists():
            if (self.path / SINGLE_NAME).exists():
                return {SINGLE_NAME: None}
            pickles = sorted(path.name for path in self.path.glob("*.bin")) or ["no weights"]
            raise InputError(
                f"{self.path}: has {pickles[0]} and no {SINGLE_NAME}; pickled files could run code and are not read",
                fix="load it with transformers where that is safe, and write it with save_pretrained(FOLDER)",
            )
        found: dict[str, set[str] | None] = {}
        try:
            index = json_object(self._json(INDEX_NAME, MAX_HEADER_BYTES).get("weight_map"), "weight_map")
        except InvalidError as error:
            raise self._damaged(INDEX_NAME, str(error)) from error
        for tensor, name in index.items():
            if not isinstance(name, str) or not _FILE_NAME.fullmatch(name):
                raise self._damaged(
                    INDEX_NAME, f"{str(name)[:200]!r} is not the name of a file in the folder"
                )
            names = found.setdefault(name, set())
            assert names is not None
            names.add(tensor)
        return found

    def _header(self, name: str) -> dict[str, StoredTensor]:
        path = self._regular(name)
        length = bytearray(8)
        try:
            with open_regular_file(path) as file:
                size = file.seek(0, 2)
                read_into(file, memoryview(length), 0, path)
                num_bytes = int.from_bytes(length, "little")
                if num_bytes > min(MAX_HEADER_BYTES, size - 8):
                    raise self._damaged(name, f"a header of {num_bytes} bytes in a file of {size}")
                header = bytearray(num_bytes)
                read_into(file, memoryview(header), 8, path)
            entries = json_object(parse_json(bytes(header), max_bytes=MAX_HEADER_BYTES), "the header")
            entries.pop("__metadata__", None)
            return _tensors(path, entries, 8 + num_bytes, size)
        except DamagedError as error:
            raise InputError(error.problems[0].text, fix=_GET_AGAIN) from error
        except (ValueError, RecursionError) as error:
            raise self._damaged(name, str(error)) from error

    def _json(self, name: str, max_bytes: int) -> dict[str, Any]:
        path = self._regular(name)
        try:
            data = read_small_file(path, max_bytes=max_bytes)
            return json_object(parse_json(data, max_bytes=max_bytes), "the file")
        except DamagedError as error:
            raise InputError(error.problems[0].text, fix=_GET_AGAIN) from error
        except (ValueError, RecursionError) as error:
            raise self._damaged(name, str(error)) from error

    def _regular(self, name: str) -> Path:
        """Return the path of a file. Links are followed in the cache of the hub alone: snapshots/REVISION/NAME to blobs/."""
        path = self.path / name
        if not path.is_symlink():
            return path
        target, cache = path.resolve(), self.path.resolve().parent
        if cache.name == "snapshots" and target.parent == cache.parent / "blobs":
            return target
        raise InputError(
            f"{path}: is a link that leaves the folder",
            fix=f"copy it: cp -rL {self.path} COPY, and convert COPY",
        )

    def _damaged(self, name: str, problem: str) -> InputError:
        return InputError(f"{self.path / name}: {problem[:500]}", fix=_GET_AGAIN)


def name_text(name: str) -> str:
    """Return a name from a file for a message: cut, and with escapes for what a terminal would interpret."""
    return name[:200] if name[:200].isprintable() else repr(name[:200])[1:-1]


def _tensors(
    path: Path, entries: Mapping[str, Any], data_start: int, file_bytes: int
) -> dict[str, StoredTensor]:
    """Return the tensors of a header.

    Raises:
        InvalidError: their ranges do not cover the data of the file exactly once, or have other sizes than the tensors.
    """
    found: dict[str, StoredTensor] = {}
    at = 0
    for name, entry in entries.items():
        _ENTRY(entry, name_text(name))
    for name, entry in sorted(entries.items(), key=lambda item: item[1]["data_offsets"]):
        shape, offsets = tuple(entry["shape"]), entry["data_offsets"]
        itemsize = 1 if entry["dtype"] == _BYTE else getattr(DTYPES.get(entry["dtype"]), "itemsize", None)
        size = None if itemsize is None else math.prod(shape) * itemsize
        if len(offsets) != 2 or offsets[0] != at or (size is not None and offsets[1] != at + size):
            raise InvalidError(
                f"{name_text(name)}: {entry['dtype']} {list(shape)} in bytes {offsets}, after {at}"
            )
        found[name] = StoredTensor(path, entry["dtype"], shape, data_start + at)
        at = offsets[1]
    if data_start + at != file_bytes:
        raise InvalidError(f"{file_bytes} bytes, and its header describes {data_start + at}")
    return found


def decode_mxfp4(blocks: Tensor, scales: Tensor) -> Tensor:
    """Return weights in MXFP4, as gpt-oss stores its experts, in bf16, which represents them exactly.

    Args:
        blocks: [..., columns / 32, 16], two values of 4 bits per byte, the first one in the low bits.
        scales: [..., columns / 32], exponent of the power of two of each block, plus 127.

    Returns:
        [..., columns].

    Source: OCP Microscaling Formats (MX) Specification, version 1.0.
    """
    values = torch.tensor([*_MAGNITUDES, *(-value for value in _MAGNITUDES)])
    codes = torch.stack([blocks & 0xF, blocks >> 4], dim=-1).flatten(-2)
    exponents = scales.to(torch.int32).unsqueeze(-1) - _EXPONENT_BIAS
    return torch.ldexp(values[codes.to(torch.int32)], exponents).bfloat16().flatten(-2)
