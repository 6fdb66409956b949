"""What follows about the model: its sizes, layers and vocabulary, initial values and scales."""

from typing import Final

from megatrain.config.derive.custom_layers import is_plain_gpt_layer, layer_function
from megatrain.config.derive.layer_sizes import LayersError, LayerTable, condensed, layer_table
from megatrain.config.plan import Activation, DerivedValue, Draft
from megatrain.config.schema.model import ModelConfig
from megatrain.config.schema.values import UnresolvedError, whole

_WITHOUT_MUP: Final = "--use-mup is off"


def kv_channels(draft: Draft) -> DerivedValue:
    model = draft.config.model
    width = whole(model.hidden_size, model.num_attention_heads)
    return DerivedValue(width, f"hidden size {model.hidden_size} / {model.num_attention_heads} heads")


def ffn_hidden_size(draft: Draft) -> DerivedValue:
    model = draft.config.model
    if model.swiglu or model.geglu:
        width = int(4 * model.hidden_size * 2 / 3 / 64) * 64
        return DerivedValue(
            width, f"4 * hidden size {model.hidden_size} * 2/3, down to a multiple of 64 (gated)"
        )
    return DerivedValue(4 * model.hidden_size, f"4 * hidden size {model.hidden_size}")


def moe_ffn_hidden_size(draft: Draft) -> DerivedValue:
    if draft.config.experts.num_experts is None:
        return DerivedValue(None, "--num-experts is not given")
    return DerivedValue(draft.config.model.ffn_hidden_size, "equals --ffn-hidden-size")


def activation(draft: Draft) -> DerivedValue:
    return DerivedValue(*activation_of(draft.config.model))


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


def num_query_groups(draft: Draft) -> DerivedValue:
    model = draft.config.model
    if model.group_query_attention:
        raise UnresolvedError  # The rule `query_groups_are_given` asks for it.
    return DerivedValue(model.num_attention_heads, f"one for each of {model.num_attention_heads} heads")


def heterogeneous_layers_config_encoded_json(draft: Draft) -> DerivedValue:
    path, text = draft.config.model.heterogeneous_layers_config_path, draft.facts.layers_config
    if path is None:
        return DerivedValue(None, "--heterogeneous-layers-config-path is not given")
    if text is None:
        raise UnresolvedError  # The facts say why it could not be read.
    return DerivedValue(condensed(text), f"read from {path}")


def spec_digest(draft: Draft) -> DerivedValue:
    function = layer_function(draft.config.model.spec)
    if function is None:
        return DerivedValue(None, "--spec is not given")
    if draft.facts.custom_layers is None:
        raise UnresolvedError  # The facts say why it could not be had.
    return DerivedValue(draft.facts.custom_layers.digest, f"of {function}")


def sizes_of_layers(draft: Draft) -> DerivedValue:
    model, own = draft.config.model, draft.facts.custom_layers
    function = layer_function(model.spec)
    if function is not None:
        if own is None:
            raise UnresolvedError  # The facts say why they could not be had.
        return DerivedValue(LayerTable(own.layers), f"by --spec {function}")
    text = model.heterogeneous_layers_config_encoded_json
    try:
        table = layer_table(model, draft.config.experts)
    except LayersError:
        raise UnresolvedError from None  # The rule `layer_sizes_are_valid` reports it.
    where = model.heterogeneous_layers_config_path or "--heterogeneous-layers-config-encoded-json"
    return DerivedValue(table, "equals --num-layers" if text is None else f"by {where}")


def kv_copies(draft: Draft) -> DerivedValue:
    tp, table = draft.config.parallel.tensor_model_parallel_size, draft.derived.layer_table
    counts = {layer.num_query_groups for layer in table.layers if layer.num_heads}
    fewer = [count for count in counts if count < tp]
    groups = fewer[0] if fewer else draft.config.model.num_query_groups
    if tp <= groups or not counts:
        return DerivedValue(1, f"{groups} key and value heads for {tp} tensor ranks")
    return DerivedValue(whole(tp, groups), f"{tp} tensor ranks for {groups} key and value heads")


def mup_base_hidden_size(draft: Draft) -> DerivedValue:
    model = draft.config.model
    if not model.use_mup:
        return DerivedValue(None, _WITHOUT_MUP)
    return DerivedValue(model.hidden_size, "this model's own hidden size")


def mup_width_mult(draft: Draft) -> DerivedValue:
    model = draft.config.model
    if not model.use_mup:
        return DerivedValue(1.0, _WITHOUT_MUP)
    width, base = model.hidden_size, model.mup_base_hidden_size
    return DerivedValue(width / base, f"hidden size {width} / base hidden size {base}")


def mup_output_mult(draft: Draft) -> DerivedValue:
    model = draft.config.model
    if not model.use_mup:
        return DerivedValue(1.0, _WITHOUT_MUP)
    return DerivedValue(1.0 / model.mup_width_mult, f"1 / width multiplier {model.mup_width_mult:g}")


def scale_of_attention(draft: Draft) -> DerivedValue:
    return DerivedValue(*attention_scale(draft.config.model))


def init_std_of_matrices(draft: Draft) -> DerivedValue:
    return DerivedValue(*matrix_init_std(draft.config.model))


def vocab_size(draft: Draft) -> DerivedValue:
    given, found = draft.config.tokenizer.vocab_size, draft.facts.vocab_size
    if found is not None:
        return DerivedValue(found, "the tokenizer's")
    if given is None:
        raise UnresolvedError  # The rule `vocabulary_is_known` reports it.
    return DerivedValue(given, "--vocab-size")


def eod_id(draft: Draft) -> DerivedValue:
    if draft.facts.vocab_size is not None or draft.facts.eod_id is not None:
        reason = "the tokenizer names none" if draft.facts.eod_id is None else "the tokenizer's"
        return DerivedValue(draft.facts.eod_id, reason)
    given = draft.config.tokenizer.null_tokenizer_eod_id
    if given is not None:
        return DerivedValue(given, "--null-tokenizer-eod-id")
    return DerivedValue(draft.derived.vocab_size - 1, "the last token, as there is no tokenizer file")


def padded_vocab_size(draft: Draft) -> DerivedValue:
    vocabulary, tp = draft.derived.vocab_size, draft.config.parallel.tensor_model_parallel_size
    multiple = draft.config.model.make_vocab_size_divisible_by
    rows = padded_vocabulary(vocabulary, divisible_by=multiple, tp_size=tp)
    return DerivedValue(rows, f"{vocabulary} up to a multiple of {multiple} * tp {tp}")


def flops_per_iteration(draft: Draft) -> DerivedValue:
    tokens = draft.derived.tokens_per_iteration
    operations = training_flops(
        draft.config.model,
        draft.derived.layer_table,
        num_tokens=tokens,
        sum_of_squared_lengths=tokens * draft.config.data.seq_length,
    )
    return DerivedValue(
        operations, f"{operations / tokens:.4g} for each of {tokens} tokens, recomputation not counted"
    )


def plain_gpt_layers(draft: Draft) -> DerivedValue | None:
    words = draft.config.model.spec
    if not is_plain_gpt_layer(words):
        return None
    return DerivedValue(
        (),
        f"--spec {' '.join(words)}: a GPT layer is built from --normalization, --swiglu and their like, of the parts that"
        " --transformer-impl names",
    )


def output_multiplier_by_width(draft: Draft) -> DerivedValue | None:
    model = draft.config.model
    if not model.use_mup or model.mup_output_mult != 1 or model.mup_width_mult == 1:
        return None
    given = 1.0 / model.mup_width_mult
    return DerivedValue(
        given,
        f"--mup-output-mult 1 with --use-mup stands for 1 / width multiplier, as in Megatron-LM: {given:g}",
    )


def attention_scale(model: ModelConfig) -> tuple[float | None, str]:
    """Factor of attention's scores, None for the usual one, and why."""
    if model.softmax_scale is not None or not model.use_mup:
        return model.softmax_scale, "equals --softmax-scale"
    base, power = model.mup_base_head_dim, model.mup_attn_scale_power
    root = 1.0 if base is None else base**0.5
    said = "1" if base is None else f"sqrt(base head channels {base:g})"
    return root / model.kv_channels**power, f"{said} / kv channels {model.kv_channels} ** {power:g}"


def matrix_init_std(model: ModelConfig) -> tuple[float, str]:
    """Standard deviation of the matrices' initial values, before what the depth asks for, and why."""
    if not model.use_mup or model.mup_width_mult == 1:
        return model.init_method_std, "equals --init-method-std"
    reason = f"--init-method-std {model.init_method_std:g} / sqrt(width multiplier {model.mup_width_mult:g})"
    return model.init_method_std / model.mup_width_mult**0.5, f"muP: {reason}"


def training_flops(
    model: ModelConfig, table: LayerTable, *, num_tokens: int, sum_of_squared_lengths: int
) -> int:
    """Operations of forward and backward over documents with this many tokens and this sum of squared lengths."""
    h = model.hidden_size
    per_token, per_pair = h * model.padded_vocab_size, 0
    for layer in table.layers:
        q, k = layer.head_channels * layer.num_heads, layer.head_channels * layer.num_query_groups
        matrices = 3 if layer.is_gated else 2
        per_token += matrices * h * layer.active_width + h * (q + 2 * k) + q * h
        per_pair += q
    return 6 * (num_tokens * per_token + sum_of_squared_lengths * per_pair)


def padded_vocabulary(vocab_size: int, *, divisible_by: int, tp_size: int) -> int:
    """Rows of the embedding: the next multiple at which every tensor-parallel rank holds a multiple of `divisible_by`."""
    multiple = divisible_by * tp_size
    return -(-vocab_size // multiple) * multiple


_MOST_PERCENT: Final = 0.5
"""Of a step, that may be given for memory without being asked."""
_BYTES_PER_FLOP: Final = 600 / 4
"""FLOPs that a Hopper GPU's matrix products do while it moves a byte, both as training reaches them (docs/benchmarks.md)."""


def recompute_norms(draft: Draft) -> DerivedValue:
    training, model = draft.config.training, draft.config.model
    if draft.config.training.device != "cuda":
        return DerivedValue(False, "not on a GPU")
    if model.transformer_impl != "local":
        return DerivedValue(False, f"--transformer-impl {model.transformer_impl} keeps what its norms give")
    if model.norm_position == "post":
        return DerivedValue(False, "no norm stands before a linear layer")
    if training.recompute_granularity is not None or training.recompute_activations:
        return DerivedValue(False, "something else is computed twice")
    percent = percent_of_norms(model.hidden_size)
    said = f"about {percent:.1f} % of a step at --hidden-size {model.hidden_size}"
    if percent > _MOST_PERCENT:
        return DerivedValue(False, f"that would take {said}")
    return DerivedValue(True, f"it takes {said}, and what two norms a layer give is not kept")


def percent_of_norms(hidden_size: int) -> float:
    """Time of two norms more, of a layer's: 8 h bytes a token, beside 6 FLOPs for each of some 12 h^2 weights."""
    return 100 * 8 * hidden_size * _BYTES_PER_FLOP / (72 * hidden_size**2)
