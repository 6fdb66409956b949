"""Their tensors as functions of our names and shapes, by the table of a family.

self_attn.qkv_proj.weight   rows  q q k v        stacked:     q, k and v one after the other
attention.query_key_value   rows  q0 k0 v0 q1 .. by head:     rows of head 0, of head 1 ...
attn.c_attn.weight          columns q k v        transposed:  [inputs, outputs]
mlp.experts.gate_up_proj    experts, columns g0 u0 g1 u1 ..   stacked experts, transposed, rows in turns
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, Final

from megatrain.interop.hf.family import Fused, Modules

Shape = tuple[int, ...]
_NUMBER: Final = re.compile(r"(?<=\.)\d+(?=\.)")
_EXPERT: Final = re.compile(r"(?<=\.experts)\.\d+\.")


@dataclass(frozen=True)
class Part:
    """One of our tensors in one of theirs: these rows of it, one range after the other."""

    name: str
    shape: Shape
    rows: tuple[slice, ...]
    place: int | None = None
    """Number of the expert in a tensor that holds all of them."""
    factor: float = 1.0
    """Ours by theirs."""


@dataclass(frozen=True)
class TheirTensor:
    """One of their tensors."""

    name: str
    shape: Shape
    """Shape in their files."""
    is_transposed: bool
    """The rows of its parts are its columns."""
    parts: tuple[Part, ...]
    """None: it holds one value."""
    offset: float = 0.0
    """Its values minus those of its parts, or its value without any."""
    is_flat: bool = False
    """It has another shape than its part: a vector, or one dimension more."""
    scale: str = ""
    """Their tensor with a factor of each row; empty: there is none."""


def their_tensors(
    modules: Modules, ours: Mapping[str, Shape], sizes: Mapping[str, Any], *, layers_per_block: int = 1
) -> dict[str, TheirTensor]:
    """Return their tensors that hold all of ours, by name.

    Args:
        sizes: settings of the model.
        layers_per_block: layers of ours that one of theirs holds.

    Raises:
        KeyError: the family has no place for one of our tensors; the argument is its name.
    """
    homes = {
        name: (theirs, fused)
        for theirs, module in modules.items()
        for fused in (Fused((module,)) if isinstance(module, str) else module,)
        for name in fused.names
    }
    found: dict[str, TheirTensor] = {}
    for name in ours:
        kind = "" if _template(name) in homes else name.rpartition(".")[2]
        module = _template(name.removesuffix(f".{kind}"))
        if module not in homes:
            raise KeyError(name)
        theirs, fused = homes[module]
        numbers = _NUMBER.findall(f"{name}.")
        block = [str(int(number) // layers_per_block) for number in numbers[:1]]
        whole = theirs.format(*block, *numbers[1:]) + _ending(kind, fused)
        if whole not in found:
            names = [each.format(*numbers) + (kind and f".{kind}") for each in fused.names]
            names = [name] if fused.is_one_of else names
            found[whole] = (
                _stack(whole, names, ours, fused, sizes)
                if fused.is_stacked
                else _their_tensor(whole, names, ours, fused, sizes)
            )
            if fused.scale:
                scale, rows = fused.scale.format(*block, *numbers[1:]), found[whole].shape[0]
                found[whole] = replace(found[whole], scale=scale)
                found[scale] = TheirTensor(scale, (rows,), False, (), offset=1.0)
    return found


def zero_tensors(zeros: Mapping[str, int], hidden_size: int) -> dict[str, TheirTensor]:
    """Return their tables without tensors of ours, by name."""
    return {name: TheirTensor(name, (rows, hidden_size), False, ()) for name, rows in zeros.items()}


def unused_tensors(values: Mapping[str, float], width: int) -> dict[str, TheirTensor]:
    """Return their vectors without effect, by name."""
    return {name: TheirTensor(name, (width,), False, (), offset=value) for name, value in values.items()}


def factor_of(name: str, factors: Mapping[str, float]) -> float:
    """Return the factor of a weight of ours; `factors`: by module, with {} for numbers."""
    return factors.get(_template(name.removesuffix(".weight")), 1.0)


def _template(name: str) -> str:
    return _NUMBER.sub("{}", f"{name}.")[:-1]


def _ending(kind: str, fused: Fused) -> str:
    """Return the end of the name of their tensor."""
    if fused.is_stacked:
        return "" if kind == "weight" else f"_{kind}"
    return kind and f".{kind}"


def _stack(
    name: str, names: list[str], ours: Mapping[str, Shape], fused: Fused, sizes: Mapping[str, Any]
) -> TheirTensor:
    """Return the tensor of all experts; `names` belong to one of them."""
    experts: list[TheirTensor] = []
    while (numbered := [_EXPERT.sub(f".{len(experts)}.", each) for each in names])[0] in ours:
        experts.append(_their_tensor(name, numbered, ours, fused, sizes))
    parts = [replace(part, place=place) for place, expert in enumerate(experts) for part in expert.parts]
    return replace(experts[0], shape=(len(experts), *experts[0].shape), parts=tuple(parts))


def _their_tensor(
    name: str, names: list[str], ours: Mapping[str, Shape], fused: Fused, sizes: Mapping[str, Any]
) -> TheirTensor:
    shapes = [ours[each] for each in names]
    if fused.is_flat or fused.has_one_row:
        part = Part(names[0], shapes[0], (slice(0, shapes[0][0]),))
        shape = (math.prod(shapes[0]),) if fused.is_flat else (1, *shapes[0])
        return TheirTensor(name, shape, False, (part,), is_flat=True)
    total, rest = sum(shape[0] for shape in shapes), shapes[0][1:]
    num_heads = sizes[fused.heads] if fused.heads else 1
    parts, first = [], 0
    for number, (each, shape) in enumerate(zip(names, shapes, strict=True)):
        size = shape[0] // num_heads
        starts = range(first, total, total // num_heads)
        rows = tuple(slice(start, start + size) for start in starts)
        parts.append(Part(each, shape, (slice(number, total, len(names)),) if fused.in_turns else rows))
        first += size
    is_transposed = fused.is_transposed and len(rest) == 1
    rest = (1, *rest) if fused.is_filter else rest
    theirs = (*rest, total) if is_transposed else (total, *rest)
    return TheirTensor(name, theirs, is_transposed, tuple(parts), fused.offset)
