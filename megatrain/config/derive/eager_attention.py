"""Where attention's scores are written out whatever kernel was asked for: softcaps and dropout of scores are in no fused one."""

from typing import Final

from megatrain.config.derive.custom_layers import Share
from megatrain.config.plan import Draft

WRITTEN_OUT: Final = ("unfused", "local", "math")
"""Of --attention-backend: the names of no kernel at all."""


def layers_written_out(draft: Draft) -> Share:
    """The layers that have such scores."""
    own, model = draft.facts.custom_layers, draft.config.model
    if own is not None:
        return own.eager_attention
    return "all" if model.attn_logit_softcapping is not None or model.attention_dropout else "none"


def what_is_written_out(draft: Draft) -> str:
    """What asks for it."""
    model = draft.config.model
    if draft.facts.custom_layers is not None:
        return "softcaps or dropout of scores (--spec)"
    given = {
        f"--attention-dropout {model.attention_dropout}": bool(model.attention_dropout),
        f"--attn-logit-softcapping {model.attn_logit_softcapping}": model.attn_logit_softcapping is not None,
    }
    return " and ".join(flag for flag, is_given in given.items() if is_given)


def all_is_written_out(draft: Draft) -> bool:
    return draft.config.model.attention_backend in WRITTEN_OUT or layers_written_out(draft) == "all"


def is_for_gpu_kernels(draft: Draft) -> bool:
    """Whether attention can run on kernels of GPUs, which compute in 16 bits and are told rules, not masks."""
    return draft.derived.device == "cuda" and draft.derived.params_dtype in ("bfloat16", "float16")
