"""Features of attention that decide its kernel and its context-parallel communication.

documents   attention stays inside each document          sinks     extra terms in the softmax denominator
windows     a query attends to recent keys only           softcap and dropout: in one fused kernel, our own in Triton
"""

from collections.abc import Container
from typing import Final, Literal

from megatrain.config.model_spec.attention import AttentionSpec
from megatrain.config.plan import Draft

EAGER_BACKENDS: Final = ("unfused", "local", "math")
"""Values of --attention-backend that mean eager attention, which stores all scores."""


def has_documents(draft: Draft) -> bool:
    """Return whether attention stays inside each document."""
    return draft.config.data.has_documents


def has_windows(draft: Draft) -> bool:
    """Return whether some layer has a sliding window."""
    return any(mixer.window is not None for mixer in attentions(draft))


def has_sinks(draft: Draft) -> bool:
    """Return whether the softmax of some layer has a denominator term without a key."""
    return any(mixer.sink != "none" for mixer in attentions(draft))


def layers_with_softcap_or_dropout(draft: Draft) -> Literal["none", "some", "all"]:
    """Return the share of the layers with attention that have logit softcapping or attention dropout."""
    has_either = [mixer.softcap is not None or mixer.dropout > 0 for mixer in attentions(draft)]
    return "none" if not any(has_either) else "all" if all(has_either) else "some"


def attentions(draft: Draft) -> list[AttentionSpec]:
    """Return the attention of each layer that has it."""
    mixers = [layer.attention for layer in draft.derived.model_spec.layers]
    return [mixer for mixer in mixers if mixer is not None]


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
    for number, layer in enumerate(draft.derived.model_spec.layers):
        if layer.attention is None:
            continue
        channels = layer.attention.head_dim
        if channels % multiple or channels > maximum:
            is_flag = channels == draft.config.model.kv_channels
            flags = (
                "--kv-channels" if layer.attention.latent is None else "--qk-head-dim + --qk-pos-emb-head-dim"
            )
            found = f"{flags} is {channels}" if is_flag else f"layer {number} (from 0) has {channels}"
            return f"needs heads of at most {maximum} channels in multiples of {multiple}, and {found}"
    return ""


def fits_gpu_kernels(draft: Draft) -> bool:
    """Return whether attention can use GPU kernels, which compute in 16 bits and take mask rules, not mask tensors."""
    config = draft.config
    return config.training.device == "cuda" and config.precision.params_dtype in ("bfloat16", "float16")
