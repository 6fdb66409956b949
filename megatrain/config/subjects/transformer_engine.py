"""`--transformer-impl transformer_engine`: the leaves that Transformer Engine supplies, and those that `local` supplies.

`local` supplies a leaf where Transformer Engine lacks an option, or where its result would depend on the layout. Both
implementations have the same parameters, so that leaves of both work together. The plan names the leaves and the reasons.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator
from typing import Final

from megatrain.config.plan import DerivedValue, Draft
from megatrain.config.registry import Notes, derives, note, unproven
from megatrain.config.subjects.attention import (
    has_documents,
    has_padding_or_bias,
    has_sinks,
    layers_with_softcap_or_dropout,
    selects_keys,
    softcap_or_dropout_flags,
)
from megatrain.config.subjects.context_parallel import head_exchanges
from megatrain.config.subjects.model_spec import activation_of

TRANSFORMER_ENGINE: Final = "transformer_engine"
_FLAG: Final = "--transformer-impl transformer_engine"
_MIN_VERSION: Final = "2.20"
"""First version with the module signatures that megatrain uses."""


@derives("derived.transformer_impl")
def transformer_impl(draft: Draft) -> DerivedValue:
    """Derive the implementation of the layers: `local` where Transformer Engine cannot run."""
    if draft.config.model.transformer_impl == "local":
        return DerivedValue("local", "--transformer-impl local")
    if why_not := _why_not(draft):
        return DerivedValue(
            "local", f"{_FLAG}: local supplies all layers, since Transformer Engine {why_not}"
        )
    return DerivedValue(TRANSFORMER_ENGINE, _FLAG)


def _why_not(draft: Draft) -> str:
    """Return why the library cannot run, to follow its name; empty: it can. A dry run does not need the library."""
    if draft.config.training.device != "cuda":
        return "needs a GPU"
    dtype = draft.config.precision.params_dtype
    if dtype not in ("bfloat16", "float16"):
        return f"is used in bf16 and fp16 only, and --params-dtype is {dtype}"
    if draft.config.precision.fp8_format is not None and not draft.config.precision.fp8_wgrad:
        return "has no FP8 with --no-fp8-wgrad"
    version = draft.facts.libraries.get(TRANSFORMER_ENGINE)
    if draft.config.training.dry_run:
        return ""
    if version is None:
        return "is not installed (pip install --no-build-isolation transformer_engine[pytorch])"
    if version_key(version) < version_key(_MIN_VERSION):
        return f"{version} is older than {_MIN_VERSION}"
    return ""


@note("nothing")
def layers_of_local(draft: Draft) -> Notes:
    """Name the leaves of `local` under --transformer-impl transformer_engine."""
    if draft.config.model.transformer_impl == "local":
        return
    if draft.derived.transformer_impl == "local":
        yield draft.origins["derived.transformer_impl"].detail
    leaves = [f"{leaf} ({reason})" for leaf, reason in local_leaves(draft).items()]
    if leaves:
        yield f"--transformer-impl transformer_engine: local supplies {', '.join(leaves)}"


@note("nothing")
def memory_is_planned_with_local(draft: Draft) -> Notes:
    if draft.config.training.dry_run and draft.derived.transformer_impl != "local":
        yield (
            "the memory plan assumes --transformer-impl local, since the activations that Transformer Engine saves are"
            " unknown without a GPU"
        )


@unproven("nothing")
def layers_of_transformer_engine(draft: Draft) -> Notes:
    if draft.derived.transformer_impl == TRANSFORMER_ENGINE:
        yield (
            "the layers of Transformer Engine are compared on GPUs only"
            " (`megatrain parity --device cuda --transformer-impl transformer_engine`)"
        )


def local_leaves(draft: Draft) -> dict[str, str]:
    """Return the leaves that `local` supplies although Transformer Engine runs, with the flags that are the reason."""
    if draft.derived.transformer_impl != TRANSFORMER_ENGINE:
        return {}
    leaves = {
        f"linear layers in {draft.config.precision.params_dtype}": _missing_in_products(draft),
        "core attention": ", ".join(why_local_attention(draft)),
        "activations": ", ".join(_missing_in_activations(draft)),
        "norms": ", ".join(_missing_in_norms(draft)),
        "norms of queries and keys": _missing_in_head_norms(draft),
        "gated delta rule": "the library has none"
        if any(layer.linear_attention for layer in draft.derived.model_spec.all_layers)
        else "",
        "experts": "their GEMMs are grouped in one kernel" if draft.derived.model_spec.routers else "",
    }
    return {leaf: reason for leaf, reason in leaves.items() if reason}


def local_fp8_layers(draft: Draft) -> str:
    """Return why linear layers of FP8 layers are those of `local`, except for routed experts; empty: they are not."""
    if draft.derived.transformer_impl != TRANSFORMER_ENGINE:
        return ""
    return ", ".join(_missing_in_norms(draft))


def why_local_attention(draft: Draft) -> Iterator[str]:
    """Yield the reasons for which core attention is that of `local`."""
    model, cp = draft.config.model, draft.config.parallel.context_parallel_size
    if model.attention_backend != "auto":
        yield f"--attention-backend {model.attention_backend}"
    if layers_with_softcap_or_dropout(draft) != "none":
        yield softcap_or_dropout_flags(draft)
    if has_padding_or_bias(draft):
        yield f"the padding of --model-family {model.model_family}"
    if selects_keys(draft):
        yield "the keys that an indexer selects"
    if has_sinks(draft):
        yield "sinks in the softmax"
    if draft.config.training.deterministic_mode:
        yield "--deterministic-mode"
    if model.multi_latent_attention and (cp > 1 or has_documents(draft)):
        yield f"--multi-latent-attention with {'context ranks' if cp > 1 else 'documents'}"
    elif cp > 1 and has_documents(draft):
        yield f"documents with --context-parallel-size {cp}"
    if "a2a+all_gather" in draft.derived.cp_comm_types:
        yield "--cp-comm-type a2a+all_gather"
    if any(each.groups % each.ranks for each in head_exchanges(draft)):
        yield f"fewer query groups than ranks with --cp-comm-type {' '.join(draft.derived.cp_comm_types)}"


def _missing_in_products(draft: Draft) -> str:
    """Return the flag with which products of linear layers overlap their communication."""
    parallel = draft.config.parallel
    is_split = parallel.sequence_parallel and parallel.tensor_model_parallel_size > 1
    are_all_fp8 = len(draft.derived.fp8_layers) == len(draft.derived.model_spec.all_layers)
    return "--tp-comm-overlap" if is_split and parallel.tp_comm_overlap and not are_all_fp8 else ""


def _missing_in_activations(draft: Draft) -> Iterator[str]:
    model, custom = draft.config.model, draft.facts.custom_layers
    if activation_of(model)[0] == "gelu":
        yield "exact GELU"
    if model.activation_func_clamp_value is not None:
        yield f"--activation-func-clamp-value {model.activation_func_clamp_value}"
    if model.glu_linear_offset:
        yield f"--glu-linear-offset {model.glu_linear_offset}"
    if custom is not None:
        yield "activations of --spec that the library lacks"


def _missing_in_norms(draft: Draft) -> Iterator[str]:
    model, training = draft.config.model, draft.config.training
    if model.fp32_residual_connection:
        yield "--fp32-residual-connection"
    if "layernorm" in training.recompute_modules:
        yield "--recompute-modules layernorm"
    elif training.recompute_norms:
        yield "--recompute-norms"


def _missing_in_head_norms(draft: Draft) -> str:
    model = draft.config.model
    is_split = model.qk_layernorm and model.qk_layernorm_width == "all_heads"
    return "--qk-layernorm-width all_heads" if is_split else ""


def version_key(version: str) -> tuple[int, ...]:
    """Return a sort key for versions such as 4.0.0b36: a beta precedes its release."""
    release, _, beta = version.partition("b")
    numbers = [int(number) for number in re.findall(r"\d+", release)[:3]]
    found = re.match(r"\d+", beta)
    return (*numbers, *[0] * (3 - len(numbers)), int(found[0]) if found else sys.maxsize)
