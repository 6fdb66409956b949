"""Which kernel attention runs on: what `--attention-backend` means here, on this device, with these libraries.

Megatron-LM's names     auto, flash, fused, unfused, local: wishes, and the line of the plan says what they came to
kernels by name         flash4 (flash-attn-4), flash2 and cudnn (torch's), sdpa (torch's choice), math (written out)

All layers run on one kernel that takes what each of them asks for. A kernel that is named and cannot be had is an error.
"""

import re
import sys
from collections.abc import Iterator
from typing import Final

from megatrain.config.derive.attention_features import (
    EAGER_BACKENDS,
    eager_attention_cause,
    fits_gpu_kernels,
    has_documents,
    has_sinks,
    has_windows,
    layers_with_eager_attention,
)
from megatrain.config.errors import Problem
from megatrain.config.plan import DerivedValue, Draft

_KERNELS: Final = {
    "flash4": "flash-attn-4",
    "flash2": "FlashAttention-2 of torch",
    "cudnn": "cuDNN's attention",
    "sdpa": "torch's own choice of kernel",
    "math": "attention written out, with all scores in memory",
}
_FIRST: Final = {
    "auto": ("flash4", "cudnn"),
    "flash": ("flash4", "flash2"),
    "fused": ("cudnn",),
    "sdpa": ("sdpa",),
}
"""What is tried on GPUs before torch has the choice, or before FlashAttention-2 where that lacks something."""
_JOINED: Final = ("sinks", "context ranks")
"""What joins parts of attention, by the log-sum-exp of their scores."""
_LACKS: Final = {
    "cudnn": ("documents", "windows", "gathered keys"),
    "sdpa": ("documents", "windows", *_JOINED),
}
"""What kernels of GPUs do not have. torch's own choice forms masks and does not tell the log-sum-exp."""
_OTHERS: Final = "transformer_engine"
_FOR_GPUS: Final = ("flash4", "flash2", "cudnn")
_LIBRARY: Final = "flash-attn-4"
_OLDEST: Final = "4.0.0b36"
"""Of flash-attn-4, that this program was trained with."""
_MOST_CHANNELS: Final = {"flash4": 128, "cudnn": 128, "flash2": 256}
"""Of a head, that these kernels and their backward passes take."""
_MULTIPLES: Final = {"flash4": 32, "cudnn": 8, "flash2": 8}
"""Of channels. flash-attn-4 4.0.0b36 takes others too, and gives wrong gradients of queries on Hopper (measured: 8, 16, 40, 80)."""
_GENERATIONS: Final = {"flash4": (9, 10, 11), "cudnn": range(8, 100), "flash2": range(8, 100)}
"""First numbers of the compute capabilities that they and their backward passes run on: Hopper is 9, Blackwell 10 and 11."""


def attention_backend(draft: Draft) -> DerivedValue:
    """The kernel of all layers, but for those of --spec that have softcaps or dropout of scores."""
    words = f"--attention-backend {draft.config.model.attention_backend}"
    if draft.config.model.transformer_impl == _OTHERS:
        version = draft.facts.libraries.get(_OTHERS, "(not installed here)")
        return DerivedValue(_OTHERS, f"{words}: the choice of Transformer Engine {version}")
    kernel, why = _chosen(draft)
    if kernel != "math" and layers_with_eager_attention(draft) == "some":
        why += f"; layers with {eager_attention_cause(draft)} hold all scores in memory"
    return DerivedValue(kernel, f"{words}: {_KERNELS[kernel]}{why}")


def _chosen(draft: Draft) -> tuple[str, str]:
    """The kernel, and what kept others away."""
    asked = draft.config.model.attention_backend
    if asked in EAGER_BACKENDS:
        return "math", ""
    if why := _why_written_out(draft):
        return "math", f", as {why}: memory and time grow with the square of --seq-length"
    if asked in _FOR_GPUS:
        return asked, ""
    if not fits_gpu_kernels(draft):
        return "sdpa", f", for {draft.config.precision.params_dtype} on {draft.config.training.device}"
    last = "flash2" if _why_not("sdpa", draft) else "sdpa"
    refused = []
    for kernel in _FIRST[asked]:
        why = _why_not(kernel, draft)
        if not why:
            last = kernel
            break
        refused.append(f"{_KERNELS[kernel]} {why}")
    return last, f", as {'; '.join(refused)}" if refused else ""


def attention_backend_is_there(draft: Draft) -> Iterator[Problem]:
    """Kernels by name; Megatron-LM's names are not held to this."""
    model = draft.config.model
    asked = model.attention_backend
    words = f"--attention-backend {asked}"
    if asked not in (*_FOR_GPUS, "sdpa"):
        return
    if asked in _FOR_GPUS and not fits_gpu_kernels(draft):
        yield Problem(
            f"{words} computes in bf16 or fp16 on a GPU, and this run in"
            f" {draft.config.precision.params_dtype} on {draft.config.training.device}",
            "use --attention-backend auto",
        )
    elif asked in _FOR_GPUS and (why_not := _why_not(asked, draft)):
        is_library = asked == "flash4" and why_not == _why_no_library(draft)
        remedy = f"install it (pip install '{_LIBRARY}>={_OLDEST}'), or " if is_library else ""
        yield Problem(f"{words}: {_KERNELS[asked]} {why_not}", f"{remedy}use --attention-backend auto")
    why = _no_fused_kernel(draft) if layers_with_eager_attention(draft) == "some" else _why_written_out(draft)
    if why:
        is_dropout = eager_attention_cause(draft) == f"--attention-dropout {model.attention_dropout}"
        remedy = "--attention-dropout 0, or " if is_dropout else ""
        yield Problem(
            f"{words}: {why}", f"use {remedy}--attention-backend auto, which holds scores in memory"
        )


def attention_has_a_kernel(draft: Draft) -> Iterator[Problem]:
    """Where FlashAttention-2 is left alone."""
    asked = draft.config.model.attention_backend
    if draft.derived.attention_backend != "flash2" or asked == "flash2":
        return
    if why_not := _why_not("flash2", draft):
        yield Problem(
            f"--attention-backend {asked}: {_KERNELS['flash2']}, which is left for {_lacking('sdpa', draft)}, {why_not}",
            "use --attention-backend math, which holds all scores of a block in memory",
        )


def _why_written_out(draft: Draft) -> str:
    """Why no layer has a fused kernel although one was asked for; empty if some have one."""
    if layers_with_eager_attention(draft) == "all":
        return _no_fused_kernel(draft)
    joined = [what for what in _asked_for(draft) if what in _JOINED]
    if joined and draft.config.training.device == "cuda" and not fits_gpu_kernels(draft):
        return (
            f"no fused kernel of {draft.config.precision.params_dtype} on a GPU is for {' and '.join(joined)}"
        )
    return ""


def _no_fused_kernel(draft: Draft) -> str:
    return f"no fused kernel has {eager_attention_cause(draft)}"


def _why_not(kernel: str, draft: Draft) -> str:
    """Why a kernel of GPUs cannot be had, behind its name; empty if it can. A GPU that is not here is one that it runs on."""
    if lacking := _lacking(kernel, draft):
        return f"is not for {lacking}"
    if kernel == "sdpa":
        return ""
    if kernel == "flash4" and not draft.config.training.compile:
        return "is compiled where it runs, which --no-compile rules out"
    if kernel == "flash4" and (why := _why_no_library(draft)):
        return why
    if kernel == "cudnn" and draft.config.training.deterministic_mode:
        return "gives other bits each time in its backward pass (--deterministic-mode)"
    capability = draft.facts.device_capability
    if capability is not None and capability[0] not in _GENERATIONS[kernel]:
        name, (major, minor) = draft.facts.device_name or "the GPU", capability
        return f"does not run on {name} (compute capability {major}.{minor})"
    most, multiple = _MOST_CHANNELS[kernel], _MULTIPLES[kernel]
    for number, layer in enumerate(draft.derived.layer_table.layers):
        channels = layer.head_channels
        if layer.num_heads and (channels % multiple or channels > most):
            is_flag = channels == draft.config.model.kv_channels
            said = f"--kv-channels is {channels}" if is_flag else f"layer {number} (from 0) has {channels}"
            return f"takes heads of at most {most} channels in multiples of {multiple}, and {said}"
    return ""


def _why_no_library(draft: Draft) -> str:
    version = draft.facts.libraries.get(_LIBRARY)
    if version is None:
        return "is not installed"
    return f"{version} is older than {_OLDEST}" if version_key(version) < version_key(_OLDEST) else ""


def _lacking(kernel: str, draft: Draft) -> str:
    """What layers ask for and it does not have."""
    return " and ".join(what for what in _asked_for(draft) if what in _LACKS.get(kernel, ()))


def _asked_for(draft: Draft) -> list[str]:
    """What some layers ask for, of what not all kernels have."""
    asked = {
        "documents": has_documents(draft),
        "windows": has_windows(draft),
        "gathered keys": any("all_gather" in way for way in draft.derived.cp_comm_types),
        "sinks": has_sinks(draft),
        "context ranks": draft.config.parallel.context_parallel_size > 1,
    }
    return [what for what, is_asked in asked.items() if is_asked]


def version_key(version: str) -> tuple[int, ...]:
    """Versions such as 4.0.0b36 in their order: a beta comes before its release."""
    release, _, beta = version.partition("b")
    numbers = [int(number) for number in re.findall(r"\d+", release)[:3]]
    found = re.match(r"\d+", beta)
    return (*numbers, *[0] * (3 - len(numbers)), int(found[0]) if found else sys.maxsize)
