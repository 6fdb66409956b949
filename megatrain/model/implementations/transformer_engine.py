"""The `transformer_engine` implementation: modules of NVIDIA's library that use weights in our flat buffers.

    ShardedModule     owns a weight: its layout, canonical name and initial values, its range of the flat buffers
        │ registers it in
    TEModuleAdapter   around a module of Transformer Engine, built on the meta device, which never owns a weight

    gradient of a matrix             the library's GEMM accumulates it in `main_grad`, our view of the gradient buffer
    gradients of norms and biases    autograd writes them to `.grad`; a hook adds them to the gradient buffer

The library supplies norms, linear layers, activations and core attention, with their communication over tensor ranks.
With FP8 recipes its linear layers run in FP8 (`transformer_engine_fp8.py`). The residual stream, dropout, RoPE, the embedding
and the head are ours under every implementation. The library's user buffers are not used: `local` overlaps communication. Written against the signatures of Transformer Engine 2.20.2.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from megatrain.config.errors import ConfigError
from megatrain.config.model_spec.attention import AttentionSpec
from megatrain.config.model_spec.mlp import MlpSpec
from megatrain.config.model_spec.norm import NormSpec
from megatrain.kernels.qkv import fused_view
from megatrain.model.implementations.fake_quantized import apply_activation
from megatrain.model.implementations.local_builder import LocalBuilder, activation_of
from megatrain.model.implementations.module_protocols import ColumnLinear, CoreAttention, Pointwise, RowLinear
from megatrain.model.implementations.transformer_engine_fp8 import TEFp8Linear
from megatrain.model.layouts import LinearLayout
from megatrain.parallel.batch import PassInfo
from megatrain.parallel.context.context_attention import ContextAttention
from megatrain.parallel.context_parallel import ContextParallel
from megatrain.parallel.layout import ParamLayout, ShardedModule
from megatrain.parallel.tensor_parallel import TensorParallel


@dataclass(frozen=True)
class TransformerEngineBuilder(LocalBuilder):
    """Builder of the modules of one rank. `local` supplies those that the library lacks (`config/subjects/transformer_engine.py`)."""

    is_residual_fp32: bool = False
    """The residual stream is in the accumulation dtype, which the library's norms do not read."""

    def norm(self, weights: LinearLayout, spec: NormSpec) -> Pointwise:
        if self.is_residual_fp32:
            return super().norm(weights, spec)
        return TENorm(weights, spec, self.dtype)

    def column_linear(
        self, norm: LinearLayout | None, linear: LinearLayout, *, recompute_norm: bool = False
    ) -> ColumnLinear:
        if self.is_residual_fp32 or (recompute_norm and norm is not None) or self._overlaps(linear):
            return super().column_linear(norm, linear, recompute_norm=recompute_norm)
        return TEColumnLinear(self, norm, linear)

    def row_linear(self, linear: LinearLayout) -> RowLinear:
        return super().row_linear(linear) if self._overlaps(linear) else TERowLinear(self, linear)

    def _overlaps(self, linear: LinearLayout) -> bool:
        """Return whether `local` overlaps the product of a layer with its communication."""
        return self.tp.peers is not None and self.recipe_of(linear) is None

    def activation_row_linear(
        self, spec: MlpSpec, linear: LinearLayout, *, recompute_activation: bool = False
    ) -> RowLinear:
        if self._overlaps(linear):
            return super().activation_row_linear(spec, linear, recompute_activation=recompute_activation)
        is_plain = spec.activation_fn is None and spec.clamp is None and not spec.offset
        if is_plain and spec.activation in _ACTIVATIONS:
            ops = library().ops
            activation = TEModuleAdapter(ops.Sequential(getattr(ops, _ACTIVATIONS[spec.activation])()), {})
            return TERowLinear(self, linear, activation)
        if self.recipe_of(linear) is not None:
            return TERowLinear(
                self, linear, functools.partial(apply_activation, activation=activation_of(spec))
            )
        return super().activation_row_linear(spec, linear, recompute_activation=recompute_activation)

    def core_attention(self, spec: AttentionSpec, sink: ParamLayout | None, name: str) -> CoreAttention:
        if self.attention != "transformer_engine":
            return super().core_attention(spec, sink, name)
        assert self.context is not None, "the builder of the model gives it"
        return TECoreAttention(spec, self.tp, _context_options(self.cp, self.context))


_ACTIVATIONS = {
    "swiglu": "SwiGLU",
    "geglu_tanh": "GEGLU",
    "quick_geglu": "QGEGLU",
    "gelu_tanh": "GELU",
    "squared_relu": "SReLU",
}
"""Class names in `transformer_engine.pytorch.ops`, where the first half of a gated input is the gate."""


def library() -> Any:
    """Import and return `transformer_engine.pytorch`. The import takes seconds, so plans avoid it.

    Raises:
        ConfigError: the import fails.
    """
    try:
        import transformer_engine.pytorch as te  # noqa: PLC0415 (optional)
    except (ImportError, OSError, RuntimeError, AssertionError) as error:
        raise ConfigError(
            f"--transformer-impl transformer_engine: the library cannot be imported: {error}",
            fix="install a build of it for this torch and CUDA, or use --transformer-impl local",
        ) from error
    return te


class TEModuleAdapter:
    """Adapter that runs a module of Transformer Engine with our weights.

    It is not an `nn.Module`: the parameters belong to their owners, and the module's `_extra_state`, a pickle, is never read.

    Args:
        module: module on the meta device.
        weights: owner and attribute of each parameter, by the module's parameter name.
        run: callable in place of the module itself.
        fp8: FP8 of a linear layer; None: it runs in the dtype of its weights.
    """

    def __init__(
        self,
        module: Any,
        weights: Mapping[str, tuple[ShardedModule, str]],
        run: Callable[..., Tensor] | None = None,
        fp8: TEFp8Linear | None = None,
    ) -> None:
        self.module = module
        self.weights = weights
        self.run = module if run is None else run
        self.fp8 = fp8
        self.default_store = getattr(module, "wgrad_store", None)

    def __call__(self, *inputs: Tensor, **options: Any) -> Tensor:
        """Run the module with the weights that are in the buffers now."""
        for name, (owner, attribute) in self.weights.items():
            weight = getattr(owner, attribute)
            if getattr(self.module, name) is not weight:
                self.module.register_parameter(name, weight)
                _set_gradient_target(weight, self.gradient_of(name))
        return self.run(*inputs, **options)

    def linear(self, x: Tensor, info: PassInfo) -> Tensor:
        """Run a linear layer, whose weight gradient may be deferred by the schedule."""
        self.module.wgrad_store = (
            _DeferredWeightGradients(info, self) if info.splits_backward else self.default_store
        )
        if self.fp8 is None:
            return self(x)
        with self.fp8.casting(info) as options:
            return self(x, **options)

    def gradient_of(self, name: str) -> Tensor | None:
        """Return the view of the gradient buffer for one parameter; None if there is no such parameter or gradient."""
        if name not in self.weights:
            return None
        owner, attribute = self.weights[name]
        return owner.weight_grads.get(attribute)


def _set_gradient_target(weight: nn.Parameter, grad: Tensor | None) -> None:
    """Make the library or autograd add the gradient of a weight to `grad`."""
    if grad is None:
        return
    if weight.dim() > 1:
        setattr(weight, "main_grad", grad)  # noqa: B010 (the library's attribute)
    else:
        weight.register_post_accumulate_grad_hook(functools.partial(_add_gradient, grad))


def _add_gradient(grad: Tensor, weight: Tensor) -> None:
    if weight.grad is not None:  # None for a bias whose gradient is deferred
        grad.add_(weight.grad)
        weight.grad = None


@dataclass(frozen=True)
class _DeferredWeightGradients:
    """Replacement of the library's `WeightGradStore`: our schedule runs the weight gradients."""

    info: PassInfo
    adapter: TEModuleAdapter

    def delay_wgrad_compute(self) -> bool:
        """Return whether weight gradients are deferred."""
        return True

    def put(self, tensors: Sequence[Tensor], gemm: Callable[..., tuple[Any, Tensor | None]]) -> None:
        """Defer `gemm(*tensors)`, which adds to `main_grad` and returns the gradient of the bias as second value."""
        self.info.compute_weight_gradient(lambda: self._add_bias(gemm(*tensors)[1]))

    def _add_bias(self, grad: Tensor | None) -> None:
        target = self.adapter.gradient_of("bias")
        if target is not None and grad is not None and grad.numel():
            target.add_(grad)


class _WeightOwner(ShardedModule):
    """Owner of the weight and bias that a module of the library uses."""

    def __init__(self, weights: LinearLayout, dtype: torch.dtype) -> None:
        super().__init__()
        self.add_weight("weight", weights.weight, dtype)
        if weights.bias is not None:
            self.add_weight("bias", weights.bias, dtype)

    def weights(self, prefix: str = "") -> dict[str, tuple[ShardedModule, str]]:
        """Return owner and attribute of each weight, by the module's parameter name."""
        return {f"{prefix}{name}": (self, name) for name in self.layouts}


class TENorm(_WeightOwner):
    """Norm over the last dimension: LayerNorm with a bias, RMSNorm without."""

    def __init__(self, weights: LinearLayout, spec: NormSpec, dtype: torch.dtype) -> None:
        super().__init__(weights, dtype)
        te = library()
        module = (te.RMSNorm if weights.bias is None else te.LayerNorm)(
            weights.weight.shape,
            eps=spec.epsilon,
            zero_centered_gamma=spec.is_stored_minus_one,
            dtype=dtype,
            device="meta",
        )
        # `Sequential` fuses its operations once; a bare operation is fused in every call.
        self.adapter = TEModuleAdapter(module, self.weights(), run=te.ops.Sequential(module))

    def forward(self, x: Tensor, info: PassInfo) -> Tensor:  # noqa: ARG002 (the signature of a leaf)
        return self.adapter(x)


class TEColumnLinear(_WeightOwner):
    """Residual addition, then one module: norm if there is one, and column-parallel linear layer."""

    def __init__(
        self, builder: TransformerEngineBuilder, norm: LinearLayout | None, linear: LinearLayout
    ) -> None:
        super().__init__(linear, builder.dtype)
        rows, inputs = linear.weight.shape
        options = _linear_options(builder, "column", linear) | {
            "in_features": inputs,
            "out_features": rows * builder.tp.size,
        }
        if norm is None:
            self.adapter = _linear_adapter(library().Linear(**options), self.weights(), builder, linear)
            return
        self.norm = _WeightOwner(norm, builder.dtype)
        module = library().LayerNormLinear(
            normalization=builder.norms.kind,
            eps=builder.norms.epsilon,
            zero_centered_gamma=builder.norms.is_stored_minus_one,
            **options,
        )
        weights = self.weights() | self.norm.weights("layer_norm_")
        self.adapter = _linear_adapter(module, weights, builder, linear)

    def forward(self, hidden: Tensor, delta: Tensor | None, info: PassInfo) -> tuple[Tensor, Tensor]:
        total = hidden if delta is None else hidden + delta
        return total, self.adapter.linear(total, info)


class TERowLinear(_WeightOwner):
    """Activation, if there is one, and row-parallel linear layer: [s, b, i/tp], or gated [s, b, 2 i/tp], -> [s/tp, b, h]."""

    def __init__(
        self,
        builder: TransformerEngineBuilder,
        linear: LinearLayout,
        activation: Callable[[Tensor], Tensor] | None = None,
    ) -> None:
        super().__init__(linear, builder.dtype)
        outputs, columns = linear.weight.shape
        options = _linear_options(builder, "row", linear) | {
            "in_features": columns * builder.tp.size,
            "out_features": outputs,
        }
        self.adapter = _linear_adapter(library().Linear(**options), self.weights(), builder, linear)
        self.activation = activation

    def forward(self, x: Tensor, info: PassInfo) -> Tensor:
        return self.adapter.linear(x if self.activation is None else self.activation(x), info)


def _linear_adapter(
    module: Any,
    weights: Mapping[str, tuple[ShardedModule, str]],
    builder: TransformerEngineBuilder,
    linear: LinearLayout,
) -> TEModuleAdapter:
    recipe, name = builder.recipe_of(linear), linear.weight.pieces[0].name
    fp8 = None if recipe is None else TEFp8Linear(module, library(), recipe, name)
    return TEModuleAdapter(module, weights, fp8=fp8)


def _linear_options(builder: TransformerEngineBuilder, mode: str, linear: LinearLayout) -> dict[str, Any]:
    """Return the arguments of a linear layer, except for its sizes, which are those of all ranks together."""
    tp = builder.tp
    return {
        "bias": linear.bias is not None,
        "params_dtype": builder.dtype,
        "device": "meta",
        "fuse_wgrad_accumulation": True,
        "parallel_mode": mode if tp.size > 1 else None,  # one rank adds the bias in the GEMM
        "sequence_parallel": tp.sequence_parallel,
        "tp_group": tp.group.handle,
        "tp_size": tp.size,
    }


def _context_options(cp: ContextParallel, context: ContextAttention) -> dict[str, Any]:
    """Return the arguments of attention over the ranks of `cp`."""
    if cp.size == 1:
        return {}
    heads, ring = context.heads, context.ring.group
    group: Any = cp.group.handle
    if ring.size == 1:
        comm_type = "a2a"
    elif heads.size == 1:
        comm_type = "all_gather" if context.gathers else "p2p"
    else:
        comm_type, group = "a2a+p2p", [heads.handle, ring.handle]
    return {
        "cp_group": group,
        "cp_global_ranks": list(cp.group.ranks),
        "cp_stream": _second_stream(),
        "cp_comm_type": comm_type,
    }


@functools.cache
def _second_stream() -> torch.cuda.Stream | None:
    """Return the stream of every second step of a ring, one for all layers."""
    return torch.cuda.Stream() if torch.cuda.is_available() else None


_MAX_SEQLEN_MULTIPLE = 512
"""Multiple, in tokens, to which the length of the longest document is rounded up."""


class TECoreAttention(nn.Module):
    """Causal attention of this rank's heads. The library chooses the kernel; it shards samples over context ranks as we do."""

    def __init__(self, spec: AttentionSpec, tp: TensorParallel, context_options: dict[str, Any]) -> None:
        super().__init__()
        self.has_latents = spec.latent is not None  # values are then views of a projection with keys
        module = library().DotProductAttention(
            num_attention_heads=spec.num_heads // tp.size,
            kv_channels=spec.head_dim if spec.latent is None else (spec.head_dim, spec.v_head_dim),
            num_gqa_groups=max(1, spec.num_query_groups // tp.size),
            attention_dropout=0.0,
            qkv_format="sbhd",
            attn_mask_type="causal",
            window_size=None if spec.window is None else (spec.window, 0),
            softmax_scale=spec.scale,
            **context_options,
        )
        self.adapter = TEModuleAdapter(module, {})

    def forward(self, q: Tensor, k: Tensor, v: Tensor, info: PassInfo) -> Tensor:
        documents = info.documents
        if q.shape == k.shape and fused_view((q, k, v)) is None:
            # The library takes parts at the addresses of a packed tensor for one and ignores their strides, as with gates after the values.
            q = q.contiguous()
        if documents is None:
            return self.adapter(q, k, v.contiguous() if self.has_latents else v)
        s, b = q.shape[:2]
        # The library chooses and builds kernels again for each new maximum: few maxima, none far above the longest document.
        longest = min(s, -(-documents.max_seqlen // _MAX_SEQLEN_MULTIPLE) * _MAX_SEQLEN_MULTIPLE)
        out = self.adapter(
            *(x.transpose(0, 1).flatten(0, 1) for x in (q, k, v)),  # [b * s, n/tp, d]
            qkv_format="thd",
            attn_mask_type="padding_causal",
            cu_seqlens_q=documents.cu_seqlens,
            cu_seqlens_kv=documents.cu_seqlens,
            max_seqlen_q=longest,
            max_seqlen_kv=longest,
        )
        return out.view(b, s, -1).transpose(0, 1)
