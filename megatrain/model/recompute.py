"""Recomputation: a part keeps its inputs alone, and runs a second time when its backward pass needs the rest.

    uniform   layers in chunks of n, each a segment that keeps what enters it
    block     the first n layers of a stage, each for itself
    parts     within every layer, the core attention, the MLP, experts, or the norms before them, which run again where the
              linear layer behind them needs what they gave

Nothing random is kept for the second run: dropout is a function of its place. Sources: Chen et al., arXiv:1604.06174;
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
    """What is computed twice."""

    kind: Literal["none", "uniform", "block", "parts"] = "none"
    num_layers: int = 1
    """Of a chunk, or of a stage's first layers."""
    parts: tuple[str, ...] = ()
    """`core_attn`, `mlp`, `layernorm`; of layers with experts `moe` and `shared_experts`."""

    def has_part(self, name: str) -> bool:
        """Whether this part of every layer is computed twice."""
        return self.kind == "parts" and name in self.parts


class Recomputed(nn.Module):
    """Calls a part as it is called, twice."""

    def __init__(self, part: nn.Module) -> None:
        super().__init__()
        self.part = part

    def forward(self, *arguments: Any) -> Any:
        return checkpoint(self.part, *arguments, use_reentrant=False, preserve_rng_state=False)


class Layers(nn.Module):
    """Several layers as one segment."""

    def __init__(self, layers: Sequence[nn.Module]) -> None:
        super().__init__()
        self.layers = nn.ModuleList(layers)

    def forward(self, hidden: Tensor, batch: Batch, info: PassInfo) -> Tensor:
        for layer in self.layers:
            hidden = layer(hidden, batch, info)
        return hidden


def layer_segments(layers: Sequence[nn.Module], recompute: Recompute) -> list[nn.Module]:
    """A stage's layers as segments."""
    n = recompute.num_layers
    if recompute.kind == "uniform":
        return [Recomputed(Layers(layers[first : first + n])) for first in range(0, len(layers), n)]
    if recompute.kind == "block":
        return [Recomputed(layer) if number < n else layer for number, layer in enumerate(layers)]
    return list(layers)
