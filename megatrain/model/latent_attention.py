"""Multi-latent attention (MLA): queries, keys and values are projected from latents of low rank.

hidden ── + ── norm ── down ─┬─ latent of queries ── norm, up ───────────────── RoPE ──┐
                             ├─ latent of keys and values ── norm, up ─┬─ keys ────────┼─ core attention ─ projection ─ output
                             │                                         └─ values ──────┤
                             └─ rotary channels of keys, one head ───────────── RoPE ──┘

    over tp    every rank computes the latents of its rows, and expands them to its heads; all heads share the rotary channels
               of keys, so that their gradient is summed over the ranks

Without a latent of queries, they are projected from the norm of the hidden states. Context ranks exchange expanded keys and
values, or gather the latents of whole samples (`--cp-comm-type all_gather`).

Source: DeepSeek-V2, arXiv:2405.04434, section 2.1; tensors and the order of their rows are those of Megatron-LM.
"""

from __future__ import annotations

from dataclasses import replace
from typing import NamedTuple

from torch import Tensor, nn

from megatrain.config.model_spec.attention import AttentionSpec
from megatrain.config.model_spec.norm import NormSpec
from megatrain.model import latent_functions
from megatrain.model.attention_parts import core_attention
from megatrain.model.implementations.module_protocols import (
    AttentionToSamples,
    ColumnLinear,
)
from megatrain.model.layer import RotaryEmbedding, branch_output
from megatrain.model.layer_context import LayerContext
from megatrain.model.layouts import (
    LinearLayout,
    columns_layout,
    norm_weights,
)
from megatrain.model.recompute import RecomputedModule, discarded
from megatrain.parallel.batch import PassInfo
from megatrain.parallel.context.latent_context import gather_latents, gather_samples
from megatrain.parallel.layout import Init
from megatrain.parallel.tensor_parallel import enter_tp_region


class Latents(NamedTuple):
    """Inputs of the up-projections for a rank's rows, [s/tp, b, channels]."""

    queries: Tensor
    """Latent of queries, or the norm of the hidden states."""
    keys_values: Tensor
    """Latent of keys and values."""
    rotary_keys: Tensor
    """Rotary channels of keys, which all heads share."""


class Heads(NamedTuple):
    """Queries and keys [s, b, n/tp, d], and values [s, b, n/tp, value channels]."""

    q: Tensor
    k: Tensor
    v: Tensor


class LatentAttention(nn.Module):
    """Multi-latent attention over this rank's heads, from the norm to the output of the branch."""

    def __init__(self, spec: AttentionSpec, context: LayerContext) -> None:
        super().__init__()
        assert spec.latent is not None
        has_latent_queries = spec.latent.query_rank is not None
        down = DownProjection if has_latent_queries else DownProjectionOfKeys
        self.down = down(spec, context)
        self.attention = _attention(spec, context)
        self.proj = context.row_linear(context.linears(spec)["proj"], has_bias=spec.has_bias)
        self.output = branch_output(spec, context)

    def forward(self, residual: Tensor, delta: Tensor | None, info: PassInfo) -> tuple[Tensor, Tensor | None]:
        residual, latents = self.down(residual, delta, info)
        return self.output.add_to(residual, self.proj(self.attention(*latents, info), info), info)


class DownProjection(nn.Module):
    """Norm of the branch, and one product for all latents."""

    def __init__(self, spec: AttentionSpec, context: LayerContext) -> None:
        super().__init__()
        down = context.linears(spec)["q_down"]
        assert spec.latent is not None
        self.sizes = [down.pieces[0].size, spec.latent.kv_rank, spec.latent.qk_rope_head_dim]
        self.linear = context.replicated_linear(down, context.branch_norm(spec))

    def forward(self, residual: Tensor, delta: Tensor | None, info: PassInfo) -> tuple[Tensor, Latents]:
        residual, latents = self.linear(residual, delta, info)
        return residual, Latents(*latents.split(self.sizes, dim=-1))


class DownProjectionOfKeys(nn.Module):
    """Norm of the branch, from which queries are projected, and a product for the latent of keys and values."""

    def __init__(self, spec: AttentionSpec, context: LayerContext) -> None:
        super().__init__()
        assert spec.latent is not None
        self.sizes = [spec.latent.kv_rank, spec.latent.qk_rope_head_dim]
        self.norm = context.builder.residual_norm(context.branch_norm(spec))  # two GEMMs keep its output
        self.linear = context.replicated_linear(context.linears(spec)["kv_down"], None)

    def forward(self, residual: Tensor, delta: Tensor | None, info: PassInfo) -> tuple[Tensor, Latents]:
        residual, x = self.norm.add_and_norm(residual, delta)
        return residual, Latents(x, *self.linear(x, None, info)[1].split(self.sizes, dim=-1))


def latent_norm(spec: AttentionSpec, context: LayerContext) -> NormSpec:
    """Return the norm of latents."""
    assert spec.latent is not None
    epsilon = spec.latent.norm_epsilon
    return context.model.norm if epsilon is None else replace(context.model.norm, epsilon=epsilon)


class UpProjection(nn.Module):
    """Norms of the latents, their products with the weights of this rank's heads, and RoPE.

    Args:
        is_gathered: latents of keys and values have the rows of whole samples on every rank.
        has_query_norm: normalizes the latent of queries, if the model does.
    """

    def __init__(
        self, spec: AttentionSpec, context: LayerContext, *, is_gathered: bool, has_query_norm: bool = True
    ) -> None:
        super().__init__()
        tp, rope, recompute, prefix = context.tp, context.rope_of(spec), context.recompute, context.name(spec)
        assert spec.latent is not None
        assert isinstance(rope, RotaryEmbedding), "the rotary channels have RoPE"
        self.tp, self.rope, self.local_heads = tp, rope, spec.num_heads // tp.size
        self.sizes = sizes = spec.latent
        recompute_norm = recompute.has_part("layernorm") or recompute.has_part("mla_up_proj")
        linears = context.linears(spec)

        def linear(name: str, rank: int | None, *, is_gathered: bool = False) -> ColumnLinear:
            norm, one, builder = None, linears[name], context.builder.with_norms(latent_norm(spec, context))
            if rank is not None and spec.qk_norm == "latent" and (has_query_norm or name == "kv_up"):
                rows_tp = replace(tp, sequence_parallel=False) if is_gathered else tp
                norm = norm_weights(
                    f"{prefix}.{name.removesuffix('_up')}_norm", rank, context.model.norm, rows_tp
                )
            build = builder.whole_rows_linear if is_gathered else builder.column_linear
            columns, init = context.columns(one, "weight"), Init(std=context.model.init_std)
            layout = columns_layout(columns, one.inputs, init, tp)
            return build(norm, LinearLayout(layout), recompute_norm=recompute_norm and norm is not None)

        self.queries = linear("q" if sizes.query_rank is None else "q_up", sizes.query_rank)
        self.keys_values = linear("kv_up", sizes.kv_rank, is_gathered=is_gathered)

    def forward(self, queries: Tensor, keys_values: Tensor, rotary_keys: Tensor, info: PassInfo) -> Heads:
        """Map `Latents` to the heads of a rank's rows."""
        k, v = self.expand(keys_values, self.rotate(rotary_keys, info), info)
        return Heads(self.project_queries(queries, info), k, v)

    def project_queries(self, queries: Tensor, info: PassInfo) -> Tensor:
        """Return queries with RoPE, [s, b, n/tp, d]."""
        q = self.queries(queries, None, info)[1].unflatten(-1, (self.local_heads, -1))
        cos, sin = self.rope.rows(q.shape[0])
        return latent_functions.rotate_queries(
            q, self.sizes.qk_rope_head_dim, cos, sin, is_interleaved=self.rope.is_interleaved
        )

    def rotate(self, rotary_keys: Tensor, info: PassInfo) -> Tensor:
        """Return the rotary channels of keys with RoPE, [s, b, 1, r]; their gradient is summed over the heads of all ranks."""
        rotated: Tensor = self.rope(enter_tp_region(rotary_keys, self.tp).unsqueeze(2), info)
        return rotated

    def expand(self, keys_values: Tensor, rotated: Tensor, info: PassInfo) -> tuple[Tensor, Tensor]:
        """Return keys [s, b, n/tp, d] and values [s, b, n/tp, value channels]."""
        kv = self.keys_values(keys_values, None, info)[1].unflatten(-1, (self.local_heads, -1))
        return latent_functions.expand_keys(kv, rotated, self.sizes.qk_nope_head_dim)


class ExpandedAttention(nn.Module):
    """Up-projection and core attention: `Latents` -> [s, b, n/tp * value channels]."""

    def __init__(self, up: UpProjection, core: nn.Module) -> None:
        super().__init__()
        self.up, self.core = up, core

    def forward(self, queries: Tensor, keys_values: Tensor, rotary_keys: Tensor, info: PassInfo) -> Tensor:
        out: Tensor = self.core(*self.up(queries, keys_values, rotary_keys, info), info)
        return out


class RecomputedExpansion(ExpandedAttention):
    """The same; core attention keeps no heads, and its backward pass expands the latents again."""

    def forward(self, queries: Tensor, keys_values: Tensor, rotary_keys: Tensor, info: PassInfo) -> Tensor:
        heads = self.up(queries, keys_values, rotary_keys, info)
        latents = [x.detach() for x in (queries, keys_values, rotary_keys)]
        with discarded(heads, lambda: self.up(*latents, info)):
            out: Tensor = self.core(*heads, info)
        return out


class GatheredAttention(nn.Module):
    """Up-projection of latents gathered over context ranks, and core attention of this rank's rows to whole samples.

    Keys and values of whole samples are not kept: the backward pass of core attention gathers and expands again.
    """

    def __init__(self, up: UpProjection, core: AttentionToSamples) -> None:
        super().__init__()
        self.up, self.core = up, core

    def forward(self, queries: Tensor, keys_values: Tensor, rotary_keys: Tensor, info: PassInfo) -> Tensor:
        q, rotated = self.up.project_queries(queries, info), self.up.rotate(rotary_keys, info)
        latents = keys_values.detach(), rotated.detach()
        heads = self._expand(keys_values, rotated, info)
        with discarded(heads, lambda: self._expand(*latents, info)):
            return self.core(q, *heads, info)

    def _expand(self, keys_values: Tensor, rotated: Tensor, info: PassInfo) -> tuple[Tensor, Tensor]:
        """Return keys and padded values of whole samples."""
        ring = self.core.context.ring
        latents = gather_latents(keys_values, self.up.tp, ring)
        k, v = self.up.expand(latents, gather_samples(rotated, ring), info)
        return k, self.core.padded(v)


def _attention(spec: AttentionSpec, context: LayerContext) -> nn.Module:
    recomputes_core = context.recompute.has_part("core_attn")
    to_samples = context.builder.attention_to_samples(spec, context.name(spec))
    up = UpProjection(spec, context, is_gathered=to_samples is not None)
    if to_samples is not None:
        gathered = GatheredAttention(up, to_samples)
        return RecomputedModule(gathered) if recomputes_core else gathered
    core = core_attention(spec, context)
    if not context.recompute.has_part("mla_up_proj"):
        return ExpandedAttention(up, RecomputedModule(core) if recomputes_core else core)
    return RecomputedModule(ExpandedAttention(up, core)) if recomputes_core else RecomputedExpansion(up, core)
