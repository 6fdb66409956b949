"""Tree of a model's parameters, and parameter counts by part and rank, from the parameter registries.

registry of each pipeline stage ─┬─> blocks of equal layers: canonical tensors, with the box of one rank
                                 └─> counts by part: embedding, attention, MLP, router, experts, norms, head, other
"""

from __future__ import annotations

import dataclasses
import math
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from megatrain.config.model_spec.experts import RouterSpec
from megatrain.parallel.layout import ParamEntry, ParamRegistry, Piece

PARTS = ("embedding", "attention", "mlp", "router", "experts", "norms", "head", "other")
_LAYER = re.compile(r"(\w+)\.layers\.(\d+)\.")
STACK_END = "encoder.final_norm.weight"
"""Tensor of the segment between an encoder and a decoder, and of the head of an encoder alone."""
_MTP_LAYER = re.compile(r"mtp\.layers\.(\d+)\.")
_EXPERT = re.compile(r"mlp\.experts\.(\d+)\.(.*)")


class LayerId(NamedTuple):
    """A layer of a stack."""

    stack: str
    number: int

    @classmethod
    def of(cls, name: str) -> LayerId | None:
        """Return the layer of a canonical tensor; None: it is of none, or of multi-token prediction."""
        match = _LAYER.match(name)
        return None if match is None or match[1] == "mtp" else cls(match[1], int(match[2]))


@dataclass(frozen=True, kw_only=True)
class Tensors:
    """One tensor, or the same tensor of several equal layers or experts."""

    name: str
    """Canonical name; in a layer, without the layer prefix."""
    shape: tuple[int, ...]
    rank_shape: tuple[int, ...]
    """Shape of one rank's box."""


@dataclass(frozen=True, kw_only=True)
class Block:
    """Layers with equal tensors; or the tensors before or after all layers."""

    layers: tuple[int, ...]
    """Layer numbers in the stack; empty: not layers."""
    stack: str = ""
    """The stack of the layers; empty: not layers."""
    tensors: tuple[Tensors, ...]


@dataclass(frozen=True, kw_only=True)
class StageTree:
    """The parameters of one rank of pipeline stages that differ only in their layer numbers."""

    stages: tuple[int, ...]
    parameters: int
    """Parameters of one rank, without padding."""
    by_part: dict[str, int]
    blocks: tuple[Block, ...]
    """Blocks of the first of these stages."""


@dataclass(frozen=True, kw_only=True)
class ModelTree:
    """The parameters of the whole model, each counted once."""

    parameters: int
    active_parameters: int
    """Parameters used per token: all but the parameters of unselected experts."""
    by_part: dict[str, int]
    stages: tuple[StageTree, ...]


def model_tree(
    registries: Sequence[ParamRegistry], routers: Mapping[str, RouterSpec], *, ep: int = 1
) -> ModelTree:
    """Return the tree of a model.

    Args:
        registries: one registry per pipeline stage.
        routers: by the prefix of their canonical names.
        ep: expert-parallel size; each expert-parallel rank has other experts.
    """
    stages = [_pieces(registry) for registry in registries]
    whole = {
        piece.name: math.prod(piece.shape) * (ep if entry.layout.family == "expert" else 1)
        for registry in registries
        for entry in _weights(registry)
        for piece in entry.layout.pieces
    }
    trees: dict[object, StageTree] = {}
    for number, pieces in enumerate(stages):
        tree = _stage_tree(number, pieces)
        structure = tuple((len(block.layers), block.tensors) for block in tree.blocks)
        if structure in trees:
            known = trees[structure]
            tree = dataclasses.replace(known, stages=(*known.stages, number))
        trees[structure] = tree
    parameters = sum(whole.values())
    return ModelTree(
        parameters=parameters,
        active_parameters=active_parameters(parameters, expert_elements(whole.items(), routers), routers),
        by_part=_by_part(whole.items()),
        stages=tuple(trees.values()),
    )


def part_of(name: str) -> str:
    """Return the item of `PARTS` that a canonical tensor belongs to, or the name of a part of the user's own."""
    if name.startswith("embedding."):
        return "embedding"
    if name.startswith(("output_layer.", "lm_head.dense.", "pooler.", "binary_head.")):
        return "head"
    if name.rpartition(".")[0].endswith("norm"):
        return "norms"
    for part in ("router", "experts"):
        if f".mlp.{part}." in name:
            return part
    own = _LAYER.sub("", name).split(".")[0] if LayerId.of(name) else "mlp" if ".mlp." in name else ""
    attention = dict.fromkeys(("linear_attention", "cross_attention"), "attention")
    return {**attention, "": "attention" if ".attention." in name else "other"}.get(own, own)


def expert_elements(counts: Iterable[tuple[str, int]], routers: Mapping[str, RouterSpec]) -> dict[str, int]:
    """Return the elements of each router's experts, by the router's name, from the elements of canonical tensors or their parts."""
    found = dict.fromkeys(routers, 0)
    for name, count in counts:
        if part_of(name) == "experts":
            found[f"{name.partition('.mlp.')[0]}.mlp.router"] += count
    return found


def active_parameters(
    parameters: int, expert_parameters: Mapping[str, int], routers: Mapping[str, RouterSpec]
) -> int:
    """Return the parameters used per token: all but the parameters of unselected experts.

    Args:
        parameters: of the whole model.
        expert_parameters: parameters of each router's experts, which are equally large: see `expert_elements`.
    """
    unselected = (
        expert_parameters[name] * (router.num_experts - router.top_k) // router.num_experts
        for name, router in routers.items()
    )
    return parameters - sum(unselected)


def segment_name(registry: ParamRegistry, segment: int) -> str:
    """Return `embedding`, `decoder embedding`, `layer 3`, `layers 4 to 7`, `multi-token prediction 1` or `head`."""
    entries = {name: entry for name, entry in registry.entries.items() if entry.segment == segment}
    layers = layers_of(ParamRegistry(entries))
    depths = (_MTP_LAYER.match(piece.name) for piece in _pieces(ParamRegistry(entries)))
    depth = next((int(match.group(1)) for match in depths if match), None)
    if depth is not None:
        return f"multi-token prediction {depth + 1}"
    if layers:
        kind = "layer" if layers[0].stack == "decoder" else f"{layers[0].stack} layer"
        first, last = layers[0].number, layers[-1].number
        return f"{kind} {first}" if len(layers) == 1 else f"{kind}s {first} to {last}"
    names = {piece.name for piece in _pieces(ParamRegistry(entries))}
    if STACK_END in names and "output_layer.bias" not in names:
        return "decoder embedding"
    is_embedding = segment == 0 and any(part_of(p.name) == "embedding" for p in _pieces(registry))
    return "embedding" if is_embedding else "head"


def layers_of(registry: ParamRegistry) -> list[LayerId]:
    """Return the layers of a registry's parameters, sorted in each stack."""
    found = (LayerId.of(piece.name) for piece in _pieces(registry))
    return sorted({one for one in found if one is not None}, key=lambda one: (one.stack != "encoder", one))


def _pieces(registry: ParamRegistry) -> list[Piece]:
    return [piece for entry in _weights(registry) for piece in entry.layout.pieces]


def _weights(registry: ParamRegistry) -> list[ParamEntry]:
    """Return what is counted: all but the scales of --qat."""
    return [entry for entry in registry.entries.values() if entry.layout.kind != "scale"]


def _by_part(counts: Iterable[tuple[str, int]]) -> dict[str, int]:
    found = dict.fromkeys(PARTS, 0)
    for name, count in counts:
        part = part_of(name)
        found[part] = found.get(part, 0) + count
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
    by_layer: dict[tuple[int, LayerId | None], list[Tensors]] = {}
    position = 0  # 0: before the layers, 1: in them, 2: after them
    for piece in pieces:
        layer = LayerId.of(piece.name)
        if layer is not None:
            position = 1
        elif position == 1:
            position = 2
        one = Tensors(
            name=piece.name.split(".", 3)[3] if layer else piece.name,
            shape=piece.shape,
            rank_shape=piece.local_shape,
        )
        by_layer.setdefault((position, layer), []).append(one)
    blocks: dict[object, Block] = {}
    for (place, layer), each in by_layer.items():
        tensors, layers = _merge_experts(each), () if layer is None else (layer.number,)
        stack = "" if layer is None else layer.stack
        known = blocks.get((place, stack, tensors))
        earlier = () if known is None else known.layers
        blocks[place, stack, tensors] = Block(layers=earlier + layers, stack=stack, tensors=tensors)
    return list(blocks.values())


def _merge_experts(tensors: Sequence[Tensors]) -> tuple[Tensors, ...]:
    """Merge the tensors of all experts that have the same name: `mlp.experts.0 to 7.up.weight`."""
    experts: dict[str, list[int]] = {}
    for tensor in tensors:
        if match := _EXPERT.fullmatch(tensor.name):
            experts.setdefault(match.group(2), []).append(int(match.group(1)))
    merged: list[Tensors] = []
    for tensor in tensors:
        match = _EXPERT.fullmatch(tensor.name)
        if match is None:
            merged.append(tensor)
        elif numbers := experts.pop(match.group(2), None):
            span = str(numbers[0]) if len(numbers) == 1 else f"{numbers[0]} to {numbers[-1]}"
            merged.append(dataclasses.replace(tensor, name=f"mlp.experts.{span}.{match.group(2)}"))
    return tuple(merged)
