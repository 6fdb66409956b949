"""Rules about the model: MLP, position embeddings, attention windows, norms, muP, recomputation."""

from collections.abc import Callable, Iterator
from typing import Final

from megatrain.config.derive.attention_backend import attention_backend_is_there, attention_has_a_kernel
from megatrain.config.derive.patterns import PatternError, parse_layer_pattern, parse_window
from megatrain.config.errors import Problem
from megatrain.config.fixes import multiples, use
from megatrain.config.plan import Draft
from megatrain.config.schema.tree import flag_of

Problems = Iterator[Problem]

_DENSE_MODULES: Final = ("core_attn", "mlp", "layernorm", "mla_up_proj")
EXPERT_MODULES: Final = ("moe", "shared_experts", "moe_act")


def mlp_has_one_activation(draft: Draft) -> Problems:
    model = draft.config.model
    names = ("swiglu", "geglu", "quick_geglu", "squared_relu")
    given = [flag_of(name) for name in names if getattr(model, name)]
    if len(given) > 1:
        yield Problem(f"{' and '.join(given)} each select the activation of the MLP", "give one of them")


def clamp_is_of_quick_geglu(draft: Draft) -> Problems:
    model = draft.config.model
    if model.activation_func_clamp_value is not None and not model.quick_geglu:
        yield Problem(
            f"--activation-func-clamp-value {model.activation_func_clamp_value} has no effect without --quick-geglu,"
            " as in Megatron-LM",
            "remove --activation-func-clamp-value, or add --quick-geglu",
        )


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


def mtp_has_relative_positions(draft: Draft) -> Problems:
    model = draft.config.model
    if model.mtp_num_layers and model.position_embedding_type == "learned_absolute":
        yield Problem(
            f"--mtp-num-layers {model.mtp_num_layers} is not supported with --position-embedding-type learned_absolute, as in"
            " Megatron-LM",
            "use --position-embedding-type rope, or remove --mtp-num-layers",
        )


def yarn_has_an_original_length(draft: Draft) -> Problems:
    model = draft.config.model
    if model.position_embedding_type == "yarn" and model.yarn_original_max_position_embeddings is None:
        yield Problem(
            "--position-embedding-type yarn requires --yarn-original-max-position-embeddings",
            "give the maximum sequence length of the original training, such as"
            " --yarn-original-max-position-embeddings 4096",
        )


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


def layer_patterns_are_valid(draft: Draft) -> Problems:
    model = draft.config.model
    for name in ("window_attn_skip_freq", "no_rope_freq"):
        text = getattr(model, name)
        try:
            parse_layer_pattern(text, model.num_layers, one_means=True)
        except PatternError as error:
            yield Problem(
                f"{flag_of(name)}: {error}",
                f"give {flag_of(name)} a number N for every Nth layer, or a list such as {flag_of(name)} [1]*{model.num_layers - 1}+[0]",
            )


def window_is_causal(draft: Draft) -> Problems:
    model = draft.config.model
    try:
        parse_window(model.window_size)
    except PatternError as error:
        yield Problem(
            f"--window-size: {error}",
            "give the tokens to the left and 0 to the right, such as --window-size 128,0",
        )


def all_heads_norm_is_rms(draft: Draft) -> Problems:
    model = draft.config.model
    is_whole = model.qk_layernorm and model.qk_layernorm_width == "all_heads"
    if is_whole and model.normalization != "RMSNorm":
        yield Problem(
            f"--qk-layernorm-width all_heads is not supported together with --normalization {model.normalization}",
            "use --normalization RMSNorm, or --qk-layernorm-width head",
        )


def mup_width_mult_matches_sizes(draft: Draft) -> Problems:
    model = draft.config.model
    if not model.use_mup:
        return
    base = model.mup_base_hidden_size
    if base is None:
        yield Problem(
            "--mup-base-hidden-size none gives --use-mup no base model",
            "remove --mup-base-hidden-size, or give a size",
        )
    elif model.mup_width_mult != model.hidden_size / base:
        yield Problem(
            f"--mup-width-mult {model.mup_width_mult:g} is not equal to --hidden-size {model.hidden_size} /"
            f" --mup-base-hidden-size {base} (Megatron-LM ignores it silently)",
            f"remove it, or use --mup-width-mult {model.hidden_size / base:g}",
        )


def recomputation_is_complete(draft: Draft) -> Problems:
    training = draft.config.training
    kind, method, layers = (
        training.recompute_granularity,
        training.recompute_method,
        training.recompute_num_layers,
    )
    if kind == "full" and training.moe_layer_recompute:
        yield Problem(
            "--recompute-granularity full contradicts --moe-layer-recompute, which is selective",
            "remove one of them",
        )
    if kind == "full" and training.recompute_activations:
        yield Problem(
            "--recompute-granularity full contradicts --recompute-activations, which is selective",
            "remove one of them",
        )
    if kind == "full" and (method is None or layers is None):
        missing = " and ".join(
            flag
            for flag, value in (("--recompute-method", method), ("--recompute-num-layers", layers))
            if value is None
        )
        yield Problem(
            f"--recompute-granularity full requires {missing}",
            "add --recompute-method uniform --recompute-num-layers 1, which recomputes every layer",
        )


def recompute_modules_are_supported(draft: Draft) -> Problems:
    training = draft.config.training
    known = (*_DENSE_MODULES, *EXPERT_MODULES)
    unknown = [name for name in training.recompute_modules if name not in known]
    if unknown:
        yield Problem(
            f"--recompute-modules {' '.join(unknown)} is not supported",
            f"use one or more of --recompute-modules {' '.join(known)}",
        )


MODEL_RULES: Final[tuple[Callable[[Draft], Problems], ...]] = (
    mlp_has_one_activation,
    clamp_is_of_quick_geglu,
    learned_positions_have_a_length,
    mtp_has_relative_positions,
    yarn_has_an_original_length,
    rotary_channels_are_even,
    layer_patterns_are_valid,
    window_is_causal,
    all_heads_norm_is_rms,
    mup_width_mult_matches_sizes,
    recomputation_is_complete,
    recompute_modules_are_supported,
    attention_backend_is_there,
    attention_has_a_kernel,
)
