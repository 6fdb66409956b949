"""Connect thousands of peers to the watch server at once, over real sockets: `python scripts/scale/watch_server.py --ranks 4000`.

A second process speaks the protocol of `RankWatch` for all ranks; each socket takes a file in both processes. The output says how long
it took until the last rank had its answer, how many connected again, and what the server's process computed for a rank: seconds depend on
what else the machine does, processor time does not. `--backlog 128 --at-once` shows what an older kernel does to ranks that do not spread.
"""

from __future__ import annotations

import argparse
import heapq
import json
import os
import random
import selectors
import socket
import sys
import time
from dataclasses import dataclass

from megatrain.config.environment import LaunchEnvironment
from megatrain.training.liveness import watch_server
from megatrain.training.liveness.rank_watch import seconds_to_spread

SECONDS_TO_ANSWER = 5.0


@dataclass(eq=False)
class Rank:
    """One rank, which connects until it has an answer."""

    number: int
    connection: socket.socket | None = None
    attempts: int = 0


class Storm:
    """All ranks of a job, in one process, which connect to `port` at once."""

    def __init__(self, port: int, size: int, *, spread: float) -> None:
        self.port, self.size = port, size
        self.selector = selectors.DefaultSelector()
        self.waiting = {Rank(number) for number in range(size)}
        now = time.monotonic()
        starts = {rank: now + random.uniform(0, spread) for rank in self.waiting}
        self.timers = [(start, rank.number, 0, rank) for rank, start in starts.items()]
        heapq.heapify(self.timers)

    def run(self) -> dict[str, float]:
        """Connect all; return seconds and attempts."""
        start = time.monotonic()
        while self.waiting:
            for _ in range(256):
                if not self.timers or self.timers[0][0] > time.monotonic():
                    break
                _, _, attempt, rank = heapq.heappop(self.timers)
                if rank in self.waiting and rank.attempts == attempt:
                    self.connect(rank)
            seconds = self.timers[0][0] - time.monotonic() if self.timers else 0.1
            for key, events in self.selector.select(min(0.1, max(0.0, seconds))):
                self.advance(key.data, events)
        ranks = [key.data for key in self.selector.get_map().values()]
        attempts = [rank.attempts for rank in ranks]
        return {
            "seconds": time.monotonic() - start,
            "again": sum(count > 1 for count in attempts),
            "most attempts": max(attempts),
        }

    def connect(self, rank: Rank) -> None:
        """Begin a new connection of a rank."""
        if rank.connection is not None:
            self.selector.unregister(rank.connection)
            rank.connection.close()
        rank.connection, rank.attempts = socket.socket(), rank.attempts + 1
        rank.connection.setblocking(False)
        rank.connection.connect_ex(("127.0.0.1", self.port))
        self.selector.register(rank.connection, selectors.EVENT_WRITE, rank)
        seconds = SECONDS_TO_ANSWER * 2 ** (rank.attempts - 1)
        deadline = time.monotonic() + seconds + random.uniform(0.05, 0.5)
        heapq.heappush(self.timers, (deadline, rank.number, rank.attempts, rank))

    def advance(self, rank: Rank, events: int) -> None:
        """Introduce a rank whose connection is made; confirm an answer."""
        assert rank.connection is not None
        try:
            if events & selectors.EVENT_WRITE:
                place = {"rank": rank.number, "world_size": self.size, "local_rank": rank.number % 8}
                place |= {"host": f"host{rank.number // 8}", "pid": rank.number + 2}
                rank.connection.send(json.dumps({"location": place}).encode() + b"\n")
                self.selector.modify(rank.connection, selectors.EVENT_READ, rank)
            elif b"location" in rank.connection.recv(4096):
                rank.connection.send(b'{"files": [1, 2]}\n')
                self.waiting.discard(rank)
        except OSError:
            self.connect(rank)


def main() -> None:
    """Run one storm and print a line of JSON."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--ranks", type=int, default=4000, help="peers that connect at once (default: 4000)")
    parser.add_argument("--backlog", type=int, default=watch_server.BACKLOG, help="connections that wait")
    parser.add_argument("--at-once", action="store_true", help="ranks do not spread their connections")
    arguments = parser.parse_args()
    watch_server.BACKLOG = arguments.backlog
    spread = 0.0 if arguments.at_once else seconds_to_spread(arguments.ranks)
    server = watch_server.WatchServer(
        LaunchEnvironment(world_size=arguments.ranks, local_world_size=arguments.ranks)
    )
    server.start()
    receive, send = os.pipe()
    if os.fork() == 0:
        found = Storm(server.port, arguments.ranks, spread=spread).run()
        os.write(send, json.dumps(found).encode())
        sys.stdout.flush()
        time.sleep(0.5)  # the server reads the last messages
        os._exit(0)
    before = time.process_time()
    found = json.loads(os.read(receive, 4096))
    found["server_us_a_rank"] = 1e6 * (time.process_time() - before) / arguments.ranks
    print(json.dumps({"ranks": arguments.ranks} | {name: round(value, 2) for name, value in found.items()}))


if __name__ == "__main__":
    main()
