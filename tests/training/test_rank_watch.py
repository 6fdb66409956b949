"""A rank that finds no rank 0, and the end of rank 0's server."""

import json
import socket

import pytest
import torch.distributed as dist

from megatrain.config.environment import LaunchEnvironment
from megatrain.config.errors import MegatrainError
from megatrain.training.launch.rank_watch import RankWatch
from megatrain.training.launch.watch_server import WatchServer


@pytest.fixture
def left() -> dist.Store:
    """The ranks' store after rank 0 has gone: nobody listens at the port that it had told."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
    store = dist.HashStore()
    store.set("watch", json.dumps({"port": port, "token": "x", "place": {}}))
    return store


def test_a_rank_that_finds_nobody_says_where_it_looked(left) -> None:
    with pytest.raises(MegatrainError, match=r"rank 1 cannot reach rank 0 at 127\.0\.0\.1:\d+") as caught:
        RankWatch(LaunchEnvironment(rank=1, world_size=2), left)
    assert not caught.value.is_reported


def test_a_server_that_ends_by_a_message_is_closed_all_the_same() -> None:
    """Another rank leaves between the order to end and the byte that wakes the thread."""
    server = WatchServer("x")
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
