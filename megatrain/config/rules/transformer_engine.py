"""What `--transformer-impl transformer_engine` asks for: the library, a GPU, 16 bits, and layers that it can compute.

Nothing is done by `local` in its place: what the library does not have is a problem with what to use.
"""

from collections.abc import Callable, Iterator
from typing import Final

from megatrain.config.derive.attention_backend import version_key
from megatrain.config.derive.attention_features import has_documents
from megatrain.config.derive.context_parallel import head_exchanges
from megatrain.config.derive.custom_layers import layer_function
from megatrain.config.errors import Problem
from megatrain.config.plan import Draft

_ASKED: Final = "--transformer-impl transformer_engine"
_LOCAL: Final = "use --transformer-impl local"
_LIBRARY: Final = "transformer_engine"
_OLDEST: Final = "2.20"
"""Its modules are called as this version takes it."""


def is_asked_for(draft: Draft) -> bool:
    return draft.config.model.transformer_impl == _LIBRARY


def transformer_engine_is_installed(draft: Draft) -> Iterator[Problem]:
    """Plans of other machines do without it."""
    if not is_asked_for(draft) or draft.config.training.dry_run:
        return
    version = draft.facts.libraries.get(_LIBRARY)
    if version is None:
        yield Problem(
            f"{_ASKED}: Transformer Engine is not installed",
            f"install it (pip install --no-build-isolation transformer_engine[pytorch], which is built for this CUDA), or {_LOCAL}",
        )
    elif version_key(version) < version_key(_OLDEST):
        yield Problem(
            f"{_ASKED}: Transformer Engine {version} is installed, and {_OLDEST} or later is needed",
            f"install a later one, or {_LOCAL}",
        )


def transformer_engine_supports_this(draft: Draft) -> Iterator[Problem]:
    if not is_asked_for(draft):
        return
    if draft.config.training.device != "cuda":
        yield Problem(f"{_ASKED} computes on GPUs, and this run on {draft.config.training.device}", _LOCAL)
    if draft.config.precision.params_dtype not in ("bfloat16", "float16"):
        yield Problem(
            f"{_ASKED} computes in bf16 or fp16, and this run in {draft.config.precision.params_dtype}",
            f"add --bf16, or {_LOCAL}",
        )
    for said, is_used, instead in _missing(draft):
        if is_used:
            yield Problem(f"{_ASKED} does not have {said}", f"{instead}, or {_LOCAL}")


def _missing(draft: Draft) -> Iterator[tuple[str, bool, str]]:
    """What it lacks, or has in a way that depends on the layout: whether it is used, and what to use instead."""
    model, training = draft.config.model, draft.config.training
    yield (
        f"--attention-dropout {model.attention_dropout} that is the same under every layout",
        model.attention_dropout > 0,
        "use --attention-dropout 0",
    )
    yield (
        f"--attn-logit-softcapping {model.attn_logit_softcapping} in its fused kernels",
        model.attn_logit_softcapping is not None,
        "leave it out",
    )
    yield (
        f"--softmax-type {model.softmax_type} here",
        model.softmax_type != "vanilla",
        "use --softmax-type vanilla",
    )
    yield (
        "exact GELU, which this run has without --swiglu and its like",
        draft.derived.activation == "gelu",
        "leave out what asks for it (--disable-bias-linear or --no-bias-gelu-fusion: GELU by tanh is there)",
    )
    yield (
        f"--activation-func-clamp-value {model.activation_func_clamp_value}",
        model.activation_func_clamp_value is not None,
        "leave it out",
    )
    yield f"--glu-linear-offset {model.glu_linear_offset}", bool(model.glu_linear_offset), "leave it out"
    yield (
        "--qk-layernorm-width all_heads, a norm over heads of several ranks",
        model.qk_layernorm and model.qk_layernorm_width == "all_heads",
        "use --qk-layernorm-width head",
    )
    yield (
        "--fp32-residual-connection: its norms read what its products compute in",
        model.fp32_residual_connection,
        "leave it out",
    )
    yield (
        "--recompute-modules layernorm: its norms keep what they give",
        "layernorm" in training.recompute_modules,
        "use --recompute-modules core_attn mlp",
    )
    yield "--recompute-norms: its norms keep what they give", training.recompute_norms, "leave it out"
    yield (
        f"--attention-backend {model.attention_backend}: it chooses itself, or by NVTE_FLASH_ATTN and its like",
        model.attention_backend != "auto",
        "use --attention-backend auto, with NVTE_FLASH_ATTN, NVTE_FUSED_ATTN or NVTE_UNFUSED_ATTN=0 against a kernel",
    )
    num_experts = draft.config.experts.num_experts
    yield f"--num-experts {num_experts} here", num_experts is not None, "leave it out"
    own = layer_function(model.spec)
    yield f"layers of one's own (--spec {own})", own is not None, "leave --spec out"
    yield from _missing_over_context_ranks(draft)


def _missing_over_context_ranks(draft: Draft) -> Iterator[tuple[str, bool, str]]:
    cp = draft.config.parallel.context_parallel_size
    documents = (
        f"documents in attention with --context-parallel-size {cp}: it divides each of them over the ranks"
    )
    yield (
        f"{documents}, which hold parts of whole samples here",
        cp > 1 and has_documents(draft),
        "leave --context-parallel-size out",
    )
    yield (
        "--cp-comm-type a2a+all_gather, which windows make of a2a+p2p, too",
        "a2a+all_gather" in draft.derived.cp_comm_types,
        "use --cp-comm-type all_gather",
    )
    few = next((one for one in head_exchanges(draft) if one.groups % one.ranks), None)
    if few is not None:
        said = f"--cp-comm-type {few.comm_type} between {few.ranks} ranks with {few.groups} query groups on each tensor rank"
        yield (
            f"{said} (layer {few.layer}, from 0): it copies no keys and values",
            True,
            "use --cp-comm-type p2p",
        )


TRANSFORMER_ENGINE_RULES: Final[tuple[Callable[[Draft], Iterator[Problem]], ...]] = (
    transformer_engine_is_installed,
    transformer_engine_supports_this,
)
