"""Bound on how far the host runs ahead of a GPU: a rank that may have to leave its generation must not wait in a launch.

    passes launched    1 2 3 4 5 | wait, outside CUDA, until pass 1 has ended, or until this rank leaves its generation
    passes of the GPU  1 ...

A collective of a lost rank never ends, and the GPU queues about 1,024 launches after it. The next launch then waits in the driver with
its locks, and so does the abort of NCCL's communicators, which would end the collective (github.com/NVIDIA/nccl/issues/829 and 1317;
communicators that do not block do not help, since it is CUDA that waits).
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable
from typing import Final

import torch
import torch.distributed as dist

from megatrain.parallel.pipeline.segments import SegmentHooks, SegmentPass

PASSES_AHEAD: Final = 4
"""Passes of segments that the GPU may have in its queue: of about 100 launches each, with an optimizer's step below 1,024."""
_SECONDS_BETWEEN_LOOKS: Final = 1e-4


class LaunchBound(SegmentHooks):
    """Hooks of an executor, which call others, and wait after a pass while more than `PASSES_AHEAD` have not ended.

    Args:
        mark: marks the end of the work that was launched, and returns a function that says whether it has ended.
        is_leaving: set when this rank leaves its generation.
    """

    def __init__(
        self, hooks: SegmentHooks, mark: Callable[[], Callable[[], bool]], is_leaving: threading.Event
    ) -> None:
        super().__init__(hooks)
        self._mark, self._is_leaving = mark, is_leaving
        self._ahead: deque[Callable[[], bool]] = deque()

    def after(self, segment_pass: SegmentPass) -> None:
        """See `SegmentHooks`.

        Raises:
            DistBackendError: this rank leaves its generation.
        """
        super().after(segment_pass)
        self._ahead.append(self._mark())
        if len(self._ahead) <= PASSES_AHEAD:
            return
        has_ended = self._ahead.popleft()
        while not has_ended():
            if self._is_leaving.wait(_SECONDS_BETWEEN_LOOKS):
                raise dist.DistBackendError("a pass waits for a rank that is lost")


def mark_on_gpu() -> Callable[[], bool]:
    """Record an event in the current stream; return its query."""
    event = torch.cuda.Event()
    event.record()
    return event.query
