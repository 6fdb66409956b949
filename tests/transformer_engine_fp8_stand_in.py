"""FP8 of the stand-in for Transformer Engine: recipes, contexts and casts, emulated in any dtype.

A cast returns the values of the codes, so that products of them are those of FP8 matrices.
"""

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass
from enum import Enum
from types import ModuleType, SimpleNamespace
from typing import ClassVar

import torch
from torch import Tensor

from megatrain.model.implementations.transformer_engine_fp8 import TEFp8Linear
from megatrain.parallel.batch import PassInfo

INPUT, WEIGHT, GRADIENT = ("scaling_fwd", 0), ("scaling_fwd", 1), ("scaling_bwd", 0)
_SLOTS = {"scaling_fwd": 3, "scaling_bwd": 2}


class Format(Enum):
    E4M3 = (torch.float8_e4m3fn, torch.float8_e4m3fn)
    HYBRID = (torch.float8_e4m3fn, torch.float8_e5m2)


@dataclass
class DelayedScaling:
    fp8_format: Format
    amax_history_len: int = 1024


@dataclass
class Float8CurrentScaling:
    fp8_format: Format


@dataclass
class Float8BlockScaling:
    fp8_format: Format


@dataclass
class MXFP8BlockScaling:
    fp8_format: Format


RECIPES = (DelayedScaling, Float8CurrentScaling, Float8BlockScaling, MXFP8BlockScaling)


class autocast:  # noqa: N801 (the library's name)
    active: ClassVar[object | None] = None
    """Recipe of the context."""

    def __init__(
        self, enabled=True, calibrating=False, recipe=None, amax_reduction_group=None, _graph=False
    ) -> None:
        assert _graph, "the library would update scales with every call"
        assert isinstance(recipe, RECIPES)
        self.recipe = recipe

    def __enter__(self) -> None:
        assert autocast.active is None, "a context inside another"
        autocast.active = self.recipe

    def __exit__(self, *_: object) -> None:
        autocast.active = None


def new_meta(recipe: object) -> dict[str, SimpleNamespace]:
    """Return `fp8_meta` of a layer."""
    if not isinstance(recipe, DelayedScaling):
        return {}
    return {
        direction: SimpleNamespace(
            scale=torch.ones(count), amax_history=torch.zeros(recipe.amax_history_len, count)
        )
        for direction, count in _SLOTS.items()
    }


@dataclass(frozen=True)
class Casts:
    """Casts of one call of a layer, and of its backward pass."""

    recipe: object
    meta: dict[str, SimpleNamespace]
    is_first: bool | None

    def cast(self, x: Tensor, place: tuple[str, int]) -> Tensor:
        direction, slot = place
        dtype = self.recipe.fp8_format.value[direction == "scaling_bwd"]
        largest = torch.finfo(dtype).max
        if isinstance(self.recipe, DelayedScaling):
            meta = self.meta[direction]
            seen = meta.amax_history[0][slot]
            seen.copy_(torch.maximum(seen, x.abs().amax().float()))
            scale = meta.scale[slot]
        else:
            has_blocks = isinstance(self.recipe, Float8BlockScaling)
            amax = x.abs().amax(-1, keepdim=True) if has_blocks else x.abs().amax()
            scale = torch.where(amax == 0, 1.0, largest / amax.float())
        codes = (x * scale).clamp(-largest, largest).to(dtype)
        return codes.to(x.dtype) * scale.reciprocal()


def recipe_module() -> ModuleType:
    """Return the stand-in for `transformer_engine.common.recipe`."""
    module = ModuleType("transformer_engine.common.recipe")
    for one in (Format, *RECIPES):
        setattr(module, one.__name__, one)
    return module


@contextlib.contextmanager
def casting_once(self: TEFp8Linear, info: PassInfo) -> Iterator[dict[str, bool | None]]:
    """Replace `TEFp8Linear.casting` by a fault: only the first call in training casts the weight, for all steps."""
    is_first = not hasattr(self, "was_cast")
    self.was_cast = True  # type: ignore[attr-defined]
    with self.autocast:
        yield {"is_first_microbatch": is_first if info.is_training else None}
