"""What follows about the model: its sizes, layers and vocabulary, initial values and scales."""

from typing import Final

from megatrain.config.derive.custom_layers import is_usual, layer_function
from megatrain.config.derive.flops import padded_vocabulary, training_flops
from megatrain.config.derive.layer_sizes import LayersError, LayerTable, condensed, layer_table
from megatrain.config.derive.mup import attention_scale, matrix_init_std
from megatrain.config.plan import Activation, Answer, Draft
from megatrain.config.schema.model import ModelConfig
from megatrain.config.schema.values import UnresolvedError, whole

_WITHOUT_MUP: Final = "--use-mup is off"


def kv_channels(draft: Draft) -> Answer:
    model = draft.config.model
    width = whole(model.hidden_size, model.num_attention_heads)
    return Answer(width, f"hidden size {model.hidden_size} / {model.num_attention_heads} heads")


def ffn_hidden_size(draft: Draft) -> Answer:
    model = draft.config.model
    if model.swiglu or model.geglu:
        width = int(4 * model.hidden_size * 2 / 3 / 64) * 64
        return Answer(width, f"4 * hidden size {model.hidden_size} * 2/3, down to a multiple of 64 (gated)")
    return Answer(4 * model.hidden_size, f"4 * hidden size {model.hidden_size}")


def moe_ffn_hidden_size(draft: Draft) -> Answer:
    if draft.config.experts.num_experts is None:
        return Answer(None, "--num-experts is not given")
    return Answer(draft.config.model.ffn_hidden_size, "equals --ffn-hidden-size")


def activation(draft: Draft) -> Answer:
    return Answer(*activation_of(draft.config.model))


def activation_of(model: ModelConfig) -> tuple[Activation, str]:
    """What stands between the MLP's two layers, and why."""
    if model.swiglu:
        return "swiglu", "--swiglu"
    if model.geglu:
        return "geglu_tanh", "--geglu: GELU by tanh"
    if model.quick_geglu:
        return "quick_geglu", "--quick-geglu"
    if model.squared_relu:
        return "squared_relu", "--squared-relu"
    if model.disable_bias_linear:
        return "gelu", "exact, as in Megatron-LM without biases (--disable-bias-linear)"
    if model.no_bias_gelu_fusion:
        return "gelu", "exact, as in Megatron-LM with --no-bias-gelu-fusion"
    return "gelu_tanh", "GELU by tanh, as Megatron-LM fuses it with biases"


def num_query_groups(draft: Draft) -> Answer:
    model = draft.config.model
    if model.group_query_attention:
        raise UnresolvedError  # The rule `query_groups_are_given` asks for it.
    return Answer(model.num_attention_heads, f"one for each of {model.num_attention_heads} heads")


def heterogeneous_layers_config_encoded_json(draft: Draft) -> Answer:
    path, text = draft.config.model.heterogeneous_layers_config_path, draft.facts.layers_config
    if path is None:
        return Answer(None, "--heterogeneous-layers-config-path is not given")
    if text is None:
        raise UnresolvedError  # The facts say why it could not be read.
    return Answer(condensed(text), f"read from {path}")


def spec_digest(draft: Draft) -> Answer:
    function = layer_function(draft.config.model.spec)
    if function is None:
        return Answer(None, "--spec is not given")
    if draft.facts.custom_layers is None:
        raise UnresolvedError  # The facts say why it could not be had.
    return Answer(draft.facts.custom_layers.digest, f"of {function}")


def sizes_of_layers(draft: Draft) -> Answer:
    model, own = draft.config.model, draft.facts.custom_layers
    function = layer_function(model.spec)
    if function is not None:
        if own is None:
            raise UnresolvedError  # The facts say why they could not be had.
        return Answer(LayerTable(own.layers), f"by --spec {function}")
    text = model.heterogeneous_layers_config_encoded_json
    try:
        table = layer_table(model, draft.config.experts)
    except LayersError:
        raise UnresolvedError from None  # The rule `layers_are_understood` reports it.
    where = model.heterogeneous_layers_config_path or "--heterogeneous-layers-config-encoded-json"
    return Answer(table, "equals --num-layers" if text is None else f"by {where}")


def kv_copies(draft: Draft) -> Answer:
    tp, table = draft.config.parallel.tensor_model_parallel_size, draft.derived.layer_table
    counts = {layer.num_query_groups for layer in table.layers if layer.num_heads}
    fewer = [count for count in counts if count < tp]
    groups = fewer[0] if fewer else draft.config.model.num_query_groups
    if tp <= groups or not counts:
        return Answer(1, f"{groups} key and value heads for {tp} tensor ranks")
    return Answer(whole(tp, groups), f"{tp} tensor ranks for {groups} key and value heads")


def mup_base_hidden_size(draft: Draft) -> Answer:
    model = draft.config.model
    if not model.use_mup:
        return Answer(None, _WITHOUT_MUP)
    return Answer(model.hidden_size, "this model's own hidden size")


def mup_width_mult(draft: Draft) -> Answer:
    model = draft.config.model
    if not model.use_mup:
        return Answer(1.0, _WITHOUT_MUP)
    width, base = model.hidden_size, model.mup_base_hidden_size
    return Answer(width / base, f"hidden size {width} / base hidden size {base}")


def mup_output_mult(draft: Draft) -> Answer:
    model = draft.config.model
    if not model.use_mup:
        return Answer(1.0, _WITHOUT_MUP)
    return Answer(1.0 / model.mup_width_mult, f"1 / width multiplier {model.mup_width_mult:g}")


def scale_of_attention(draft: Draft) -> Answer:
    return Answer(*attention_scale(draft.config.model))


def init_std_of_matrices(draft: Draft) -> Answer:
    return Answer(*matrix_init_std(draft.config.model))


def vocab_size(draft: Draft) -> Answer:
    given, found = draft.config.tokenizer.vocab_size, draft.facts.vocab_size
    if found is not None:
        return Answer(found, "the tokenizer's")
    if given is None:
        raise UnresolvedError  # The rule `vocabulary_is_known` reports it.
    return Answer(given, "--vocab-size")


def eod_id(draft: Draft) -> Answer:
    if draft.facts.vocab_size is not None or draft.facts.eod_id is not None:
        reason = "the tokenizer names none" if draft.facts.eod_id is None else "the tokenizer's"
        return Answer(draft.facts.eod_id, reason)
    given = draft.config.tokenizer.null_tokenizer_eod_id
    if given is not None:
        return Answer(given, "--null-tokenizer-eod-id")
    return Answer(draft.derived.vocab_size - 1, "the last token, as there is no tokenizer file")


def padded_vocab_size(draft: Draft) -> Answer:
    vocabulary, tp = draft.derived.vocab_size, draft.config.parallel.tensor_model_parallel_size
    multiple = draft.config.model.make_vocab_size_divisible_by
    rows = padded_vocabulary(vocabulary, divisible_by=multiple, tp_size=tp)
    return Answer(rows, f"{vocabulary} up to a multiple of {multiple} * tp {tp}")


def resolved_padded_vocab_size(draft: Draft) -> Answer:
    return Answer(draft.config.model.padded_vocab_size, "equals --padded-vocab-size")


def flops_per_iteration(draft: Draft) -> Answer:
    tokens = draft.derived.tokens_per_iteration
    operations = training_flops(
        draft.config.model,
        draft.derived.layer_table,
        num_tokens=tokens,
        sum_of_squared_lengths=tokens * draft.config.data.seq_length,
    )
    return Answer(
        operations, f"{operations / tokens:.4g} for each of {tokens} tokens, recomputation not counted"
    )


def plain_gpt_layers(draft: Draft) -> Answer | None:
    words = draft.config.model.spec
    if not is_usual(words):
        return None
    return Answer(
        (),
        f"--spec {' '.join(words)}: a GPT layer is built from --normalization, --swiglu and their like, of the parts that"
        " --transformer-impl names",
    )


def output_multiplier_by_width(draft: Draft) -> Answer | None:
    model = draft.config.model
    if not model.use_mup or model.mup_output_mult != 1 or model.mup_width_mult == 1:
        return None
    given = 1.0 / model.mup_width_mult
    return Answer(
        given,
        f"--mup-output-mult 1 with --use-mup stands for 1 / width multiplier, as in Megatron-LM: {given:g}",
    )
