"""A trial of CUDA graphs: some steps are timed without and with them, and the faster passes stay.

    step     1        2, 3      4        5, 6, 7   8
             warm-up  warm-up   record   replay    the answer, the same on all ranks
             -------  no graphs -------  graphs

A GPU that waits for the host's launches gains. Elsewhere graphs cost: they reduce gradients after the last micro-batch.
"""

from __future__ import annotations

from collections.abc import Callable
from enum import Enum
from typing import Final

import torch

from megatrain.parallel.collectives import all_reduce
from megatrain.parallel.grid import RankGroup

MIN_WARMUP_STEPS: Final = 3
"""Kernels are compiled in the first of them."""
NUM_REPLAYS: Final = 3
MIN_GAIN: Final = 0.01
MAX_USED: Final = 0.88
"""Part of the GPU's memory. Graphs keep that of their activations, which evaluation then lacks: runs with this part in use evaluate."""
MAX_EXPECTED: Final = 0.8
"""Part that graphs of two micro-batches may take, which is only estimated."""


class StepKind(Enum):
    """Kinds of steps, by their passes."""

    WARMUP = "warm-up"
    RECORD = "record"
    REPLAY = "replay"


class GpuClock:
    """Measures times on the device."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._events: list[torch.cuda.Event] = []

    def mark(self) -> None:
        """Mark the present moment of the device's work."""
        event = torch.cuda.Event(enable_timing=True)
        event.record(torch.cuda.current_stream(self._device))
        self._events.append(event)

    def seconds(self, number: int) -> float:
        """Return the seconds between a mark, counted from 0, and the next one."""
        begin, end = self._events[number : number + 2]
        end.synchronize()
        milliseconds: float = begin.elapsed_time(end)
        return milliseconds / 1000

    def used_memory(self) -> tuple[float, float]:
        """Return the parts of the device's memory that tensors had at the peak, and have between steps."""
        total = torch.cuda.get_device_properties(self._device).total_memory
        peak, kept = torch.cuda.max_memory_allocated(self._device), torch.cuda.memory_allocated(self._device)
        return peak / total, kept / total


class Trial:
    """Times the steps of a run and decides whether graphs stay.

    Args:
        world: all ranks.
        device: of the numbers that ranks compare.
        report: receives a sentence for the log, a predicate of the iteration.
    """

    def __init__(
        self, clock: GpuClock, world: RankGroup, device: torch.device, report: Callable[[str], None]
    ) -> None:
        self._clock, self._world, self._device, self._report = clock, world, device, report
        self._steps: list[tuple[StepKind, int]] = []
        self.has_twice_the_memory = False
        """Graphs may keep the activations of two micro-batches; known once a record is allowed."""
        self._is_over = False

    def allows(self, kind: StepKind, num_microbatches: int) -> bool:
        """Note that a step of this kind begins; return False if there shall be no graphs from this step on."""
        if self._is_over:
            return True
        if kind is StepKind.RECORD:
            used, kept = self._clock.used_memory()
            used, twice = self._maximum(used, 2 * used - kept)
            self.has_twice_the_memory = twice <= MAX_EXPECTED
            if used > MAX_USED:
                self._report(f"records no CUDA graphs: {used:.0%} of a GPU's memory is in use")
                return False
        self._clock.mark()
        self._steps.append((kind, num_microbatches))
        if sum(kind is StepKind.REPLAY for kind, _ in self._steps) <= NUM_REPLAYS:
            return True
        self._is_over = True
        return self._do_graphs_pay(num_microbatches)

    def _do_graphs_pay(self, num_microbatches: int) -> bool:
        eager, graphs = self._maximum(self._best(StepKind.WARMUP), self._best(StepKind.REPLAY))
        do_pay = graphs < (1 - MIN_GAIN) * eager
        times = f"{1000 * num_microbatches * graphs:.1f} ms a step with them, {1000 * num_microbatches * eager:.1f} without"
        self._report(f"{'keeps' if do_pay else 'drops'} CUDA graphs: {times}")
        return do_pay

    def _best(self, kind: StepKind) -> float:
        """Return the least seconds a micro-batch of a step of this kind, but the first step, between two beginnings."""
        return min(
            self._clock.seconds(number) / num_microbatches
            for number, (one, num_microbatches) in enumerate(self._steps[:-1])
            if one is kind and number > 0
        )

    def _maximum(self, *numbers: float) -> list[float]:
        """Return the maximum of each number over all ranks."""
        found: list[float] = all_reduce(
            torch.tensor(numbers, dtype=torch.float64, device=self._device), self._world, "max"
        ).tolist()
        return found
