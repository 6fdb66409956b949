"""A pool of worker processes that run many small distributed jobs, over gloo on CPUs and NCCL on GPUs.

    with WorkerPool(8) as pool:
        answers = pool.run(4, function, argument)     function(rank, world_size, argument) on ranks 0 to 3

Starting a process takes seconds, forking one takes milliseconds: on CPUs workers are forked from a single-threaded parent.
A process that has used a GPU cannot be forked, so workers on GPUs are spawned; rank k uses GPU k.
On CPUs each job creates its own process group, of any world size. On GPUs the NCCL world group is kept (torch 2.11 crashes when a
second one is split): each world size has its own workers, `kept_group` creates each group once, and because groups hold memory
until their process ends, workers are replaced after _MOST_NCCL_JOBS jobs. A job that fails or times out ends all workers; the next
job starts new ones.
"""

from __future__ import annotations

import functools
import gc
import itertools
import multiprocessing
import os
import tempfile
import traceback
from collections import Counter
from collections.abc import Callable, Sequence
from datetime import timedelta
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any, Literal, Self, TypeAlias

import torch
import torch.distributed as dist

from megatrain.config.errors import MegatrainError
from megatrain.parallel.process_groups import destroy_groups, make_group

_MOST_NCCL_JOBS = 40
"""Jobs before workers are replaced. After 40 jobs of four ranks each worker holds 22 GB; workers of other world sizes share its GPU."""
_Worker: TypeAlias = "tuple[Any, Connection[Any, Any]]"
"""A process and its connection."""


class WorkerError(MegatrainError):
    """A job failed on a rank; the message contains the traceback."""


class WorkerPool:
    """Up to `size` worker processes, started by the first job that needs them.

    Args:
        size: largest world size of a job.
        device: device type of the jobs.
        timeout_seconds: time without an answer after which a job counts as hung.
    """

    def __init__(
        self, size: int, *, device: Literal["cpu", "cuda"] = "cpu", timeout_seconds: float = 120.0
    ) -> None:
        self.size = size
        self.device = device
        self.timeout_seconds = timeout_seconds
        self._workers: dict[int, list[_Worker]] = {}
        self._jobs_of: Counter[int] = Counter()
        self._folder: tempfile.TemporaryDirectory[str] | None = None
        self._num_jobs = 0

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def run(self, world_size: int, function: Callable[..., Any], *arguments: Any) -> list[Any]:
        """Call `function(rank, world_size, *arguments)` on `world_size` ranks; return their answers by rank.

        Raises:
            WorkerError: a rank raised, died or timed out.
        """
        assert world_size <= self.size, f"a pool of {self.size} cannot run {world_size} ranks"
        kept = self.size if self.device == "cpu" else world_size
        if self.device == "cuda" and world_size > 1 and self._jobs_of[kept] == _MOST_NCCL_JOBS:
            self._kill(kept)
        if kept not in self._workers:
            self._workers[kept] = self._start(kept)
        self._jobs_of[kept] += 1
        self._num_jobs += 1
        assert self._folder is not None
        store = Path(self._folder.name) / f"job-{self._num_jobs}"
        connections = [connection for _, connection in self._workers[kept][:world_size]]
        for rank, connection in enumerate(connections):
            connection.send((rank, world_size, str(store), function, arguments))
        answers: dict[int, Any] = {}
        while len(answers) < world_size:
            pending = [rank for rank in range(world_size) if rank not in answers]
            ready = wait([connections[rank] for rank in pending], timeout=self.timeout_seconds)
            if not ready:
                self._kill()
                late = ", ".join(str(rank) for rank in pending)
                raise WorkerError(
                    f"ranks {late} did not answer within {self.timeout_seconds} s", fix="look for a deadlock"
                )
            for rank in pending:
                if connections[rank] in ready:
                    answers[rank] = self._answer(rank, connections[rank])
        return [answers[rank] for rank in range(world_size)]

    def close(self) -> None:
        """End the workers; a later job starts new ones."""
        for process, connection in itertools.chain(*self._workers.values()):
            connection.close()
            process.join(timeout=5)
        self._kill()
        if self._folder is not None:
            self._folder.cleanup()
            self._folder = None

    def _answer(self, rank: int, connection: Connection[Any, Any]) -> Any:
        try:
            is_good, answer = connection.recv()
        except EOFError:
            is_good, answer = False, "the process died"
        if not is_good:
            self._kill()
            raise WorkerError(f"rank {rank} failed:\n{answer}", fix="see the traceback")
        return answer

    def _start(self, size: int) -> list[_Worker]:
        if self._folder is None:
            self._folder = tempfile.TemporaryDirectory(prefix="megatrain-workers-")
        torch.set_num_threads(1)  # a fork from a process with torch's threads hangs
        context: Any = multiprocessing.get_context("fork" if self.device == "cpu" else "spawn")
        workers: list[_Worker] = []
        for _ in range(size):
            ours, theirs = context.Pipe()
            inherited = [c for _, c in workers] + [ours] if self.device == "cpu" else []
            process = context.Process(target=_serve, args=(theirs, inherited, self.device), daemon=True)
            process.start()
            theirs.close()
            workers.append((process, ours))
        return workers

    def _kill(self, size: int | None = None) -> None:
        """Kill the workers of one world size, or all."""
        for each in list(self._workers) if size is None else [size]:
            for process, connection in self._workers.pop(each):
                process.kill()
                process.join()
                connection.close()
            del self._jobs_of[each]


def kept_group(name: str, rank_lists: Sequence[Sequence[int]]) -> Any:
    """Return the group that `make_group` creates; on GPUs the same group in every job of this worker, since groups hold memory."""
    if dist.get_backend() != "nccl" or name == "messages":
        return make_group(name, rank_lists)
    return _first_group(name, tuple(map(tuple, rank_lists)))


@functools.cache
def _first_group(name: str, rank_lists: tuple[tuple[int, ...], ...]) -> Any:
    return make_group(name, rank_lists)


def _serve(connection: Connection[Any, Any], inherited: list[Connection[Any, Any]], kind: str) -> None:
    """Run jobs until the parent closes the connection."""
    for other in inherited:
        other.close()
    torch.set_num_threads(1)
    gc.freeze()  # objects from before the first job are not scanned after each job
    while True:
        gc.collect()  # process groups in reference cycles keep their threads running
        try:
            rank, world_size, store, function, arguments = connection.recv()
        except EOFError:
            os._exit(0)
        try:
            device = torch.device(kind, rank) if kind == "cuda" else None
            if device is not None:
                torch.cuda.set_device(device)
            if world_size > 1 and not dist.is_initialized():
                dist.init_process_group(
                    "gloo" if device is None else "nccl",
                    store=dist.FileStore(store, world_size),
                    rank=rank,
                    world_size=world_size,
                    timeout=timedelta(minutes=1 if device is None else 5),  # the first job compiles kernels
                    device_id=device,
                )
            answer = function(rank, world_size, *arguments)
            if world_size > 1:
                dist.barrier()
                if device is None:
                    destroy_groups()
            connection.send((True, answer))
            del answer, function, arguments
        except BaseException:  # noqa: BLE001 (the parent reports any error)
            connection.send((False, traceback.format_exc()))
            os._exit(1)
