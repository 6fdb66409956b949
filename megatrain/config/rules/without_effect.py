"""Notes about given settings that have no effect in this combination, as in Megatron-LM."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, fields
from typing import Final

from megatrain.config.derive.cuda_graphs import WHOLE
from megatrain.config.derive.fp8 import recipe_of_flags, scale_blocks, why_no_codes_are_gathered
from megatrain.config.derive.ranks import experts_are_split
from megatrain.config.derive.transformer_engine import TRANSFORMER_ENGINE
from megatrain.config.plan import Draft
from megatrain.config.rules.model import EXPERT_MODULES
from megatrain.config.schema.experts import ExpertsConfig
from megatrain.config.schema.lr_decay import LR_STYLES
from megatrain.config.schema.tree import flag_of


@dataclass(frozen=True)
class Condition:
    """Settings that have an effect only under a condition."""

    reason: str
    """Text after `has no effect`."""
    holds: Callable[[Draft], bool]
    paths: tuple[str, ...]


def _settings(section: str, names: str) -> tuple[str, ...]:
    return tuple(f"{section}.{name}" for name in names.split())


def _has_latents(draft: Draft) -> bool:
    return draft.config.model.multi_latent_attention


_OF_EXPERTS: Final = tuple(
    f"experts.{entry.name}" for entry in fields(ExpertsConfig) if entry.name != "num_experts"
)

CONDITIONS: Final = (
    Condition(
        "without --num-experts",
        lambda d: d.config.experts.num_experts is not None,
        (
            *_OF_EXPERTS,
            "parallel.expert_tensor_parallel_size",
            "training.moe_layer_recompute",
            "logging.moe_per_layer_logging",
        ),
    ),
    Condition(
        "without --experimental-attention-variant",
        lambda d: d.config.model.experimental_attention_variant is not None,
        _settings(
            "model",
            "linear_attention_freq linear_conv_kernel_dim linear_key_head_dim linear_value_head_dim linear_num_key_heads"
            " linear_num_value_heads",
        ),
    ),
    Condition(
        "unless --moe-router-score-function is softmax",
        lambda d: d.config.experts.moe_router_score_function == "softmax",
        _settings("experts", "moe_router_pre_softmax"),
    ),
    Condition(
        "without --moe-router-enable-expert-bias",
        lambda d: d.config.experts.moe_router_enable_expert_bias,
        _settings("experts", "moe_router_bias_update_rate"),
    ),
    Condition(
        "with --moe-pad-expert-input-to-capacity: padded loads are equal, so the expert biases stay as they are",
        lambda d: (
            not d.config.experts.moe_pad_expert_input_to_capacity
            or d.config.experts.moe_expert_capacity_factor is None
        ),
        _settings("experts", "moe_router_enable_expert_bias moe_router_bias_update_rate"),
    ),
    Condition(
        "with --moe-router-load-balancing-type sinkhorn",
        lambda d: "sinkhorn" not in d.config.experts.moe_router_load_balancing_type,
        _settings(
            "experts",
            "moe_router_topk_scaling_factor moe_router_num_groups moe_router_group_topk moe_router_group_score_topk moe_router_score_function",
        ),
    ),
    Condition(
        "unless --moe-router-load-balancing-type names a loss",
        lambda d: any("aux_loss" in kind for kind in d.config.experts.moe_router_load_balancing_type),
        _settings("experts", "moe_aux_loss_coeff"),
    ),
    Condition(
        "without --moe-use-upcycling",
        lambda d: d.config.experts.moe_use_upcycling,
        _settings("experts", "moe_upcycling_granularity"),
    ),
    Condition(
        "unless --moe-router-load-balancing-type is quantile_balancing",
        lambda d: "quantile_balancing" in d.config.experts.moe_router_load_balancing_type,
        _settings("experts", "moe_router_quantile_balancing_ema"),
    ),
    Condition(
        "without --moe-expert-capacity-factor, since no assignment is dropped",
        lambda d: d.config.experts.moe_expert_capacity_factor is not None,
        _settings("experts", "moe_pad_expert_input_to_capacity moe_token_drop_policy"),
    ),
    Condition(
        "without --moe-shared-expert-intermediate-size",
        lambda d: d.config.experts.moe_shared_expert_intermediate_size is not None,
        _settings("experts", "moe_shared_expert_gate moe_shared_expert_overlap"),
    ),
    Condition(
        "unless --moe-token-dispatcher-type is alltoall",
        lambda d: d.config.experts.moe_token_dispatcher_type != "allgather",  # noqa: S105
        _settings("experts", "moe_alltoall_as_allgather"),
    ),
    Condition(
        "with experts on one rank",
        lambda d: d.config.experts.num_experts is None or experts_are_split(d),
        _settings("experts", "overlap_moe_expert_parallel_comm"),
    ),
    Condition(
        "with one micro-batch per iteration, which has no other to overlap with",
        lambda d: d.derived.num_microbatches > 1,
        _settings("experts", "overlap_moe_expert_parallel_comm"),
    ),
    Condition(
        "on a CPU, which has no streams",
        lambda d: d.config.training.device == "cuda",
        _settings("experts", "moe_shared_expert_overlap"),
    ),
    Condition(
        "without --sequence-parallel and --tensor-model-parallel-size above 1",
        lambda d: d.config.parallel.sequence_parallel and d.config.parallel.tensor_model_parallel_size > 1,
        _settings("parallel", "tp_comm_overlap"),
    ),
    Condition(
        "on a CPU: communication and products take turns there",
        lambda d: d.config.training.device == "cuda",
        _settings("parallel", "tp_comm_overlap"),
    ),
    Condition(
        "with --transformer-impl transformer_engine, whose layers wait for their communication",
        lambda d: d.derived.transformer_impl != TRANSFORMER_ENGINE,
        _settings("parallel", "tp_comm_overlap"),
    ),
    Condition(
        "on a CPU, whose energy is not measured",
        lambda d: d.config.training.device == "cuda",
        _settings("logging", "log_energy"),
    ),
    Condition(
        "without --error-injection-rate",
        lambda d: d.config.resilience.error_injection_rate > 0,
        _settings("resilience", "error_injection_type"),
    ),
    Condition(
        "on an MLP without a gate",
        lambda d: d.config.model.swiglu or d.config.model.geglu or d.config.model.quick_geglu,
        _settings("model", "glu_linear_offset"),
    ),
    Condition(
        "unless --position-embedding-type is rope",
        lambda d: d.config.model.position_embedding_type == "rope",
        _settings("model", "use_rope_scaling rope_scaling_factor"),
    ),
    Condition(
        "without RoPE",
        lambda d: _has_latents(d) or d.config.model.position_embedding_type in ("rope", "yarn"),
        _settings(
            "model",
            "no_rope_freq rotary_base window_rotary_base rotary_percent rotary_interleaved"
            " rotary_seq_len_interpolation_factor",
        ),
    ),
    Condition(
        "without --multi-latent-attention",
        _has_latents,
        _settings("model", "q_lora_rank kv_lora_rank qk_head_dim qk_pos_emb_head_dim v_head_dim rope_type"),
    ),
    Condition(
        "with --multi-latent-attention",
        lambda d: not _has_latents(d),
        _settings(
            "model",
            "add_qkv_bias rotary_seq_len_interpolation_factor use_rope_scaling rope_scaling_factor",
        ),
    ),
    Condition(
        "with --position-embedding-type yarn",
        lambda d: _has_latents(d) or d.config.model.position_embedding_type != "yarn",
        _settings("model", "rotary_percent rotary_seq_len_interpolation_factor"),
    ),
    Condition(
        "with --rope-type yarn",
        lambda d: not (_has_latents(d) and d.config.model.rope_type == "yarn"),
        _settings("model", "rotary_percent"),
    ),
    Condition(
        "without --window-size",
        lambda d: d.config.model.window_size is not None,
        _settings("model", "window_attn_skip_freq window_rotary_base"),
    ),
    Condition(
        "without --qk-layernorm",
        lambda d: d.config.model.qk_layernorm,
        (*_settings("model", "qk_layernorm_width"), *_settings("optimizer", "apply_wd_to_qk_layernorm")),
    ),
    Condition(
        "without --use-mup",
        lambda d: d.config.model.use_mup,
        _settings(
            "model",
            "mup_base_hidden_size mup_width_mult mup_base_head_dim mup_attn_scale_power mup_embedding_mult mup_output_mult",
        ),
    ),
    Condition(
        "with --softmax-scale",
        lambda d: d.config.model.softmax_scale is None,
        _settings("model", "mup_base_head_dim"),
    ),
    Condition(
        "with --pipeline-model-parallel-size 1",
        lambda d: d.config.parallel.pipeline_model_parallel_size > 1,
        _settings(
            "parallel",
            "pipeline_schedule num_virtual_stages_per_pipeline_rank num_layers_per_virtual_pipeline_stage"
            " microbatch_group_size_per_virtual_pipeline_stage decoder_first_pipeline_num_layers"
            " decoder_last_pipeline_num_layers account_for_embedding_in_pipeline_split"
            " account_for_loss_in_pipeline_split pipeline_model_parallel_layout overlap_p2p_communication",
        ),
    ),
    Condition(
        "without --cuda-graph-impl local",
        lambda d: d.config.training.cuda_graph_impl in WHOLE,
        _settings("training", "cuda_graph_warmup_steps"),
    ),
    Condition(
        "without --recompute-granularity full",
        lambda d: d.config.training.recompute_granularity == "full",
        _settings("training", "recompute_method recompute_num_layers"),
    ),
    Condition(
        "without --recompute-granularity selective",
        lambda d: (
            d.config.training.recompute_granularity == "selective" or d.config.training.recompute_activations
        ),
        _settings("training", "recompute_modules"),
    ),
    Condition(
        "with --recompute-granularity full, which recomputes norms anyway",
        lambda d: d.config.training.recompute_granularity != "full",
        _settings("training", "recompute_norms"),
    ),
    Condition(
        "without --decoupled-lr",
        lambda d: d.config.optimizer.decoupled_lr is not None,
        _settings("optimizer", "decoupled_min_lr"),
    ),
    Condition(
        "without --fp8-format",
        lambda d: d.config.precision.fp8_format is not None,
        _settings("precision", "fp8_recipe"),
    ),
    Condition(
        "without --fp8-format or --fp4-format",
        lambda d: recipe_of_flags(d) is not None,
        _settings("precision", "fp8_wgrad first_last_layers_bf16 te_precision_config_file"),
    ),
    Condition(
        "in linear layers of --fp8-format, which wait for their communication",
        lambda d: d.config.precision.fp8_format is None,
        _settings("parallel", "tp_comm_overlap"),
    ),
    Condition(
        "without --fp8-recipe blockwise",
        lambda d: d.config.precision.fp8_recipe == "blockwise" or "blockwise" in scale_blocks(d),
        _settings("precision", "fp8_block_size"),
    ),
    Condition(
        "without --fp8-recipe delayed",
        lambda d: d.config.precision.fp8_recipe == "delayed",
        _settings("precision", "fp8_margin fp8_amax_history_len fp8_amax_compute_algo"),
    ),
    Condition(
        "without --first-last-layers-bf16",
        lambda d: d.config.precision.first_last_layers_bf16,
        _settings("precision", "num_layers_at_start_in_bf16 num_layers_at_end_in_bf16"),
    ),
    *(
        Condition(
            f"unless --lr-decay-style is {name}",
            lambda d, name=name: d.config.schedule.lr_decay_style == name,  # type: ignore[misc]
            _settings("schedule", " ".join(style.settings)),
        )
        for name, style in LR_STYLES.items()
        if style.settings
    ),
    Condition(
        "with --weight-decay-incr-style constant",
        lambda d: d.config.schedule.weight_decay_incr_style != "constant",
        _settings("schedule", "start_weight_decay end_weight_decay"),
    ),
    Condition(
        "with --optimizer sgd, which has no such state",
        lambda d: d.config.optimizer.optimizer != "sgd",
        _settings("optimizer", "exp_avg_dtype exp_avg_sq_dtype adam_beta1 adam_beta2 adam_eps"),
    ),
    Condition(
        "without --optimizer-cpu-offload",
        lambda d: d.config.optimizer.optimizer_cpu_offload,
        _settings("optimizer", "optimizer_offload_fraction"),
    ),
    Condition(
        "without --dataloader-type cyclic",
        lambda d: d.config.data.dataloader_type == "cyclic",
        _settings("data", "no_data_sharding"),
    ),
    Condition(
        "without --load",
        lambda d: d.config.checkpoint.load is not None,
        _settings("checkpoint", "finetune load_or_start exit_on_missing_checkpoint no_load_optim"),
    ),
    Condition(
        "without --load or --pretrained-checkpoint",
        lambda d: (
            d.config.checkpoint.load is not None or d.config.checkpoint.pretrained_checkpoint is not None
        ),
        _settings("checkpoint", "ckpt_step use_checkpoint_args"),
    ),
    Condition(
        "without --use-checkpoint-args",
        lambda d: d.config.checkpoint.use_checkpoint_args,
        _settings("checkpoint", "use_mp_args_from_checkpoint_args"),
    ),
    Condition(
        "without --save-interval",
        lambda d: d.config.checkpoint.save_interval is not None,
        _settings("checkpoint", "save_retain_interval keep_last"),
    ),
    Condition(
        "unless --non-persistent-ckpt-type is global",
        lambda d: d.config.checkpoint.non_persistent_ckpt_type == "global",
        _settings("checkpoint", "non_persistent_global_ckpt_dir"),
    ),
    Condition(
        "unless --non-persistent-ckpt-type is local",
        lambda d: d.config.checkpoint.non_persistent_ckpt_type == "local",
        _settings("checkpoint", "non_persistent_local_ckpt_dir replication"),
    ),
    Condition(
        "without --replication",
        lambda d: d.config.checkpoint.replication,
        _settings("checkpoint", "replication_jump replication_factor"),
    ),
    Condition(
        "without --async-save",
        lambda d: d.config.checkpoint.async_save,
        _settings("checkpoint", "async_ckpt_cpu_priority async_ckpt_io_priority"),
    ),
    Condition(
        "without --save",
        lambda d: d.config.checkpoint.save is not None,
        _settings(
            "checkpoint",
            "save_interval no_save_optim non_persistent_save_interval non_persistent_ckpt_type async_save verify_saves"
            " on_save_failure",
        ),
    ),
)


def settings_without_effect(draft: Draft) -> Iterator[str]:
    """Yield one note per condition that does not hold, about the settings that are given and not at their defaults."""
    defaults = type(draft.config)()
    for condition in CONDITIONS:
        given = [path for path in condition.paths if draft.is_given(path)]
        changed = [path for path in given if draft.config.get(path) not in (defaults.raw(path), None, False)]
        if changed and not condition.holds(draft):
            flags = ", ".join(f"{flag_of(path)}{_value(draft.config.get(path))}" for path in changed)
            yield f"{flags} {'have' if len(changed) > 1 else 'has'} no effect {condition.reason}"


def modules_without_effect(draft: Draft) -> Iterator[str]:
    """Name the parts that the model is asked to recompute and does not have."""
    names = [name for name in draft.config.training.recompute_modules if name in EXPERT_MODULES]
    if names and draft.config.experts.num_experts is None:
        yield f"--recompute-modules {' '.join(names)} has no effect without --num-experts"
    if "mla_up_proj" in draft.config.training.recompute_modules and not _has_latents(draft):
        yield "--recompute-modules mla_up_proj has no effect without --multi-latent-attention"


def param_gather_without_effect(draft: Draft) -> Iterator[str]:
    reason = why_no_codes_are_gathered(draft)
    if draft.config.precision.fp8_param_gather and reason:
        yield f"--fp8-param-gather has no effect {reason}"


def _value(value: object) -> str:
    if isinstance(value, bool):
        return ""
    return " " + (" ".join(map(str, value)) if isinstance(value, tuple) else str(value))
