"""Activation recomputation: a module keeps only its inputs, and its forward pass runs a second time during backward.

    uniform   chunks of n layers, each a segment that keeps its inputs
    block     the first n layers of a stage, one by one
    parts     within every layer: core attention, MLP, experts, the expansion of latents to heads, or the norms before linear
              layers, whose output the linear layer recomputes for its weight gradient

No random state is saved for the second run: dropout is a function of the token. Sources: Chen et al., arXiv:1604.06174;
Korthikanti et al., arXiv:2205.05198 (parts).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from megatrain.parallel.batch import Batch, PassInfo


@dataclass(frozen=True, kw_only=True)
class Recompute:
    """The modules whose activations are recomputed."""

    kind: Literal["none", "uniform", "block", "parts"] = "none"
    num_layers: int = 1
    """Layers of a chunk (uniform), or the first layers of a stage (block)."""
    mlp_rows: int | None = None
    """Most rows of the residual stream that a dense MLP computes at once: see `implementations/mlp_chunks.py`; None: all."""
    parts: tuple[str, ...] = ()
    """`core_attn`, `mlp`, `mlp_act`, `layernorm`; `mla_up_proj` with latents; `moe` and `shared_experts` with experts."""

    def has_part(self, name: str) -> bool:
        """Return whether this part of every layer is recomputed, or of every layer that is not recomputed whole."""
        return name in self.parts


class RecomputedModule(nn.Module):
    """A module under activation checkpointing, with the same arguments."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module = module

    def forward(self, *arguments: Any) -> Any:
        return checkpoint(self.module, *arguments, use_reentrant=False, preserve_rng_state=False)


@contextmanager
def discarded(tensors: Sequence[Tensor], recompute_fn: Callable[[], Sequence[Tensor]]) -> Iterator[None]:
    """Operations inside the context keep none of these tensors, nor views of them: their backward passes compute them again.

    Args:
        recompute_fn: returns the same tensors, with the same strides.
    """
    places = {x.untyped_storage().data_ptr(): number for number, x in enumerate(tensors)}
    found: list[Sequence[Tensor]] = []
    num_left = 0

    def pack(x: Tensor) -> Tensor | _View:
        nonlocal num_left
        number = places.get(x.untyped_storage().data_ptr())
        if number is None:
            return x
        num_left += 1
        return _View(number, x.shape, x.stride(), int(x.storage_offset()))

    def unpack(saved: Tensor | _View) -> Tensor:
        nonlocal num_left
        if isinstance(saved, Tensor):
            return saved
        if not found:
            with torch.no_grad():
                found.append(recompute_fn())
        x = found[0][saved.number].as_strided(saved.shape, saved.stride, saved.offset)
        num_left -= 1
        if not num_left:
            found.clear()
        return x

    with torch.autograd.graph.saved_tensors_hooks(pack, unpack):
        yield


class _View(NamedTuple):
    """A view of a discarded tensor: its number, and its place in the storage."""

    number: int
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int


class Layers(nn.Module):
    """Consecutive layers as one segment."""

    def __init__(self, layers: Sequence[nn.Module]) -> None:
        super().__init__()
        self.layers = nn.ModuleList(layers)

    def forward(self, hidden: Tensor, batch: Batch, info: PassInfo) -> Tensor:
        for layer in self.layers:
            hidden = layer(hidden, batch, info)
        return hidden


def layer_segments(layers: Sequence[nn.Module], recompute: Recompute) -> list[nn.Module]:
    """Divide the layers of a stage into segments."""
    n = recompute.num_layers
    if recompute.kind == "uniform":
        return [RecomputedModule(Layers(layers[first : first + n])) for first in range(0, len(layers), n)]
    if recompute.kind == "block":
        return [RecomputedModule(layer) if number < n else layer for number, layer in enumerate(layers)]
    return list(layers)
