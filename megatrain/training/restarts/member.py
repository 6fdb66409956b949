"""This process as a rank of one generation after another: it joins, trains, leaves when another rank has failed, and joins again.

    join ─> store of the generation, process groups, model, checkpoint ─> training ─> done
     ^                                                                       │ another rank failed (rank watch, rendezvous)
     └── forget groups, free the model <── the main thread fails <── abort collectives, shut connections (in another thread)

What a process keeps is what takes long: imports, the CUDA context, compiled kernels, caches of data. A process whose main thread does not
leave in time ends, and so does one that is the cause itself: its supervisor starts another one.
"""

from __future__ import annotations

import contextlib
import faulthandler
import gc
import json
import os
import queue
import socket
import sys
import threading
import time
import traceback
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any, Final

import torch
import torch.distributed as dist

from megatrain.config import Request
from megatrain.config.environment import LaunchEnvironment, enter_generation, read_environment
from megatrain.config.errors import ConfigError, MegatrainError
from megatrain.parallel.pipeline.executor import Executor
from megatrain.parallel.process_groups import abort_groups, forget_groups
from megatrain.process.signals import Signals
from megatrain.training.liveness.failure import is_final
from megatrain.training.liveness.launcher_watch import RESTARTED
from megatrain.training.liveness.rank_watch import RankWatch
from megatrain.training.liveness.sockets import keep_alive, num_established, open_sockets, shut_connections
from megatrain.training.restarts.launch_bound import LaunchBound, mark_on_gpu
from megatrain.training.restarts.rendezvous import RECORD_NAME

_SECONDS_FOR_VERDICT: Final = 5.0
"""Time for the rank watch to find the root cause of a generation that is broken."""
_SECONDS_TO_LEARN: Final = 30.0
"""Time in which the reason of a failed collective must arrive."""
_SECONDS_TO_CONNECT: Final = 600.0
_SECONDS_BETWEEN_ATTEMPTS: Final = 0.2
_SECONDS_TO_START: Final = timedelta(hours=1)


class Member:
    """Member of the generations of a job.

    Args:
        environment: of the launcher.
        store: the launcher's store, which has the port of the rendezvous; None: the launcher's port is the rendezvous.
    """

    def __init__(self, request: Request, environment: LaunchEnvironment, store: dist.Store | None) -> None:
        self.environment, self._request = environment, request
        port = environment.supervisor or environment.port
        if store is not None:
            if environment.supervisor:
                store.set("rendezvous", str(environment.supervisor))
            port = int(store.get("rendezvous"))
        self._connection = _connect(environment.host, port)
        self._connection.settimeout(None)
        keep_alive(self._connection)
        self._answers: queue.SimpleQueue[dict[str, Any]] = queue.SimpleQueue()
        self._generation, self._has_left = 0, threading.Event()
        self._leaving = threading.Lock()
        self._is_leaving = threading.Event()
        """Set before anything that may wait for a device; `_has_left` afterwards."""
        self._watch: RankWatch | None = None
        self._server: dist.TCPStore | None = None
        self._has_trained = False
        threading.Thread(target=self._listen, name="rendezvous", daemon=True).start()

    def join(self) -> int | None:
        """Wait for the next generation, and become a rank of it; return the exit code if there is none.

        Raises:
            MegatrainError: the job failed.
        """
        if self.environment.rank == 0:  # always rank 0 of the generation
            self._server = dist.TCPStore(
                self.environment.host, 0, is_master=True, wait_for_workers=False, timeout=_SECONDS_TO_START
            )
        request = {
            "id": self.environment.rank,
            "pid": os.getpid(),
            "store_port": 0 if self._server is None else self._server.port,
            "has_trained": self._has_trained,
        }
        self._send({"join": request})
        answer = self._answers.get()
        if "end" in answer:
            end = answer["end"]
            if end["exit_code"] == 1:
                raise MegatrainError(
                    end["reason"],
                    fix="run the same command again; the run continues from its last checkpoint",
                )
            return int(end["exit_code"])
        enter_generation(
            rank=answer["rank"], world_size=answer["world_size"], store_port=answer["store_port"]
        )
        return None

    def close(self) -> None:
        """Leave the job, which has reached its end."""
        self._has_left.set()
        self._send({"done": True})

    def follow(self, watch: RankWatch) -> None:
        """Leave the generation when this watch has found that another rank failed."""
        self._watch, watch.leave_generation = watch, self._leave
        watch.heartbeat.hang_seconds = self._request.known("resilience.inprocess_soft_timeout") or 0.0
        if self._generation > 1 and watch.environment.rank == 0:
            watch.heartbeat.on_trained = self._record_restart

    def bound_launches(self, executor: Executor) -> None:
        """Let the host run ahead of a GPU by a few passes only, so that no launch waits for a rank that is lost."""
        if executor.device.type == "cuda":
            executor.hooks = LaunchBound(executor.hooks, mark_on_gpu, self._is_leaving)

    def _record_restart(self) -> None:
        """Print the time from the failure to the end of the next iteration; record it in --save."""
        seconds = round(time.time() - self._failed_at, 1)
        print(f"> generation {self._generation} trains {seconds} s after the failure", flush=True)
        path = Path(self._request.known("checkpoint.save") or "") / RECORD_NAME
        # The next save reports an error.
        with contextlib.suppress(OSError), path.open("a", encoding="utf-8") as file:
            file.write(json.dumps({"generation": self._generation, "seconds": seconds}) + "\n")

    def rejoins(self, error: BaseException) -> bool:
        """Return whether an error of the main thread is due to another rank."""
        is_own = self._watch is not None and self._watch.is_culprit
        is_unreachable = isinstance(error.__cause__, ConnectionError | TimeoutError | dist.DistError)
        if not is_own and (is_unreachable or not is_final(error)):
            self._has_left.wait(_SECONDS_TO_LEARN)
        return self._has_left.is_set() and not is_own

    def forget_generation(self) -> None:
        """Close what the main thread has left; the model must not be in use."""
        if self._watch is not None:
            self._has_trained = self._watch.heartbeat.has_trained
            self._watch.leave()
        forget_groups()
        self._watch = self._server = None
        gc.collect()
        if torch.cuda.is_initialized():
            torch.cuda.empty_cache()
        self._timer.cancel()

    def _send(self, message: dict[str, Any]) -> None:
        with contextlib.suppress(OSError):  # `_listen` reports that the connection is closed
            self._connection.sendall(json.dumps(message).encode() + b"\n")

    def _listen(self) -> None:
        """Read messages of the rendezvous: main function of a thread."""
        with contextlib.suppress(OSError, ValueError), self._connection.makefile("rb") as lines:
            for line in lines:
                message = json.loads(line)
                if "broken" in message:
                    threading.Thread(target=self._leave_broken, daemon=True).start()
                    continue
                if "generation" in message:
                    self._opened_before = open_sockets()
                    self._generation = message["generation"]
                    self._failed_at = time.time() - message["seconds"]
                    self._has_left.clear()
                    self._is_leaving.clear()
                self._answers.put(message)
        reason = "the rendezvous of the job is gone, with the host of rank 0"
        self._answers.put({"end": {"exit_code": 1, "reason": reason}})

    def _leave_broken(self) -> None:
        """Leave a generation once the rank watch has reported why, or does not report in time."""
        generation = self._generation
        if self._watch is not None:
            self._has_left.wait(_SECONDS_FOR_VERDICT)
        if generation == self._generation:
            self._leave()

    def _leave(self) -> None:
        """Let all waits of this process for other ranks fail; end the process if its main thread does not leave in time."""
        with self._leaving:
            if self._has_left.is_set():
                return
            seconds = self._request.known("resilience.inprocess_hard_timeout") or 0.0
            self._timer = threading.Timer(seconds, self._end_hanging)
            self._timer.daemon = True
            self._timer.start()
            self._is_leaving.set()
            abort_groups()
            shut_connections(opened_before=self._opened_before)
            self._has_left.set()

    def _end_hanging(self) -> None:
        count = num_established(opened_before=self._opened_before)
        text = f"does not leave its generation within --inprocess-hard-timeout, with {count} connections: its process is replaced. Its stacks:"
        print(f"launch rank {self.environment.rank} {text}", file=sys.stderr, flush=True)
        faulthandler.dump_traceback()
        os._exit(RESTARTED)


def _connect(host: str, port: int) -> socket.socket:
    """Connect to the rendezvous, which may start later. Raises MegatrainError."""
    deadline = time.monotonic() + _SECONDS_TO_CONNECT
    while True:
        try:
            return socket.create_connection((host, port), timeout=_SECONDS_TO_CONNECT)
        except OSError as error:
            if time.monotonic() > deadline:
                raise MegatrainError(
                    f"the rendezvous of the job at {host}:{port} cannot be reached: {error}",
                    fix="start the process of rank 0, and allow connections between the hosts of the job on all ports",
                ) from error
            time.sleep(_SECONDS_BETWEEN_ATTEMPTS)


def run_generations(
    request: Request,
    signals: Signals,
    train: Callable[[Member], int],
    join_store: Callable[[LaunchEnvironment], dist.Store],
) -> int:
    """Join the job's rendezvous, and train in one generation after another until one reaches the end; return the exit code.

    Args:
        train: trains as a rank of a generation of this member.
        join_store: connects to the launcher's store.

    Raises:
        ConfigError: the job has fewer processes than active ranks.
    """
    environment = read_environment()
    active = request.known("resilience.inprocess_active_world_size") or environment.world_size
    if active > environment.world_size:
        raise ConfigError(
            f"--inprocess-active-world-size {active} is more than the {environment.world_size} processes of the job",
            fix="start more processes, or lower --inprocess-active-world-size",
        )
    store = join_store(environment) if environment.launcher == "torchrun" else None
    member = Member(request, environment, store)
    while (exit_code := member.join()) is None:
        try:
            exit_code = train(member)
        except BaseException as error:
            if not member.rejoins(error):
                if is_final(error):
                    raise
                traceback.print_exc()
                sys.stdout.flush()
                os._exit(RESTARTED)
            signals.before_exit = lambda _code, _reason: None  # holds the model
        else:
            member.close()
            return exit_code
        member.forget_generation()
    return exit_code
