"""Runs one function over many items in several processes, and gives the results in order.

    item k -> pipe -> worker k mod n -> pipe -> result k      at most IN_FLIGHT items a worker, and so many bytes, are under way

Each worker has a pipe of its own. A worker that dies closes it, which the parent sees at once; a parent that dies
closes all of them, and the workers end. So nobody waits for the dead.
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

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator
    from multiprocessing.connection import Connection
    from multiprocessing.process import BaseProcess
    from types import TracebackType

Item = TypeVar("Item")
Result = TypeVar("Result")

IN_FLIGHT: Final = 2
"""One item being worked on, one waiting, so that a worker does not pause for the parent."""
END_SECONDS: Final = 10.0
"""How long a process may take to end once it has to."""


@dataclass(frozen=True)
class _Failure:
    """An exception of a worker in a form that reaches the parent."""

    problems: tuple[Problem, ...]
    trace: str


class Workers(Generic[Item, Result]):
    """Processes that each hold their own function, made by `make` in the process itself."""

    def __init__(self, num_workers: int, make: Callable[[], Callable[[Item], Result]]) -> None:
        """Start the processes. `make` must be importable by name there."""
        self._connections: list[Connection[Any, Any]] = []
        self._processes: list[BaseProcess] = []
        context = multiprocessing.get_context("spawn")  # a fork would copy threads' locks in whatever state
        with _interrupts_kept_from_children():
            for _ in range(num_workers):
                ours, theirs = context.Pipe()
                process = context.Process(target=_serve, args=(theirs, make), daemon=True)
                process.start()
                theirs.close()  # else the pipe would outlive the worker, and its death go unseen
                self._connections.append(ours)
                self._processes.append(process)

    def __enter__(self) -> Self:
        """Leaving the `with` block ends the processes."""
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """End all processes, also those at work."""
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
        most_bytes: float = math.inf,
    ) -> Iterator[Result]:
        """The results, in the order of the items, which are taken as workers become free.

        Args:
            size: bytes of an item.
            most_bytes: that may be under way together; an item that is larger alone goes alone.

        Raises:
            MegatrainError: a worker failed or died, with the reason.
        """
        under_way: deque[tuple[int, int]] = deque()
        num_bytes = 0
        for number, item in enumerate(items):
            item_bytes = size(item)
            while under_way and (
                len(under_way) == IN_FLIGHT * len(self._processes) or num_bytes + item_bytes > most_bytes
            ):
                worker, done_bytes = under_way.popleft()
                num_bytes -= done_bytes
                yield self._receive(worker)
            worker = number % len(self._processes)
            self._send(worker, item)
            under_way.append((worker, item_bytes))
            num_bytes += item_bytes
        for worker, _ in under_way:
            yield self._receive(worker)

    def _send(self, worker: int, item: Item) -> None:
        try:
            _put(self._connections[worker], item)
        except OSError as error:
            raise self._death(worker) from error

    def _receive(self, worker: int) -> Result:
        try:
            result = _take(self._connections[worker])
        except (EOFError, OSError) as error:
            raise self._death(worker) from error
        if isinstance(result, _Failure):
            raise _as_error(result)
        answer: Result = result
        return answer

    def _death(self, worker: int) -> MegatrainError:
        """What became of a worker whose pipe is closed."""
        failure = self._last_words(worker)
        if failure is not None:
            return _as_error(failure)
        process = self._processes[worker]
        process.join(END_SECONDS)
        code = process.exitcode
        if code is None or code >= 0:
            return MegatrainError(
                f"worker {worker} ended with exit code {code}", fix="see what it printed above, and run again"
            )
        name = signal.Signals(-code).name
        fix = "the host may have run out of memory: use fewer --workers" if name == "SIGKILL" else "run again"
        return MegatrainError(f"worker {worker} was ended by {name}", fix=fix)

    def _last_words(self, worker: int) -> _Failure | None:
        """The failure that a worker reported before its pipe closed, if it did."""
        for _ in range(2):  # an item that the worker never read shows as one error in front of what it wrote
            try:
                while True:
                    result = _take(self._connections[worker])
                    if isinstance(result, _Failure):
                        return result
            except EOFError:
                return None
            except OSError:
                continue
        return None


@contextlib.contextmanager
def _interrupts_kept_from_children() -> Iterator[None]:
    """Ctrl-C reaches all processes of a terminal; the parent alone decides. Children inherit what is blocked."""
    resource_tracker.ensure_running()  # it is a child, too, and unblocks signals here once it is started
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def _put(connection: Connection[Any, Any], message: object) -> None:
    """Send a message; the content of arrays as it lies in memory, without a copy that holds all of it."""
    arrays: list[Any] = []
    rest = io.BytesIO()
    ForkingPickler(rest, 5, True, arrays.append).dump(message)
    connection.send(len(arrays))
    for content in (rest.getbuffer(), *(array.raw() for array in arrays)):
        connection.send_bytes(content)


def _take(connection: Connection[Any, Any]) -> Any:
    """Receive a message. Its arrays cannot be written to."""
    num_arrays = connection.recv()
    rest = connection.recv_bytes()
    return ForkingPickler.loads(rest, buffers=[connection.recv_bytes() for _ in range(num_arrays)])


def _as_error(failure: _Failure) -> MegatrainError:
    if failure.problems:
        return ConfigError.of(failure.problems)
    return MegatrainError(f"a worker failed:\n{failure.trace}", fix="report this; it is a fault in megatrain")


def _serve(connection: Connection[Any, Any], make: Callable[[], Callable[[Any], Any]]) -> None:
    """A worker's life: items in, results out, until the pipe closes."""
    inbox: queue.SimpleQueue[Any] = queue.SimpleQueue()
    # Without a thread that always reads, parent and worker could both wait for the other to empty a full pipe.
    threading.Thread(target=_receive_all, args=(connection, inbox), daemon=True).start()
    try:
        work = make()
        while (item := inbox.get()) is not _END:
            _put(connection, work(item))
    except BrokenPipeError:
        return  # the parent is gone
    except MegatrainError as error:
        _put(connection, _Failure(error.problems, ""))
    except BaseException:  # noqa: BLE001 - whatever it is, also a panic of a tokenizer, the parent has to hear of it
        _put(connection, _Failure((), traceback.format_exc()))


def _receive_all(connection: Connection[Any, Any], inbox: queue.SimpleQueue[Any]) -> None:
    try:
        while True:
            inbox.put(_take(connection))
    except (EOFError, OSError):
        inbox.put(_END)


class _End:
    """No more items."""


_END: Final = _End()
