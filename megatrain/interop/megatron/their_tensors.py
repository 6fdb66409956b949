"""Megatron-LM's parameters for a model of ours: names, shapes and chunks, from canonical names and shapes.

decoder.layers.0.attention.q.weight ┐
decoder.layers.0.attention.k.weight ├─> decoder.layers.self_attention.linear_qkv.weight [layers, rows, h], a chunk a layer
decoder.layers.0.attention.v.weight ┘

As its local implementation names them: a layer's norms carry the names of the linear layers that follow, unless attention is latent.
"""

from __future__ import annotations

import itertools
import re
from collections import defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Final

from megatrain.interop.megatron.names import (
    GATE_NAMES,
    NUMBER,
    STACKS,
    TABLE,
    VOCABULARY,
    FusedRows,
    Part,
    module_and_kind,
    parts_of,
)
from megatrain.parallel.layout import Box

_NORMS: Final = {
    ".input_layernorm.": ".self_attention.linear_qkv.layer_norm_",
    ".pre_mlp_layernorm.": ".mlp.linear_fc1.layer_norm_",
    ".in_proj_layernorm.": ".in_proj.layer_norm_",
}
_STORED_ROWS: Final = {
    r"\.in_proj\.(\w+)\.weight$": r".in_proj.weight.\1",
    r"\.conv1d(\.\w+)?$": r".conv1d.weight\1",
    r"\.conv1d_bias(\.\w+)$": r".conv1d.bias\1",
}
"""Tensors of a delta net or of Mamba-2, as modules and as they are stored."""
_LAYER: Final = re.compile(r".*layers\.\d+(?=\.)")
_STACKED: Final = tuple(f"{stack}.layers." for stack in STACKS)
_FIRST_ROWS: Final = re.compile(r"(?<=in_proj\.weight)\.(query|z)$")
_WITH_EXTRA_STATE: Final = ("linear_", "eh_proj", "in_proj", "out_proj", "out_norm")
"""Beginnings of modules that store an empty extra state."""


@dataclass(frozen=True)
class TheirTensor:
    """A parameter of Megatron-LM with the canonical tensors in it."""

    name: str
    shape: tuple[int, ...]
    num_stacked: int
    """Leading dimensions over layers and experts: each index has chunks of its own."""
    parts: tuple[Part, ...]
    is_gated: bool
    """Gate and up are two chunks."""

    def chunks(self) -> Iterator[tuple[Box, tuple[Part, ...]]]:
        """Yield the box of each chunk and the canonical tensors whose rows it holds."""
        rows, rest = self.shape[self.num_stacked], self.shape[self.num_stacked + 1 :]
        ranges = [(0, rows // 2), (rows // 2, rows)] if self.is_gated else [(0, rows)]
        by_place = defaultdict(list)
        for part in self.parts:
            by_place[part.place].append(part)
        for place in itertools.product(*map(range, self.shape[: self.num_stacked])):
            for first, last in ranges:
                inside = tuple(part for part in by_place[place] if first <= part.rows[0].start < last)
                stacked = tuple((index, index + 1) for index in place)
                yield (*stacked, (first, last), *((0, size) for size in rest)), inside

    def extra_states(self) -> Iterator[str]:
        """Yield the keys of the extra state of the module whose weight this is; most modules have none."""
        module, _, kind = _FIRST_ROWS.sub("", self.name).rpartition(".")
        if kind != "weight" or not module.rpartition(".")[2].startswith(_WITH_EXTRA_STATE):
            return
        sizes = self.shape[: self.num_stacked] or (1,)
        for place in itertools.product(*map(range, sizes)):
            index, count = ".".join(map(str, place)), ".".join(map(str, sizes))
            yield f"{module}._extra_state/shard_{index}_{count}"


def their_tensors(
    shapes: Mapping[str, tuple[int, ...]],
    fused: FusedRows,
    *,
    is_latent: bool,
    is_hybrid: bool,
    is_uniform: bool,
    padded_vocab_size: int,
) -> list[TheirTensor]:
    """Return the parameters that hold these canonical tensors.

    Args:
        shapes: shape by canonical name.
        fused: sizes of the model.
        is_latent: the model has multi-head latent attention.
        is_hybrid: the model is a hybrid.
        is_uniform: layers are stacked, as they are unless they differ in experts or in attention.
        padded_vocab_size: rows of the vocabulary's tensors with padding.

    Raises:
        KeyError: Megatron-LM has no such parameter.
    """
    inverse = _inverse(is_latent=is_latent, is_hybrid=is_hybrid)
    has_own_norms = is_hybrid or any(".linear_attention." in name for name in shapes)
    rows: dict[tuple[str, str, tuple[int, ...]], dict[str, tuple[int, ...]]] = defaultdict(dict)
    for name, shape in shapes.items():
        module, kind = module_and_kind(name)
        numbers = tuple(map(int, NUMBER.findall(module)))
        rows[inverse[NUMBER.sub("{}", module)], kind, numbers][name] = (
            (padded_vocab_size, *shape[1:]) if name in VOCABULARY else shape
        )
    stacks: dict[tuple[str, tuple[int, ...]], dict[tuple[int, ...], dict[str, tuple[int, ...]]]] = (
        defaultdict(dict)
    )
    for (pattern, kind, numbers), found in rows.items():
        is_stacked = is_uniform and pattern.startswith(_STACKED)
        kept = () if is_stacked else numbers[: pattern.count("layers.{}.")]
        layer = _LAYER.match(next(iter(found)))
        is_own = has_own_norms and layer is not None and f"{layer[0]}.mlp.router.weight" in shapes
        norms = {} if is_latent else _norms(is_own=is_own)
        stacks[_name(pattern, kind, kept, norms), kept][numbers[len(kept) :]] = found
    return [_their_tensor(name, places, fused) for (name, _), places in stacks.items()]


def _their_tensor(
    name: str, places: Mapping[tuple[int, ...], Mapping[str, tuple[int, ...]]], fused: FusedRows
) -> TheirTensor:
    sizes = tuple(len(set(indices)) for indices in zip(*places, strict=True))
    first = next(iter(places.values()))
    num_rows = sum(shape[0] for shape in first.values())
    rest = next(iter(first.values()))[1:]
    shape = (*sizes, num_rows, *((1,) if ".conv1d.weight" in name else ()), *rest)
    parts = tuple(parts_of(name, shape, fused))
    expected = {one: size for found in places.values() for one, size in found.items()}
    if {part.name: part.shape for part in parts} != expected:
        raise KeyError(name)
    is_gated = (
        any(part.name.endswith((".gate.weight", ".gate.bias")) for part in parts) and "linear_fc1" in name
    )
    return TheirTensor(name, shape, len(sizes), parts, is_gated)


def _inverse(*, is_latent: bool, is_hybrid: bool) -> dict[str, str]:
    """Return the pattern of their module by the pattern of ours."""
    left_out = (
        "linear_qkv" if is_latent else "linear_q_proj",
        "decoder.final_layernorm" if is_hybrid else "decoder.final_norm",
    )
    return {one: theirs for theirs, ours in TABLE.items() if not theirs.endswith(left_out) for one in ours}


def _norms(*, is_own: bool) -> Mapping[str, str]:
    """Return the renamed norms of a layer. Hybrids and models with delta nets are Transformer Engine's, where the norm of experts is a module (`is_own`)."""
    return {norm: name for norm, name in _NORMS.items() if not (is_own and norm == ".pre_mlp_layernorm.")}


def _name(pattern: str, kind: str, numbers: tuple[int, ...], norms: Mapping[str, str]) -> str:
    module = pattern.replace("mlp.experts.{}.", "mlp.experts.experts.")
    module = module.format(*numbers) if numbers else module.replace("layers.{}.", "layers.")
    name = ".".join(filter(None, (module, kind)))
    for norm, fused_name in norms.items():
        name = name.replace(norm, fused_name)
    for module, stored in _STORED_ROWS.items():
        name = re.sub(module, stored, name)
    name = name.replace(".transformer_layer.layers.", ".mtp_model_layer.layers.")
    stored, as_module = GATE_NAMES
    return name.replace(as_module, stored)
