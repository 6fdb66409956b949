"""Stalls of the main thread while a loader reads mapped files whose pages take 5 ms: `python scripts/scale/page_faults.py`.

Pages of the arrays of an index are filled by another process, through userfaultfd, when they are first touched (Linux; root, or sysctl
vm.unprivileged_userfaultfd=1). Reads of the .bin sleep as long without Python's lock, as a system call does; `--mapped-bin` maps it as
well. A thread reads samples; the main thread wakes up each millisecond, and counts the time by which it is late.
"""

from __future__ import annotations

import argparse
import ctypes
import json
import mmap
import os
import struct
import threading
import time
from collections.abc import Callable
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import numpy.typing as npt
from data import make

from megatrain.data.indexed.reader import IndexedDataset
from megatrain.data.samples.gpt_dataset import GPTDataset, SampleOptions
from megatrain.data.samples.gpt_index import GPTIndex, build_index

PAGE = mmap.PAGESIZE
USERFAULTFD, UFFD_API, EVENT = 323, 0xAA, struct.Struct("<BBHIQQQ")
IOCTL_API, IOCTL_REGISTER, IOCTL_COPY = 0xC018AA3F, 0xC020AA00, 0xC028AA03


class SlowPages:
    """Copies of arrays whose pages come from another process, each after `seconds`."""

    def __init__(self, seconds: float) -> None:
        self.seconds = seconds
        self.libc = ctypes.CDLL(None, use_errno=True)
        self.descriptor = self.libc.syscall(USERFAULTFD, os.O_CLOEXEC)
        if self.descriptor < 0:
            raise OSError(ctypes.get_errno(), "userfaultfd")
        self.control(IOCTL_API, struct.pack("<QQQ", UFFD_API, 0, 0))
        self.contents: list[tuple[int, bytes]] = []

    def control(self, request: int, content: bytes) -> None:
        """Call ioctl."""
        buffer = ctypes.create_string_buffer(content, len(content))
        if self.libc.ioctl(self.descriptor, ctypes.c_ulong(request), buffer):
            raise OSError(ctypes.get_errno(), "userfaultfd")

    def copy(self, array: npt.NDArray[Any]) -> npt.NDArray[Any]:
        """Return a copy in memory that has no pages yet."""
        content = array.tobytes()
        size = -(-len(content) // PAGE) * PAGE
        slow = np.frombuffer(mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS), np.uint8)
        self.control(IOCTL_REGISTER, struct.pack("<QQQQ", slow.ctypes.data, size, 1, 0))
        self.contents.append((slow.ctypes.data, content.ljust(size, b"\0")))
        return slow[: len(content)].view(array.dtype).reshape(array.shape)

    def serve(self) -> int:
        """Fill pages in a child process, whose number is returned; it ends when it is killed."""
        child = os.fork()
        while not child:
            *_, address, _ = EVENT.unpack(os.read(self.descriptor, EVENT.size))
            page = address - address % PAGE
            start, content = next(one for one in self.contents if 0 <= page - one[0] < len(one[1]))
            source = ctypes.create_string_buffer(content[page - start : page - start + PAGE], PAGE)
            time.sleep(self.seconds)
            self.control(IOCTL_COPY, struct.pack("<QQQQq", page, ctypes.addressof(source), PAGE, 0, 0))
        return child


def late_seconds(work: Callable[[], object]) -> tuple[float, float]:
    """Do `work` in a thread; return its seconds, and those by which the main thread woke up late, summed."""
    start, late = time.perf_counter(), 0.0
    thread = threading.Thread(target=work)
    thread.start()
    while thread.is_alive():
        before = time.perf_counter()
        time.sleep(0.001)
        late += max(0.0, time.perf_counter() - before - 0.002)
    return time.perf_counter() - start, late


def main() -> None:
    """Print a line of JSON."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--documents", type=int, default=200_000, help="their mean length is 625 tokens")
    parser.add_argument("--samples", type=int, default=20)
    parser.add_argument("--seconds", type=float, default=0.005, help="of a page")
    parser.add_argument("--mapped-bin", action="store_true", help="the .bin is mapped, too")
    arguments = parser.parse_args()
    with TemporaryDirectory() as name:
        prefix = Path(name) / "set"
        make(prefix, arguments.documents, seed=1)
        source = IndexedDataset(prefix)
        index = build_index(source.lengths, range(len(source)), seq_length=8192, seed=1, num_samples=None)
        pages = SlowPages(arguments.seconds)
        arrays = (index.document_index, index.sample_index, index.shuffle_index)
        index = GPTIndex(*map(pages.copy, arrays), epochs=index.epochs)
        source.lengths, source.offsets = pages.copy(source.lengths), pages.copy(source.offsets)
        slow_down(source, pages, is_mapped=arguments.mapped_bin)
        samples = GPTDataset(source, index, SampleOptions(seq_length=8192, eod=None, vocab_size=50_000))
        server = pages.serve()
        try:
            seconds, late = late_seconds(lambda: [samples[k] for k in range(arguments.samples)])
        finally:
            os.kill(server, 9)
            os.waitpid(server, 0)
        _, without = late_seconds(lambda: time.sleep(seconds))
    milliseconds = {
        "a sample, ms": seconds,
        "main thread late, ms a sample": late,
        "without a loader": without,
    }
    print(json.dumps({key: round(1e3 * value / arguments.samples, 1) for key, value in milliseconds.items()}))


def slow_down(source: IndexedDataset, pages: SlowPages, *, is_mapped: bool) -> None:
    """Let reads of the elements take as long as their pages."""
    file = source._bin  # noqa: SLF001 (a test double)
    if is_mapped:
        mapped = pages.copy(np.zeros(min(file.size, 1 << 28), np.uint8))
        file.read = lambda start, size: mapped[start % (len(mapped) - size) :][:size]  # type: ignore[method-assign]
        return
    original = file.read

    def read(position: int, num_bytes: int) -> npt.NDArray[np.uint8]:
        for _ in range(position // PAGE, (position + num_bytes - 1) // PAGE + 1):
            time.sleep(pages.seconds)
        return original(position, num_bytes)

    file.read = read  # type: ignore[method-assign]


if __name__ == "__main__":
    main()
