"""Connections of `megatrain serve` that no client can hold without end: uvicorn's, with limits of time and number.

    connected ─> the head of a request, in time ─> the request, with limits of its own ─> the next head, in time
                                                   an answer that is not read, for that time

A new connection takes the place of the one that has been without a request for longest.
"""

from __future__ import annotations

import asyncio
import resource
from typing import Any

from uvicorn.protocols.http.h11_impl import H11Protocol

_OTHER_FILES = 256
"""Files that the process needs besides connections."""


class LimitedConnection(H11Protocol):
    """A connection that ends after the time `timeout_keep_alive` of the server's Config without progress of its client.

    The server has less than `limit_concurrency` connections, unless as many have requests.
    """

    _time_limit: asyncio.TimerHandle | None = None
    _reading_limit: asyncio.TimerHandle | None = None
    idle_since = 0.0

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._expect_request()
        self._end_oldest()

    def connection_lost(self, exc: Exception | None) -> None:
        for timer in (self._time_limit, self._reading_limit):
            if timer:
                timer.cancel()
        super().connection_lost(exc)

    def on_response_complete(self) -> None:
        super().on_response_complete()
        self._expect_request()

    def pause_writing(self) -> None:
        """The client does not read: end the connection if that lasts."""
        super().pause_writing()
        self._reading_limit = self.loop.call_later(self.timeout_keep_alive, self.transport.abort)

    def resume_writing(self) -> None:
        if self._reading_limit:
            self._reading_limit.cancel()
        super().resume_writing()

    @property
    def is_busy(self) -> bool:
        """Return whether a request runs."""
        return self.cycle is not None and not self.cycle.response_complete

    def _expect_request(self) -> None:
        if self._time_limit:
            self._time_limit.cancel()
        self.idle_since = self.loop.time()
        self._time_limit = self.loop.call_later(self.timeout_keep_alive, self._end_if_idle)

    def _end_if_idle(self) -> None:
        """End the connection, unless a request runs: when it is complete, the next one is expected."""
        if not self.is_busy:
            self.transport.abort()

    def _end_oldest(self) -> None:
        assert self.limit_concurrency is not None
        if len(self.connections) < self.limit_concurrency:
            return
        others: list[Any] = [one for one in self.connections if one is not self]
        idle = [one for one in others if isinstance(one, LimitedConnection) and not one.is_busy]
        if idle:
            oldest = min(idle, key=lambda one: one.idle_since)
            self.connections.discard(oldest)
            oldest.transport.abort()


def allowed_connections(wanted: int) -> int:
    """Return how many connections the process may have, at most `wanted`; its limit of open files is raised if it may be."""
    files, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    needed = wanted + _OTHER_FILES
    if needed > files != resource.RLIM_INFINITY:
        files = needed if most == resource.RLIM_INFINITY else min(needed, most)
        resource.setrlimit(resource.RLIMIT_NOFILE, (files, most))
    return wanted if files == resource.RLIM_INFINITY else max(1, min(wanted, files - _OTHER_FILES))
