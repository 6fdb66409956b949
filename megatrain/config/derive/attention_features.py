"""Features of attention that decide its kernel and its context-parallel communication.

documents   attention stays inside each document          sinks     extra terms in the softmax denominator
windows     a query attends to recent keys only           eager     logit softcapping and dropout: in no fused kernel
"""

from typing import Final

from megatrain.config.derive.custom_layers import LayerShare
from megatrain.config.derive.patterns import PatternError, parse_layer_pattern, parse_window
from megatrain.config.plan import Draft
from megatrain.config.schema.values import UnresolvedError

EAGER_BACKENDS: Final = ("unfused", "local", "math")
"""Values of --attention-backend that mean eager attention, which stores all scores."""


def has_documents(draft: Draft) -> bool:
    """Return whether attention stays inside each document."""
    data = draft.config.data
    return data.reset_attention_mask or data.dataloader_inter_document_masking


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


def layers_with_eager_attention(draft: Draft) -> LayerShare:
    """Return the share of layers with logit softcapping or attention dropout, which always use eager attention."""
    custom, model = draft.facts.custom_layers, draft.config.model
    if custom is not None:
        return custom.eager_attention
    return "all" if model.attn_logit_softcapping is not None or model.attention_dropout else "none"


def eager_attention_cause(draft: Draft) -> str:
    """Return the flags that make layers use eager attention."""
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
    return backend in EAGER_BACKENDS or layers_with_eager_attention(draft) == "all"


def fits_gpu_kernels(draft: Draft) -> bool:
    """Return whether attention can use GPU kernels, which compute in 16 bits and take mask rules, not mask tensors."""
    config = draft.config
    return config.training.device == "cuda" and config.precision.params_dtype in ("bfloat16", "float16")
