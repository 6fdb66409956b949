"""One run per folder of checkpoints: rank 0 creates `run.lock` in `--save`, before anything else is written, and in the folder of
non-persistent checkpoints.

    no lock                              create it (O_EXCL), touch it every ten seconds, remove it at the end
    its process is gone                  take it over, and print that
    its process runs                     refuse to start; removed by hand ─> the run creates it again
    its process is on another machine    watch the lock: touched again ─> refuse; not touched for two minutes ─> take it over

A touch is compared with the one before it, so that the clocks of two machines need not agree. Creation and renames are atomic
on NFS, too. A run whose lock was taken over, as after a long suspension, exits at once: two runs never write to one folder.
"""

from __future__ import annotations

import contextlib
import json
import os
import secrets
import shlex
import socket
import sys
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from datetime import datetime
from pathlib import Path

from megatrain.config.errors import ConfigError, describe
from megatrain.storage.files import create_file, describe_write_error, fsync_folder, open_regular
from megatrain.storage.untrusted_json import record_of

LOCK_NAME = "run.lock"
SECONDS_BETWEEN_TOUCHES = 10.0
SECONDS_TO_STALE = 120.0
"""A lock of another machine without a touch for so long belongs to a dead process."""
_SECONDS_BETWEEN_LOOKS = 0.5
_MAX_BYTES = 1 << 16
_MAX_COMMAND_CHARACTERS = 1000


@dataclass(frozen=True, kw_only=True)
class Owner:
    """The process that holds a lock: the content of the file."""

    host: str
    pid: int
    process_start: str
    """Start of the process in clock ticks since the machine started: a later process with the same id has another."""
    machine: str
    """Id of the machine's start and of the namespace of process ids; empty: unknown."""
    run_start: str
    """Local time, ISO 8601."""
    command: str

    @classmethod
    def of_this_process(cls) -> Owner:
        stat = _stat_of(os.getpid())
        command = shlex.join(sys.argv).encode("utf-8", "replace").decode()
        return cls(
            host=socket.gethostname(),
            pid=os.getpid(),
            process_start=stat[1] if stat else "",
            machine=_machine(),
            run_start=datetime.now().astimezone().isoformat(timespec="seconds"),
            command=command[:_MAX_COMMAND_CHARACTERS],
        )

    @classmethod
    def from_bytes(cls, content: bytes) -> Owner | None:
        """Return the owner, or None if the content is not one: a file that is being written, or damaged."""
        try:
            values = json.loads(content)
            _OWNER(values, LOCK_NAME)
            owner = cls(**values)
        except (ValueError, TypeError, RecursionError):
            return None
        return owner if 0 < owner.pid < 1 << 31 else None

    def to_bytes(self) -> bytes:
        return json.dumps(asdict(self)).encode() + b"\n"

    def is_alive(self) -> bool | None:
        """Return whether the process runs; None: it is on another machine or in another container."""
        if not self.machine or self.machine != _machine():
            return None
        try:
            os.kill(self.pid, 0)
        except ProcessLookupError:
            return False
        except PermissionError:
            pass  # a process of another user
        stat = _stat_of(self.pid)
        return stat is None or (stat[0] not in "ZX" and stat[1] == self.process_start)

    def __str__(self) -> str:
        return f"process {self.pid} on {self.host}, which started at {self.run_start} ({self.command})"


_OWNER = record_of(Owner)


class SaveLock:
    """The lock of this run on a folder.

    Args:
        say: prints a line.
        flag: the flag that names the folder.
        on_loss: called, outside the main thread, when another run has taken the lock over; the default ends the process.
    """

    def __init__(
        self,
        folder: Path,
        say: Callable[[str], None],
        *,
        flag: str = "--save",
        on_loss: Callable[[str], None] | None = None,
        touch_seconds: float = SECONDS_BETWEEN_TOUCHES,
        stale_seconds: float = SECONDS_TO_STALE,
    ) -> None:
        self._folder, self._path, self._say, self._flag = folder, folder / LOCK_NAME, say, flag
        self._on_loss = on_loss or _exit_at_once
        self._touch_seconds, self._stale_seconds = touch_seconds, stale_seconds
        self._content = b""
        self._released = threading.Event()
        self._touching = threading.Lock()

    def acquire(self) -> None:
        """Create the folder and the lock.

        Raises:
            ConfigError: another run uses the folder, or it cannot be written.
        """
        content = Owner.of_this_process().to_bytes()
        try:
            new = [path for path in (self._folder, *self._folder.parents) if not path.exists()]
            self._folder.mkdir(parents=True, exist_ok=True)
            while not _create(self._path, content):
                self._take_over()
            for path in (self._folder, *(path.parent for path in new)):
                fsync_folder(path)  # checkpoints in the folder are durable only if its name is
        except OSError as error:
            raise ConfigError(
                f"{self._flag} {self._folder} cannot be written: {describe_write_error(error, self._path)}",
                fix=f"make the folder writable and free some space, or give {self._flag} another folder",
            ) from error
        self._content = content
        threading.Thread(target=self._touch, name="save-lock", daemon=True).start()

    def release(self) -> None:
        """Remove the lock if this run holds it. An error is ignored: the next run finds that this process is gone."""
        self._released.set()
        if self._content:
            with self._touching, contextlib.suppress(OSError):
                if _read(self._path) == self._content:
                    self._path.unlink()
            self._content = b""

    def _take_over(self) -> None:
        """Remove the lock of a dead process; return for another attempt to create one.

        Raises:
            ConfigError: the process runs.
        """
        seen = _look(self._path)
        if seen is None:
            return
        owner = Owner.from_bytes(seen[0])
        is_alive = owner.is_alive() if owner else None
        if is_alive is None:
            is_alive = self._is_touched(seen, owner)
        if is_alive:
            raise ConfigError(
                f"{self._flag} {self._folder} is used by another run: {owner or self._path}",
                fix=f"wait for that run or stop it, or give {self._flag} another folder",
            )
        if _read(self._path) != seen[0]:
            return  # another start was faster
        aside = self._path.with_name(f"{LOCK_NAME}.stale-{secrets.token_hex(4)}")
        try:
            self._path.rename(aside)
        except FileNotFoundError:
            return
        if _read(aside) != seen[0]:  # another start was faster by microseconds: give its lock back
            aside.rename(self._path)
            return
        aside.unlink()
        self._say(f"> {self._path} is taken over: its run has ended: {owner or 'the file is damaged'}")

    def _is_touched(self, seen: tuple[bytes, int], owner: Owner | None) -> bool:
        """Watch a lock; return whether it is touched before it is replaced, removed or stale."""
        self._say(
            f"> {self._path} is held by {owner or 'an unknown process'}: watching for up to {self._stale_seconds:g} s"
            " whether that run is alive"
        )
        deadline = time.monotonic() + self._stale_seconds
        while time.monotonic() < deadline:
            time.sleep(min(_SECONDS_BETWEEN_LOOKS, self._stale_seconds / 4))
            now = _look(self._path)
            if now is None or now[0] != seen[0]:
                return False
            if now[1] != seen[1]:
                return True
        return False

    def _touch(self) -> None:
        """Touch the lock until it is released: main function of the thread."""
        while not self._released.wait(self._touch_seconds):
            try:
                with self._touching:
                    found = self._touch_once()
            except OSError:
                continue  # the folder is gone, or its storage is: a write of the run reports it
            if found not in (b"", self._content) and not self._released.is_set():
                self._on_loss(
                    f"{self._path} was taken over by another run, {Owner.from_bytes(found) or 'unknown'}"
                )
                return

    def _touch_once(self) -> bytes:
        """Touch the lock, or create it again if it was removed; return the content that it had."""
        found = _read(self._path)
        if found == self._content:
            os.utime(self._path)
        elif not found and not self._released.is_set() and _create(self._path, self._content):
            self._say(f"> WARNING: {self._path} was removed during the run; it is there again")
        return found


class SaveLocks:
    """The locks of this run on all folders that it saves checkpoints to.

    Args:
        folders: by the flag that names each; empty on ranks other than 0.
        say: prints a line.
    """

    def __init__(self, folders: Mapping[str, Path], say: Callable[[str], None]) -> None:
        self._locks = [SaveLock(folder, say, flag=flag) for flag, folder in folders.items()]

    def acquire(self) -> None:
        """Acquire all locks. After an error some may be held: call `release`.

        Raises:
            ConfigError: see `SaveLock.acquire`.
        """
        for lock in self._locks:
            lock.acquire()

    def release(self) -> None:
        """Release the locks that this run holds."""
        for lock in self._locks:
            lock.release()


def other_owner(folder: Path) -> Owner | None:
    """Return the process that holds the lock of a `--save` folder, unless it is this one or is known to be dead."""
    owner = _owner_in(folder)
    if owner is None or owner.is_alive() is False:
        return None
    this = Owner.of_this_process()
    is_this = (owner.pid, owner.process_start, owner.machine) == (this.pid, this.process_start, this.machine)
    return None if is_this else owner


def dead_owner(folder: Path) -> Owner | None:
    """Return the process that left its lock in a `--save` folder when it was killed, if that is known on this machine."""
    owner = _owner_in(folder)
    return owner if owner is not None and owner.is_alive() is False else None


def _owner_in(folder: Path) -> Owner | None:
    try:
        return Owner.from_bytes(_read(folder / LOCK_NAME))
    except OSError:
        return None


def _exit_at_once(problem: str) -> None:
    error = ConfigError(problem, fix="start one run per --save folder")
    print(describe(error), file=sys.stderr, flush=True)
    os._exit(1)  # anything that this process still writes would mix with the files of the other run


def _create(path: Path, content: bytes) -> bool:
    """Create the lock; return False if it exists."""
    try:
        create_file(path, [content])
    except FileExistsError:
        return False
    return True


def _look(path: Path) -> tuple[bytes, int] | None:
    """Return content and modification time in nanoseconds, or None if there is no lock. Opening asks an NFS server anew."""
    try:
        handle = open_regular(path, os.O_RDONLY | os.O_NOFOLLOW)
    except FileNotFoundError:
        return None
    try:
        return os.read(handle, _MAX_BYTES), os.fstat(handle).st_mtime_ns
    finally:
        os.close(handle)


def _read(path: Path) -> bytes:
    """Return the content of a lock; empty if there is none."""
    seen = _look(path)
    return b"" if seen is None else seen[0]


def _stat_of(pid: int) -> tuple[str, str] | None:
    """Return state and start time of a process; None if they are not visible."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_bytes().rpartition(b")")[2].split()
        return fields[0].decode(), fields[19].decode()
    except (OSError, IndexError, ValueError):
        return None


def _machine() -> str:
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
        return f"{boot} {Path('/proc/self/ns/pid').readlink()}"
    except (OSError, ValueError):
        return ""
