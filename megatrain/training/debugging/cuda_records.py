"""Records of CUDA's own tools: ranges of the step for Nsight Systems, and the history of allocations.

Both are of torch: `emit_nvtx` makes a range of each `record_function`, and torch's allocator keeps its history itself.
"""

from __future__ import annotations

from pathlib import Path

import torch
from torch.autograd.profiler import emit_nvtx

_MAX_EVENTS = 100_000
"""Newest allocations and frees that a history keeps."""


class NvtxRanges:
    """Ranges between cudaProfilerStart and cudaProfilerStop, which `nsys profile --capture-range=cudaProfilerApi` waits for."""

    def __init__(self, *, has_shapes: bool) -> None:
        self._emitted = emit_nvtx(record_shapes=has_shapes)
        torch.cuda.profiler.start()
        self._emitted.__enter__()

    def stop(self) -> None:
        """End the ranges."""
        self._emitted.__exit__(None, None, None)
        torch.cuda.profiler.stop()


class MemoryHistory:
    """Allocations of a rank's GPU from now on, written to `file` for https://pytorch.org/memory_viz."""

    def __init__(self, file: Path) -> None:
        self.file = file
        torch.cuda.memory._record_memory_history(max_entries=_MAX_EVENTS)  # noqa: SLF001 (torch has no other name for it)

    def write(self) -> None:
        """Replace the file with the newest events."""
        self.file.parent.mkdir(parents=True, exist_ok=True)
        torch.cuda.memory._dump_snapshot(str(self.file))  # noqa: SLF001
