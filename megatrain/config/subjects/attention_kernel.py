"""The attention kernel: the meaning of `--attention-backend` on this device, with these libraries.

Megatron-LM's names     auto, flash, fused, unfused, local: preferences; the plan prints the kernel and the reason
names of kernels        flash4 (flash-attn-4), flash2 and cudnn (torch's), sdpa (torch's choice), math (eager)
derived                 triton (our own), for auto, flash and fused with logit softcapping, attention dropout or padding

All layers use one kernel, which supports the features of each. A named kernel that cannot be used is an error.
"""

from __future__ import annotations

from typing import Final

from megatrain.config.errors import Problem
from megatrain.config.plan import DerivedValue, Draft
from megatrain.config.plan_note import PlanNote
from megatrain.config.registry import Notes, Problems, derives, note, rule
from megatrain.config.subjects.attention import (
    EAGER_BACKENDS,
    attentions,
    fits_gpu_kernels,
    has_documents,
    has_padding_or_bias,
    has_sinks,
    has_windows,
    layers_with_softcap_or_dropout,
    selects_keys,
    softcap_or_dropout_flags,
    why_not_heads,
    why_not_on_gpu,
    why_not_triton,
)
from megatrain.config.subjects.transformer_engine import TRANSFORMER_ENGINE, version_key, why_local_attention

_KERNELS: Final = {
    "flash4": "flash-attn-4",
    "flash2": "FlashAttention-2 of torch",
    "cudnn": "cuDNN's attention",
    "sdpa": "torch's own choice of kernel",
    "triton": "megatrain's Triton kernel",
    "math": "eager attention, which stores all scores",
}
_FIRST: Final = {
    "auto": ("flash4", "cudnn"),
    "flash": ("flash4", "flash2"),
    "fused": ("cudnn",),
    "sdpa": ("sdpa",),
}
"""Kernels to try on GPUs, before torch's own choice or, where that lacks a feature, FlashAttention-2."""
_PREFERENCES: Final = ("auto", "flash", "fused")
_NEED_LSE: Final = ("sinks", "context ranks")
"""Features that need the log-sum-exp of the scores."""
_LACKS: Final = {
    "cudnn": ("documents", "windows", "gathered keys"),
    "sdpa": ("documents", "windows", *_NEED_LSE),
}
"""Features that GPU kernels lack. torch's own choice needs mask tensors and does not return the log-sum-exp."""
_GPU_KERNELS: Final = ("flash4", "flash2", "cudnn")
_SLOW: Final = ("sdpa", "triton", "math")
"""Kernels of GPUs that take more time or memory than the others."""
_LIBRARY: Final = "flash-attn-4"
_MIN_VERSION: Final = "4.0.0b36"
"""Oldest flash-attn-4 that was tested in training."""
_MAX_CHANNELS: Final = {"flash4": 128, "cudnn": 128, "flash2": 256}
"""Largest head width that these kernels and their backward passes support."""
_MULTIPLES: Final = {"flash4": 32, "cudnn": 8, "flash2": 8}
"""Divisors of the head width. flash-attn-4 4.0.0b36 accepts others, with wrong query gradients on Hopper (measured: 8, 16, 40, 80)."""
_GENERATIONS: Final = {"flash4": (9, 10, 11), "cudnn": range(8, 100), "flash2": range(8, 100)}
"""Major compute capabilities that they and their backward passes support: Hopper is 9, Blackwell 10 and 11."""


@derives("derived.attention_backend")
def attention_backend(draft: Draft) -> DerivedValue:
    """Derive the kernel of all layers; without the Triton kernel, some --spec layers use eager attention instead."""
    words = f"--attention-backend {draft.config.model.attention_backend}"
    if draft.derived.transformer_impl == TRANSFORMER_ENGINE and not any(why_local_attention(draft)):
        version = draft.facts.libraries.get(TRANSFORMER_ENGINE, "(not installed here)")
        return DerivedValue(TRANSFORMER_ENGINE, f"{words}: chosen by Transformer Engine {version}")
    kernel, why = _chosen(draft)
    if kernel not in ("triton", "math") and layers_with_softcap_or_dropout(draft) == "some":
        why += f"; layers with {softcap_or_dropout_flags(draft)} store all scores"
    return DerivedValue(kernel, f"{words}: {_KERNELS[kernel]}{why}{_padded_values(kernel, draft)}")


@note("nothing")
def attention_kernel(draft: Draft) -> Notes:
    is_given = not draft.is_default("model.attention_backend")
    if draft.config.training.device == "cuda" or is_given or layers_with_softcap_or_dropout(draft) != "none":
        is_slow = draft.config.training.device == "cuda" and draft.derived.attention_backend in _SLOW
        yield PlanNote(draft.origins["derived.attention_backend"].detail, "cost" if is_slow else "nothing")


@note("cost")
def attention_logits(draft: Draft) -> Notes:
    config, length = draft.config, draft.config.data.seq_length
    if not (config.optimizer.qk_clip or config.logging.log_max_attention_logit):
        return
    flag = "--qk-clip" if config.optimizer.qk_clip else "--log-max-attention-logit"
    pairs = sum(
        mixer.num_heads * mixer.head_dim * min(length, 2 * (mixer.window or length))
        for mixer in attentions(draft)
    )
    share = 100 * draft.derived.tokens_per_iteration * pairs / draft.derived.flops_per_iteration
    again = (
        " and again where the backward pass recomputes attention"
        if config.training.recompute_granularity
        else ""
    )
    yield (
        f"{flag} computes the scores of attention once more in each pass{again}, which is {share:.1f} % of an iteration's"
        " FLOPs, in blocks of 4 MiB for each head and sample: fused attention does not return its largest score"
    )


def _padded_values(kernel: str, draft: Draft) -> str:
    """Return a remark if values get channels of zeros: these kernels and context ranks need those of keys."""
    is_native = kernel in ("sdpa", "math") and not draft.derived.cp_comm_types
    widths = {(mixer.v_head_dim, mixer.head_dim) for mixer in attentions(draft)}
    narrow = sorted(width for width in widths if width[0] < width[1])
    if is_native or not narrow:
        return ""
    return "; " + ", ".join(f"values of {value} channels are padded to {key}" for value, key in narrow)


def _chosen(draft: Draft) -> tuple[str, str]:
    """Return the kernel, and the reason against preferred ones."""
    given = draft.config.model.attention_backend
    if given in EAGER_BACKENDS:
        return "math", ""
    if selects_keys(draft):
        return (
            "math" if draft.config.model.attention_dropout else "sdpa",
            ", for the keys that an indexer selects",
        )
    if given in _PREFERENCES and (features := _features_of_triton(draft)) and not why_not_triton(draft):
        return "triton", f", for {features}{_slow_dropout(draft)}"
    if why := _why_eager(draft):
        return "math", f", as {why}: memory and time grow with the square of --seq-length"
    if given in _GPU_KERNELS:
        return given, ""
    if not fits_gpu_kernels(draft):
        return "sdpa", f", for {draft.config.precision.params_dtype} on {draft.config.training.device}"
    last = "flash2" if _why_not("sdpa", draft) else "sdpa"
    refused = []
    for kernel in _FIRST[given]:
        why = _why_not(kernel, draft)
        if not why:
            last = kernel
            break
        refused.append(f"{_KERNELS[kernel]} {why}")
    return last, f", as {'; '.join(refused)}" if refused else ""


@rule
def attention_backend_is_there(draft: Draft) -> Problems:
    """A kernel given by its own name must be usable; Megatron-LM's names are only preferences."""
    model = draft.config.model
    given = model.attention_backend
    words = f"--attention-backend {given}"
    if given not in (*_GPU_KERNELS, "sdpa"):
        return
    if given in _GPU_KERNELS and not fits_gpu_kernels(draft):
        yield Problem(
            f"{words} needs bf16 or fp16 on a GPU, and this run uses"
            f" {draft.config.precision.params_dtype} on {draft.config.training.device}",
            "use --attention-backend auto",
        )
    elif given in _GPU_KERNELS and (why_not := _why_not(given, draft)):
        is_library = given == "flash4" and why_not == _why_no_library(draft)
        remedy = f"install it (pip install '{_LIBRARY}>={_MIN_VERSION}'), or " if is_library else ""
        yield Problem(f"{words}: {_KERNELS[given]} {why_not}", f"{remedy}use --attention-backend auto")
    why = _missing_kernel(draft) if layers_with_softcap_or_dropout(draft) == "some" else _why_eager(draft)
    if why:
        is_dropout = softcap_or_dropout_flags(draft) == f"--attention-dropout {model.attention_dropout}"
        remedy = "--attention-dropout 0, or " if is_dropout else ""
        yield Problem(f"{words}: {why}", f"use {remedy}--attention-backend auto")


@rule
def attention_has_a_kernel(draft: Draft) -> Problems:
    """FlashAttention-2 must be usable where it is the only kernel with the features."""
    given = draft.config.model.attention_backend
    if draft.derived.attention_backend != "flash2" or given == "flash2":
        return
    if why_not := _why_not("flash2", draft):
        yield Problem(
            f"--attention-backend {given}: {_KERNELS['flash2']}, the only kernel for {_lacking('sdpa', draft)}, {why_not}",
            "use --attention-backend math, which stores all scores of a block",
        )


def _features_of_triton(draft: Draft) -> str:
    """Return the features of some layer that only our kernel has; empty: none."""
    found = [softcap_or_dropout_flags(draft)] if layers_with_softcap_or_dropout(draft) != "none" else []
    if has_padding_or_bias(draft):
        found.append(f"the padding of --model-family {draft.config.model.model_family}")
    return " and ".join(found)


def _why_eager(draft: Draft) -> str:
    """Return the reason that no layer can use a fused kernel; empty: some can."""
    if layers_with_softcap_or_dropout(draft) == "all":
        return _missing_kernel(draft)
    need_lse = [feature for feature in _features(draft) if feature in _NEED_LSE]
    if need_lse and draft.config.training.device == "cuda" and not fits_gpu_kernels(draft):
        return f"no fused kernel for {draft.config.precision.params_dtype} on a GPU supports {' and '.join(need_lse)}"
    return ""


def _missing_kernel(draft: Draft) -> str:
    why_not = why_not_triton(draft)
    reason = f", and it {why_not}" if why_not else ""
    return f"only {_KERNELS['triton']} supports {softcap_or_dropout_flags(draft)}{reason}"


def _slow_dropout(draft: Draft) -> str:
    """Return a remark if ranges of keys do not begin with a block of the dropout mask."""
    s, cp = draft.config.data.seq_length, draft.config.parallel.context_parallel_size
    has_chunks = any(each != "a2a" for each in draft.derived.cp_comm_types)
    if not (draft.config.model.attention_dropout and has_chunks and s % (128 * cp)):
        return ""
    return f"; dropout is slower, as a context rank's chunks of {s // (2 * cp)} tokens are no multiples of 64"


def _why_not(kernel: str, draft: Draft) -> str:
    """Return why a GPU kernel cannot be used, to follow its name; empty: it can. An unknown GPU is assumed to support it."""
    if lacking := _lacking(kernel, draft):
        return f"does not support {lacking}"
    if kernel == "sdpa":
        return ""
    if kernel == "flash4" and not draft.config.training.compile:
        return "is compiled at run time, which --no-compile rules out"
    if kernel == "flash4" and (why := _why_no_library(draft)):
        return why
    if kernel == "cudnn" and draft.config.training.deterministic_mode:
        return "has a nondeterministic backward pass (--deterministic-mode)"
    return why_not_on_gpu(draft, _GENERATIONS[kernel]) or why_not_heads(
        draft, maximum=_MAX_CHANNELS[kernel], multiple=_MULTIPLES[kernel]
    )


def _why_no_library(draft: Draft) -> str:
    version = draft.facts.libraries.get(_LIBRARY)
    if version is None:
        return "is not installed"
    return (
        f"{version} is older than {_MIN_VERSION}" if version_key(version) < version_key(_MIN_VERSION) else ""
    )


def _lacking(kernel: str, draft: Draft) -> str:
    """Return the features of layers that a kernel lacks."""
    return " and ".join(feature for feature in _features(draft) if feature in _LACKS.get(kernel, ()))


def _features(draft: Draft) -> list[str]:
    """Return the features of some layer that not all kernels support."""
    features = {
        "documents": has_documents(draft),
        "windows": has_windows(draft),
        "gathered keys": any("all_gather" in each for each in draft.derived.cp_comm_types),
        "sinks": has_sinks(draft),
        "context ranks": bool(draft.derived.cp_comm_types),
    }
    return [feature for feature, is_used in features.items() if is_used]
