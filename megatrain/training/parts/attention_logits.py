"""The largest attention logits of a step, for the log and for QK-Clip.

    core attention's queries and keys ─> maximum over the pairs that it attends to, per layer and head
                                      ─> maximum over micro-batches, ranks with other tokens, and ranks with other heads

Fused attention does not return its scores: they are computed once more, in blocks, without gradients, and again where the
backward pass recomputes the layer.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor, nn

from megatrain.config.model_spec.attention import AttentionSpec
from megatrain.config.model_spec.model import ModelSpec
from megatrain.kernels.dtypes import accumulation_dtype
from megatrain.model.gpt import Model
from megatrain.model.latent_attention import ExpandedAttention, GatheredAttention
from megatrain.model.layer import Attention
from megatrain.optim.qk_clip import QkClip
from megatrain.parallel.collectives import all_reduce
from megatrain.parallel.context.largest_logits import largest_causal_logits
from megatrain.parallel.grid import RankGrid
from megatrain.parallel.layout import ShardedModule


def attention_specs(spec: ModelSpec) -> dict[str, AttentionSpec]:
    """Return the attention of all layers, by the prefix of its canonical names."""
    return {
        f"{spec.layer_name(number)}.{part.name}": part
        for number, layer in enumerate(spec.all_layers)
        for part in layer.parts
        if isinstance(part, AttentionSpec)
    }


class AttentionLogits:
    """Measures the attention of this rank's part of the model in training passes.

    Args:
        clip: scales weights by the logits; None: they are logged only.
    """

    def __init__(self, model: Model, grid: RankGrid, device: torch.device, clip: QkClip | None) -> None:
        self.grid, self.clip, specs = grid, clip, attention_specs(model.spec)
        shape = len(specs), max((spec.num_heads for spec in specs.values()), default=0)
        self.values = torch.full(
            shape, -math.inf, dtype=accumulation_dtype(model.hidden_dtype), device=device
        )
        """[layers, heads]; -inf of heads on other ranks."""
        numbers = {name: number for number, name in enumerate(specs)}
        for branch in (module for segment in model.segments for module in segment.modules()):
            if isinstance(branch, Attention | ExpandedAttention | GatheredAttention):
                name = _name_of(branch)
                assert isinstance(branch.core, nn.Module)
                self._observe(branch.core, model, specs[name], self.values[numbers[name]])

    def _observe(self, core: nn.Module, model: Model, spec: AttentionSpec, values: Tensor) -> None:
        """Measure core attention before each of its training passes."""
        size = spec.num_heads // model.tp.size
        local = values[model.tp.rank * size : (model.tp.rank + 1) * size]

        @torch.no_grad()
        def measure(_: nn.Module, arguments: tuple[Any, ...]) -> None:
            q, k, _, info = arguments
            if info.is_training:
                found = largest_causal_logits(
                    q, k, model.cp, scale=spec.score_scale, window=spec.window, documents=info.documents
                )
                torch.maximum(local, found, out=local)

        core.register_forward_pre_hook(measure)

    def forget(self) -> None:
        """Forget the passes of a step that is computed again."""
        self.values.fill_(-math.inf)

    def finish_passes(self, may_update: Tensor) -> Tensor:
        """Return the largest logit of a step, [] on the device, and prepare the clip. All ranks call it, before the update."""
        largest = all_reduce(self.values.clone(), self.grid.world, "max")
        self.forget()
        if self.clip is not None:
            self.clip.begin(largest, may_update)
        return largest.amax()


def _name_of(branch: nn.Module) -> str:
    """Return the prefix of the canonical names of an attention: that of its projection of queries."""
    modules = (module for module in branch.modules() if isinstance(module, ShardedModule))
    pieces = (piece.name for module in modules for one in module.layouts.values() for piece in one.pieces)
    names = (name.rsplit(".", 2) for name in pieces)
    return next(prefix for prefix, projection, _ in names if projection in ("q", "q_up"))
