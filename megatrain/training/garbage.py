"""Python's garbage collection: left to Python, or at the same iterations on all ranks.

A rank that collects while the others compute makes all of them wait; with --manual-gc they collect together.
"""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager


class GarbageCollection:
    """When to collect.

    Args:
        is_manual: whether at all by hand.
        interval: iterations between collections; 0: never.
        around_evaluation: whether before and after an evaluation too.
    """

    def __init__(self, *, is_manual: bool, interval: int, around_evaluation: bool) -> None:
        self.is_manual = is_manual
        self.interval = interval
        self.around_evaluation = around_evaluation

    @contextmanager
    def taken_over(self) -> Iterator[None]:
        """Python collects nothing by itself in the meantime."""
        if not self.is_manual or not gc.isenabled():
            yield
            return
        gc.disable()
        gc.collect()
        try:
            yield
        finally:
            gc.enable()

    def after_iteration(self, iteration: int) -> None:
        """Collect if it is time."""
        if self.is_manual and self.interval and iteration % self.interval == 0:
            gc.collect()

    @contextmanager
    def evaluation(self) -> Iterator[None]:
        """Collect before and after: an evaluation leaves other things behind than training."""
        if self.is_manual and self.around_evaluation:
            gc.collect()
        yield
        if self.is_manual and self.around_evaluation:
            gc.collect(generation=0)
