"""Features of attention that decide its kernel and its context-parallel communication.

documents   attention stays inside each document          sinks     extra terms in the softmax denominator
windows     a query attends to recent keys only           softcap and dropout: in one fused kernel, our own in Triton
"""

from collections.abc import Container
from typing import Final

from megatrain.config.derive.custom_layers import LayerShare
from megatrain.config.derive.patterns import PatternError, parse_layer_pattern, parse_window
from megatrain.config.plan import Draft
from megatrain.config.schema.values import UnresolvedError

EAGER_BACKENDS: Final = ("unfused", "local", "math")
"""Values of --attention-backend that mean eager attention, which stores all scores."""


def has_documents(draft: Draft) -> bool:
    """Return whether attention stays inside each document."""
    return draft.config.data.has_documents


def has_windows(draft: Draft) -> bool:
    """Return whether some layer has a sliding window."""
    custom, model = draft.facts.custom_layers, draft.config.model
    if custom is not None:
        return custom.has_windows
    try:
        has_window = parse_layer_pattern(model.window_attn_skip_freq, model.num_layers, one_means=True)
        return parse_window(model.window_size) is not None and any(has_window)
    except PatternError as error:  # a rule reports it
        raise UnresolvedError from error


def has_sinks(draft: Draft) -> bool:
    """Return whether the softmax of some layer has a denominator term without a key."""
    custom = draft.facts.custom_layers
    return draft.config.model.softmax_type != "vanilla" if custom is None else custom.has_sinks


def layers_with_softcap_or_dropout(draft: Draft) -> LayerShare:
    """Return the share of layers with logit softcapping or attention dropout."""
    custom, model = draft.facts.custom_layers, draft.config.model
    if custom is not None:
        return custom.softcap_or_dropout
    return "all" if model.attn_logit_softcapping is not None or model.attention_dropout else "none"


def softcap_or_dropout_flags(draft: Draft) -> str:
    """Return the flags that give layers a softcap or attention dropout."""
    model = draft.config.model
    if draft.facts.custom_layers is not None:
        return "logit softcapping or attention dropout (--spec)"
    given = {
        f"--attention-dropout {model.attention_dropout}": bool(model.attention_dropout),
        f"--attn-logit-softcapping {model.attn_logit_softcapping}": model.attn_logit_softcapping is not None,
    }
    return " and ".join(flag for flag, is_given in given.items() if is_given)


def all_attention_is_eager(draft: Draft) -> bool:
    backend = draft.config.model.attention_backend
    is_special = layers_with_softcap_or_dropout(draft) == "all"
    return backend in EAGER_BACKENDS or (is_special and bool(why_not_triton(draft)))


def why_not_triton(draft: Draft) -> str:
    """Return why our kernel for softcaps and dropout cannot be used, to follow its name; empty: it can."""
    if not fits_gpu_kernels(draft):
        return "needs bf16 or fp16 on a GPU"
    if not draft.config.training.compile:
        return "is compiled at run time, which --no-compile rules out"
    return why_not_on_gpu(draft, range(8, 100)) or why_not_heads(draft, maximum=256, multiple=8)


def why_not_on_gpu(draft: Draft, generations: Container[int]) -> str:
    """Return why a kernel does not run on a GPU, from the major compute capabilities that it supports; empty: it does.

    An unknown GPU is assumed to be supported.
    """
    capability = draft.facts.device_capability
    if capability is None or capability[0] in generations:
        return ""
    name, (major, minor) = draft.facts.device_name or "the GPU", capability
    return f"does not run on {name} (compute capability {major}.{minor})"


def why_not_heads(draft: Draft, *, maximum: int, multiple: int) -> str:
    """Return why a kernel does not support the head width of a layer, from its limits; empty: it does."""
    for number, layer in enumerate(draft.derived.layer_table.layers):
        channels = layer.head_channels
        if layer.num_heads and (channels % multiple or channels > maximum):
            is_flag = channels == draft.config.model.kv_channels
            flags = "--kv-channels" if layer.latent is None else "--qk-head-dim + --qk-pos-emb-head-dim"
            found = f"{flags} is {channels}" if is_flag else f"layer {number} (from 0) has {channels}"
            return f"needs heads of at most {maximum} channels in multiples of {multiple}, and {found}"
    return ""


def fits_gpu_kernels(draft: Draft) -> bool:
    """Return whether attention can use GPU kernels, which compute in 16 bits and take mask rules, not mask tensors."""
    config = draft.config
    return config.training.device == "cuda" and config.precision.params_dtype in ("bfloat16", "float16")
