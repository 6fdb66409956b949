"""Passes that add one token to each of some sequences, without waiting for the device.

    state    token, position, and in each space of the cache first row and number of rows: int64 [2 + 2 spaces, slots]
    pass     state ─> model ─> logits [slots, v]; on a GPU a CUDA graph, captured once per number of slots
    after    the sampled tokens, the next positions and numbers of rows: written on the device

While the sequences stay the same, nothing is copied from the host. Slots without a sequence use the last row of the cache.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from megatrain.inference.cache import Reservation
from megatrain.inference.cached_model import CachedModel
from megatrain.kernels.fused.launching import is_fused
from megatrain.kernels.host_copy import copy_to_device

_NUM_WARM_UP = 2
"""Passes before a capture: kernels are compiled, libraries allocate their memory."""


def num_slots(sequences: int) -> int:
    """Return the slots of a pass: the next of 1, 2, 4, 8, 16, 24, 32, 48, 64, 96, 128 ..."""
    power = 1 << max(sequences - 1, 0).bit_length()
    smaller = power * 3 // 4
    return smaller if power > 16 and sequences <= smaller else power


class Decoder:
    """Extends some sequences by one token in each pass.

    Args:
        has_graphs: capture passes as CUDA graphs.
    """

    def __init__(self, model: CachedModel, *, has_graphs: bool) -> None:
        assert model.can_decode
        self.model, self.cache, self.has_graphs = model, model.cache, has_graphs
        self._passes: dict[int, _Pass] = {}
        self._pool = torch.cuda.graph_pool_handle() if has_graphs else None
        self._reservations: list[Reservation] = []

    def begin(
        self, reservations: Sequence[Reservation], tokens: Sequence[int], positions: Sequence[int]
    ) -> None:
        """Extend these sequences from now on. `tokens` are their last ones, which are not in the cache."""
        self._reservations, count = list(reservations), len(tokens)
        size = num_slots(count)
        if size not in self._passes:
            self._passes[size] = _Pass(self.model, size)
        self._pass = self._passes[size]
        unused = [0] * (size - count)
        rows = self._rows(num_new=0)
        self._pass.set([[*tokens, *unused], [*positions, *unused], *rows])
        is_used = [1] * count + unused
        steps = [unused + [0] * count, is_used, *([[0] * size, is_used] * (len(rows) // 2))]
        self._pass.steps.copy_(copy_to_device(steps, torch.int64, self.model.device))

    def run(self) -> Tensor:
        """Run a pass; return the logits of the next tokens, [n, v], which the next pass overwrites."""
        if self.cache.add_tokens(self._reservations):
            self._pass.set(self._rows(num_new=1), first=2)
        if self.has_graphs:
            self._pass.capture(self._pool)
        return self._pass.run()[: len(self._reservations)]

    def add(self, tokens: Tensor) -> None:
        """Set the tokens of the next pass, int64 [n] on the device."""
        self._pass.state[0, : len(tokens)] = tokens
        self._pass.state += self._pass.steps

    def _rows(self, *, num_new: int) -> list[list[int]]:
        """Return first row and number of rows of each slot, by space, without the last `num_new` rows."""
        unused = self._pass.size - len(self._reservations)
        found = []
        for space in self.cache.plan.spaces:
            ranges = [one.ranges[space] for one in self._reservations]
            found.append([one.start for one in ranges] + [self.cache.num_rows[space]] * unused)
            found.append([one.used - num_new for one in ranges] + [0] * unused)
        return found


class _Pass:
    """Passes with one number of slots: their state, and the graph that computes them."""

    def __init__(self, model: CachedModel, size: int) -> None:
        self.model, self.size = model, size
        shape = (2 + 2 * len(model.cache.plan.spaces), size)
        self.state = torch.zeros(shape, dtype=torch.int64, device=model.device)
        self.steps = torch.zeros_like(self.state)
        """Increments of the state after a pass."""
        self._graph: torch.cuda.CUDAGraph | None = None
        self._logits: Tensor | None = None

    def set(self, values: Sequence[Sequence[int]], first: int = 0) -> None:
        """Write rows of the state, from row `first` on."""
        rows = copy_to_device(values, torch.int64, self.model.device)
        self.state[first : first + len(rows)] = rows

    def capture(self, pool: Any) -> None:
        """Capture the pass, once. The passes before write the rows of the cache that the first replay writes again."""
        if self._graph is not None:
            return
        stream, current = torch.cuda.Stream(), torch.cuda.current_stream()
        stream.wait_stream(current)
        with torch.cuda.stream(stream):
            for _ in range(_NUM_WARM_UP):
                self.model.decode(self.state)
        current.wait_stream(stream)
        self._graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(self._graph, pool=pool, capture_error_mode="thread_local"):
            self._logits = self.model.decode(self.state)

    def run(self) -> Tensor:
        """Return the logits of the next tokens, [slots, v]."""
        if self._graph is None or self._logits is None:
            return self.model.decode(self.state)
        self._graph.replay()
        return self._logits


def can_capture(model: CachedModel) -> bool:
    """Return whether CUDA graphs compute the passes: kernels of one GPU that do not wait for the host."""
    spec = model.model.spec
    has_experts = any(layer.experts is not None for layer in spec.layers)
    rows = next((one for layer in model.cache.rows for one in layer), None)
    is_one_kernel = not has_experts or model.cache.plan.dtype is torch.bfloat16
    return rows is not None and is_fused(rows) and is_one_kernel and model.model.tp.size == 1
