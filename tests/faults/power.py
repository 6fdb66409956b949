"""The states of a disk that a power failure may leave, from a record of file operations.

    operations of a save ─> a prefix of them ─> names:   those that a folder sync made durable, and some later ones
                                             └> content: data that was synced, and other data lost, torn or zeroed

An operation on names (create, rename, remove) is durable once its folder is synced. Others may be lost in any combination, as long
as no operation survives without one that it needs: a rename needs the creation of its source. Content is durable once its file is
synced. Source of the model: Pillai et al., All File Systems Are Not Created Equal, OSDI 2014, section 3.
"""

from __future__ import annotations

import json
import random
import threading
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from io import FileIO
from pathlib import Path

from megatrain.storage.disk import Disk

CONTENT_MODES = ("kept", "lost", "zeros", "torn", "holes")
_ROOT = -1
_SECTOR, _PAGE = 512, 4096


@dataclass(frozen=True)
class Operation:
    """A file operation; paths are relative to the recorded folder. A `note` is none: it marks a place in the record."""

    name: str
    paths: tuple[Path, ...] = ()
    data: bytes = b""
    note: tuple[str, int, int] | None = None


class Recorder(Disk):
    """Does all operations but syncs, and records those below `root`."""

    def __init__(self, root: Path) -> None:
        self.root = root
        root.mkdir(parents=True, exist_ok=True)
        self.operations: list[Operation] = []
        self._lock = threading.Lock()

    def note(self, what: str, iteration: int, seed: int = 0) -> None:
        self.operations.append(Operation("note", note=(what, iteration, seed)))

    def make_folder(self, path: Path) -> None:
        missing = [folder for folder in (path, *path.parents) if not folder.exists()]
        super().make_folder(path)
        for folder in reversed(missing):
            self._record("make_folder", folder)

    def create(self, path: Path) -> FileIO:
        file = super().create(path)
        self._record("create", path)
        return file

    def write(self, file: FileIO, data: bytes | memoryview) -> None:
        super().write(file, data)
        self._record("write", Path(str(file.name)), data=bytes(data))

    def sync(self, file: FileIO) -> None:
        self._record("sync", Path(str(file.name)))

    def sync_folder(self, path: Path) -> None:
        self._record("sync_folder", path)

    def rename(self, source: Path, target: Path) -> None:
        super().rename(source, target)
        self._record("rename", source, target)

    def remove(self, path: Path) -> None:
        is_folder = path.is_dir() and not path.is_symlink()
        for inner in sorted(path.iterdir()) if is_folder else ():
            self.remove(inner)
        is_there = path.exists()
        super().remove(path)
        if is_there:
            self._record("remove_folder" if is_folder else "unlink", path)

    def _record(self, name: str, *paths: Path, data: bytes = b"") -> None:
        if all(path.is_relative_to(self.root) for path in paths):
            inner = tuple(path.relative_to(self.root) for path in paths)
            with self._lock:
                self.add(Operation(name, inner, data))

    def add(self, operation: Operation) -> None:
        self.operations.append(operation)


class FileRecorder(Recorder):
    """Appends its operations to a file: for the writer process of a background save."""

    def __init__(self, root: Path, log: Path) -> None:
        super().__init__(root)
        self.log = log

    def add(self, operation: Operation) -> None:
        row = [operation.name, [str(path) for path in operation.paths], operation.data.hex()]
        with self.log.open("a") as file:
            file.write(json.dumps(row) + "\n")


def read_log(log: Path) -> list[Operation]:
    """Return the operations of a `FileRecorder`, and empty its file."""
    rows = [json.loads(line) for line in log.read_text().splitlines()]
    log.unlink()
    return [Operation(name, tuple(map(Path, paths)), bytes.fromhex(data)) for name, paths, data in rows]


Slot = tuple[int, str]
"""A name in a folder; folders and files are numbered by the operation that created them."""


@dataclass(frozen=True)
class _Change:
    """An operation on names: `number` leaves its last slot or appears in it."""

    slots: tuple[Slot, ...]
    number: int
    is_removal: bool = False

    def needs(self, earlier: _Change) -> bool:
        """Return whether this change cannot survive without an earlier one: of the same name, or of the folder's content."""
        is_emptied = self.is_removal and any(folder == self.number for folder, _ in earlier.slots)
        return is_emptied or not set(self.slots).isdisjoint(earlier.slots)


class Record:
    """A record of operations, from which states are built."""

    def __init__(self, operations: Sequence[Operation]) -> None:
        self.operations = list(operations)
        self._changes: dict[int, _Change] = {}
        """Operations on names, by number."""
        self._target: dict[int, int] = {}
        """File or folder of each write and sync, by number."""
        self._folders = {_ROOT}
        names: dict[Slot, int] = {}
        for number, operation in enumerate(self.operations):
            if operation.name in ("write", "sync", "sync_folder"):
                self._target[number] = _find(names, operation.paths[0])
            elif operation.note is None:
                self._changes[number] = change = self._change(names, operation, number)
                _apply(names, change)

    def rebuild(self, stop: int, target: Path, content: str, chance: random.Random | None) -> None:
        """Write the files that a failure after the first `stop` operations leaves.

        Args:
            content: what becomes of data that was not synced: one of CONTENT_MODES.
            chance: chooses the operations on names that survive; None: all do.
        """
        names: dict[Slot, int] = {}
        for number in self._surviving(stop, chance):
            _apply(names, self._changes[number])
        paths = {_ROOT: target}
        target.mkdir(parents=True, exist_ok=True)
        for (folder, name), number in sorted(names.items(), key=lambda item: item[1]):
            if number in self._folders and folder in paths:
                paths[number] = paths[folder] / name
                paths[number].mkdir()
        for (folder, name), number in names.items():
            if number not in self._folders and folder in paths:
                data = self._content(number, stop, content, chance or random.Random(stop))
                (paths[folder] / name).write_bytes(data)

    def _change(self, names: dict[Slot, int], operation: Operation, number: int) -> _Change:
        slots = tuple((_find(names, path.parent), path.name) for path in operation.paths)
        if operation.name in ("make_folder", "create"):
            if operation.name == "make_folder":
                self._folders.add(number)
            return _Change(slots, number)
        return _Change(slots, names[slots[0]], is_removal=len(slots) == 1)

    def _surviving(self, stop: int, chance: random.Random | None) -> Iterator[int]:
        """Yield the numbers of the operations on names that survive, in order."""
        numbers = [number for number in self._changes if number < stop]
        durable = set(numbers) if chance is None else self._durable(stop, numbers)
        dropped: list[_Change] = []
        for number in numbers:
            change = self._changes[number]
            is_lost = number not in durable and (
                (chance is not None and chance.random() < 0.5)
                or any(change.needs(other) for other in dropped)
            )
            if is_lost:
                dropped.append(change)
            else:
                yield number

    def _durable(self, stop: int, numbers: Sequence[int]) -> set[int]:
        """Return the operations that a folder sync made durable, and all that they need."""
        last_sync: dict[int, int] = {}
        for number, operation in enumerate(self.operations[:stop]):
            if operation.name == "sync_folder":
                last_sync[self._target[number]] = number
        durable: set[int] = set()
        for number in reversed(numbers):
            change = self._changes[number]
            is_synced = any(last_sync.get(folder, -1) > number for folder, _ in change.slots)
            if is_synced or any(self._changes[other].needs(change) for other in durable):
                durable.add(number)
        return durable

    def _content(self, file: int, stop: int, mode: str, chance: random.Random) -> bytes:
        """Return the content of a file."""
        safe, rest = bytearray(), bytearray()
        for number in range(file + 1, stop):
            if self._target.get(number) != file:
                continue
            if self.operations[number].name == "write":
                rest += self.operations[number].data
            else:
                safe, rest = safe + rest, bytearray()
        if mode == "lost":
            rest = bytearray()
        elif mode == "zeros":
            rest = bytearray(len(rest))
        elif mode == "torn":
            rest = rest[: chance.randrange(len(rest) // _SECTOR + 1) * _SECTOR]
        elif mode == "holes":
            for start in range(0, len(rest), _PAGE):
                if chance.random() < 0.5:
                    rest[start : start + _PAGE] = bytes(len(rest[start : start + _PAGE]))
        return bytes(safe + rest)


def _find(names: dict[Slot, int], path: Path) -> int:
    found = _ROOT
    for part in path.parts:
        found = names[found, part]
    return found


def _apply(names: dict[Slot, int], change: _Change) -> None:
    """Apply a change to the names of a disk: the file or folder in each slot."""
    if change.is_removal or len(change.slots) > 1:
        names.pop(change.slots[0], None)
    if not change.is_removal:
        names[change.slots[-1]] = change.number
