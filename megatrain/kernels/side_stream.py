"""Concurrent computation of a branch on a GPU: a second stream, and the memory that both streams use.

    current stream   ── fork ── other branch ────────── join ──
    side stream            └─── branch ──────────────────┘

Autograd runs the backward pass of the branch on the side stream too, and synchronizes the streams where gradients pass from
one to the other. Weight gradients that the branch accumulates are complete for the current stream once it has the gradient
of the branch's input.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor


class SideStream:
    """A stream next to the current one, created on the first use."""

    def __init__(self) -> None:
        self._stream: torch.cuda.Stream | None = None

    def fork(self, branch: Callable[[], Tensor], *inputs: Tensor) -> Tensor:
        """Run `branch` on the side stream, after the work so far; pass its result to `join` before any other use.

        Args:
            inputs: tensors of the current stream that the branch reads.
        """
        if self._stream is None:
            self._stream = torch.cuda.Stream(inputs[0].device)
        self._stream.wait_stream(torch.cuda.current_stream(inputs[0].device))
        for x in inputs:
            x.record_stream(self._stream)
        with torch.cuda.stream(self._stream):
            return branch()

    def join(self, result: Tensor) -> Tensor:
        """Order the work that follows after the branch; returns the result."""
        assert self._stream is not None, "fork comes first"
        current = torch.cuda.current_stream(result.device)
        current.wait_stream(self._stream)
        result.record_stream(current)
        return result
