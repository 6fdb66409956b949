"""What every parameter is, and which part of it this rank holds.

    local tensor of a fused QKV          canonical tensors (names and shapes that no layout changes)
    rows 0..3   piece q  ------------->  decoder.layers.7.attention.q.weight [8, 8]  box (4..8, 0..8)
    rows 4..5   piece k  ------------->  decoder.layers.7.attention.k.weight [4, 8]  box (2..4, 0..8)
    rows 6..7   piece v  ------------->  decoder.layers.7.attention.v.weight [4, 8]  box (2..4, 0..8)

A piece says which other ranks hold the same box: a norm's weight, or keys and values where there are more tensor ranks
than query groups. Such an element is one element of the model: it is initialised alike, counted once and saved once.

Initialisation, gradient reduction, norms, weight decay, the sharded optimizer, checkpoints and counts all read it.
Rows of a local tensor that no piece covers are padding (of the vocabulary): zero, and outside names and files.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

from megatrain.config.derive.lr_schedule import ParamKind
from megatrain.parallel.rank_lists import Family

Box = tuple[tuple[int, int], ...]
"""Start and stop of each dimension, in a canonical tensor's own coordinates."""


@dataclass(frozen=True)
class Init:
    """Initial values: normal with this mean and standard deviation, or constant where `std` is 0."""

    mean: float = 0.0
    std: float = 0.0


@dataclass(frozen=True)
class Piece:
    """One canonical tensor's part of a local tensor: its box lies at `row`, over all other dimensions."""

    name: str
    shape: tuple[int, ...]
    box: Box
    row: int = 0
    copies: tuple[str, ...] = ()
    """Names of the grid's groups, besides data parallelism, whose ranks all hold this same box."""
    grad_sum_group: str | None = None
    """Name of the group over which its gradients are partial sums. Its ranks hold the box at the same place."""

    @property
    def local_shape(self) -> tuple[int, ...]:
        return box_shape(self.box)


@dataclass(frozen=True, order=True)
class ParamGroup:
    """What the optimizer treats alike."""

    is_matrix: bool
    """Whether it is one of a layer; they stand first."""
    decays: bool
    """Whether weight decay applies."""
    kind: ParamKind
    """What decides its learning rate."""


@dataclass(frozen=True, kw_only=True)
class ParamLayout:
    """What a parameter is. Its pieces are stacked along dimension 0."""

    shape: tuple[int, ...]
    """Of the local tensor."""
    pieces: tuple[Piece, ...]
    init: Init
    decays: bool = True
    """Whether weight decay applies (Megatron-LM's rule: not to biases and to parameters of one dimension)."""
    kind: ParamKind = "matrix"
    """What this is to the learning rate."""
    is_qkv: bool = False
    """Whether these are queries, keys and values, which may count as a matrix each."""
    family: Family = "dense"
    """Which ranks hold it: all replicas of dense layers, or those of these experts."""
    num_matrices: int = 1
    """Into how many matrices the pieces divide, as many pieces each: those of several experts."""

    @property
    def group(self) -> ParamGroup:
        """What the optimizer treats alike."""
        return ParamGroup(self.kind == "matrix", self.decays, self.kind)

    @property
    def numel(self) -> int:
        return math.prod(self.shape)

    def piece_ranges(self, start: int, stop: int) -> Iterator[tuple[Piece, slice]]:
        """The pieces with elements among `start` to `stop` of the flattened local tensor, and which elements of theirs."""
        row_size = math.prod(self.shape[1:])
        for piece in self.pieces:
            first = piece.row * row_size
            low, high = max(start - first, 0), min(stop - first, math.prod(piece.local_shape))
            if low < high:
                yield piece, slice(low, high)

    def ranges(self, start: int, stop: int) -> Iterator[BoxRange]:
        """The boxes that make up elements `start` to `stop` of the flattened local tensor; padding is left out."""
        for piece, part in self.piece_ranges(start, stop):
            offset = piece.row * math.prod(self.shape[1:]) + part.start - start
            for box in flat_boxes(piece.local_shape, part.start, part.stop):
                moved = tuple((a + s, b + s) for (a, b), (s, _) in zip(box, piece.box, strict=True))
                yield BoxRange(piece, moved, offset)
                offset += math.prod(box_shape(box))


@dataclass(frozen=True)
class BoxRange:
    """A box of a canonical tensor, lying contiguously in a flat range of the local one from `offset` on."""

    piece: Piece
    box: Box
    offset: int

    @property
    def shape(self) -> tuple[int, ...]:
        return box_shape(self.box)

    @property
    def numel(self) -> int:
        return math.prod(self.shape)


def box_shape(box: Box) -> tuple[int, ...]:
    return tuple(stop - start for start, stop in box)


def intersect(one: Box, other: Box) -> Box | None:
    """The box that both cover, or None."""
    both = tuple((max(a, c), min(b, d)) for (a, b), (c, d) in zip(one, other, strict=True))
    return both if all(start < stop for start, stop in both) else None


def flat_boxes(shape: tuple[int, ...], start: int, stop: int) -> Iterator[Box]:
    """Boxes that make up the elements `start` to `stop` of a row-major tensor, in order: at most 2 d - 1 of them."""
    if start >= stop:
        return
    if len(shape) == 1:
        yield ((start, stop),)
        return
    row_size = math.prod(shape[1:])
    first, last = start // row_size, (stop - 1) // row_size
    if first == last:
        for box in flat_boxes(shape[1:], start - first * row_size, stop - first * row_size):
            yield ((first, first + 1), *box)
        return
    first_whole, last_whole = -(-start // row_size), stop // row_size
    yield from flat_boxes(shape, start, first_whole * row_size)
    if first_whole < last_whole:
        yield ((first_whole, last_whole), *((0, size) for size in shape[1:]))
    yield from flat_boxes(shape, last_whole * row_size, stop)


class LaidOutModule(nn.Module):
    """A module that says what its parameters are, and forms their gradients in place.

    Parameters are born without memory; `FlatBuffers` gives them theirs, and fills `weight_grads` with the views
    of the gradient buffer that a backward pass adds to.
    """

    borrowed: tuple[LaidOutModule, ...] = ()
    """Modules, maybe of another segment, whose parameters this one uses too. A tuple, so that they are no submodules."""

    def __init__(self) -> None:
        super().__init__()
        self.layouts: dict[str, ParamLayout] = {}
        self.weight_grads: dict[str, Tensor] = {}

    def add_weight(self, name: str, layout: ParamLayout, dtype: torch.dtype) -> None:
        """Declare a parameter."""
        self.layouts[name] = layout
        self.register_parameter(name, nn.Parameter(torch.empty(layout.shape, dtype=dtype, device="meta")))


@dataclass(frozen=True)
class ParamEntry:
    """One parameter of this rank's part of the model."""

    name: str
    """As `named_parameters` of the rank's segments gives it; differs between layouts."""
    module: LaidOutModule
    attribute: str
    layout: ParamLayout
    segment: int
    users: tuple[int, ...]
    """All segments that work with it: its own, and those that borrow it."""

    @property
    def is_shared(self) -> bool:
        """Whether several segments work with it, of this stage or with a copy on another one: a tied embedding."""
        return len(self.users) > 1 or any(piece.grad_sum_group == "embedding" for piece in self.layout.pieces)

    @property
    def parameter(self) -> nn.Parameter:
        found: nn.Parameter = getattr(self.module, self.attribute)
        return found


@dataclass(frozen=True)
class ParamRegistry:
    """Every parameter of this rank, by name, in the order of the segments."""

    entries: dict[str, ParamEntry] = field(default_factory=dict)

    @classmethod
    def of(cls, segments: list[nn.Module]) -> ParamRegistry:
        """Collect what the modules declared. A parameter without a layout is an error of our own code."""
        entries: dict[str, ParamEntry] = {}
        borrowers = [
            (number, lender)
            for number, segment in enumerate(segments)
            for module in segment.modules()
            if isinstance(module, LaidOutModule)
            for lender in module.borrowed
        ]
        for number, segment in enumerate(segments):
            for path, module in segment.named_modules():
                for attribute, _ in module.named_parameters(recurse=False):
                    name = f"{number}.{path}.{attribute}" if path else f"{number}.{attribute}"
                    assert isinstance(module, LaidOutModule), f"{name} has no layout"
                    assert attribute in module.layouts, f"{name} has no layout"
                    users = {number, *(user for user, lender in borrowers if lender is module)}
                    entries[name] = ParamEntry(
                        name, module, attribute, module.layouts[attribute], number, tuple(sorted(users))
                    )
        return cls(entries)
