"""Ends this rank when another one has ended, and lets the others know when this one fails.

    main thread:   fail(error) ─> report ─> wait ─> this rank's was the first: print the traceback, end
    watch thread:  verdict: another rank's ─> one line, where nobody on this host says it better ─> wait ─> end

All ranks end with the culprit's exit code. Its traceback is printed when the others are silent, so that it is last.
What is written to disk is safe: whoever is killed in the middle of a checkpoint leaves the one before.
"""

from __future__ import annotations

import contextlib
import json
import math
import os
import secrets
import socket
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch.distributed as dist

from megatrain.config.environment import LaunchEnvironment
from megatrain.config.errors import MegatrainError
from megatrain.training.launch.failure import Failure, describe_failure, place_of
from megatrain.training.launch.watch_server import WatchServer, keep_alive

_SECONDS_TO_CONNECT = 60.0
_SECONDS_TO_BE_ENDED = 20.0
"""Longest that a failed rank waits for the others, and that another waits for the culprit's end."""


class RankWatch:
    """This rank's connection to the watch server.

    Args:
        environment: this rank among the others.
        store: all ranks' store, for the server's port and token.

    Raises:
        MegatrainError: the server cannot be reached.
    """

    def __init__(self, environment: LaunchEnvironment, store: dist.Store) -> None:
        self.environment = environment
        self.before_end: Callable[[Failure], None] = lambda _: None
        """Called when another rank's failure ends this one, from another thread than the main one."""
        self._server = self._serve(store) if environment.rank == 0 else None
        self._told = json.loads(store.get("watch"))
        self._connection = self._connect()
        self._is_leaving = False
        self._verdict: Failure | None = None
        self._may_speak = threading.Event()
        self._may_end = threading.Event()
        self._send({"token": self._told["token"], "place": place_of(environment)})
        os.register_at_fork(after_in_child=self._close_in_child)
        threading.Thread(target=self._listen, name="rank-watch", daemon=True).start()

    def fail(self, error: BaseException) -> None:
        """Report this rank's end. Returns where it is the reason of all, and may be printed now.

        Otherwise the watch thread ends the process, with the exit code of the rank whose end it was.
        """
        failure, failed_at = describe_failure(error, self.environment), time.time()
        self._send({"failure": asdict(failure)})
        self._may_speak.wait(_SECONDS_TO_BE_ENDED)
        if self._verdict is not None and self._verdict.others:
            error.add_note(self._verdict.others)
        leave_for_torchrun(self.environment, failure, at=failed_at)

    def leave(self) -> None:
        """End the watch: all ranks are done, or end by themselves."""
        self._is_leaving = True
        self._send({"leaving": True})
        with contextlib.suppress(OSError):  # the server may have closed it
            self._connection.shutdown(socket.SHUT_RDWR)
        self._connection.close()
        if self._server is not None:
            self._server.close()

    def _serve(self, store: dist.Store) -> WatchServer:
        server = WatchServer(secrets.token_hex(16))
        server.start()
        place = place_of(self.environment)
        store.set("watch", json.dumps({"port": server.port, "token": server.token, "place": place}))
        return server

    def _connect(self) -> socket.socket:
        where = (self.environment.host, self._told["port"])
        try:
            connection = socket.create_connection(where, timeout=_SECONDS_TO_CONNECT)
        except OSError as error:
            raise MegatrainError(
                f"rank {self.environment.rank} cannot reach rank 0 at {where[0]}:{where[1]}: {error}",
                fix="let the hosts of the job reach each other on all ports, as collectives need too",
            ) from error
        connection.settimeout(None)
        keep_alive(connection)
        return connection

    def _send(self, message: dict[str, Any]) -> None:
        with contextlib.suppress(OSError):  # the server is gone, which the watch thread sees and acts on
            self._connection.sendall(json.dumps(message).encode() + b"\n")

    def _listen(self) -> None:
        """The watch thread's life."""
        with contextlib.suppress(OSError):
            for line in self._connection.makefile("rb"):
                message = json.loads(line)
                if "leaving" in message:
                    return
                if "verdict" in message:
                    self._verdict = Failure(**message["verdict"])
                    threading.Thread(target=self._follow, args=(self._verdict,), daemon=True).start()
                elif "speak" in message:
                    self._may_speak_of(self._verdict)
                elif "end" in message:
                    self._may_end.set()
        if self._is_leaving:
            return
        self._may_end.set()
        if self._verdict is None:
            self._follow(Failure(kind="vanished", **self._told["place"]))

    def _may_speak_of(self, verdict: Failure | None) -> None:
        if verdict is not None and verdict.rank == self.environment.rank:
            self._may_speak.set()

    def _follow(self, verdict: Failure) -> None:
        """Another rank's end is this one's."""
        if verdict.rank == self.environment.rank:
            return
        sys.stdout.flush()
        if self._tells(verdict):
            print(verdict, file=sys.stderr, flush=True)
        self.before_end(verdict)
        self._send({"quiet": True})
        self._may_end.wait(_SECONDS_TO_BE_ENDED)
        leave_for_torchrun(self.environment, verdict, at=math.ceil(time.time()))
        os._exit(verdict.exit_code)  # the main thread waits in a collective that will not end

    def _tells(self, verdict: Failure) -> bool:
        """One rank of each host says what happened, unless the culprit itself does on that host."""
        own = place_of(self.environment)
        is_here = own["host"] == verdict.host
        first = 1 if is_here and verdict.local_rank == 0 else 0
        return own["local_rank"] == first and not (is_here and verdict.kind != "vanished")

    def _close_in_child(self) -> None:
        descriptor = self._connection.detach()
        if descriptor >= 0:
            os.close(descriptor)
        if self._server is not None:
            self._server.close_in_child()


def leave_for_torchrun(environment: LaunchEnvironment, failure: Failure, *, at: float) -> None:
    """What torchrun shows at its end about this rank. It takes the least whole second for the root cause."""
    if environment.error_file is not None:
        extra = {"py_callstack": f"{failure} (see above)", "timestamp": str(int(at))}
        content = {"message": {"message": str(failure), "extraInfo": extra}}
        Path(environment.error_file).write_text(json.dumps(content), encoding="utf-8")
