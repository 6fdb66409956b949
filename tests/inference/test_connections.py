"""Connections that clients hold: uvicorn closes them in time, and serves others meanwhile."""

import contextlib
import socket
import threading
import time
from collections.abc import Iterator
from typing import Any

import pytest

pytest.importorskip("starlette")
uvicorn = pytest.importorskip("uvicorn")

from megatrain.tools.generation.connections import LimitedConnection  # noqa: E402 (after importorskip)

CONNECTIONS = 6
HEAD = b"GET / HTTP/1.1\r\nHost: x\r\n"
LONG = b"GET /long HTTP/1.1\r\nHost: x\r\n\r\n"


async def app(scope: Any, receive: Any, send: Any) -> None:
    """Answer with few bytes, or with more than buffers hold; the body of a request is not read."""
    assert scope["type"] == "http"
    await send({"type": "http.response.start", "status": 200, "headers": []})
    for _ in range(1000 if scope["path"] == "/long" else 0):
        await send({"type": "http.response.body", "body": bytes(100_000), "more_body": True})
    await send({"type": "http.response.body", "body": b"hello"})


@pytest.fixture(scope="module")
def port() -> Iterator[int]:
    config = uvicorn.Config(
        app, http=LimitedConnection, ws="none", lifespan="off", log_level="critical", access_log=False,
        timeout_keep_alive=1, limit_concurrency=CONNECTIONS + 1,
    )  # fmt: skip
    listener = socket.create_server(("127.0.0.1", 0))
    server = uvicorn.Server(config)
    thread = threading.Thread(target=server.run, kwargs={"sockets": [listener]})
    thread.start()
    yield listener.getsockname()[1]
    server.should_exit = True
    thread.join(20)
    assert not thread.is_alive()


def connect(port: int, message: bytes = b"") -> socket.socket:
    connection = socket.create_connection(("127.0.0.1", port), timeout=20)
    connection.sendall(message)
    return connection


def answer(port: int) -> bytes:
    with connect(port, HEAD + b"Connection: close\r\n\r\n") as connection:
        return b"".join(iter(lambda: connection.recv(4096), b""))


def seconds_to_end(connection: socket.socket, *, trickle: bytes = b"") -> float:
    """Return the seconds until the server ends a connection, which sends a byte at a time."""
    start = time.monotonic()
    with connection, contextlib.suppress(ConnectionError):
        connection.settimeout(0.1)
        while time.monotonic() < start + 20:
            connection.sendall(trickle)
            with contextlib.suppress(TimeoutError):
                if not connection.recv(4096):
                    break
    return time.monotonic() - start


def test_many_incomplete_heads_leave_the_server_free(port: int) -> None:
    held = [connect(port, HEAD) for _ in range(5 * CONNECTIONS)]
    start = time.monotonic()
    assert answer(port).endswith(b"hello\r\n0\r\n\r\n")
    assert time.monotonic() - start < 0.9  # before the first one is too old
    for connection in held:
        assert seconds_to_end(connection) < 15


@pytest.mark.parametrize(
    ("message", "trickle"),
    [
        (b"", b""),
        (b"GET", b""),
        (HEAD, b"x"),  # a header without end
        (HEAD + b"\r\n", b""),  # an answer, then nothing
        (HEAD + b"\r\n" + HEAD, b"x"),  # the next head without end
        (HEAD + b"Content-Length: 1000\r\n\r\n", b"x"),
        (HEAD + b"Transfer-Encoding: chunked\r\n\r\n", b""),
        (b"\r\n", b"\r\n"),
    ],
)
def test_a_client_that_does_not_go_on_is_left(port: int, message: bytes, trickle: bytes) -> None:
    assert seconds_to_end(connect(port, message), trickle=trickle) < 15
    assert answer(port).startswith(b"HTTP/1.1 200")


def test_a_client_that_does_not_read_is_left(port: int) -> None:
    held = [connect(port, LONG) for _ in range(CONNECTIONS)]
    with contextlib.ExitStack() as stack:
        for connection in held:
            stack.enter_context(connection)
            assert connection.recv(8) == b"HTTP/1.1"
        assert answer(port).startswith(b"HTTP/1.1 503")  # all have requests
        _wait_until_served(port)


def _wait_until_served(port: int) -> None:
    deadline = time.monotonic() + 15
    while not answer(port).startswith(b"HTTP/1.1 200"):
        assert time.monotonic() < deadline
        time.sleep(0.05)


def test_a_client_that_reads_slowly_gets_its_answer(port: int) -> None:
    with connect(port, LONG.replace(b"\r\n\r\n", b"\r\nConnection: close\r\n\r\n")) as connection:
        size = 0
        for _ in range(8):
            time.sleep(0.25)
            size += len(connection.recv(1 << 24, socket.MSG_WAITALL))
        size += sum(map(len, iter(lambda: connection.recv(1 << 20), b"")))
    assert size > 100_000_000
