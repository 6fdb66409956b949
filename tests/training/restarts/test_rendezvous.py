"""Generations of a job: who gets which rank, with processes that are sockets of this one."""

import itertools
import json
import socket
import time
from collections.abc import Iterator
from contextlib import suppress
from typing import Any

import pytest

from megatrain.config.environment import LaunchEnvironment
from megatrain.training.restarts.rendezvous import MAX_FRUITLESS, Rendezvous

_PIDS = itertools.count(1000)


class Process:
    """A process of the job, on a host with an address of the loopback network."""

    def __init__(self, port: int, number: int, host: int) -> None:
        self.number, self.pid = number, next(_PIDS)
        self.socket = socket.create_connection(("127.0.0.1", port), 10, source_address=(f"127.0.0.{host}", 0))
        self.lines = self.socket.makefile("rb")

    def join(self, *, has_trained: bool = True) -> None:
        request = {"id": self.number, "pid": self.pid, "store_port": 5, "has_trained": has_trained}
        self.socket.sendall(json.dumps({"join": request}).encode() + b"\n")

    def read(self, name: str) -> dict[str, Any]:
        """Return the next message that has this name."""
        return next(message for line in self.lines if name in (message := json.loads(line)))

    def die(self) -> None:
        self.socket.shutdown(socket.SHUT_RDWR)
        self.socket.close()


class Job:
    """Two ranks on each of hosts 1 and 2, and spares on host 3."""

    def __init__(self, num_spares: int = 0, **limits: float) -> None:
        numbers = {"active_world_size": 4, "hard_timeout": 5.0, "barrier_timeout": 60.0, **limits}
        settings = {f"resilience.inprocess_{name}": value for name, value in numbers.items()}
        self.lines: list[str] = []
        self.server = Rendezvous(
            LaunchEnvironment(world_size=4 + num_spares, local_world_size=9, launcher="torchrun"),
            settings.get,
            self.lines.append,
        )
        self.processes = [self.start(number, 1 + number // 2) for number in range(4 + num_spares)]

    def start(self, number: int, host: int) -> Process:
        process = Process(self.server.port, number, host)
        process.join()
        return process

    def ranks(self, processes: list[Process]) -> list[int]:
        return [process.read("rank")["rank"] for process in processes]

    def survivors(self, *lost: int) -> list[Process]:
        """Let processes die, and the other ranks leave."""
        for number in lost:
            self.processes[number].die()
        others = [one for one in self.processes[:4] if one.number not in lost]
        for one in others:
            one.read("broken")
            one.join()
        return others


@pytest.fixture
def jobs() -> Iterator[list[Job]]:
    made: list[Job] = []
    yield made
    for job in made:
        job.server.end(0)
        for process in job.processes:
            with suppress(OSError):
                process.lines.close()
                process.socket.close()


def test_a_lost_process_is_replaced_in_its_rank_and_the_others_keep_theirs(jobs: list[Job]) -> None:
    jobs.append(job := Job(num_spares=1))
    assert job.ranks(job.processes[:4]) == [0, 1, 2, 3]
    others = job.survivors(2)
    job.processes.append(new := job.start(2, 2))
    assert job.ranks([*others, new]) == [0, 1, 3, 2]
    assert "3 processes stayed, new are ranks [2]" in job.lines[0]


def test_spares_replace_a_lost_host_at_once(jobs: list[Job]) -> None:
    jobs.append(job := Job(num_spares=2))
    job.ranks(job.processes[:4])
    others = job.survivors(2, 3)
    assert job.ranks([*others, *job.processes[4:]]) == [0, 1, 2, 3]
    assert job.lines[0].endswith("2 processes stayed, new are ranks [2, 3] (launch ranks [4, 5])")


def test_a_lost_host_without_spares_ends_the_job(jobs: list[Job]) -> None:
    jobs.append(job := Job(barrier_timeout=0.3))
    job.ranks(job.processes)
    others = job.survivors(2, 3)
    assert [one.read("end")["end"]["exit_code"] for one in others] == [1, 1]
    assert "ranks [2, 3] did not come back" in job.lines[-1]


def test_an_error_that_repeats_itself_ends_the_job(jobs: list[Job]) -> None:
    jobs.append(job := Job())
    for _ in range(MAX_FRUITLESS):
        job.ranks(job.processes)
        for one in job.processes:
            one.join(has_trained=False)
    assert {one.read("end")["end"]["exit_code"] for one in job.processes} == {1}
    assert (
        job.lines[-1]
        == f"> no other generation: {MAX_FRUITLESS} generations in a row failed before an iteration"
    )


def test_spares_end_with_the_exit_code_of_the_job(jobs: list[Job]) -> None:
    jobs.append(job := Job(num_spares=1))
    job.ranks(job.processes[:4])
    start = time.monotonic()
    job.server.end(75)
    assert job.processes[4].read("end")["end"]["exit_code"] == 75
    assert time.monotonic() - start < 5


def test_strangers_change_nothing(jobs: list[Job]) -> None:
    jobs.append(job := Job())
    with socket.create_connection(("127.0.0.1", job.server.port), 10) as one:
        one.sendall(b'{"join": {"id": 1, "pid": -1}}\n{"done": true}\n')
        assert one.recv(100) == b""
    assert job.ranks(job.processes) == [0, 1, 2, 3]
