"""Attention: heads, positions, windows, latents (MLA), linear attention; and the features that decide its kernel and its
context-parallel communication.

documents   attention stays inside each document          sinks     extra terms in the softmax denominator
windows     a query attends to recent keys only           softcap and dropout: in one fused kernel, our own in Triton
"""

from __future__ import annotations

from collections.abc import Container, Iterator
from typing import Final, Literal

from megatrain.config.derive.patterns import PatternError, parse_layer_pattern, parse_window
from megatrain.config.derive.vision import text_length
from megatrain.config.errors import Problem
from megatrain.config.fixes import Change, divisors, multiples, use
from megatrain.config.model_spec.attention import AttentionSpec, SparseAttentionSpec
from megatrain.config.plan import DerivedValue, Draft
from megatrain.config.plan_note import PlanNote
from megatrain.config.registry import Notes, Problems, derives, note, overrides, rule
from megatrain.config.schema.tree import flag_of
from megatrain.config.schema.values import whole
from megatrain.config.subjects.model_spec import latent_sizes

EAGER_BACKENDS: Final = ("unfused", "local", "math")
"""Values of --attention-backend that mean eager attention, which stores all scores."""


@derives("model.kv_channels")
def kv_channels(draft: Draft) -> DerivedValue:
    model = draft.config.model
    latent = latent_sizes(model)
    if latent is not None:
        return DerivedValue(
            latent.head_dim,
            f"queries and keys of --multi-latent-attention: {model.qk_head_dim} + {model.qk_pos_emb_head_dim}",
        )
    width = whole(model.hidden_size, model.num_attention_heads)
    return DerivedValue(width, f"hidden size {model.hidden_size} / {model.num_attention_heads} heads")


@overrides("model.kv_channels")
def kv_channels_of_latents(draft: Draft) -> DerivedValue | None:
    """Override --kv-channels with multi-latent attention, which has channels of its own, as in Megatron-LM."""
    given, latent = draft.config.model.kv_channels, latent_sizes(draft.config.model)
    if latent is None or given == latent.head_dim:
        return None
    return DerivedValue(
        latent.head_dim,
        f"--kv-channels {given} has no effect with --multi-latent-attention, whose keys have {latent.head_dim} channels",
    )


@rule
def hidden_size_divides_over_heads(draft: Draft) -> Problems:
    model = draft.config.model
    is_divided = not (draft.is_given_or_stored("model.kv_channels") or model.multi_latent_attention)
    if is_divided and model.hidden_size % model.num_attention_heads:
        yield Problem(
            f"--hidden-size {model.hidden_size} is not divisible by --num-attention-heads {model.num_attention_heads}",
            # RoPE needs an even number of channels per head.
            use(
                draft,
                multiples("model.hidden_size", model.hidden_size, 2 * model.num_attention_heads),
                _other_heads(model.hidden_size, model.num_attention_heads),
            )
            + ", or give the channels per head with --kv-channels",
        )


def _other_heads(hidden_size: int, heads: int) -> Iterator[Change]:
    """Yield numbers of heads with an even number of channels, those near the given one first."""
    fitting = divisors("model.num_attention_heads", hidden_size // 2, 2 * heads)
    return iter(sorted(fitting, key=lambda change: abs(change["model.num_attention_heads"] - heads)))


@derives("model.num_query_groups")
def num_query_groups(draft: Draft) -> DerivedValue:
    model = draft.config.model
    if model.group_query_attention:
        return DerivedValue(1, "the default with --group-query-attention, as in Megatron-LM")
    return DerivedValue(model.num_attention_heads, f"one for each of {model.num_attention_heads} heads")


@note("result")
def all_heads_share_a_group(draft: Draft) -> Notes:
    model = draft.config.model
    if model.group_query_attention and draft.origins["model.num_query_groups"].kind == "derived":
        yield (
            "--group-query-attention without --num-query-groups: all query heads share one head of keys and values (multi-query"
            " attention), as in Megatron-LM, where 1 is the default"
        )


@rule
def query_groups_have_an_effect(draft: Draft) -> Problems:
    model = draft.config.model
    if not model.group_query_attention and model.num_query_groups != model.num_attention_heads:
        yield Problem(
            f"--num-query-groups {model.num_query_groups} has no effect without --group-query-attention"
            f" (Megatron-LM ignores it silently: it trains {model.num_attention_heads} key and value heads)",
            "remove --num-query-groups"
            + ("" if model.multi_latent_attention else " to train those, or add --group-query-attention"),
        )


@derives("derived.kv_copies")
def kv_copies(draft: Draft) -> DerivedValue:
    tp = draft.config.parallel.tensor_model_parallel_size
    mixers = [layer.attention for layer in draft.derived.model_spec.layers]
    counts = [mixer.num_query_groups for mixer in mixers if mixer is not None]
    if not counts or tp <= min(counts):
        groups = min(counts, default=draft.config.model.num_query_groups)
        return DerivedValue(1, f"{groups} key and value heads for {tp} tensor-parallel ranks")
    groups = min(counts)
    return DerivedValue(whole(tp, groups), f"{tp} tensor-parallel ranks for {groups} key and value heads")


@rule
def learned_positions_have_a_length(draft: Draft) -> Problems:
    model = draft.config.model
    if model.position_embedding_type == "learned_absolute" and model.max_position_embeddings is None:
        origin = (
            " (the default, as in Megatron-LM)" if draft.is_default("model.position_embedding_type") else ""
        )
        yield Problem(
            f"--position-embedding-type learned_absolute{origin} requires --max-position-embeddings",
            f"add --max-position-embeddings {draft.config.data.seq_length}, or use --position-embedding-type rope",
        )


@rule
def sequence_fits_the_model(draft: Draft) -> Problems:
    length, longest = text_length(draft.config), draft.config.model.max_position_embeddings
    if longest is not None and length > longest:
        yield Problem(
            f"--seq-length {length} is longer than --max-position-embeddings {longest}",
            f"use --max-position-embeddings {length}, or --seq-length {longest}",
        )


@rule
def rotary_channels_are_even(draft: Draft) -> Problems:
    model = draft.config.model
    percent = 1.0 if model.position_embedding_type == "yarn" else model.rotary_percent
    rotary_dim = int(model.kv_channels * percent)
    is_even = rotary_dim and rotary_dim % 2 == 0
    has_rope = model.position_embedding_type in ("rope", "yarn") and not model.multi_latent_attention
    if not has_rope or is_even:
        return
    if percent == 1:
        is_derived = not draft.is_given_or_stored("model.kv_channels")
        yield Problem(
            f"--kv-channels {model.kv_channels} is odd, but RoPE requires an even number of channels",
            use(draft, multiples("model.hidden_size", model.hidden_size, 2 * model.num_attention_heads))
            if is_derived
            else f"use --kv-channels {model.kv_channels + 1}",
        )
    else:
        even = (rotary_dim + 1) // 2 * 2 or 2
        yield Problem(
            f"--rotary-percent {model.rotary_percent} of --kv-channels {model.kv_channels} is {rotary_dim} channels,"
            " but RoPE requires an even number above 0",
            f"use --rotary-percent {min(even / model.kv_channels, 1.0):g}",
        )


@derives("model.rope_type")
def rope_type(draft: Draft) -> DerivedValue:
    if draft.config.model.multi_latent_attention:
        return DerivedValue("yarn", "Megatron-LM's default with --multi-latent-attention")
    return DerivedValue("rope", "--multi-latent-attention is not given")


@derives("model.yarn_original_max_position_embeddings")
def yarn_original_max_position_embeddings(draft: Draft) -> DerivedValue:
    model = draft.config.model
    if model.multi_latent_attention and model.rope_type == "yarn":
        return DerivedValue(4096, "Megatron-LM's value for --rope-type yarn")
    return DerivedValue(None, "--rope-type is not yarn")


@rule
def yarn_has_an_original_length(draft: Draft) -> Problems:
    model = draft.config.model
    is_of_latents = model.multi_latent_attention and model.rope_type == "yarn"
    if (
        is_of_latents or model.position_embedding_type == "yarn"
    ) and not model.yarn_original_max_position_embeddings:
        flag = "--rope-type" if is_of_latents else "--position-embedding-type"
        yield Problem(
            f"{flag} yarn requires --yarn-original-max-position-embeddings",
            "give the sequence length of the original training, such as --yarn-original-max-position-embeddings 4096",
        )


@rule
def layer_patterns_are_valid(draft: Draft) -> Problems:
    model = draft.config.model
    for name in ("window_attn_skip_freq", "no_rope_freq", "linear_attention_freq"):
        which = "all but every" if name == "linear_attention_freq" else "every"
        try:
            parse_layer_pattern(getattr(model, name), model.num_layers, one_means=True)
        except PatternError as error:
            yield Problem(
                f"{flag_of(name)}: {error}",
                f"give {flag_of(name)} a number N for {which} Nth layer, or a list such as {flag_of(name)} [1]*{model.num_layers - 1}+[0]",
            )


@rule
def window_is_causal(draft: Draft) -> Problems:
    model = draft.config.model
    try:
        parse_window(model.window_size)
    except PatternError as error:
        yield Problem(
            f"--window-size: {error}",
            "give the tokens to the left and 0 to the right, such as --window-size 128,0",
        )


@rule
def rotary_channels_of_latents_are_even(draft: Draft) -> Problems:
    model = draft.config.model
    if not model.multi_latent_attention:
        return
    percent = model.rotary_percent if model.rope_type == "rope" else 1.0
    channels, given = int(model.qk_pos_emb_head_dim * percent), model.qk_pos_emb_head_dim
    if channels == 0 or channels % 2:
        also = "" if percent == 1 else f" times --rotary-percent {percent} is {channels} channels"
        yield Problem(
            f"--qk-pos-emb-head-dim {given}{also}: RoPE requires an even number of channels above 0",
            f"use --qk-pos-emb-head-dim {given + given % 2}" if percent == 1 else "remove --rotary-percent",
        )


@rule
def values_are_not_wider_than_keys(draft: Draft) -> Problems:
    model, sizes = draft.config.model, latent_sizes(draft.config.model)
    if sizes is not None and sizes.v_head_dim > sizes.head_dim:
        yield Problem(
            f"--v-head-dim {model.v_head_dim} is larger than --qk-head-dim {model.qk_head_dim} +"
            f" --qk-pos-emb-head-dim {model.qk_pos_emb_head_dim}, which no attention kernel here supports",
            f"use --v-head-dim {sizes.head_dim} or less",
        )


@rule
def linear_attention_has_layers(draft: Draft) -> Problems:
    model = draft.config.model
    variant = model.experimental_attention_variant
    if (
        variant not in (None, "dsa")
        and model.linear_attention_freq is None
        and model.model_family != "hybrid"
    ):
        yield Problem(
            f"--experimental-attention-variant {variant} requires --linear-attention-freq",
            "add --linear-attention-freq 4, which leaves attention in every fourth layer",
        )


@rule
def sparse_attention_has_latents(draft: Draft) -> Problems:
    model, words = draft.config.model, "--experimental-attention-variant dsa"
    if model.experimental_attention_variant != "dsa":
        return
    if not model.multi_latent_attention:
        yield Problem(
            f"{words} needs the latents of --multi-latent-attention", "add --multi-latent-attention"
        )
    elif model.dsa_indexer_head_dim < model.qk_pos_emb_head_dim:
        yield Problem(
            f"--dsa-indexer-head-dim {model.dsa_indexer_head_dim} is smaller than --qk-pos-emb-head-dim"
            f" {model.qk_pos_emb_head_dim}, the channels of its heads that have RoPE",
            f"use --dsa-indexer-head-dim {model.qk_pos_emb_head_dim} or more",
        )
    if model.attention_backend not in ("auto", "flash", "fused", "sdpa", *EAGER_BACKENDS):
        yield Problem(
            f"--attention-backend {model.attention_backend}: this kernel does not support {words}, whose queries attend to selected keys",
            "use --attention-backend auto",
        )


@note("cost")
def sparse_attention_computes_all_scores(draft: Draft) -> Notes:
    if draft.config.model.experimental_attention_variant == "dsa":
        yield (
            "--experimental-attention-variant dsa: plain operators compute all scores and mask the keys that are not selected, so"
            " that a step takes longer than one of dense attention"
        )
        if not draft.config.model.dsa_indexer_loss_coeff:
            text = "--dsa-indexer-loss-coeff 0: the indexer keeps its weights, since its loss alone trains it"
            yield PlanNote(text, "result")


def has_documents(draft: Draft) -> bool:
    """Return whether attention stays inside each document."""
    return draft.config.data.has_documents


def has_windows(draft: Draft) -> bool:
    """Return whether some layer has a sliding window."""
    return any(mixer.window is not None for mixer in attentions(draft))


def has_sinks(draft: Draft) -> bool:
    """Return whether the softmax of some layer has a denominator term without a key."""
    return any(mixer.sink != "none" for mixer in attentions(draft))


def selects_keys(draft: Draft) -> bool:
    """Return whether queries of some layer attend to keys that an indexer selects."""
    return any(isinstance(mixer, SparseAttentionSpec) for mixer in attentions(draft))


def has_padding_or_bias(draft: Draft) -> bool:
    """Return whether some layer masks padding or adds a bias to its scores, as encoders do."""
    return any(mixer.mask == "padding" or mixer.relative is not None for mixer in attentions(draft))


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
