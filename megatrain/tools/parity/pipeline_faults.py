"""Planted faults of pipelines: chunks, weight gradients that are deferred, and activations."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Any
from unittest import mock

from megatrain.config.derive.pipeline import layer_ranges
from megatrain.parallel.pipeline.executor import Executor
from megatrain.training import build


def _swapped_chunks() -> AbstractContextManager[Any]:
    """Give the second virtual stage the layers of the third, and the reverse."""

    def swapped(counts: Sequence[int]) -> list[range]:
        ranges = layer_ranges(counts)
        return [ranges[0], ranges[2], ranges[1], *ranges[3:]] if len(ranges) > 2 else ranges

    return mock.patch.object(build, "layer_ranges", swapped)


def _weight_gradients_skipped() -> AbstractContextManager[Any]:
    """Drop the deferred weight gradients of the first micro-batch on one rank."""
    run = Executor._weight_gradients  # noqa: SLF001

    def skipping(self: Executor, state: Any, *arguments: Any) -> None:
        if state.info.microbatch == 0 and self.grid.pp.is_last:
            state.deferred = [[] for _ in state.deferred]
        run(self, state, *arguments)

    return mock.patch.object(Executor, "_weight_gradients", skipping)


def _activations_of_another_chunk_freed() -> AbstractContextManager[Any]:
    """Overwrite the inputs that the first chunk has saved, when the second one of the same micro-batch has run."""
    run, saved = Executor._forward, {}  # noqa: SLF001

    def freeing(self: Executor, state: Any, batch: Any, chunk: range) -> None:
        run(self, state, batch, chunk)
        if not state.info.is_training:
            return
        if chunk is self.chunks[0]:
            saved[state.info.microbatch] = state.inputs
        else:
            for hidden in saved.pop(state.info.microbatch, ()):
                if hidden is not None:
                    hidden.data.zero_()

    return mock.patch.object(Executor, "_forward", freeing)


def _loss_counted_twice() -> AbstractContextManager[Any]:
    """Double the loss that is logged by the last virtual stage."""
    run = Executor._forward  # noqa: SLF001

    def twice(self: Executor, state: Any, batch: Any, chunk: range) -> None:
        before = state.info.sums.get("lm_loss")
        run(self, state, batch, chunk)
        if before is None and "lm_loss" in state.info.sums:
            state.info.sums["lm_loss"] = 2 * state.info.sums["lm_loss"]

    return mock.patch.object(Executor, "_forward", twice)


Plant = Callable[[], AbstractContextManager[Any]]

PIPELINE_FAULTS: dict[str, tuple[Plant, str]] = {
    "order of chunks swapped": (_swapped_chunks, "pp2 interleaved"),
    "weight gradients of one micro-batch skipped": (_weight_gradients_skipped, "pp2 zbh1"),
    "activations of another chunk freed": (_activations_of_another_chunk_freed, "pp2 zbv"),
    "loss of the last chunk twice": (_loss_counted_twice, "pp2 interleaved"),
}
"""The function that plants each fault, and the layout in which parity finds it."""
