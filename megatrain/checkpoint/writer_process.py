"""A process of its own that writes the chunks in shared memory to files, while its rank trains.

    rank:    chunks -> SharedMemory ─┐                                  ┌─> result: sizes and checksums, or the error
             request: files, chunks ─┴─> writer: checksums, write, fsync ┘

The process is started once. It does not import torch, so it starts in a fraction of a second and needs little memory. It ignores
the signals of the terminal and of schedulers, because its rank decides when a run ends, and it dies with its rank.
"""

from __future__ import annotations

import ctypes
import json
import mmap
import os
import platform
import signal
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any, Final

from megatrain.checkpoint.errors import CheckpointError
from megatrain.checkpoint.shard_file import ChunkEntry, WrittenFile, write_shard_file
from megatrain.config.errors import MegatrainError
from megatrain.process.line_program import LineProgram, ProgramEndedError
from megatrain.storage.disk import Disk

PROGRAM: Final = "from megatrain.checkpoint.writer_process import serve; serve()"
_START = "import sys; sys.path.insert(0, sys.argv[1]); "
_PR_SET_PDEATHSIG = 1
_IOPRIO_SET = {"x86_64": 251, "aarch64": 30}
"""Number of the system call by machine."""
_IGNORED_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2)


class SharedMemory:
    """Memory that a rank and its writer map; it has no name, so that nothing remains when both are gone.

    Its pages are allocated at once. It does not depend on the size of /dev/shm.

    Raises:
        OSError: there is not enough memory.
    """

    def __init__(self, num_bytes: int) -> None:
        self.num_bytes = max(num_bytes, mmap.PAGESIZE)
        self.handle = os.memfd_create("megatrain-checkpoint", os.MFD_CLOEXEC)
        try:
            os.posix_fallocate(self.handle, 0, self.num_bytes)
            self.map = mmap.mmap(self.handle, self.num_bytes, flags=mmap.MAP_SHARED | mmap.MAP_POPULATE)
        except BaseException:
            os.close(self.handle)
            raise

    def close(self) -> None:
        """Free the memory; no view of it may exist."""
        self.map.close()
        os.close(self.handle)


class WriterProcess:
    """The writer process of this rank.

    Args:
        memory: where the chunks are.
        cpu_priority: nice value, 0 to 19; a higher one of the rank is kept.
        io_priority: I/O scheduling class, 0 to 3; 3: only while the disk is idle.
        program: Python code that the process runs; tests write to other disks.
    """

    def __init__(
        self, memory: SharedMemory, *, cpu_priority: int, io_priority: int, program: str = PROGRAM
    ) -> None:
        options = {
            "memory": memory.handle,
            "bytes": memory.num_bytes,
            "parent": os.getpid(),
            "cpu_priority": cpu_priority,
            "io_priority": io_priority,
        }
        root = Path(__file__).parents[2]
        self._program = LineProgram(
            [sys.executable, "-c", _START + program, str(root), json.dumps(options)],
            pass_fds=[memory.handle],
            start_new_session=True,  # it gets no signals from the terminal
        )
        self.is_busy = False
        """A request has no result yet."""

    @property
    def pid(self) -> int:
        return self._program.process.pid

    @property
    def is_alive(self) -> bool:
        return self._program.process.poll() is None

    def begin(self, files: Sequence[Mapping[str, Any]], *, verifies: bool) -> None:
        """Begin to write files; `result` reports errors.

        Args:
            files: dictionaries with `path`, `chunks` (dictionaries of `ChunkEntry`) and their `offsets` in the memory.
        """
        assert not self.is_busy
        self.is_busy = True
        self._program.send(json.dumps({"files": files, "verifies": verifies}))

    def has_result(self) -> bool:
        """Return whether `result` returns without waiting. Also true for a process that died."""
        return self._program.has_answer()

    def result(self) -> list[WrittenFile]:
        """Wait for the files of the last request.

        Raises:
            CheckpointError, OSError: they could not be written.
        """
        self.is_busy = False
        try:
            answer = self._program.receive()
        except ProgramEndedError as error:
            raise CheckpointError(
                f"the process that writes the checkpoint ended ({error})",
                fix="look for its error above and for lack of memory on the host; the next save starts a new process",
            ) from None
        if "errno" in answer:
            raise OSError(answer["errno"], answer["problem"], answer["file"])
        if "problem" in answer:
            raise CheckpointError(answer["problem"], fix=answer["fix"])
        return [WrittenFile(**file) for file in answer["files"]]

    def close(self) -> None:
        """End the process; a request without a result is abandoned."""
        if self.is_busy:
            self._program.process.kill()
        self._program.end()


def serve(disk: Disk | None = None) -> None:
    """Run the writer process: answer requests until the rank closes the pipe or dies."""
    options = json.loads(sys.argv[2])
    for number in _IGNORED_SIGNALS:
        signal.signal(number, signal.SIG_IGN)
    libc = ctypes.CDLL(None, use_errno=True)
    libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != options["parent"]:  # it died before this
        return
    os.nice(max(0, options["cpu_priority"] - os.nice(0)))
    call = _IOPRIO_SET.get(platform.machine())
    if call is None or libc.syscall(call, 1, 0, options["io_priority"] << 13) != 0:
        print(
            f"the checkpoint writer keeps its I/O priority: {os.strerror(ctypes.get_errno())}",
            file=sys.stderr,
        )
    with mmap.mmap(options["memory"], options["bytes"]) as memory, memoryview(memory) as view:
        for line in sys.stdin.buffer:
            answer = _answer(json.loads(line), view, disk or Disk())
            sys.stdout.write(json.dumps(answer) + "\n")
            sys.stdout.flush()


def _answer(request: dict[str, Any], memory: memoryview, disk: Disk) -> dict[str, Any]:
    """Write the files of a request; return what was written, or the error."""
    files: list[dict[str, Any]] = []
    try:
        for file in request["files"]:
            chunks = [ChunkEntry(**chunk) for chunk in file["chunks"]]
            data = (
                memory[offset : offset + chunk.num_bytes]
                for chunk, offset in zip(chunks, file["offsets"], strict=True)
            )
            written = write_shard_file(disk, Path(file["path"]), chunks, data, verifies=request["verifies"])
            files.append(asdict(written))
    except OSError as error:
        file = None if error.filename is None else os.fspath(error.filename)  # a Path is no JSON value
        return {"errno": error.errno, "problem": error.strerror, "file": file}
    except MegatrainError as error:
        return {"problem": error.problems[0].text, "fix": error.problems[0].fix}
    return {"files": files}
