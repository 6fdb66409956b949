"""Messages of a hostile client: random bytes, other protocols, and damaged copies of messages that a server understands."""

import contextlib
import random
import socket
import struct
from collections.abc import Iterator, Sequence

_OTHER_PROTOCOLS = (
    b"",
    b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" + bytes(64),  # TLS
    b"SSH-2.0-x\r\n",
    b"GET / HTTP/1.1\r\nHost: x\r\n\r\n",
    b"POST / HTTP/1.1\r\nContent-Length: -1\r\nTransfer-Encoding: chunked\r\n\r\nzz\r\n",
    b"\x00" * 4096,
    b"[" * 5000 + b"\n",
    b'{"a":' * 2000 + b"\n",
    b'"\\ud800"\n',
    b"1e999999\n",
    b"9" * 5000 + b"\n",
    b"NaN\n",
    b"\xff\xfe\n",
)


def hostile_messages(count: int, *, seed: int, understood: Sequence[bytes]) -> Iterator[bytes]:
    """Yield `count` messages, the same for a seed."""
    draw = random.Random(seed)
    for number in range(count):
        kind = number % 4
        if kind == 0:
            yield draw.randbytes(draw.randrange(2048))
        elif kind == 1:
            yield draw.choice(_OTHER_PROTOCOLS)
        else:
            yield _damaged(bytearray(draw.choice(understood)), draw)


def _damaged(message: bytearray, draw: random.Random) -> bytes:
    for _ in range(draw.randrange(1, 6)):
        place = draw.randrange(len(message) + 1)
        action = draw.randrange(4)
        if action == 0:
            message[place:place] = draw.randbytes(draw.randrange(1, 9))
        elif action == 1:
            del message[place : place + draw.randrange(1, 40)]
        elif action == 2:
            message[place:place] = message[: draw.randrange(1, 200)]
        elif place < len(message):
            message[place] ^= 1 << draw.randrange(8)
    return bytes(message)


def send_and_leave(port: int, message: bytes, *, is_reset: bool) -> None:
    """Connect, send a message, read a part of the answer if there is one at once, and close, or reset the connection."""
    with socket.create_connection(("127.0.0.1", port), timeout=20) as connection:
        if is_reset:
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        with contextlib.suppress(ConnectionError, TimeoutError):
            connection.sendall(message)
            connection.settimeout(0.002)
            connection.recv(256)
