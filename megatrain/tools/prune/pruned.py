"""The pruned model as a checkpoint that can be read: each of its tensors is made of rows and columns of the source.

    a setting is doubled ─> the dimensions that grow with it        so no table repeats which tensor has which size
    kept parts of a size ─> indices of each dimension, by layer     a head is as many rows as the size of its dimension divides into

Layers and experts are kept as wholes, in their order, under new numbers.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

import torch
from torch import Tensor

from megatrain.checkpoint.manifest import DTYPES, Manifest, StoredKind, StoredTensor
from megatrain.checkpoint.reader import TensorReader
from megatrain.interop.hf.tensors import Shape
from megatrain.optim.sharded import WEIGHT
from megatrain.parallel.layout import Box
from megatrain.tools.prune.importance import ENERGY
from megatrain.tools.prune.sizes import (
    CHANGED,
    EXPERT_FFN,
    EXPERTS,
    FFN,
    GROUPS,
    HEADS,
    HIDDEN,
    LAYERS,
    OF_LAYER,
    SHARED_FFN,
    Sizes,
    Source,
)

_OF_EXPERT: Final = re.compile(r"(.*\.mlp\.experts\.)(\d+)(\..*)")
_NORM: Final = "norm.weight"


@dataclass(frozen=True)
class Kept:
    """The parts of the source that are kept: numbers in ascending order."""

    layers: tuple[int, ...]
    hidden: Tensor
    of_layers: Mapping[int, Mapping[str, Tensor]]
    """By layer of the source, then by the path of a size; widths of experts are [E, f], with a row for each of the source."""
    norm_gain: float = 1.0
    """Factor of the weights of RMSNorms, which average over other channels than before."""

    @classmethod
    def of(cls, source: Source, sizes: Sizes, scores: Mapping[str, Tensor]) -> Kept:
        """Return the parts with the highest scores, as many as the target sizes say; see `Importance.scores`."""
        own = source.sizes
        layers = _top(scores[LAYERS], sizes[LAYERS]).tolist()
        hidden = _top(scores[HIDDEN], sizes[HIDDEN])
        of_layers = {}
        for layer in layers:
            found = {path: scores[f"{layer}.{path}"] for path in own if f"{layer}.{path}" in scores}
            kept = {
                path: _top(found[path], sizes[path])
                for path in (FFN, SHARED_FFN, EXPERT_FFN)
                if path in found
            }
            if HEADS in found:
                heads = found[HEADS].unflatten(0, (own[GROUPS], -1))
                kept[GROUPS] = _top(heads.sum(1), sizes[GROUPS])
                kept[HEADS] = _top_of_groups(heads, kept[GROUPS], sizes[HEADS])
            if EXPERTS in found:
                groups = source.config.experts.moe_router_num_groups or 1
                routed = found[EXPERTS].unflatten(0, (groups, -1))
                kept[EXPERTS] = _top_of_groups(routed, torch.arange(groups), sizes[EXPERTS])
            of_layers[layer] = kept
        gain, energy = 1.0, scores[ENERGY]
        if source.config.model.normalization == "RMSNorm":
            gain = float(own[HIDDEN] / sizes[HIDDEN] * energy[hidden].sum() / energy.sum()) ** 0.5
        return cls(tuple(layers), hidden, of_layers, gain)


def _top(scores: Tensor, count: int) -> Tensor:
    """Return the places of the highest scores of the last dimension, in ascending order; of equal ones the first."""
    order = scores.sort(dim=-1, descending=True, stable=True).indices
    return order[..., :count].sort(dim=-1).values


def _top_of_groups(scores: Tensor, groups: Tensor, count: int) -> Tensor:
    """Return the numbers of `count` parts with the highest scores, equally many of each of these groups of the rows of [g, m]."""
    found = _top(scores[groups], count // len(groups))
    return (groups[:, None] * scores.shape[1] + found).flatten()


@dataclass(frozen=True)
class _Origin:
    """A tensor of the source and what is kept of it: indices of each dimension."""

    name: str
    shape: Shape
    kept: tuple[Tensor, ...]
    gain: float


class PrunedCheckpoint(TensorReader):
    """Reads boxes of the pruned model's weights from its source; has the manifest of a checkpoint at iteration 0.

    Args:
        reader: of the source.
        sizes: of the pruned model.
    """

    def __init__(self, reader: TensorReader, source: Source, sizes: Sizes, kept: Kept) -> None:
        self.path, self._reader, self._source, self.kept = reader.path, reader, source, kept
        self.sizes, self.target = sizes, source.with_layers(kept.layers).resized(sizes)
        self._shapes = source.shapes
        self._axes = _axes(source, self._shapes)
        self._sizes = source.sizes
        self._origins = {name: self._origin(name) for name in self.target.shapes}

    def read_box(self, out: Tensor, *, kind: str, name: str, shape: tuple[int, ...], box: Box) -> None:  # noqa: ARG002 (as CheckpointReader)
        """Copy a box into `out`, which has the shape of the box and any float dtype."""
        origin = self._origins[name]
        picked = [kept[slice(*edge)] for kept, edge in zip(origin.kept, box, strict=True)]
        read = tuple((int(one.min()), int(one.max()) + 1) for one in picked)
        dtype = DTYPES[self._stored(origin).dtype]
        values = self._reader.values(origin.name, origin.shape, read, kind=kind, dtype=dtype)
        for dim, (one, (first, _)) in enumerate(zip(picked, read, strict=True)):
            values = values.index_select(dim, one - first)
        out.copy_(values if origin.gain == 1 else (values + self._offset) * origin.gain - self._offset)

    @property
    def _offset(self) -> float:
        """Difference of a norm's weight from what is stored."""
        return 1.0 if self._source.config.model.apply_layernorm_1p else 0.0

    def _stored(self, origin: _Origin) -> StoredKind:
        return self._reader.kind(origin.name, origin.shape, WEIGHT)

    def _origin(self, name: str) -> _Origin:
        """Return what a tensor of the pruned model is made of."""
        kept: Mapping[str, Tensor] = {}
        of_layer, of_expert, expert = OF_LAYER.match(name), _OF_EXPERT.fullmatch(name), 0
        if of_layer is not None:
            layer = self.kept.layers[int(of_layer[1])]
            kept = self.kept.of_layers[layer]
            name = f"decoder.layers.{layer}.{name[of_layer.end() :]}"
        if of_expert is not None:
            expert = int(kept[EXPERTS][int(of_expert[2])])
            name = _OF_EXPERT.sub(rf"\g<1>{expert}\g<3>", name)
        kept = {HIDDEN: self.kept.hidden, **kept}
        if of_expert is not None:
            kept[EXPERT_FFN] = kept[EXPERT_FFN][expert]
        shape, axes = self._shapes[name], self._axes[name]
        indices = [
            torch.arange(size) if path is None else _spread(kept[path], size // self._sizes[path])
            for size, path in zip(shape, axes, strict=True)
        ]
        is_norm = axes == (HIDDEN,) and name.endswith(_NORM)
        return _Origin(name, shape, tuple(indices), self.kept.norm_gain if is_norm else 1.0)

    @functools.cached_property
    def manifest(self) -> Manifest:
        """Counters, state, configuration and tensors, without files."""
        source = self._reader.manifest
        config = {section: dict(values) for section, values in source.config.items()}
        for path in CHANGED:
            section, name = path.split(".")
            config[section][name] = self.target.config.get(path)
        state: dict[str, Any] = {
            **source.state,
            "consumed_valid_samples": 0,
            "scheduled_samples": 0,
            "loss_scale": {},
            "expert_biases": self._expert_biases(source.state["expert_biases"]),
            "has_optimizer": False,
            "is_evaluation_left": False,
            "data_plans": {"train": [0], "valid": [0], "test": [0]},
            "datasets": [],
        }
        if "amax_history" in state:
            state["amax_history"] = {}
        tensors = {
            name: StoredTensor(shape, {WEIGHT: StoredKind(self._stored(self._origins[name]).dtype, ())})
            for name, shape in self.target.shapes.items()
        }
        return Manifest.of_weights(state=state, config=config, tensors=tensors)

    def _expert_biases(self, biases: Mapping[str, list[float]]) -> dict[str, list[float]]:
        """Return the biases of the kept experts."""
        found = {}
        for number, layer in enumerate(self.kept.layers):
            for name, values in biases.items():
                of_layer = OF_LAYER.match(name)
                if of_layer is not None and int(of_layer[1]) == layer:
                    kept = self.kept.of_layers[layer][EXPERTS]
                    found[f"decoder.layers.{number}.{name[of_layer.end() :]}"] = [values[one] for one in kept]
        return found


def _spread(parts: Tensor, unit: int) -> Tensor:
    """Return the indices of parts that have `unit` consecutive rows each."""
    return (parts[:, None] * unit + torch.arange(unit)).flatten()


def _axes(source: Source, shapes: Mapping[str, Shape]) -> dict[str, tuple[str | None, ...]]:
    """Return the size that each dimension of each tensor follows, by the path of its setting; None: none that is pruned."""
    found: dict[str, list[str | None]] = {name: [None] * len(shape) for name, shape in shapes.items()}
    for path, size in source.sizes.items():
        if path == LAYERS:
            continue
        doubled = source.resized({path: 2 * size}).shapes
        for name, shape in shapes.items():
            for dim, (before, after) in enumerate(zip(shape, doubled[name], strict=True)):
                if before != after:
                    found[name][dim] = path
    return {name: tuple(axes) for name, axes in found.items()}
