"""Writes `<prefix>.bin/.idx`, whole or not at all.

    add documents -> <prefix>.bin.partial, .lengths.partial, .borders.partial (and .modes.partial)
    seal          -> <prefix>.idx.partial, put together from them; all of it is on the disk
    publish       -> .bin, .json, and last .idx get their names; leaving the `with` block seals and publishes

An old `.idx` is removed before and the new one is renamed last: whenever a run dies, what can be opened is whole.
From before the first byte until after the last name, <prefix>.lock keeps other writers out; and <prefix>.owner.partial
says whose the partial files are, so that nobody goes on with those that another writer has begun anew.
Nothing is held in memory, and the partial files with a `WriterState` are all that it takes to go on after a crash.
"""

from __future__ import annotations

import contextlib
import shutil
import uuid
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import IO, Any, Final, Self

import numpy as np
import numpy.typing as npt

from megatrain.config.errors import InputError, MegatrainError
from megatrain.data.files import flush, flush_folder, write_json, writing
from megatrain.data.indexed.reader import CHECK_ROWS, ELEMENT_TYPES, HEADER, MAGIC, VERSION, Elements
from megatrain.data.locks import FileLock


@dataclass(frozen=True, kw_only=True)
class WriterState:
    """How far a writer has come."""

    documents: int = 0
    sequences: int = 0
    tokens: int = 0
    modes: int = 0
    """As many as sequences, or 0 in data without modes."""
    owner: str = ""
    """Written into the partial files: another writer's have another one."""


def token_dtype(vocab_size: int | None) -> np.dtype[Any]:
    """Element type for ids below `vocab_size` (the unpadded one; None: unknown), by Megatron-LM's rule."""
    is_small = vocab_size is not None and vocab_size < 65500
    return np.dtype("<u2" if is_small else "<i4")


class IndexedWriter:
    """Takes documents in order; the files appear when its `with` block ends without an error.

    Who wants to go on after a crash calls `lock`, `open`, `state`, `seal`, `publish` (or `discard`) and `close` instead.
    """

    def __init__(
        self, prefix: str | Path, dtype: npt.DTypeLike, *, resume_from: WriterState | None = None
    ) -> None:
        """`resume_from`: what `state()` said once; whatever was written after it is dropped."""
        self.prefix = str(prefix)
        self.dtype = np.dtype(dtype).newbyteorder("<")
        self._code = next(code for code, name in ELEMENT_TYPES.items() if np.dtype(name) == self.dtype)
        start = resume_from or WriterState()
        self.num_documents = start.documents
        self.num_sequences = start.sequences
        self.num_tokens = start.tokens
        self.description: Mapping[str, Any] | None = None
        """What is published with the data as `<prefix>.json`."""
        self._num_modes = start.modes
        self._is_new = resume_from is None
        self._owner = resume_from.owner if resume_from else uuid.uuid4().hex
        self._files: dict[str, IO[bytes]] = {}
        self._lock = FileLock(_lock_path(self.prefix), written=self.prefix)

    def __enter__(self) -> Self:
        """Open the partial files."""
        self.open()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Put the files in place, or, after an error, remove what was written."""
        try:
            if kind is None:
                self.seal()
                self.publish()
        finally:
            self.discard()

    def lock(self) -> None:
        """Keep other writers out. Raises InputError if one is at work, or the folder cannot be written to."""
        if not self._lock.is_held:
            self._lock.take()

    def open(self) -> None:
        """Make the partial files, or cut them to the state to go on from. They are locked from here on."""
        self.lock()
        try:
            if self._is_new:
                self._remove_partials()  # a dead run's description would be published as this one's
            for kind, num_bytes in self._partial_bytes().items():
                file = self._partial(kind).open("wb" if self._is_new else "r+b")
                self._files[kind] = file
                file.truncate(num_bytes)
                file.seek(num_bytes)
            if self._is_new:
                self._write("owner", np.frombuffer(self._owner.encode(), "u1"))
                self._write("borders", np.zeros(1, "<i8"))
        except BaseException as error:
            (self.discard if self._is_new else self.close)()
            if not isinstance(error, OSError):
                raise
            raise InputError(
                f"{error.filename or self.prefix}: cannot be written: {error.strerror}",
                fix="give a prefix in a folder that can be written",
            ) from error

    def add_document(self, sequences: Sequence[npt.ArrayLike], modes: Sequence[int] | None = None) -> None:
        """One document; no sequences are a document too. `modes`: one a sequence, for all documents or for none."""
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
        """Many documents at once: their elements laid end to end, and how they are cut."""
        assert len(elements) == lengths.sum(dtype=np.int64)
        self.add_elements(elements)
        self.add_cuts(lengths, sequences_per_document, modes)

    def add_elements(self, elements: Elements) -> None:
        """Elements alone, of which `add_cuts` says later or said before how they are cut."""
        self._write("bin", self._converted(elements))
        self.num_tokens += len(elements)

    def add_cuts(
        self,
        lengths: npt.NDArray[np.int32],
        sequences_per_document: npt.NDArray[np.int64],
        modes: npt.NDArray[np.int8] | None = None,
    ) -> None:
        """How elements are cut into sequences, and those into documents."""
        assert len(lengths) == sequences_per_document.sum()
        borders = self.num_sequences + np.cumsum(sequences_per_document, dtype=np.int64)
        self._write("lengths", lengths.astype("<i4", copy=False))
        self._write("borders", borders.astype("<i8", copy=False))
        if modes is not None:
            assert len(modes) == len(lengths), "one mode a sequence"
            if "modes" not in self._files:
                self._files["modes"] = self._partial("modes").open("wb")
            self._write("modes", modes)
            self._num_modes += len(modes)
        self.num_sequences += len(lengths)
        self.num_documents += len(sequences_per_document)

    def state(self) -> WriterState:
        """How far the writer has come; all of that is on the disk."""
        for kind, file in self._files.items():
            with writing(self._partial(kind)):
                flush(file)
        return WriterState(
            documents=self.num_documents,
            sequences=self.num_sequences,
            tokens=self.num_tokens,
            modes=self._num_modes,
            owner=self._owner,
        )

    def can_resume(self) -> bool:
        """Whether the partial files are this writer's, and hold all that the state to go on from counts."""
        return self._is_owner() and all(
            _size(self._partial(kind)) >= num_bytes for kind, num_bytes in self._partial_bytes().items()
        )

    def can_publish(self) -> bool:
        """Whether all that was sealed, with a description, is there: up to some file it may have its name already."""
        order = ("bin", "json", "idx")
        partial = tuple(kind for kind in order if self._partial(kind).is_file())
        if partial != order[len(order) - len(partial) :] or (partial and not self._is_owner()):
            return False
        sizes = self._sealed_bytes()
        paths = {kind: self._partial(kind) if kind in partial else self._named(kind) for kind in order}
        return paths["json"].is_file() and all(_size(paths[kind]) == sizes[kind] for kind in sizes)

    def seal(self) -> None:
        """Complete the partial files: put the index together, write the description."""
        self.state()
        assert self._num_modes in {0, self.num_sequences}, "modes for all documents or for none"
        index = self._partial("idx")
        with writing(index), index.open("wb") as file:
            file.write(HEADER.pack(MAGIC, VERSION, self._code, self.num_sequences, self.num_documents + 1))
            self._copy("lengths", file)
            for offsets in self._offsets():
                file.write(offsets)
            self._copy("borders", file)
            if self._num_modes:
                self._copy("modes", file)
            flush(file)
        if self.description is not None:
            write_json(self._partial("json"), self.description)

    def publish(self) -> None:
        """Give the sealed files their names. May be done again if it was interrupted.

        Raises:
            MegatrainError: something else has removed or changed the files.
        """
        if self._partial("idx").is_file():
            self._named("idx").unlink(missing_ok=True)
            for kind in ("bin", "json", "idx"):
                if self._partial(kind).is_file():
                    self._partial(kind).replace(self._named(kind))
            flush_folder(Path(self.prefix).parent)
        for kind, num_bytes in self._sealed_bytes().items():
            path = self._named(kind)
            if _size(path) != num_bytes:
                there = f"has {_size(path)} bytes" if path.is_file() else "is not there"
                raise MegatrainError(
                    f"{path}: {there}, and {num_bytes} bytes were written",
                    fix="see that nothing else removes or writes files here, run again",
                )
        self.discard()

    def discard(self) -> None:
        """Remove all partial files, if they are not another writer's, and let go of the lock."""
        self._close_files()
        if self._lock.is_held:
            self._remove_partials()
        self._lock.release()

    def close(self) -> None:
        """Close the partial files, leave them where they are, and let go of the lock."""
        self._close_files()
        self._lock.release()

    def _remove_partials(self) -> None:
        for kind in _KINDS:
            self._partial(kind).unlink(missing_ok=True)

    def _close_files(self) -> None:
        for file in self._files.values():
            with contextlib.suppress(OSError):  # on a full disk, the error that matters was raised before
                file.close()
        self._files.clear()

    def _named(self, kind: str) -> Path:
        return Path(f"{self.prefix}.{kind}")

    def _partial(self, kind: str) -> Path:
        return Path(f"{self.prefix}.{kind}.partial")

    def _is_owner(self) -> bool:
        path = self._partial("owner")
        return path.is_file() and path.read_bytes() == self._owner.encode()

    def _sealed_bytes(self) -> dict[str, int]:
        """What the files of a whole dataset hold, beside its description."""
        index_bytes = (
            HEADER.size + self.num_sequences * (4 + 8) + (self.num_documents + 1) * 8 + self._num_modes
        )
        return {"bin": self.num_tokens * self.dtype.itemsize, "idx": index_bytes}

    def _partial_bytes(self) -> dict[str, int]:
        """What the partial files that documents go to hold so far."""
        counts = {
            "bin": self.num_tokens * self.dtype.itemsize,
            "lengths": self.num_sequences * 4,
            "borders": 0 if self._is_new else (self.num_documents + 1) * 8,
            "owner": 0 if self._is_new else len(self._owner),
        }
        return counts | ({"modes": self._num_modes} if self._num_modes else {})

    def _write(self, kind: str, array: Elements) -> None:
        with writing(self._partial(kind)):
            self._files[kind].write(np.ascontiguousarray(array).data)

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

    def _copy(self, kind: str, to: IO[bytes]) -> None:
        with self._partial(kind).open("rb") as file:
            shutil.copyfileobj(file, to, _COPY_BYTES)

    def _offsets(self) -> Iterator[bytes]:
        """The byte offsets of all sequences: the running sum of their lengths."""
        position = 0
        with self._partial("lengths").open("rb") as file:
            while len(lengths := np.frombuffer(file.read(4 * CHECK_ROWS), "<i4")):
                ends = position + np.cumsum(lengths, dtype=np.int64) * self.dtype.itemsize
                yield np.concatenate(([position], ends[:-1])).astype("<i8").tobytes()
                position = int(ends[-1])
        assert position == self.num_tokens * self.dtype.itemsize, "all elements are in a sequence"


def dataset_files(prefix: str) -> list[Path]:
    """All files that a writer of this prefix makes or removes."""
    names = [f"{prefix}.{kind}" for kind in ("bin", "idx", "json")]
    return [*map(Path, names), *(Path(f"{prefix}.{kind}.partial") for kind in _KINDS), _lock_path(prefix)]


def _lock_path(prefix: str) -> Path:
    return Path(f"{prefix}.lock")


def _size(path: Path) -> int:
    """Bytes of a file; -1 if there is none."""
    return path.stat().st_size if path.is_file() else -1


_KINDS: Final = ("bin", "lengths", "borders", "modes", "idx", "json", "owner")
_COPY_BYTES: Final = 1 << 20
