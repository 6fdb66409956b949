"""Tiny models of transformers, one or more for each family that is converted."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import torch

VOCAB, LAYERS = 97, 4
SHAPE = {
    "vocab_size": VOCAB, "hidden_size": 32, "num_hidden_layers": LAYERS, "num_attention_heads": 4,
    "intermediate_size": 80, "max_position_embeddings": 64, "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": None,
}  # fmt: skip
GQA = {**SHAPE, "num_key_value_heads": 2}
ROPE3 = {
    "rope_type": "llama3", "rope_theta": 500000.0, "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}  # fmt: skip
YARN = {
    "rope_type": "yarn", "rope_theta": 10000.0, "factor": 4.0, "original_max_position_embeddings": 16,
    "beta_fast": 32.0, "beta_slow": 1.0,
}  # fmt: skip
EXPERTS = {"num_experts": 6, "num_experts_per_tok": 2, "moe_intermediate_size": 24}
LATENTS = {
    **SHAPE, "num_key_value_heads": 4, "kv_lora_rank": 16, "qk_nope_head_dim": 12, "qk_rope_head_dim": 8, "v_head_dim": 10,
    "moe_intermediate_size": 24,
}  # fmt: skip
_M = ["linear_attention"]
MAMBA = {
    "mamba_num_heads": 8, "mamba_head_dim": 4, "n_groups": 2, "ssm_state_size": 6, "head_dim": 8, "chunk_size": 16,
    "time_step_min": 1e-9,
}  # fmt: skip
"""Step sizes without a limit, which models here do not have."""
FALCON = {
    "num_hidden_layers": 2, "mamba_n_heads": 8, "mamba_d_ssm": 48, "mamba_n_groups": 2, "mamba_d_state": 6,
    "mamba_norm_before_gate": False, "tie_word_embeddings": False,
}  # fmt: skip
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "Llama 2": ("LlamaForCausalLM", SHAPE),
    "Llama 3": ("LlamaForCausalLM", {**GQA, "rope_parameters": ROPE3, "rms_norm_eps": 1e-5}),
    "Llama, tied": ("LlamaForCausalLM", {**GQA, "tie_word_embeddings": True, "head_dim": 16}),
    "Llama, linear RoPE": (
        "LlamaForCausalLM",
        {**GQA, "rope_parameters": {"rope_type": "linear", "rope_theta": 10000.0, "factor": 2.0}},
    ),
    "Llama, YaRN": ("LlamaForCausalLM", {**GQA, "rope_parameters": YARN}),
    "Mistral": ("MistralForCausalLM", {**GQA, "sliding_window": 5}),
    "Mistral without window": ("MistralForCausalLM", {**GQA, "sliding_window": None}),
    "Qwen2": ("Qwen2ForCausalLM", {**GQA, "tie_word_embeddings": True}),
    "Qwen2.5": ("Qwen2ForCausalLM", {**GQA, "rope_parameters": {"rope_type": "default", "rope_theta": 1000000.0}}),
    "Qwen2 with windows": (
        "Qwen2ForCausalLM",
        {**GQA, "use_sliding_window": True, "sliding_window": 5, "max_window_layers": 1},
    ),
    "Qwen3": ("Qwen3ForCausalLM", {**GQA, "head_dim": 16}),
    "Mixtral": ("MixtralForCausalLM", {**GQA, "intermediate_size": 24, "num_local_experts": 6}),
    "Qwen3-MoE": (
        "Qwen3MoeForCausalLM",
        {**GQA, **EXPERTS, "head_dim": 16, "norm_topk_prob": True, "mlp_only_layers": [0, 2]},
    ),
    "Qwen2-MoE": ("Qwen2MoeForCausalLM", {**GQA, **EXPERTS, "shared_expert_intermediate_size": 40}),
    "Qwen3-Next": (
        "Qwen3NextForCausalLM",
        {**GQA, **EXPERTS, "head_dim": 16, "shared_expert_intermediate_size": 40, "linear_conv_kernel_dim": 3,
         "linear_num_key_heads": 2, "linear_key_head_dim": 8, "linear_num_value_heads": 4, "linear_value_head_dim": 6},
    ),
    "Qwen3.5": (
        "Qwen3_5ForCausalLM",
        {**GQA, "head_dim": 16, "linear_conv_kernel_dim": 3, "linear_num_key_heads": 2, "linear_key_head_dim": 8,
         "linear_num_value_heads": 4, "linear_value_head_dim": 6,
         "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 0.25,
                             "mrope_section": [1, 1, 0], "mrope_interleaved": True}},
    ),
    "OLMo-2": ("Olmo2ForCausalLM", GQA),
    "OLMoE": ("OlmoeForCausalLM", {**GQA, "intermediate_size": 24, "num_experts": 6, "num_experts_per_tok": 2}),
    "GPT-2": (
        "GPT2LMHeadModel",
        {"vocab_size": VOCAB, "n_embd": 32, "n_layer": LAYERS, "n_head": 4, "n_positions": 64, "eos_token_id": 2},
    ),
    "GPT-2, exact GELU": (
        "GPT2LMHeadModel",
        {"vocab_size": VOCAB, "n_embd": 32, "n_layer": LAYERS, "n_head": 4, "n_positions": 64, "n_inner": 80,
         "activation_function": "gelu", "tie_word_embeddings": False},
    ),
    "Pythia": ("GPTNeoXForCausalLM", {**SHAPE, "hidden_dropout": 0.1}),
    "GPT-NeoX": ("GPTNeoXForCausalLM", {**SHAPE, "use_parallel_residual": False}),
    "StarCoder2": ("Starcoder2ForCausalLM", {**GQA, "sliding_window": 9}),
    "StarCoder2, no biases": ("Starcoder2ForCausalLM", {**GQA, "use_bias": False, "hidden_act": "gelu"}),
    "Gemma 2": (
        "Gemma2ForCausalLM",
        {**GQA, "head_dim": 16, "sliding_window": 7, "query_pre_attn_scalar": 24, "attn_logit_softcapping": 5.0,
         "final_logit_softcapping": 3.0},
    ),
    "Phi-3": ("Phi3ForCausalLM", {**GQA, "sliding_window": 9}),
    "Phi-3, partial RoPE": (
        "Phi3ForCausalLM",
        {**GQA, "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 0.5}},
    ),
    "Gemma 3": (
        "Gemma3ForCausalLM",
        {**GQA, "head_dim": 16, "sliding_window": 7, "query_pre_attn_scalar": 24,
         "layer_types": ["sliding_attention", "full_attention"] * 2,
         "rope_parameters": {"full_attention": {"rope_type": "linear", "rope_theta": 1000000.0, "factor": 8.0},
                             "sliding_attention": {"rope_type": "default", "rope_theta": 10000.0}}},
    ),
    "DeepSeek-V2": (
        "DeepseekV2ForCausalLM",
        {**LATENTS, "q_lora_rank": None, "n_routed_experts": 6, "num_experts_per_tok": 2, "n_shared_experts": 2,
         "first_k_dense_replace": 1, "routed_scaling_factor": 1.5, "rope_parameters": YARN | {"mscale": 0.7, "mscale_all_dim": 0.7}},
    ),
    "DeepSeek-V2, groups": (
        "DeepseekV2ForCausalLM",
        {**LATENTS, "q_lora_rank": 20, "n_routed_experts": 12, "num_experts_per_tok": 4, "n_shared_experts": 1,
         "first_k_dense_replace": 1, "n_group": 4, "topk_group": 2, "topk_method": "group_limited_greedy",
         "rope_parameters": YARN | {"mscale": 0.7, "mscale_all_dim": 0.7}},
    ),
    "DeepSeek-V3": (
        "DeepseekV3ForCausalLM",
        {**LATENTS, "q_lora_rank": 20, "n_routed_experts": 24, "num_experts_per_tok": 8, "n_shared_experts": 1,
         "first_k_dense_replace": 1, "n_group": 6, "topk_group": 4, "num_mtp_layers": 0,
         "rope_parameters": YARN | {"mscale": 0.7, "mscale_all_dim": 1.3}},
    ),
    "DeepSeek-V3.2": (
        "DeepseekV32ForCausalLM",
        {**LATENTS, "q_lora_rank": 20, "n_routed_experts": 24, "num_experts_per_tok": 8, "n_shared_experts": 1,
         "first_k_dense_replace": 1, "n_group": 6, "topk_group": 4, "index_n_heads": 16, "index_head_dim": 12, "index_topk": 5,
         "rope_parameters": YARN | {"mscale": 0.7, "mscale_all_dim": 1.3}},
    ),
    "GLM-5": (
        "GlmMoeDsaForCausalLM",
        {**LATENTS, "rms_norm_eps": 1e-5, "q_lora_rank": 20, "n_routed_experts": 6, "num_experts_per_tok": 2, "n_shared_experts": 1,
         "first_k_dense_replace": 1, "index_n_heads": 16, "index_head_dim": 12, "index_topk": 5,
         "rope_parameters": {"rope_type": "default", "rope_theta": 1000000.0}},
    ),
    "Nemotron-H": (
        "NemotronHForCausalLM",
        {**GQA, **MAMBA, "layers_block_type": [*_M, "mlp", "full_attention", *_M]},
    ),
    "Nemotron 3": (
        "NemotronHForCausalLM",
        {**GQA, **MAMBA, "layers_block_type": [*_M, "moe", "full_attention", "moe"], "n_routed_experts": 6,
         "num_experts_per_tok": 2, "moe_intermediate_size": 12, "moe_shared_expert_intermediate_size": 20,
         "moe_latent_size": 16, "routed_scaling_factor": 2.5},
    ),
    "Mamba-2": (
        "Mamba2ForCausalLM",
        {"vocab_size": VOCAB, "hidden_size": 32, "num_hidden_layers": LAYERS, "num_heads": 16, "head_dim": 4, "state_size": 6,
         "n_groups": 2, "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": None, "tie_word_embeddings": True},
    ),
    "Bamba": (
        "BambaForCausalLM",
        {**GQA, "num_hidden_layers": 3, "attn_layer_indices": [1], "mamba_n_heads": 16, "mamba_n_groups": 2, "mamba_d_state": 6},
    ),
    "Falcon-H1": (
        "FalconH1ForCausalLM",
        {**GQA, **FALCON, "mamba_rms_norm": False},
    ),
    "Falcon-H1 with norms": (
        "FalconH1ForCausalLM",
        {**GQA, **FALCON, "mamba_rms_norm": True},
    ),
    "gpt-oss": (
        "GptOssForCausalLM",
        {**GQA, "intermediate_size": 24, "head_dim": 16, "num_local_experts": 6, "num_experts_per_tok": 2,
         "sliding_window": 8, "swiglu_limit": 0.3, "rope_parameters": {**YARN, "rope_theta": 150000.0, "truncate": False}},
    ),
}  # fmt: skip
_T5 = {
    "vocab_size": VOCAB, "d_model": 32, "d_kv": 6, "d_ff": 80, "num_layers": 2, "num_heads": 4, "n_positions": 64,
    "tie_word_embeddings": False,
}  # fmt: skip
MASKED: dict[str, tuple[str, dict[str, Any]]] = {
    "Megatron BERT": ("MegatronBertForPreTraining", SHAPE),
    "Megatron BERT without next-sentence head": ("MegatronBertForMaskedLM", SHAPE),
    "T5 v1.1": ("T5ForConditionalGeneration", {**_T5, "feed_forward_proj": "gated-gelu"}),
    "T5, SwiGLU": (
        "T5ForConditionalGeneration",
        {**_T5, "feed_forward_proj": "gated-silu", "relative_attention_num_buckets": 12, "relative_attention_max_distance": 20},
    ),
}  # fmt: skip
"""Models with an encoder, whose samples are masked sentences."""


def tiny_model(name: str, **changes: Any) -> Any:
    """Build a model with random weights; norms and biases are random too. `changes`: of its config.json."""
    import transformers

    kind, settings = (MODELS | MASKED)[name]
    torch.manual_seed(0)
    config = getattr(transformers, kind).config_class(**settings | changes)
    config._attn_implementation = "eager"
    model = getattr(transformers, kind)(config).eval().float()
    if kind == "T5ForConditionalGeneration":  # of v1.1, which transformers 5 ties until it reads weights
        model.lm_head.weight = torch.nn.Parameter(0.5 * torch.randn(model.shared.weight.shape))
    generator = torch.Generator().manual_seed(5)
    with torch.no_grad():
        for weight in model.parameters():
            weight.add_(0.1 * torch.randn(weight.shape, generator=generator))
        if kind == "MegatronBertForMaskedLM":
            model.bert.embeddings.token_type_embeddings.weight.zero_()
        for label, buffer in model.named_buffers():
            if label.endswith("e_score_correction_bias"):
                buffer.add_(0.1 * torch.randn(buffer.shape, generator=generator))
    return model


def write(model: Any, folder: Path, **options: Any) -> Path:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model.save_pretrained(folder, **options)
    return folder
