"""Watch server: a thread of rank 0, connected to every rank, that finds the root cause of a failure.

    a rank reports a failure, or its connection closes ─> root cause ─> sent to all ─> all are quiet
                                      ─> the failed rank prints its error ─> it has exited ─> all exit
    a rank reports that it makes no progress ─> the late ranks are searched (`faults/late_ranks.py`) ─> root cause

The kernel closes the connections of a process that dies in any way, and keeps the connections of one that computes, holds Python's
lock or is stopped in a debugger: a long pause is not a failure. Keep-alive packets detect a host that loses power.

Anyone who reaches the port can connect, as to torch's store. A peer is unknown until it says which rank it is: its message is small,
its time is short, the number of such peers is bounded, and no verdict is sent to it. A second peer of the same rank is refused.

All ranks connect at once, more than the kernel queues: one that gets no answer in time connects again. A rank has joined with its first
message after the answer, and until then a connection that closes is no death. No step of the server scans all ranks for one of them.
"""

from __future__ import annotations

import contextlib
import json
import selectors
import socket
import threading
import time
from dataclasses import dataclass, field, replace
from typing import Any, Final

from megatrain.config.environment import LaunchEnvironment
from megatrain.storage.untrusted_json import integer, json_object, list_of, number, parse_json, record
from megatrain.training.liveness.failure import (
    LOCATION,
    Failure,
    checked_failure,
    process_location,
    root_cause,
)
from megatrain.training.liveness.late_ranks import LateSearch
from megatrain.training.liveness.position import checked_position
from megatrain.training.liveness.sockets import BACKLOG, keep_alive, listen

MAX_FIRST_MESSAGE_BYTES: Final = 4096
MAX_MESSAGE_BYTES: Final = 1 << 16
SECONDS_FOR_ROOT_CAUSE = 3.0
"""Wait after a failed collective for a report of the rank that caused it."""
SECONDS_TO_BECOME_QUIET = 3.0
"""Longest wait for the other ranks to stop printing."""
SECONDS_TO_PRINT = 5.0
SECONDS_TO_INTRODUCE = 10.0
"""An unknown peer is disconnected after this time."""
MIN_UNKNOWN_PEERS = 256
"""As many unknown peers as this, or as there are ranks, may be connected; then the oldest one is disconnected."""
_SECONDS_BETWEEN_STEPS = 0.05
_FILES, _SECONDS, _LOCATION = list_of(integer(-1), most=2), number(), record(LOCATION)


@dataclass(eq=False)
class _Peer:
    """Connection of one rank, or of an unknown program."""

    connection: socket.socket
    deadline: float = field(default_factory=lambda: time.monotonic() + SECONDS_TO_INTRODUCE)
    """End of the time for its first message."""
    location: dict[str, Any] | None = None
    """Rank, host and process; None: an unknown peer."""
    received: bytes = b""
    has_joined: bool = False
    """It has sent a message after its first one, so it has read the answer."""
    is_quiet: bool = False
    files: list[int] = field(default_factory=list)
    """File descriptors of its heartbeat."""


class WatchServer:
    """Finds the root cause of failures for all ranks, which connect to `port`.

    Args:
        environment: rank and host of this process; the server listens at the address of the rendezvous.
    """

    def __init__(self, environment: LaunchEnvironment) -> None:
        self._environment = environment
        self._listener = listen(environment)
        self._listener.setblocking(False)
        self.port: int = self._listener.getsockname()[1]
        self._wake_receiver, self._waker = socket.socketpair()
        self._selector = selectors.DefaultSelector()
        for source in (self._listener, self._wake_receiver):
            self._selector.register(source, selectors.EVENT_READ, source)
        self._unknown: dict[_Peer, None] = {}
        """Unknown peers, the oldest first."""
        self._ranks: dict[int, _Peer] = {}
        self._left: dict[int, _Peer] = {}
        """Ranks whose connection closed before they had joined, the oldest first: they may connect again."""
        self._failures: list[Failure] = []
        self._decide_at = float("inf")
        self._cause: Failure | None = None
        self._search: LateSearch | None = None
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
        for connection in self._connections():
            connection.close()

    def _connections(self) -> list[socket.socket]:
        return [self._listener, *(peer.connection for peer in (*self._unknown, *self._ranks.values()))]

    def _serve(self) -> None:
        while not self._is_closed:
            self._serve_once()
        self._broadcast({"leaving": True})
        for connection in self._connections():
            connection.close()
        self._selector.close()

    def _serve_once(self) -> None:
        """Wait for messages and act on them."""
        for key, _ in self._selector.select(self._seconds_to_wait()):
            if key.data is self._listener:
                self._accept()
            elif isinstance(key.data, _Peer) and key.data.connection.fileno() >= 0:
                self._receive(key.data)
        self._disconnect_late_peers()
        self._advance()

    def _seconds_to_wait(self) -> float | None:
        if self._failures or self._search is not None:
            return _SECONDS_BETWEEN_STEPS
        return 1.0 if self._unknown or self._left else None

    def _accept(self) -> None:
        """Accept all connections that wait, at most `BACKLOG`: messages of ranks wait meanwhile."""
        most = max(MIN_UNKNOWN_PEERS, self._environment.world_size)
        for _ in range(BACKLOG):
            try:
                connection, _ = self._listener.accept()
            except BlockingIOError:
                return
            except OSError:  # the peer has gone, or this process has too many open files
                if self._unknown:
                    self._disconnect(next(iter(self._unknown)))
                return
            if len(self._unknown) >= most:
                self._disconnect(next(iter(self._unknown)))
            connection.settimeout(1.0)
            peer = _Peer(connection)
            self._unknown[peer] = None
            self._selector.register(connection, selectors.EVENT_READ, peer)
            with contextlib.suppress(OSError):
                keep_alive(connection)

    def _disconnect_late_peers(self) -> None:
        """Disconnect unknown peers whose time is over; ranks that have not connected again in time are dead."""
        now = time.monotonic()
        while self._unknown and now >= (peer := next(iter(self._unknown))).deadline:
            self._disconnect(peer)
        while self._left and now >= (peer := next(iter(self._left.values()))).deadline:
            assert peer.location is not None
            del self._left[peer.location["rank"]]
            self._record(Failure(kind="died", **peer.location))

    def _receive(self, peer: _Peer) -> None:
        try:
            chunk = peer.connection.recv(4096)
        except OSError:
            chunk = b""
        peer.received += chunk
        *lines, peer.received = peer.received.split(b"\n")
        try:
            for line in lines:
                if not self._handle(peer, line):
                    self._disconnect(peer)
                    return
            is_over = not chunk or len(peer.received) > (
                MAX_FIRST_MESSAGE_BYTES if peer.location is None else MAX_MESSAGE_BYTES
            )
        except (ValueError, RecursionError):  # not a message
            is_over = True
        if is_over:
            self._disconnect(peer)
            if peer.location is not None and peer.has_joined:
                self._record(Failure(kind="died", **peer.location))
            elif peer.location is not None:
                peer.deadline = time.monotonic() + SECONDS_TO_INTRODUCE
                self._left[peer.location["rank"]] = peer

    def _handle(self, peer: _Peer, line: bytes) -> bool:
        """Act on a message; return False if the connection must be closed.

        Raises:
            ValueError, RecursionError: it is not a message.
        """
        if peer.location is None:
            return self._introduce(peer, line)
        peer.has_joined = True
        message = json_object(parse_json(line, max_bytes=MAX_MESSAGE_BYTES), "the message")
        if "failure" in message:
            self._record(replace(checked_failure(message["failure"]), **peer.location))
        elif "quiet" in message:
            peer.is_quiet = True
        elif "files" in message:
            _FILES(message["files"], "files")
            peer.files = message["files"]
        elif "stalled" in message:
            _SECONDS(message["stalled"], "stalled")
            self._begin_search(message["stalled"], peer.location["rank"])
        elif "position" in message and self._search is not None:
            self._search.add(peer.location["rank"], message.get("of"), checked_position(message["position"]))
        elif "leaving" in message:
            return False
        return True

    def _introduce(self, peer: _Peer, line: bytes) -> bool:
        """Make an unknown peer the rank that it says it is, unless that rank is there already.

        The same process may connect again until it has joined.
        """
        location = read_location(line)
        earlier = self._ranks.get(location["rank"])
        if earlier is not None and not earlier.has_joined and earlier.location == location:
            self._disconnect(earlier)
        elif earlier is not None:
            with contextlib.suppress(OSError):
                _send(peer.connection, {"refused": True})
            return False
        with contextlib.suppress(OSError):
            _send(peer.connection, {"location": process_location(self._environment)})
        peer.location = location
        del self._unknown[peer]
        self._ranks[location["rank"]] = peer
        self._left.pop(location["rank"], None)
        return True

    def _disconnect(self, peer: _Peer) -> None:
        self._selector.unregister(peer.connection)
        peer.connection.close()
        if peer.location is None:
            del self._unknown[peer]
        else:
            del self._ranks[peer.location["rank"]]

    def _record(self, failure: Failure) -> None:
        if self._cause is not None:
            if failure.rank == self._cause.rank:
                self._exit_at = 0.0
            return
        self._failures.append(failure)
        wait = 0.0 if failure.is_root_cause else SECONDS_FOR_ROOT_CAUSE
        self._decide_at = min(self._decide_at, time.monotonic() + wait)

    def _begin_search(self, seconds: float, reporter: int) -> None:
        """Begin to search late ranks, unless there is a root cause, or a search, which then knows of this stall too."""
        if self._search is not None:
            self._search.stalled.add(reporter)
        elif self._cause is None:
            locations = {
                rank: peer.location for rank, peer in self._ranks.items() if peer.location is not None
            }
            self._search = LateSearch(locations, seconds, {reporter})

    def _advance_search(self) -> None:
        """Take the next step of the search for late ranks if its time has come."""
        search, peers = self._search, self._ranks
        if search is None or not search.is_step_due:
            return
        if not search.has_begun:
            search.begin()
            self._broadcast({"where": True})
            return
        looks = [] if search.asked else list(search.to_look_at())
        for rank, observer in looks:
            if rank in peers and observer in peers:
                look = {"rank": rank, "pid": search.locations[rank]["pid"], "files": peers[rank].files}
                with contextlib.suppress(OSError):
                    _send(peers[observer].connection, {"look": look})
        if not looks and search.is_excused:
            self._search = None
            self._broadcast({"excused": True})
        elif not looks:
            silent = [search.locations[rank] for rank in search.silent]
            self._decide(search.conclude(), reporters=search.reporters(), silent=silent)

    def _decide(self, cause: Failure, **more: Any) -> None:
        """Send the root cause to all ranks."""
        self._cause = cause
        self._broadcast({"cause": json.loads(cause.to_json()), **more})
        self._print_at = time.monotonic() + SECONDS_TO_BECOME_QUIET

    def _advance(self) -> None:
        """Take the next step of the shutdown if its time has come."""
        now = time.monotonic()
        if self._cause is None:
            if now >= self._decide_at and (self._search is None or self._root_cause().is_root_cause):
                self._decide(self._root_cause())
            else:
                self._advance_search()
            return
        if self._print_at != float("inf"):
            others = (peer for rank, peer in self._ranks.items() if rank != self._cause.rank)
            if now >= self._print_at or all(peer.is_quiet for peer in others):
                self._print_at = float("inf")
                self._broadcast({"print": True})
                self._exit_at = 0.0 if self._cause.kind in ("died", "late") else now + SECONDS_TO_PRINT
        elif now >= self._exit_at:
            self._exit_at = float("inf")
            self._broadcast({"exit": True})

    def _root_cause(self) -> Failure:
        """Return the root cause; for a failed collective, with the ranks that have not reported a failure."""
        first, reported = root_cause(self._failures), {failure.rank for failure in self._failures}
        unreported = sorted(self._ranks.keys() - reported)
        return replace(first, unreported=unreported) if first.kind == "collective" else first

    def _broadcast(self, message: dict[str, Any]) -> None:
        """Send a message to all ranks; rank 0 comes last, as its process may exit."""
        for rank in sorted(self._ranks, key=lambda rank: rank == 0):
            with contextlib.suppress(OSError):  # the connection is closed; reading it reports that
                _send(self._ranks[rank].connection, message)


def read_location(line: bytes) -> dict[str, Any]:
    """Return the location in the first message of a rank or of the server. Raises ValueError or RecursionError."""
    message = json_object(parse_json(line, max_bytes=MAX_FIRST_MESSAGE_BYTES), "the message")
    _LOCATION(message.get("location"), "location")
    return {name: message["location"][name] for name in LOCATION}


def _send(connection: socket.socket, message: dict[str, Any]) -> None:
    connection.sendall(json.dumps(message).encode() + b"\n")
