"""Watch server: a thread of rank 0, connected to every rank, that finds the root cause of a failure.

    a rank reports a failure, or its connection closes ─> root cause ─> sent to all ─> all are quiet
                                      ─> the failed rank prints its error ─> it has exited ─> all exit

The kernel closes the connections of a process that dies in any way, and keeps those of one that computes, holds Python's
lock or is stopped in a debugger: a long pause is not a failure. Keep-alive packets detect a host that loses power.
"""

from __future__ import annotations

import json
import selectors
import socket
import threading
import time
from dataclasses import dataclass, replace
from typing import Any

from megatrain.training.launch.failure import Failure, root_cause

SECONDS_FOR_ROOT_CAUSE = 3.0
"""Wait after a failed collective for a report of the rank that caused it."""
SECONDS_TO_BECOME_QUIET = 3.0
"""Longest wait for the other ranks to stop printing."""
SECONDS_TO_PRINT = 5.0
_SECONDS_BETWEEN_STEPS = 0.05
_MAX_LINE_BYTES = 1 << 16


def keep_alive(connection: socket.socket) -> None:
    """Make the kernel detect within 25 seconds that the other host is gone."""
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for name, value in (("TCP_KEEPIDLE", 10), ("TCP_KEEPINTVL", 5), ("TCP_KEEPCNT", 3)):
        if hasattr(socket, name):  # missing on some systems
            connection.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)


@dataclass
class _Peer:
    """Connection of one rank."""

    connection: socket.socket
    location: dict[str, Any] | None = None
    """Rank, host and process; None before its first message."""
    received: bytes = b""
    is_quiet: bool = False

    @property
    def rank(self) -> int | None:
        return self.location["rank"] if self.location is not None else None


class WatchServer:
    """Finds the root cause of failures for all ranks, which connect with `port` and `token`.

    Args:
        token: first message of a connection, so that other programs cannot join.
    """

    def __init__(self, token: str) -> None:
        self.token = token
        self._listener = _listener()
        self.port: int = self._listener.getsockname()[1]
        self._wake_receiver, self._waker = socket.socketpair()
        self._selector = selectors.DefaultSelector()
        for source in (self._listener, self._wake_receiver):
            self._selector.register(source, selectors.EVENT_READ, source)
        self._peers: list[_Peer] = []
        self._failures: list[Failure] = []
        self._decide_at = float("inf")
        self._cause: Failure | None = None
        self._print_at = self._exit_at = float("inf")
        self._is_closed = False
        self._thread = threading.Thread(target=self._serve, name="watch-server", daemon=True)

    def start(self) -> None:
        """Serve until `close`, or until the process ends."""
        self._thread.start()

    def close(self) -> None:
        """Disconnect all ranks; their later failures are not reported."""
        self._is_closed = True
        self._waker.send(b".")  # another message may have woken the thread, which exits then
        self._thread.join()
        self._waker.close()
        self._wake_receiver.close()

    def close_in_child(self) -> None:
        """Close the connections in a forked process, so that they close with this one."""
        for connection in (self._listener, *(peer.connection for peer in self._peers)):
            connection.close()

    def _serve(self) -> None:
        while not self._is_closed:
            for key, _ in self._selector.select(_SECONDS_BETWEEN_STEPS if self._failures else None):
                if key.data is self._listener:
                    self._accept()
                elif isinstance(key.data, _Peer):
                    self._receive(key.data)
            self._advance()
        self._broadcast({"leaving": True})
        for connection in (self._listener, *(peer.connection for peer in self._peers)):
            connection.close()
        self._selector.close()

    def _accept(self) -> None:
        connection, _ = self._listener.accept()
        connection.settimeout(1.0)
        keep_alive(connection)
        peer = _Peer(connection)
        self._peers.append(peer)
        self._selector.register(connection, selectors.EVENT_READ, peer)

    def _receive(self, peer: _Peer) -> None:
        try:
            chunk = peer.connection.recv(4096)
        except OSError:
            chunk = b""
        peer.received += chunk
        *lines, peer.received = peer.received.split(b"\n")
        for line in lines:
            if not self._handle(peer, line):
                self._disconnect(peer)
                return
        if not chunk or len(peer.received) > _MAX_LINE_BYTES:
            self._disconnect(peer)
            if peer.location is not None:
                self._record(Failure(kind="died", **peer.location))

    def _handle(self, peer: _Peer, line: bytes) -> bool:
        """Act on a message; return False if the connection must be closed."""
        try:
            message = json.loads(line)
        except ValueError:
            return False
        if peer.location is None:
            if not isinstance(message, dict) or message.get("token") != self.token:
                return False
            peer.location = message["location"]
        elif "failure" in message:
            self._record(Failure(**message["failure"]))
        elif "quiet" in message:
            peer.is_quiet = True
        elif "leaving" in message:
            return False
        return True

    def _disconnect(self, peer: _Peer) -> None:
        self._selector.unregister(peer.connection)
        peer.connection.close()
        self._peers.remove(peer)

    def _record(self, failure: Failure) -> None:
        if self._cause is not None:
            if failure.rank == self._cause.rank:
                self._exit_at = 0.0
            return
        self._failures.append(failure)
        wait = 0.0 if failure.is_root_cause else SECONDS_FOR_ROOT_CAUSE
        self._decide_at = min(self._decide_at, time.monotonic() + wait)

    def _advance(self) -> None:
        """Take the next step of the shutdown if its time has come."""
        now = time.monotonic()
        if self._cause is None:
            if now >= self._decide_at:
                self._cause = self._root_cause()
                self._broadcast({"cause": json.loads(self._cause.to_json())})
                self._print_at = now + SECONDS_TO_BECOME_QUIET
            return
        if self._print_at != float("inf"):
            others = [peer for peer in self._peers if peer.rank not in (None, self._cause.rank)]
            if now >= self._print_at or all(peer.is_quiet for peer in others):
                self._print_at = float("inf")
                self._broadcast({"print": True})
                self._exit_at = 0.0 if self._cause.kind == "died" else now + SECONDS_TO_PRINT
        elif now >= self._exit_at:
            self._exit_at = float("inf")
            self._broadcast({"exit": True})

    def _root_cause(self) -> Failure:
        """Return the root cause; for a failed collective, with the ranks that have not reported a failure."""
        first, reported = root_cause(self._failures), {failure.rank for failure in self._failures}
        unreported = sorted({peer.rank for peer in self._peers if peer.rank is not None} - reported)
        return replace(first, unreported=unreported) if first.kind == "collective" else first

    def _broadcast(self, message: dict[str, Any]) -> None:
        """Send a message to all ranks; rank 0 comes last, as its process may exit."""
        line = json.dumps(message).encode() + b"\n"
        for peer in sorted(self._peers, key=lambda peer: peer.rank == 0):
            try:
                peer.connection.sendall(line)
            except OSError:
                continue  # the connection is closed; reading it reports that


def _listener() -> socket.socket:
    if socket.has_dualstack_ipv6():
        return socket.create_server(("", 0), family=socket.AF_INET6, dualstack_ipv6=True, backlog=1024)
    return socket.create_server(("", 0), backlog=1024)
