"""The layers of the model, those with sizes of their own included (--heterogeneous-layers-config-path, --spec)."""

from __future__ import annotations

from itertools import chain
from typing import Final

from megatrain.config.derive.custom_layers import differences, layer_function, plain_family, values_of
from megatrain.config.derive.layer_blocks import LayersError, condensed, layer_blocks
from megatrain.config.errors import Problem
from megatrain.config.fixes import divisors, fewer_ranks, multiples, use
from megatrain.config.model_spec.attention import SparseAttentionSpec
from megatrain.config.model_spec.linear import Linear, Piece
from megatrain.config.plan import DerivedValue, Draft
from megatrain.config.registry import Notes, Problems, derives, note, overrides, rule, unproven
from megatrain.config.schema.tree import flag_of
from megatrain.config.schema.values import UnresolvedError
from megatrain.config.subjects.model_spec import spec_of_flags
from megatrain.config.subjects.packs import flags_of_packs
from megatrain.config.subjects.pipeline import layer_ranges
from megatrain.config.subjects.ranks import TP

ETP: Final = "parallel.expert_tensor_parallel_size"


@derives("model.heterogeneous_layers_config_encoded_json")
def heterogeneous_layers_config_encoded_json(draft: Draft) -> DerivedValue:
    path, text = draft.config.model.heterogeneous_layers_config_path, draft.facts.layers_config
    if path is None:
        return DerivedValue(None, "--heterogeneous-layers-config-path is not given")
    if text is None:
        raise UnresolvedError  # `data_problems` has the reason.
    return DerivedValue(condensed(text), f"read from {path}")


@rule
def layer_sizes_are_valid(draft: Draft) -> Problems:
    try:
        layer_blocks(draft.config.model)
    except LayersError as error:
        yield Problem(
            f"{_source(draft)}: {error}",
            "give each layer an object such as {attention: {num_query_groups: 4}, mlp: {ffn_hidden_size: 512}}, with"
            " {no_op: true} for a part that it does not have, or {replace_with_linear: true}",
        )


@rule
def linears_divide_over_ranks(draft: Draft) -> Problems:
    """Check that each rank can hold an equal part of each GEMM, or a copy of its heads."""
    tp, etp = draft.config.parallel.tensor_model_parallel_size, draft.derived.expert_tensor_parallel_size
    reported: set[tuple[str, int]] = set()
    for number, layer in enumerate(draft.derived.model_spec.layers):
        where = f"{_source(draft)}: layer {number} (from 0)"
        for linear in layer.linears(draft.config.model.hidden_size):
            path, ranks = (ETP, etp) if linear.num_experts else (TP, tp)
            for piece in linear.pieces if linear.split == "outputs" else ():
                if (
                    not piece.divides_over(ranks)
                    and (piece.path or linear.weight, piece.count) not in reported
                ):
                    reported.add((piece.path or linear.weight, piece.count))
                    yield _indivisible(draft, piece, linear, where, path, ranks)
            if linear.split == "inputs" and linear.inputs % ranks and not reported:
                yield Problem(
                    f"{where}: {linear.weight} has {linear.inputs} inputs, not divisible by {flag_of(path)} {ranks}",
                    f"use {-(-linear.inputs // ranks) * ranks} inputs",
                )
                return


def _indivisible(draft: Draft, piece: Piece, linear: Linear, where: str, path: str, ranks: int) -> Problem:
    """Return the problem of a piece: of its setting, or, if a layer has sizes of its own, of the layer."""
    count, flag = piece.count, flag_of(path)
    fewer = divisors(ETP, count, ranks) if path == ETP else fewer_ranks(draft, TP)
    if not piece.path or draft.config.get(piece.path) != count:
        unit = piece.unit if piece.heads else "columns"
        what = f"{count} {unit}" if piece.heads else f"{linear.writes} of width {count}"
        more = f"{-(-count // ranks) * ranks} {unit}" + (
            f" or a divisor of {ranks}" if piece.is_copied else ""
        )
        divides = "neither a multiple nor a divisor of" if piece.is_copied else "not divisible by"
        return Problem(
            f"{where} has {what}, {divides} {flag} {ranks}", f"{use(draft, fewer)}, or give it {more}"
        )
    more_of_them = multiples(piece.path, count, ranks)
    if piece.is_copied and ranks > count:
        return Problem(
            f"{flag} {ranks} is not divisible by {flag_of(piece.path)} {count}, nor the other way round",
            use(draft, fewer, chain(divisors(piece.path, ranks, count), more_of_them)),
        )
    default = ", whose default is --tensor-model-parallel-size" if path == ETP else ""
    return Problem(
        f"{flag_of(piece.path)} {count} is not divisible by {flag} {ranks}{default}",
        use(draft, fewer, more_of_them),
    )


@rule
def query_groups_fit_the_heads_of_layers(draft: Draft) -> Problems:
    """Check the groups of layers with sizes of their own, and that all layers have the same number of copies."""
    model, tp = draft.config.model, draft.config.parallel.tensor_model_parallel_size
    copies: dict[int, int] = {}
    for number, layer in enumerate(draft.derived.model_spec.layers):
        if layer.attention is None:
            continue
        heads, groups = layer.attention.num_heads, layer.attention.num_query_groups
        is_of_flags = (heads, groups) == (model.num_attention_heads, model.num_query_groups)
        if heads % groups and not is_of_flags:
            yield Problem(
                f"{_source(draft)}: layer {number} (from 0) has {groups} query groups, which do not divide its {heads} heads",
                f"use a divisor of {heads}",
            )
        if groups < tp and tp % groups == 0:
            copies.setdefault(groups, number)
    if len(copies) > 1:
        counts = " and ".join(f"{groups} (layer {number})" for groups, number in copies.items())
        yield Problem(
            f"{_source(draft)}: the query groups {counts} are all fewer than --tensor-model-parallel-size {tp}, which would"
            " replicate key and value heads a different number of times per layer; this is not supported",
            f"use --tensor-model-parallel-size {min(copies)}",
        )


@rule
def parts_read_whole_samples(draft: Draft) -> Problems:
    """Some mixers pass no state between context ranks, nor stop at the end of a document."""
    data, cp = draft.config.data, draft.config.parallel.context_parallel_size
    parts = (part for layer in draft.derived.model_spec.layers for part in layer.parts)
    kinds = dict.fromkeys(type(part) for part in parts if part.needs_whole_samples)
    names = ("reset_attention_mask", "dataloader_inter_document_masking", "sft")
    given = [*(flag_of(name) for name in names if getattr(data, name)), *flags_of_packs(draft.config)]
    for kind in kinds:
        is_sparse = issubclass(kind, SparseAttentionSpec)
        words = "--experimental-attention-variant dsa" if is_sparse else f"--spec: {kind.__name__}"
        if cp > 1:
            yield Problem(
                f"{words} is not supported together with --context-parallel-size {cp}: it reads whole samples, and does not split them over context ranks",
                "use --context-parallel-size 1; --sequence-parallel splits the rest of a layer",
            )
        if given:
            yield Problem(
                f"{words} is not supported together with {' and '.join(given)}: it reads whole samples, and does not stop at the end of a document",
                f"remove {' and '.join(given)}",
            )


@rule
def stages_are_not_empty(draft: Draft) -> Problems:
    pp = draft.config.parallel.pipeline_model_parallel_size
    layers, ranges = draft.derived.model_spec.layers, layer_ranges(draft.derived.pipeline_layers)
    for stage, numbers in list(enumerate(ranges))[1:-1]:
        has_parts = stage == draft.derived.mtp_stage or any(draft.derived.tower_layers[stage : stage + 1])
        if not has_parts and not any(layers[number].parts for number in numbers):
            yield Problem(
                f"{_source(draft)}: stage {stage} of --pipeline-model-parallel-size {pp} has only layers without parts,"
                f" {numbers.start} to {numbers.stop - 1} (from 0)",
                "use a smaller --pipeline-model-parallel-size",
            )


def _source(draft: Draft) -> str:
    path, spec = draft.config.model.heterogeneous_layers_config_path, draft.config.model.spec
    if spec:
        return f"--spec {' '.join(spec)}"
    return path or "--heterogeneous-layers-config-encoded-json"


@rule
def spec_names_a_function(draft: Draft) -> Problems:
    model = draft.config.model
    words = model.spec
    if not words or plain_family(words) is not None:
        return
    if layer_function(words) is None and words[0].startswith("megatron."):
        yield Problem(
            f"--spec {' '.join(words)} is not supported: of Megatron-LM's own specs only the plain layers of GPT and hybrids are",
            "remove --spec; flags then describe the layers, of another model",
        )
    elif layer_function(words) is None:
        yield Problem(
            f"--spec {' '.join(words)} does not name a function",
            "give file.py:function, module:function, or module and function",
        )


@rule
def custom_layers_go_on(draft: Draft) -> Problems:
    """A resumed run computes the layers of its checkpoint, and takes no code from there."""
    stored = draft.facts.checkpoint
    if stored is None or stored.is_start or draft.config.model.spec:
        return
    function = layer_function(stored.config.get("model", {}).get("spec", ()))
    if function is not None:
        yield Problem(
            f"{stored.path}: its model has custom layers of {function}, and no code is run that only a checkpoint names",
            f"add --spec {function} if you trust that code, or start from the weights alone: --finetune",
        )


@rule
def spec_is_of_the_family(draft: Draft) -> Problems:
    words, family = draft.config.model.spec, draft.config.model.model_family
    if _names_layers_of_others(draft):
        yield Problem(
            f"--spec {' '.join(words)} names layers of --model-family {plain_family(words)}, and the family is {family}",
            f"use --model-family {plain_family(words)}, or remove --spec",
        )


def _names_layers_of_others(draft: Draft) -> bool:
    """Return whether --spec names layers of hybrids for another family, or those of a GPT for a hybrid."""
    words, family = draft.config.model.spec, draft.config.model.model_family
    named = plain_family(words) if words else None
    return named is not None and (named == "hybrid") != (family == "hybrid")


@overrides("model.spec")
def plain_layers(draft: Draft) -> DerivedValue | None:
    """Override a --spec that names Megatron-LM's plain layers of the family: flags describe these here."""
    words, model = draft.config.model.spec, draft.config.model
    if not words or plain_family(words) is None or _names_layers_of_others(draft):
        return None
    described = "flags such as --normalization and --swiglu describe the GPT layer"
    if model.model_family == "hybrid":
        described = "--hybrid-layer-pattern describes the layers"
    return DerivedValue(
        (), f"--spec {' '.join(words)}: {described}, and --transformer-impl names the implementation"
    )


@note("result")
def custom_layers_are_used(draft: Draft) -> Notes:
    function, digest = layer_function(draft.config.model.spec), draft.config.model.spec_digest
    if function is not None:
        own, of_flags = (values_of(spec.layers) for spec in (draft.derived.model_spec, spec_of_flags(draft)))
        found = differences(own, of_flags, "by the flags")
        differences_text = "; ".join(found) or "the same as the flags describe"
        yield f"--spec {function} (digest {digest}) defines the layers: {differences_text}"


@unproven("nothing")
def custom_layers(draft: Draft) -> Notes:
    function = layer_function(draft.config.model.spec)
    if function is not None:
        yield f"the layers of --spec {function} have no row in `megatrain parity`"
