"""Thread that runs an engine for requests of other threads.

    submit ─┐                                    ┌─> on_event(new text), on_event(end) of each request
    cancel ─┼─> actions ─> [ actions, one pass ] ┤
    pause  ─┘                 between passes     └─> confirmation of pause and resume

Only this thread uses the engine and the model. Every request ends with exactly one event that says so, also if it is cancelled,
the engine fails, or the service stops.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal

from torch import Tensor

from megatrain.inference.sampling import Sampling
from megatrain.inference.texts import TextCompletion, TextEngine

_SECONDS_BETWEEN_MESSAGES = 300.0
"""Longest time without a pass in which other ranks hear nothing; their time limits are longer."""
State = Literal["running", "pausing", "paused", "stopping", "stopped", "failed"]
EndReason = Literal["stop", "length", "cancelled", "stopped", "failed"]


@dataclass(frozen=True)
class Event:
    """New text of a request, or its end."""

    text: str = ""
    end: EndReason | None = None
    """`cancelled`: by `cancel`; `stopped`: the service stopped first; `failed`: the engine did."""


@dataclass(eq=False)
class Ticket:
    """One request."""

    prompt: tuple[int, ...]
    sampling: Sampling
    on_event: Callable[[Event], None]
    """Called in the service's thread; it returns at once and raises nothing."""
    images: Tensor | None = None
    """Images of the prompt, [k, 3, height, width]."""
    text: TextCompletion | None = None
    """Set once the engine has it; complete after the last event."""
    is_cancelled: bool = False
    has_ended: bool = False

    def end(self, reason: EndReason, text: str = "") -> None:
        """Send the last event."""
        if not self.has_ended:
            self.has_ended = True
            self.on_event(Event(text, reason))


class UnavailableError(Exception):
    """A request is not accepted now; the message has the reason."""


@dataclass(frozen=True)
class Status:
    """State of a service."""

    state: State
    running: int
    waiting: int
    seconds_in_pass: float
    """Seconds that the current pass has taken; 0 between passes."""
    is_memory_free: bool
    """No request has memory of the cache."""


class Service:
    """Runs requests until `stop`.

    Args:
        max_waiting: most requests that wait for memory.
        on_failure: called in the service's thread with an error that ends it.
    """

    def __init__(
        self, engine: TextEngine, *, max_waiting: int, on_failure: Callable[[BaseException], None]
    ) -> None:
        self._engine, self._max_waiting, self._on_failure = engine, max_waiting, on_failure
        self._condition = threading.Condition()
        self._state: State = "running"
        self._stop_at: float | None = None
        self._new: deque[Ticket] = deque()
        self._cancelled: list[Ticket] = []
        self._tickets: dict[TextCompletion, Ticket] = {}
        self._num_running = self._num_waiting = 0
        self._pass_began: float | None = None
        self._thread = threading.Thread(target=self._run, name="generation", daemon=True)
        self._thread.start()

    def submit(
        self,
        prompt: Sequence[int],
        sampling: Sampling,
        on_event: Callable[[Event], None],
        images: Tensor | None = None,
    ) -> Ticket:
        """Add a request, which fits into the cache.

        Raises:
            UnavailableError: too many requests wait, or the service is stopping.
        """
        with self._condition:
            if self._state in ("stopping", "stopped", "failed"):
                raise UnavailableError(f"the server is {self._state}")
            if self._num_waiting + len(self._new) >= self._max_waiting:
                raise UnavailableError(f"{self._max_waiting} requests are waiting already")
            ticket = Ticket(tuple(prompt), sampling, on_event, images)
            self._new.append(ticket)
            self._condition.notify_all()
        return ticket

    def cancel(self, ticket: Ticket) -> None:
        """End a request before the next pass; its memory returns. Without effect on one that has ended."""
        with self._condition:
            self._cancelled.append(ticket)
            self._condition.notify_all()

    def pause(self, timeout_seconds: float) -> bool:
        """Run no further pass; return whether it is confirmed that none runs. Requests keep their memory and wait."""
        return self._change(("running", "pausing", "paused"), "pausing", "paused", timeout_seconds)

    def resume(self, timeout_seconds: float) -> bool:
        """Run passes again; return whether it is confirmed."""
        return self._change(("running", "pausing", "paused"), "running", "running", timeout_seconds)

    def begin_stop(self, grace_seconds: float) -> None:
        """Accept no further request; end those that are not finished after `grace_seconds`, or at once if paused."""
        with self._condition:
            if self._state not in ("stopped", "failed"):
                seconds = 0.0 if self._state in ("pausing", "paused") else grace_seconds
                stop_at = time.monotonic() + seconds
                self._stop_at = stop_at if self._stop_at is None else min(self._stop_at, stop_at)
                self._state = "stopping"
                self._condition.notify_all()

    def join(self, timeout_seconds: float) -> bool:
        """Return whether the thread has ended."""
        self._thread.join(timeout_seconds)
        return not self._thread.is_alive()

    @property
    def status(self) -> Status:
        """Return the state now."""
        with self._condition:
            began = self._pass_began
            return Status(
                self._state,
                self._num_running,
                self._num_waiting + len(self._new),
                0.0 if began is None else time.monotonic() - began,
                self._engine.engine.model.cache.is_empty,
            )

    def _change(self, allowed: Sequence[State], now: State, then: State, timeout_seconds: float) -> bool:
        with self._condition:
            if self._state not in allowed:
                return False
            if self._state != then:
                self._state = now
            self._condition.notify_all()
            return self._condition.wait_for(lambda: self._state == then, timeout_seconds)

    def _run(self) -> None:
        try:
            while self._prepare():
                for text, new in self._engine.step():
                    self._report(text, new)
                with self._condition:
                    self._pass_began = None
        except BaseException as error:  # noqa: BLE001 (the error ends every request and the server)
            self._end_all("failed")
            self._on_failure(error)
        else:
            self._end_all("stopped")

    def _prepare(self) -> bool:
        """Wait for work and act on it, up to the next pass; return False once the service shall end."""
        with self._condition:
            while True:
                self._act()
                if self._state == "stopping":
                    assert self._stop_at is not None
                    if self._engine.engine.is_idle or time.monotonic() >= self._stop_at:
                        return False
                if self._state == "pausing":
                    self._state = "paused"
                    self._condition.notify_all()
                if self._state != "paused" and not self._engine.engine.is_idle:
                    self._pass_began = time.monotonic()
                    return True
                if not self._condition.wait(_SECONDS_BETWEEN_MESSAGES):
                    self._engine.keep_alive()

    def _act(self) -> None:
        """Submit new requests to the engine and remove those that are cancelled."""
        for ticket in self._cancelled:
            if ticket.text is not None and ticket.text in self._tickets:
                del self._tickets[ticket.text]
                self._engine.remove(ticket.text)
            ticket.is_cancelled = True
            ticket.end("cancelled")
        self._cancelled.clear()
        while self._new:
            ticket = self._new.popleft()
            if not ticket.is_cancelled:
                ticket.text = self._engine.submit(ticket.prompt, ticket.sampling, ticket.images)
                self._tickets[ticket.text] = ticket
        self._count()

    def _count(self) -> None:
        self._num_running = len(self._engine.engine.running)
        self._num_waiting = len(self._engine.engine.waiting)

    def _report(self, text: TextCompletion, new: str) -> None:
        reason = text.completion.finish_reason
        if reason is None:
            self._tickets[text].on_event(Event(new))
        else:
            self._tickets.pop(text).end(reason, new)
        with self._condition:
            self._count()

    def _end_all(self, reason: Literal["stopped", "failed"]) -> None:
        with self._condition:
            self._state, self._pass_began = reason, None
            for text, ticket in self._tickets.items():
                self._engine.remove(text)
                ticket.end(reason)
            self._tickets.clear()
            for ticket in self._new:
                ticket.end(reason)
            self._new.clear()
            self._count()
            self._condition.notify_all()
