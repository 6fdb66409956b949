"""Read tokenized sequences: `<prefix>.bin` contains the elements, `<prefix>.idx` the position of each sequence.

    .bin   elements of all sequences, concatenated, little endian, nothing else
    .idx   magic 9 | version u64 | element code u8 | sequences n u64 | boundaries d u64
           lengths int32[n] | byte offsets int64[n] | document boundaries int64[d] | modes int8[n], if multimodal
    .json  optional description: the tokenizer that made the data, and counts

Document i consists of the sequences boundary[i] .. boundary[i+1]-1. Opening checks that both files agree in every byte
count, so that a truncated copy is an error at the start and not in the middle of a run.

Source: the file format of Megatron-LM, core/datasets/indexed_dataset.py.
"""

from __future__ import annotations

import difflib
import json
import os
import struct
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, Final, Protocol

import numpy as np
import numpy.typing as npt

from megatrain.config.errors import InputError
from megatrain.data.indexed.bin_file import BinFile, LocalBinFile
from megatrain.data.indexed.object_store import RemoteFile, exists, is_url, local_copy
from megatrain.data.indexed.stamps import WORTH_SEQUENCES, Stamp

Elements = npt.NDArray[Any]

MAGIC: Final = b"MMIDIDX\x00\x00"
VERSION: Final = 1
HEADER: Final = struct.Struct("<9sQBQQ")
ELEMENT_TYPES: Final = {1: "u1", 2: "i1", 3: "<i2", 4: "<i4", 5: "<i8", 6: "<f8", 7: "<f4", 8: "<u2"}
CHECK_ROWS: Final = 1 << 16
"""Sequences checked at once: as many as fit in a core's cache."""
REBUILD: Final = "copy the file again, or make the dataset again with preprocess_data.py"


class SequenceSource(Protocol):
    """Numbered token sequences, from files or synthetic, that samples are cut from."""

    @property
    def name(self) -> str:
        """Name of the data, for messages."""

    @property
    def lengths(self) -> npt.NDArray[np.int32]:
        """Elements per sequence, [n]."""

    def read(self, sequence: int, offset: int = 0, length: int | None = None) -> Elements:
        """Return `length` elements of a sequence starting at `offset`; None: to its end."""

    def document_of(self, sequence: int) -> int:
        """Return the document of a sequence."""


class IndexedDataset:
    """The sequences of `<prefix>.bin/.idx`, files or in an object store. Thread-safe."""

    def __init__(
        self,
        prefix: str | Path,
        *,
        mmap: bool = True,
        index_cache: str | None = None,
        stamp_folders: Sequence[Path] = (),
    ) -> None:
        """Open and check both files.

        Args:
            prefix: path or URL without `.bin` or `.idx`.
            mmap: map the index, so that the processes of a host share the memory; else it is read into memory.
            index_cache: folder for a copy of the index of a URL.
            stamp_folders: folders of stamps; large files that have one are mapped and not read.

        Raises:
            InputError: a file is missing or damaged, or the two files contradict each other.
            ConfigError: the URL cannot be read here: a package or `index_cache` is missing.
        """
        self.prefix = str(prefix)
        self.index_cache = index_cache
        if is_url(self.prefix):
            self.name = f"{self.prefix}.bin"
            self.index_path = local_copy(f"{self.prefix}.idx", index_cache)
        else:
            self.name = str(Path(f"{prefix}.bin"))
            self.index_path = Path(f"{prefix}.idx")
            _require_files(self.prefix)
        index_path = self.index_path
        self.dtype, num_sequences, num_boundaries, has_modes = _read_header(index_path)
        if mmap:
            body: Elements = np.asarray(np.memmap(index_path, dtype=np.uint8, mode="r"))[HEADER.size :]
        else:
            body = np.fromfile(index_path, dtype=np.uint8, offset=HEADER.size)
        cuts = np.cumsum([4 * num_sequences, 8 * num_sequences, 8 * num_boundaries])
        lengths, offsets, boundaries, modes = np.split(body, cuts)
        self.lengths: npt.NDArray[np.int32] = lengths.view("<i4")
        self.offsets: npt.NDArray[np.int64] = offsets.view("<i8")
        self.document_boundaries: npt.NDArray[np.int64] = boundaries.view("<i8")
        self.modes: npt.NDArray[np.int8] | None = modes.view("i1") if has_modes else None
        self.stamp: Stamp | None = None
        """Facts about both files; None: they are small or remote, or no folder is given."""
        if stamp_folders and num_sequences >= WORTH_SEQUENCES and not is_url(self.prefix):
            self.stamp = Stamp([index_path, Path(self.name)], stamp_folders)
        self.num_tokens = int(self.known("num_tokens", lambda: self._checked_tokens(index_path)))
        self._bin: BinFile
        if is_url(self.prefix):
            self._bin = RemoteFile(self.name)
        else:
            self._bin = LocalBinFile(Path(self.name))
        _check_bin(self.name, self._bin.size, self.num_tokens, self.dtype)

    def _checked_tokens(self, index_path: Path) -> int:
        """Check the whole index; return the elements of all sequences."""
        num_tokens = _check_offsets(index_path, self.lengths, self.offsets, self.dtype)
        _check_boundaries(index_path, self.document_boundaries, len(self.lengths))
        return num_tokens

    def known(self, name: str, compute: Callable[[], Any]) -> Any:
        """Return a fact about both files, a JSON value: from their stamp, or computed."""
        return compute() if self.stamp is None else self.stamp.get(name, compute)

    def __len__(self) -> int:
        """Return the number of sequences."""
        return len(self.lengths)

    @property
    def num_documents(self) -> int:
        """Number of documents, including those without sequences."""
        return len(self.document_boundaries) - 1

    def document_of(self, sequence: int) -> int:
        """Return the document of a sequence."""
        return int(np.searchsorted(self.document_boundaries, sequence, side="right")) - 1

    def read(self, sequence: int, offset: int = 0, length: int | None = None) -> Elements:
        """Return `length` elements of a sequence starting at `offset`; None: to its end."""
        if not 0 <= sequence < len(self):
            raise IndexError(f"{self.name}: sequence {sequence} of {len(self)}")
        available = int(taken(self.lengths, sequence)[0]) - offset
        count = available if length is None else length
        if offset < 0 or not 0 <= count <= available:
            raise IndexError(
                f"{self.name}: elements {offset}..{offset + count} of sequence {sequence}, "
                f"which has {available + offset}"
            )
        size = self.dtype.itemsize
        return self._bin.read(int(taken(self.offsets, sequence)[0]) + offset * size, count * size).view(
            self.dtype
        )

    def read_several(self, sequences: range) -> Elements:
        """Return the elements of consecutive sequences, concatenated, with one read."""
        if not 0 <= sequences.start < sequences.stop <= len(self):
            raise IndexError(f"{self.name}: sequences {sequences.start}..{sequences.stop} of {len(self)}")
        last = sequences.stop - 1
        start, end = taken(self.offsets, (sequences.start, last)).tolist()
        end += int(taken(self.lengths, last)[0]) * self.dtype.itemsize
        return self._bin.read(start, end - start).view(self.dtype)

    def read_bytes(self, position: int, num_bytes: int) -> npt.NDArray[np.uint8]:
        """Return bytes of `.bin`."""
        return self._bin.read(position, num_bytes)

    def blocks(self, num_bytes: int) -> Iterator[Elements]:
        """Yield all elements in order, about `num_bytes` at once."""
        step = max(1, num_bytes // self.dtype.itemsize) * self.dtype.itemsize
        end = self.num_tokens * self.dtype.itemsize
        for start in range(0, end, step):
            yield self._bin.read(start, min(step, end - start)).view(self.dtype)


def taken(array: npt.NDArray[Any], places: int | Sequence[int]) -> npt.NDArray[Any]:
    """Return elements of a mapped array [n], read without Python's lock; `array[place]` holds it while a page is read.

    The array may be unaligned, as those of `.idx` are, which `take` alone would copy as a whole.
    """
    rows = array.view(np.uint8).reshape(-1, array.itemsize)
    found: npt.NDArray[Any] = rows.take(places, axis=0).reshape(-1).view(array.dtype)
    return found


def loss_mask_of(prefix: str) -> str:
    """Return the prefix of the loss mask of a dataset of conversations: 1 for each token with loss, in the same sequences."""
    return f"{prefix}_loss_mask"


def read_description(prefix: str) -> dict[str, Any] | None:
    """Return the description of a dataset, `<prefix>.json`; None if there is none.

    Raises:
        InputError: the file is not a valid description.
    """
    path = f"{prefix}.json"
    if not exists(path):
        return None
    fix = "make the dataset again, or move this file away to use the dataset without a description"
    if not is_url(path) and not Path(path).is_file():
        raise InputError(f"{path}: is not a file", fix=fix)
    try:
        content = json.loads(_content(path).decode())
    except (OSError, ValueError, RecursionError) as error:
        raise InputError(f"{path}: cannot be read: {error}", fix=fix) from error
    if not isinstance(content, dict):
        raise InputError(f"{path}: contains no JSON object", fix=fix)
    for name in ("tokenizer_type", "tokenizer_fingerprint", "chat_template"):
        if not isinstance(content.get(name), str | None):
            raise InputError(f"{path}: {name} is {content[name]!r} instead of text", fix=fix)
    for name in ("vocab_size", "sequences", "tokens", "largest_id", "bin_crc32", "idx_crc32"):
        found = content.get(name)
        if found is not None and (type(found) is not int or found < 0):
            raise InputError(f"{path}: {name} is {found!r} instead of a count", fix=fix)
    return content


def _content(path: str) -> bytes:
    if not is_url(path):
        return Path(path).read_bytes()
    file = RemoteFile(path)
    return file.read(0, file.size).tobytes()


def _require_files(prefix: str) -> None:
    """Raise InputError, with similar names as a hint, unless both files exist."""
    missing = [suffix for suffix in (".bin", ".idx") if not Path(prefix + suffix).is_file()]
    if not missing:
        return
    path = Path(prefix)
    if path.suffix in {".bin", ".idx"} and all(
        path.with_suffix(suffix).is_file() for suffix in (".bin", ".idx")
    ):
        fix = f"give the path without its suffix: {path.with_suffix('')}"
    elif path.is_file():
        made = path.with_suffix("")
        fix = (
            f"run preprocess_data.py --input {prefix} --output-prefix {made} with the tokenizer of the run (and --sft for"
            f" conversations), and give the prefix that it writes: {made}_text_document, or {made}_messages_document with --sft"
        )
    elif "," in prefix:
        fix = "separate datasets by spaces, not by commas"
    elif len(missing) == 1:
        fix = "copy both files of the dataset, or make it again with preprocess_data.py"
    elif not path.parent.is_dir():
        fix = f"correct the path: the folder {path.parent} does not exist"
    else:
        names = sorted(file.stem for file in path.parent.glob("*.idx"))
        near = difflib.get_close_matches(path.name, names, n=3, cutoff=0.4) or names[:3]
        fix = f"correct the path: {path.parent} contains {', '.join(near)}"
        if not names:
            fix = (
                f"give the prefix of .bin and .idx files: the folder {path.parent.resolve()} contains none;"
                " preprocess_data.py makes them"
            )
    raise InputError(
        f"{prefix}{missing[0]}: {_absence(prefix + missing[0])}" + (" (nor .idx)" if missing[1:] else ""),
        fix=fix,
    )


def _absence(path: str) -> str:
    """Return why a path is not a file."""
    if os.path.lexists(path) and not Path(path).exists():
        return "is a broken link"
    return "is not a regular file" if Path(path).exists() else "there is no such file"


def _file_bytes(path: Path) -> int:
    try:
        return path.stat().st_size
    except OSError as error:
        raise InputError(f"{path}: {error.strerror}", fix="make the file readable on this host") from error


def _read_header(path: Path) -> tuple[np.dtype[Any], int, int, bool]:
    """Return the element type, the numbers of sequences and of document boundaries, and whether modes follow."""
    num_bytes = _file_bytes(path)
    try:
        with path.open("rb") as file:
            header = file.read(HEADER.size)
    except OSError as error:
        raise InputError(f"{path}: {error.strerror}", fix="make the file readable on this host") from error
    if not header.startswith(MAGIC):
        raise InputError(
            f"{path}: magic is {header[:9]!r}, not {MAGIC!r}: it is not an index file", fix=REBUILD
        )
    if len(header) < HEADER.size:
        raise InputError(f"{path}: header ends after {len(header)} of {HEADER.size} bytes", fix=REBUILD)
    _, version, code, num_sequences, num_boundaries = HEADER.unpack(header)
    if version != VERSION:
        raise InputError(f"{path}: version is {version}; only {VERSION} is supported", fix=REBUILD)
    if code not in ELEMENT_TYPES:
        known = ", ".join(f"{number} {np.dtype(name).name}" for number, name in ELEMENT_TYPES.items())
        raise InputError(f"{path}: element type code is {code}; supported are {known}", fix=REBUILD)
    if not num_boundaries:
        raise InputError(f"{path}: the count of document boundaries is 0; the minimum is 1", fix=REBUILD)
    plain = HEADER.size + 12 * num_sequences + 8 * num_boundaries  # Python integers: no count overflows
    if num_bytes not in {plain, plain + num_sequences}:
        raise InputError(
            f"{path}: the file has {num_bytes} bytes, but its counts of {num_sequences} sequences and "
            f"{num_boundaries} document boundaries need {plain} ({plain + num_sequences} with modes)",
            fix=REBUILD,
        )
    return np.dtype(ELEMENT_TYPES[code]), num_sequences, num_boundaries, num_bytes > plain


def _check_offsets(
    path: Path, lengths: npt.NDArray[np.int32], offsets: npt.NDArray[np.int64], dtype: np.dtype[Any]
) -> int:
    """Check that lengths are not negative and offsets are their running sum. Return the elements of all sequences."""
    position = 0
    for start in range(0, len(lengths), CHECK_ROWS):
        rows = lengths[start : start + CHECK_ROWS]
        if rows.min() < 0:
            bad = start + int(np.argmax(rows < 0))
            raise InputError(f"{path}: length of sequence {bad} is {lengths[bad]}", fix=REBUILD)
        ends = np.cumsum(rows, dtype=np.int64) * dtype.itemsize
        expected = np.concatenate(([0], ends[:-1])) + position
        wrong = expected != offsets[start : start + CHECK_ROWS]
        if wrong.any():
            bad = int(np.argmax(wrong))
            raise InputError(
                f"{path}: offset of sequence {start + bad} is {offsets[start + bad]}; "
                f"the sequences before it end at byte {expected[bad]}",
                fix=REBUILD,
            )
        position += int(ends[-1])
    return position // dtype.itemsize


def _check_boundaries(path: Path, boundaries: npt.NDArray[np.int64], num_sequences: int) -> None:
    """Check that document boundaries start at 0, never decrease, and end at the number of sequences."""
    if boundaries[0] != 0 or boundaries[-1] != num_sequences:
        raise InputError(
            f"{path}: document boundaries run from {boundaries[0]} to {boundaries[-1]}, not from 0 to {num_sequences} sequences",
            fix=REBUILD,
        )
    for start in range(0, len(boundaries) - 1, CHECK_ROWS):
        decreases = np.diff(boundaries[start : start + CHECK_ROWS + 1]) < 0
        if decreases.any():
            bad = start + int(np.argmax(decreases)) + 1
            raise InputError(
                f"{path}: document boundary {bad} is {boundaries[bad]}, less than {boundaries[bad - 1]} before it",
                fix=REBUILD,
            )


def _check_bin(name: str, num_bytes: int, num_elements: int, dtype: np.dtype[Any]) -> None:
    """Check that the size of `.bin` equals the count of the index."""
    if num_bytes != num_elements * dtype.itemsize:
        raise InputError(
            f"{name}: the file has {num_bytes} bytes, but its .idx counts {num_elements * dtype.itemsize} "
            f"({num_elements} elements of {dtype.name})",
            fix=f"{REBUILD}: the two files do not belong together, or one is truncated",
        )
