"""Linear attention by the gated delta rule (gated DeltaNet), a mixer in place of attention.

hidden ─ + ─ norm + projection ─┬─ q, k, v ─ convolution ─ activation ─┐
                                ├─ beta, alpha ────────────────────────┴─ gated delta rule ─ norm ─ * ─ projection ─ output
                                └─ gate ─ activation ───────────────────────────────────────────────┘

    q, k            [s, b, nk, dk], divided by their length; nv / nk consecutive heads of values share one
    v, gate         [s, b, nv, dv]
    decay           g = -exp(a_log) softplus(alpha + dt_bias), per head of values
    over tp         heads are split, as those of attention

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
        out = self.norm(self.core(qkv, beta, alpha), info)
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
        self.sizes, self.activation = sizes, activation
        prefix, tp, dtype = context.name(sizes), context.tp, context.ranks.dtype
        heads = Columns(f"{prefix}.dt_bias", sizes.num_value_heads)
        logs = Columns(f"{prefix}.a_log", sizes.num_value_heads)
        convolved = context.columns(context.linears(sizes)["q"], "convolution")[:3]  # queries, keys, values
        self.widths = [columns.num_outputs // tp.size for columns in convolved]
        self.add_weight("convolution", convolution_layout(convolved, sizes.kernel_size, tp), dtype)
        self.add_weight("dt_bias", columns_bias_layout([heads], tp, Init(mean=1.0)), dtype)
        self.add_weight("a_log", columns_bias_layout([logs], tp, Init(log_of=(1.0, 16.0))), dtype)

    def forward(self, qkv: Tensor, beta: Tensor, alpha: Tensor) -> Tensor:
        """Map q, k, v [s, b, c/tp], beta and alpha [s, b, nv/tp] -> [s, b, nv/tp, dv]."""
        return gated_delta_rule(*self.arguments(qkv, beta, alpha))

    def arguments(self, qkv: Tensor, beta: Tensor, alpha: Tensor) -> DeltaArguments:
        """Return the arguments of the rule. `qkv` may have rows before those of `beta`, which are only convolved."""
        sizes, dtype = self.sizes, accumulation_dtype(qkv.dtype)
        convolution, dt_bias, a_log = (
            functions.weight_of(self, name) for name in ("convolution", "dt_bias", "a_log")
        )
        convolved = causal_convolution(qkv.to(dtype), convolution.to(dtype))[len(qkv) - len(beta) :]
        mixed = self.activation.value(convolved)
        q, k, v = mixed.to(qkv.dtype).split(self.widths, dim=-1)
        q, k = (_unit_heads(x.unflatten(-1, (-1, sizes.key_head_dim)), dtype) for x in (q, k))
        shares = sizes.num_value_heads // sizes.num_key_heads
        q, k = (_repeat_heads(x, shares) for x in (q * sizes.key_head_dim**-0.5, k))
        g = -a_log.to(dtype).exp() * F.softplus(alpha.to(dtype) + dt_bias.to(dtype))
        v = v.unflatten(-1, (-1, sizes.value_head_dim))
        return DeltaArguments(q, k, v, g, beta.to(dtype).sigmoid())


def _unit_heads(x: Tensor, dtype: torch.dtype) -> Tensor:
    """Divide each head [..., d] by its length."""
    x = x.to(dtype)
    return x * torch.rsqrt(x.square().sum(-1, keepdim=True) + _MIN_SQUARE)


def _repeat_heads(x: Tensor, times: int) -> Tensor:
    """Repeat each head: [s, b, n, d] -> [s, b, n * times, d]."""
    return x.unsqueeze(3).expand(-1, -1, -1, times, -1).flatten(2, 3)
