"""Search for the ranks that are late, after one rank has reported that it makes no progress.

    a stall ─> where is each rank? ─> a rank on the same host looks at those that do not answer ─> the ranks for which the others wait

Late are, in this order: ranks that do not answer; ranks that do not wait for others, if others wait; ranks that have called fewer collectives
of a group than its other members.
"""

from __future__ import annotations

import itertools
import json
import time
from collections import defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

import torch
import torch.distributed as dist

from megatrain.training.liveness.failure import Failure, format_ranks
from megatrain.training.liveness.position import SLOW_PHASES, Position

SECONDS_TO_BEGIN: Final = 0.2
"""A process that a look continues is stopped again before it begins a search of its own."""
SECONDS_TO_ANSWER: Final = 1.5
SECONDS_TO_LOOK: Final = 1.5
COLLECTIVES_FOLDER: Final = "flight_recorder"
_MAX_COLLECTIVES: Final = 100
_MAX_RANKS_IN_FULL: Final = 8
_STACK_LINES: Final = 6


@dataclass
class LateSearch:
    """One search.

    Args:
        locations: rank, host and process of each rank, by rank, as in a `Failure`.
        seconds: how long the rank that reported the stall has made no progress.
        stalled: that rank, and those that report a stall during the search.
    """

    locations: Mapping[int, Mapping[str, Any]]
    seconds: float
    stalled: set[int] = field(default_factory=set)
    positions: dict[int, Position] = field(default_factory=dict)
    """Answers of ranks."""
    seen: dict[int, Position] = field(default_factory=dict)
    """Positions of ranks that do not answer, as other ranks of their hosts see them."""
    asked: list[int] = field(default_factory=list)
    """Ranks that others look at."""
    next_step: float = field(default_factory=lambda: time.monotonic() + SECONDS_TO_BEGIN)
    has_begun: bool = False

    @property
    def silent(self) -> list[int]:
        """The ranks that have not answered."""
        return sorted(self.locations.keys() - self.positions.keys())

    @property
    def is_step_due(self) -> bool:
        """All have answered, or their time is over."""
        is_complete = self.seen.keys() >= set(self.asked) if self.asked else not self.silent
        return (self.has_begun and is_complete) or time.monotonic() >= self.next_step

    def begin(self) -> None:
        """Begin to wait for answers."""
        self.has_begun, self.next_step = True, time.monotonic() + SECONDS_TO_ANSWER

    def add(self, sender: int, of: Any, position: Position) -> None:
        """Add an answer: the sender's position, or the position of a rank that it was asked to look at."""
        if of is None and sender not in self.asked:  # a look may make a process continue
            self.positions[sender] = position
        elif of in self.asked:
            self.seen[of] = position

    def to_look_at(self) -> Iterator[tuple[int, int]]:
        """Yield each rank that does not answer, and a rank of the same host that does; begin the second step of the search."""
        self.next_step = time.monotonic() + SECONDS_TO_LOOK
        for rank in self.silent:
            host = self.locations[rank]["host"]
            on_host = (other for other in self.positions if self.locations[other]["host"] == host)
            observer = next(on_host, None)
            if observer is not None:
                self.asked.append(rank)
                yield rank, observer

    def late_ranks(self) -> list[int]:
        """Return the ranks for which the others wait; empty if there are none."""
        if self.silent:
            return self.silent
        working = [rank for rank, position in self.positions.items() if not position.is_waiting]
        waiting = [rank for rank, position in self.positions.items() if position.is_waiting]
        lagging = self._lagging()
        if working and waiting:
            return sorted(set(working) & lagging or working)
        return sorted(lagging) if lagging != self.positions.keys() else []

    @property
    def is_excused(self) -> bool:
        """The others wait for ranks that save, load or compile: these report on their own when they take too long."""
        late = self.late_ranks()
        is_slow = all(
            rank in self.positions and self.positions[rank].phase.startswith(SLOW_PHASES) for rank in late
        )
        return bool(late) and is_slow and self.stalled.isdisjoint(late)

    def _lagging(self) -> set[int]:
        """Return the ranks that have called fewer collectives of a group than another member."""
        most: dict[str, int] = {}
        for position in self.positions.values():
            for group, count in position.calls.items():
                most[group] = max(count, most.get(group, 0))
        return {
            rank
            for rank, position in self.positions.items()
            if any(count < most[group] for group, count in position.calls.items())
        }

    def reporters(self) -> list[int]:
        """Return the first rank of each host that answers: it prints the report, and kills ranks that do not answer."""
        first: dict[str, int] = {}
        for rank in sorted(self.positions):
            first.setdefault(self.locations[rank]["host"], rank)
        return list(first.values())

    def conclude(self) -> Failure:
        """Return the failure of the first late rank, with the report."""
        late = self.late_ranks()
        culprit = late[0] if late else min(self.locations)
        others = len(self.locations) - len(late)
        seconds = f"for {self.seconds:.0f} s"
        if late:
            verb = "is" if len(late) == 1 else "are"
            summary = f"{format_ranks(late)} of {len(self.locations)} {verb} late: no progress {seconds}" + (
                f", and {others} other{'s' * (others > 1)} wait{'s' * (others == 1)}" if others else ""
            )
            first = self.positions.get(culprit) or self.seen.get(culprit)
            summary += f"; rank {culprit}: {first or 'does not answer'}"
        else:
            summary = (
                f"no progress {seconds}, and no rank is late: all wait for communication or for their devices"
            )
        return Failure(
            kind="late",
            **self.locations[culprit],
            summary=summary,
            details="\n".join(self._details(late)),
        )

    def _details(self, late: list[int]) -> Iterator[str]:
        """Yield the lines of the report after its first one."""
        for rank in late[:_MAX_RANKS_IN_FULL]:
            place = self.locations[rank]
            position = self.positions.get(rank) or self.seen.get(rank)
            yield f"  rank {rank} on {place['host']} (process {place['pid']}): {position or 'does not answer'}"
            yield from (f"      {line}" for line in (position.stack[:_STACK_LINES] if position else ()))
        alike: defaultdict[tuple[str, str], list[int]] = defaultdict(list)
        for rank in sorted(self.positions.keys() - set(late)):
            position = self.positions[rank]
            alike[str(position), position.stack[0] if position.stack else ""].append(rank)
        for (where, line), ranks in itertools.islice(alike.items(), _MAX_RANKS_IN_FULL):
            yield f"  {format_ranks(ranks)}: {where}; {line}"


def write_collectives(folder: Path, rank: int) -> None:
    """Write the last collectives of this rank, finished or not, to `folder`/rank-N.json, as PyTorch's flight recorder knows them."""
    bindings: Any = torch._C._distributed_c10d  # noqa: SLF001 (no public access)
    of_nccl = getattr(bindings, "_dump_nccl_trace_json", None)  # builds without CUDA have none
    uses_nccl = dist.is_initialized() and dist.get_backend() == "nccl"
    dump = of_nccl if uses_nccl and of_nccl is not None else bindings._dump_fr_trace_json  # noqa: SLF001
    trace = json.loads(dump())
    trace["entries"] = trace.get("entries", [])[-_MAX_COLLECTIVES:]
    folder.mkdir(exist_ok=True)
    (folder / f"rank-{rank}.json").write_text(json.dumps(trace), encoding="utf-8")
