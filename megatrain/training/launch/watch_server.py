"""The ranks' meeting point for bad news: a thread of rank 0 to which every rank holds a connection.

    a rank reports, or its connection closes ─> whose end was first? ─> verdict to all ─> all are quiet
                                                          ─> the culprit may speak ─> it has ended ─> all end

The kernel closes the connections of a process that dies, however it dies, and keeps those of one that computes,
holds Python's lock or is stopped in a debugger: a long pause is never taken for an end. A host that loses power is
noticed by keep-alive packets.
"""

from __future__ import annotations

import json
import selectors
import socket
import threading
import time
from dataclasses import dataclass, replace
from typing import Any

from megatrain.training.launch.failure import Failure, first_of

SECONDS_FOR_BETTER_REASONS = 3.0
"""After a broken collective, for the rank that broke it to be heard of."""
SECONDS_TO_FALL_SILENT = 3.0
"""For all ranks to have stopped printing, before the culprit speaks."""
SECONDS_TO_SPEAK = 5.0
_SECONDS_BETWEEN_STEPS = 0.05
_MAX_LINE_BYTES = 1 << 16


def keep_alive(connection: socket.socket) -> None:
    """Have the kernel find out within 25 seconds that the other host is gone."""
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for name, value in (("TCP_KEEPIDLE", 10), ("TCP_KEEPINTVL", 5), ("TCP_KEEPCNT", 3)):
        if hasattr(socket, name):  # not on every system
            connection.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)


@dataclass
class _Peer:
    """One rank, as its connection shows it."""

    connection: socket.socket
    place: dict[str, Any] | None = None
    """Rank, host and process, once it has said so."""
    received: bytes = b""
    is_quiet: bool = False

    @property
    def rank(self) -> int | None:
        return self.place["rank"] if self.place is not None else None


class WatchServer:
    """Decides for all ranks whose end was first. `port` and `token` are what they need to join.

    Args:
        token: what a connection must say first: others may find the port too.
    """

    def __init__(self, token: str) -> None:
        self.token = token
        self._listener = _listener()
        self.port: int = self._listener.getsockname()[1]
        self._woken, self._waker = socket.socketpair()
        self._selector = selectors.DefaultSelector()
        for waited_for in (self._listener, self._woken):
            self._selector.register(waited_for, selectors.EVENT_READ, waited_for)
        self._peers: list[_Peer] = []
        self._heard: list[Failure] = []
        self._decide_at = float("inf")
        self._verdict: Failure | None = None
        self._speak_at = self._end_at = float("inf")
        self._is_over = False
        self._thread = threading.Thread(target=self._serve, name="watch-server", daemon=True)

    def start(self) -> None:
        """Serve until `close`, or until the process ends."""
        self._thread.start()

    def close(self) -> None:
        """Let the ranks go: what becomes of them from now on is nobody's concern here."""
        self._is_over = True
        self._waker.send(b".")  # heard or not: another message may have woken the thread, which then ends
        self._thread.join()
        self._waker.close()
        self._woken.close()

    def close_in_child(self) -> None:
        """A forked process must not keep the connections open."""
        for connection in (self._listener, *(peer.connection for peer in self._peers)):
            connection.close()

    def _serve(self) -> None:
        while not self._is_over:
            for key, _ in self._selector.select(_SECONDS_BETWEEN_STEPS if self._heard else None):
                if key.data is self._listener:
                    self._welcome()
                elif isinstance(key.data, _Peer):
                    self._hear(key.data)
            self._go_on()
        self._tell_all({"leaving": True})
        for connection in (self._listener, *(peer.connection for peer in self._peers)):
            connection.close()
        self._selector.close()

    def _welcome(self) -> None:
        connection, _ = self._listener.accept()
        connection.settimeout(1.0)
        keep_alive(connection)
        peer = _Peer(connection)
        self._peers.append(peer)
        self._selector.register(connection, selectors.EVENT_READ, peer)

    def _hear(self, peer: _Peer) -> None:
        try:
            chunk = peer.connection.recv(4096)
        except OSError:
            chunk = b""
        peer.received += chunk
        *lines, peer.received = peer.received.split(b"\n")
        for line in lines:
            if not self._understand(peer, line):
                self._forget(peer)
                return
        if not chunk or len(peer.received) > _MAX_LINE_BYTES:
            self._forget(peer)
            if peer.place is not None:
                self._note(Failure(kind="vanished", **peer.place))

    def _understand(self, peer: _Peer, line: bytes) -> bool:
        """Act on a message; False: this connection is to be closed."""
        try:
            message = json.loads(line)
        except ValueError:
            return False
        if peer.place is None:
            if not isinstance(message, dict) or message.get("token") != self.token:
                return False
            peer.place = message["place"]
        elif "failure" in message:
            self._note(Failure(**message["failure"]))
        elif "quiet" in message:
            peer.is_quiet = True
        elif "leaving" in message:
            return False
        return True

    def _forget(self, peer: _Peer) -> None:
        self._selector.unregister(peer.connection)
        peer.connection.close()
        self._peers.remove(peer)

    def _note(self, failure: Failure) -> None:
        if self._verdict is not None:
            if failure.rank == self._verdict.rank:
                self._end_at = 0.0
            return
        self._heard.append(failure)
        wait = 0.0 if failure.is_reason else SECONDS_FOR_BETTER_REASONS
        self._decide_at = min(self._decide_at, time.monotonic() + wait)

    def _go_on(self) -> None:
        """Take the next step where its time has come."""
        now = time.monotonic()
        if self._verdict is None:
            if now >= self._decide_at:
                self._verdict = self._judged()
                self._tell_all({"verdict": json.loads(self._verdict.to_json())})
                self._speak_at = now + SECONDS_TO_FALL_SILENT
            return
        if self._speak_at != float("inf"):
            others = [peer for peer in self._peers if peer.rank not in (None, self._verdict.rank)]
            if now >= self._speak_at or all(peer.is_quiet for peer in others):
                self._speak_at = float("inf")
                self._tell_all({"speak": True})
                self._end_at = 0.0 if self._verdict.kind == "vanished" else now + SECONDS_TO_SPEAK
        elif now >= self._end_at:
            self._end_at = float("inf")
            self._tell_all({"end": True})

    def _judged(self) -> Failure:
        """Whose end was first; and who may be waited for, where nothing but broken collectives is known."""
        first, heard = first_of(self._heard), {failure.rank for failure in self._heard}
        silent = sorted({peer.rank for peer in self._peers if peer.rank is not None} - heard)
        return replace(first, silent=silent) if first.kind == "lost peer" else first

    def _tell_all(self, message: dict[str, Any]) -> None:
        """The own rank comes last, as it may end the process."""
        line = json.dumps(message).encode() + b"\n"
        for peer in sorted(self._peers, key=lambda peer: peer.rank == 0):
            try:
                peer.connection.sendall(line)
            except OSError:
                continue  # gone by itself; its connection says so when it is read


def _listener() -> socket.socket:
    if socket.has_dualstack_ipv6():
        return socket.create_server(("", 0), family=socket.AF_INET6, dualstack_ipv6=True, backlog=1024)
    return socket.create_server(("", 0), backlog=1024)
