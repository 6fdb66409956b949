"""Run a function over many items in several processes, and return the results in order.

    item k -> pipe -> worker k mod n -> pipe -> result k      IN_FLIGHT items per worker, and a number of bytes, are in flight

Each worker has its own pipe. A worker that dies closes it, which the parent sees at once; a parent that dies closes all
pipes, which ends the workers. So no process waits for a dead one.
"""

from __future__ import annotations

import contextlib
import io
import math
import multiprocessing
import queue
import signal
import threading
import traceback
from collections import deque
from dataclasses import dataclass
from multiprocessing import resource_tracker
from multiprocessing.reduction import ForkingPickler
from typing import TYPE_CHECKING, Any, Final, Generic, Self, TypeVar

from megatrain.config.errors import ConfigError, MegatrainError, Problem
from megatrain.process.line_program import exit_text

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator
    from multiprocessing.connection import Connection
    from multiprocessing.process import BaseProcess

Item = TypeVar("Item")
Result = TypeVar("Result")

IN_FLIGHT: Final = 2
"""Items per worker: one being processed and one queued, so that a worker does not wait for the parent."""
END_SECONDS: Final = 10.0
"""Seconds after which a process that should end is killed."""


@dataclass(frozen=True)
class _Failure:
    """An exception of a worker, in a form that can be sent to the parent."""

    problems: tuple[Problem, ...]
    trace: str


class Workers(Generic[Item, Result]):
    """A pool of processes, each with its own function, which `make` creates in the process."""

    def __init__(self, num_workers: int, make: Callable[[], Callable[[Item], Result]]) -> None:
        """Start the processes. `make` must be importable by name there."""
        self._connections: list[Connection[Any, Any]] = []
        self._processes: list[BaseProcess] = []
        context = multiprocessing.get_context("spawn")  # a fork would copy locks that other threads hold
        with _block_sigint_in_children():
            for _ in range(num_workers):
                ours, theirs = context.Pipe()
                process = context.Process(target=_run_worker, args=(theirs, make), daemon=True)
                process.start()
                theirs.close()  # else the pipe would stay open after the worker's death
                self._connections.append(ours)
                self._processes.append(process)

    def __enter__(self) -> Self:
        """Return the pool; leaving the `with` block ends its processes."""
        return self

    def __exit__(self, *error: object) -> None:
        """End all processes, including busy ones."""
        for connection in self._connections:
            connection.close()
        for process in self._processes:
            process.terminate()
        for process in self._processes:
            process.join(END_SECONDS)
            if process.is_alive():
                process.kill()
                process.join()
            process.close()

    def map(
        self,
        items: Iterable[Item],
        *,
        size: Callable[[Item], int] = lambda _: 0,
        max_bytes: float = math.inf,
    ) -> Iterator[Result]:
        """Yield the results in the order of the items. Items are consumed as workers become free.

        Args:
            size: returns the bytes of an item.
            max_bytes: maximum bytes in flight; a larger item is processed alone.

        Raises:
            MegatrainError: a worker failed or died, with the reason.
        """
        in_flight: deque[tuple[int, int]] = deque()
        num_bytes = 0
        for number, item in enumerate(items):
            item_bytes = size(item)
            while in_flight and (
                len(in_flight) == IN_FLIGHT * len(self._processes) or num_bytes + item_bytes > max_bytes
            ):
                worker, done_bytes = in_flight.popleft()
                num_bytes -= done_bytes
                yield self._receive_result(worker)
            worker = number % len(self._processes)
            self._send_item(worker, item)
            in_flight.append((worker, item_bytes))
            num_bytes += item_bytes
        for worker, _ in in_flight:
            yield self._receive_result(worker)

    def _send_item(self, worker: int, item: Item) -> None:
        try:
            _send(self._connections[worker], item)
        except OSError as error:
            raise self._death_error(worker) from error

    def _receive_result(self, worker: int) -> Result:
        try:
            result = _receive(self._connections[worker])
        except (EOFError, OSError) as error:
            raise self._death_error(worker) from error
        if isinstance(result, _Failure):
            raise _error_of(result)
        answer: Result = result
        return answer

    def _death_error(self, worker: int) -> MegatrainError:
        """Return the error of a worker whose pipe is closed."""
        failure = self._reported_failure(worker)
        if failure is not None:
            return _error_of(failure)
        process = self._processes[worker]
        process.join(END_SECONDS)
        if process.exitcode == -signal.SIGKILL:
            fix = "use fewer --workers: the host may have run out of memory"
        else:
            fix = "see its output above, then run again"
        return MegatrainError(f"worker {worker} ended: {exit_text(process.exitcode)}", fix=fix)

    def _reported_failure(self, worker: int) -> _Failure | None:
        """Return the failure that a worker reported before its pipe closed, if any."""
        # If the worker did not read an item, one error precedes its messages.
        for _ in range(2):
            try:
                while True:
                    result = _receive(self._connections[worker])
                    if isinstance(result, _Failure):
                        return result
            except EOFError:
                return None
            except OSError:
                continue
        return None


@contextlib.contextmanager
def _block_sigint_in_children() -> Iterator[None]:
    """Block Ctrl-C in child processes, which inherit blocked signals: only the parent handles it."""
    resource_tracker.ensure_running()  # also a child process; starting it unblocks signals in this process
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def _send(connection: Connection[Any, Any], message: object) -> None:
    """Send a message; arrays are sent from their memory without a copy of the whole message."""
    arrays: list[Any] = []
    pickled = io.BytesIO()
    ForkingPickler(pickled, 5, True, arrays.append).dump(message)
    connection.send(len(arrays))
    for content in (pickled.getbuffer(), *(array.raw() for array in arrays)):
        connection.send_bytes(content)


def _receive(connection: Connection[Any, Any]) -> Any:
    """Receive a message. Its arrays are read-only."""
    num_arrays = connection.recv()
    pickled = connection.recv_bytes()
    return ForkingPickler.loads(pickled, buffers=[connection.recv_bytes() for _ in range(num_arrays)])


def _error_of(failure: _Failure) -> MegatrainError:
    if failure.problems:
        return ConfigError.of(failure.problems)
    return MegatrainError(f"a worker failed:\n{failure.trace}", fix="report this bug in megatrain")


def _run_worker(connection: Connection[Any, Any], make: Callable[[], Callable[[Any], Any]]) -> None:
    """Process items until the pipe closes."""
    inbox: queue.SimpleQueue[Any] = queue.SimpleQueue()
    # Without a thread that always reads, parent and worker could both block on a full pipe.
    threading.Thread(target=_receive_all, args=(connection, inbox), daemon=True).start()
    try:
        work = make()
        while (item := inbox.get()) is not _END:
            _send(connection, work(item))
    except BrokenPipeError:
        return  # the parent has died
    except MegatrainError as error:
        _send(connection, _Failure(error.problems, ""))
    except BaseException:  # noqa: BLE001 - the parent must learn of every failure, including a panic of a tokenizer
        _send(connection, _Failure((), traceback.format_exc()))


def _receive_all(connection: Connection[Any, Any], inbox: queue.SimpleQueue[Any]) -> None:
    try:
        while True:
            inbox.put(_receive(connection))
    except (EOFError, OSError):
        inbox.put(_END)


class _End:
    """The marker after the last item."""


_END: Final = _End()
