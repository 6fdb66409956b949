"""The model apart from attention and experts: MLP, muP, dropout, FLOPs, recomputation.

Maximal update parametrization (muP) with m = hidden size / base hidden size, as in Megatron-LM (core 0.20.0):

                       initial values   Adam             SGD       forward
    matrices           std / sqrt(m)    lr / m, eps / m  lr
    vectors, tables    std              lr               lr * m    embedding output * embedding multiplier
    untied output      std              lr / m, eps / m  lr        logits * output multiplier, 1 / m
    attention                                                      scores * sqrt(base head channels) / channels ** power

A --decoupled-lr is not scaled. Source: Yang et al., arXiv:2203.03466, table 8, which has lr instead of lr / m for an
untied output layer with Adam.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

from megatrain.config.derive.vision import rank_length, sample_length
from megatrain.config.errors import Problem
from megatrain.config.plan import DerivedValue, Draft
from megatrain.config.registry import Notes, Problems, derives, note, overrides, rule
from megatrain.config.schema.tree import flag_of
from megatrain.config.subjects.model_spec import given_activations, output_multiplier

_WITHOUT_MUP: Final = "--use-mup is off"
_MAX_PERCENT: Final = 0.5
"""Largest part of a step that the recomputation of norms, and that of activations, may take by default."""
_FLOPS_PER_BYTE: Final = 600 / 4
"""Matrix FLOPs of a Hopper GPU in the time of moving a byte, both at the rates of training (docs/benchmarks.md)."""
CHUNK_TOKENS: Final = 1 << 14
"""Tokens of a chunk of an MLP; sums of weight gradients then take about 1 % of its time."""
_EXPERT_MODULES: Final = ("moe", "shared_experts", "moe_act", "expert_fc1")


@derives("model.ffn_hidden_size")
def ffn_hidden_size(draft: Draft) -> DerivedValue:
    model = draft.config.model
    if model.swiglu or model.geglu:
        width = int(4 * model.hidden_size * 2 / 3 / 64) * 64
        return DerivedValue(
            width, f"4 * hidden size {model.hidden_size} * 2/3, down to a multiple of 64 (gated)"
        )
    return DerivedValue(4 * model.hidden_size, f"4 * hidden size {model.hidden_size}")


@rule
def ffn_size_is_positive(draft: Draft) -> Problems:
    model = draft.config.model
    if model.ffn_hidden_size == 0:
        yield Problem(
            f"--hidden-size {model.hidden_size} gives a gated MLP of width 0, rounded down to a multiple of 64",
            f"give a width, such as --ffn-hidden-size {4 * model.hidden_size}",
        )


@rule
def mlp_has_one_activation(draft: Draft) -> Problems:
    model = draft.config.model
    given = [flag for _, flag in given_activations(model)]
    if len(given) > 1:
        yield Problem(f"{' and '.join(given)} each select the activation of the MLP", "give one of them")


@rule
def clamp_is_of_quick_geglu(draft: Draft) -> Problems:
    model = draft.config.model
    if model.activation_func_clamp_value is not None and not model.quick_geglu:
        yield Problem(
            f"--activation-func-clamp-value {model.activation_func_clamp_value} has no effect without --quick-geglu,"
            " as in Megatron-LM",
            "remove --activation-func-clamp-value, or add --quick-geglu",
        )


@note("result")
def dropout_by_default(draft: Draft) -> Notes:
    paths = ("model.hidden_dropout", "model.attention_dropout")
    enabled = [path for path in paths if draft.is_default(path) and draft.config.get(path) > 0]
    if enabled:
        flags = " and ".join(f"{flag_of(path)} {draft.config.get(path)}" for path in enabled)
        yield f"{flags} by default, as in Megatron-LM; most models are trained with 0 today"


@derives("model.mup_base_hidden_size")
def mup_base_hidden_size(draft: Draft) -> DerivedValue:
    model = draft.config.model
    if not model.use_mup:
        return DerivedValue(None, _WITHOUT_MUP)
    return DerivedValue(model.hidden_size, "this model's own hidden size")


@note("result")
def mup_base_is_this_model(draft: Draft) -> Notes:
    model = draft.config.model
    if model.use_mup and draft.origins["model.mup_base_hidden_size"].kind == "derived":
        yield (
            f"--use-mup without --mup-base-hidden-size uses --hidden-size {model.hidden_size} as base, as in Megatron-LM: only"
            " attention scores are scaled"
        )


@derives("model.mup_width_mult")
def mup_width_mult(draft: Draft) -> DerivedValue:
    width, base = draft.config.model.hidden_size, draft.config.model.mup_base_hidden_size
    if not draft.config.model.use_mup or base is None:
        return DerivedValue(1.0, _WITHOUT_MUP)
    return DerivedValue(width / base, f"hidden size {width} / base hidden size {base}")


@rule
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


@derives("model.mup_output_mult")
def mup_output_mult(draft: Draft) -> DerivedValue:
    model = draft.config.model
    if not model.use_mup:
        return DerivedValue(1.0, _WITHOUT_MUP)
    return DerivedValue(1.0 / model.mup_width_mult, f"1 / width multiplier {model.mup_width_mult:g}")


@overrides("model.mup_output_mult")
def mup_output_mult_of_one(draft: Draft) -> DerivedValue | None:
    """Override --mup-output-mult 1, which Megatron-LM treats as its default."""
    given = output_multiplier(draft.config.model)
    if not draft.config.model.use_mup or given == draft.config.model.mup_output_mult:
        return None
    return DerivedValue(
        given, f"--mup-output-mult 1 with --use-mup means 1 / width multiplier, as in Megatron-LM: {given:g}"
    )


@note("result")
def mup_output_layer_lr_differs(draft: Draft) -> Notes:
    model, optimizer = draft.config.model, draft.config.optimizer
    if not (model.use_mup and model.mup_width_mult != 1 and model.untie_embeddings_and_output_weights):
        return
    if optimizer.decoupled_lr is None:
        m, is_sgd = model.mup_width_mult, optimizer.optimizer == "sgd"
        megatron_lr, mup_lr = ("lr", f"lr * {m:g}") if is_sgd else (f"lr / {m:g}", "lr")
        yield (
            f"--use-mup: the learning rate of an untied output layer is {megatron_lr}, as in Megatron-LM; muP"
            f" (arXiv:2203.03466, table 8) has {mup_lr}, set by --decoupled-lr {optimizer.lr * (m if is_sgd else 1):g}"
        )


@derives("derived.flops_per_iteration")
def flops_per_iteration(draft: Draft) -> DerivedValue:
    tokens = draft.derived.tokens_per_iteration
    lengths = {"num_tokens": tokens, "sum_of_squared_lengths": tokens * sample_length(draft.config)}
    operations, words = draft.derived.model_spec.training_flops(**lengths), "recomputation not counted"
    if draft.derived.distillation is not None:
        of_teacher = draft.derived.distillation.forward_flops(**lengths)
        operations += of_teacher
        words += f", {of_teacher / tokens:.4g} of them the teacher's"
    return DerivedValue(operations, f"{operations / tokens:.4g} for each of {tokens} tokens, {words}")


@derives("training.recompute_norms")
def recompute_norms(draft: Draft) -> DerivedValue:
    training, model = draft.config.training, draft.config.model
    if training.device != "cuda":
        return DerivedValue(False, "not on a GPU")
    if draft.derived.transformer_impl != "local":
        return DerivedValue(False, "Transformer Engine keeps the outputs of its norms")
    if model.norm_position == "post":
        return DerivedValue(False, "no norm precedes a linear layer")
    if training.recomputes_layers:
        return DerivedValue(False, "something else is recomputed")
    if draft.derived.fp8_layers:
        return DerivedValue(False, "FP8 layers save one byte per element of the outputs of norms")
    return _worth_it(draft, 8 * model.hidden_size, "the outputs of two norms per layer")


@derives("training.recompute_mlp_act")
def recompute_mlp_act(draft: Draft) -> DerivedValue:
    training, model = draft.config.training, draft.config.model
    if training.device != "cuda":
        return DerivedValue(False, "not on a GPU")
    if draft.derived.transformer_impl != "local":
        return DerivedValue(False, "Transformer Engine keeps what its activations return")
    if draft.derived.fp8_layers:
        return DerivedValue(False, "FP8 layers save its input")
    rounding = draft.derived.qat
    if draft.config.adapters.lora_rank is not None or (rounding is not None and rounding.inputs is not None):
        flag = flag_of("adapters.lora_rank" if rounding is None else "precision.qat")
        return DerivedValue(
            False, f"layers of {flag} have no kernel that computes it together with its gradient"
        )
    return _worth_it(draft, 2 * model.ffn_hidden_size, "the result of the activation in each MLP")


def _worth_it(draft: Draft, num_bytes: int, what: str) -> DerivedValue:
    """Return whether recomputation that moves so many bytes a token in a layer costs little, and saves `what`."""
    hidden_size = draft.config.model.hidden_size
    percent = percent_of_layer(num_bytes, hidden_size)
    cost = f"about {percent:.1f} % of a step at --hidden-size {hidden_size}"
    if percent > _MAX_PERCENT:
        return DerivedValue(False, f"that would take {cost}")
    return DerivedValue(True, f"it takes {cost} and saves {what}")


def percent_of_layer(num_bytes: int, hidden_size: int) -> float:
    """Return the time of moving so many bytes a token in percent of a layer's: 6 FLOPs for each of 12 h^2 weights."""
    return 100 * num_bytes * _FLOPS_PER_BYTE / (72 * hidden_size**2)


@derives("training.mlp_chunks_for_training")
def mlp_chunks_for_training(draft: Draft) -> DerivedValue:
    training = draft.config.training
    is_whole = training.recompute_granularity == "full" and training.recompute_method == "uniform"
    is_selective = training.recompute_granularity == "selective" or training.recompute_activations
    if not is_whole and not (is_selective and "mlp" in training.recompute_modules):
        return DerivedValue(1, "not all MLPs are recomputed")
    for what, _ in _obstacles_to_mlp_chunks(draft):
        return DerivedValue(1, what)
    tokens = rank_length(draft.config) * training.micro_batch_size
    chunks = max(tokens // CHUNK_TOKENS, 1)
    return DerivedValue(
        chunks, f"recomputed MLPs, {tokens} tokens on a rank: {tokens // chunks} at a time fill a GPU"
    )


@rule
def mlp_chunks_are_supported(draft: Draft) -> Problems:
    if draft.config.training.mlp_chunks_for_training > 1:
        for what, fix in _obstacles_to_mlp_chunks(draft):
            yield Problem(f"--mlp-chunks-for-training is not supported with {what}", fix)


def _obstacles_to_mlp_chunks(draft: Draft) -> Iterator[tuple[str, str]]:
    config, remove = draft.config, "remove --mlp-chunks-for-training"
    if draft.derived.transformer_impl != "local":
        yield "--transformer-impl transformer_engine", "use --transformer-impl local"
    if config.precision.fp8_format or config.precision.fp4_format:
        yield "FP8 or FP4, whose scales are those of a micro-batch's tokens", remove
    if config.parallel.tp_comm_overlap:
        yield "--tp-comm-overlap, whose GEMMs are of whole layers", "remove --tp-comm-overlap"
    if config.data.seq_length_schedule is not None:
        yield "--seq-length-schedule, whose pieces have other numbers of rows", remove


@note("cost")
def norms_are_recomputed(draft: Draft) -> Notes:
    if draft.config.training.recompute_norms and not draft.is_given("training.recompute_norms"):
        reason = draft.origins["training.recompute_norms"].detail
        yield f"norms are recomputed: {reason} (disable with --no-recompute-norms)"


@overrides("training.recompute_granularity")
def selective_for_experts(draft: Draft) -> DerivedValue | None:
    """Override the granularity, as --moe-layer-recompute does in Megatron-LM."""
    training = draft.config.training
    if not training.moe_layer_recompute or training.recompute_granularity is not None:
        return None
    return DerivedValue("selective", "--moe-layer-recompute is --recompute-granularity selective")


@overrides("training.recompute_modules")
def modules_with_experts(draft: Draft) -> DerivedValue | None:
    """Override the recomputed modules, as --moe-layer-recompute does in Megatron-LM."""
    training = draft.config.training
    if not training.moe_layer_recompute or "moe" in training.recompute_modules:
        return None
    modules = (*(training.recompute_modules or ("core_attn",)), "moe")
    return DerivedValue(modules, f"--moe-layer-recompute is --recompute-modules {' '.join(modules)}")


@rule
def recomputation_is_complete(draft: Draft) -> Problems:
    training = draft.config.training
    names = ("recompute_method", "recompute_num_layers")
    missing = [flag_of(name) for name in names if getattr(training, name) is None]
    if training.recompute_granularity == "full" and missing:
        yield Problem(
            f"--recompute-granularity full requires {' and '.join(missing)}",
            "add --recompute-method uniform --recompute-num-layers 1, which recomputes every layer",
        )


@note("nothing")
def modules_without_effect(draft: Draft) -> Notes:
    """Name the parts that the model is asked to recompute or to offload and does not have."""
    modules, model = draft.config.training.recompute_modules, draft.config.model
    for flag, given in (
        ("--recompute-modules", modules),
        ("--offload-modules", draft.config.training.offload_modules),
    ):
        names = [name for name in given if name in _EXPERT_MODULES]
        if names and draft.config.experts.num_experts is None:
            yield f"{flag} {' '.join(names)} has no effect without --num-experts"
    if "mla_up_proj" in modules and not model.multi_latent_attention:
        yield "--recompute-modules mla_up_proj has no effect without --multi-latent-attention"
    if "layernorm" in modules and model.norm_position == "post":
        yield "--recompute-modules layernorm has no effect with --norm-position post, since no norm precedes a linear layer"


@rule
def offloaded_modules_fit(draft: Draft) -> Problems:
    training = draft.config.training
    if not training.fine_grained_activation_offloading:
        return
    modules = training.offload_modules
    if not modules:
        yield Problem(
            "--fine-grained-activation-offloading requires --offload-modules",
            "add --offload-modules core_attn, or other modules",
        )
    if "attn_proj" in modules and "core_attn" not in modules:
        yield Problem(
            "--offload-modules attn_proj frees nothing without core_attn: core attention saves its output, which is the"
            " input of the projection",
            f"use --offload-modules core_attn {' '.join(modules)}",
        )
    if "layer_input" in modules and training.recompute_granularity != "full":
        yield Problem(
            "--offload-modules layer_input requires --recompute-granularity full: other layers save more than their inputs",
            "add --recompute-granularity full --recompute-method uniform --recompute-num-layers 1, or remove layer_input",
        )
