"""The parameters of a model as a tree, and how many each part and each rank has. Read from the parameter registries.

registries, one a pipeline stage ─> parts: canonical tensors, with the box that a rank of the stage holds
└─> counts by part: embedding, attention, MLP, router, experts, norms, head
"""

from __future__ import annotations

import dataclasses
import math
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from megatrain.model.specs import RouterSpec
from megatrain.parallel.layout import ParamRegistry, Piece

PARTS = ("embedding", "attention", "mlp", "router", "experts", "norms", "head")
_LAYER = re.compile(r"decoder\.layers\.(\d+)\.")
_EXPERT = re.compile(r"mlp\.experts\.(\d+)\.(.*)")


@dataclass(frozen=True, kw_only=True)
class Tensors:
    """One tensor, or one of each of several layers that are alike."""

    name: str
    """Canonical; in a layer, without its number."""
    shape: tuple[int, ...]
    rank_shape: tuple[int, ...]
    """Of the part that a rank holds."""


@dataclass(frozen=True, kw_only=True)
class Block:
    """Layers that are alike, one after the other; or what stands before or behind them."""

    first_layer: int | None
    """Global number; None: no layers."""
    num_layers: int
    tensors: tuple[Tensors, ...]


@dataclass(frozen=True, kw_only=True)
class StageTree:
    """The parameters of a rank of some pipeline stages that are alike but for the numbers of their layers."""

    stages: tuple[int, ...]
    parameters: int
    """Of one rank, without padding."""
    by_part: dict[str, int]
    blocks: tuple[Block, ...]
    """Of the first of these stages."""


@dataclass(frozen=True, kw_only=True)
class ModelTree:
    """The whole model; what several ranks hold is counted once."""

    parameters: int
    active_parameters: int
    """Of those, what each token meets: all but the experts that it does not go to."""
    by_part: dict[str, int]
    stages: tuple[StageTree, ...]


def model_tree(
    registries: Sequence[ParamRegistry], routers: Mapping[int, RouterSpec], *, ep: int = 1
) -> ModelTree:
    """The tree of the model whose pipeline stages have these parameters, on one of the `ep` ranks with other experts.

    `routers`: of the layers with experts, by their numbers.
    """
    stages = [_pieces(registry) for registry in registries]
    whole = {
        piece.name: math.prod(piece.shape) * (ep if entry.layout.family == "expert" else 1)
        for registry in registries
        for entry in registry.entries.values()
        for piece in entry.layout.pieces
    }
    trees: dict[object, StageTree] = {}
    for number, pieces in enumerate(stages):
        tree = _stage_tree(number, pieces)
        likeness = tuple((block.num_layers, block.tensors) for block in tree.blocks)
        if likeness in trees:
            known = trees[likeness]
            tree = StageTree(
                stages=(*known.stages, number),
                parameters=known.parameters,
                by_part=known.by_part,
                blocks=known.blocks,
            )
        trees[likeness] = tree
    return ModelTree(
        parameters=sum(whole.values()),
        active_parameters=sum(active_numbers(name, count, routers) for name, count in whole.items()),
        by_part=_by_part(whole.items()),
        stages=tuple(trees.values()),
    )


def part_of(name: str) -> str:
    """Which of `PARTS` a canonical tensor belongs to."""
    if name.startswith("embedding."):
        return "embedding"
    if name.startswith("output_layer."):
        return "head"
    if name.rpartition(".")[0].endswith("norm"):
        return "norms"
    for part in ("router", "experts"):
        if f".mlp.{part}." in name:
            return part
    return "attention" if ".attention." in name else "mlp"


def active_numbers(name: str, count: int, routers: Mapping[int, RouterSpec]) -> int:
    """How many of a tensor's numbers a token meets, on average over the experts."""
    match = _LAYER.match(name)
    if match is None or part_of(name) != "experts":
        return count
    router = routers[int(match.group(1))]
    return count * router.top_k // router.num_experts


def segment_name(registry: ParamRegistry, segment: int) -> str:
    """What a segment is: `embedding`, `layer 3`, `layers 4 to 7`, `head`."""
    entries = {name: entry for name, entry in registry.entries.items() if entry.segment == segment}
    layers = layer_numbers(ParamRegistry(entries))
    if layers:
        return f"layer {layers[0]}" if len(layers) == 1 else f"layers {layers[0]} to {layers[-1]}"
    return (
        "embedding"
        if any(part_of(p.name) == "embedding" for p in _pieces(registry)) and segment == 0
        else "head"
    )


def layer_numbers(registry: ParamRegistry) -> list[int]:
    """Global numbers of the layers whose parameters these are, in order."""
    matches = (_LAYER.match(piece.name) for piece in _pieces(registry))
    return sorted({int(match.group(1)) for match in matches if match})


def _pieces(registry: ParamRegistry) -> list[Piece]:
    return [piece for entry in registry.entries.values() for piece in entry.layout.pieces]


def _by_part(counts: Iterable[tuple[str, int]]) -> dict[str, int]:
    found = dict.fromkeys(PARTS, 0)
    for name, count in counts:
        found[part_of(name)] += count
    return found


def _stage_tree(number: int, pieces: Sequence[Piece]) -> StageTree:
    counts = [(piece.name, math.prod(piece.local_shape)) for piece in pieces]
    return StageTree(
        stages=(number,),
        parameters=sum(count for _, count in counts),
        by_part=_by_part(counts),
        blocks=tuple(_blocks(pieces)),
    )


def _blocks(pieces: Sequence[Piece]) -> list[Block]:
    by_layer: dict[tuple[int, int | None], list[Tensors]] = {}
    place = 0
    for piece in pieces:
        match = _LAYER.match(piece.name)
        layer = int(match.group(1)) if match else None
        if layer is not None:
            place = 1
        elif place == 1:
            place = 2
        one = Tensors(
            name=piece.name[match.end() :] if match else piece.name,
            shape=piece.shape,
            rank_shape=piece.local_shape,
        )
        by_layer.setdefault((place, layer), []).append(one)
    blocks: list[Block] = []
    for (_, layer), each in by_layer.items():
        tensors = _joined_experts(each)
        last = blocks[-1] if blocks else None
        is_next = last and last.first_layer is not None and layer == last.first_layer + last.num_layers
        if last and is_next and last.tensors == tensors:
            blocks[-1] = Block(
                first_layer=last.first_layer, num_layers=last.num_layers + 1, tensors=last.tensors
            )
        else:
            blocks.append(Block(first_layer=layer, num_layers=int(layer is not None), tensors=tensors))
    return blocks


def _joined_experts(tensors: Sequence[Tensors]) -> tuple[Tensors, ...]:
    """The same with one line for the experts' tensors of a name: `mlp.experts.0 to 7.up.weight`."""
    experts: dict[str, list[int]] = {}
    for tensor in tensors:
        if match := _EXPERT.fullmatch(tensor.name):
            experts.setdefault(match.group(2), []).append(int(match.group(1)))
    joined: list[Tensors] = []
    for tensor in tensors:
        match = _EXPERT.fullmatch(tensor.name)
        if match is None:
            joined.append(tensor)
        elif numbers := experts.pop(match.group(2), None):
            span = str(numbers[0]) if len(numbers) == 1 else f"{numbers[0]} to {numbers[-1]}"
            joined.append(dataclasses.replace(tensor, name=f"mlp.experts.{span}.{match.group(2)}"))
    return tuple(joined)
