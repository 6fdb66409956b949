"""The `transformer_engine` implementation: modules of NVIDIA's library, at work on weights that lie in our buffers.

    LaidOutModule   holds a weight: its layout, canonical name and initial values, its place in the flat buffers
        │ lends it to
    Foreign         a module of Transformer Engine's, built without memory, that never holds a weight of its own

    gradient of a matrix             its product adds it to `main_grad`, which is the view of our gradient buffer
    gradients of norms and biases    autograd leaves them at the parameter; a hook adds them to the buffer

From the library come norms, linear layers, activations and core attention, with what travels over tensor ranks between
them. Ours under every implementation are the residual stream, dropout, rotary embedding, the embedding and the head.
Its user buffers are not used. Written against the signatures of Transformer Engine 2.20.2.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from megatrain.config.errors import ConfigError
from megatrain.kernels.normal import stream_key
from megatrain.model.implementations.leaves import CoreAttention, GroupedMlp, Pointwise, ResidualNorm
from megatrain.model.implementations.local import LocalDropout
from megatrain.model.layouts import Weights
from megatrain.model.specs import AttentionSpec, MlpSpec, NormSpec
from megatrain.parallel.batch import PassInfo
from megatrain.parallel.context import ContextParallel
from megatrain.parallel.context_attention import ContextAttention
from megatrain.parallel.layout import LaidOutModule, ParamLayout
from megatrain.parallel.tensor import TensorParallel


@dataclass(frozen=True)
class TransformerEngineLeaves:
    """Builds the leaves for one rank. What the library cannot do, a rule of the configuration refuses."""

    tp: TensorParallel
    cp: ContextParallel
    dtype: torch.dtype
    norms: NormSpec
    seed: int
    """Of dropout."""
    over: ContextAttention
    """How attention reaches across the ranks of `cp`."""

    def norm(self, weights: Weights, spec: NormSpec) -> TeNorm:
        return TeNorm(weights, spec, self.dtype)

    def split_norm(self, weights: Weights, spec: NormSpec) -> Pointwise:  # noqa: ARG002
        raise _refused("a norm over heads of several ranks")

    def column_linear(
        self, norm: Weights | None, linear: Weights, *, forms_norm_again: bool = False
    ) -> TeColumnLinear:
        if forms_norm_again and norm is not None:
            raise _refused("a norm that is formed again in the backward pass")
        return TeColumnLinear(self, norm, linear)

    def row_linear(self, linear: Weights) -> TeRowLinear:
        return TeRowLinear(self, linear)

    def activation_row_linear(self, spec: MlpSpec, linear: Weights) -> TeRowLinear:
        if (
            spec.curve is not None
            or spec.clamp is not None
            or spec.offset
            or spec.activation not in _ACTIVATIONS
        ):
            raise _refused(f"the activation of {spec}")
        return TeRowLinear(self, linear, _ACTIVATIONS[spec.activation])

    def residual_norm(self, norm: Weights | None) -> ResidualNorm:  # noqa: ARG002
        raise _refused("layers of experts")

    def grouped_mlp(self, spec: MlpSpec, fc1: ParamLayout, fc2: ParamLayout, num_own: int) -> GroupedMlp:  # noqa: ARG002
        raise _refused("layers of experts")

    def core_attention(self, spec: AttentionSpec, sink: ParamLayout | None, name: str) -> CoreAttention:  # noqa: ARG002
        if spec.softcap is not None or spec.sink != "none" or spec.dropout:
            raise _refused(f"the attention of {spec}")
        return TeCoreAttention(spec, self.tp, _over_context_ranks(self.cp, self.over))

    def dropout(self, p: float, name: str) -> Pointwise:
        return LocalDropout(p, stream_key(self.seed, f"{name}.dropout"), self.tp, self.cp)


_ACTIVATIONS = {
    "swiglu": "SwiGLU",
    "geglu_tanh": "GEGLU",
    "quick_geglu": "QGEGLU",
    "gelu_tanh": "GELU",
    "squared_relu": "SReLU",
}
"""What each is called in `transformer_engine.pytorch.ops`, where the first half of a gated input is the gate."""


def library() -> Any:
    """`transformer_engine.pytorch`, which takes seconds to import: plans do without it.

    Raises:
        ConfigError: it does not load.
    """
    try:
        import transformer_engine.pytorch as te  # noqa: PLC0415 (optional)
    except (ImportError, OSError, RuntimeError, AssertionError) as error:
        raise ConfigError(
            f"--transformer-impl transformer_engine: the library does not load: {error}",
            fix="install a build of it for this torch and CUDA, or use --transformer-impl local",
        ) from error
    return te


def _refused(what: str) -> ConfigError:
    """For layers that no flag describes; flags are held to rules."""
    return ConfigError(
        f"--transformer-impl transformer_engine does not have {what}", fix="use --transformer-impl local"
    )


class Foreign:
    """A module of Transformer Engine's that works with weights of ours.

    It is no submodule: its parameters are its holders', and its `_extra_state`, a pickle, is never asked for.

    Args:
        module: built without memory.
        weights: holder and attribute of each of its parameters.
        run: calls it, where that is not the module itself.
    """

    def __init__(
        self,
        module: Any,
        weights: Mapping[str, tuple[LaidOutModule, str]],
        run: Callable[..., Tensor] | None = None,
    ) -> None:
        self.module = module
        self.weights = weights
        self.run = module if run is None else run
        self.own_store = getattr(module, "wgrad_store", None)

    def __call__(self, *inputs: Tensor, **how: Any) -> Tensor:
        """What the module makes of its inputs, with the weights that are in the buffers now."""
        for name, (holder, attribute) in self.weights.items():
            weight = getattr(holder, attribute)
            if getattr(self.module, name) is not weight:
                self.module.register_parameter(name, weight)
                _send_gradient(weight, self.gradient_of(name))
        return self.run(*inputs, **how)

    def linear(self, x: Tensor, info: PassInfo) -> Tensor:
        """The same of a linear layer, whose weight gradient may wait for the schedule."""
        self.module.wgrad_store = _Deferred(info, self) if info.splits_backward else self.own_store
        return self(x)

    def gradient_of(self, name: str) -> Tensor | None:
        """Where the gradient of one of its parameters goes; None where there is none."""
        if name not in self.weights:
            return None
        holder, attribute = self.weights[name]
        return holder.weight_grads.get(attribute)


def _send_gradient(weight: nn.Parameter, grad: Tensor | None) -> None:
    """Have the gradient of a weight added to `grad`."""
    if grad is None:
        return
    if weight.dim() > 1:
        setattr(weight, "main_grad", grad)  # noqa: B010 (an attribute that the library has added)
    else:
        weight.register_post_accumulate_grad_hook(functools.partial(_move_gradient, grad))


def _move_gradient(grad: Tensor, weight: Tensor) -> None:
    if weight.grad is not None:  # autograd has none of a bias whose gradient was deferred
        grad.add_(weight.grad)
        weight.grad = None


@dataclass(frozen=True)
class _Deferred:
    """Takes the place of the library's `WeightGradStore`: the pass knows when weight gradients are formed."""

    info: PassInfo
    foreign: Foreign

    def delay_wgrad_compute(self) -> bool:
        """Whether weight gradients come here at all."""
        return True

    def put(self, tensors: Sequence[Tensor], form: Callable[..., tuple[Any, Tensor | None]]) -> None:
        """Keep `form(*tensors)`, which adds to `main_grad` and returns the gradient of a bias beside it."""
        self.info.form_weight_gradient(lambda: self._add_bias(form(*tensors)[1]))

    def _add_bias(self, grad: Tensor | None) -> None:
        place = self.foreign.gradient_of("bias")
        if place is not None and grad is not None and grad.numel():
            place.add_(grad)


class _Holder(LaidOutModule):
    """Weights that one of the library's modules works with."""

    def __init__(self, weights: Weights, dtype: torch.dtype) -> None:
        super().__init__()
        self.add_weight("weight", weights.weight, dtype)
        if weights.bias is not None:
            self.add_weight("bias", weights.bias, dtype)

    def lent(self, prefix: str = "") -> dict[str, tuple[LaidOutModule, str]]:
        """Its weights, by the names that the module has for them."""
        return {f"{prefix}{name}": (self, name) for name in self.layouts}


class TeNorm(_Holder):
    """Norm over the last dimension: LayerNorm with a bias, RMSNorm without."""

    def __init__(self, weights: Weights, spec: NormSpec, dtype: torch.dtype) -> None:
        super().__init__(weights, dtype)
        te = library()
        module = (te.RMSNorm if weights.bias is None else te.LayerNorm)(
            weights.weight.shape,
            eps=spec.epsilon,
            zero_centered_gamma=spec.is_stored_minus_one,
            dtype=dtype,
            device="meta",
        )
        # In a sequence, what runs is put together once, and not in every call.
        self.foreign = Foreign(module, self.lent(), run=te.ops.Sequential(module))

    def forward(self, x: Tensor, info: PassInfo) -> Tensor:  # noqa: ARG002 (a leaf gets it)
        return self.foreign(x)


class TeColumnLinear(_Holder):
    """Residual addition, then one module: norm or none, and a column-parallel linear layer."""

    def __init__(self, leaves: TransformerEngineLeaves, norm: Weights | None, linear: Weights) -> None:
        super().__init__(linear, leaves.dtype)
        rows, inputs = linear.weight.shape
        how = _linear(leaves, "column", linear) | {
            "in_features": inputs,
            "out_features": rows * leaves.tp.size,
        }
        if norm is None:
            self.foreign = Foreign(library().Linear(**how), self.lent())
            return
        self.norm = _Holder(norm, leaves.dtype)
        module = library().LayerNormLinear(
            normalization=leaves.norms.kind,
            eps=leaves.norms.epsilon,
            zero_centered_gamma=leaves.norms.is_stored_minus_one,
            **how,
        )
        self.foreign = Foreign(module, self.lent() | self.norm.lent("layer_norm_"))

    def forward(self, hidden: Tensor, delta: Tensor | None, info: PassInfo) -> tuple[Tensor, Tensor]:
        total = hidden if delta is None else hidden + delta
        return total, self.foreign.linear(total, info)


class TeRowLinear(_Holder):
    """Row-parallel linear layer, behind an activation or not: [s, b, i/tp], gated [s, b, 2 i/tp] -> [s/tp, b, h]."""

    def __init__(
        self, leaves: TransformerEngineLeaves, linear: Weights, activation: str | None = None
    ) -> None:
        super().__init__(linear, leaves.dtype)
        te = library()
        outputs, columns = linear.weight.shape
        how = _linear(leaves, "row", linear) | {
            "in_features": columns * leaves.tp.size,
            "out_features": outputs,
        }
        self.foreign = Foreign(te.Linear(**how), self.lent())
        self.activation = (
            None if activation is None else Foreign(te.ops.Sequential(getattr(te.ops, activation)()), {})
        )

    def forward(self, x: Tensor, info: PassInfo) -> Tensor:
        return self.foreign.linear(x if self.activation is None else self.activation(x), info)


def _linear(leaves: TransformerEngineLeaves, mode: str, linear: Weights) -> dict[str, Any]:
    """How a linear layer is made, but for its sizes, which are those of all ranks together."""
    tp = leaves.tp
    return {
        "bias": linear.bias is not None,
        "params_dtype": leaves.dtype,
        "device": "meta",
        "fuse_wgrad_accumulation": True,
        "parallel_mode": mode if tp.size > 1 else None,  # alone, a row's bias is added in the product
        "sequence_parallel": tp.sequence_parallel,
        "tp_group": tp.group.handle,
        "tp_size": tp.size,
    }


def _over_context_ranks(cp: ContextParallel, over: ContextAttention) -> dict[str, Any]:
    """How attention is made that reaches across the ranks of `cp`."""
    if cp.size == 1:
        return {}
    heads, ring = over.heads, over.ring.group
    group: Any = cp.group.handle
    if ring.size == 1:
        way = "a2a"
    elif heads.size == 1:
        way = "all_gather" if over.gathers else "p2p"
    else:
        way, group = "a2a+p2p", [heads.handle, ring.handle]
    return {
        "cp_group": group,
        "cp_global_ranks": list(cp.group.ranks),
        "cp_stream": _second_stream(),
        "cp_comm_type": way,
    }


@functools.cache
def _second_stream() -> torch.cuda.Stream | None:
    """On which each other step around a ring is computed; one for all layers."""
    return torch.cuda.Stream() if torch.cuda.is_available() else None


_BOUNDS = 512
"""Tokens; the longest document is rounded up to a multiple."""


class TeCoreAttention(nn.Module):
    """Causal attention of this rank's heads. The library chooses the kernel, and divides samples over context ranks as we do."""

    def __init__(self, spec: AttentionSpec, tp: TensorParallel, over_context_ranks: dict[str, Any]) -> None:
        super().__init__()
        module = library().DotProductAttention(
            num_attention_heads=spec.num_heads // tp.size,
            kv_channels=spec.head_channels,
            num_gqa_groups=max(1, spec.num_query_groups // tp.size),
            attention_dropout=0.0,
            qkv_format="sbhd",
            attn_mask_type="causal",
            window_size=None if spec.window is None else (spec.window, 0),
            softmax_scale=spec.scale,
            **over_context_ranks,
        )
        self.foreign = Foreign(module, {})

    def forward(self, q: Tensor, k: Tensor, v: Tensor, info: PassInfo) -> Tensor:
        documents = info.documents
        if documents is None:
            return self.foreign(q, k, v)
        s, b = q.shape[:2]
        borders = documents.cu_seqlens
        # Kernels are chosen and built anew for another bound: few bounds, none far above the longest document.
        longest = min(s, -(-documents.max_seqlen // _BOUNDS) * _BOUNDS)
        out = self.foreign(
            *(x.transpose(0, 1).flatten(0, 1) for x in (q, k, v)),  # [b * s, n/tp, d]
            qkv_format="thd",
            attn_mask_type="padding_causal",
            cu_seqlens_q=borders,
            cu_seqlens_kv=borders,
            max_seqlen_q=longest,
            max_seqlen_kv=longest,
        )
        return out.view(b, s, -1).transpose(0, 1)
