"""Rules about `--transformer-impl transformer_engine`: the library, a GPU, bf16 or fp16, and layers that it supports.

`local` never replaces it silently: each feature that the library lacks is a problem with a remedy.
"""

from collections.abc import Callable, Iterator
from typing import Final

from megatrain.config.derive.attention_backend import version_key
from megatrain.config.derive.attention_features import has_documents
from megatrain.config.derive.context_parallel import head_exchanges
from megatrain.config.derive.custom_layers import layer_function
from megatrain.config.errors import Problem
from megatrain.config.plan import Draft

_FLAG: Final = "--transformer-impl transformer_engine"
_LOCAL: Final = "use --transformer-impl local"
_LIBRARY: Final = "transformer_engine"
_MIN_VERSION: Final = "2.20"
"""First version with the module signatures that megatrain uses."""


def _is_used(draft: Draft) -> bool:
    return draft.config.model.transformer_impl == _LIBRARY


def transformer_engine_is_installed(draft: Draft) -> Iterator[Problem]:
    """A dry run does not need the library."""
    if not _is_used(draft) or draft.config.training.dry_run:
        return
    version = draft.facts.libraries.get(_LIBRARY)
    if version is None:
        yield Problem(
            f"{_FLAG} requires Transformer Engine, which is not installed",
            "install it (pip install --no-build-isolation transformer_engine[pytorch], built for the installed CUDA),"
            f" or {_LOCAL}",
        )
    elif version_key(version) < version_key(_MIN_VERSION):
        yield Problem(
            f"{_FLAG} requires Transformer Engine {_MIN_VERSION} or later, and {version} is installed",
            f"install a later version, or {_LOCAL}",
        )


def transformer_engine_supports_this(draft: Draft) -> Iterator[Problem]:
    if not _is_used(draft):
        return
    if draft.config.training.device != "cuda":
        yield Problem(f"{_FLAG} requires --device cuda, and it is {draft.config.training.device}", _LOCAL)
    if draft.config.precision.params_dtype not in ("bfloat16", "float16"):
        yield Problem(
            f"{_FLAG} requires bf16 or fp16, and --params-dtype is {draft.config.precision.params_dtype}",
            f"add --bf16, or {_LOCAL}",
        )
    for feature, is_used, remedy in _unsupported(draft):
        if is_used:
            yield Problem(f"{_FLAG} does not support {feature}", f"{remedy}, or {_LOCAL}")


def _unsupported(draft: Draft) -> Iterator[tuple[str, bool, str]]:
    """Yield features that the library lacks or that depend on the layout, with True if this run uses them, and the remedy."""
    model = draft.config.model
    yield (
        f"--attention-dropout {model.attention_dropout} with equal results under every layout",
        model.attention_dropout > 0,
        "use --attention-dropout 0",
    )
    yield (
        f"--attn-logit-softcapping {model.attn_logit_softcapping} in its fused kernels",
        model.attn_logit_softcapping is not None,
        "remove --attn-logit-softcapping",
    )
    yield (
        f"--softmax-type {model.softmax_type}",
        model.softmax_type != "vanilla",
        "use --softmax-type vanilla",
    )
    yield (
        "exact GELU, the activation of this run",
        draft.derived.activation == "gelu",
        "use --swiglu, or remove --disable-bias-linear and --no-bias-gelu-fusion to use its tanh approximation",
    )
    yield (
        f"--activation-func-clamp-value {model.activation_func_clamp_value}",
        model.activation_func_clamp_value is not None,
        "remove --activation-func-clamp-value",
    )
    yield (
        f"--glu-linear-offset {model.glu_linear_offset}",
        bool(model.glu_linear_offset),
        "remove --glu-linear-offset",
    )
    yield (
        "--qk-layernorm-width all_heads, a norm over the heads of several ranks",
        model.qk_layernorm and model.qk_layernorm_width == "all_heads",
        "use --qk-layernorm-width head",
    )
    yield (
        f"--attention-backend {model.attention_backend}: it selects a kernel itself or by NVTE_FLASH_ATTN and related variables",
        model.attention_backend != "auto",
        "use --attention-backend auto, with NVTE_FLASH_ATTN, NVTE_FUSED_ATTN or NVTE_UNFUSED_ATTN=0 to exclude a kernel",
    )
    yield from _unsupported_norm_options(draft)
    num_experts = draft.config.experts.num_experts
    yield f"--num-experts {num_experts}", num_experts is not None, "remove --num-experts"
    function = layer_function(model.spec)
    yield f"custom layers (--spec {function})", function is not None, "remove --spec"
    yield from _unsupported_with_context_parallelism(draft)


def _unsupported_norm_options(draft: Draft) -> Iterator[tuple[str, bool, str]]:
    model, training = draft.config.model, draft.config.training
    yield (
        "--fp32-residual-connection: the input of its norms has the dtype of its GEMMs",
        model.fp32_residual_connection,
        "remove --fp32-residual-connection",
    )
    yield (
        "--recompute-modules layernorm: its norms always save their output",
        "layernorm" in training.recompute_modules,
        "use --recompute-modules core_attn mlp",
    )
    yield (
        "--recompute-norms: its norms always save their output",
        training.recompute_norms,
        "remove --recompute-norms",
    )


def _unsupported_with_context_parallelism(draft: Draft) -> Iterator[tuple[str, bool, str]]:
    cp = draft.config.parallel.context_parallel_size
    yield (
        f"document masks with --context-parallel-size {cp}: it splits each document over the ranks, not whole samples",
        cp > 1 and has_documents(draft),
        "remove --context-parallel-size",
    )
    yield (
        "--cp-comm-type a2a+all_gather, which also replaces a2a+p2p with sliding windows",
        "a2a+all_gather" in draft.derived.cp_comm_types,
        "use --cp-comm-type all_gather",
    )
    uneven = next((each for each in head_exchanges(draft) if each.groups % each.ranks), None)
    if uneven is not None:
        sizes = f"{uneven.ranks} ranks with {uneven.groups} query groups per tensor-parallel rank"
        yield (
            f"--cp-comm-type {uneven.comm_type} between {sizes} (layer {uneven.layer}, from 0): it does not replicate them",
            True,
            "use --cp-comm-type p2p",
        )


TRANSFORMER_ENGINE_RULES: Final[tuple[Callable[[Draft], Iterator[Problem]], ...]] = (
    transformer_engine_is_installed,
    transformer_engine_supports_this,
)
