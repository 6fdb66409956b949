"""Class S, limits that the system enforces: full and read-only file systems, permissions, sizes and numbers of files, failing reads."""

from __future__ import annotations

import contextlib
import ctypes
import errno
import itertools
import os
import random
import re
import resource
import shutil
import signal
import time
from collections.abc import Callable, Iterator
from io import FileIO
from pathlib import Path
from unittest import mock

from checkpoint_helpers import a_save, load, save

from faults.case import (
    Seeds,
    SkippedError,
    WrongError,
    judge,
    other_user,
    raises_checkpoint_error,
    require,
    require_intact,
    unexpected_names,
)
from faults.corruptions import run_command
from faults.failed_saves import Kind, after_failure, background, words
from megatrain.checkpoint.background import BackgroundWriter
from megatrain.checkpoint.errors import CheckpointError
from megatrain.config.errors import MegatrainError
from megatrain.storage.disk import Disk

_VOLUME_BYTES = 120_000
_MS_RDONLY, _MS_REMOUNT = 1, 32


def full_volumes(seeds: Seeds, chance: random.Random, folder: Path) -> Kind:
    """Real file systems of every size from too small to large enough, by space or by number of files."""
    for percent, is_filled_later in itertools.product(range(2, 101, 2), (False, True)):

        def work(where: Path, percent: int = percent, is_filled_later: bool = is_filled_later) -> str:
            needed = _bytes_in(where)
            size = needed + percent * _VOLUME_BYTES // 100
            with _volume(where.with_name("volume"), f"size={size}") as volume:
                shutil.copytree(where / "iter_0000010", volume / "save" / "iter_0000010")
                space = mock.patch.object(Disk, "free_bytes", return_value=1 << 40)
                with space if is_filled_later else contextlib.nullcontext():
                    outcome = _saved_or_full(volume / "save", seeds)
                    left = unexpected_names(volume / "save")
                    require(not left, f"the failed save leaves {left}")
                _remount(volume, f"size={needed + 4 * _VOLUME_BYTES}")
                after_failure(volume / "save", seeds, is_cleaned=True)
            return outcome

        yield f"a volume with {percent} % of the space{', filled after the check' * is_filled_later}", work


def full_of_files(seeds: Seeds, chance: random.Random, folder: Path) -> Kind:
    for num_files in range(1, 7):

        def work(where: Path, num_files: int = num_files) -> str:
            with _volume(where.with_name("volume"), f"nr_inodes={5 + num_files}") as volume:
                shutil.copytree(where / "iter_0000010", volume / "save" / "iter_0000010")
                outcome = _saved_or_full(volume / "save", seeds)
                _remount(volume, "nr_inodes=1000")
                after_failure(volume / "save", seeds, is_cleaned=True)
            return outcome

        yield f"a volume with inodes for {num_files} files more", work


def _saved_or_full(folder: Path, seeds: Seeds) -> str:
    try:
        save(folder, seeds.ranks[2], 20)
    except CheckpointError as error:
        is_preflight = re.search(r"needs [\d,]+ bytes, [\d,]+ bytes are free", str(error))
        is_full = "(errno 28)" in str(error) and re.search(
            r"[\d,]+ bytes needed, [\d,]+ bytes free", str(error)
        )
        require(str(folder) in str(error) and (is_preflight or is_full), f"the message is {error}")
        require_intact(folder, [10])
        return "too little space is found before writing" if is_preflight else "the full disk is reported"
    require(seeds.load(folder)[1] == 2, "the save does not load")
    return "saved"


def forbidden_folders(seeds: Seeds, chance: random.Random, folder: Path) -> Kind:
    """Real permissions and read-only file systems, for saving and for loading."""

    def forbidden(where: Path) -> str:
        where.chmod(0o555)
        with other_user(), raises_checkpoint_error(str(where), *words("EACCES")):
            save(where, seeds.ranks[2], 20)
        where.chmod(0o755)
        after_failure(where, seeds, is_cleaned=True)
        return "reported, older checkpoints intact"

    def refused(where: Path, mode: int) -> str:
        where.chmod(mode)
        with other_user(), raises_checkpoint_error(str(where), "ermission denied"):
            load(where, seeds.reader)
        _require_exit_codes(where)
        where.chmod(0o755)
        after_failure(where, seeds, is_cleaned=True)
        return "loading is refused with path and reason"

    def unlisted(where: Path) -> str:
        """The names in the folder can be read, its files cannot."""
        return refused(where, 0o744)

    def unreadable(where: Path) -> str:
        return refused(where, 0o700)

    def read_only(where: Path) -> str:
        with _volume(where.with_name("volume"), "size=4m") as volume:
            shutil.copytree(where, volume / "save")
            _remount(volume, "", _MS_RDONLY)
            with raises_checkpoint_error(str(volume), *words("EROFS")):
                save(volume / "save", seeds.ranks[2], 20)
            require(seeds.load(volume / "save")[0].iteration == 10, "a read-only checkpoint does not load")
            _remount(volume, "")
            after_failure(volume / "save", seeds, is_cleaned=True)
        return "reported, older checkpoints intact"

    for work in (forbidden, unlisted, unreadable, read_only):
        yield work.__name__.replace("_", " "), work


def _require_exit_codes(folder: Path) -> None:
    """Check that the tools end with an error of the user's, without a traceback, where they may not read."""
    for command in ("ls", "verify", "inspect"):
        run_command(command, str(folder))  # imports what the other user may not read
        with other_user():
            code = run_command(command, str(folder))
            require(code in (0, 1, 2, 3), f"megatrain checkpoint {command} ends with exit code {code}")


def limits(seeds: Seeds, chance: random.Random, folder: Path) -> Kind:
    """Limits of this process: size of files, number of open files."""
    for percent in range(0, 100, 10):

        def small_files(where: Path, percent: int = percent) -> str:
            largest = max(path.stat().st_size for path in (where / "iter_0000010").iterdir())

            def limited() -> str:
                limit = largest * percent // 100
                resource.setrlimit(resource.RLIMIT_FSIZE, (limit, limit))
                with raises_checkpoint_error(str(where), *words("EFBIG")):
                    save(where, seeds.ranks[2], 20)
                return "reported, older checkpoints intact"

            outcome = _in_child(limited)
            after_failure(where, seeds, is_cleaned=True)
            return outcome

        yield f"files of at most {percent} % of the size", small_files
    for num_files, is_async in itertools.product(range(7), (False, True)):

        def few_files(where: Path, num_files: int = num_files, is_async: bool = is_async) -> str:
            def limited() -> str:
                writer = background(seeds.ranks[2], None, where) if is_async else contextlib.nullcontext()
                with writer as made:
                    if made is not None:  # its process must be started again
                        os.kill(made._writer.pid, signal.SIGKILL)
                        while made._writer.is_alive:
                            time.sleep(0.01)
                    resource.setrlimit(resource.RLIMIT_NOFILE, (_used_handles() + num_files,) * 2)
                    return _saved_and_loaded(where, seeds, made)

            outcome = _in_child(limited)
            after_failure(where, seeds, is_cleaned=num_files > 1)
            return outcome

        yield f"{num_files} more open files{' in the background' * is_async}", few_files


def _used_handles() -> int:
    """Fill the gaps between the open files of this process; return the next number."""
    highest = max(int(name) for name in os.listdir("/proc/self/fd"))  # noqa: PTH208
    while (handle := os.dup(0)) <= highest:
        pass
    os.close(handle)
    return handle


def _saved_and_loaded(where: Path, seeds: Seeds, made: BackgroundWriter | None) -> str:
    """Save and load with few open files; each must succeed or name the reason."""
    outcomes = []
    try:
        if made is None:
            save(where, seeds.ranks[2], 20)
        else:
            made.begin(a_save(where, seeds.ranks[2], 20))
            made.commit()
        outcomes.append("saved")
    except CheckpointError as error:
        require("Too many open files (errno 24)" in str(error), f"the message is {error}")
        outcomes.append("the save reports too many open files")
    try:
        seeds.load(where)
        outcomes.append("loaded")
    except MegatrainError as error:
        require("Too many open files" in str(error), f"the message is {error}")
        outcomes.append("the load reports it")
    return ", ".join(outcomes)


def failing_reads(seeds: Seeds, chance: random.Random, folder: Path) -> Kind:
    """A file of the newest checkpoint cannot be read: the older one loads, with file and reason."""
    for name, at in itertools.product(("manifest.json", "shard_00000.safetensors"), range(1, 6)):

        def work(where: Path, name: str = name, at: int = at) -> str:
            save(where, seeds.ranks[2], 20)
            bad = f"iter_0000020/{name}"
            with _unreadable(bad, at):
                loaded, seed = seeds.load(where)
            require((loaded.iteration, seed) == (10, 1), f"iteration {loaded.iteration} loads")
            (skipped,) = loaded.skipped
            require(bad in skipped and "Input/output error" in skipped, f"the reason is {skipped}")
            require(seeds.load(where)[0].iteration == 20, "the newest checkpoint does not load afterwards")
            return "the older one loads, with the reason"

        yield f"EIO at read {at} of {name}", work


@contextlib.contextmanager
def _unreadable(name: str, at: int) -> Iterator[None]:
    """Let reads of a file fail with EIO, from read number `at` of a shard on."""
    preadv, count = os.preadv, itertools.count(1)

    def is_bad(handle: int) -> bool:
        return os.readlink(f"/proc/self/fd/{handle}").endswith(name)  # noqa: PTH115

    def read_at(handle: int, buffers: list[memoryview], offset: int) -> int:
        if is_bad(handle) and next(count) >= at:
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        return preadv(handle, buffers, offset)

    class BadFile(FileIO):
        def read(self, size: int = -1, /) -> bytes:
            if is_bad(self.fileno()):
                raise OSError(errno.EIO, os.strerror(errno.EIO))
            return super().read(size)

    opener = mock.patch("megatrain.checkpoint.checked_files.FileIO", BadFile)
    with mock.patch.object(os, "preadv", read_at), opener:
        yield


def _in_child(work: Callable[[], str]) -> str:
    """Run `work` in a forked process, whose limits do not matter afterwards; return its outcome or raise its problem."""
    receiving, sending = os.pipe()
    pid = os.fork()
    if pid == 0:
        with contextlib.suppress(BaseException):
            case = judge("S", "in a child", work)
            os.write(sending, f"{case.problem or ''}\0{case.outcome}".encode()[:60_000])
        os._exit(0)
    os.close(sending)
    with os.fdopen(receiving, "rb") as file:
        problem, _, outcome = file.read().decode().partition("\0")
    os.waitpid(pid, 0)
    if problem or not outcome:
        raise WrongError(problem or "the process died")
    return outcome


def _bytes_in(folder: Path) -> int:
    """Return the bytes of a copy of a folder on a file system of pages."""
    return sum(-(-path.stat().st_size // 4096) * 4096 for path in folder.rglob("*") if path.is_file())


@contextlib.contextmanager
def _volume(path: Path, options: str) -> Iterator[Path]:
    """Mount a small file system in memory."""
    path.mkdir()
    _mount(path, 0, options)
    try:
        yield path
    finally:
        ctypes.CDLL(None).umount2(str(path).encode(), 2)  # 2: also if a file is open
        path.rmdir()


def _remount(path: Path, options: str, flags: int = 0) -> None:
    _mount(path, _MS_REMOUNT | flags, options)


def _mount(path: Path, flags: int, options: str) -> None:
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.mount(b"fault-bench", str(path).encode(), b"tmpfs", flags, options.encode()) != 0:
        if ctypes.get_errno() == errno.EPERM:
            raise SkippedError("this user may not mount a file system")
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()), str(path))
