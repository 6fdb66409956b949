"""Which kernel attention runs on: what `--attention-backend` means here, on this device, with these libraries.

Megatron-LM's names     auto, flash, fused, unfused, local
kernels by name         flash4 (flash-attn-4), flash2 and cudnn (torch's), sdpa (torch's own choice), math (written out)
"""

from collections.abc import Iterator
from typing import Final

from megatrain.config.errors import Problem
from megatrain.config.plan import Answer, Draft

_KERNELS: Final = {
    "flash4": "flash-attn-4",
    "flash2": "FlashAttention-2 of torch",
    "cudnn": "cuDNN's attention",
    "sdpa": "torch's own choice of kernel",
    "math": "attention written out, with all scores in memory",
}
_FOR_GPUS: Final = ("flash4", "flash2", "cudnn")
_LIBRARY: Final = "flash-attn-4"
_MOST_CHANNELS: Final = {"flash4": 128, "cudnn": 128, "flash2": 256}
"""Of a head, that these kernels and their backward passes take."""


def attention_backend(draft: Draft) -> Answer:
    """The kernel, for layers that it can compute; softcaps, sinks and dropout of scores are written out."""
    asked = draft.config.model.attention_backend
    words = f"--attention-backend {asked}"
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
        remedy = f"install it (pip install {_LIBRARY}), or " if _LIBRARY in why_not else ""
        yield Problem(f"--attention-backend {asked}: {why_not}", f"{remedy}use --attention-backend auto")


def _is_for_fused_kernels(draft: Draft) -> bool:
    return draft.derived.device == "cuda" and draft.derived.params_dtype in ("bfloat16", "float16")


def _why_not(kernel: str, draft: Draft) -> str:
    """Why a kernel cannot be had; empty if it can."""
    channels = draft.config.model.kv_channels
    if kernel == "flash4" and _LIBRARY not in draft.facts.libraries:
        return f"{_LIBRARY} is not installed"
    if channels % 8 or channels > _MOST_CHANNELS[kernel]:
        return f"it takes heads of at most {_MOST_CHANNELS[kernel]} channels in multiples of 8, and --kv-channels is {channels}"
    return ""
