"""Save in the background: the state is copied to host memory, a process of its own writes it, and all ranks commit it later.

    begin()  state finite? enough space? ─> copy to host memory ─> training continues
                                                    └─> writer process: shards, fsync
    is_ready on all ranks ─> commit(): manifest, rename                              (save.py)

On a GPU the copy runs on a stream of its own, during the next forward and backward pass; the optimizer waits for it.
"""

from __future__ import annotations

import itertools
import socket
import threading
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch

from megatrain.checkpoint.chunks import PlannedChunk, plan_chunks, split_into_files
from megatrain.checkpoint.errors import CheckpointError, agree
from megatrain.checkpoint.save import Save, file_report
from megatrain.checkpoint.writer_process import PROGRAM, SharedMemory, WriterProcess
from megatrain.optim.sharded import ShardedOptimizer
from megatrain.parallel.grid import RankGrid
from megatrain.process.available_memory import available_bytes

_ALIGNMENT = 64
"""Bytes; every copy of a chunk starts at a multiple."""


class BackgroundWriter:
    """Host memory for a copy of what this rank writes, allocated once, and the process that writes it. All ranks create it together.

    Args:
        optimizer: its state is saved.
        kinds: kinds of state that are saved.
        cpu_priority, io_priority: of the writer process.
        verifies: read files again after they are written.
        program: see `WriterProcess`.

    Raises:
        CheckpointError: a host does not have the memory.
    """

    is_in_background = True

    def __init__(
        self,
        optimizer: ShardedOptimizer,
        grid: RankGrid,
        kinds: Sequence[str],
        *,
        cpu_priority: int = 0,
        io_priority: int = 0,
        verifies: bool = False,
        program: str = PROGRAM,
    ) -> None:
        self.optimizer, self.grid, self.kinds = optimizer, grid, tuple(kinds)
        self.verifies = verifies
        self._process_options: dict[str, Any] = {
            "cpu_priority": cpu_priority,
            "io_priority": io_priority,
            "program": program,
        }
        num_bytes = host_bytes(plan_chunks(optimizer, grid, self.kinds))
        agree(lambda: (socket.gethostname(), available_bytes(), num_bytes), grid.messages, then=_check_memory)
        agree(lambda: self._allocate(num_bytes), grid.messages)
        self.pending: Save | None = None
        """The save that is not committed yet."""
        self._plan: list[PlannedChunk] = []
        self._sender: threading.Thread | None = None
        """Sends the request to the writer once a GPU has copied the state."""

    def begin(self, save: Save) -> None:
        """Begin a save of the current state. All ranks call it; none is pending.

        Raises:
            CheckpointError: on all ranks; nothing is pending.
        """
        assert self.pending is None
        plan = plan_chunks(self.optimizer, self.grid, self.kinds)
        save.begin(plan, prepare=self._require_writer)
        self.pending, self._plan = save, plan
        offsets = _offsets(plan)
        copied = self._copy(plan, offsets)
        request = _request(save.temporary, self.grid.rank, plan, offsets)
        if copied is None:
            self._writer.begin(request, verifies=self.verifies)
        else:
            self._sender = threading.Thread(target=self._send_after, args=(copied, request), daemon=True)
            self._sender.start()

    @property
    def is_ready(self) -> bool:
        """Nothing is pending, or this rank's files are written or have failed."""
        return self.pending is None or (self._sender_is_done and self._writer.has_result())

    def commit(self) -> Path:
        """Wait for the files of all ranks and commit the pending save; return its folder. All ranks call it.

        Raises:
            CheckpointError: on all ranks; nothing is pending then either.
        """
        assert self.pending is not None
        save, self.pending = self.pending, None
        return save.commit(self._reports)

    def close(self) -> None:
        """End the writer process and free the memory; a pending save is abandoned."""
        if self._sender is not None:
            self._sender.join()
        self._writer.close()
        if self._is_pinned:
            torch.cuda.cudart().cudaHostUnregister(self._bytes.data_ptr())
        del self._bytes
        self._memory.close()

    def _allocate(self, num_bytes: int) -> None:
        self._memory = SharedMemory(num_bytes)
        self._bytes = torch.frombuffer(self._memory.map, dtype=torch.uint8)
        device = self.optimizer.device
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None
        self._is_pinned = self._stream is not None
        if self._is_pinned:
            with torch.cuda.device(device):
                code = torch.cuda.cudart().cudaHostRegister(self._bytes.data_ptr(), self._memory.num_bytes, 0)
            if int(code) != 0:
                raise CheckpointError(
                    f"CUDA cannot pin {self._memory.num_bytes} bytes of host memory for --async-save (error {code})",
                    fix="raise the limit of locked memory (ulimit -l), or remove --async-save",
                )
        self._start_writer()

    def _require_writer(self) -> None:
        """Start a new process if the last one has died."""
        if not self._writer.is_alive:
            self._writer.close()
            self._start_writer()

    def _start_writer(self) -> None:
        self._writer = WriterProcess(self._memory, **self._process_options)

    def _copy(self, plan: Sequence[PlannedChunk], offsets: Sequence[int]) -> torch.cuda.Event | None:
        """Copy chunks to host memory. On a GPU, return the event after which they are there; the next update waits for it."""
        if self._stream is not None:
            self._stream.wait_stream(torch.cuda.current_stream(self.optimizer.device))
        with torch.cuda.stream(self._stream):
            for chunk, offset in zip(plan, offsets, strict=True):
                target = self._bytes[offset : offset + chunk.num_bytes].view(chunk.values.dtype)
                target.copy_(chunk.values.detach(), non_blocking=True)
        if self._stream is None:
            return None
        copied = torch.cuda.Event(blocking=True)
        copied.record(self._stream)
        self.optimizer.state_copied = copied
        if any(one.layout.kind == "scale" for one in self.optimizer.buffers.registry.entries.values()):
            copied.wait(torch.cuda.current_stream(self.optimizer.device))  # the next pass writes them
        return copied

    def _send_after(self, copied: torch.cuda.Event, request: list[dict[str, Any]]) -> None:
        copied.synchronize()
        self._writer.begin(request, verifies=self.verifies)

    @property
    def _sender_is_done(self) -> bool:
        return self._sender is None or not self._sender.is_alive()

    def _reports(self) -> list[dict[str, Any]]:
        if self._sender is not None:
            self._sender.join()
        written = self._writer.result()
        files = split_into_files(self._plan, self.grid.rank)
        return [file_report(name, part, file) for (name, part), file in zip(files, written, strict=True)]


def host_bytes(plan: Sequence[PlannedChunk]) -> int:
    """Return the host memory for a copy of these chunks."""
    return sum(_aligned(chunk.num_bytes) for chunk in plan)


def _check_memory(answers: Sequence[tuple[str, int, int]]) -> None:
    """Check (host, available, needed) bytes of all ranks.

    Raises:
        CheckpointError: a host has too little memory for the copies of its ranks.
    """
    for host in dict.fromkeys(host for host, _, _ in answers):
        available = min(free for name, free, _ in answers if name == host)
        needed = sum(num_bytes for name, _, num_bytes in answers if name == host)
        if needed > available:
            raise CheckpointError(
                f"--async-save needs {needed / 1e9:.1f} GB of host memory on {host} for a copy of the state,"
                f" and {available / 1e9:.1f} GB are available",
                fix="remove --async-save, or shard the state over more hosts (--use-distributed-optimizer)",
            )


def _request(
    folder: Path, rank: int, plan: Sequence[PlannedChunk], offsets: Sequence[int]
) -> list[dict[str, Any]]:
    """Return the files of this rank for `WriterProcess.begin`."""
    rest = iter(offsets)
    return [
        {
            "path": str(folder / name),
            "chunks": [asdict(chunk.entry) for chunk in part],
            "offsets": [next(rest) for _ in part],
        }
        for name, part in split_into_files(plan, rank)
    ]


def _offsets(plan: Sequence[PlannedChunk]) -> list[int]:
    """Return the first byte of each chunk in host memory."""
    sizes = (_aligned(chunk.num_bytes) for chunk in plan)
    return list(itertools.accumulate(sizes, initial=0))[:-1]


def _aligned(num_bytes: int) -> int:
    return -(-num_bytes // _ALIGNMENT) * _ALIGNMENT
