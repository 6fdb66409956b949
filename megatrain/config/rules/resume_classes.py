"""The class of each setting: the effect of a change between a checkpoint and the run that resumes it.

    safe      a note                   the parallel layout, intervals, ...
    silent    nothing                  where to start from and where files are, not what is trained
    consent   a problem, unless a flag allows the change
    refused   a problem                such a run cannot use these weights

`ADAPTED` judges some refused settings by their values. A test fails if a setting has no class. Files are compared by contents, not by paths (`resume.py`).
"""

import functools
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Final, Literal

from megatrain.config.schema.lr_decay import STYLE_SETTINGS
from megatrain.config.schema.tree import Config


@dataclass(frozen=True, kw_only=True)
class ResumeClass:
    """Settings whose changes on resume have the same effect."""

    kind: Literal["safe", "silent", "consent", "refused"]
    reason: str = ""
    """The reason why a change is not safe; follows `cannot change on resume, since `."""
    consent: str = ""
    """The flag that allows a change."""
    settings: str
    """`section: names` with names separated by spaces, and sections by semicolons."""


SHAPE: Final = ResumeClass(
    kind="refused",
    reason="the shape or the meaning of the weights depends on it",
    settings="model: num_layers hidden_size num_attention_heads ffn_hidden_size kv_channels group_query_attention"
    " num_query_groups multi_latent_attention q_lora_rank kv_lora_rank qk_head_dim qk_pos_emb_head_dim v_head_dim heterogeneous_layers_config_encoded_json normalization apply_layernorm_1p norm_position use_parallel_residual qk_layernorm qk_layernorm_width swiglu geglu"
    " quick_geglu position_embedding_type softmax_type attention_output_gate untie_embeddings_and_output_weights disable_bias_linear"
    " add_qkv_bias experimental_attention_variant linear_attention_freq linear_conv_kernel_dim linear_key_head_dim"
    " linear_value_head_dim linear_num_key_heads linear_num_value_heads mtp_num_layers;"
    " experts: num_experts moe_layer_freq moe_ffn_hidden_size moe_shared_expert_intermediate_size moe_shared_expert_gate moe_latent_size"
    " moe_router_enable_expert_bias",
)
VOCABULARY: Final = ResumeClass(
    kind="refused",
    reason="the meaning of token ids depends on it",
    settings="tokenizer: vocab_size",
)
FUNCTION: Final = ResumeClass(
    kind="consent",
    reason="the function that the model computes depends on it",
    consent="--finetune",
    settings="model: norm_epsilon squared_relu no_bias_gelu_fusion activation_func_clamp_value glu_linear_offset"
    " rope_type rotary_base window_rotary_base rotary_percent rotary_interleaved rotary_seq_len_interpolation_factor use_rope_scaling"
    " rope_scaling_factor rotary_scaling_factor yarn_original_max_position_embeddings yarn_beta_fast yarn_beta_slow"
    " mscale mscale_all_dim yarn_correction_range_round_to_int no_rope_freq window_size window_attn_skip_freq"
    " softmax_scale attn_logit_softcapping final_logit_softcapping embedding_multiplier use_mup"
    " mup_base_hidden_size mup_width_mult mup_base_head_dim mup_attn_scale_power mup_embedding_mult mup_output_mult;"
    " experts: moe_router_topk moe_router_score_function moe_router_pre_softmax moe_router_num_groups"
    " moe_router_group_topk moe_router_group_score_topk moe_router_topk_scaling_factor",
)
ORDER: Final = ResumeClass(
    kind="consent",
    reason="the order of samples depends on it",
    consent="--finetune",
    settings="data: seq_length split mock_data sft dataloader_type no_data_sharding mid_level_dataset_surplus;"
    " training: seed",
)
OPTIMIZER_STATE: Final = ResumeClass(
    kind="consent",
    reason="the optimizer state depends on it",
    consent="--no-load-optim",
    settings="optimizer: optimizer",
)
SCHEDULE: Final = ResumeClass(
    kind="consent",
    reason="learning rate and weight decay depend on it",
    consent="--override-opt-param-scheduler",
    settings="optimizer: lr weight_decay decoupled_lr decoupled_min_lr; schedule: min_lr lr_decay_style"
    " lr_decay_iters lr_decay_samples lr_warmup_iters lr_warmup_samples lr_warmup_fraction lr_warmup_init"
    f" weight_decay_incr_style start_weight_decay end_weight_decay {' '.join(STYLE_SETTINGS)}",
)
SAFE: Final = ResumeClass(
    kind="safe",
    settings="model: spec spec_digest max_position_embeddings init_method_std embedding_init_method_std make_vocab_size_divisible_by"
    " transformer_impl attention_backend fp32_residual_connection z_loss_coeff mtp_loss_scaling_factor hidden_dropout attention_dropout;"
    " experts: moe_router_dtype moe_router_load_balancing_type moe_aux_loss_coeff moe_z_loss_coeff"
    " moe_router_bias_update_rate moe_router_quantile_balancing_ema moe_router_force_load_balancing moe_input_jitter_eps moe_expert_capacity_factor moe_pad_expert_input_to_capacity"
    " moe_token_drop_policy moe_token_dispatcher_type moe_alltoall_as_allgather moe_shared_expert_overlap"
    " overlap_moe_expert_parallel_comm;"
    " parallel: tensor_model_parallel_size pipeline_model_parallel_size pipeline_schedule"
    " overlap_p2p_communication num_virtual_stages_per_pipeline_rank num_layers_per_virtual_pipeline_stage"
    " microbatch_group_size_per_virtual_pipeline_stage decoder_first_pipeline_num_layers decoder_last_pipeline_num_layers"
    " account_for_embedding_in_pipeline_split account_for_loss_in_pipeline_split pipeline_model_parallel_layout context_parallel_size cp_comm_type context_parallel_chunk_means"
    " hierarchical_context_parallel_sizes"
    " expert_model_parallel_size expert_tensor_parallel_size sequence_parallel tp_comm_overlap use_distributed_optimizer"
    " overlap_grad_reduce overlap_param_gather data_parallel_sharding_strategy use_megatron_fsdp"
    " num_distributed_optimizer_instances"
    " distributed_backend distributed_timeout_minutes distributed_timeout_seconds_after_init use_tp_pp_dp_mapping;"
    " optimizer: exp_avg_dtype exp_avg_sq_dtype optimizer_cpu_offload optimizer_offload_fraction;"
    " data: data_path data_args_path train_data_path valid_data_path test_data_path per_split_data_args_path data_schedule phase_transition_iterations"
    " no_mmap_bin_files full_validation multiple_validation_sets reset_position_ids reset_attention_mask eod_mask_loss"
    " dataloader_inter_document_masking allow_ambiguous_pad_tokens;"
    " tokenizer: tokenizer_type tokenizer_model vocab_file merge_file tiktoken_pattern tiktoken_num_special_tokens"
    " tokenizer_special_tokens tokenizer_hf_no_include_special_tokens null_tokenizer_eod_id null_tokenizer_pad_id;"
    " optimizer: adam_beta1 adam_beta2 adam_eps sgd_momentum clip_grad apply_wd_to_qk_layernorm muon_momentum muon_nesterov muon_no_split_qkv"
    " muon_scale_mode muon_extra_scale_factor muon_num_ns_steps muon_coefficient_type muon_fp32_matmul_prec;"
    " precision: te_precision_config_digest bf16 fp16 fp8_format fp8_recipe fp8_block_size fp8_margin fp8_amax_history_len fp8_amax_compute_algo fp8_wgrad fp8_param_gather fp4_format fp4_recipe"
    " first_last_layers_bf16 num_layers_at_start_in_bf16 num_layers_at_end_in_bf16 params_dtype loss_scale initial_loss_scale min_loss_scale loss_scale_window hysteresis grad_reduce_in_bf16;"
    " training: micro_batch_size global_batch_size rampup_batch_size step_batch_size_schedule"
    " decrease_batch_size_if_needed train_iters train_samples calculate_per_token_loss check_for_nan_in_loss_and_grad check_for_large_grads check_for_spiky_loss iterations_to_skip"
    " check_weight_hash_across_dp_replicas_interval"
    " eval_interval eval_iters eval_global_batch_size start_eval_at_iter skip_train eval_only eval_at_start deterministic_mode"
    " compile cuda_graph_impl cuda_graph_warmup_steps require_parity manual_gc manual_gc_interval manual_gc_eval recompute_granularity recompute_method recompute_num_layers"
    " recompute_modules recompute_activations moe_layer_recompute recompute_norms device;"
    " checkpoint: save save_interval no_save_optim save_retain_interval keep_last non_persistent_save_interval"
    " async_save async_ckpt_cpu_priority async_ckpt_io_priority verify_saves on_save_failure"
    " non_persistent_ckpt_type non_persistent_global_ckpt_dir non_persistent_local_ckpt_dir"
    " replication replication_jump replication_factor;"
    " logging: log_interval metrics_file on_log_failure print_config log_throughput log_params_norm log_num_zeros_in_grad"
    " timing_log_level timing_log_option log_straggler straggler_minmax_count log_energy moe_per_layer_logging tensorboard_dir tensorboard_log_interval tensorboard_queue_size"
    " log_timers_to_tensorboard log_memory_to_tensorboard log_validation_ppl_to_tensorboard"
    " log_loss_scale_to_tensorboard log_world_size_to_tensorboard profile profile_step_start profile_step_end"
    " profile_ranks profile_dir wandb_project wandb_exp_name wandb_save_dir wandb_entity;"
    " resilience: exit_interval exit_duration_in_mins exit_signal exit_file on_nan on_spike rerun_mode"
    " error_injection_rate error_injection_type",
)
SILENT: Final = ResumeClass(
    kind="silent",
    settings="model: padded_vocab_size heterogeneous_layers_config_path; parallel: world_size; data: num_workers data_cache_path object_storage_cache_path;"
    " schedule: override_opt_param_scheduler use_checkpoint_opt_param_scheduler; training: dry_run; precision: te_precision_config_file;"
    " checkpoint: load exit_on_missing_checkpoint load_or_start no_load_optim finetune pretrained_checkpoint"
    " from_hf ckpt_step allow_pickle use_checkpoint_args use_mp_args_from_checkpoint_args; experts: moe_use_upcycling moe_upcycling_granularity",
)


def _without_positions(stored: Any, now: Any) -> bool:
    return "learned_absolute" not in (stored, now)  # all others have no weights


ADAPTED: Final[Mapping[str, Callable[[Any, Any], bool]]] = {
    "model.position_embedding_type": _without_positions,
    "model.mtp_num_layers": lambda stored, now: (stored or 0) > (now or 0),
    "model.untie_embeddings_and_output_weights": lambda _, now: bool(now),
    "model.disable_bias_linear": lambda _, now: not now,
    "model.add_qkv_bias": lambda _, now: bool(now),
    "experts.moe_router_enable_expert_bias": lambda _, now: bool(now),
}
"""Settings of SHAPE with a test of stored and new value: the weights of one model give those of the other. RoPE becomes YaRN,
layers of multi-token prediction are dropped, an untied head is a copy of the embedding, new biases are 0."""


def adapted_settings(config: Config, stored: Mapping[str, Mapping[str, Any]]) -> frozenset[str]:
    """Return the paths of changed settings for which the weights of the stored configuration are adapted."""
    found = set()
    for path, allows in ADAPTED.items():
        section, _, name = path.partition(".")
        now = config.get(path)
        before = stored.get(section, {}).get(name, now)
        if before != now and allows(before, now):
            found.add(path)
    return frozenset(found)


RESUME_CLASSES: Final = (SHAPE, VOCABULARY, FUNCTION, ORDER, OPTIMIZER_STATE, SCHEDULE, SAFE, SILENT)


@functools.cache
def classes_by_path() -> dict[str, ResumeClass]:
    """Return the class of each setting, by path."""
    return {path: resume_class for resume_class in RESUME_CLASSES for path in paths_of(resume_class)}


def paths_of(resume_class: ResumeClass) -> list[str]:
    """Return the paths of the settings of a class."""
    sections = [part.split(":") for part in resume_class.settings.split(";")]
    return [f"{section.strip()}.{name}" for section, names in sections for name in names.split()]
