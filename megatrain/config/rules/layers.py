"""What must hold for layers of different sizes: one small function a rule, as in `rules.py`."""

from collections.abc import Callable, Iterator
from typing import Final

from megatrain.config.derive.custom_layers import is_plain_gpt_layer, layer_function
from megatrain.config.derive.layer_sizes import LayersError, layer_table
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
            "give each layer an object such as {attention: {num_query_groups: 4}, mlp: {ffn_hidden_size: 512}}, or"
            " {no_op: true} for a part that it has not",
        )


def layers_divide_over_tp_ranks(draft: Draft) -> Problems:
    tp = draft.config.parallel.tensor_model_parallel_size
    model = draft.config.model
    if model.heterogeneous_layers_config_encoded_json is None and not model.spec:
        return  # The rules about --num-query-groups and --ffn-hidden-size hold for all layers.
    copies: dict[int, int] = {}
    for number, layer in enumerate(draft.derived.layer_table.layers):
        groups, width = layer.num_query_groups, layer.ffn_hidden_size
        where = f"{_source(draft)}: layer {number} (from 0)"
        if layer.num_heads % tp:
            yield Problem(
                f"{where} has {layer.num_heads} heads, which do not divide over --tensor-model-parallel-size {tp}",
                f"use {-(-layer.num_heads // tp) * tp}",
            )
        if layer.num_heads and layer.num_heads % groups:
            yield Problem(
                f"{where} has {groups} query groups, which do not divide its {layer.num_heads} heads",
                "use a divisor",
            )
        if layer.num_heads and groups % tp and tp % groups:
            yield Problem(
                f"{where} has {groups} query groups, which do not divide over --tensor-model-parallel-size {tp}",
                "use a multiple or a divisor of it",
            )
        elif layer.num_heads and groups < tp:
            copies.setdefault(groups, number)
        if width % tp:
            yield Problem(
                f"{where} has an MLP of width {width}, which does not divide over --tensor-model-parallel-size {tp}",
                f"use {-(-width // tp) * tp}",
            )
    if len(copies) > 1:
        said = " and ".join(f"{groups} (layer {number})" for groups, number in copies.items())
        yield Problem(
            f"{_source(draft)}: the query groups {said} are both fewer than --tensor-model-parallel-size {tp}, and key"
            " and value heads with different numbers of copies are not there yet",
            f"use --tensor-model-parallel-size {min(copies)}",
        )


def spec_names_a_function(draft: Draft) -> Problems:
    model = draft.config.model
    words = model.spec
    if not words or is_plain_gpt_layer(words):
        return
    function = layer_function(words)
    if function is None:
        yield Problem(
            f"--spec {' '.join(words)} names no function of yours",
            "give file.py:function, module:function, or module and function; of Megatron-LM's own, the GPT layers alone",
        )
    own = draft.facts.custom_layers
    if function is not None and own is not None and model.spec_digest != own.digest:
        yield Problem(
            f"--spec {function}: the file has digest {own.digest}, and --spec-digest (of the saved configuration) is"
            f" {model.spec_digest}: it has changed since",
            "use the file of that run, or leave --spec-digest out",
        )


def stages_are_not_empty(draft: Draft) -> Problems:
    pp = draft.config.parallel.pipeline_model_parallel_size
    layers = draft.derived.layer_table.layers
    size = len(layers) // pp
    for stage in range(1, pp - 1):
        own = layers[stage * size : (stage + 1) * size]
        if not any(layer.num_heads or layer.has_mlp for layer in own):
            yield Problem(
                f"{_source(draft)}: layers {stage * size} to {(stage + 1) * size - 1} (from 0) have no parts, and are all"
                f" of stage {stage} of --pipeline-model-parallel-size {pp}",
                "use fewer stages",
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
