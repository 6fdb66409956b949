"""Rendezvous of generations: a thread of the job's first supervisor, connected to every process of the job.

    a process joins: started, or left a broken generation ─> it waits ─┐
    a rank's connection closes, or it joins again ─> generation n is broken: all its ranks leave it
                                                                       └─> all ranks of the next one wait ─> generation n + 1

A process that stays keeps its rank. A rank that is lost goes to the process that its supervisor starts in its place, or, if its host is
lost too, to a spare process: one with a launch rank that no generation has. Rank 0 is always the launch rank 0, whose process has the store of
the generation; the job ends with the host of that rank. This module does not import torch.
"""

from __future__ import annotations

import contextlib
import json
import selectors
import socket
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Final

from megatrain.config.environment import LaunchEnvironment
from megatrain.storage.untrusted_json import flag, integer, json_object, parse_json, record
from megatrain.training.liveness.sockets import BACKLOG, keep_alive, listen

MAX_MESSAGE_BYTES: Final = 4096
RECORD_NAME: Final = "restarts.jsonl"
"""File in --save that has the time of each restart."""
MAX_FRUITLESS: Final = 3
"""Generations in a row without a trained iteration, after which the job ends: an error that repeats itself."""
_SECONDS_BETWEEN_STEPS: Final = 0.1
_JOIN: Final = record(
    {"id": integer(), "pid": integer(), "store_port": integer(0, 65535), "has_trained": flag}
)


@dataclass(frozen=True, kw_only=True)
class RestartLimits:
    """Limits of the restarts of a job."""

    num_ranks: int
    """Ranks of a generation; the other processes are spares."""
    seconds_to_leave: float
    """Longest time of a process to leave a broken generation: --inprocess-hard-timeout."""
    seconds_to_join: float
    """Longest time from the failure to the next generation: --inprocess-barrier-timeout."""
    most_restarts: int | None = None


@dataclass(eq=False)
class _Process:
    """The connection of a process of the job, or of an unknown program."""

    connection: socket.socket
    host: str
    received: bytes = b""
    joined: dict[str, Any] | None = None
    """Its last request to join; None: an unknown program."""
    waits: bool = False


class Rendezvous:
    """Forms generations of processes, which connect to `port`.

    Args:
        say: prints a line.
    """

    def __init__(
        self, environment: LaunchEnvironment, limits: RestartLimits, say: Callable[[str], None]
    ) -> None:
        has_own_port = environment.launcher not in (None, "torchrun")  # torchrun's store uses it
        self._listener = listen(environment, environment.port if has_own_port else 0)
        self._listener.setblocking(False)
        self.port: int = self._listener.getsockname()[1]
        self._limits, self._say = limits, say
        self._selector = selectors.DefaultSelector()
        self._selector.register(self._listener, selectors.EVENT_READ)
        self._unknown: dict[_Process, None] = {}
        self._processes: dict[int, _Process] = {}
        """By launch rank."""
        self._roster = list(range(limits.num_ranks))
        """Launch ranks by rank of the last generation."""
        self._hosts: dict[int, str] = {}
        self._pids: dict[int, int] = {}
        """Of the last generation, by launch rank."""
        self._generation, self._fruitless = 0, 0
        self._is_running, self._broken_at = False, time.monotonic()
        self._is_done = False
        """The last generation has reached the end: its processes end."""
        self._end: dict[str, Any] | None = None
        self._thread = threading.Thread(target=self._serve, name="rendezvous", daemon=True)
        self._thread.start()

    def end(self, exit_code: int) -> None:
        """Let the processes that wait end with this exit code, and all later ones."""
        self._end = self._end or {"exit_code": exit_code, "reason": "the job has ended"}
        self._thread.join()

    def _serve(self) -> None:
        while self._end is None:
            for key, _ in self._selector.select(_SECONDS_BETWEEN_STEPS):
                if key.data is None:
                    self._accept()
                else:
                    self._receive(key.data)
            if not self._is_running and not self._is_done:
                self._advance()
        for process in self._processes.values():
            if process.waits:
                _send(process, {"end": self._end})
        for process in (*self._unknown, *self._processes.values()):
            process.connection.close()
        self._listener.close()
        self._selector.close()

    def _accept(self) -> None:
        for _ in range(BACKLOG):
            try:
                connection, address = self._listener.accept()
            except OSError:
                return
            connection.settimeout(1.0)
            keep_alive(connection)
            process = _Process(connection, address[0])
            self._unknown[process] = None
            while len(self._unknown) > BACKLOG:
                self._disconnect(next(iter(self._unknown)))
            self._selector.register(connection, selectors.EVENT_READ, process)

    def _receive(self, process: _Process) -> None:
        try:
            chunk = process.connection.recv(MAX_MESSAGE_BYTES)
            *lines, process.received = (process.received + chunk).split(b"\n")
            for line in lines:
                self._join(process, json_object(parse_json(line, max_bytes=MAX_MESSAGE_BYTES), "the message"))
            is_over = not chunk or len(process.received) > MAX_MESSAGE_BYTES
        except (OSError, ValueError, RecursionError):
            is_over = True
        if is_over:
            self._disconnect(process)

    def _join(self, process: _Process, message: dict[str, Any]) -> None:
        """Let a process wait for the next generation. Raises ValueError: the message is not valid, or the process runs twice."""
        if "join" not in message:
            self._is_done = self._is_done or (process.joined is not None and "done" in message)
            return
        message = message["join"]
        _JOIN(message, "the message")
        number = message["id"]
        former = self._processes.get(number)
        if former is not None and former is not process:
            if former.joined is None or former.joined["pid"] == message["pid"]:
                raise ValueError("this rank has joined already")
            self._disconnect(
                former
            )  # its supervisor has started this one: the kernel has not reported the end yet
        self._unknown.pop(process, None)
        self._processes[number], process.joined, process.waits = process, message, True
        if number in self._roster and self._is_running:
            self._break()

    def _disconnect(self, process: _Process) -> None:
        with contextlib.suppress(KeyError):
            self._selector.unregister(process.connection)
        process.connection.close()
        self._unknown.pop(process, None)
        if process.joined is None or self._processes.get(process.joined["id"]) is not process:
            return
        del self._processes[process.joined["id"]]
        if process.joined["id"] in self._roster and self._is_running:
            self._break()

    def _break(self) -> None:
        """Let all ranks leave the generation."""
        self._is_running, self._broken_at = False, time.monotonic()
        for number in self._roster:
            process = self._processes.get(number)
            if process is not None and not process.waits:
                _send(process, {"broken": self._generation})

    def _advance(self) -> None:
        """Form the next generation if its processes wait; end the job if they cannot."""
        seconds = time.monotonic() - self._broken_at
        leaving = [
            process
            for number, process in self._processes.items()
            if number in self._roster and not process.waits
        ]
        if leaving and seconds < 2 * self._limits.seconds_to_leave:
            return
        for process in leaving:  # stopped, and no other process of its host has killed it
            self._disconnect(process)
        roster = self._next_roster(seconds)
        if roster is not None:
            self._form(roster, seconds)
        elif self._generation and seconds > self._limits.seconds_to_join:
            lost = [rank for rank, number in enumerate(self._roster) if number not in self._processes]
            self._fail(f"ranks {lost} did not come back within {seconds:.0f} s, and no spare process is left")

    def _next_roster(self, seconds: float) -> list[int] | None:
        """Return the launch ranks of the next generation by rank; None: one is still missing."""
        spares = sorted(self._processes.keys() - set(self._roster))
        hosts = {process.host for process in self._processes.values()}
        roster = list(self._roster)
        for rank, number in enumerate(roster):
            if number in self._processes:
                continue
            is_coming = not self._generation or self._hosts[number] in hosts
            if rank == 0 or not spares or (is_coming and seconds < self._limits.seconds_to_join / 2):
                return None
            roster[rank] = spares.pop(0)
        return roster

    def _form(self, roster: list[int], seconds: float) -> None:
        """Begin the next generation, or end the job if the last ones were in vain."""
        joined = {number: self._processes[number].joined or {} for number in roster}
        has_trained = any(one["has_trained"] for one in joined.values())
        self._fruitless = 0 if has_trained or not self._generation else self._fruitless + 1
        most = self._limits.most_restarts
        if self._fruitless >= MAX_FRUITLESS:
            self._fail(f"{MAX_FRUITLESS} generations in a row failed before an iteration")
            return
        if most is not None and self._generation > most:
            self._fail(f"--inprocess-max-iterations {most}: as many restarts have failed")
            return
        self._generation += 1
        if self._generation > 1:
            new = [
                rank for rank, number in enumerate(roster) if self._pids.get(number) != joined[number]["pid"]
            ]
            self._say(
                f"> generation {self._generation}, {seconds:.1f} s after the failure: {len(roster) - len(new)} processes stayed,"
                f" new are ranks {new} (launch ranks {[roster[rank] for rank in new]})"
            )
        self._roster, self._is_running = roster, True
        self._pids = {number: one["pid"] for number, one in joined.items()}
        self._hosts = {number: self._processes[number].host for number in roster}
        message = {
            "generation": self._generation,
            "world_size": len(roster),
            "store_port": joined[roster[0]]["store_port"],
            "seconds": round(seconds, 3),
        }
        for rank, number in enumerate(roster):
            self._processes[number].waits = False
            _send(self._processes[number], {**message, "rank": rank})

    def _fail(self, reason: str) -> None:
        self._say(f"> no other generation: {reason}")
        self._end = {"exit_code": 1, "reason": reason}


def _send(process: _Process, message: dict[str, Any]) -> None:
    with contextlib.suppress(OSError):  # the connection is closed; reading it reports that
        process.connection.sendall(json.dumps(message).encode() + b"\n")
