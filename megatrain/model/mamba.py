"""The mixer of Mamba-2, in place of attention.

hidden ─ + ─ norm + projection ─┬─ x, B, C ─ convolution ─ SiLU ─┬─ scan ─ * ─ norm of groups ─ projection ─ output
                                ├─ dt ─ softplus ────────────────┘      SiLU
                                └─ z ───────────────────────────────────┘

    x, z            [s, b, n p]; n heads of p channels
    B, C            [s, b, g m]; n / g consecutive heads read one group
    dt              [s, b, n]; A = -exp(a_log), D per head
    over tp         heads are split, with their groups

Source: Dao and Gu, arXiv:2405.21060; the norm of groups and the initial values are Megatron-LM's.
"""

from __future__ import annotations

from torch import Tensor, nn
from torch.nn import functional as F

from megatrain.config.model_spec.mamba import MambaSpec
from megatrain.kernels.dtypes import accumulation_dtype
from megatrain.kernels.gated_delta import causal_convolution
from megatrain.kernels.mamba2 import document_ids, gated_norm, mamba2_scan
from megatrain.model.functions import weight_of
from megatrain.model.layer import branch_output
from megatrain.model.layer_context import LayerContext
from megatrain.model.layouts import STEP_SIZES, Columns, columns_bias_layout, convolution_layout
from megatrain.model.recompute import RecomputedModule
from megatrain.parallel.batch import PassInfo
from megatrain.parallel.layout import Init, ShardedModule

_EPSILON = 1e-5
"""Of the norm of groups, whatever that of other norms is, as in Megatron-LM."""


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

    def forward(self, residual: Tensor, delta: Tensor | None, info: PassInfo) -> tuple[Tensor, Tensor]:
        residual, projected = self.projections(residual, delta, info)
        z, mixed, dt = projected.split(self.sizes, dim=-1)
        y = self.core(z, mixed, dt, info)
        return residual, self.output(self.proj(y, info), info)


class MambaScan(ShardedModule):
    """Convolution, scan and gated norm: z [s, b, n p], (x, B, C) [s, b, n p + 2 g m], dt [s, b, n] -> [s, b, n p]."""

    def __init__(self, spec: MambaSpec, context: LayerContext) -> None:
        super().__init__()
        self.spec, tp = spec, context.tp
        self.widths = [size // tp.size for size in (spec.inner_dim, spec.group_dim, spec.group_dim)]
        self.num_groups = spec.num_groups // tp.size
        name, dtype, linear = context.name(spec), context.ranks.dtype, context.linears(spec)["z"]
        bound = spec.kernel_size**-0.5
        convolved = context.columns(linear, "convolution")[1:4]  # x, B, C
        self.add_weight("convolution", convolution_layout(convolved, spec.kernel_size, tp), dtype)
        biases = context.columns(linear, "convolution_bias")[1:4]
        self.add_weight(
            "convolution_bias", columns_bias_layout(biases, tp, Init(uniform=(-bound, bound))), dtype
        )
        for parameter, size, init in (
            ("dt_bias", spec.num_heads, Init(softplus_of=STEP_SIZES)),
            ("a_log", spec.num_heads, Init(log_of=(1.0, 16.0))),
            ("d", spec.num_heads, Init(mean=1.0)),
            ("gate_norm.weight", spec.inner_dim, Init(mean=1.0)),
        ):
            layout = columns_bias_layout([Columns(f"{name}.{parameter}", size)], tp, init)
            self.add_weight(parameter.partition(".")[0], layout, dtype)

    def forward(self, z: Tensor, mixed: Tensor, dt: Tensor, info: PassInfo) -> Tensor:
        cu_seqlens = None if info.documents is None else info.documents.cu_seqlens
        ids = None if cu_seqlens is None else document_ids(cu_seqlens, mixed.shape[1], mixed.shape[0])
        y, _ = self.scan(self.convolved(mixed, ids), dt, cu_seqlens=cu_seqlens)
        return self.normed(y, z)

    def normed(self, y: Tensor, z: Tensor) -> Tensor:
        """Return the gated norm of the groups."""
        return gated_norm(y, z, weight_of(self, "gate_norm"), self.num_groups, _EPSILON)

    def convolved(self, mixed: Tensor, ids: Tensor | None = None) -> Tensor:
        """Return the convolved and activated x, B and C; `ids`: the document of each token, [s, b]."""
        dtype = accumulation_dtype(mixed.dtype)
        weight, bias = (weight_of(self, name).to(dtype) for name in ("convolution", "convolution_bias"))
        return F.silu(causal_convolution(mixed.to(dtype), weight, ids) + bias).to(mixed.dtype)

    def scan(
        self, convolved: Tensor, dt: Tensor, *, cu_seqlens: Tensor | None = None, state: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        """Scan the heads: returns y [s, b, n p], and the state after the last token, [b, n, p, m]."""
        spec, dtype = self.spec, accumulation_dtype(convolved.dtype)
        x, b, c = convolved.transpose(0, 1).split(self.widths, dim=-1)
        dt = F.softplus((dt.to(dtype) + weight_of(self, "dt_bias").to(dtype)).transpose(0, 1))
        y, state = mamba2_scan(
            x.unflatten(-1, (-1, spec.head_dim)),
            dt,
            -weight_of(self, "a_log").to(dtype).exp(),
            b.unflatten(-1, (-1, spec.state_dim)),
            c.unflatten(-1, (-1, spec.state_dim)),
            weight_of(self, "d").to(dtype),
            cu_seqlens=cu_seqlens,
            initial_state=state,
        )
        return y.transpose(0, 1).flatten(2), state
