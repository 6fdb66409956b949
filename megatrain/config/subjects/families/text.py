"""Rules of the families of models: what BERT, T5 and hybrids have no counterpart for, and what is missing for them."""

import math
from typing import Final

from megatrain.config.derive.hybrid_pattern import LETTERS, SIDE_BY_SIDE, HybridPattern, parse_hybrid_pattern
from megatrain.config.derive.patterns import PatternError
from megatrain.config.errors import Problem
from megatrain.config.model_spec.delta_rule import LinearAttentionSpec
from megatrain.config.model_spec.mamba import MambaSpec
from megatrain.config.model_spec.part import MAX_SCAN_STATE
from megatrain.config.plan import Draft
from megatrain.config.registry import Notes, Problems, note, rule
from megatrain.config.schema.data import MASKED_FAMILIES

_SHORTEST: Final = {"bert": 5, "t5": 4}
"""Fewest tokens of a sample: two of text, and the special ones."""
_PATTERN: Final = "M-M-M-M-"
"""A pattern that needs no other flag."""
_MEANINGS: Final = ", ".join(
    f"{letter} {part}"
    for letter, part in {**LETTERS, SIDE_BY_SIDE: "Mamba-2 and attention side by side"}.items()
    if letter != "D"  # known to Megatron-LM, and refused
)


@rule
def pattern_is_of_a_hybrid(draft: Draft) -> Problems:
    model = draft.config.model
    is_hybrid, text = model.model_family == "hybrid", model.hybrid_layer_pattern
    if text is not None and not is_hybrid:
        yield Problem(
            f"--hybrid-layer-pattern {text} names the layers of a hybrid, and --model-family is {model.model_family}",
            "use --model-family hybrid, or remove --hybrid-layer-pattern",
        )
    if not is_hybrid:
        return
    if text is None:
        shares = f"--hybrid-attention-ratio {model.hybrid_attention_ratio} and --hybrid-mlp-ratio {model.hybrid_mlp_ratio}"
        yield Problem(
            f"--model-family hybrid has no --hybrid-layer-pattern, and {shares} of --num-layers give none",
            f"use --hybrid-layer-pattern {_PATTERN}, or another one",
        )
        return
    try:
        pattern = parse_hybrid_pattern(text)
    except PatternError as error:
        yield Problem(
            f"--hybrid-layer-pattern: {error}",
            f"use --hybrid-layer-pattern {_PATTERN}, or other letters: {_MEANINGS}",
        )
        return
    if not pattern.layers:
        yield Problem(
            f"--hybrid-layer-pattern '{text}' has no layers",
            f"use --hybrid-layer-pattern M{text}, or write a letter for each layer",
        )
        return
    yield from _letters_without_their_part(draft, pattern, text)
    if pattern.counts["M"] or SIDE_BY_SIDE in text:
        yield from _groups_of_mamba(draft)
    yield from _settings_besides_the_pattern(draft, pattern)


def _letters_without_their_part(draft: Draft, pattern: HybridPattern, text: str) -> Problems:
    model, experts, has = draft.config.model, draft.config.experts, pattern.counts
    if has["D"]:
        yield Problem(
            "--hybrid-layer-pattern has DeepSeek sparse attention (D), which is not supported",
            f"use --hybrid-layer-pattern {text.replace('D', '+')}, whose multi-latent attention (+) reads all tokens",
        )
    if has["E"] and experts.num_experts is None:
        yield Problem(
            "--hybrid-layer-pattern has experts (E), and --num-experts is not given", "add --num-experts 8"
        )
    if has["*"] and model.multi_latent_attention:
        yield Problem(
            "--hybrid-layer-pattern has attention (*) with --multi-latent-attention",
            "use multi-latent attention (+), or remove --multi-latent-attention",
        )
    if SIDE_BY_SIDE in text and (model.multi_latent_attention or model.norm_position != "pre"):
        flag = "--multi-latent-attention" if model.multi_latent_attention else "--norm-position"
        yield Problem(
            f"--hybrid-layer-pattern has Mamba-2 and attention side by side (P) with {flag}",
            f"use --hybrid-layer-pattern {text.replace(SIDE_BY_SIDE, 'M+' if model.multi_latent_attention else 'M*')}, or remove {flag}",
        )


def _groups_of_mamba(draft: Draft) -> Problems:
    model = draft.config.model
    heads, groups, width = model.mamba_num_heads, model.mamba_num_groups, 2 * model.hidden_size
    if heads is not None and heads % groups:
        yield Problem(
            f"--mamba-num-heads {heads} is not divisible by --mamba-num-groups {groups}",
            f"use --mamba-num-groups {math.gcd(heads, groups)}",
        )
    if heads is None and width % (model.mamba_head_dim * groups):
        more = max(1, width // (model.mamba_head_dim * groups)) * groups
        yield Problem(
            f"2 * --hidden-size {model.hidden_size} is not divisible by --mamba-head-dim {model.mamba_head_dim} *"
            f" --mamba-num-groups {groups}",
            f"use --mamba-num-heads {more}, or another --mamba-head-dim",
        )


def _settings_besides_the_pattern(draft: Draft, pattern: HybridPattern) -> Problems:
    model = draft.config.model
    depths = model.mtp_num_layers or 0
    if depths != pattern.num_depths:
        yield Problem(
            f"--hybrid-layer-pattern has {pattern.num_depths} depths of multi-token prediction (/), and"
            f" --mtp-num-layers is {depths}",
            "write / and the layers of a depth as often as --mtp-num-layers says, or remove --mtp-num-layers",
        )


@rule
def context_ranks_have_one_stack(draft: Draft) -> Problems:
    family, cp = draft.config.model.model_family, draft.config.parallel.context_parallel_size
    if family == "t5" and cp > 1:
        yield Problem(
            f"--context-parallel-size {cp} is not supported with --model-family t5: the samples of its two stacks are split"
            " over no context ranks",
            "use --context-parallel-size 1; --tensor-model-parallel-size with --sequence-parallel splits samples, too",
        )


@rule
def decoder_has_a_length(draft: Draft) -> Problems:
    model, parallel, length = draft.config.model, draft.config.parallel, draft.config.data.seq_length
    if model.model_family != "t5":
        return
    if model.decoder_seq_length is None:
        yield Problem(
            "--model-family t5 requires --decoder-seq-length",
            f"add --decoder-seq-length {max(length // 4, 1)}, or the length of the decoder's samples",
        )
        return
    tp, positions = parallel.tensor_model_parallel_size, model.max_position_embeddings
    if parallel.sequence_parallel and model.decoder_seq_length % tp:
        yield Problem(
            f"--decoder-seq-length {model.decoder_seq_length} is not divisible by --tensor-model-parallel-size {tp},"
            " over which --sequence-parallel splits it",
            f"use --decoder-seq-length {math.ceil(model.decoder_seq_length / tp) * tp}, or remove --sequence-parallel",
        )
    is_learned = model.position_embedding_type == "learned_absolute"
    if is_learned and positions is not None and model.decoder_seq_length > positions:
        yield Problem(
            f"--decoder-seq-length {model.decoder_seq_length} exceeds --max-position-embeddings {positions}",
            f"use --max-position-embeddings {model.decoder_seq_length}",
        )


@note("result")
def stacks_are_equally_deep(draft: Draft) -> Notes:
    model = draft.config.model
    if model.model_family == "t5" and model.decoder_num_layers not in (None, model.num_layers):
        yield (
            f"--decoder-num-layers {model.decoder_num_layers} has no effect, as in Megatron-LM: both stacks of T5 have the"
            f" {model.num_layers} layers of --encoder-num-layers"
        )


@note("result")
def encoders_have_experts(draft: Draft) -> Notes:
    family, experts = draft.config.model.model_family, draft.config.experts.num_experts
    if family in MASKED_FAMILIES and experts:
        yield (
            f"--num-experts {experts} with --model-family {family}: layers have experts, while Megatron-LM's of BERT and T5"
            " are dense with this flag, too"
        )


@rule
def cross_attention_has_all_heads(draft: Draft) -> Problems:
    model = draft.config.model
    if model.model_family == "t5" and model.num_query_groups != model.num_attention_heads:
        yield Problem(
            f"--num-query-groups {model.num_query_groups} is not supported with cross-attention, as in Megatron-LM",
            "remove --group-query-attention and --num-query-groups",
        )


@rule
def relative_positions_are_of_t5(draft: Draft) -> Problems:
    model = draft.config.model
    if model.position_embedding_type != "relative":
        return
    if model.model_family != "t5":
        yield Problem(
            f"--position-embedding-type relative is not supported with --model-family {model.model_family}, as in"
            " Megatron-LM",
            "use --position-embedding-type rope, or --model-family t5",
        )
    exact = model.relative_attention_num_buckets // 2
    if model.relative_attention_max_distance <= exact:
        yield Problem(
            f"--relative-attention-max-distance {model.relative_attention_max_distance} is not above {exact}, half of"
            f" --relative-attention-num-buckets {model.relative_attention_num_buckets}",
            f"use --relative-attention-max-distance {exact + 1} or more",
        )


@rule
def samples_hold_text(draft: Draft) -> Problems:
    family, length = draft.config.model.model_family, draft.config.data.seq_length
    if length < _SHORTEST.get(family, 0):
        yield Problem(
            f"--seq-length {length} is too short for samples of --model-family {family}, which have special tokens",
            f"use --seq-length {_SHORTEST[family]} or more",
        )


@note("result")
def documents_are_not_split_into_sentences(draft: Draft) -> Notes:
    """Yield a note for each dataset whose documents are one sentence, longer than a sample: most of it would be left out unseen."""
    model, length = draft.config.model, draft.config.data.seq_length
    if model.model_family not in MASKED_FAMILIES or (
        model.model_family == "bert" and not model.bert_no_binary_head
    ):
        return  # the order of sentences needs two of them: building the samples says so
    for one in draft.facts.datasets:
        if 0 < one.num_sequences == one.num_documents and one.num_tokens > one.num_documents * length:
            yield (
                f"{one.prefix}: its documents are not split into sentences, and a sample has at most {length} tokens of one: each"
                f" epoch leaves out {1 - one.num_documents * length / one.num_tokens:.0%} of the tokens or more. Make the data"
                " again with preprocess_data.py --split-sentences"
            )


@note("result")
def word_pieces_are_of_other_families(draft: Draft) -> Notes:
    """Megatron-LM's command lines leave the family to the program: alone they would train a GPT unseen."""
    kind = draft.config.tokenizer.tokenizer_type or ""
    if kind.startswith("BertWordPiece") and not draft.is_given_or_stored("model.model_family"):
        yield (
            f"--tokenizer-type {kind} splits text as BERT and T5 do, and this run trains a GPT: --model-family bert or t5, and"
            " pretrain_bert.py and pretrain_t5.py in scripts/megatron, train the other families"
        )


@note("cost")
def scans_without_kernels(draft: Draft) -> Notes:
    """Yield a note for scans that torch operators compute on GPUs."""
    if draft.config.training.device != "cuda":
        return
    parts = [part for layer in draft.derived.model_spec.all_layers for part in layer.parts]
    deltas = [part for part in parts if isinstance(part, LinearAttentionSpec)]
    if any(part.has_channel_gates for part in deltas):
        yield "--experimental-attention-variant gdn2 has no kernels: torch operators take hundreds of times as long as the kernels of gated_delta_net"
    states = {
        ("--mamba-head-dim * --mamba-state-dim", part.head_dim * part.state_dim)
        for part in parts
        if isinstance(part, MambaSpec)
    }
    states |= {
        ("--linear-key-head-dim * --linear-value-head-dim", part.key_head_dim * part.value_head_dim)
        for part in deltas
    }
    for flags, size in sorted(states):
        if size > MAX_SCAN_STATE:
            yield f"{flags} is {size}: above {MAX_SCAN_STATE} scans have no kernels, and torch operators take many times as long"
