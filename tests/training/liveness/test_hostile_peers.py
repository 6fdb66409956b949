"""Programs that are no ranks, at the port of the watch server: they cannot stop it, block it, steer it or listen."""

import contextlib
import json
import socket
import time
from collections.abc import Iterator
from dataclasses import asdict

import pytest
import torch.distributed as dist
from hostile_messages import hostile_messages, send_and_leave

from megatrain.config.environment import LaunchEnvironment
from megatrain.config.errors import MegatrainError
from megatrain.training.liveness import watch_server
from megatrain.training.liveness.failure import Failure, checked_failure, exit_code_of
from megatrain.training.liveness.rank_watch import RankWatch
from megatrain.training.liveness.watch_server import WatchServer

LOCATION = {"rank": 1, "world_size": 2, "local_rank": 1, "host": "here", "pid": 5}
FAILURE = Failure(kind="error", **LOCATION)


@pytest.fixture
def server() -> Iterator[WatchServer]:
    server = WatchServer(LaunchEnvironment(world_size=2, local_world_size=2))
    server.start()
    yield server
    assert server._thread.is_alive()
    server.close()


def stranger(server: WatchServer) -> socket.socket:
    return socket.create_connection(("127.0.0.1", server.port), timeout=10)


class Peer:
    """A program that speaks the protocol."""

    def __init__(self, server: WatchServer, **location: object) -> None:
        self.connection = stranger(server)
        self.lines = self.connection.makefile("rb")
        self.send({"location": {**LOCATION, **location}})
        self.answer = self.receive()

    def __del__(self) -> None:
        self.lines.close()
        self.connection.close()

    def send(self, message: object) -> None:
        self.connection.sendall(json.dumps(message).encode() + b"\n")

    def receive(self) -> dict[str, object]:
        line = self.lines.readline()
        return json.loads(line) if line else {}


def assert_serves(server: WatchServer) -> None:
    peer = Peer(server)
    assert peer.answer["location"]["rank"] == 0
    peer.send({"leaving": True})
    assert peer.receive() == {}


@pytest.mark.parametrize(
    "message",
    [
        b"[" * 60_000 + b"\n",
        b"[" * 4000 + b"\n",
        b"x" * (1 << 20),
        b'"\\ud800"\n',
        b"\xff\n",
        b"1\n",
        b"null\n",
        b"{}\n",
        b'{"failure": {"exit_code": 0}}\n',
        b'{"location": {}}\n',
        json.dumps({"location": LOCATION | {"rank": -1}}).encode() + b"\n",
    ],
    ids=lambda message: str(message[:30]),
)
def test_no_message_stops_the_server(server: WatchServer, message: bytes) -> None:
    with stranger(server) as connection, contextlib.suppress(ConnectionError):
        connection.sendall(message)
        while connection.recv(4096):
            pass
    assert_serves(server)


@pytest.mark.parametrize("count", [300, pytest.param(10_000, marks=pytest.mark.nightly)])
def test_a_hostile_client_changes_nothing(server: WatchServer, count: int) -> None:
    """A rank that was there before gets no verdict, and others still join."""
    rank = Peer(server, rank=0)
    understood = [
        json.dumps(message).encode() + b"\n"
        for message in (
            {"location": None},
            {"failure": asdict(FAILURE)},
            {"leaving": True},
            {"refused": True},
        )
    ]
    for number, message in enumerate(hostile_messages(count, seed=1, understood=understood)):
        send_and_leave(server.port, message, is_reset=number % 3 == 0)
    assert_serves(server)
    rank.connection.settimeout(1)
    with pytest.raises(TimeoutError):
        rank.connection.recv(100)


def test_idle_connections_do_not_keep_ranks_out(server: WatchServer) -> None:
    with contextlib.ExitStack() as open_ones:
        for _ in range(1500):
            open_ones.enter_context(stranger(server))
        assert_serves(server)
        assert len(server._unknown) <= watch_server.MIN_UNKNOWN_PEERS + 1


def test_an_idle_stranger_is_disconnected(server: WatchServer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(watch_server, "SECONDS_TO_INTRODUCE", 0.5)
    with stranger(server) as connection:
        assert connection.recv(100) == b""


def test_an_unknown_peer_gets_no_verdict(server: WatchServer) -> None:
    listener = stranger(server)
    rank = Peer(server)
    rank.send({"failure": asdict(FAILURE)})
    assert rank.receive()["cause"]["rank"] == 1
    listener.settimeout(1)
    with listener, pytest.raises(TimeoutError):
        listener.recv(100)


def test_a_second_peer_of_a_rank_is_refused(server: WatchServer) -> None:
    first = Peer(server)
    first.send({"files": []})
    assert Peer(server, pid=6).answer == {"refused": True}
    assert Peer(server).answer == {"refused": True}
    assert "location" in first.answer


@pytest.mark.parametrize(
    "changed",
    [
        {"exit_code": 0},
        {"exit_code": 256},
        {"exit_code": True},
        {"kind": "x"},
        {"rank": "1"},
        {"summary": None},
    ],
    ids=str,
)
def test_an_impossible_failure_is_a_death_with_exit_code_1(
    server: WatchServer, changed: dict[str, object]
) -> None:
    rank, sender = Peer(server, rank=0), Peer(server)
    sender.send({"failure": {**asdict(FAILURE), **changed}})
    cause = rank.receive()["cause"]
    assert (cause["kind"], cause["rank"], cause["exit_code"]) == ("died", 1, 1)
    with pytest.raises(ValueError, match=f"failure.{next(iter(changed))}"):
        checked_failure({**asdict(FAILURE), **changed})


def test_a_rank_reports_only_itself(server: WatchServer) -> None:
    rank = Peer(server)
    rank.send({"failure": {**asdict(FAILURE), "rank": 0, "host": "elsewhere"}})
    cause = rank.receive()["cause"]
    assert (cause["rank"], cause["host"]) == (1, "here")


@pytest.mark.parametrize("code", [0, 256, 512, -256])
def test_no_failed_process_exits_with_0(code: int) -> None:
    assert exit_code_of(SystemExit(code)) == 1


def test_the_server_listens_at_the_rendezvous_alone(server: WatchServer) -> None:
    assert server._listener.getsockname()[0] == "127.0.0.1"


def test_other_hosts_reach_a_server_whose_name_is_a_loopback_address() -> None:
    server = WatchServer(LaunchEnvironment(world_size=4, local_world_size=2, host="localhost"))
    assert server._listener.getsockname()[0] in ("::", "0.0.0.0")
    server.start()
    server.close()


def watch_of_rank_0(**options: object) -> tuple[RankWatch, dist.Store]:
    store = dist.HashStore()
    return RankWatch(LaunchEnvironment(world_size=2, local_world_size=2, **options), store), store


def test_a_rank_that_runs_twice_is_named() -> None:
    watch, store = watch_of_rank_0()
    first = RankWatch(LaunchEnvironment(rank=1, world_size=2), store)
    with pytest.raises(MegatrainError, match=r"rank 1 of 2 runs already(?s:.)*fix: start each rank once"):
        RankWatch(LaunchEnvironment(rank=1, world_size=2), store)
    first.leave()
    watch.leave()


def test_ranks_wait_for_a_server_that_strangers_keep_busy() -> None:
    watch, store = watch_of_rank_0()
    assert watch._server is not None
    with contextlib.ExitStack() as open_ones:
        for _ in range(300):
            open_ones.enter_context(stranger(watch._server))
        start = time.monotonic()
        RankWatch(LaunchEnvironment(rank=1, world_size=2), store).leave()
        assert time.monotonic() - start < 5
    watch.leave()
