"""The segments and modules whose activations are offloaded to host memory.

    --cpu-offloading-num-layers    layers, spread evenly over those of the rank
    --offload-modules layer_input  inputs of recomputed layers
    --offload-modules NAME         what the module of this name saves, in every layer

    attn_norm ─ qkv_linear ─ core_attn ─ attn_proj        mlp_norm ─ expert_fc1 ─ moe_act

Modules are called as before; their methods enter `ActivationOffload.saving`. Recomputed modules save only their inputs, and
nothing inside of them is offloaded. With Transformer Engine a norm and its linear layer are one module, offloaded with either name.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Collection, Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from megatrain.model.experts.experts import ExpertBranch, Experts
from megatrain.model.families.cross_attention import CrossAttention
from megatrain.model.latent_attention import ExpandedAttention, LatentAttention
from megatrain.model.layer import Attention, Mlp, TransformerLayer
from megatrain.model.linear_attention import LinearAttention
from megatrain.model.recompute import RecomputedModule
from megatrain.parallel.pipeline.activation_offload import ActivationOffload
from megatrain.parallel.pipeline.segments import Segment, SegmentHooks


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
    offload = ActivationOffload(hooks, device, choice.min_numel)
    layers = [sum(isinstance(one, TransformerLayer) for one in segment.modules()) for segment in segments]
    found: list[Segment] = list(segments)
    first, total = 0, sum(layers)
    for number, (segment, count) in enumerate(zip(segments, layers, strict=True)):
        chosen = [
            one for one in range(first, first + count) if one * choice.num_layers % total < choice.num_layers
        ]
        first += count
        is_recomputed = isinstance(segment, RecomputedModule)
        is_whole = bool(chosen) or (is_recomputed and count > 0 and "layer_input" in choice.modules)
        if is_whole or (count and not is_recomputed and choice.modules):
            found[number] = offload.segment(number, segment, is_whole=is_whole)
            if choice.modules:
                _offload_modules(segment, choice.modules, offload)
    return offload, found


class _Call(NamedTuple):
    """A method whose saved tensors belong to some modules."""

    names: tuple[str, ...]
    owner: Any
    method: str = "forward"


def _offload_modules(module: nn.Module, names: Collection[str], offload: ActivationOffload) -> None:
    """Let the chosen modules of a segment offload what they save."""
    if isinstance(module, RecomputedModule):
        return
    for call in _calls(module):
        chosen = [name for name in call.names if name in names]
        original = getattr(call.owner, call.method)
        if "expert_fc1" in call.names and chosen:
            replacement = _offloaded_experts(original, offload, chosen)
        elif chosen:
            replacement = _inside(original, offload.saving)
        elif call.method == "add_and_norm":  # inside a linear layer
            replacement = _inside(original, functools.partial(offload.saving, lambda _: False))
        else:
            continue
        setattr(call.owner, call.method, replacement)
    for child in module.children():
        _offload_modules(child, names, offload)


def _calls(module: nn.Module) -> Iterator[_Call]:
    """Yield the methods of a module's parts; a norm after the linear layer that calls it."""
    match module:
        case Attention():
            yield from _normed_linear(module.qkv)
        case LinearAttention():
            yield from _normed_linear(module.projections)
        case CrossAttention():
            yield from _normed_linear(module.q)
        case LatentAttention():
            down: Any = module.down
            yield from _normed_linear(down.linear)
            if hasattr(down, "norm"):
                yield _Call(("attn_norm",), down.norm, "add_and_norm")
        case Mlp():
            yield from _normed_linear(module.fc1, "mlp_norm", None)
        case ExpertBranch():
            yield _Call(("mlp_norm",), module.norm, "add_and_norm")
        case Experts():
            yield _Call(("expert_fc1", "moe_act"), module.experts)
    if isinstance(module, Attention | LinearAttention | CrossAttention) or type(module) is ExpandedAttention:
        yield _Call(("core_attn",), module.core)
    if isinstance(module, Attention | LinearAttention | CrossAttention | LatentAttention):
        yield _Call(("attn_proj",), module.proj)


def _normed_linear(linear: Any, norm: str = "attn_norm", name: str | None = "qkv_linear") -> Iterator[_Call]:
    has_method = hasattr(getattr(linear, "norm", None), "add_and_norm")
    names = (name,) if name is not None else ()
    yield _Call(names if has_method else (*names, norm), linear)
    if has_method:
        yield _Call((norm,), linear.norm, "add_and_norm")


def _inside(original: Callable[..., Any], context: Callable[[], Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def call(*arguments: Any, **options: Any) -> Any:
        with context():
            return original(*arguments, **options)

    return call


def _offloaded_experts(
    original: Callable[..., Tensor], offload: ActivationOffload, names: Collection[str]
) -> Callable[..., Tensor]:
    """Return a call of the experts that offloads their rows (expert_fc1), all else that they save (moe_act), or both."""

    @functools.wraps(original)
    def call(dispatched: Any, info: Any) -> Tensor:
        rows = dispatched.rows.untyped_storage().data_ptr()

        def select(x: Tensor) -> bool:
            return ("expert_fc1" if x.untyped_storage().data_ptr() == rows else "moe_act") in names

        with offload.saving(select):
            return original(dispatched, info)

    return call
