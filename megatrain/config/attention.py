"""Which kernel attention runs on: what `--attention-backend` means here, on this device, with these libraries.

Megatron-LM's names     auto, flash, fused, unfused, local
kernels by name         flash4 (flash-attn-4), flash2 and cudnn (torch's), sdpa (torch's own choice), math (written out)
"""

from collections.abc import Iterator
from typing import Final

from megatrain.config.errors import Problem
from megatrain.config.plan import Answer, Draft
from megatrain.config.versions import in_order

_KERNELS: Final = {
    "flash4": "flash-attn-4",
    "flash2": "FlashAttention-2 of torch",
    "cudnn": "cuDNN's attention",
    "sdpa": "torch's own choice of kernel",
    "math": "attention written out, with all scores in memory",
}
_OTHERS: Final = "transformer_engine"
_FOR_GPUS: Final = ("flash4", "flash2", "cudnn")
_LIBRARY: Final = "flash-attn-4"
_OLDEST: Final = "4.0.0b36"
"""Of flash-attn-4, that this program was trained with."""
_MOST_CHANNELS: Final = {"flash4": 128, "cudnn": 128, "flash2": 256}
"""Of a head, that these kernels and their backward passes take."""
_GENERATIONS: Final = {"flash4": (9, 10, 11), "cudnn": range(8, 100), "flash2": range(8, 100)}
"""First numbers of the compute capabilities that they and their backward passes run on: Hopper is 9, Blackwell 10 and 11."""


def attention_backend(draft: Draft) -> Answer:
    """The kernel, for layers that it can compute; softcaps and dropout of scores are written out."""
    asked = draft.config.model.attention_backend
    words = f"--attention-backend {asked}"
    if draft.config.model.transformer_impl == _OTHERS:
        version = draft.facts.libraries.get(_OTHERS, "(not installed here)")
        return Answer(_OTHERS, f"{words}: the choice of Transformer Engine {version}")
    if asked in _KERNELS:
        return Answer(asked, f"{words}: {_KERNELS[asked]}")
    if asked in ("unfused", "local"):
        return Answer("math", f"{words}: {_KERNELS['math']}")
    if not _is_for_fused_kernels(draft):
        return Answer(
            "sdpa", f"{words}: {_KERNELS['sdpa']}, for {draft.derived.params_dtype} on {draft.derived.device}"
        )
    first = {"auto": ("flash4", "cudnn"), "flash": ("flash4", "flash2"), "fused": ("cudnn",)}[asked]
    for kernel in first:
        if not _why_not(kernel, draft):
            reason = f"{words}: {_KERNELS[kernel]}"
            if kernel != first[0]:
                reason += f", as {_why_not(first[0], draft)}"
            return Answer(kernel, reason)
    return Answer("sdpa", f"{words}: {_KERNELS['sdpa']}, as {_why_not(first[-1], draft)}")


def attention_backend_is_there(draft: Draft) -> Iterator[Problem]:
    asked = draft.config.model.attention_backend
    if asked not in _FOR_GPUS:
        return
    if not _is_for_fused_kernels(draft):
        yield Problem(
            f"--attention-backend {asked} computes in bf16 or fp16 on a GPU, and this run in"
            f" {draft.derived.params_dtype} on {draft.derived.device}",
            "use --attention-backend auto",
        )
    elif why_not := _why_not(asked, draft):
        remedy = f"install it (pip install '{_LIBRARY}>={_OLDEST}'), or " if _LIBRARY in why_not else ""
        yield Problem(f"--attention-backend {asked}: {why_not}", f"{remedy}use --attention-backend auto")


def attention_tells_its_log_sums(draft: Draft) -> Iterator[Problem]:
    """Parts of attention are joined by the log-sum-exp of scores. Of torch's kernels for GPUs FlashAttention-2 tells it for all."""
    model, cp = draft.config.model, draft.config.parallel.context_parallel_size
    asks = f"--context-parallel-size {cp}" if cp > 1 else f"--softmax-type {model.softmax_type}"
    is_joined = cp > 1 or model.softmax_type != "vanilla"
    is_written = model.attn_logit_softcapping is not None or bool(model.attention_dropout)
    is_torchs = draft.derived.attention_backend in ("sdpa", "cudnn")
    if not is_joined or is_written or not is_torchs or not _is_for_fused_kernels(draft):
        return
    if why_not := _why_not("flash2", draft):
        yield Problem(
            f"{asks} needs {_KERNELS['flash2']}, and {why_not}",
            "use --attention-backend math, which holds all scores of a block in memory",
        )


def _is_for_fused_kernels(draft: Draft) -> bool:
    return draft.derived.device == "cuda" and draft.derived.params_dtype in ("bfloat16", "float16")


def _why_not(kernel: str, draft: Draft) -> str:
    """Why a kernel cannot be had; empty if it can. A GPU that is not here is one that it runs on."""
    if kernel == "flash4":
        version = draft.facts.libraries.get(_LIBRARY)
        if version is None:
            return f"{_LIBRARY} is not installed"
        if in_order(version) < in_order(_OLDEST):
            return f"{_LIBRARY} {version} is older than {_OLDEST}"
    if kernel == "cudnn" and draft.config.training.deterministic_mode:
        return "its backward pass gives other bits each time (--deterministic-mode)"
    capability = draft.facts.device_capability
    if capability is not None and capability[0] not in _GENERATIONS[kernel]:
        name, (major, minor) = draft.facts.device_name or "the GPU", capability
        return f"it does not run on {name} (compute capability {major}.{minor})"
    most = _MOST_CHANNELS[kernel]
    for number, layer in enumerate(draft.derived.layer_table.layers):
        channels = layer.head_channels
        if layer.num_heads and (channels % 8 or channels > most):
            is_flag = channels == draft.config.model.kv_channels
            said = f"--kv-channels is {channels}" if is_flag else f"layer {number} (from 0) has {channels}"
            return f"it takes heads of at most {most} channels in multiples of 8, and {said}"
    return ""
