"""Their tensors as functions of our names and shapes, by the table of a family.

self_attn.qkv_proj.weight   rows  q q k v        stacked:     q, k and v one after the other
attention.query_key_value   rows  q0 k0 v0 q1 .. by head:     those of head 0, of head 1 ...
attn.c_attn.weight          columns q k v        transposed:  [inputs, outputs]
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

from megatrain.interop.hf.family import Fused, Modules

Shape = tuple[int, ...]
_NUMBER: Final = re.compile(r"(?<=\.)\d+(?=\.)")


@dataclass(frozen=True)
class Part:
    """One of our tensors in one of theirs: these rows of it, one range after the other."""

    name: str
    shape: Shape
    rows: tuple[slice, ...]


@dataclass(frozen=True)
class TheirTensor:
    """One of their tensors."""

    name: str
    shape: Shape
    """Shape in their files."""
    is_transposed: bool
    """The rows of its parts are its columns."""
    parts: tuple[Part, ...]


def their_tensors(modules: Modules, ours: Mapping[str, Shape], num_heads: int) -> dict[str, TheirTensor]:
    """Return their tensors that hold all of ours, by name.

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
        module, _, kind = name.rpartition(".")
        numbers = _NUMBER.findall(f"{module}.")
        template = _NUMBER.sub("{}", f"{module}.")[:-1]
        if template not in homes:
            raise KeyError(name)
        theirs, fused = homes[template]
        whole = f"{theirs.format(*numbers)}.{kind}"
        if whole not in found:
            names = [f"{each.format(*numbers)}.{kind}" for each in fused.names]
            found[whole] = _their_tensor(whole, names, ours, fused, num_heads)
    return found


def _their_tensor(
    name: str, names: list[str], ours: Mapping[str, Shape], fused: Fused, num_heads: int
) -> TheirTensor:
    shapes = [ours[each] for each in names]
    total, rest = sum(shape[0] for shape in shapes), shapes[0][1:]
    parts, first = [], 0
    for each, shape in zip(names, shapes, strict=True):
        size = shape[0] // num_heads if fused.by_head else shape[0]
        starts = range(first, total, total // num_heads) if fused.by_head else [first]
        parts.append(Part(each, shape, tuple(slice(start, start + size) for start in starts)))
        first += size
    is_transposed = fused.is_transposed and len(rest) == 1
    return TheirTensor(name, (*rest, total) if is_transposed else (total, *rest), is_transposed, tuple(parts))
