"""Tokenized sequences on disk: `<prefix>.bin` holds the elements, `<prefix>.idx` says where each sequence lies.

    .bin   elements of all sequences, one after the other, little endian, nothing else
    .idx   magic 9 | version u64 | element code u8 | sequences n u64 | borders d u64
           lengths int32[n] | byte offsets int64[n] | document borders int64[d] | modes int8[n], if multimodal

Document i is made of the sequences border[i] .. border[i+1]-1. Opening checks that both files agree in every byte
count, so that a truncated copy is found before the first step and not in the middle of a run.

Source: the file format of Megatron-LM, core/datasets/indexed_dataset.py.
"""

from __future__ import annotations

import difflib
import os
import struct
import weakref
from pathlib import Path
from typing import Any, Final, Protocol

import numpy as np
import numpy.typing as npt

from megatrain.config.errors import InputError

Elements = npt.NDArray[Any]

MAGIC: Final = b"MMIDIDX\x00\x00"
VERSION: Final = 1
HEADER: Final = struct.Struct("<9sQBQQ")
ELEMENT_TYPES: Final = {1: "u1", 2: "i1", 3: "<i2", 4: "<i4", 5: "<i8", 6: "<f8", 7: "<f4", 8: "<u2"}
CHECK_ROWS: Final = 1 << 16
"""Sequences checked at once: as many as stay in a core's cache."""
REBUILD: Final = "copy the file again, or make the dataset anew with preprocess_data.py"


class SequenceSource(Protocol):
    """What samples are cut from: numbered token sequences, from files or made up."""

    @property
    def name(self) -> str:
        """Where the tokens come from, for messages."""

    @property
    def lengths(self) -> npt.NDArray[np.int32]:
        """Elements of every sequence, [n]."""

    def read(self, sequence: int, offset: int = 0, length: int | None = None) -> Elements:
        """`length` elements of a sequence from `offset` on; None: to its end."""

    def document_of(self, sequence: int) -> int:
        """The document that a sequence belongs to."""


class IndexedDataset:
    """Reads the sequences of `<prefix>.bin/.idx`. Safe to use from several threads."""

    def __init__(self, prefix: str | Path, *, mmap: bool = True) -> None:
        """Open and check both files.

        Args:
            prefix: path without `.bin` or `.idx`.
            mmap: map both files, so that processes of a host share the memory; else the index is read into memory
                and elements are read when asked for.

        Raises:
            InputError: a file is missing, or its content contradicts itself or the other file.
        """
        self.prefix = str(prefix)
        self._bin_path = Path(f"{prefix}.bin")
        index_path = Path(f"{prefix}.idx")
        _require_files(self.prefix)
        self.dtype, num_sequences, num_borders, has_modes = _read_header(index_path)
        if mmap:
            body: Elements = np.asarray(np.memmap(index_path, dtype=np.uint8, mode="r"))[HEADER.size :]
        else:
            body = np.fromfile(index_path, dtype=np.uint8, offset=HEADER.size)
        cuts = np.cumsum([4 * num_sequences, 8 * num_sequences, 8 * num_borders])
        lengths, offsets, borders, modes = np.split(body, cuts)
        self.lengths: npt.NDArray[np.int32] = lengths.view("<i4")
        self.offsets: npt.NDArray[np.int64] = offsets.view("<i8")
        self.document_borders: npt.NDArray[np.int64] = borders.view("<i8")
        self.modes: npt.NDArray[np.int8] | None = modes.view("i1") if has_modes else None
        self.num_tokens = _check_offsets(index_path, self.lengths, self.offsets, self.dtype)
        _check_borders(index_path, self.document_borders, num_sequences)
        _check_bin(self._bin_path, self.num_tokens, self.dtype)
        self._elements: Elements | None = None
        if not self.num_tokens:  # nothing can be mapped
            self._elements = np.empty(0, self.dtype)
        elif mmap:
            self._elements = np.asarray(np.memmap(self._bin_path, dtype=self.dtype, mode="r"))
        else:
            self._descriptor = os.open(self._bin_path, os.O_RDONLY)
            weakref.finalize(self, os.close, self._descriptor)

    def __len__(self) -> int:
        """Number of sequences."""
        return len(self.lengths)

    @property
    def name(self) -> str:
        """Where the tokens come from, for messages."""
        return str(self._bin_path)

    @property
    def num_documents(self) -> int:
        """Number of documents, also those without sequences."""
        return len(self.document_borders) - 1

    def document_of(self, sequence: int) -> int:
        """The document that a sequence belongs to."""
        return int(np.searchsorted(self.document_borders, sequence, side="right")) - 1

    def read(self, sequence: int, offset: int = 0, length: int | None = None) -> Elements:
        """`length` elements of a sequence from `offset` on; None: to its end. Do not write to the answer."""
        if not 0 <= sequence < len(self):
            raise IndexError(f"{self.name}: sequence {sequence} of {len(self)}")
        available = int(self.lengths[sequence]) - offset
        count = available if length is None else length
        if offset < 0 or not 0 <= count <= available:
            raise IndexError(
                f"{self.name}: elements {offset}..{offset + count} of sequence {sequence}, "
                f"which has {self.lengths[sequence]}"
            )
        start = int(self.offsets[sequence]) // self.dtype.itemsize + offset
        if self._elements is not None:
            return self._elements[start : start + count]
        return self._read_file(start * self.dtype.itemsize, count * self.dtype.itemsize).view(self.dtype)

    def _read_file(self, position: int, num_bytes: int) -> npt.NDArray[np.uint8]:
        answer = np.empty(num_bytes, np.uint8)
        view = memoryview(answer.data)
        done = 0
        while done < num_bytes:  # a read may stop early, at 2 GiB for one
            try:
                got = os.preadv(self._descriptor, [view[done:]], position + done)
            except OSError as error:
                raise InputError(
                    f"{self._bin_path}: byte {position + done} cannot be read: {error.strerror}",
                    fix="mend the disk or copy the file from another place",
                ) from error
            if not got:
                raise InputError(
                    f"{self._bin_path}: ends at byte {position + done}; it has become shorter since it was opened",
                    fix="do not change data files during a run",
                )
            done += got
        return answer


def _require_files(prefix: str) -> None:
    """Both files are there, or an error says which is not and what lies nearby."""
    missing = [suffix for suffix in (".bin", ".idx") if not Path(prefix + suffix).is_file()]
    if not missing:
        return
    path = Path(prefix)
    if path.suffix in {".bin", ".idx"} and all(
        path.with_suffix(suffix).is_file() for suffix in (".bin", ".idx")
    ):
        fix = f"give the path without its ending: {path.with_suffix('')}"
    elif "," in prefix:
        fix = "separate datasets by blanks, not by commas"
    elif len(missing) == 1:
        fix = "a dataset is two files; copy both, or make it anew with preprocess_data.py"
    elif not path.parent.is_dir():
        fix = f"there is no folder {path.parent}"
    else:
        names = sorted(file.stem for file in path.parent.glob("*.idx"))
        near = difflib.get_close_matches(path.name, names, n=3, cutoff=0.4) or names[:3]
        fix = f"{path.parent} holds {', '.join(near)}" if near else f"{path.parent} holds no .idx file"
    raise InputError(
        f"{prefix}{missing[0]}: {_absence(prefix + missing[0])}" + (" (nor .idx)" if missing[1:] else ""),
        fix=fix,
    )


def _absence(path: str) -> str:
    """Why a path names no file."""
    if os.path.lexists(path) and not Path(path).exists():
        return "is a link to nowhere"
    return "is no regular file" if Path(path).exists() else "there is no such file"


def _file_bytes(path: Path) -> int:
    try:
        return path.stat().st_size
    except OSError as error:
        raise InputError(
            f"{path}: {error.strerror}", fix="see that the file can be read from this host"
        ) from error


def _read_header(path: Path) -> tuple[np.dtype[Any], int, int, bool]:
    """Element type, number of sequences, number of document borders, whether modes follow."""
    num_bytes = _file_bytes(path)
    try:
        with path.open("rb") as file:
            header = file.read(HEADER.size)
    except OSError as error:
        raise InputError(
            f"{path}: {error.strerror}", fix="see that the file can be read from this host"
        ) from error
    if not header.startswith(MAGIC):
        raise InputError(f"{path}: magic is {header[:9]!r}, not {MAGIC!r}: not an index file", fix=REBUILD)
    if len(header) < HEADER.size:
        raise InputError(f"{path}: header ends after {len(header)} of {HEADER.size} bytes", fix=REBUILD)
    _, version, code, num_sequences, num_borders = HEADER.unpack(header)
    if version != VERSION:
        raise InputError(f"{path}: version is {version}, and only {VERSION} is known", fix=REBUILD)
    if code not in ELEMENT_TYPES:
        known = ", ".join(f"{number} {np.dtype(name).name}" for number, name in ELEMENT_TYPES.items())
        raise InputError(f"{path}: element type code is {code}; known are {known}", fix=REBUILD)
    if not num_borders:
        raise InputError(
            f"{path}: the count of document borders is 0, but even no document has one", fix=REBUILD
        )
    plain = HEADER.size + 12 * num_sequences + 8 * num_borders  # Python integers: no count overflows
    if num_bytes not in {plain, plain + num_sequences}:
        raise InputError(
            f"{path}: the file has {num_bytes} bytes, but its counts of {num_sequences} sequences and "
            f"{num_borders} document borders need {plain} ({plain + num_sequences} with modes)",
            fix=REBUILD,
        )
    return np.dtype(ELEMENT_TYPES[code]), num_sequences, num_borders, num_bytes > plain


def _check_offsets(
    path: Path, lengths: npt.NDArray[np.int32], offsets: npt.NDArray[np.int64], dtype: np.dtype[Any]
) -> int:
    """Lengths are counts and offsets their running sum. Returns the elements of all sequences."""
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


def _check_borders(path: Path, borders: npt.NDArray[np.int64], num_sequences: int) -> None:
    """Document borders start at 0, never fall, and end at the number of sequences."""
    if borders[0] != 0 or borders[-1] != num_sequences:
        raise InputError(
            f"{path}: document borders run from {borders[0]} to {borders[-1]}, not from 0 to {num_sequences} sequences",
            fix=REBUILD,
        )
    for start in range(0, len(borders) - 1, CHECK_ROWS):
        falls = np.diff(borders[start : start + CHECK_ROWS + 1]) < 0
        if falls.any():
            bad = start + int(np.argmax(falls)) + 1
            raise InputError(
                f"{path}: document border {bad} is {borders[bad]}, below {borders[bad - 1]} before it",
                fix=REBUILD,
            )


def _check_bin(path: Path, num_elements: int, dtype: np.dtype[Any]) -> None:
    """`.bin` holds just what the index counts."""
    num_bytes = _file_bytes(path)
    if num_bytes != num_elements * dtype.itemsize:
        raise InputError(
            f"{path}: the file has {num_bytes} bytes, but its .idx counts {num_elements * dtype.itemsize} "
            f"({num_elements} elements of {dtype.name})",
            fix=f"the two files do not belong together or one is cut short: {REBUILD}",
        )
