"""Linear attention by the gated delta rule (gated delta net), a mixer in place of attention.

hidden ─ + ─ norm + projection ─┬─ q, k, v ─ convolution ─ activation ─┐
                                ├─ decay, erase and write ─────────────┴─ gated delta rule ─ norm ─ * ─ projection ─ output
                                └─ gate ─ activation ───────────────────────────────────────────────┘

    q, k            [s, b, nk, dk], divided by their length; nv / nk consecutive heads of values share one
    v, gate         [s, b, nv, dv]
    decay           g = -exp(a_log) softplus(alpha + dt_bias), per head of values
    second variant  g per channel of keys, from [s, b, nk, dk], with a_log per head of keys; erase [s, b, nk, dk], write [s, b, nv, dv]
    over tp         heads are split, as those of attention
    over cp         heads are exchanged for whole samples (parallel/context/head_exchange.py)
    documents       the convolution and the state begin anew

Source: Yang et al., Gated Delta Networks, arXiv:2412.06464; the models are Qwen3-Next's and gated delta net 2, as Megatron-LM has them.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from megatrain.config.model_spec.activation import ActivationFunction
from megatrain.config.model_spec.delta_rule import LinearAttentionSpec
from megatrain.kernels.activations import SILU
from megatrain.kernels.dtypes import accumulation_dtype
from megatrain.kernels.gated_delta import (
    activated_convolution,
    continue_gated_delta_rule,
    delta_rule,
    unit_heads,
)
from megatrain.kernels.qkv import Place, split_channels
from megatrain.model import functions
from megatrain.model.attention_parts import gate_output
from megatrain.model.implementations.local_builder import ACTIVATION_FUNCTIONS
from megatrain.model.layer import branch_output
from megatrain.model.layer_context import LayerContext
from megatrain.model.layouts import (
    STEP_SIZES,
    Columns,
    LinearLayout,
    columns_bias_layout,
    convolution_layout,
    heads_layout,
    unit_gain,
)
from megatrain.model.recompute import RecomputedModule
from megatrain.parallel.batch import PassInfo
from megatrain.parallel.context.head_exchange import HeadExchange, Heads
from megatrain.parallel.layout import Init, ShardedModule


class LinearAttention(nn.Module):
    """Linear attention over this rank's heads, from the norm to the output of the branch."""

    def __init__(self, spec: LinearAttentionSpec, context: LayerContext) -> None:
        super().__init__()
        builder, tp, norm, prefix = context.builder, context.tp, context.model.norm, context.name(spec)
        self.activation = ACTIVATION_FUNCTIONS[spec.activation]
        linears = context.linears(spec)
        sizes = [piece.size // tp.size for piece in linears["q"].pieces]
        self.sizes = [sum(sizes[:3]), sizes[3], sum(sizes[4:])]
        self.projections = context.column_linear(linears["q"], context.branch_norm(spec))
        core = DeltaRule(spec, self.activation, context)
        self.core = RecomputedModule(core) if context.recompute.has_part("core_attn") else core
        width, gain_init = spec.value_head_dim, unit_gain(norm)
        gain = heads_layout(f"{prefix}.out_norm.weight", width, gain_init, tp, decays=False)
        bias = heads_layout(f"{prefix}.out_norm.bias", width, Init(), tp, decays=False)
        self.norm = builder.norm(LinearLayout(gain, bias if norm.has_bias else None), norm)
        self.proj = context.row_linear(linears["proj"])
        self.output = branch_output(spec, context)

    def forward(self, residual: Tensor, delta: Tensor | None, info: PassInfo) -> tuple[Tensor, Tensor | None]:
        residual, projected = self.projections(residual, delta, info)
        (qkv, gate, strengths), places = split_channels(projected, self.sizes)
        out = self.norm(self.core(qkv, strengths, info, places[0]), info).flatten(2).to(qkv.dtype)
        if self.activation is SILU:
            out = gate_output(out, gate, has_silu=True, place=places[1])
        else:
            out = (out * self.activation.value(gate.to(accumulation_dtype(gate.dtype)))).to(qkv.dtype)
        return self.output.add_to(residual, self.proj(out, info), info)


class DeltaRule(ShardedModule):
    """Convolution of queries, keys and values, and the gated delta rule."""

    convolution: Tensor
    dt_bias: Tensor
    a_log: Tensor

    def __init__(
        self, sizes: LinearAttentionSpec, activation: ActivationFunction, context: LayerContext
    ) -> None:
        super().__init__()
        self.activation, self.has_channel_gates = activation, sizes.has_channel_gates
        prefix, tp, dtype = context.name(sizes), context.tp, context.ranks.dtype
        convolved = context.columns(context.linears(sizes)["q"], "convolution")[:3]  # queries, keys, values
        self.add_weight("convolution", convolution_layout(convolved, sizes.kernel_size, tp), dtype)
        if self.has_channel_gates:
            biases, logs, bias_init = sizes.key_dim, sizes.num_key_heads, Init(softplus_of=STEP_SIZES)
        else:
            biases = logs = sizes.num_value_heads
            bias_init = Init(mean=1.0)
        for name, size, init in (("dt_bias", biases, bias_init), ("a_log", logs, Init(log_of=(1.0, 16.0)))):
            layout = columns_bias_layout([Columns(f"{prefix}.{name}", size)], tp, init)
            self.add_weight(name, layout, dtype)
        self.exchange = HeadExchange(context.ranks.split.cp)
        keys = Heads(sizes.num_key_heads // tp.size, sizes.key_head_dim)
        values = Heads(sizes.num_value_heads // tp.size, sizes.value_head_dim)
        one = Heads(values.num_heads, 1)
        self.convolved = (keys, keys, values)
        self.strengths = (keys, keys, values) if self.has_channel_gates else (one, one)
        self.biases, self.logs = (keys, Heads(keys.num_heads, 1)) if self.has_channel_gates else (one, one)

    def forward(self, qkv: Tensor, strengths: Tensor, info: PassInfo, place: Place) -> Tensor:
        """Map q, k, v and the other projections but the gate, [s/cp, b, channels/tp] -> [s/cp, b, nv/tp, dv].

        `place`: where kernels write the gradient of q, k and v.
        """
        ids = None if info.documents is None else info.documents.document_ids.t()
        if self.exchange.group.size > 1:
            parts = (*self.convolved, *self.strengths)
            whole = self.exchange.to_heads(torch.cat((qkv, strengths), dim=-1), parts)
            (qkv, strengths), (place, _) = split_channels(
                whole, [self._width(self.convolved), self._width(self.strengths)]
            )
        return self.exchange.to_rows(self.continued(qkv, strengths, None, ids, place)[0])

    def continued(
        self,
        qkv: Tensor,
        strengths: Tensor,
        state: Tensor | None,
        document_ids: Tensor | None = None,
        place: Place | None = None,
    ) -> tuple[Tensor, Tensor]:
        """Compute whole samples of some heads, or their next tokens; return outputs and states.

        `qkv` may have rows before those of `strengths`, which are only convolved.
        """
        dtype, share = accumulation_dtype(qkv.dtype), self.exchange.share
        convolution, dt_bias, a_log = (
            functions.weight_of(self, name).to(dtype) for name in ("convolution", "dt_bias", "a_log")
        )
        convolution = share(convolution.t(), self.convolved).t()
        mixed = activated_convolution(qkv, convolution, None, self.activation, document_ids, place)
        if len(qkv) > len(strengths):
            mixed = mixed[-len(strengths) :]
        (q, k, v), places = self._heads(mixed, self.convolved)
        if self.has_channel_gates:
            q, k = q.to(dtype), k.to(dtype)
        q, k = unit_heads(q, q.shape[-1] ** -0.5, place=places[0]), unit_heads(k, 1.0, place=places[1])
        decays = -share(a_log, [self.logs]).exp().unsqueeze(-1)
        dt_bias = share(dt_bias, [self.biases]).unflatten(-1, (len(decays), -1))
        (first, *others), _ = self._heads(strengths.to(dtype), self.strengths)
        if self.has_channel_gates:
            copies = v.shape[2] // q.shape[2]
            g = decays * F.softplus(first + dt_bias)
            q, k, g, erase = (_repeat_heads(x, copies) for x in (q, k, g, others[0].sigmoid()))
            written = others[1].sigmoid() * v.to(dtype)
            out, state = delta_rule(q, k, written, g, erase * k, state, document_ids=document_ids)
            return out.to(v.dtype), state
        beta, g = first.sigmoid().squeeze(-1), (decays * F.softplus(others[0] + dt_bias)).squeeze(-1)
        return continue_gated_delta_rule(q, k, v, g, beta, state, document_ids=document_ids, place=places[2])

    def _heads(self, x: Tensor, parts: Sequence[Heads]) -> tuple[list[Tensor], list[Place]]:
        """Split channels in the local heads of each part, [s, b, n, d]; return the places of their gradients too."""
        local = [self.exchange.local(heads) for heads in parts]
        split, places = split_channels(x, [heads.num_heads * heads.channels for heads in local])
        return [part.unflatten(-1, heads) for part, heads in zip(split, local, strict=True)], places

    def _width(self, parts: Sequence[Heads]) -> int:
        return sum(heads.num_heads * heads.channels for heads in map(self.exchange.local, parts))


def _repeat_heads(x: Tensor, times: int) -> Tensor:
    """Repeat each head: [s, b, n, d] -> [s, b, n * times, d]."""
    return x.unsqueeze(3).expand(-1, -1, -1, times, -1).flatten(2, 3)
