"""Connections that a process ends: those since a moment, and no earlier ones."""

import socket
from contextlib import ExitStack

from megatrain.training.liveness.sockets import num_established, open_sockets, shut_connections


def test_connections_since_a_moment_end_and_earlier_ones_stay() -> None:
    with ExitStack() as stack:
        server = stack.enter_context(socket.create_server(("127.0.0.1", 0)))

        def connected() -> tuple[socket.socket, socket.socket]:
            client = stack.enter_context(socket.create_connection(server.getsockname()))
            return client, stack.enter_context(server.accept()[0])

        earlier, before = connected(), open_sockets()
        later = connected()
        assert num_established(opened_before=before) == 2
        shut_connections(opened_before=before)
        assert num_established(opened_before=before) == 0
        assert later[0].recv(1) == b""
        earlier[0].sendall(b"x")
        assert earlier[1].recv(1) == b"x"
