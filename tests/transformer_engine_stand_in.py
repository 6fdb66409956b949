"""A stand-in for `transformer_engine.pytorch` on a CPU: the same signatures, computed with plain torch in any dtype.

It copies facts of Transformer Engine 2.20.2: names of arguments and parameters, destinations of gradients, communication
between tensor ranks. `tests/gpu` compares the signatures with those of the library.
"""

import inspect
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from types import ModuleType
from unittest import mock

import torch
import torch.distributed as dist
import torch.distributed.tensor  # within `stand_in`, torch would import it a second time
from torch import Tensor, nn
from torch.autograd import Function
from torch.nn import functional as F
from transformer_engine_fp8_stand_in import (
    GRADIENT,
    INPUT,
    RECIPES,
    WEIGHT,
    Casts,
    autocast,
    new_meta,
    recipe_module,
)

_LINEAR = (
    "in_features out_features sequence_parallel fuse_wgrad_accumulation tp_group tp_size get_rng_state_tracker"
    " init_method bias return_bias params_dtype parallel_mode parameters_split device ub_overlap_ag ub_overlap_rs"
    " ub_overlap_rs_dgrad ub_bulk_dgrad ub_bulk_wgrad ub_name delay_wgrad_compute symmetric_ar_type name"
)
_NORM = "normalized_shape eps sequence_parallel params_dtype zero_centered_gamma hidden_size"
SIGNATURES = {
    "Linear": f"{_LINEAR} rng_tracker_name save_original_input",
    "LayerNormLinear": f"{_LINEAR} eps normalization return_layernorm_output return_layernorm_output_gathered"
    " zero_centered_gamma",
    "LayerNorm": f"{_NORM} device dtype",
    "RMSNorm": f"{_NORM} device dtype",
    "DotProductAttention": "num_attention_heads kv_channels num_gqa_groups attention_dropout qkv_format attn_mask_type"
    " window_size bottom_right_diagonal softcap sequence_parallel tp_size get_rng_state_tracker tp_group layer_number"
    " attention_type cp_group cp_global_ranks cp_stream cp_comm_type softmax_scale softmax_type return_max_logit name",
}
"""Names of the arguments of constructors."""
CALLS = {
    "DotProductAttention": "query_layer key_layer value_layer attention_mask qkv_format cu_seqlens_q cu_seqlens_kv"
    " cu_seqlens_q_padded cu_seqlens_kv_padded max_seqlen_q max_seqlen_kv attn_mask_type window_size"
    " bottom_right_diagonal softcap checkpoint_core_attention core_attention_bias_type core_attention_bias"
    " alibi_slopes fast_zero_fill inference_params pad_between_seqs fp8_output bf16_backward num_splits score_mod"
    " score_mod_bprop score_mod_tensors score_mod_bprop_tensors qkv_layer kv_layer qkv_interleave_dim"
    " thd_attention_policies thd_attention_policy_dispatch",
}
"""Names of the arguments of calls that pass more than an input."""
STORE = ("delay_wgrad_compute", "put")
"""Methods of a linear layer's `wgrad_store` that our code uses or repositions."""


def checked(names: dict[str, str], kind: str, given: dict) -> None:
    """Raise TypeError for unknown argument names, as Python does."""
    unknown = set(given) - set(names[kind].split())
    if unknown:
        raise TypeError(f"{kind} has no argument {', '.join(sorted(unknown))}")


class Module(nn.Module):
    """A module whose parameters are on the meta device and never initialised here."""

    def __init__(self, given: dict) -> None:
        super().__init__()
        checked(SIGNATURES, type(self).__name__, given)

    def make(self, name: str, *shape: int, dtype: torch.dtype, device: str) -> None:
        assert device == "meta", "Transformer Engine would draw initial values of its own"
        super().register_parameter(name, nn.Parameter(torch.empty(shape, dtype=dtype, device=device)))

    def get_extra_state(self) -> Tensor:
        raise AssertionError("the state would be a pickle")


class WeightGradStore:
    """A store that defers no weight gradients."""

    def delay_wgrad_compute(self) -> bool:
        return False


class _Product(Function):
    """x W^T + bias with its communication between tensor ranks; gradients of W are added to `main_grad`."""

    @staticmethod
    def forward(ctx, x, weight, bias, layer, store, casts):
        ctx.layer, ctx.store, ctx.weight, ctx.has_bias = layer, store, weight, bias is not None
        ctx.casts = casts
        if casts is not None:
            x, weight = casts.cast(x, INPUT), layer.cast_weight(weight, casts)
        ctx.save_for_backward(x, weight)
        if layer.mode == "column" and layer.is_split:
            x = gathered(x, layer.group)
        y = x @ weight.t()
        if bias is not None:
            y = y + bias
        return summed(y, layer) if layer.mode == "row" else y

    @staticmethod
    def backward(ctx, dy):
        (x, w), layer, weight, casts = ctx.saved_tensors, ctx.layer, ctx.weight, ctx.casts
        dbias = dy.flatten(0, -2).sum(0) if ctx.has_bias else None
        if casts is not None:
            dy = casts.cast(dy, GRADIENT)
        if layer.is_split:
            x, dy = (x, gathered(dy, layer.group)) if layer.mode == "row" else (gathered(x, layer.group), dy)
        dx = dy @ w
        if layer.mode == "column":
            dx = summed(dx, layer)

        def weight_gradient(x: Tensor, dy: Tensor) -> tuple[Tensor, Tensor | None]:
            grad = weight.main_grad
            assert grad.shape == weight.shape
            if casts is not None and casts.is_first:
                grad.zero_()  # the first gradient of a step is written, not added
            grad.addmm_(dy.flatten(0, -2).to(grad.dtype).t(), x.flatten(0, -2).to(grad.dtype))
            return grad, dbias if casts is None else None

        is_deferred = weight.requires_grad and ctx.store.delay_wgrad_compute()
        if is_deferred:
            ctx.store.put([x, dy], weight_gradient)
        elif weight.requires_grad:
            weight_gradient(x, dy)
        returns_bias = weight.requires_grad and (casts is not None or not is_deferred)
        return dx, None, dbias if returns_bias else None, None, None, None


def gathered(x: Tensor, group) -> Tensor:
    parts = [torch.empty_like(x) for _ in range(dist.get_world_size(group))]
    dist.all_gather(parts, x.contiguous(), group=group)
    return torch.cat(parts)


def summed(x: Tensor, layer: "_LinearBase") -> Tensor:
    x = x.contiguous().clone()
    dist.all_reduce(x, group=layer.group)
    return x.chunk(dist.get_world_size(layer.group))[dist.get_rank(layer.group)] if layer.is_split else x


class _Gathered(Function):
    @staticmethod
    def forward(ctx, x, group):
        ctx.group = group
        return gathered(x, group)

    @staticmethod
    def backward(ctx, dy):
        dy = dy.contiguous()
        dist.all_reduce(dy, group=ctx.group)
        return dy.chunk(dist.get_world_size(ctx.group))[dist.get_rank(ctx.group)], None


class _LinearBase(Module):
    def __init__(self, **given) -> None:
        super().__init__(given)
        assert given["fuse_wgrad_accumulation"], "a separate gradient would be a copy"
        assert not {name for name in given if name.startswith("ub_")}, "user buffers"
        self.mode, self.group = given["parallel_mode"], given["tp_group"]
        assert self.mode in ("row", "column", None)
        size = 1 if self.group is None else dist.get_world_size(self.group)
        assert size == given["tp_size"]
        rows, columns = given["out_features"], given["in_features"]
        if self.mode == "column":
            assert rows % size == 0
            rows //= size
        if self.mode == "row":
            assert columns % size == 0
            columns //= size
        self.is_split = size > 1 and given["sequence_parallel"]
        options = {"dtype": given["params_dtype"], "device": given["device"]}
        self.make("weight", rows, columns, **options)
        self.has_bias = given["bias"]
        if self.has_bias:
            self.make("bias", rows, **options)
        self.wgrad_store = WeightGradStore()
        self.fp8_meta: dict = {}
        self.kept: Tensor | None = None
        """Cast of the weight by the first micro-batch."""

    def init_fp8_metadata(self, num_gemms: int = 1) -> None:
        assert num_gemms == 1
        self.fp8_meta = self.fp8_meta or new_meta(autocast.active)

    def cast_weight(self, weight: Tensor, casts: Casts) -> Tensor:
        if casts.is_first is False:
            assert self.kept is not None
            return self.kept
        w = casts.cast(weight, WEIGHT)
        self.kept = w if casts.is_first else self.kept
        return w

    def product(self, x: Tensor, is_first: bool | None) -> Tensor:
        assert all(x.dtype == weight.dtype for weight in self.parameters()), "data types must match"
        casts = None
        if autocast.active is not None:
            self.init_fp8_metadata()
            casts = Casts(autocast.active, self.fp8_meta, is_first)
        is_apart = self.mode == "row"
        bias = self.bias if self.has_bias and not is_apart else None
        y = _Product.apply(x, self.weight, bias, self, self.wgrad_store, casts)
        return y + self.bias if self.has_bias and is_apart else y


class Linear(_LinearBase):
    def forward(self, inp, is_first_microbatch=None, fp8_output=False, fp8_grad=False):
        return self.product(inp, is_first_microbatch)


class LayerNormLinear(_LinearBase):
    def __init__(self, **given) -> None:
        super().__init__(**given)
        self.kind, self.eps = given["normalization"], given["eps"]
        self.is_centered = given["zero_centered_gamma"]
        names = ["layer_norm_weight", *(["layer_norm_bias"] if self.kind == "LayerNorm" else [])]
        for name in names:
            self.make(name, given["in_features"], dtype=given["params_dtype"], device=given["device"])

    def forward(self, inp, is_first_microbatch=None, fp8_output=False, fp8_grad=False):
        bias = self.layer_norm_bias if self.kind == "LayerNorm" else None
        return self.product(
            normed(inp, self.layer_norm_weight, bias, self.eps, self.is_centered), is_first_microbatch
        )


def normed(x: Tensor, weight: Tensor, bias: Tensor | None, eps: float, is_centered: bool) -> Tensor:
    gain = weight + 1 if is_centered else weight
    if bias is None:
        return F.rms_norm(x, weight.shape, gain, eps)
    return F.layer_norm(x, weight.shape, gain, bias, eps)


class _Norm(Module):
    def __init__(self, normalized_shape, **given) -> None:
        super().__init__({"normalized_shape": normalized_shape, **given})
        self.eps, self.is_centered = given["eps"], given["zero_centered_gamma"]
        names = ["weight", *(["bias"] if type(self) is LayerNorm else [])]
        for name in names:
            self.make(name, *normalized_shape, dtype=given["dtype"], device=given["device"])

    def forward(self, x):
        return normed(x, self.weight, getattr(self, "bias", None), self.eps, self.is_centered)


class LayerNorm(_Norm):
    pass


class RMSNorm(_Norm):
    pass


class DotProductAttention(Module):
    def __init__(self, **given) -> None:
        super().__init__(given)
        assert given["attention_dropout"] == 0.0
        assert given["qkv_format"] == "sbhd"
        assert given["attn_mask_type"] == "causal"
        self.heads, self.groups = given["num_attention_heads"], given["num_gqa_groups"]
        self.window, self.scale = given["window_size"], given["softmax_scale"]
        widths = given["kv_channels"]
        self.channels, self.v_head_dim = widths if isinstance(widths, tuple) else (widths, widths)
        self.cp_groups: list = []
        if "cp_group" in given:
            self.set_context_parallel(given["cp_group"], given["cp_global_ranks"], given["cp_comm_type"])

    def set_context_parallel(self, group, ranks: list[int], comm_type: str) -> None:
        """Set the context-parallel groups; the first one has adjacent ranks."""
        self.cp_groups = group if comm_type == "a2a+p2p" else [group]
        if comm_type == "a2a+p2p":
            assert ranks[: dist.get_world_size(group[0])] == sorted(ranks)[: dist.get_world_size(group[0])]
        else:
            assert comm_type in ("p2p", "a2a", "all_gather")
            assert dist.get_process_group_ranks(group) == ranks
        assert self.window is None or comm_type in ("a2a", "all_gather")
        exchanging = dist.get_world_size(self.cp_groups[0]) if "a2a" in comm_type else 1
        assert self.heads % exchanging == self.groups % exchanging == 0
        chunks = range(2 * len(ranks))
        self.chunk_order = torch.tensor([n for r in range(len(ranks)) for n in (chunks[r], chunks[-1 - r])])
        self.cp_rank = ranks.index(dist.get_rank())

    def forward(self, query_layer, key_layer, value_layer, **given) -> Tensor:
        checked(CALLS, "DotProductAttention", given)
        assert query_layer.shape[-2:] == (self.heads, self.channels)
        assert key_layer.shape[-2:] == (self.groups, self.channels)
        assert value_layer.shape[-2:] == (self.groups, self.v_head_dim)
        assert value_layer.is_contiguous() or self.channels == self.v_head_dim
        if self.cp_groups:
            assert not given, "the library would shard documents one by one"
            return self.attended_over_ranks(query_layer, key_layer, value_layer)
        if not given:
            q, k, v = (x.permute(1, 2, 0, 3) for x in (query_layer, key_layer, value_layer))
            return self.attended(q, k, v, None).permute(2, 0, 1, 3).flatten(2)
        assert (given["qkv_format"], given["attn_mask_type"]) == ("thd", "padding_causal")
        cu_seqlens = given["cu_seqlens_q"]
        assert cu_seqlens.dtype == torch.int32
        assert torch.equal(cu_seqlens, given["cu_seqlens_kv"])
        assert given["max_seqlen_q"] == given["max_seqlen_kv"] >= int(cu_seqlens.diff().max())
        positions = torch.bucketize(torch.arange(len(query_layer)), cu_seqlens, right=True)
        q, k, v = (x.transpose(0, 1)[None] for x in (query_layer, key_layer, value_layer))
        return self.attended(q, k, v, positions[:, None] == positions).squeeze(0).transpose(0, 1).flatten(1)

    def attended_over_ranks(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """Attend over the whole samples; return this rank's two chunks, one from the first and one from the second half: [s/cp, b, n, d]."""
        for group in self.cp_groups:
            q, k, v = (_Gathered.apply(x, group) for x in (q, k, v))
        in_order = self.chunk_order.argsort()
        q, k, v = (
            x.unflatten(0, (len(in_order), -1))[in_order].flatten(0, 1).permute(1, 2, 0, 3) for x in (q, k, v)
        )
        out = self.attended(q, k, v, None).permute(2, 0, 1, 3).flatten(2)
        own = self.chunk_order[2 * self.cp_rank :][:2]
        return out.unflatten(0, (len(in_order), -1))[own].flatten(0, 1)

    def attended(self, q: Tensor, k: Tensor, v: Tensor, is_same: Tensor | None) -> Tensor:
        """[b, n, s, d]"""
        s = q.shape[2]
        mask = torch.ones(s, s, dtype=torch.bool).tril()
        if self.window is not None:
            left, right = self.window
            assert right == 0
            mask = mask.triu(-left)
        if is_same is not None:
            mask = mask & is_same
        return F.scaled_dot_product_attention(q, k, v, attn_mask=mask, scale=self.scale, enable_gqa=True)


class Sequential(nn.Sequential):
    """Operations are fused at the first call, with their parameters at that time."""

    def forward(self, x):
        parameters = list(self.parameters())
        if not hasattr(self, "fused"):
            self.fused = parameters
        assert [id(one) for one in self.fused] == [id(one) for one in parameters]
        assert not any(one.is_meta for one in parameters)
        return super().forward(x)


def _activation(name: str, function, *, is_gated: bool) -> type[nn.Module]:
    class Activation(nn.Module):
        def forward(self, x):
            if not is_gated:
                return function(x)
            gate, up = x.chunk(2, -1)
            return function(gate) * up

    Activation.__name__ = name
    return Activation


def _tanh_gelu(x: Tensor) -> Tensor:
    return F.gelu(x, approximate="tanh")


def _quick_gelu(x: Tensor) -> Tensor:
    return x * torch.sigmoid(1.702 * x)


ACTIVATIONS = {
    "SwiGLU": _activation("SwiGLU", F.silu, is_gated=True),
    "GEGLU": _activation("GEGLU", _tanh_gelu, is_gated=True),
    "QGEGLU": _activation("QGEGLU", _quick_gelu, is_gated=True),
    "GELU": _activation("GELU", _tanh_gelu, is_gated=False),
    "SReLU": _activation("SReLU", lambda x: F.relu(x).square(), is_gated=False),
}


@contextmanager
def stand_in() -> Iterator[ModuleType]:
    """Make `import transformer_engine.pytorch` return the stand-in within this context."""
    package, library = ModuleType("transformer_engine"), ModuleType("transformer_engine.pytorch")
    ops = ModuleType("transformer_engine.pytorch.ops")
    package.pytorch, library.ops = library, ops
    for one in (Linear, LayerNormLinear, LayerNorm, RMSNorm, DotProductAttention, autocast):
        setattr(library, one.__name__, one)
    ops.Sequential = Sequential
    for name, one in ACTIVATIONS.items():
        setattr(ops, name, one)
    common = ModuleType("transformer_engine.common")
    common.recipe = recipe_module()
    modules = {
        "transformer_engine": package,
        "transformer_engine.pytorch": library,
        "transformer_engine.common": common,
        "transformer_engine.common.recipe": common.recipe,
    }
    with mock.patch.dict(sys.modules, modules):
        yield library


def differences(library: ModuleType) -> list[str]:
    """Return the argument names that are used here but missing in the library."""
    made = [(getattr(library, kind), kind, names) for kind, names in SIGNATURES.items()]
    called = [(getattr(library, kind).forward, f"{kind}.forward", names) for kind, names in CALLS.items()]
    missing = []
    for function, kind, names in (*made, *called):
        known = inspect.signature(function).parameters
        takes_more = any(one.kind is inspect.Parameter.VAR_KEYWORD for one in known.values())
        missing += [f"{kind}: {name}" for name in names.split() if name not in known and not takes_more]
    missing += [f"ops: {name}" for name in ACTIVATIONS if not hasattr(library.ops, name)]
    store = library.Linear(8, 8, device="meta", bias=False).wgrad_store
    missing += [f"wgrad_store: {name}" for name in STORE if not hasattr(store, name)]
    return missing + fp8_differences(library)


def fp8_differences(library: ModuleType) -> list[str]:
    """Return the names of FP8 that are used here but missing in the library, or have another place there."""
    import transformer_engine.common.recipe as recipes

    missing = [f"recipe: {one.__name__}" for one in RECIPES if not hasattr(recipes, one.__name__)]
    layer = library.Linear(16, 16, device="meta", bias=False)
    recipe = recipes.DelayedScaling(fp8_format=recipes.Format.HYBRID, amax_history_len=1)
    with library.autocast(enabled=True, recipe=recipe, _graph=True):
        layer.init_fp8_metadata()
    for direction, slot in (INPUT, WEIGHT, GRADIENT):
        meta = layer.fp8_meta[direction]
        is_known = meta.scale.shape == meta.amax_history[0].shape and meta.scale[slot] == 1
        missing += [] if is_known else [f"fp8_meta: {direction} {slot}"]
    return missing
