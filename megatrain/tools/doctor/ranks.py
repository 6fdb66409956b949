"""Speed of the ranks and of the links between them, when a launcher has started several.

each rank: GEMMs ─> its time ────────────────┐
each rank and the next one: a message ─> ────┴─> all times on rank 0 ─> the ranks and links that are far from the median
"""

from __future__ import annotations

import os
import statistics
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any, Final

import torch
import torch.distributed as dist

from megatrain.config.environment import LaunchEnvironment
from megatrain.tools.doctor.finding import Finding
from megatrain.training.launch.ranks import local_gpu

SLOW_RANK: Final = {"cuda": 1.3, "cpu": 3.0}
"""Ratio to the median time from which a rank is slow. On CPUs, ranks share cores with other programs."""
SLOW_LINK: Final = {"cuda": 2.0, "cpu": 5.0}
"""Ratio to the median time of the links of its kind (in a host, between hosts) from which a link is slow."""
_TIMEOUT: Final = timedelta(seconds=30)
_REPEATS: Final = 5


@dataclass(frozen=True)
class RankSpeed:
    """Measurements of a rank."""

    rank: int
    host: str
    device: str
    """cuda or cpu."""
    gemm_seconds: float
    message_seconds: float
    """A message to the next rank, and its answer."""
    num_cores: int = field(default_factory=lambda: len(os.sched_getaffinity(0)))
    """Cores of the host that its ranks share."""


def measure_ranks(environment: LaunchEnvironment, host: str) -> list[RankSpeed]:
    """Join all ranks and return the measurements of all; raise RuntimeError if they cannot be joined."""
    device = local_gpu(environment) if torch.cuda.is_available() else torch.device("cpu")
    if device.type == "cuda":
        torch.cuda.set_device(device)
    dist.init_process_group(
        "nccl" if device.type == "cuda" else "gloo",
        init_method=environment.rendezvous,
        rank=environment.rank,
        world_size=environment.world_size,
        timeout=_TIMEOUT,
    )
    try:
        size = 8192 if device.type == "cuda" else 512
        matrix = torch.ones(size, size, device=device)
        dist.all_reduce(torch.zeros(1, device=device))
        gemm = fastest(lambda: torch.mm(matrix, matrix), device)
        message = _message_seconds(device)
        found: list[Any] = [None] * environment.world_size
        dist.all_gather_object(found, RankSpeed(environment.rank, host, device.type, gemm, message))
        return found
    finally:
        dist.destroy_process_group()


def fastest(run: Callable[[], object], device: torch.device) -> float:
    """Return the shortest of several times of a function, in seconds."""
    times = []
    for _ in range(_REPEATS):
        _wait(device)
        start = time.perf_counter()
        run()
        _wait(device)
        times.append(time.perf_counter() - start)
    return min(times)


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def _message_seconds(device: torch.device) -> float:
    """Return the seconds of a message around the ring of ranks, to the next one and from the one before."""
    rank, size = dist.get_rank(), dist.get_world_size()
    sent = torch.ones((16 if device.type == "cuda" else 1) << 20, device=device)
    received = torch.empty_like(sent)

    def exchange() -> None:
        operations = [
            dist.P2POp(dist.isend, sent, (rank + 1) % size),
            dist.P2POp(dist.irecv, received, (rank - 1) % size),
        ]
        for request in dist.batch_isend_irecv(operations):
            request.wait()

    return fastest(exchange, device)


def check_ranks(speeds: Sequence[RankSpeed]) -> Iterator[Finding]:
    """Report ranks and links that are much slower than the median. Ranks that wait for a core have no speed of their own."""
    ranks_of = Counter(one.host for one in speeds if one.device == "cpu")
    crowded = next((one for one in speeds if ranks_of[one.host] > one.num_cores), None)
    if crowded is not None:
        words = f"{ranks_of[crowded.host]} ranks of {crowded.host} share {crowded.num_cores} cores: speeds are not compared"
        yield Finding.ok("ranks", f"{len(speeds)} ranks; {words}")
        return
    median = statistics.median_low(one.gemm_seconds for one in speeds)
    slow = [one for one in speeds if one.gemm_seconds > SLOW_RANK[one.device] * median]
    for one in slow:
        yield Finding.error(
            f"rank {one.rank}",
            f"on {one.host}: GEMMs take {one.gemm_seconds / median:.1f} times the median",
            "look at its clocks and at other programs there, or leave out the host",
        )
    links = list(_slow_links(speeds))
    yield from links
    if not slow and not links:
        yield Finding.ok("ranks", f"{len(speeds)} ranks, none is slow, nor a link between two")


def _slow_links(speeds: Sequence[RankSpeed]) -> Iterator[Finding]:
    following = [*speeds[1:], speeds[0]]
    for is_inside in (True, False):
        pairs = [(a, b) for a, b in zip(speeds, following, strict=True) if (a.host == b.host) == is_inside]
        if not pairs:
            continue
        median = statistics.median_low(a.message_seconds for a, _ in pairs)
        for a, b in pairs:
            if a.message_seconds > SLOW_LINK[a.device] * median:
                yield Finding.error(
                    f"link from rank {a.rank} to rank {b.rank}",
                    f"{a.host} to {b.host}: messages take {a.message_seconds / median:.1f} times the median",
                    "check cables and adapters: nvidia-smi nvlink --status, ibstat",
                )
