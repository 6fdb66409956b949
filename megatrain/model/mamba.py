"""The mixer of Mamba-2, in place of attention.

hidden ─ + ─ norm + projection ─┬─ x, B, C ─ convolution ─ SiLU ─┬─ scan ─ * ─ norm of groups ─ projection ─ output
                                ├─ dt ─ softplus ────────────────┘      SiLU
                                └─ z ───────────────────────────────────┘

    x, z            [s, b, n p]; n heads of p channels
    B, C            [s, b, g m]; n / g consecutive heads read one group
    dt              [s, b, n]; A = -exp(a_log), D per head
    over tp         heads are split, with their groups
    over cp         heads are exchanged for whole samples (parallel/context/head_exchange.py)
    documents       the convolution and the state begin anew

Source: Dao and Gu, arXiv:2405.21060; the norm of groups and the initial values are Megatron-LM's.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from megatrain.config.model_spec.mamba import MambaSpec
from megatrain.kernels.activations import SILU
from megatrain.kernels.dtypes import accumulation_dtype
from megatrain.kernels.gated_delta import activated_convolution
from megatrain.kernels.mamba2 import gated_norm, mamba2_scan
from megatrain.kernels.qkv import Place, split_channels
from megatrain.model.attention_parts import gate_output
from megatrain.model.functions import weight_of
from megatrain.model.layer import branch_output
from megatrain.model.layer_context import LayerContext
from megatrain.model.layouts import STEP_SIZES, Columns, columns_bias_layout, convolution_layout
from megatrain.model.recompute import RecomputedModule
from megatrain.parallel.batch import PassInfo
from megatrain.parallel.context.head_exchange import HeadExchange, Heads
from megatrain.parallel.layout import Init, ShardedModule

_EPSILON = 1e-5
"""Epsilon of the norm of groups. That of other norms does not apply, as in Megatron-LM."""


class Mamba(nn.Module):
    """Mamba-2 over this rank's heads, from the norm to the output of the branch."""

    def __init__(self, spec: MambaSpec, context: LayerContext) -> None:
        super().__init__()
        tp, linears = context.tp.size, context.linears(spec)
        self.sizes = [spec.inner_dim // tp, (spec.inner_dim + 2 * spec.group_dim) // tp, spec.num_heads // tp]
        self.projections = context.column_linear(linears["z"], context.branch_norm(spec))
        core = MambaScan(spec, context)
        self.core = RecomputedModule(core) if context.recompute.has_part("core_attn") else core
        self.proj = context.row_linear(linears["proj"])
        self.output = branch_output(spec, context)

    def forward(self, residual: Tensor, delta: Tensor | None, info: PassInfo) -> tuple[Tensor, Tensor | None]:
        residual, projected = self.projections(residual, delta, info)
        (z, mixed, dt), places = split_channels(projected, self.sizes)
        y = self.core(z, mixed, dt, info, places)
        return self.output.add_to(residual, self.proj(y, info), info)


class MambaScan(ShardedModule):
    """Convolution, scan and gated norm: z [s, b, n p], (x, B, C) [s, b, n p + 2 g m], dt [s, b, n] -> [s, b, n p]."""

    def __init__(self, spec: MambaSpec, context: LayerContext) -> None:
        super().__init__()
        tp = context.tp
        self.num_groups = spec.num_groups // tp.size
        name, dtype, linear = context.name(spec), context.ranks.dtype, context.linears(spec)["z"]
        bound = spec.kernel_size**-0.5
        convolved = context.columns(linear, "convolution")[1:4]  # x, B, C
        self.add_weight("convolution", convolution_layout(convolved, spec.kernel_size, tp), dtype)
        biases = context.columns(linear, "convolution_bias")[1:4]
        self.add_weight(
            "convolution_bias", columns_bias_layout(biases, tp, Init(uniform=(-bound, bound))), dtype
        )
        self.has_norm = spec.has_norm
        for parameter, size, init in (
            ("dt_bias", spec.num_heads, Init(softplus_of=STEP_SIZES)),
            ("a_log", spec.num_heads, Init(log_of=(1.0, 16.0))),
            ("d", spec.num_heads, Init(mean=1.0)),
            *([("gate_norm.weight", spec.inner_dim, Init(mean=1.0))] if spec.has_norm else []),
        ):
            layout = columns_bias_layout([Columns(f"{name}.{parameter}", size)], tp, init)
            self.add_weight(parameter.partition(".")[0], layout, dtype)

        self.exchange = HeadExchange(context.ranks.split.cp)
        heads, groups = spec.num_heads // tp.size, Heads(spec.num_groups // tp.size, spec.state_dim)
        self.mixed, self.per_head = (Heads(heads, spec.head_dim), groups, groups), Heads(heads, 1)

    def forward(
        self, z: Tensor, mixed: Tensor, dt: Tensor, info: PassInfo, places: Sequence[Place]
    ) -> Tensor:
        """`places`: where kernels write the gradients of z and mixed."""
        exchange, documents, place = self.exchange, info.documents, places[1]
        if exchange.group.size > 1:
            whole = exchange.to_heads(torch.cat((mixed, dt), dim=-1), (*self.mixed, self.per_head))
            heads = exchange.local(self.per_head).num_heads
            (mixed, dt), (place, _) = split_channels(whole, [whole.shape[-1] - heads, heads])
        convolved = self.convolved(mixed, None if documents is None else documents.document_ids.t(), place)
        y, _ = self.scan(convolved, dt, cu_seqlens=None if documents is None else documents.cu_seqlens)
        return self.normed(exchange.to_rows(y), z, places[0])

    def convolved(
        self, mixed: Tensor, document_ids: Tensor | None = None, place: Place | None = None
    ) -> Tensor:
        """Return the convolved and activated x, B and C of whole samples; `document_ids`: [s, b]."""
        dtype, share = accumulation_dtype(mixed.dtype), self.exchange.share
        weight, bias = (weight_of(self, name).to(dtype) for name in ("convolution", "convolution_bias"))
        weight, bias = share(weight.t(), self.mixed).t(), share(bias, self.mixed)
        return activated_convolution(mixed, weight, bias, SILU, document_ids, place)

    def scan(
        self, convolved: Tensor, dt: Tensor, *, cu_seqlens: Tensor | None = None, state: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        """Scan the heads of whole samples: returns y [s, b, n, p], and the state after the last token, [b, n, p, m]."""
        dtype, parts = accumulation_dtype(convolved.dtype), [self.exchange.local(one) for one in self.mixed]
        dt_bias, a_log, d = (
            self.exchange.share(weight_of(self, name).to(dtype), [self.per_head])
            for name in ("dt_bias", "a_log", "d")
        )
        channels, places = split_channels(convolved, [part.num_heads * part.channels for part in parts])
        x, b, c = (
            values.transpose(0, 1).unflatten(-1, part) for values, part in zip(channels, parts, strict=True)
        )
        steps = F.softplus((dt.to(dtype) + dt_bias).transpose(0, 1))
        y, state = mamba2_scan(
            x, steps, -a_log.exp(), b, c, d, cu_seqlens=cu_seqlens, initial_state=state, places=places
        )
        return y.transpose(0, 1), state

    def normed(self, y: Tensor, z: Tensor, place: Place | None = None) -> Tensor:
        """Return the gated norm of the groups, or the gated values, y [s, b, n, p] -> [s, b, n p]."""
        if not self.has_norm:
            return gate_output(y.flatten(2), z, has_silu=True, place=place)
        weight = weight_of(self, "gate_norm")
        return gated_norm(y.flatten(2), z, weight, self.num_groups, _EPSILON, gate_place=place)
