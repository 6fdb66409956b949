"""A rank that cannot connect to rank 0, and the end of rank 0's server."""

import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
import types

import pytest
import torch.distributed as dist

from megatrain.config.environment import LaunchEnvironment
from megatrain.config.errors import MegatrainError
from megatrain.training.liveness import rank_watch
from megatrain.training.liveness.failure import describe_failure
from megatrain.training.liveness.heartbeat import UnresponsiveRank
from megatrain.training.liveness.position import Position
from megatrain.training.liveness.rank_watch import RankWatch
from megatrain.training.liveness.watch_server import WatchServer


@pytest.fixture
def orphaned_store() -> dist.Store:
    """Store of the ranks after rank 0 has exited: no process listens at its port."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
    store = dist.HashStore()
    store.set("watch", json.dumps({"port": port, "key": "00"}))
    return store


@pytest.mark.parametrize(
    ("error", "kind"),
    [
        (RuntimeError("[../gloo/transport/tcp/pair.cc:547] Connection closed by peer"), "collective"),
        (RuntimeError("Application timeout caused pair closure"), "collective"),
        (RuntimeError("NCCL communicator was aborted"), "collective"),
        (RuntimeError("CUDA out of memory"), "error"),
    ],
    ids=lambda value: str(value)[:20],
)
def test_a_failed_collective_is_no_root_cause(error: Exception, kind: str) -> None:
    assert describe_failure(error, LaunchEnvironment(rank=1, world_size=2)).kind == kind


def test_a_rank_that_cannot_connect_names_the_address(orphaned_store) -> None:
    with pytest.raises(MegatrainError, match=r"rank 1 cannot reach rank 0 at 127\.0\.0\.1:\d+") as caught:
        RankWatch(LaunchEnvironment(rank=1, world_size=2), orphaned_store)
    assert not caught.value.is_reported


def test_a_server_that_a_message_stops_is_closed() -> None:
    """Another rank disconnects between the order to close and the byte that wakes the thread."""
    server = WatchServer(LaunchEnvironment(world_size=2))
    server.start()
    waker = server._waker

    class Late:
        close = waker.close

        def send(self, byte: bytes) -> None:
            with socket.create_connection(("127.0.0.1", server.port)):
                server._thread.join(10)
            assert not server._thread.is_alive()
            waker.send(byte)

    server._waker = Late()
    server.close()
    assert waker.fileno() == -1


def test_a_stopped_rank_0_is_killed_before_the_others_exit(monkeypatch: pytest.MonkeyPatch) -> None:
    """A look at rank 0 makes it continue for a moment, in which it may ask for positions: that is no answer."""
    monkeypatch.setattr(rank_watch, "_SECONDS_FOR_SERVER", 0.05)
    monkeypatch.setattr(os, "_exit", lambda code: None)
    stopped = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])
    stopped.send_signal(signal.SIGSTOP)
    watch = RankWatch.__new__(RankWatch)
    watch.environment = LaunchEnvironment(rank=1, world_size=2, local_rank=1)
    watch._is_asked, watch._may_exit = threading.Event(), threading.Event()
    watch._is_leaving, watch._server_info = False, {"files": [0, 1]}
    watch._server_location = {
        "rank": 0,
        "local_rank": 0,
        "host": socket.gethostname(),
        "pid": stopped.pid,
        "world_size": 2,
    }
    watch._send = lambda _message: None
    watch.on_peer_failure = watch.on_late_ranks = watch.before_exit = lambda *_: None
    position = Position(iteration=3, phase="step", is_waiting=False, stack=[])
    watch.heartbeat = types.SimpleNamespace(position=lambda: position)
    monkeypatch.setattr(UnresponsiveRank, "position", lambda _self: watch._is_asked.set() or position)
    try:
        start = time.monotonic()
        watch._report_stall(3.0)
        assert stopped.wait(5) == -signal.SIGKILL
        assert time.monotonic() - start < rank_watch._SECONDS_TO_WAIT / 2
    finally:
        stopped.kill()
        stopped.wait()
