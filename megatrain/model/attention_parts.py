"""Parts of an attention layer, built from its spec: core attention, norms of queries and keys, gate of the output."""

from __future__ import annotations

import dataclasses
from typing import Any

from torch import Tensor, nn
from torch.autograd import Function
from torch.nn import functional

from megatrain.config.model_spec.attention import AttentionSpec
from megatrain.kernels import output_gate
from megatrain.kernels.qkv import Place
from megatrain.model.families.masked_attention import MaskedAttention
from megatrain.model.implementations.module_protocols import Pointwise
from megatrain.model.layer_context import LayerContext
from megatrain.model.layouts import (
    Columns,
    LinearLayout,
    columns_bias_layout,
    heads_layout,
    unit_gain,
)
from megatrain.parallel.batch import PassInfo
from megatrain.parallel.context.latent_context import WholeKeys
from megatrain.parallel.layout import Init


def core_attention(spec: AttentionSpec, context: LayerContext) -> nn.Module:
    """Build the core attention of a layer, with its sink logits."""
    if spec.mask == "padding" or spec.relative is not None:
        masked, cp = MaskedAttention(spec, context), context.ranks.split.cp
        return masked if cp.size == 1 else WholeKeys(masked, cp)
    name = context.name(spec)
    columns, init = [Columns(f"{name}.sink", spec.num_heads)], Init(std=context.model.init_std)
    sink = columns_bias_layout(columns, context.tp, init) if spec.sink == "learned" else None
    core = context.builder.core_attention(spec, sink, name)
    assert isinstance(core, nn.Module)
    return core


def qk_norm(spec: AttentionSpec, context: LayerContext, name: str, columns: Columns) -> list[Pointwise]:
    """Build the norm of queries or keys, if there is one; `columns` are their outputs of the projection."""
    builder, norm, tp, name = context.builder, context.model.norm, context.tp, f"{context.name(spec)}.{name}"
    decays, gain = spec.qk_norm_decays, unit_gain(norm)
    if spec.qk_norm == "head":
        weight = heads_layout(f"{name}.weight", spec.head_dim, gain, tp, decays=decays)
        bias = heads_layout(f"{name}.bias", spec.head_dim, Init(), tp, decays=decays)
        return [builder.norm(LinearLayout(weight, bias if norm.has_bias else None), norm)]
    if spec.qk_norm == "l2":
        return [_L2Norm(norm.epsilon)]
    if spec.qk_norm == "all_heads":
        channels = dataclasses.replace(columns, name=f"{name}.weight")
        return [
            builder.split_norm(LinearLayout(columns_bias_layout([channels], tp, gain, decays=decays)), norm)
        ]
    return []


class _L2Norm(nn.Module):
    """Divides each head by the root of its mean square, without a weight."""

    def __init__(self, epsilon: float) -> None:
        super().__init__()
        self.epsilon = epsilon

    def forward(self, x: Tensor, info: PassInfo) -> Tensor:  # noqa: ARG002 (the signature of a leaf)
        return functional.rms_norm(x, x.shape[-1:], eps=self.epsilon)


def gate_output(x: Tensor, gate: Tensor, *, has_silu: bool = False, place: Place | None = None) -> Tensor:
    """Compute x * sigmoid(gate), or x * SiLU(gate), both [s, b, n d]; saves both. Writes the gate's gradient into `place`."""
    out: Tensor = _GateOutput.apply(x, gate, has_silu, place)
    return out


class _GateOutput(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, gate: Tensor, has_silu: bool, place: Place | None) -> Tensor:
        ctx.save_for_backward(x, gate)
        ctx.has_silu, ctx.place = has_silu, place
        return output_gate.gate_output(x, gate, has_silu=has_silu)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        dgate = None if ctx.place is None else ctx.place()
        gradients = output_gate.gate_output_backward(
            grads[0], *ctx.saved_tensors, has_silu=ctx.has_silu, out=dgate
        )
        return *gradients, None, None
