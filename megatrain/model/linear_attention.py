"""Linear attention by the gated delta rule (gated DeltaNet), a mixer in place of attention.

hidden ─ + ─ norm + projection ─┬─ q, k, v ─ convolution ─ activation ─┐
                                ├─ beta, alpha ────────────────────────┴─ gated delta rule ─ norm ─ * ─ projection ─ output
                                └─ gate ─ activation ───────────────────────────────────────────────┘

    q, k            [s, b, nk, dk], divided by their length; nv / nk consecutive heads of values share one
    v, gate         [s, b, nv, dv]
    decay           g = -exp(a_log) softplus(alpha + dt_bias), per head of values
    over tp         heads are split, as those of attention
    over cp         heads are exchanged for whole samples (parallel/context/head_exchange.py)
    documents       the convolution and the state begin anew

Source: Yang et al., Gated Delta Networks, arXiv:2412.06464; the model is Qwen3-Next's, as Megatron-LM has it.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from megatrain.config.model_spec.activation import ActivationFunction
from megatrain.config.model_spec.delta_rule import LinearAttentionSpec
from megatrain.kernels.dtypes import accumulation_dtype
from megatrain.kernels.gated_delta import causal_convolution, gated_delta_rule
from megatrain.model import functions
from megatrain.model.implementations.local_builder import ACTIVATION_FUNCTIONS
from megatrain.model.layer import branch_output
from megatrain.model.layer_context import LayerContext
from megatrain.model.layouts import (
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

_MIN_SQUARE = 1e-6
"""Added to the squared length of queries and keys."""


class LinearAttention(nn.Module):
    """Linear attention over this rank's heads, from the norm to the output of the branch."""

    def __init__(self, spec: LinearAttentionSpec, context: LayerContext) -> None:
        super().__init__()
        builder, tp, norm, prefix = context.builder, context.tp, context.model.norm, context.name(spec)
        values, heads = spec.value_dim, spec.num_value_heads
        self.activation = ACTIVATION_FUNCTIONS[spec.activation]
        self.sizes = [size // tp.size for size in (2 * spec.key_dim + values, values, heads, heads)]
        linears = context.linears(spec)
        self.projections = context.column_linear(linears["q"], context.branch_norm(spec))
        core = DeltaRule(spec, self.activation, context)
        self.core = RecomputedModule(core) if context.recompute.has_part("core_attn") else core
        width, gain_init = spec.value_head_dim, unit_gain(norm)
        gain = heads_layout(f"{prefix}.out_norm.weight", width, gain_init, tp, decays=False)
        bias = heads_layout(f"{prefix}.out_norm.bias", width, Init(), tp, decays=False)
        self.norm = builder.norm(LinearLayout(gain, bias if norm.kind == "LayerNorm" else None), norm)
        self.proj = context.row_linear(linears["proj"])
        self.output = branch_output(spec, context)

    def forward(self, residual: Tensor, delta: Tensor | None, info: PassInfo) -> tuple[Tensor, Tensor]:
        residual, projected = self.projections(residual, delta, info)
        qkv, gate, beta, alpha = projected.split(self.sizes, dim=-1)
        out = self.norm(self.core(qkv, beta, alpha, info), info)
        gate = self.activation.value(gate.to(accumulation_dtype(gate.dtype)))
        out = (out.flatten(2) * gate).to(qkv.dtype)
        return residual, self.output(self.proj(out, info), info)


class DeltaArguments(NamedTuple):
    """Arguments of `gated_delta_rule`."""

    q: Tensor
    k: Tensor
    v: Tensor
    g: Tensor
    beta: Tensor


class DeltaRule(ShardedModule):
    """Convolution of queries, keys and values, and the gated delta rule."""

    convolution: Tensor
    dt_bias: Tensor
    a_log: Tensor

    def __init__(
        self, sizes: LinearAttentionSpec, activation: ActivationFunction, context: LayerContext
    ) -> None:
        super().__init__()
        self.activation = activation
        prefix, tp, dtype = context.name(sizes), context.tp, context.ranks.dtype
        heads = Columns(f"{prefix}.dt_bias", sizes.num_value_heads)
        logs = Columns(f"{prefix}.a_log", sizes.num_value_heads)
        convolved = context.columns(context.linears(sizes)["q"], "convolution")[:3]  # queries, keys, values
        self.add_weight("convolution", convolution_layout(convolved, sizes.kernel_size, tp), dtype)
        self.add_weight("dt_bias", columns_bias_layout([heads], tp, Init(mean=1.0)), dtype)
        self.add_weight("a_log", columns_bias_layout([logs], tp, Init(log_of=(1.0, 16.0))), dtype)
        self.exchange = HeadExchange(context.ranks.split.cp.group)
        keys = Heads(sizes.num_key_heads // tp.size, sizes.key_head_dim)
        values = Heads(sizes.num_value_heads // tp.size, sizes.value_head_dim)
        self.convolved, self.per_head = (keys, keys, values), Heads(values.count, 1)

    def forward(self, qkv: Tensor, beta: Tensor, alpha: Tensor, info: PassInfo) -> Tensor:
        """Map q, k, v [s/cp, b, c/tp], beta and alpha [s/cp, b, nv/tp] -> [s/cp, b, nv/tp, dv]."""
        ids = None if info.documents is None else info.documents.document_ids.t()
        if self.exchange.group.size > 1:
            parts = (*self.convolved, self.per_head, self.per_head)
            whole = self.exchange.to_heads(torch.cat((qkv, beta, alpha), dim=-1), parts)
            heads = self.exchange.local(self.per_head).count
            qkv, beta, alpha = whole.split([whole.shape[-1] - 2 * heads, heads, heads], dim=-1)
        out = gated_delta_rule(*self.arguments(qkv, beta, alpha, ids), document_ids=ids)
        return self.exchange.to_rows(out)

    def arguments(
        self, qkv: Tensor, beta: Tensor, alpha: Tensor, document_ids: Tensor | None = None
    ) -> DeltaArguments:
        """Return the arguments of the rule, of whole samples. `qkv` may have rows before those of `beta`, which are only convolved."""
        dtype, share = accumulation_dtype(qkv.dtype), self.exchange.share
        convolution, dt_bias, a_log = (
            functions.weight_of(self, name).to(dtype) for name in ("convolution", "dt_bias", "a_log")
        )
        convolution = share(convolution.t(), self.convolved).t()
        dt_bias, a_log = (share(x, [self.per_head]) for x in (dt_bias, a_log))
        convolved = causal_convolution(qkv.to(dtype), convolution, document_ids)[len(qkv) - len(beta) :]
        mixed = self.activation.value(convolved).to(qkv.dtype)
        local = [self.exchange.local(heads) for heads in self.convolved]
        parts = mixed.split([heads.count * heads.channels for heads in local], dim=-1)
        q, k, v = (x.unflatten(-1, heads) for x, heads in zip(parts, local, strict=True))
        q, k = (_unit_heads(x, dtype) for x in (q, k))
        q, k = (_repeat_heads(x, v.shape[2] // x.shape[2]) for x in (q * q.shape[-1] ** -0.5, k))
        g = -a_log.exp() * F.softplus(alpha.to(dtype) + dt_bias)
        return DeltaArguments(q, k, v, g, beta.to(dtype).sigmoid())


def _unit_heads(x: Tensor, dtype: torch.dtype) -> Tensor:
    """Divide each head [..., d] by its length."""
    x = x.to(dtype)
    return x * torch.rsqrt(x.square().sum(-1, keepdim=True) + _MIN_SQUARE)


def _repeat_heads(x: Tensor, times: int) -> Tensor:
    """Repeat each head: [s, b, n, d] -> [s, b, n * times, d]."""
    return x.unsqueeze(3).expand(-1, -1, -1, times, -1).flatten(2, 3)
