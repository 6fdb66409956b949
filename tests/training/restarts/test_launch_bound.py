"""A rank with --inprocess-restart launches a few passes only after one that does not end, and leaves its generation from there."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

import pytest
import torch.distributed as dist

from megatrain.parallel.pipeline.actions import ActionKind
from megatrain.parallel.pipeline.segments import SegmentHooks, SegmentPass
from megatrain.training.restarts.launch_bound import PASSES_AHEAD, LaunchBound

ONE = SegmentPass(ActionKind.FORWARD, 0)


class Device:
    """A device that ends one pass at each look of the host, up to `last`."""

    def __init__(self, last: int) -> None:
        self.last, self.launched, self.ended, self.longest_queue = last, 0, 0, 0

    def mark(self) -> Callable[[], bool]:
        self.launched += 1
        own = self.launched
        self.longest_queue = max(self.longest_queue, self.launched - self.ended)

        def has_ended() -> bool:
            self.ended = min(self.ended + 1, self.launched, self.last)
            return self.ended >= own

        return has_ended


def run(hooks: LaunchBound, count: int) -> None:
    for _ in range(count):
        hooks.before(ONE)
        hooks.after(ONE)


def test_the_queue_of_the_device_is_bounded_and_all_passes_run() -> None:
    device = Device(last=100)
    hooks = LaunchBound(SegmentHooks(), device.mark, threading.Event())
    run(hooks, 100)
    assert device.launched == 100
    assert device.longest_queue == PASSES_AHEAD + 1


def test_a_rank_that_waits_for_a_collective_without_an_end_leaves_at_once() -> None:
    device, is_leaving = Device(last=7), threading.Event()
    hooks = LaunchBound(SegmentHooks(), device.mark, is_leaving)
    left_at: list[float] = []

    def leave() -> None:
        left_at.append(time.monotonic())
        is_leaving.set()

    timer = threading.Timer(0.1, leave)
    timer.start()
    with pytest.raises(dist.DistBackendError, match="lost"):
        run(hooks, 2000)
    assert time.monotonic() - left_at[0] < 5
    assert device.launched == 7 + PASSES_AHEAD + 1
    timer.join()
