"""Rendezvous of generations: a thread of the job's first supervisor, connected to every process of the job.

    a process joins: started, or left a broken generation ─> it waits ─┐
    a rank's connection closes, or it joins again ─> generation n is broken: all its ranks leave it
                                                                       └─> all ranks of the next one wait ─> generation n + 1

A process that stays keeps its rank. A rank that is lost goes to the process that its supervisor starts in its place, or, if its host is
lost too, to a spare process: one with a launch rank that no generation has. Rank 0 is always the launch rank 0, whose process has the store of
the generation; the job ends with the host of that rank. This module does not import torch.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
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


@dataclass(eq=False)
class _Process:
    """The connection of a process of the job."""

    writer: asyncio.StreamWriter
    host: str
    joined: dict[str, Any] = field(default_factory=dict)
    """Its last request to join; empty: an unknown program."""
    waits: bool = False

    def send(self, message: dict[str, Any]) -> None:
        self.writer.write(json.dumps(message).encode() + b"\n")


class Rendezvous:
    """Forms generations of processes, which connect to `port`.

    Args:
        environment: of the launcher.
        known: returns the value of a setting by its path; None: it is not set.
        say: prints a line.
    """

    def __init__(
        self, environment: LaunchEnvironment, known: Callable[[str], Any], say: Callable[[str], None]
    ) -> None:
        has_own_port = environment.launcher not in (None, "torchrun")  # torchrun's store uses it
        self._listener = listen(environment, environment.port if has_own_port else 0)
        self.port: int = self._listener.getsockname()[1]
        self._say, self._most_restarts = say, known("resilience.inprocess_max_iterations")
        self._seconds_to_leave: float = known("resilience.inprocess_hard_timeout")
        self._seconds_to_join: float = known("resilience.inprocess_barrier_timeout")
        self._connections = dict[_Process, asyncio.Task[Any] | None]()
        self._processes: dict[int, _Process] = {}
        """By launch rank."""
        self._roster = list(range(known("resilience.inprocess_active_world_size") or environment.world_size))
        """Launch ranks by rank of the last generation."""
        self._hosts: dict[int, str] = {}
        self._pids: dict[int, int] = {}
        """Process ids in the last generation, by launch rank, as the hosts."""
        self._generation, self._fruitless = 0, 0
        self._is_running, self._broken_at = False, time.monotonic()
        self._is_done = False
        """The last generation has reached the end: its processes end."""
        self._end: dict[str, Any] | None = None
        self._thread = threading.Thread(
            target=lambda: asyncio.run(self._serve()), name="rendezvous", daemon=True
        )
        self._thread.start()

    def end(self, exit_code: int) -> None:
        """Let the processes that wait end with this exit code."""
        self._end = self._end or {"exit_code": exit_code, "reason": "the job has ended"}
        self._thread.join()

    async def _serve(self) -> None:
        server = await asyncio.start_server(
            self._serve_process, sock=self._listener, backlog=BACKLOG, limit=MAX_MESSAGE_BYTES
        )
        while self._end is None:
            await asyncio.sleep(_SECONDS_BETWEEN_STEPS)
            if not self._is_running and not self._is_done:
                self._advance()
        server.close()
        for process in self._connections:
            if process.waits:
                process.send({"end": self._end})
            process.writer.close()
        await asyncio.gather(*filter(None, self._connections.values()))

    async def _serve_process(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Act on the messages of one connection until it closes."""
        keep_alive(writer.get_extra_info("socket"))
        process = _Process(writer, writer.get_extra_info("peername")[0])
        self._connections[process] = asyncio.current_task()
        with contextlib.suppress(OSError, ValueError, RecursionError):  # it is gone, or no process of the job
            while line := await reader.readline():
                self._act_on(
                    process, json_object(parse_json(line, max_bytes=MAX_MESSAGE_BYTES), "the message")
                )
        self._lose(process)
        del self._connections[process]

    def _act_on(self, process: _Process, message: dict[str, Any]) -> None:
        """Let a process wait for the next generation. Raises ValueError: the message is not valid, or the process runs twice."""
        if "join" not in message:
            self._is_done = self._is_done or ("done" in message and bool(process.joined))
            return
        request = message["join"]
        _JOIN(request, "the request")
        former = self._processes.get(request["id"], process)
        if former is not process:
            if former.joined["pid"] == request["pid"]:
                raise ValueError("this rank has joined already")
            self._lose(former)  # its supervisor has started this one: the kernel has not reported the end yet
        self._processes[request["id"]], process.joined, process.waits = process, request, True
        self._break_if(request["id"])

    def _lose(self, process: _Process) -> None:
        process.writer.close()
        number = process.joined.get("id")
        if number is not None and self._processes.get(number) is process:
            del self._processes[number]
            self._break_if(number)

    def _break_if(self, number: int) -> None:
        """Let all ranks leave the generation if this process is one of them."""
        if number not in self._roster or not self._is_running:
            return
        self._is_running, self._broken_at = False, time.monotonic()
        for process in (self._processes[one] for one in self._roster if one in self._processes):
            if not process.waits:
                process.send({"broken": self._generation})

    def _advance(self) -> None:
        """Form the next generation if its processes wait; end the job if they cannot."""
        seconds = time.monotonic() - self._broken_at
        members = [self._processes[number] for number in self._roster if number in self._processes]
        leaving = [process for process in members if not process.waits]
        if leaving and seconds < 2 * self._seconds_to_leave:
            return
        for process in leaving:  # stopped, and no other process of its host has killed it
            self._lose(process)
        roster = self._next_roster(seconds)
        if roster is not None:
            self._form(roster, seconds)
        elif self._generation and seconds > self._seconds_to_join:
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
            if rank == 0 or not spares or (is_coming and seconds < self._seconds_to_join / 2):
                return None
            roster[rank] = spares.pop(0)
        return roster

    def _form(self, roster: list[int], seconds: float) -> None:
        """Begin the next generation, or end the job if the last ones were in vain."""
        joined = {number: self._processes[number].joined for number in roster}
        has_trained = any(one["has_trained"] for one in joined.values())
        self._fruitless = 0 if has_trained or not self._generation else self._fruitless + 1
        if self._fruitless >= MAX_FRUITLESS:
            self._fail(f"{MAX_FRUITLESS} generations in a row failed before an iteration")
            return
        if self._most_restarts is not None and self._generation > self._most_restarts:
            self._fail(f"--inprocess-max-iterations {self._most_restarts}: as many restarts have failed")
            return
        self._generation += 1
        if self._generation > 1:
            new = [
                rank for rank, number in enumerate(roster) if self._pids.get(number) != joined[number]["pid"]
            ]
            stayed = len(roster) - len(new)
            self._say(
                f"> generation {self._generation}, {seconds:.1f} s after the failure: {stayed} process{'es' * (stayed != 1)} stayed,"
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
            self._processes[number].send({**message, "rank": rank})

    def _fail(self, reason: str) -> None:
        self._say(f"> no other generation: {reason}")
        self._end = {"exit_code": 1, "reason": reason}
