"""Planted faults of pipelines: chunks, weight gradients that are deferred, and activations."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager
from typing import Any
from unittest import mock

from torch import Tensor

from megatrain.config.subjects.pipeline import layer_ranges
from megatrain.parallel.pipeline.actions import Action
from megatrain.parallel.pipeline.executor import Executor
from megatrain.tools.parity.runs.program import Patch
from megatrain.training import build


def _swapped_chunks() -> AbstractContextManager[Any]:
    """Give the second virtual stage the layers of the third, and the reverse."""

    def swapped(counts: Sequence[int]) -> list[range]:
        ranges = layer_ranges(counts)
        return [ranges[0], ranges[2], ranges[1], *ranges[3:]] if len(ranges) > 2 else ranges

    return mock.patch.object(build, "layer_ranges", swapped)


def _weight_gradients_skipped() -> AbstractContextManager[Any]:
    """Drop the deferred weight gradients of the first micro-batch on one rank."""
    run_segment = Executor._weights

    def skipping(self: Executor, state: Any) -> None:
        if state.info.microbatch == 0 and self.grid.pp.rank == self.grid.pp.size - 1:
            state.deferred[0] = []
        run_segment(self, state)

    return mock.patch.object(Executor, "_weights", skipping)


def _activations_of_another_chunk_freed() -> AbstractContextManager[Any]:
    """Overwrite the inputs that the first chunk has saved, when the second one of the same micro-batch has run."""
    run_segment = Executor._forward

    def freeing(self: Executor, run: Any, one: Action, number: int) -> None:
        run_segment(self, run, one, number)
        if one.chunk and number == self.chunks[one.chunk][-1] and run.state(one).info.is_training:
            for hidden in run.states[one.microbatch, 0].inputs:
                if hidden is not None:
                    hidden.data.zero_()

    return mock.patch.object(Executor, "_forward", freeing)


def _loss_counted_twice() -> AbstractContextManager[Any]:
    """Double the loss that is logged by the last virtual stage."""
    run_segment = Executor._forward

    def twice(self: Executor, run: Any, one: Action, number: int) -> None:
        sums = run.state(one).info.sums
        before = sums.get("lm_loss")
        run_segment(self, run, one, number)
        if before is None and "lm_loss" in sums:
            sums["lm_loss"] = 2 * sums["lm_loss"]

    return mock.patch.object(Executor, "_forward", twice)


def _one_receive_buffer() -> AbstractContextManager[Any]:
    """Receive all messages of a rank into one buffer, although activations are saved in it."""
    empty = Executor._empty

    def reused(self: Executor, *arguments: Any) -> Tensor:
        if not hasattr(self, "buffer"):
            vars(self)["buffer"] = empty(self, *arguments)
        buffer: Tensor = vars(self)["buffer"]
        return buffer

    return mock.patch.object(Executor, "_empty", reused)


PIPELINE_FAULTS: dict[str, tuple[Patch, str]] = {
    "order of chunks swapped": (_swapped_chunks, "pp2 interleaved"),
    "weight gradients of one micro-batch skipped": (_weight_gradients_skipped, "pp2 zbh1"),
    "activations of another chunk freed": (_activations_of_another_chunk_freed, "pp2 zbv"),
    "loss of the last chunk twice": (_loss_counted_twice, "pp2 interleaved"),
    "messages received into one buffer": (_one_receive_buffer, "pp2"),
}
"""The function that plants each fault, and the layout in which parity finds it."""
