"""Exits this rank when another rank fails, and reports this rank's failure to the others.

    main thread:   fail(error) ─> report ─> wait ─> this rank is the root cause: print the traceback, exit
    watch thread:  another rank is the root cause ─> one line per host, if needed ─> wait ─> exit
    heartbeat:     no progress ─> report ─> where is each rank? ─> late ranks are the root cause ─> all exit, or are killed

With --inprocess-restart, ranks that are not the root cause leave their generation instead of exiting (`training/restarts/`).
All ranks exit with the exit code of the root cause, whose traceback is printed last, when the others are quiet.
Checkpoints stay valid: a rank that is killed during a save leaves the previous one.
"""

from __future__ import annotations

import contextlib
import json
import math
import os
import random
import signal
import socket
import sys
import threading
import time
import weakref
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, BinaryIO

import torch.distributed as dist

from megatrain.config.environment import LaunchEnvironment
from megatrain.config.errors import MegatrainError
from megatrain.storage.untrusted_json import json_object, parse_json
from megatrain.training.liveness.failure import (
    Failure,
    checked_failure,
    describe_failure,
    process_location,
)
from megatrain.training.liveness.heartbeat import Heartbeat, UnresponsiveRank
from megatrain.training.liveness.launcher_watch import RESTARTED
from megatrain.training.liveness.sockets import keep_alive
from megatrain.training.liveness.watch_server import (
    MAX_FIRST_MESSAGE_BYTES,
    WatchServer,
    read_location,
)

_SECONDS_TO_CONNECT = 120.0
_SECONDS_TO_ANSWER = 5.0
"""A connection without an answer after this time may be one that the kernel of rank 0 has dropped: all ranks connect at once. The
time doubles with each attempt, so that a server that is slow is not asked ever more."""
_SECONDS_FOR_A_RANK = 2e-4
"""Longest time of the server for one connection."""
_MIN_RANKS_TO_SPREAD = 128
"""Connections that each kernel queues."""
_SECONDS_TO_WAIT = 20.0
"""Longest time that a failed rank waits for its turn to print, and that the others wait for its exit."""
_SECONDS_FOR_SERVER = 2.5
"""Time for the server to answer a rank that makes no progress: rank 0 may be stopped, or hold Python's lock."""


@dataclass(frozen=True)
class _Verdict:
    """The root cause, and for late ranks who prints the report and which processes are killed."""

    cause: Failure
    reporters: list[int] = field(default_factory=list)
    silent: list[dict[str, Any]] = field(default_factory=list)
    """Locations of ranks that do not answer."""
    seconds_to_wait: float = _SECONDS_TO_WAIT
    """Longest time before this rank exits. Its main thread may exit after `_SECONDS_TO_WAIT`, too: silent ranks must be killed before."""


class RankWatch:
    """Connection of this rank to the watch server.

    Args:
        environment: rank and host of this process.
        store: store of all ranks, which has the server's port.
        phase: returns the current phase of the start.

    Raises:
        MegatrainError: the server cannot be reached, or the rank runs twice.
    """

    leave_generation: Callable[[], None] | None = None
    """Called, outside the main thread, instead of the exit for a failure that is not final; None: this rank exits."""

    def __init__(
        self, environment: LaunchEnvironment, store: dist.Store, phase: Callable[[], str] = str
    ) -> None:
        self.environment = environment
        self.heartbeat = Heartbeat(phase, self._report_stall)
        self.on_peer_failure: Callable[[Failure], None] = lambda _: None
        """Called, outside the main thread, before this rank exits because another one failed."""
        self.before_exit: Callable[[], None] = lambda: None
        """Called last, outside the main thread, before this rank exits because another one failed."""
        self.on_late_ranks: Callable[[], None] = lambda: None
        """Called, outside the main thread, before this rank exits because a rank makes no progress."""
        self._send_lock = threading.Lock()
        self._is_asked = threading.Event()
        self._server = self._start_server(store) if environment.rank == 0 else None
        self._server_info = json.loads(store.get("watch"))
        self._connection = self._connect()
        self._is_leaving = False
        self._cause: Failure | None = None
        self._may_print = threading.Event()
        self._may_exit = threading.Event()
        os.register_at_fork(after_in_child=partial(_close_in_child, weakref.ref(self)))
        threading.Thread(target=self._listen, name="rank-watch", daemon=True).start()
        self._send({"files": self.heartbeat.files})
        self.heartbeat.start()

    def fail(self, error: BaseException) -> None:
        """Report this rank's failure; return once its error may be printed, if it is the root cause.

        Otherwise the watch thread exits the process with the exit code of the root cause.
        """
        failure, failed_at = describe_failure(error, self.environment), time.time()
        self._send({"failure": asdict(failure)})
        self._may_print.wait(_SECONDS_TO_WAIT)
        if self.leave_generation is not None and not self.is_culprit:
            return
        if self._cause is not None and self._cause.others:
            error.add_note(self._cause.others)
        write_torchrun_error(self.environment, failure, at=failed_at)

    @property
    def is_culprit(self) -> bool:
        """This rank is the root cause."""
        return self._cause is not None and self._cause.rank == self.environment.rank

    def leave(self) -> None:
        """Close the connection: all ranks are done, or exit on their own."""
        if self._is_leaving:
            return
        self._is_leaving = True
        self.heartbeat.close()
        self._send({"leaving": True})
        with contextlib.suppress(OSError):  # the server may have closed it
            self._connection.shutdown(socket.SHUT_RDWR)
        self._connection.close()
        if self._server is not None:
            self._server.close()

    def _start_server(self, store: dist.Store) -> WatchServer:
        server = WatchServer(self.environment)
        server.start()
        store.set("watch", json.dumps({"port": server.port, "files": self.heartbeat.files}))
        return server

    def _connect(self) -> socket.socket:
        """Connect; try again if no answer comes, or if the server is full of unknown peers, which it disconnects."""
        address = (self.environment.host, self._server_info["port"])
        deadline, seconds = time.monotonic() + _SECONDS_TO_CONNECT, _SECONDS_TO_ANSWER
        _sleep_at_most(seconds_to_spread(self.environment.world_size))
        try:
            while time.monotonic() < deadline:
                with (
                    contextlib.suppress(
                        TimeoutError, ConnectionResetError, BrokenPipeError, ValueError, RecursionError
                    ),
                    contextlib.ExitStack() as until_known,
                ):
                    connection = until_known.enter_context(socket.create_connection(address, timeout=seconds))
                    answers = until_known.enter_context(connection.makefile("rb"))
                    self._server_location = self._introduce(connection, answers)
                    until_known.pop_all()
                    connection.settimeout(None)
                    keep_alive(connection)
                    self._messages = answers  # may have read more than the first message
                    return connection
                seconds *= 2
                _sleep_at_most(0.5)  # not all ranks at once again
            raise ConnectionError("no valid answer")
        except OSError as error:
            raise MegatrainError(
                f"rank {self.environment.rank} cannot reach rank 0 at {address[0]}:{address[1]}: {error}",
                fix="allow connections between the hosts of the job on all ports, which collectives need too",
            ) from error

    def _introduce(self, connection: socket.socket, answers: BinaryIO) -> dict[str, Any]:
        """Say which rank this is; return the location of the server."""
        message = {"location": process_location(self.environment)}
        connection.sendall(json.dumps(message).encode() + b"\n")
        line = answers.readline(MAX_FIRST_MESSAGE_BYTES)
        answer = json_object(parse_json(line, max_bytes=MAX_FIRST_MESSAGE_BYTES), "the answer")
        if answer.get("refused"):
            raise MegatrainError(
                f"rank {self.environment.rank} of {self.environment.world_size} runs already: another process has joined with"
                " this number",
                fix="start each rank once: RANK (with srun SLURM_PROCID) must differ between processes",
            )
        return read_location(line)

    def _send(self, message: dict[str, Any]) -> None:
        # The watch thread notices that the server is gone.
        with contextlib.suppress(OSError), self._send_lock:
            self._connection.sendall(json.dumps(message).encode() + b"\n")

    def _listen(self) -> None:
        """Read messages of the server until it closes the connection: main function of the watch thread."""
        with contextlib.suppress(OSError, ValueError, RecursionError), self._messages:
            for line in self._messages:
                message = json_object(json.loads(line), "the message")
                if "leaving" in message:
                    return
                if "cause" in message and self._cause is None:
                    self._cause = checked_failure(message["cause"])
                    verdict = _Verdict(self._cause, message.get("reporters", []), message.get("silent", []))
                    threading.Thread(target=self._exit_with, args=(verdict,), daemon=True).start()
                elif "where" in message:
                    self._is_asked.set()
                    self._send({"position": asdict(self.heartbeat.position())})
                elif "excused" in message:
                    self._is_asked.clear()
                elif "look" in message:
                    threading.Thread(target=self._look, args=(message["look"],), daemon=True).start()
                elif "print" in message:
                    if self.is_culprit:
                        self._may_print.set()
                elif "exit" in message:
                    self._may_exit.set()
        if self._is_leaving:
            return
        self._may_exit.set()
        if self._cause is None:
            self._exit_with(_Verdict(Failure(kind="died", **self._server_location)))

    def _look(self, request: dict[str, Any]) -> None:
        """Look at a process of this host that does not answer, and report where it is."""
        position = UnresponsiveRank(request["pid"], tuple(request["files"])).position()
        self._send({"position": asdict(position), "of": request["rank"]})

    def _report_stall(self, seconds: float) -> None:
        """Report that this rank makes no progress; if the server does not answer, rank 0 is late."""
        self._send({"stalled": seconds})
        if self._is_asked.wait(_SECONDS_FOR_SERVER) or self._is_leaving:
            return
        place, world_size = self._server_location, self.environment.world_size
        summary = f"rank 0 of {world_size} is late: no progress for {seconds:.0f} s; rank 0: "
        where, stack = "does not answer", list[str]()
        if place["host"] == socket.gethostname():
            position = UnresponsiveRank(place["pid"], tuple(self._server_info["files"])).position()
            where, stack = str(position), position.stack
        head = f"  rank 0 on {place['host']} (process {place['pid']}): {where}"
        own = f"  rank {self.environment.rank}: {self.heartbeat.position()}"
        details = "\n".join([head, *(f"      {line}" for line in stack), own])
        self._cause = Failure(kind="late", **place, summary=summary + where, details=details)
        first = self.environment.rank if self.environment.local_rank == 1 else 0
        self._exit_with(_Verdict(self._cause, [first], [place], _SECONDS_FOR_SERVER))

    def _exit_with(self, verdict: _Verdict) -> None:
        """Exit because of another rank's failure, or of late ranks; return if this rank itself reported the failure."""
        cause, rank = verdict.cause, self.environment.rank
        is_late = cause.kind == "late"
        if cause.rank == rank and not is_late:
            return
        sys.stdout.flush()
        if rank in verdict.reporters if is_late else self._prints(cause):
            print(cause.report, file=sys.stderr, flush=True)
        self.on_peer_failure(cause)
        if is_late:
            try:
                self.on_late_ranks()
            except (OSError, ValueError, RuntimeError) as error:
                print(
                    f"rank {rank}: its last collectives are not written: {error}", file=sys.stderr, flush=True
                )
        self._send({"quiet": True})
        self._may_exit.wait(verdict.seconds_to_wait)
        for place in verdict.silent:
            if place["host"] == socket.gethostname() and place["rank"] != rank:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(place["pid"], signal.SIGKILL)
        is_restarted = self.leave_generation is not None and not cause.is_final
        if self.leave_generation is not None and is_restarted and cause.rank != rank:
            self.leave_generation()
            self._may_print.set()
            return
        write_torchrun_error(self.environment, cause, at=math.ceil(time.time()))
        self.before_exit()
        # The main thread is blocked in a collective.
        os._exit(RESTARTED if is_restarted else cause.exit_code)

    def _prints(self, cause: Failure) -> bool:
        """Return True on one rank per host, unless the failed rank is on this host and prints its own error."""
        own = process_location(self.environment)
        is_here = own["host"] == cause.host
        first = 1 if is_here and cause.local_rank == 0 else 0
        return own["local_rank"] == first and not (is_here and cause.kind != "died")

    def close_in_child(self) -> None:
        """Close the connections in a forked process, so that they close with this one."""
        descriptor = self._connection.detach()
        if descriptor >= 0:
            os.close(descriptor)
        if self._server is not None:
            self._server.close_in_child()


def _close_in_child(watch: weakref.ref[RankWatch]) -> None:
    """Close a watch, unless it has ended: a process that outlives its watch must not keep it, nor the model that it knows."""
    alive = watch()
    if alive is not None:
        alive.close_in_child()


def seconds_to_spread(world_size: int) -> float:
    """Return the time over which ranks spread their connections: that of the server to accept them, as a kernel may queue few."""
    return 0.0 if world_size < _MIN_RANKS_TO_SPREAD else world_size * _SECONDS_FOR_A_RANK


def _sleep_at_most(seconds: float) -> None:
    time.sleep(random.uniform(0.0, seconds))  # noqa: S311 (not a secret)


def write_torchrun_error(environment: LaunchEnvironment, failure: Failure, *, at: float) -> None:
    """Write the error file that torchrun shows in its summary; the failure with the smallest timestamp is its root cause."""
    if environment.error_file is not None:
        extra = {"py_callstack": f"{failure} (see above)", "timestamp": str(int(at))}
        content = {"message": {"message": str(failure), "extraInfo": extra}}
        Path(environment.error_file).write_text(json.dumps(content), encoding="utf-8")
