"""The tensors and objects of a `torch_dist` checkpoint, by Megatron-LM's names.

    .metadata          pickled index: name -> shape, dtype, chunks; (name, offset) -> file, first byte, bytes
    common.pt          the common state of older versions, which now is an object of the index
    __0_1.distcp       torch.save archives (zip) one after the other: data.pkl and the raw storage data/0

The files are untrusted: no class is built, no code runs, names stay in the folder, sizes are compared before memory is allocated.
"""

from __future__ import annotations

import functools
import io
import math
import re
import zlib
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import torch
from torch import Tensor

from megatrain.checkpoint.checked_files import open_regular_file, read_small_file
from megatrain.checkpoint.errors import DamagedError, DamagedImportError
from megatrain.checkpoint.manifest import tiling_problem
from megatrain.interop.megatron.archive import MAX_DIMENSIONS, NOT_AS_EXPECTED, Archive, Place, are_counts
from megatrain.interop.megatron.inert_pickle import Record, path_of, read_pickle
from megatrain.parallel.layout import Box, box_shape, intersect, slices_within

METADATA_NAME: Final = ".metadata"
COMMON_NAME: Final = "common.pt"
_MAX_METADATA_BYTES: Final = 1 << 30
_MAX_CACHED, _MAX_CACHED_BYTES = 4, 1 << 30
"""Chunks that stay in memory, since a fused parameter is read once for each of its parts; the last one always does."""
_FILE_NAME: Final = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.-]{0,200}\.distcp")
_DTYPES: Final = {
    f"torch.{name}": getattr(torch, name) for name in ("float64", "float32", "bfloat16", "float16")
}


@dataclass(frozen=True)
class IndexedTensor:
    """A tensor of the checkpoint: its chunks are boxes, each in an archive."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    chunks: Mapping[Box, Place]

    def overlaps(self, box: Box) -> Iterator[tuple[Box, Box]]:
        """Yield the chunks that overlap a box, each with the overlap."""
        for (start, stop), chunks in self._by_first_dimension.items():
            if start < box[0][1] and box[0][0] < stop:
                for chunk in chunks:
                    common = intersect(chunk, box)
                    if common is not None:
                        yield chunk, common

    @functools.cached_property
    def _by_first_dimension(self) -> dict[tuple[int, int], list[Box]]:
        """Chunks by their range in the first dimension: stacked layers and experts have thousands of chunks."""
        found: dict[tuple[int, int], list[Box]] = {}
        for chunk in self.chunks:
            found.setdefault(chunk[0], []).append(chunk)
        return found


class TorchDistFolder:
    """The index of a checkpoint, and access to its data.

    Raises:
        DamagedImportError: on opening or reading, if a file is missing or does not hold what the index says.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        file = path / METADATA_NAME
        try:
            data = read_small_file(file, max_bytes=_MAX_METADATA_BYTES)
        except DamagedError as error:
            raise DamagedImportError(error.problems[0].text) from error
        self.checksum = zlib.crc32(data)
        """Crc32 of the index."""
        try:
            places = _places(root := read_pickle(data))
            self._check_places(places.values())
            self.tensors, self._objects = _read_index(root, places)
        except NOT_AS_EXPECTED as error:
            raise DamagedImportError(f"{file}: {str(error)[:300]}") from error
        self._cache: dict[tuple[str, Box], Tensor] = {}

    @property
    def object_names(self) -> tuple[str, ...]:
        """Keys of the objects that are not tensors."""
        return tuple(self._objects)

    def read(self, name: str, box: Box) -> Tensor:
        """Return a box of a tensor."""
        tensor = self.tensors[name]
        out = torch.empty(box_shape(box), dtype=tensor.dtype)
        for chunk, common in tensor.overlaps(box):
            out[slices_within(common, box)] = self._cached(name, chunk)[slices_within(common, chunk)]
        return out

    def close(self) -> None:
        """Free the chunks in memory."""
        self._cache.clear()

    def object(self, name: str) -> Any:
        """Return an object that is not a tensor, such as `common_state`; its classes are records.

        Raises:
            DamagedImportError: the checkpoint has none of this name.
        """
        found = next((place for key, place in self._objects.items() if key.split("/")[0] == name), None)
        if found is None and name == "common_state":
            found = self._common_file()
        if found is None:
            raise DamagedImportError(f"{self.path / METADATA_NAME}: has no {name}")
        with self._archive(found) as archive:
            return archive.load()

    def _common_file(self) -> Place | None:
        """Return the file of the common state, which older versions write."""
        path = self.path / COMMON_NAME
        try:
            with open_regular_file(path) as file:
                return Place(COMMON_NAME, 0, file.seek(0, io.SEEK_END))
        except DamagedError:
            return None

    def _check_places(self, places: Iterable[Place]) -> None:
        """Check that files have as many bytes as the index says: then so do tensors, before memory is allocated for them."""
        wanted: dict[str, int] = {}
        for place in places:
            wanted[place.file] = wanted.get(place.file, 0) + place.num_bytes
        for name, num_bytes in wanted.items():
            try:
                size = (self.path / name).stat().st_size
            except OSError as error:
                raise DamagedImportError(f"{self.path / name}: {error.strerror}") from error
            if num_bytes > size:
                raise ValueError(f"{num_bytes} bytes in {name}, which has {size}")

    def _cached(self, name: str, chunk: Box) -> Tensor:
        values = self._cache.pop((name, chunk), None)
        if values is None:
            size = math.prod(box_shape(chunk)) * self.tensors[name].dtype.itemsize
            while self._cache and (
                len(self._cache) >= _MAX_CACHED
                or size + sum(one.nbytes for one in self._cache.values()) > _MAX_CACHED_BYTES
            ):
                del self._cache[next(iter(self._cache))]
            values = self._read_chunk(name, chunk)
        self._cache[name, chunk] = values
        return values

    def _read_chunk(self, name: str, chunk: Box) -> Tensor:
        tensor = self.tensors[name]
        place = tensor.chunks[chunk]
        with self._archive(place) as archive:
            values = archive.tensor()
        if values.dtype != tensor.dtype or values.shape != box_shape(chunk):
            raise DamagedImportError(
                f"{self.path / place.file}: byte {place.start} has {values.dtype} {list(values.shape)}, and the index"
                f" says {tensor.dtype} {list(box_shape(chunk))} of {name}"
            )
        return values

    def _archive(self, place: Place) -> Archive:
        return Archive(self.path / place.file, place)


_Places = dict[tuple[str, tuple[int, ...] | None], Place]


def _places(root: Any) -> _Places:
    """Return the places of the chunks and objects of an index, by name and offset of the chunk."""
    places: _Places = {}
    for index, info in root.field("storage_data").items():
        offset = index.state.get("offset")  # absent for objects
        where = None if offset is None else _size(offset)
        file, start, num_bytes = (info.field(name) for name in ("relative_path", "offset", "length"))
        if not _FILE_NAME.fullmatch(file) or not are_counts((start, num_bytes)):
            place = f"{file!r}, {start!r}, {num_bytes!r}"
            raise ValueError(f"{place[:200]} is not a place in a .distcp file")
        places[_text(index.field("fqn")), where] = Place(file, start, num_bytes)
    return places


def _read_index(root: Any, places: _Places) -> tuple[dict[str, IndexedTensor], dict[str, Place]]:
    """Return the tensors and the places of objects in an index."""
    tensors, objects = {}, {}
    for name, entry in root.field("state_dict_metadata").items():
        if path_of(entry).endswith(".BytesStorageMetadata"):
            objects[_text(name)] = places[name, None]
        elif (tensor := _indexed_tensor(_text(name), entry, places)) is not None:
            tensors[name] = tensor
    return tensors, objects


def _indexed_tensor(name: str, entry: Record, places: _Places) -> IndexedTensor | None:
    """Return a tensor of the index; None for a dtype that is not a floating-point number of 16 bits or more."""
    state = entry.field("properties").state
    dtype = _DTYPES.get(path_of(state["dtype"] if isinstance(state, dict) else state[0]))
    if dtype is None:
        return None
    shape = _size(entry.field("size"))
    chunks: dict[Box, Place] = {}
    for chunk in entry.field("chunks"):
        offsets, sizes = _size(chunk.field("offsets")), _size(chunk.field("sizes"))
        if 0 in sizes:  # of a rank that holds no row
            continue
        place = places[name, offsets]
        if math.prod(sizes) * dtype.itemsize > place.num_bytes:
            raise ValueError(f"{name}: a chunk of size {list(sizes)} in {place.num_bytes} bytes")
        chunks[tuple((a, a + n) for a, n in zip(offsets, sizes, strict=True))] = place
    if problem := _problem_of_chunks(shape, list(chunks)):
        raise ValueError(f"{name}: {problem}")
    return IndexedTensor(shape, dtype, chunks)


def _problem_of_chunks(shape: tuple[int, ...], boxes: list[Box]) -> str | None:
    inside = all(
        len(box) == len(shape) and all(a < b <= size for (a, b), size in zip(box, shape, strict=True))
        for box in boxes
    )
    return tiling_problem(shape, boxes) if inside else "a chunk lies outside of the tensor"


def _size(value: Any) -> tuple[int, ...]:
    """Return the numbers of a pickled torch.Size."""
    numbers = tuple(value.arguments[0]) if isinstance(value, Record) else tuple(value)
    if len(numbers) > MAX_DIMENSIONS or not are_counts(numbers):
        raise ValueError(f"{str(numbers)[:100]} is not a size")
    return numbers


def _text(value: Any) -> str:
    if not isinstance(value, str):
        raise TypeError(f"{type(value).__name__} where a name was expected")
    return value
