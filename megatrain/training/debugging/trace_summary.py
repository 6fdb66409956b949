"""Summary of a profiler's trace: compute, exposed communication and idle time by part of the step.

    GPU   |##gemm##|  |#norm#|========reduce========|     compute 2 | exposed 1: reduce while no other kernel runs
    part  | forward             | backward          |     idle: until the next kernel starts; counts for its part

A part is the innermost `record_function` range of the host (`forward`, `optimizer` ...) that launches a kernel. Launches
are assigned to ranges by time, not by thread: the backward pass runs in a thread of its own inside an open range.
"""

from __future__ import annotations

import bisect
import gzip
import json
import math
import zlib
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from megatrain.config.errors import InputError

ITERATIONS = "profiled_iterations"
"""Key of the first and last iteration in a trace."""
FIRST_ITERATION = "first profiled iteration"
"""Range at whose start the profiled iterations begin; without it all kernels count."""
REPORT = "report"
"""Range in which the host waits for a step's report."""
_SYNCHRONIZING = ("cudaStreamSynchronize", "cudaDeviceSynchronize", "cudaEventSynchronize", "cudaMemcpy")
"""Calls in which the host waits for the GPU. A copy to pageable memory waits, too, and appears as cudaStreamSynchronize."""
_OUTSIDE = "elsewhere"
_NUM_KERNELS = 15
"""Kernels that are listed, of those that take longest."""
_MAX_BYTES = 1 << 30
"""Largest trace that is read, decompressed: a small compressed file may expand a thousandfold."""


@dataclass
class PartTimes:
    """Milliseconds of one part."""

    compute: float = 0.0
    exposed: float = 0.0
    """Communication during which no compute kernel runs."""
    idle: float = 0.0

    @property
    def total(self) -> float:
        return self.compute + self.exposed + self.idle


@dataclass
class Traffic:
    """Collectives of one kind, over groups of one size."""

    count: int = 0
    num_bytes: int = 0
    """Bytes of the larger of this rank's input and output."""
    milliseconds: float = 0.0
    """Time of their kernels, overlapped or not, including the wait for other ranks."""
    exposed: float = 0.0
    """Milliseconds of it during which no compute kernel runs."""


@dataclass(frozen=True)
class TraceSummary:
    """Summary of one rank's profiled steps."""

    num_steps: int
    parts: Mapping[str, PartTimes] = field(default_factory=dict)
    """In order of their start."""
    kernels: Sequence[tuple[str, int, float]] = ()
    """Name, count and milliseconds of the slowest kernels."""
    traffic: Mapping[str, Traffic] = field(default_factory=dict)
    """By collective, size and name of its group, if the trace records them."""
    host_waits: Mapping[str, int] = field(default_factory=dict)
    """Number of times the host waited for the GPU in these steps and for their reports, by call."""

    def text(self) -> str:
        """Return the table, per step."""
        if not self.parts:
            return "no kernels in this trace: open it to see what the host did"
        total = sum(part.total for part in self.parts.values())
        lines = [f"{'ms/step':<18} {'total':>9} {'compute':>9} {'exposed communication':>22} {'idle':>9}"]
        everything = PartTimes()
        for name, part in self.parts.items():
            lines.append(self._row(name, part, total))
            everything.compute += part.compute
            everything.exposed += part.exposed
            everything.idle += part.idle
        lines.append(self._row("all", everything, total))
        if self.traffic:
            lines += ["", f"{'ms/step':>9} {'exposed':>16} {'launches':>9} {'GB/step':>9}  collective"]
        for name, traffic in self.traffic.items():
            n = self.num_steps
            lines.append(
                f"{traffic.milliseconds / n:9.2f} {traffic.exposed / n:7.2f} ({traffic.exposed / total:6.1%}) "
                f"{traffic.count / n:9.1f} {traffic.num_bytes / n / 1e9:9.3f}  {name}"
            )
        lines += ["", f"{'ms/step':>9} {'launches':>9}  kernel"]
        for name, count, milliseconds in self.kernels:
            lines.append(f"{milliseconds / self.num_steps:9.2f} {count / self.num_steps:9.1f}  {name[:110]}")
        waits = ", ".join(f"{name} {count / self.num_steps:g}" for name, count in self.host_waits.items())
        return "\n".join([*lines, "", f"host waits for the GPU per step: {waits or 'none'}"])

    def _row(self, name: str, part: PartTimes, total: float) -> str:
        n = self.num_steps
        return (
            f"{name:<18} {part.total / n:9.2f} {part.compute / n:9.2f} {part.exposed / n:13.2f} "
            f"({part.exposed / total:6.1%}) {part.idle / n:9.2f}"
        )


def read_trace(file: Path) -> TraceSummary:
    """Return the summary of a trace that --profile wrote, compressed or not.

    Raises:
        InputError: the file is damaged or not such a trace.
    """
    try:
        trace = json.loads(_content(file))
        first, last = trace[ITERATIONS]
        return summarize(trace["traceEvents"], num_steps=last - first + 1)
    except (OSError, EOFError, zlib.error, ValueError, KeyError, TypeError, RecursionError) as error:
        raise InputError(
            f"{file} is not a readable trace of --profile ({type(error).__name__}: {error})",
            fix="name a file that --profile wrote, such as runs/one/profile/rank0.json.gz",
        ) from error


def _content(file: Path) -> bytes:
    with gzip.open(file) if file.suffix == ".gz" else file.open("rb") as source:
        content = source.read(_MAX_BYTES + 1)
    if len(content) > _MAX_BYTES:
        raise ValueError(f"more than {_MAX_BYTES} bytes of JSON")
    return content


def summarize(events: Sequence[Mapping[str, Any]], *, num_steps: int) -> TraceSummary:
    """Return the summary of the events of a Chrome trace of torch's profiler."""
    spans = [event for event in events if event.get("ph") == "X"]
    begin = max((event["ts"] for event in spans if event["name"] == FIRST_ITERATION), default=-math.inf)
    calls = [event for event in spans if event.get("cat") in ("cuda_runtime", "cuda_driver")]
    launched = {
        event["args"]["correlation"]: event["ts"] for event in calls if "correlation" in event["args"]
    }

    def launch(kernel: Mapping[str, Any]) -> float:
        time: float = launched.get(kernel["args"].get("correlation"), kernel["ts"])
        return time

    kernels = [event for event in spans if event.get("cat") in ("kernel", "gpu_memcpy", "gpu_memset")]
    kernels = sorted((one for one in kernels if launch(one) >= begin), key=lambda event: event["ts"])
    ranges = _Ranges([event for event in spans if event.get("cat") == "user_annotation"])
    parts = [ranges.at(launch(kernel)) for kernel in kernels]
    longest: dict[str, float] = defaultdict(float)
    for kernel in kernels:
        longest[kernel["name"]] += kernel["dur"] / 1000
    counts = Counter(kernel["name"] for kernel in kernels)
    times, exposed = _times(kernels, parts)
    top = sorted(longest, key=lambda name: longest[name], reverse=True)[:_NUM_KERNELS]
    return TraceSummary(
        num_steps=num_steps,
        parts=times,
        kernels=[(name, counts[name], longest[name]) for name in top],
        traffic=_traffic(kernels, exposed),
        host_waits=_host_waits(calls, [one for one in spans if one["name"] == REPORT], begin, num_steps),
    )


def _host_waits(
    calls: Sequence[Mapping[str, Any]], reports: Sequence[Mapping[str, Any]], begin: float, num_steps: int
) -> dict[str, int]:
    """Return the number of waits up to the report of the last step, without those for reports of steps before the first."""
    spans = sorted((one["ts"], one["ts"] + one["dur"]) for one in reports if one["ts"] >= begin)
    end = spans[-1][1] if spans else math.inf
    earlier = spans[: max(len(spans) - num_steps, 0)]
    waits = [call for call in calls if call["name"] in _SYNCHRONIZING and begin <= call["ts"] < end]
    return dict(
        Counter(
            call["name"] for call in waits if not any(first <= call["ts"] < last for first, last in earlier)
        )
    )


_WIDTHS = {
    "Byte": 1,
    "Char": 1,
    "Bool": 1,
    "Half": 2,
    "BFloat16": 2,
    "Int": 4,
    "Float": 4,
    "Long": 8,
    "Double": 8,
}
"""Bytes per element, by the dtype's name in traces."""


def _traffic(kernels: Sequence[Mapping[str, Any]], exposed: Mapping[int, float]) -> dict[str, Traffic]:
    """Return the traffic of NCCL kernels, from the arguments that torch records for each.

    Args:
        exposed: milliseconds of exposed communication, by kernel.
    """
    traffic: dict[str, Traffic] = {}
    for number, kernel in enumerate(kernels):
        recorded = kernel["args"]
        if "Collective name" not in recorded:
            continue
        group = f"{recorded.get('Group size', '?')} {recorded.get('Process Group Description', '')}".rstrip()
        one = traffic.setdefault(f"{recorded['Collective name']} over {group}", Traffic())
        one.exposed += exposed.get(number, 0.0)
        elements = max(int(recorded.get("In msg nelems", 0)), int(recorded.get("Out msg nelems", 0)))
        one.count += 1
        one.num_bytes += elements * _WIDTHS.get(recorded.get("dtype", ""), 0)
        one.milliseconds += kernel["dur"] / 1000
    return traffic


def _times(
    kernels: Sequence[Mapping[str, Any]], parts: Sequence[str]
) -> tuple[dict[str, PartTimes], dict[int, float]]:
    """Sum the intervals between consecutive starts and ends of kernels; each is compute, exposed or idle.

    Returns:
        The times of each part, and the exposed milliseconds of each kernel that communicates. If several do, they are those of
        the one that started first.
    """
    exposed: dict[int, float] = defaultdict(float)
    times: dict[str, PartTimes] = {part: PartTimes() for part in parts}
    boundaries = sorted(
        [(kernel["ts"], True, number) for number, kernel in enumerate(kernels)]
        + [(kernel["ts"] + kernel["dur"], False, number) for number, kernel in enumerate(kernels)]
    )
    computing: dict[int, None] = {}
    communicating: dict[int, None] = {}
    before = boundaries[0][0] if boundaries else 0.0
    for at, is_start, number in boundaries:
        length = (at - before) / 1000
        if computing:
            times[parts[next(iter(computing))]].compute += length
        elif communicating:
            first = next(iter(communicating))
            times[parts[first]].exposed += length
            exposed[first] += length
        else:
            times[parts[number]].idle += length
        running = communicating if "nccl" in kernels[number]["name"].lower() else computing
        if is_start:
            running[number] = None
        else:
            del running[number]
        before = at
    return times, exposed


class _Ranges:
    """Lookup of the host's innermost range by time."""

    def __init__(self, events: Sequence[Mapping[str, Any]]) -> None:
        named = [e for e in events if not e["name"].startswith(("ProfilerStep", FIRST_ITERATION))]
        self._times: list[float] = []
        self._names: list[str] = []
        for at, name in _innermost(sorted(named, key=lambda event: (event["ts"], -event["dur"]))):
            self._times.append(at)
            self._names.append(name)

    def at(self, time: float) -> str:
        index = bisect.bisect_right(self._times, time) - 1
        return self._names[index] if index >= 0 else _OUTSIDE


def _innermost(events: Sequence[Mapping[str, Any]]) -> Iterator[tuple[float, str]]:
    """Yield (time, name) whenever the innermost range changes. `events` are sorted by start, outer ranges first."""
    open_ranges: list[tuple[float, str]] = []
    for event in events:
        yield from _closed(open_ranges, until=event["ts"])
        open_ranges.append((event["ts"] + event["dur"], event["name"]))
        yield event["ts"], event["name"]
    yield from _closed(open_ranges, until=float("inf"))


def _closed(open_ranges: list[tuple[float, str]], *, until: float) -> Iterator[tuple[float, str]]:
    while open_ranges and open_ranges[-1][0] <= until:
        end, _ = open_ranges.pop()
        yield end, open_ranges[-1][1] if open_ranges else _OUTSIDE
