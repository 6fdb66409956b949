"""Activation recomputation: a module keeps only its inputs, and its forward pass runs a second time during backward.

    uniform   chunks of n layers, each a segment that keeps its inputs
    block     the first n layers of a stage, one by one
    parts     within every layer: core attention, MLP, experts, or the norms before linear layers, whose output the linear
              layer recomputes for its weight gradient

No random state is saved for the second run: dropout is a function of the token. Sources: Chen et al., arXiv:1604.06174;
Korthikanti et al., arXiv:2205.05198 (parts).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from megatrain.parallel.batch import Batch, PassInfo


@dataclass(frozen=True, kw_only=True)
class Recompute:
    """The modules whose activations are recomputed."""

    kind: Literal["none", "uniform", "block", "parts"] = "none"
    num_layers: int = 1
    """Layers of a chunk (uniform), or the first layers of a stage (block)."""
    parts: tuple[str, ...] = ()
    """`core_attn`, `mlp`, `layernorm`; `moe` and `shared_experts` in layers with experts."""

    def has_part(self, name: str) -> bool:
        """Return whether this part of every layer is recomputed."""
        return self.kind == "parts" and name in self.parts


class RecomputedModule(nn.Module):
    """A module under activation checkpointing, with the same arguments."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module = module

    def forward(self, *arguments: Any) -> Any:
        return checkpoint(self.module, *arguments, use_reentrant=False, preserve_rng_state=False)


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
