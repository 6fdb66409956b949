"""Writes `<prefix>.bin/.idx`, whole or not at all.

    add documents -> <prefix>.bin.partial -> (leaving the `with`) <prefix>.idx.partial -> fsync -> rename .bin, .idx

The `.idx` is renamed last and an old one is removed first: whenever a run dies, what can be opened is whole.
"""

from __future__ import annotations

import os
from array import array
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

import numpy as np
import numpy.typing as npt

from megatrain.config.errors import InputError
from megatrain.data.indexed import CHECK_ROWS, ELEMENT_TYPES, HEADER, MAGIC, VERSION, Elements

if TYPE_CHECKING:
    from collections.abc import Sequence
    from types import TracebackType


def token_dtype(vocab_size: int | None) -> np.dtype[Any]:
    """Element type for ids below `vocab_size` (the unpadded one; None: unknown), by Megatron-LM's rule."""
    is_small = vocab_size is not None and vocab_size < 65500
    return np.dtype("<u2" if is_small else "<i4")


class IndexedWriter:
    """Takes documents in order; the files appear when its `with` block ends without an error."""

    def __init__(self, prefix: str | Path, dtype: npt.DTypeLike) -> None:
        self.prefix = str(prefix)
        self.dtype = np.dtype(dtype).newbyteorder("<")
        self.num_tokens = 0
        self._code = next(code for code, name in ELEMENT_TYPES.items() if np.dtype(name) == self.dtype)
        self._lengths = array("i")
        self._borders = array("q", [0])
        self._modes = array("b")
        self._bin_partial = Path(f"{prefix}.bin.partial")
        self._index_partial = Path(f"{prefix}.idx.partial")

    def __enter__(self) -> Self:
        """Open the temporary `.bin`."""
        try:
            self._bin_partial.parent.mkdir(parents=True, exist_ok=True)
            self._file = self._bin_partial.open("wb")
        except OSError as error:
            raise InputError(
                f"{self._bin_partial}: cannot be written: {error.strerror}",
                fix="give a prefix in a folder that can be written",
            ) from error
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Put both files in place, or, after an error, remove what was written."""
        try:
            if kind is None:
                _flush(self._file)
                self._file.close()
                self._write_index()
                Path(f"{self.prefix}.idx").unlink(missing_ok=True)
                self._bin_partial.replace(f"{self.prefix}.bin")
                self._index_partial.replace(f"{self.prefix}.idx")
                _flush_folder(Path(self.prefix).parent)
        finally:
            try:
                self._file.close()  # may fail again on a full disk, and the files go all the same
            finally:
                self._bin_partial.unlink(missing_ok=True)
                self._index_partial.unlink(missing_ok=True)

    def add_document(self, sequences: Sequence[npt.ArrayLike], modes: Sequence[int] | None = None) -> None:
        """One document; no sequences are a document too. `modes`: one a sequence, for all documents or for none."""
        arrays = [np.asarray(sequence) for sequence in sequences]
        elements = np.concatenate(arrays) if arrays else np.empty(0, self.dtype)
        self.add_documents(
            elements, np.array([len(part) for part in arrays], np.int32), np.array([len(arrays)])
        )
        if modes is not None:
            assert len(modes) == len(arrays), "one mode a sequence"
            self._modes.extend(modes)

    def add_documents(
        self,
        elements: Elements,
        lengths: npt.NDArray[np.int32],
        sequences_per_document: npt.NDArray[np.int64],
    ) -> None:
        """Many documents at once: their elements laid end to end, and how they are cut."""
        assert len(elements) == lengths.sum(dtype=np.int64)
        assert len(lengths) == sequences_per_document.sum()
        self._file.write(self._converted(elements).tobytes())
        self.num_tokens += len(elements)
        borders = self._borders[-1] + np.cumsum(sequences_per_document, dtype=np.int64)
        self._lengths.frombytes(np.asarray(lengths, "i").tobytes())
        self._borders.frombytes(np.asarray(borders, "q").tobytes())

    @property
    def num_sequences(self) -> int:
        """Sequences written so far."""
        return len(self._lengths)

    @property
    def num_documents(self) -> int:
        """Documents written so far."""
        return len(self._borders) - 1

    def _converted(self, elements: Elements) -> Elements:
        """The elements in the type of the file; one that it cannot hold is an error, never wrapped around."""
        if elements.dtype != self.dtype and elements.size and self.dtype.kind in "iu":
            limits = np.iinfo(self.dtype)
            low, high = int(elements.min()), int(elements.max())
            if low < limits.min or high > limits.max:
                raise InputError(
                    f"{self.prefix}.bin: id {low if low < limits.min else high} does not fit {self.dtype.name}",
                    fix="use a wider element type, such as int32",
                )
        return elements.astype(self.dtype, copy=False)

    def _write_index(self) -> None:
        assert len(self._modes) in {0, len(self._lengths)}, "modes for all documents or for none"
        lengths = np.frombuffer(self._lengths, np.int32)
        with self._index_partial.open("wb") as file:
            file.write(HEADER.pack(MAGIC, VERSION, self._code, len(lengths), len(self._borders)))
            file.write(lengths.astype("<i4", copy=False).tobytes())
            position = 0
            for start in range(0, len(lengths), CHECK_ROWS):
                ends = (
                    position
                    + np.cumsum(lengths[start : start + CHECK_ROWS], dtype=np.int64) * self.dtype.itemsize
                )
                file.write(np.concatenate(([position], ends[:-1])).astype("<i8").tobytes())
                position = int(ends[-1])
            file.write(np.frombuffer(self._borders, np.int64).astype("<i8", copy=False).tobytes())
            file.write(self._modes.tobytes())
            _flush(file)


def _flush(file: Any) -> None:
    file.flush()
    os.fsync(file.fileno())


def _flush_folder(folder: Path) -> None:
    """Make the renames last through a power cut."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
