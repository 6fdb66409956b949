"""Runs one function over many items in several processes, and gives the results in order.

    item k -> pipe -> worker k mod n -> pipe -> result k          at most IN_FLIGHT items a worker are under way

Each worker has a pipe of its own. A worker that dies closes it, which the parent sees at once; a parent that dies
closes all of them, and the workers end. So nobody waits for the dead.
"""

from __future__ import annotations

import itertools
import multiprocessing
import queue
import signal
import threading
import traceback
from collections import deque
from dataclasses import dataclass
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

    def map(self, items: Iterable[Item]) -> Iterator[Result]:
        """The results, in the order of the items, which are taken as workers become free.

        Raises:
            MegatrainError: a worker failed or died, with the reason.
        """
        remaining = iter(items)
        under_way: deque[int] = deque()
        rounds = list(range(len(self._processes))) * IN_FLIGHT
        # Workers first: the other way round, zip would take an item that no worker is left for, and lose it.
        for worker, item in zip(rounds, remaining, strict=False):
            self._send(worker, item)
            under_way.append(worker)
        while under_way:
            worker = under_way.popleft()
            result = self._receive(worker)
            for item in itertools.islice(remaining, 1):
                self._send(worker, item)
                under_way.append(worker)
            yield result

    def _send(self, worker: int, item: Item) -> None:
        try:
            self._connections[worker].send(item)
        except OSError as error:
            raise self._death(worker) from error

    def _receive(self, worker: int) -> Result:
        try:
            result = self._connections[worker].recv()
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
                    result = self._connections[worker].recv()
                    if isinstance(result, _Failure):
                        return result
            except EOFError:
                return None
            except OSError:
                continue
        return None


def _as_error(failure: _Failure) -> MegatrainError:
    if failure.problems:
        return ConfigError.of(failure.problems)
    return MegatrainError(f"a worker failed:\n{failure.trace}", fix="report this; it is a fault in megatrain")


def _serve(connection: Connection[Any, Any], make: Callable[[], Callable[[Any], Any]]) -> None:
    """A worker's life: items in, results out, until the pipe closes."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches the whole terminal; the parent decides
    inbox: queue.SimpleQueue[Any] = queue.SimpleQueue()
    # Without a thread that always reads, parent and worker could both wait for the other to empty a full pipe.
    threading.Thread(target=_receive_all, args=(connection, inbox), daemon=True).start()
    try:
        work = make()
        while (item := inbox.get()) is not _END:
            connection.send(work(item))
    except BrokenPipeError:
        return  # the parent is gone
    except MegatrainError as error:
        connection.send(_Failure(error.problems, ""))
    except Exception:  # noqa: BLE001 - whatever it is, the parent has to hear of it
        connection.send(_Failure((), traceback.format_exc()))


def _receive_all(connection: Connection[Any, Any], inbox: queue.SimpleQueue[Any]) -> None:
    try:
        while True:
            inbox.put(connection.recv())
    except (EOFError, OSError):
        inbox.put(_END)


class _End:
    """No more items."""


_END: Final = _End()
