"""Write `<prefix>.bin/.idx` completely or not at all.

    add documents -> <prefix>.bin.partial, .lengths.partial, .borders.partial (and .modes.partial)
    finalize      -> <prefix>.idx.partial, assembled from them; everything is flushed to disk
    commit        -> .bin, .json and last .idx are renamed to their final names

An old `.idx` is removed first and the new one is renamed last: a dataset that can be opened is complete, even after a
crash. <prefix>.lock excludes other writers from before the first byte until after the last rename.
<prefix>.owner.partial identifies the writer of the partial files, so that files of another writer are not resumed.
Nothing is kept in memory: the partial files and a `WriterState` suffice to resume after a crash. The state has a checksum of
each partial file, so that damaged ones are never resumed or committed.
"""

from __future__ import annotations

import contextlib
import uuid
import zlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any, Final, Self

import numpy as np
import numpy.typing as npt

from megatrain.config.errors import InputError, MegatrainError
from megatrain.data.files import FileLock, report_write_errors, write_json
from megatrain.data.indexed.reader import CHECK_ROWS, ELEMENT_TYPES, HEADER, MAGIC, VERSION, Elements
from megatrain.storage.files import fsync, fsync_folder, is_start_intact


@dataclass(frozen=True, kw_only=True)
class WriterState:
    """The progress of a writer."""

    documents: int = 0
    sequences: int = 0
    tokens: int = 0
    modes: int = 0
    """Number of modes: one per sequence, or 0 in data without modes."""
    owner: str = ""
    """Unique id of the writer, stored with its partial files."""
    crc32s: Mapping[str, int] = field(default_factory=dict)
    """Crc32 of each partial file so far, by kind."""


def token_dtype(vocab_size: int | None) -> np.dtype[Any]:
    """Return the element type for a vocabulary size (unpadded; None: unknown), by Megatron-LM's rule."""
    is_small = vocab_size is not None and vocab_size < 65500
    return np.dtype("<u2" if is_small else "<i4")


class IndexedWriter:
    """Writes documents in order. Leaving its `with` block finalizes and commits, or discards after an error.

    To be able to resume after a crash, call `lock`, `open`, `state`, `finalize`, `commit` (or `discard`) and `close`.
    """

    def __init__(
        self, prefix: str | Path, dtype: npt.DTypeLike, *, resume_from: WriterState | None = None
    ) -> None:
        """Prepare a writer. `resume_from` is an earlier result of `state()`; everything written after it is dropped."""
        self.prefix = str(prefix)
        self.dtype = np.dtype(dtype).newbyteorder("<")
        self._code = next(code for code, name in ELEMENT_TYPES.items() if np.dtype(name) == self.dtype)
        start = resume_from or WriterState()
        self.num_documents = start.documents
        self.num_sequences = start.sequences
        self.num_tokens = start.tokens
        self.description: Mapping[str, Any] | None = None
        """Content of `<prefix>.json`, to which the Crc32 of both files is added."""
        self._num_modes = start.modes
        self._is_new = resume_from is None
        self._owner = resume_from.owner if resume_from else uuid.uuid4().hex
        self._crc32s = dict(start.crc32s)
        self._files: dict[str, IO[bytes]] = {}
        self._lock = FileLock(_lock_path(self.prefix), target=self.prefix)

    def __enter__(self) -> Self:
        """Open the partial files."""
        self.open()
        return self

    def __exit__(self, kind: object, *error: object) -> None:
        """Commit the files, or remove them after an error."""
        try:
            if kind is None:
                self.finalize()
                self.commit()
        finally:
            self.discard()

    def lock(self) -> None:
        """Lock the prefix. Raises InputError if another writer has locked it, or the folder is not writable."""
        if not self._lock.is_held:
            self._lock.acquire()

    def open(self) -> None:
        """Create the partial files, or truncate them to the state to resume from."""
        self.lock()
        try:
            if self._is_new:
                self._remove_partials()  # otherwise the description of a dead run could be committed
            for kind, num_bytes in self._partial_bytes().items():
                file = self._partial(kind).open("wb" if self._is_new else "r+b")
                self._files[kind] = file
                file.truncate(num_bytes)
                file.seek(num_bytes)
            if self._is_new:
                self._write("owner", np.frombuffer(self._owner.encode(), "u1"))
                self._write(_BOUNDARIES, np.zeros(1, "<i8"))
        except BaseException as error:
            (self.discard if self._is_new else self.close)()
            if not isinstance(error, OSError):
                raise
            raise InputError(
                f"{error.filename or self.prefix}: cannot be written: {error.strerror}",
                fix="give a prefix in a writable folder",
            ) from error

    def add_document(self, sequences: Sequence[npt.ArrayLike], modes: Sequence[int] | None = None) -> None:
        """Add a document, possibly without sequences. `modes`: one per sequence, for all documents or for none."""
        arrays = [np.asarray(sequence) for sequence in sequences]
        self.add_documents(
            np.concatenate(arrays) if arrays else np.empty(0, self.dtype),
            np.array([len(part) for part in arrays], np.int32),
            np.array([len(arrays)]),
            None if modes is None else np.array(modes, np.int8),
        )

    def add_documents(
        self,
        elements: Elements,
        lengths: npt.NDArray[np.int32],
        sequences_per_document: npt.NDArray[np.int64],
        modes: npt.NDArray[np.int8] | None = None,
    ) -> None:
        """Add many documents: their concatenated elements, and the boundaries."""
        assert len(elements) == lengths.sum(dtype=np.int64)
        self.add_elements(elements)
        self.add_boundaries(lengths, sequences_per_document, modes)

    def add_elements(self, elements: Elements) -> None:
        """Add elements, whose boundaries are added separately by `add_boundaries`."""
        self._write("bin", self._converted(elements))
        self.num_tokens += len(elements)

    def add_boundaries(
        self,
        lengths: npt.NDArray[np.int32],
        sequences_per_document: npt.NDArray[np.int64],
        modes: npt.NDArray[np.int8] | None = None,
    ) -> None:
        """Add the lengths of sequences, and the sequences per document."""
        assert len(lengths) == sequences_per_document.sum()
        boundaries = self.num_sequences + np.cumsum(sequences_per_document, dtype=np.int64)
        self._write("lengths", lengths.astype("<i4", copy=False))
        self._write(_BOUNDARIES, boundaries.astype("<i8", copy=False))
        if modes is not None:
            assert len(modes) == len(lengths), "one mode per sequence"
            if "modes" not in self._files:
                self._files["modes"] = self._partial("modes").open("wb")
            self._write("modes", modes)
            self._num_modes += len(modes)
        self.num_sequences += len(lengths)
        self.num_documents += len(sequences_per_document)

    def state(self) -> WriterState:
        """Flush everything to disk and return the progress."""
        for kind, file in self._files.items():
            with report_write_errors(self._partial(kind)):
                fsync(file)
        return WriterState(
            documents=self.num_documents,
            sequences=self.num_sequences,
            tokens=self.num_tokens,
            modes=self._num_modes,
            owner=self._owner,
            crc32s=dict(self._crc32s),
        )

    def resume_problem(self) -> str | None:
        """Return why the partial files cannot be resumed; None: they are this writer's, with everything that `resume_from` counts."""
        if not self._is_owner():
            return f"{self._partial('owner')} is missing or of another run"
        for kind, num_bytes in self._partial_bytes().items():
            if not self._is_intact(self._partial(kind), kind, num_bytes):
                return str(self._partial(kind))
        return None

    def commit_problem(self) -> str | None:
        """Return why the finalized files cannot be committed, or None; some may have been renamed already."""
        order = ("bin", "json", "idx")
        partial = tuple(kind for kind in order if self._partial(kind).is_file())
        if partial != order[len(order) - len(partial) :] or (partial and not self._is_owner()):
            return f"partial files of {self.prefix} are missing or of another run"
        for kind in order:
            path = self._partial(kind) if kind in partial else self._final(kind)
            num_bytes = self._final_bytes().get(kind, _size(path))
            if _size(path) != num_bytes or not self._is_intact(path, kind, num_bytes):
                return str(path)
        return None

    def _is_intact(self, path: Path, kind: str, num_bytes: int) -> bool:
        return is_start_intact(path, num_bytes=num_bytes, crc32=self._crc32s.get(kind, 0))

    def finalize(self) -> None:
        """Complete the partial files: assemble the index, write the description."""
        self.state()
        assert self._num_modes in {0, self.num_sequences}, "modes for all documents or for none"
        index = self._partial("idx")
        self._crc32s["idx"] = 0
        with report_write_errors(index), index.open("wb") as file:
            for part in self._index():
                file.write(part)
                self._crc32s["idx"] = zlib.crc32(part, self._crc32s["idx"])
            fsync(file)
        if self.description is not None:
            checksums = {f"{kind}_crc32": self._crc32s.get(kind, 0) for kind in ("bin", "idx")}
            write_json(self._partial("json"), {**self.description, **checksums})
            self._crc32s["json"] = zlib.crc32(self._partial("json").read_bytes())

    def commit(self) -> None:
        """Rename the finalized files to their final names. Can be repeated after an interruption.

        Raises:
            MegatrainError: another process has removed or changed the files.
        """
        if self._partial("idx").is_file():
            self._final("idx").unlink(missing_ok=True)
            for kind in ("bin", "json", "idx"):
                if self._partial(kind).is_file():
                    self._partial(kind).replace(self._final(kind))
            fsync_folder(Path(self.prefix).parent)
        for kind, num_bytes in self._final_bytes().items():
            path = self._final(kind)
            if _size(path) != num_bytes:
                found = f"has {_size(path)} bytes" if path.is_file() else "does not exist"
                raise MegatrainError(
                    f"{path}: {found}, but {num_bytes} bytes were written",
                    fix="stop other processes from changing files here, then run again",
                )
        self.discard()

    def discard(self) -> None:
        """Remove all partial files of this writer and release the lock."""
        self._close_files()
        if self._lock.is_held:
            self._remove_partials()
        self._lock.release()

    def close(self) -> None:
        """Close and keep the partial files, and release the lock."""
        self._close_files()
        self._lock.release()

    def _remove_partials(self) -> None:
        for kind in _KINDS:
            self._partial(kind).unlink(missing_ok=True)

    def _close_files(self) -> None:
        for file in self._files.values():
            with contextlib.suppress(OSError):  # on a full disk, the first error was raised before
                file.close()
        self._files.clear()

    def _final(self, kind: str) -> Path:
        return Path(f"{self.prefix}.{kind}")

    def _partial(self, kind: str) -> Path:
        return Path(f"{self.prefix}.{kind}.partial")

    def _is_owner(self) -> bool:
        path = self._partial("owner")
        return path.is_file() and path.read_bytes() == self._owner.encode()

    def _final_bytes(self) -> dict[str, int]:
        """Return the sizes of the final files, without the description."""
        index_bytes = (
            HEADER.size + self.num_sequences * (4 + 8) + (self.num_documents + 1) * 8 + self._num_modes
        )
        return {"bin": self.num_tokens * self.dtype.itemsize, "idx": index_bytes}

    def _partial_bytes(self) -> dict[str, int]:
        """Return the sizes of the partial files so far."""
        counts = {
            "bin": self.num_tokens * self.dtype.itemsize,
            "lengths": self.num_sequences * 4,
            _BOUNDARIES: 0 if self._is_new else (self.num_documents + 1) * 8,
            "owner": 0 if self._is_new else len(self._owner),
        }
        return counts | ({"modes": self._num_modes} if self._num_modes else {})

    def _write(self, kind: str, array: Elements) -> None:
        with report_write_errors(self._partial(kind)):
            data = np.ascontiguousarray(array).data
            self._files[kind].write(data)
        self._crc32s[kind] = zlib.crc32(data, self._crc32s.get(kind, 0))

    def _converted(self, elements: Elements) -> Elements:
        """Convert elements to the type of the file. Raises InputError on overflow."""
        if elements.dtype != self.dtype and elements.size and self.dtype.kind in "iu":
            limits = np.iinfo(self.dtype)
            low, high = int(elements.min()), int(elements.max())
            if low < limits.min or high > limits.max:
                raise InputError(
                    f"{self.prefix}.bin: id {low if low < limits.min else high} does not fit into {self.dtype.name}",
                    fix="use a wider element type, such as int32",
                )
        return elements.astype(self.dtype, copy=False)

    def _index(self) -> Iterator[bytes]:
        """Yield the parts of the index file."""
        yield HEADER.pack(MAGIC, VERSION, self._code, self.num_sequences, self.num_documents + 1)
        yield from self._content("lengths")
        yield from self._offsets()
        yield from self._content(_BOUNDARIES)
        if self._num_modes:
            yield from self._content("modes")

    def _content(self, kind: str) -> Iterator[bytes]:
        """Yield the content of a partial file.

        Raises:
            MegatrainError: it is not what was written.
        """
        path, crc32 = self._partial(kind), 0
        with path.open("rb") as file:
            while data := file.read(8 * CHECK_ROWS):
                crc32 = zlib.crc32(data, crc32)
                yield data
        if crc32 != self._crc32s.get(kind, 0):
            raise MegatrainError(
                f"{path}: has other content than was written",
                fix="stop other processes from changing files here, test the disk, then run again",
            )

    def _offsets(self) -> Iterator[bytes]:
        """Yield the byte offsets of all sequences: the running sum of their lengths."""
        position = 0
        for content in self._content("lengths"):
            lengths = np.frombuffer(content, "<i4")
            ends = position + np.cumsum(lengths, dtype=np.int64) * self.dtype.itemsize
            yield np.concatenate(([position], ends[:-1])).astype("<i8").tobytes()
            position = int(ends[-1])
        assert position == self.num_tokens * self.dtype.itemsize, "every element belongs to a sequence"


def dataset_files(prefix: str) -> list[Path]:
    """Return all files that a writer of this prefix creates or removes."""
    names = [f"{prefix}.{kind}" for kind in ("bin", "idx", "json")]
    return [*map(Path, names), *(Path(f"{prefix}.{kind}.partial") for kind in _KINDS), _lock_path(prefix)]


def _lock_path(prefix: str) -> Path:
    return Path(f"{prefix}.lock")


def _size(path: Path) -> int:
    """Return the size of a file; -1 if it does not exist."""
    return path.stat().st_size if path.is_file() else -1


_BOUNDARIES: Final = "borders"  # in names of partial files, which a resumed run reads
_KINDS: Final = ("bin", "lengths", _BOUNDARIES, "modes", "idx", "json", "owner")
