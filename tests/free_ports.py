"""Ports for tests: no other test process, of this run or another one, and no program that asks the kernel for any port gets them.

Each process holds a block of ports, below those that the kernel gives away, by a lock on a file.
"""

import fcntl
import functools
import itertools
import os
import socket
import tempfile
from collections.abc import Iterator
from pathlib import Path

PORTS = range(20_000, 32_000, 50)
"""First ports of the blocks."""


@functools.cache
def _block() -> tuple[int, Iterator[int]]:
    """Return the lock of a block, which is held as long as this process lives, and its ports, again and again."""
    folder = Path(tempfile.gettempdir()) / f"megatrain-test-ports-{os.getuid()}"
    folder.mkdir(exist_ok=True)
    for first in PORTS:
        file = os.open(folder / str(first), os.O_WRONLY | os.O_CREAT)
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            os.close(file)
            continue
        return file, itertools.cycle(range(first, first + PORTS.step))
    raise AssertionError(f"{folder}: all {len(PORTS)} blocks of ports are held")


def free_port() -> int:
    """Return a port of this process on which nothing listens."""
    _, ports = _block()
    for port in itertools.islice(ports, PORTS.step):
        with socket.socket() as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            try:
                probe.bind(("", port))
            except OSError:
                continue
        return port
    raise AssertionError("all ports of this process are in use")
