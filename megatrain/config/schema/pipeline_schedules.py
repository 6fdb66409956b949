"""Pipeline schedules as data: what each needs, and what the rules, the plan and the parity rows know of it.

`parallel/pipeline/schedule.py` has their actions. docs/contributing.md lists the places of a new schedule.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Final

InFlight = Callable[[int, int, int, int], float]
"""Passes of a micro-batch through a rank whose activations it holds at its peak, of ranks, rank, chunks, micro-batches."""


@dataclass(frozen=True, kw_only=True)
class ScheduleTraits:
    """A pipeline schedule."""

    shape: str
    """Its help text."""
    num_chunks: int | None
    """Model chunks of a rank; None: any number above 1."""
    is_v: bool = False
    """The second chunks are placed from the last rank to the first."""
    overlaps_passes: bool = False
    """On several ranks a forward pass can run together with the backward pass of another micro-batch."""
    splits_backward: bool = False
    """Weight gradients are passes of their own."""
    has_groups: bool = False
    """A chunk computes a group of micro-batches before the next chunk does."""
    bubble: float | None = None
    """Passes of a micro-batch through a rank for which it waits, for each other rank; None: 1 / chunks."""
    in_flight: InFlight | None = None
    """Peak of the activations; None: counted in the actions."""
    is_searched: bool = True
    """`megatrain plan` considers it also where no passes overlap."""


def _in_flight_of_1f1b(ranks: int, rank: int, chunks: int, count: int) -> float:  # noqa: ARG001
    return min(count, ranks - rank)


def _in_flight_of_interleaved(ranks: int, rank: int, chunks: int, count: int) -> float:
    first_group = ranks + count % ranks
    return min(count, (2 * (ranks - rank - 1) + (chunks - 1) * first_group + 1) / chunks)


ONE_CHUNK: Final = "1f1b"
SEVERAL_CHUNKS: Final = "interleaved"
ZERO_BUBBLE: Final = ("zb-h1", "zb-v")
"""Schedules for an open --pipeline-schedule."""
PIPELINE_SCHEDULES: Final[Mapping[str, ScheduleTraits]] = {
    ONE_CHUNK: ScheduleTraits(
        shape="1F1B, one model chunk per rank", num_chunks=1, bubble=1.0, in_flight=_in_flight_of_1f1b
    ),
    SEVERAL_CHUNKS: ScheduleTraits(
        shape="1F1B over several model chunks per rank",
        num_chunks=None,
        overlaps_passes=True,
        has_groups=True,
        in_flight=_in_flight_of_interleaved,
    ),
    "zb-h1": ScheduleTraits(
        shape="zero bubble with one chunk", num_chunks=1, splits_backward=True, bubble=1 / 3
    ),
    "zb-v": ScheduleTraits(
        shape="zero bubble with two chunks in a V",
        num_chunks=2,
        is_v=True,
        splits_backward=True,
        bubble=1 / 6,
    ),
    "dualpipe-v": ScheduleTraits(
        shape="DualPipe-V, two chunks in a V, forward passes of one run together with backward passes of the other",
        num_chunks=2,
        is_v=True,
        overlaps_passes=True,
        splits_backward=True,
        bubble=1 / 3,
        is_searched=False,
    ),
}
"""The choices of --pipeline-schedule."""


def names_of(holds: Callable[[ScheduleTraits], bool], last: str = "or") -> str:
    """Return the names of the schedules for which this holds: `a, b or c`."""
    *names, end = (name for name, traits in PIPELINE_SCHEDULES.items() if holds(traits))
    return f"{', '.join(names)} {last} {end}" if names else end


def flags_of_schedule(name: str, chunks: int = 2) -> str:
    """Return the flags that select a schedule. `chunks`: model chunks of a rank, if the schedule leaves them open."""
    words = [] if name == SEVERAL_CHUNKS else [f"--pipeline-schedule {name}"]
    if PIPELINE_SCHEDULES[name].num_chunks is None:
        words.append(f"--num-virtual-stages-per-pipeline-rank {chunks}")
    return " ".join(words)


def word_of_schedule(name: str) -> str:
    """Return the name of the parity feature of a schedule."""
    return name.replace("-", "")
