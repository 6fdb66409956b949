"""TCP sockets of this process: servers at the address of the rendezvous, and the end of all connections of a group of ranks.

This module does not import torch.
"""

from __future__ import annotations

import contextlib
import ipaddress
import os
import socket
from collections.abc import Collection, Iterator
from pathlib import Path
from typing import Final

from megatrain.config.environment import LaunchEnvironment

BACKLOG: Final = 1 << 15
"""Connections that wait to be accepted; the kernel takes the smaller of this and net.core.somaxconn."""

_ESTABLISHED: Final = b"\1"
"""State of a connection in TCP_INFO."""


def keep_alive(connection: socket.socket) -> None:
    """Make the kernel detect within 25 seconds that the other host is gone, also while sent data are not acknowledged."""
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for option, value in (
        (socket.TCP_KEEPIDLE, 10),
        (socket.TCP_KEEPINTVL, 5),
        (socket.TCP_KEEPCNT, 3),
        (socket.TCP_USER_TIMEOUT, 25_000),
    ):
        connection.setsockopt(socket.IPPROTO_TCP, option, value)


def listen(environment: LaunchEnvironment, port: int = 0) -> socket.socket:
    """Listen at the address of the rendezvous; on all addresses if the other hosts cannot use it, or it is not this host's."""
    is_one_host = environment.local_world_size >= environment.world_size
    with contextlib.suppress(OSError):
        for family, _, _, _, address in socket.getaddrinfo(environment.host, 0, type=socket.SOCK_STREAM):
            # A host's own name is often a loopback address in its /etc/hosts.
            if is_one_host or not ipaddress.ip_address(address[0]).is_loopback:
                with contextlib.suppress(OSError):
                    return socket.create_server((address[0], port), family=family, backlog=BACKLOG)
    if socket.has_dualstack_ipv6():
        return socket.create_server(("", port), family=socket.AF_INET6, dualstack_ipv6=True, backlog=BACKLOG)
    return socket.create_server(("", port), backlog=BACKLOG)


def open_sockets() -> dict[str, int]:
    """Return the file descriptors of the sockets of this process by the kernel's names of the sockets."""
    found = {}
    for path in Path("/proc/self/fd").iterdir():
        with contextlib.suppress(OSError):  # the descriptor of this listing is closed
            target = str(path.readlink())
            if target.startswith("socket:"):
                found[target] = int(path.name)
    return found


def connections_since(opened_before: Collection[str]) -> Iterator[socket.socket]:
    """Yield a duplicate of each TCP connection of this process but earlier ones; it is closed after its turn."""
    for name, descriptor in open_sockets().items():
        if name in opened_before:
            continue
        with contextlib.suppress(OSError), socket.socket(fileno=os.dup(descriptor)) as one:
            is_listening = one.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN)
            if one.family in (socket.AF_INET, socket.AF_INET6) and not is_listening:
                yield one


def shut_connections(*, opened_before: Collection[str]) -> None:
    """Shut all TCP connections of this process but earlier ones: all waits for them fail, in every thread.

    Gloo and torch's stores have no other way to end a wait.
    """
    for one in connections_since(opened_before):
        with contextlib.suppress(OSError):
            one.shutdown(socket.SHUT_RDWR)


def num_established(*, opened_before: Collection[str]) -> int:
    """Return how many TCP connections of this process, but earlier ones, carry data in both directions."""
    states = (
        one.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 1) for one in connections_since(opened_before)
    )
    return sum(state == _ESTABLISHED for state in states)
