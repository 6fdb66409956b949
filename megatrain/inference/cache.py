"""Cache memory of text generation: rows of keys and values, and states of linear attention and Mamba-2, of a rank's layers.

    space      the layers with one window: they keep the same rows of every sequence; cross-attention keeps the rows of its memory
    sequence   a range of consecutive rows in each space, reserved before its first token; its rows are in order of position
    window     a sequence keeps the rows of its window and one pass; a full range moves the rows of the window to its start
    state      such a layer keeps one state and the inputs of its convolution for each sequence of any length

A plan has the sizes before memory is allocated. Multi-latent attention keeps the latent and the rotary channels of keys: one
row for all heads.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Final, Literal

import torch
from torch import Tensor

from megatrain.config.errors import ConfigError
from megatrain.config.model_spec.model import ModelSpec
from megatrain.config.model_spec.part import CacheSizes
from megatrain.kernels.dtypes import accumulation_dtype

MEMORY: Final = "memory"
Space = int | Literal["memory"] | None
"""The window of a space's layers; None: they attend to all earlier tokens; memory: to the output of the encoder."""


def space_of(layer: CacheSizes) -> Space:
    """Return the space of a layer."""
    return MEMORY if layer.is_of_memory else layer.window


@dataclass(frozen=True)
class CachePlan:
    """Sizes of the cache for `num_sequences` sequences of `max_tokens` tokens; shorter ones leave memory for more."""

    layers: tuple[CacheSizes, ...]
    dtype: torch.dtype
    tokens_per_pass: int
    """Most tokens that one pass adds to a sequence."""
    max_tokens: int
    """Most tokens of a sequence."""
    num_sequences: int = 1
    max_sequences: int = 1
    """Most sequences at a time, of any length."""
    max_memory: int = 0
    """Most tokens of the encoder's part of a sequence."""

    @property
    def spaces(self) -> list[Space]:
        """Return the spaces of the layers with rows."""
        return list(dict.fromkeys(space_of(layer) for layer in self.layers if layer.rows))

    def rows_of(self, space: Space, tokens: int, memory: int) -> int:
        """Return the rows that a sequence of so many tokens reserves, with so many of the encoder's."""
        if space == MEMORY:
            return memory
        return tokens if space is None else min(tokens, space + self.tokens_per_pass)

    def bytes_of(self, tokens: int, memory: int = 0) -> int:
        """Return the bytes of the rows of one sequence."""
        return sum(
            self.rows_of(space_of(layer), tokens, memory) * self._row_bytes(layer) for layer in self.layers
        )

    @property
    def state_bytes(self) -> int:
        """Return the bytes of the states of one sequence."""
        size = accumulation_dtype(self.dtype).itemsize
        return size * sum(math.prod(shape) for layer in self.layers for shape in layer.states)

    @property
    def num_bytes(self) -> int:
        """Return the bytes of all memory."""
        unused = sum(map(self._row_bytes, self.layers))
        return (
            self.num_sequences * self.bytes_of(self.max_tokens, self.max_memory)
            + self.max_sequences * self.state_bytes
            + unused
        )

    @property
    def description(self) -> str:
        """Return a sentence about the memory."""
        size = (
            f"{self.num_bytes / 1e6:,.1f} MB" if self.num_bytes < 1e9 else f"{self.num_bytes / 1e9:,.1f} GB"
        )
        tokens = f"{self.max_tokens + self.max_memory} tokens"
        return f"cache of {size} for {self.num_sequences} x {tokens}, sequences at once: {self.max_sequences}"

    def _row_bytes(self, layer: CacheSizes) -> int:
        return self.dtype.itemsize * sum(heads * channels for heads, channels in layer.rows)


def layer_caches(spec: ModelSpec, tp_size: int) -> tuple[CacheSizes, ...]:
    """Return the cache of each layer with a mixer, on a tensor rank. Raises ConfigError for a part that has none."""
    found = []
    if spec.stacks[-1].name == "encoder":
        raise ConfigError(
            "an encoder alone (--model-family bert) generates no text",
            fix="export the model with megatrain convert megatrain-to-hf, or evaluate it with pretrain.py --skip-train",
        )
    for layer in spec.layers:
        for part in layer.parts:
            sizes = part.cache_sizes(tp_size)
            if sizes is None or (part.role == "mixer" and type(part).module is not None):
                raise ConfigError(
                    f"layers with {type(part).__name__} generate no text: no cached module computes the part",
                    fix="evaluate the model with pretrain.py --skip-train, or use a model without this part",
                )
            if part.role == "mixer":
                found.append(sizes)
    return tuple(found)


@dataclass
class Range:
    """Rows of one sequence in one space."""

    start: int
    capacity: int
    used: int = 0


@dataclass
class Reservation:
    """Memory of one sequence: its rows by space, and the number of its states."""

    ranges: dict[Space, Range]
    state: int


@dataclass(frozen=True)
class Extent:
    """New tokens of one sequence in a pass, and its rows in a space, which end with the rows of the new tokens."""

    first_token: int
    num_tokens: int
    first_row: int
    num_rows: int


@dataclass(frozen=True)
class SpaceStep:
    """Work of the layers of one space in a pass: write the rows of new tokens, attend to the extents."""

    extents: tuple[Extent, ...]
    """In the order of the tokens."""
    written: Tensor
    """Row of each new token, int64 [t]."""


class Cache:
    """Allocated memory, and the ranges that are reserved in it."""

    def __init__(self, plan: CachePlan, device: torch.device) -> None:
        self.plan, self.device = plan, device
        self.num_rows = {
            space: plan.num_sequences * plan.rows_of(space, plan.max_tokens, plan.max_memory)
            for space in plan.spaces
        }
        # The last row serves slots without a sequence, in passes with a fixed number of slots.
        self.rows = [
            [
                torch.zeros((self.num_rows[space_of(layer)] + 1, *shape), dtype=plan.dtype, device=device)
                for shape in layer.rows
            ]
            for layer in plan.layers
        ]
        dtype = accumulation_dtype(plan.dtype)
        self.states = [
            [torch.zeros((plan.max_sequences, *shape), dtype=dtype, device=device) for shape in layer.states]
            for layer in plan.layers
        ]
        self._free = {space: FreeRanges(size) for space, size in self.num_rows.items()}
        self._free_states = list(reversed(range(plan.max_sequences)))

    @property
    def is_empty(self) -> bool:
        """Return whether no sequence has memory."""
        is_whole = all(one.spans == [(0, self.num_rows[space])] for space, one in self._free.items())
        return is_whole and len(self._free_states) == self.plan.max_sequences

    def reserve(self, tokens: int, memory: int = 0) -> Reservation | None:
        """Reserve rows for a sequence of so many tokens, and of the encoder's; None: not enough are free now."""
        assert tokens <= self.plan.max_tokens
        assert memory <= self.plan.max_memory
        if not self._free_states:
            return None
        found: dict[Space, Range] = {}
        for space, free in self._free.items():
            size = self.plan.rows_of(space, tokens, memory)
            start = free.take(size)
            if start is None:
                for other, taken in found.items():
                    self._free[other].give(taken.start, taken.capacity)
                return None
            found[space] = Range(start, size)
        reservation = Reservation(found, self._free_states.pop())
        for state in itertools.chain(*self.states):
            state[reservation.state].zero_()
        return reservation

    def release(self, reservation: Reservation) -> None:
        """Return the memory of a sequence."""
        for space, taken in reservation.ranges.items():
            self._free[space].give(taken.start, taken.capacity)
        self._free_states.append(reservation.state)

    def extend(self, reservations: Sequence[tuple[Reservation, int, int]]) -> dict[Space, SpaceStep]:
        """Add rows for new tokens of some sequences, and return what a pass does in each space.

        Args:
            reservations: each with its numbers of new tokens, and of new tokens of the encoder.
        """
        return {space: self._extend(space, reservations) for space in self._free}

    def add_tokens(self, reservations: Sequence[Reservation]) -> bool:
        """Add rows for one token of each sequence; return whether rows of a window have moved."""
        has_moved = False
        for reservation in reservations:
            for space, rows in reservation.ranges.items():
                has_moved |= self._free_rows(space, rows, 1)
                rows.used += 1
        return has_moved

    def _extend(self, space: Space, reservations: Sequence[tuple[Reservation, int, int]]) -> SpaceStep:
        extents: list[Extent] = []
        written: list[range] = []
        first = 0
        for reservation, count, of_memory in reservations:
            rows, new = reservation.ranges[space], of_memory if space == MEMORY else count
            self._free_rows(space, rows, new)
            end = rows.start + rows.used
            written.append(range(end, end + new))
            rows.used += new
            extents.append(Extent(first, count, rows.start, rows.used))
            first += count
        flat = torch.tensor(list(itertools.chain(*written)), dtype=torch.int64, device=self.device)
        return SpaceStep(tuple(extents), flat)

    def _free_rows(self, space: Space, rows: Range, count: int) -> bool:
        """Move the rows of the window to the start of a range that is full with `count` more rows; return whether it was."""
        if rows.used + count <= rows.capacity:
            return False
        assert isinstance(space, int), "the whole sequence is reserved"
        first = rows.start + rows.used - space
        for layer, tensors in zip(self.plan.layers, self.rows, strict=True):
            for one in tensors if space_of(layer) == space else ():
                one[rows.start : rows.start + space] = one[first : first + space].clone()
        rows.used = space
        return True


@dataclass
class FreeRanges:
    """Free rows of a space, as spans of rows (start, stop) in order; adjacent ones are joined."""

    size: int
    spans: list[tuple[int, int]] = field(init=False)

    def __post_init__(self) -> None:
        self.spans = [(0, self.size)]

    def take(self, count: int) -> int | None:
        """Take consecutive rows of the first span with enough; return the first row, or None."""
        for number, (start, stop) in enumerate(self.spans):
            if stop - start >= count:
                rest = [(start + count, stop)] if stop - start > count else []
                self.spans[number : number + 1] = rest
                return start
        return None

    def give(self, start: int, count: int) -> None:
        """Return rows that were taken."""
        self.spans = list(_joined(sorted([*self.spans, (start, start + count)])))


def _joined(spans: Sequence[tuple[int, int]]) -> Iterator[tuple[int, int]]:
    first, last = spans[0]
    for start, stop in spans[1:]:
        assert start >= last, "rows were returned twice"
        if start > last:
            yield first, last
            first = start
        last = stop
    yield first, last
