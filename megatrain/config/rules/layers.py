"""Rules about layers with individual sizes: --heterogeneous-layers-config-path and --spec."""

from collections.abc import Callable, Iterator
from typing import Final

from megatrain.config.derive.custom_layers import is_plain_gpt_layer, layer_function
from megatrain.config.derive.layer_sizes import LayersError, layer_table
from megatrain.config.derive.pipeline import layer_ranges
from megatrain.config.errors import Problem
from megatrain.config.plan import Draft
from megatrain.config.schema.experts import ExpertsConfig

Problems = Iterator[Problem]


def layer_sizes_are_valid(draft: Draft) -> Problems:
    model = draft.config.model
    if model.heterogeneous_layers_config_encoded_json is None:
        return
    try:
        layer_table(model, ExpertsConfig())
    except LayersError as error:
        yield Problem(
            f"{_source(draft)}: {error}",
            "give each layer an object such as {attention: {num_query_groups: 4}, mlp: {ffn_hidden_size: 512}}, with"
            " {no_op: true} for a part that it does not have",
        )


def layers_divide_over_tp_ranks(draft: Draft) -> Problems:
    tp = draft.config.parallel.tensor_model_parallel_size
    model = draft.config.model
    if model.heterogeneous_layers_config_encoded_json is None and not model.spec:
        return  # The rules about --num-query-groups and --ffn-hidden-size cover all layers.
    copies: dict[int, int] = {}
    for number, layer in enumerate(draft.derived.layer_table.layers):
        groups, width = layer.num_query_groups, layer.ffn_hidden_size
        where = f"{_source(draft)}: layer {number} (from 0)"
        if layer.num_heads % tp:
            yield Problem(
                f"{where} has {layer.num_heads} heads, not divisible by --tensor-model-parallel-size {tp}",
                f"use {-(-layer.num_heads // tp) * tp} heads",
            )
        if layer.num_heads and layer.num_heads % groups:
            yield Problem(
                f"{where} has {groups} query groups, which do not divide its {layer.num_heads} heads",
                f"use a divisor of {layer.num_heads}",
            )
        if layer.num_heads and groups % tp and tp % groups:
            yield Problem(
                f"{where} has {groups} query groups, neither a multiple nor a divisor of --tensor-model-parallel-size {tp}",
                f"use a multiple or a divisor of {tp}",
            )
        elif layer.num_heads and groups < tp:
            copies.setdefault(groups, number)
        if width % tp:
            yield Problem(
                f"{where} has an MLP of width {width}, not divisible by --tensor-model-parallel-size {tp}",
                f"use a width of {-(-width // tp) * tp}",
            )
    if len(copies) > 1:
        counts = " and ".join(f"{groups} (layer {number})" for groups, number in copies.items())
        yield Problem(
            f"{_source(draft)}: the query groups {counts} are all fewer than --tensor-model-parallel-size {tp}, which would"
            " replicate key and value heads a different number of times per layer; this is not supported",
            f"use --tensor-model-parallel-size {min(copies)}",
        )


def spec_names_a_function(draft: Draft) -> Problems:
    model = draft.config.model
    words = model.spec
    if not words or is_plain_gpt_layer(words):
        return
    if layer_function(words) is None and words[0].startswith("megatron."):
        yield Problem(
            f"--spec {' '.join(words)} is not supported: of Megatron-LM's own specs only the GPT layers are",
            "remove --spec; the run then trains a GPT, which is another model",
        )
    elif layer_function(words) is None:
        yield Problem(
            f"--spec {' '.join(words)} does not name a function",
            "give file.py:function, module:function, or module and function",
        )


def stages_are_not_empty(draft: Draft) -> Problems:
    pp = draft.config.parallel.pipeline_model_parallel_size
    layers, ranges = draft.derived.layer_table.layers, layer_ranges(draft.derived.pipeline_layers)
    for stage, numbers in list(enumerate(ranges))[1:-1]:
        has_parts = stage == draft.derived.mtp_stage
        if not has_parts and not any(
            layers[number].has_mixer or layers[number].has_mlp for number in numbers
        ):
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


LAYER_RULES: Final[tuple[Callable[[Draft], Problems], ...]] = (
    layer_sizes_are_valid,
    layers_divide_over_tp_ranks,
    stages_are_not_empty,
    spec_names_a_function,
)
