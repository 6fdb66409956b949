"""Parameter layouts: describe every parameter and the part of it that this rank holds.

    fused QKV on rank 1 of tp 2          canonical tensors (equal under every layout)
    rows 0..4   piece q  ------------->  decoder.layers.7.attention.q.weight [8, 8]  box (4..8, 0..8)
    rows 4..6   piece k  ------------->  decoder.layers.7.attention.k.weight [4, 8]  box (2..4, 0..8)
    rows 6..8   piece v  ------------->  decoder.layers.7.attention.v.weight [4, 8]  box (2..4, 0..8)

A piece names the groups whose ranks hold the same box: a norm's weight on all tensor ranks, or keys and values with more tensor
ranks than query groups. Its elements exist once in the model: equal initial values, counted once, saved once.

Initialisation, gradient reduction, norms, weight decay, the sharded optimizer, checkpoints and counts read the layouts.
Rows of a local tensor that no piece covers are padding (of the vocabulary): zero, without name, in no file.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

from megatrain.config.derive.lr_schedule import ParamKind
from megatrain.config.errors import ConfigError
from megatrain.kernels.linear import FirstWrite
from megatrain.parallel.rank_lists import Family

Box = tuple[tuple[int, int], ...]
"""Start and stop of each dimension, in the coordinates of a canonical tensor."""


@dataclass(frozen=True)
class Init:
    """Initial values: normal with this mean and standard deviation; constant if `std` is 0; or one of the others."""

    mean: float = 0.0
    std: float = 0.0
    uniform: tuple[float, float] | None = None
    """Uniform numbers between these."""
    log_of: tuple[float, float] | None = None
    """Logarithms of uniform numbers between these."""
    softplus_of: tuple[float, float] | None = None
    """Numbers whose softplus has uniform logarithms, between these: initial step sizes of Mamba."""


@dataclass(frozen=True)
class Piece:
    """The part of a canonical tensor in a local tensor: its box starts at `row` and spans all other dimensions."""

    name: str
    shape: tuple[int, ...]
    box: Box
    row: int = 0
    copies: tuple[str, ...] = ()
    """Names of the grid's groups, besides data parallelism, whose ranks hold the same box."""
    grad_sum_groups: tuple[str, ...] = ()
    """Names of the groups over which its gradients are partial sums. Their ranks hold the box at the same position."""

    @property
    def local_shape(self) -> tuple[int, ...]:
        return box_shape(self.box)


@dataclass(frozen=True, order=True)
class ParamGroup:
    """Properties that decide how the optimizer treats a parameter."""

    is_matrix: bool
    """A matrix of a layer; these come first in a bucket."""
    decays: bool
    """Weight decay applies."""
    kind: ParamKind
    """Kind that decides the learning rate."""


@dataclass(frozen=True, kw_only=True)
class ParamLayout:
    """Description of a parameter. Its pieces are stacked along dimension 0."""

    shape: tuple[int, ...]
    """Shape of the local tensor."""
    pieces: tuple[Piece, ...]
    init: Init
    decays: bool = True
    """Weight decay applies (Megatron-LM's rule: except to biases and other one-dimensional parameters)."""
    kind: ParamKind = "matrix"
    """Kind that decides the learning rate; `scale`: passes write it, nothing trains it."""
    is_qkv: bool = False
    """The pieces are queries, keys and values, which an optimizer may treat as separate matrices."""
    family: Family = "dense"
    """Replicas that hold it: of dense layers, or of experts."""
    is_trained: bool = True
    """False: it is frozen, without gradients and optimizer state."""
    num_matrices: int = 1
    """Number of matrices that the pieces form, with equally many pieces each: one per expert."""

    @property
    def group(self) -> ParamGroup:
        """Properties that decide how the optimizer treats it."""
        return ParamGroup(self.kind == "matrix", self.decays, self.kind)

    @property
    def numel(self) -> int:
        return math.prod(self.shape)

    def piece_ranges(self, start: int, stop: int) -> Iterator[tuple[Piece, slice]]:
        """Yield the pieces with elements in `start` to `stop` of the flattened local tensor, and their range in the piece."""
        row_size = math.prod(self.shape[1:])
        for piece in self.pieces:
            first = piece.row * row_size
            low, high = max(start - first, 0), min(stop - first, math.prod(piece.local_shape))
            if low < high:
                yield piece, slice(low, high)

    def ranges(self, start: int, stop: int) -> Iterator[BoxRange]:
        """Yield the boxes that cover elements `start` to `stop` of the flattened local tensor, without padding."""
        for piece, part in self.piece_ranges(start, stop):
            offset = piece.row * math.prod(self.shape[1:]) + part.start - start
            for box in flat_boxes(piece.local_shape, part.start, part.stop):
                moved = tuple((a + s, b + s) for (a, b), (s, _) in zip(box, piece.box, strict=True))
                yield BoxRange(piece, moved, offset)
                offset += math.prod(box_shape(box))


@dataclass(frozen=True)
class BoxRange:
    """A box of a canonical tensor, contiguous from `offset` on in a flat range of the local tensor."""

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
    """Return the intersection of two boxes, or None."""
    both = tuple((max(a, c), min(b, d)) for (a, b), (c, d) in zip(one, other, strict=True))
    return both if all(start < stop for start, stop in both) else None


def whole_box(shape: Sequence[int]) -> Box:
    """Return the box of a whole tensor."""
    return tuple((0, size) for size in shape)


def slices_within(part: Box, box: Box) -> tuple[slice, ...]:
    """Return the slices of `part` in a tensor with the data of `box`."""
    return tuple(slice(a - start, b - start) for (a, b), (start, _) in zip(part, box, strict=True))


def flat_boxes(shape: tuple[int, ...], start: int, stop: int) -> Iterator[Box]:
    """Yield the boxes that cover elements `start` to `stop` of a row-major tensor, in order: at most 2 d - 1."""
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


class ShardedModule(nn.Module):
    """A module that declares the layouts of its parameters, and accumulates their gradients in place.

    Parameters have no memory at first; `allocate_buffers` allocates it, and fills `weight_grads` with the views of the
    gradient buffer that a backward pass adds to.
    """

    tied_to: tuple[ShardedModule, ...] = ()
    """Modules, possibly of another segment, whose parameters this one uses too. A tuple: they are not submodules."""

    def __init__(self) -> None:
        super().__init__()
        self.layouts: dict[str, ParamLayout] = {}
        self.weight_grads: dict[str, Tensor] = {}
        self.first_writes: dict[str, FirstWrite] = {}
        """Weights whose gradients may be overwritten."""

    def add_weight(self, name: str, layout: ParamLayout, dtype: torch.dtype) -> None:
        """Declare a parameter."""
        self.layouts[name] = layout
        self.register_parameter(name, nn.Parameter(torch.empty(layout.shape, dtype=dtype, device="meta")))


@dataclass(frozen=True)
class ParamEntry:
    """One parameter of this rank's part of the model."""

    name: str
    """Name by `named_parameters` of the rank's segments; differs between layouts."""
    module: ShardedModule
    attribute: str
    layout: ParamLayout
    segment: int
    users: tuple[int, ...]
    """All segments that use it: its own, and the segments of modules tied to it."""

    @property
    def is_shared(self) -> bool:
        """True for a tied embedding: several segments use it, or another stage has a copy."""
        return len(self.users) > 1 or bool(self.stage_groups)

    @property
    def stage_groups(self) -> frozenset[str]:
        """Names of the groups of pipeline ranks that hold copies and sum their gradients."""
        groups = {name for piece in self.layout.pieces for name in piece.grad_sum_groups}
        return frozenset(groups & {"embedding", "pp"})

    @property
    def parameter(self) -> nn.Parameter:
        found: nn.Parameter = getattr(self.module, self.attribute)
        return found


@dataclass(frozen=True)
class ParamRegistry:
    """All parameters of this rank, by name, in the order of the segments."""

    entries: dict[str, ParamEntry] = field(default_factory=dict)

    @classmethod
    def of(cls, segments: list[nn.Module]) -> ParamRegistry:
        """Collect the layouts that the modules declare. Raises ConfigError if two have the same name."""
        entries: dict[str, ParamEntry] = {}
        owners: dict[str, str] = {}
        tied = [
            (number, owner)
            for number, segment in enumerate(segments)
            for module in segment.modules()
            if isinstance(module, ShardedModule)
            for owner in module.tied_to
        ]
        for number, segment in enumerate(segments):
            for path, module in segment.named_modules():
                for attribute, _ in module.named_parameters(recurse=False):
                    name = f"{number}.{path}.{attribute}" if path else f"{number}.{attribute}"
                    assert isinstance(module, ShardedModule), f"{name} has no layout"
                    assert attribute in module.layouts, f"{name} has no layout"
                    for piece in module.layouts[attribute].pieces:
                        if owners.setdefault(piece.name, name) != name:
                            raise ConfigError(
                                f"two parameters have the name {piece.name}: {owners[piece.name]} and {name}",
                                fix="give each parameter of a part a name of its own",
                            )
                    users = {number, *(user for user, owner in tied if owner is module)}
                    entries[name] = ParamEntry(
                        name, module, attribute, module.layouts[attribute], number, tuple(sorted(users))
                    )
        return cls(entries)
