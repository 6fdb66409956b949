"""Many ranks connect to the watch server at once: each costs the same, however many there are, and none is lost."""

import contextlib
import json
import resource
import socket
import sys
import threading
from collections.abc import Callable, Iterator
from types import FrameType
from typing import Any

import pytest
import torch.distributed as dist

from megatrain.config.environment import LaunchEnvironment
from megatrain.config.errors import ConfigError
from megatrain.training.launch.ranks import check_launch
from megatrain.training.liveness import rank_watch, watch_server
from megatrain.training.liveness.rank_watch import RankWatch
from megatrain.training.liveness.watch_server import WatchServer
from megatrain.training.logging.console import Console


def count_operations(work: Callable[[], object]) -> int:
    """Return the number of bytecodes that this thread executes in `work`, which C functions do not add to."""
    count = 0

    def trace(frame: FrameType, event: str, _: Any) -> Any:
        nonlocal count
        frame.f_trace_lines, frame.f_trace_opcodes = False, True
        count += event == "opcode"
        return trace

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        work()
    finally:
        sys.settrace(before)
    return count


def location(rank: int, size: int, *, pid: int | None = None) -> bytes:
    place = {"rank": rank, "world_size": size, "local_rank": 0, "host": f"host{rank}", "pid": pid or rank + 1}
    return json.dumps({"location": place}).encode() + b"\n"


def operations_of_a_start(size: int) -> int:
    """Return the operations of the server until all ranks have joined, which connected at once."""
    server = WatchServer(LaunchEnvironment(world_size=size, local_world_size=size))

    def serve() -> None:
        while sum(peer.has_joined for peer in server._ranks.values()) < size:
            server._serve_once()

    with contextlib.ExitStack() as connections:
        for rank in range(size):
            peer = connections.enter_context(socket.create_connection(("127.0.0.1", server.port)))
            peer.sendall(location(rank, size) + b'{"files": []}\n')
        count = count_operations(serve)
        server.start()
        server.close()
    return count


def test_a_start_costs_the_same_for_each_rank() -> None:
    few, many = operations_of_a_start(50), operations_of_a_start(200)
    assert many < 4.4 * few


def test_hundreds_of_ranks_connect_at_once() -> None:
    """More than the kernel queues and the server accepts in a turn; the server's thread has this process's lock only in part."""
    size = 600
    server = WatchServer(LaunchEnvironment(world_size=size, local_world_size=size))
    server.start()
    with contextlib.ExitStack() as connections:
        peers = [
            connections.enter_context(socket.create_connection(("127.0.0.1", server.port), timeout=20))
            for _ in range(size)
        ]
        for rank, peer in enumerate(peers):
            peer.sendall(location(rank, size))
        answers = [connections.enter_context(peer.makefile("rb")) for peer in peers]
        assert all(json.loads(answer.readline())["location"]["rank"] == 0 for answer in answers)
        for peer in peers:
            peer.sendall(b'{"files": []}\n')
        peers[1].sendall(b'{"stalled": 1}\n')
        assert all(json.loads(answer.readline()) == {"where": True} for answer in answers)
        server.close()


def test_a_rank_without_an_answer_connects_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """The kernel drops a connection that its queue has no place for; the first two are not read here."""
    monkeypatch.setattr(rank_watch, "_SECONDS_TO_ANSWER", 0.1)
    store = dist.HashStore()
    watch = RankWatch(LaunchEnvironment(world_size=2, local_world_size=2), store)
    server_port = json.loads(store.get("watch"))["port"]
    with socket.create_server(("127.0.0.1", 0)) as deaf:
        store.set("watch", json.dumps({"port": deaf.getsockname()[1], "files": []}))

        def forward() -> None:
            silent = [deaf.accept()[0] for _ in range(2)]
            heard, _ = deaf.accept()
            with heard, socket.create_connection(("127.0.0.1", server_port)) as server:
                server.sendall(heard.recv(4096))
                heard.sendall(server.recv(4096))
                while message := heard.recv(4096):
                    server.sendall(message)
            for connection in silent:
                connection.close()

        thread = threading.Thread(target=forward)
        thread.start()
        RankWatch(LaunchEnvironment(rank=1, world_size=2), store).leave()
        thread.join(10)
        assert not thread.is_alive()
    watch.leave()


def test_ranks_spread_their_first_connections(monkeypatch: pytest.MonkeyPatch) -> None:
    """The queue of a kernel may hold 128: no rank is dropped if they come as fast as the server accepts them."""
    waits: list[float] = []
    monkeypatch.setattr(rank_watch, "_sleep_at_most", waits.append)
    for size in (8, 16384):
        RankWatch(LaunchEnvironment(world_size=size, local_world_size=size), dist.HashStore()).leave()
    assert waits[0] == 0
    assert 1 < waits[1] < 10


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch) -> Iterator[WatchServer]:
    monkeypatch.setattr(watch_server, "SECONDS_TO_INTRODUCE", 0.5)
    server = WatchServer(LaunchEnvironment(world_size=2, local_world_size=2))
    server.start()
    yield server
    server.close()


def introduced(server: WatchServer, rank: int) -> socket.socket:
    """Return a connection of a rank that has its answer."""
    peer = socket.create_connection(("127.0.0.1", server.port), timeout=10)
    peer.sendall(location(rank, 2))
    assert b"location" in peer.recv(4096)
    return peer


def test_a_connection_that_closes_before_the_rank_has_joined_is_no_death(server: WatchServer) -> None:
    """The same process comes again, before or after the server sees that it left."""
    with introduced(server, 0) as rank_0, introduced(server, 1) as first, introduced(server, 1) as second:
        assert first.recv(1) == b""
        second.close()
        with introduced(server, 1) as third:
            third.sendall(b'{"files": []}\n')
            rank_0.settimeout(1.0)
            with pytest.raises(TimeoutError):
                rank_0.recv(1)


def test_a_rank_that_does_not_come_again_is_dead(server: WatchServer) -> None:
    with introduced(server, 0) as rank_0:
        introduced(server, 1).close()
        cause = json.loads(rank_0.recv(4096))["cause"]
        assert (cause["kind"], cause["rank"]) == ("died", 1)


def test_rank_0_refuses_a_limit_of_files_below_its_connections(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(resource, "getrlimit", lambda _: (4096, 4096))
    check_launch(LaunchEnvironment(world_size=1024), Console(is_quiet=True))
    check_launch(LaunchEnvironment(rank=1, world_size=16384), Console(is_quiet=True))
    with pytest.raises(
        ConfigError, match=r"may open 4,096 files.*need 49,664(?s:.)*fix: run `ulimit -n 49664`"
    ):
        check_launch(LaunchEnvironment(world_size=16384), Console(is_quiet=True))
