"""Runs a backward and a forward pass in turn: each computes while the other's rows are sent between the ranks of experts.

    backward   begin to send gradients |                                     | wait, experts, begin to send |
    forward                            | attention, router, begin to send    |                              | wait ...

Autograd runs a backward pass to its end, so that it needs a thread of its own; one thread runs at a time. A pass gives up its
turn where it would wait for rows, and when it ends: the order of all work, also of all collectives, follows from the two
passes alone, and is the same on every rank. On a GPU both passes use one stream.

Sources: DeepSeek-V3, arXiv:2412.19437, section 3.2.1.
"""

from __future__ import annotations

import threading
from collections.abc import Callable

import torch
from torch.utils._python_dispatch import _get_current_dispatch_mode_stack, _push_mode

Work = Callable[[], None]


class Turns:
    """The turns of a backward and a forward pass; without them, `give` does nothing."""

    def __init__(self) -> None:
        self._pair: _Pair | None = None

    def give(self) -> None:
        """Let the other pass run until it gives the turn back or ends."""
        if self._pair is not None:
            self._pair.give()

    def run(self, backward: Work, forward: Work) -> None:
        """Run both passes, the backward pass first. If one fails, the other ends at its next turn, and the error is raised."""
        self._pair = pair = _Pair()
        work = _as_in_this_thread(backward)
        thread = threading.Thread(target=pair.run, args=(0, work), name="backward pass", daemon=True)

        def start_then_forward() -> None:
            thread.start()
            pair.wait(1)
            forward()

        try:
            pair.run(1, start_then_forward)
            if thread.is_alive():
                thread.join()
        finally:
            self._pair = None
        if pair.failure is not None:
            raise pair.failure


class _Pair:
    """Two passes, numbered 0 and 1; pass 0 has the first turn."""

    def __init__(self) -> None:
        self.failure: BaseException | None = None
        """The first error of a pass."""
        self._running = 0
        self._has_ended = [False, False]
        self._turns = (threading.Semaphore(0), threading.Semaphore(0))

    def run(self, number: int, work: Work) -> None:
        """Run a pass in the thread that calls this."""
        try:
            work()
        except BaseException as error:  # noqa: BLE001 (`Turns.run` raises it)
            self.failure = self.failure or error
        self._has_ended[number] = True
        self._pass_on(1 - number)

    def give(self) -> None:
        number = self._running
        if not self._has_ended[1 - number]:
            self._pass_on(1 - number)
            self.wait(number)
        elif self.failure is not None:
            raise _OtherPassError

    def wait(self, number: int) -> None:
        """Wait for the turn of a pass."""
        self._turns[number].acquire()
        if self.failure is not None:
            raise _OtherPassError

    def _pass_on(self, number: int) -> None:
        self._running = number
        self._turns[number].release()


class _OtherPassError(RuntimeError):
    """Ends a pass whose other pass has failed."""


def _as_in_this_thread(work: Work) -> Work:
    """Return `work` for another thread, with the CUDA stream and the dispatch modes of this one, which each thread has of its own."""
    modes = _get_current_dispatch_mode_stack()
    stream = torch.cuda.current_stream() if torch.cuda.is_initialized() else None

    def run() -> None:
        for mode in modes:
            _push_mode(mode)  # the thread ends with its work
        if stream is not None:
            torch.cuda.set_stream(stream)
        work()

    return run
