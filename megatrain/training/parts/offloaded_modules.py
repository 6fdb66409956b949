"""The segments and modules whose activations are offloaded to host memory.

    --cpu-offloading-num-layers    layers, spread evenly over those of the rank
    --offload-modules layer_input  inputs of recomputed layers
    --offload-modules NAME         what the module of this name, and those inside of it, save in every layer

Recomputed modules save only their inputs, and nothing inside of them is offloaded.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any, Final, NamedTuple

import torch
from torch import nn

from megatrain.model.experts.experts import ExpertBranch, Experts
from megatrain.model.families.cross_attention import CrossAttention
from megatrain.model.latent_attention import (
    DownProjection,
    DownProjectionOfKeys,
    ExpandedAttention,
    LatentAttention,
)
from megatrain.model.layer import Attention, Mlp, TransformerLayer
from megatrain.model.linear_attention import LinearAttention
from megatrain.model.recompute import RecomputedModule
from megatrain.parallel.pipeline.activation_offload import ActivationOffload
from megatrain.parallel.pipeline.segments import Segment, SegmentHooks

_MODULES: Final[Mapping[type[nn.Module], str]] = {
    Attention: "attn_norm:qkv.norm qkv_linear:qkv core_attn:core attn_proj:proj",
    LinearAttention: "attn_norm:projections.norm qkv_linear:projections core_attn:core attn_proj:proj",
    CrossAttention: "attn_norm:q.norm qkv_linear:q core_attn:core attn_proj:proj",
    DownProjection: "attn_norm:linear.norm qkv_linear:linear",
    DownProjectionOfKeys: "attn_norm:norm qkv_linear:linear",
    ExpandedAttention: "core_attn:core",
    LatentAttention: "attn_proj:proj",
    Mlp: "mlp_norm:fc1.norm",
    ExpertBranch: "mlp_norm:norm",
    Experts: "expert_fc1:experts moe_act:experts",  # one operation
}
"""Names and places of the modules inside of others."""


class OffloadChoice(NamedTuple):
    """The activations to offload."""

    num_layers: int
    """Layers of a rank; more than it has: all."""
    modules: tuple[str, ...]
    min_numel: int
    """Tensors with fewer elements stay on the device."""


def offload_activations(
    segments: Sequence[nn.Module], choice: OffloadChoice, hooks: SegmentHooks, device: torch.device
) -> tuple[ActivationOffload, list[Segment]]:
    """Return the hooks and the segments of an executor that offloads activations."""
    offload, found = ActivationOffload(hooks, device, choice.min_numel), list[Segment](segments)
    layers = [sum(isinstance(one, TransformerLayer) for one in segment.modules()) for segment in segments]
    for number, (segment, count) in enumerate(zip(segments, layers, strict=True)):
        numbers = range(sum(layers[:number]), sum(layers[: number + 1]))
        is_whole = any(one * choice.num_layers % sum(layers) < choice.num_layers for one in numbers)
        is_whole |= count > 0 and isinstance(segment, RecomputedModule) and "layer_input" in choice.modules
        if is_whole or (count and choice.modules):
            found[number] = offload.segment(number, segment, is_whole=is_whole)
            _offload_modules(segment, choice.modules, offload)
    return offload, found


def _offload_modules(module: nn.Module, names: Collection[str], offload: ActivationOffload) -> None:
    """Let the chosen modules inside of this one offload what they save."""
    if isinstance(module, RecomputedModule):
        return
    for entry in _MODULES.get(type(module), "").split():
        name, _, place = entry.partition(":")
        if name in names:
            _replace_method(module, place, offload)
    for child in module.children():
        _offload_modules(child, names, offload)


def _replace_method(owner: Any, place: str, offload: ActivationOffload) -> None:
    """Let the method that computes a module enter `saving`.

    It is the linear layer's for a norm that it recomputes from its input, and saves too, and inside Transformer Engine's.
    """
    for part in place.split("."):
        child = getattr(owner, part, None)
        is_inside = not hasattr(child, "add_and_norm") or getattr(owner, "recompute_norm", False)
        owner = owner if part == "norm" and is_inside else child
    method = "add_and_norm" if hasattr(owner, "add_and_norm") else "forward"
    original: Callable[..., Any] = getattr(owner, method)

    def call(*arguments: Any) -> Any:
        with offload.saving():
            return original(*arguments)

    setattr(owner, method, call)
