"""Python's garbage collection: automatic, or with --manual-gc at the same iterations on all ranks.

A rank that collects while the others compute makes all of them wait.
"""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager


class GarbageCollection:
    """Schedule of garbage collections.

    Args:
        is_manual: collect at fixed iterations instead of automatically.
        interval: iterations between collections; 0: none.
        around_evaluation: also collect before and after each evaluation.
    """

    def __init__(self, *, is_manual: bool, interval: int, around_evaluation: bool) -> None:
        self.is_manual = is_manual
        self.interval = interval
        self.around_evaluation = around_evaluation

    @contextmanager
    def manual_collection(self) -> Iterator[None]:
        """Disable automatic collection inside the context, if collection is manual."""
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
        """Collect if the interval is over."""
        if self.is_manual and self.interval and iteration % self.interval == 0:
            gc.collect()

    @contextmanager
    def evaluation(self) -> Iterator[None]:
        """Collect before and after an evaluation."""
        if self.is_manual and self.around_evaluation:
            gc.collect()
        yield
        if self.is_manual and self.around_evaluation:
            gc.collect(generation=0)
