"""Builder of the modules of the `local` implementation."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from megatrain.config.model_spec.activation import ActivationFunction
from megatrain.config.model_spec.attention import AttentionSpec
from megatrain.config.model_spec.mlp import MlpSpec
from megatrain.config.model_spec.norm import NormSpec
from megatrain.kernels import activations
from megatrain.kernels.activations import Activation
from megatrain.kernels.random import stream_key
from megatrain.model.implementations.attention import LocalAttention, LocalContextAttention
from megatrain.model.implementations.dropout import LocalDropout
from megatrain.model.implementations.grouped_mlp import LocalGroupedMlp
from megatrain.model.implementations.local import (
    CastToWeightDtype,
    LocalColumnLinear,
    LocalNorm,
    LocalRowLinear,
)
from megatrain.model.implementations.module_protocols import (
    AttentionToSamples,
    ColumnLinear,
    CoreAttention,
    Pointwise,
    RowLinear,
)
from megatrain.model.implementations.split_norm import LocalSplitRmsNorm
from megatrain.model.layouts import LinearLayout
from megatrain.parallel.batch import PassInfo
from megatrain.parallel.context.context_attention import ContextAttention
from megatrain.parallel.context.latent_context import attend_to_samples
from megatrain.parallel.context_parallel import ContextParallel
from megatrain.parallel.expert_parallel import ExpertParallel
from megatrain.parallel.fp8.experts import Fp8GroupedGemms
from megatrain.parallel.fp8.scaling import Fp8Linear, Fp8Recipe
from megatrain.parallel.grid import RankGroup
from megatrain.parallel.layout import ParamLayout, ShardedModule
from megatrain.parallel.tensor_parallel import TensorParallel


@dataclass(frozen=True)
class LocalBuilder:
    """Builder of the modules of one rank, for other implementations to override."""

    tp: TensorParallel
    cp: ContextParallel
    dtype: torch.dtype
    norms: NormSpec
    seed: int
    """Seed of dropout."""
    attention: str = "sdpa"
    """Attention kernel, a value of `derived.attention_backend`."""
    context: ContextAttention | None = None
    """Attention over the ranks of `cp`; None: a ring of them."""
    fp8_recipe: Callable[[str], Fp8Recipe | None] | None = None
    """Returns the FP8 recipe of the linear layer whose weight has this canonical name; None: all are in `dtype`."""
    column: Callable[..., LocalColumnLinear] = LocalColumnLinear
    row: Callable[..., LocalRowLinear] = LocalRowLinear
    """Make the linear layers: others for --qat and --lora-rank."""

    def with_norms(self, spec: NormSpec) -> LocalBuilder:
        return dataclasses.replace(self, norms=spec)

    def norm(self, weights: LinearLayout, spec: NormSpec) -> Pointwise:
        """Build a norm over the last dimension, which is whole on this rank."""
        return LocalNorm(weights, spec, self.dtype)

    def split_norm(self, weights: LinearLayout, spec: NormSpec) -> Pointwise:
        """Build an RMSNorm over the last two dimensions of [s, b, n/tp, d]."""
        return LocalSplitRmsNorm(weights, spec, self.dtype, self.tp)

    def column_linear(
        self, norm: LinearLayout | None, linear: LinearLayout, *, recompute_norm: bool = False
    ) -> ColumnLinear:
        """Build it. `recompute_norm`: the output of the norm is not saved; the backward pass recomputes it."""
        fp8, norms = self.fp8_linear(linear), self.residual_norm(norm)
        layer = self.column(norms, linear, self.tp, self.dtype, recompute_norm=recompute_norm, fp8=fp8)
        _let_overwrite(layer, fp8)
        return layer

    def replicated_linear(
        self, norm: LinearLayout | None, linear: LinearLayout, *, recompute_norm: bool = False
    ) -> ColumnLinear:
        """Build a linear layer whose weight all tensor ranks hold whole; its rows stay local: -> [s/tp, b, o]."""
        builder = dataclasses.replace(self, tp=alone(self.tp))
        return builder.column_linear(norm, linear, recompute_norm=recompute_norm)

    def whole_rows_linear(
        self, norm: LinearLayout | None, linear: LinearLayout, *, recompute_norm: bool = False
    ) -> ColumnLinear:
        """Build a column-parallel linear layer whose input has all rows on every tensor rank: [s, b, h] -> [s, b, o/tp]."""
        builder = dataclasses.replace(
            self, tp=dataclasses.replace(self.tp, sequence_parallel=False, peers=None)
        )
        return builder.column_linear(norm, linear, recompute_norm=recompute_norm)

    def residual_norm(self, norm: LinearLayout | None) -> LocalNorm | CastToWeightDtype:
        return CastToWeightDtype(self.dtype) if norm is None else LocalNorm(norm, self.norms, self.dtype)

    def grouped_mlp(
        self, spec: MlpSpec, fc1: LinearLayout, fc2: LinearLayout, parallel: ExpertParallel
    ) -> LocalGroupedMlp:
        mlp = LocalGroupedMlp(activation_of(spec), fc1, fc2, parallel, self.dtype)
        recipe = self.recipe_of(fc2)
        if recipe is not None:
            mlp.products = Fp8GroupedGemms(parallel.etp, recipe.keeps_weights, recipe.casts_before_dispatch)
        return mlp

    def row_linear(self, linear: LinearLayout) -> RowLinear:
        return self._row_linear(linear)

    def _row_linear(self, linear: LinearLayout) -> LocalRowLinear:
        fp8 = self.fp8_linear(linear)
        layer = self.row(linear, self.tp, self.dtype, fp8)
        _let_overwrite(layer, fp8)
        return layer

    def activation_row_linear(
        self, spec: MlpSpec, linear: LinearLayout, *, recompute_activation: bool = False
    ) -> RowLinear:
        """Build it. `recompute_activation`: its result is not saved; the backward pass recomputes it."""
        layer = self._row_linear(linear)
        layer.activation = dataclasses.replace(activation_of(spec), is_recomputed=recompute_activation)
        return layer

    def fp8_linear(self, linear: LinearLayout) -> Fp8Linear | None:
        """Build the FP8 tensors of a linear layer, named after its first canonical tensor."""
        recipe = self.recipe_of(linear)
        return None if recipe is None else recipe.linear(linear.weight.pieces[0].name, linear.weight)

    def recipe_of(self, linear: LinearLayout) -> Fp8Recipe | None:
        """Return the FP8 recipe of a linear layer; None: it is in `dtype`."""
        return None if self.fp8_recipe is None else self.fp8_recipe(linear.weight.pieces[0].name)

    def core_attention(self, spec: AttentionSpec, sink: ParamLayout | None, name: str) -> CoreAttention:
        """Build it. `name`: name of the attention layer, the key of its dropout."""
        is_plain = spec.softcap is None and spec.sink == "none" and not spec.dropout
        if is_plain and self.attention not in ("triton", "math") and self.cp.size == 1:
            return LocalAttention(spec, self.attention)
        key = stream_key(self.seed, f"{name}.dropout")
        context = self.context or ContextAttention(RankGroup("heads", (0,), 0), self.cp)
        return LocalContextAttention(spec, sink, key, self.tp, context, self.attention, self.dtype)

    def attention_to_samples(self, spec: AttentionSpec, name: str) -> AttentionToSamples | None:
        """Build core attention to keys of whole samples; None: context ranks exchange keys and values, or there is one."""
        context = self.context
        if context is None or not context.gathers or spec.sink != "none":
            return None
        if context.ring.size == 1 or context.heads.size > 1:
            return None
        key = stream_key(self.seed, f"{name}.dropout")
        return LocalAttentionToSamples(spec, None, key, self.tp, context, self.attention, self.dtype)

    def dropout(self, p: float, name: str) -> Pointwise:
        return LocalDropout(p, stream_key(self.seed, f"{name}.dropout"), self.tp, self.cp)


ACTIVATION_FUNCTIONS: dict[str, ActivationFunction] = {
    "swiglu": activations.SILU,
    "geglu_tanh": activations.GELU_TANH,
    "quick_geglu": activations.QUICK_GELU,
    "quick_gelu": activations.QUICK_GELU,
    "gelu": activations.GELU,
    "gelu_tanh": activations.GELU_TANH,
    "squared_relu": activations.SQUARED_RELU,
}


def alone(tp: TensorParallel) -> TensorParallel:
    """Return this rank without the others, for layers that every rank computes whole."""
    group = RankGroup("alone", (tp.group.ranks[tp.rank],), 0)
    return TensorParallel(group, group, sequence_parallel=False)


def activation_of(spec: MlpSpec) -> Activation:
    """Return the activation of an MLP."""
    activation_fn = spec.activation_fn or ACTIVATION_FUNCTIONS[spec.activation]
    return Activation(fn=activation_fn, is_gated=spec.is_gated, clamp=spec.clamp, offset=spec.offset)


class LocalAttentionToSamples(LocalContextAttention):
    """Attention of this rank's rows and heads to keys and values of whole samples; values are `padded`."""

    def forward(self, q: Tensor, k: Tensor, v: Tensor, info: PassInfo) -> Tensor:
        out = attend_to_samples(q, k, v, self.kernel, self.masks(q, info), self.context.ring)
        return out[..., : self.v_head_dim].flatten(2)


def _let_overwrite(layer: ShardedModule, fp8: Fp8Linear | None) -> None:
    """Let the GEMM of a weight gradient in FP8 overwrite a gradient to which nothing was added."""
    if fp8 is not None and fp8.has_fp8_wgrad:
        layer.first_writes["weight"] = fp8.first_write
