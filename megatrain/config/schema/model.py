"""Settings of the model. None depends on the number of ranks."""

from dataclasses import dataclass, field
from typing import Literal

from megatrain.config.schema.values import AUTO, REQUIRED, CheckedSection, in_range, several_words


@dataclass(frozen=True, kw_only=True)
class ModelConfig(CheckedSection):
    """Model: sizes, types of layers, initial weights."""

    num_layers: int = field(default=REQUIRED, metadata=in_range(at_least=1, at_most=1 << 16))
    """Transformer layers of the model."""
    hidden_size: int = field(default=REQUIRED, metadata=in_range(at_least=1))
    """Width of the residual stream."""
    num_attention_heads: int = field(default=REQUIRED, metadata=in_range(at_least=1))
    """Query heads per attention layer."""
    ffn_hidden_size: int = field(default=AUTO, metadata=in_range(at_least=1))
    """Width of the MLP. auto: 4 * hidden size; with --swiglu or --geglu two thirds of that, rounded down to a multiple of 64."""
    kv_channels: int = field(default=AUTO, metadata=in_range(at_least=1))
    """Channels per attention head. auto: hidden size / number of heads; with MLA those of queries and keys."""
    group_query_attention: bool = False
    """Use grouped-query attention with --num-query-groups."""
    num_query_groups: int = field(default=AUTO, metadata=in_range(at_least=1))
    """Key and value heads per attention layer. auto: one per query head."""
    multi_latent_attention: bool = False
    """Use multi-latent attention (MLA, DeepSeek-V2): queries, keys and values are projected from latents of low rank."""
    q_lora_rank: int | None = field(default=None, metadata=in_range(at_least=1))
    """MLA: channels of the latent of queries. none: queries are projected from the hidden states."""
    kv_lora_rank: int = field(default=32, metadata=in_range(at_least=1))
    """MLA: channels of the latent of keys and values."""
    qk_head_dim: int = field(default=128, metadata=in_range(at_least=1))
    """MLA: channels of a head of queries and keys without RoPE."""
    qk_pos_emb_head_dim: int = field(default=64, metadata=in_range(at_least=1))
    """MLA: channels of a head of queries and keys with RoPE; all heads of keys share them."""
    v_head_dim: int = field(default=128, metadata=in_range(at_least=1))
    """MLA: channels of a head of values."""
    max_position_embeddings: int | None = field(default=None, metadata=in_range(at_least=1))
    """Largest sequence length of the model: limit of --seq-length, and rows of a learned position embedding."""
    normalization: Literal["LayerNorm", "RMSNorm"] = "LayerNorm"
    """Type of normalization layers."""
    norm_epsilon: float = field(default=1e-5, metadata=in_range(above=0))
    """Epsilon of normalization layers, added to the variance or mean square."""
    apply_layernorm_1p: bool = False
    """Store norm weights as their difference from 1."""
    norm_position: Literal["pre", "post", "both"] = "pre"
    """Position of the norm on a residual branch: before the sublayer, after it (OLMo 2), or both (Gemma 2). Megatron-LM has only pre."""
    use_parallel_residual: bool = False
    """Let attention and MLP of a layer both read its input, each through its norm, and add both outputs (GPT-NeoX). Not in Megatron-LM."""
    qk_layernorm: bool = False
    """Normalize queries and keys; with MLA the latents."""
    qk_layernorm_width: Literal["head", "all_heads"] = "head"
    """Channels that --qk-layernorm normalizes together: of each head, as in Megatron-LM, or of all heads (OLMo 2)."""
    attention_output_gate: bool = False
    """Multiply the output of each attention head, channel by channel, by the sigmoid of a projection (Qwen3-Next)."""
    swiglu: bool = False
    """Use a gated MLP with SiLU (SwiGLU)."""
    geglu: bool = False
    """Use a gated MLP with tanh-approximated GELU (Gemma). Not in Megatron-LM."""
    quick_geglu: bool = False
    """Use a gated MLP with sigmoid-approximated GELU (GPT-OSS)."""
    squared_relu: bool = False
    """Use squared ReLU as the activation of the MLP."""
    no_bias_gelu_fusion: bool = False
    """Use exact GELU. Without this flag and with biases, Megatron-LM uses the tanh approximation."""
    activation_func_clamp_value: float | None = field(default=None, metadata=in_range(above=0))
    """Clamp of --quick-geglu: the gate to at most this, the linear part to this magnitude."""
    glu_linear_offset: float = 0.0
    """GLU offset: act(gate) * (up + offset)."""
    experimental_attention_variant: Literal["gated_delta_net", "gdn"] | None = None
    """Linear attention in the layers that --linear-attention-freq selects: gated DeltaNet, under both names."""
    linear_attention_freq: str | None = field(default=None, metadata=several_words())
    """Layers with linear attention: a number N for all but every Nth layer, or a list such as [1]*3+[0] with 1 for these layers."""
    linear_conv_kernel_dim: int = field(default=4, metadata=in_range(at_least=1))
    """Linear attention: tokens that the convolution of queries, keys and values covers."""
    linear_key_head_dim: int = field(default=128, metadata=in_range(at_least=1))
    """Linear attention: channels per head of queries and keys."""
    linear_value_head_dim: int = field(default=128, metadata=in_range(at_least=1))
    """Linear attention: channels per head of values."""
    linear_num_key_heads: int = field(default=16, metadata=in_range(at_least=1))
    """Linear attention: heads of queries and keys."""
    linear_num_value_heads: int = field(default=32, metadata=in_range(at_least=1))
    """Linear attention: heads of values, a multiple of the heads of queries and keys."""
    position_embedding_type: Literal["learned_absolute", "rope", "yarn", "none"] = "learned_absolute"
    """Type of position embedding: learned, RoPE, RoPE with YaRN scaling, or none."""
    rope_type: Literal["rope", "yarn"] = AUTO
    """MLA: type of its RoPE, which it has under every --position-embedding-type. auto: yarn with --multi-latent-attention, as in Megatron-LM."""
    rotary_base: float = field(default=10000.0, metadata=in_range(above=0))
    """Base of the RoPE frequencies (theta)."""
    window_rotary_base: float | None = field(default=None, metadata=in_range(above=0))
    """Base of the RoPE frequencies in layers with --window-size, which have no scaling of RoPE then (Gemma 3). none: as in other layers. Not in Megatron-LM."""
    rotary_percent: float = field(default=1.0, metadata=in_range(above=0, at_most=1))
    """Fraction of the channels of a head to which RoPE is applied. YaRN rotates all."""
    rotary_interleaved: bool = False
    """Apply RoPE to pairs of adjacent channels instead of channels half a head apart."""
    rotary_seq_len_interpolation_factor: int | None = field(default=None, metadata=in_range(at_least=1))
    """Divide positions by this factor before RoPE; not with YaRN."""
    use_rope_scaling: bool = False
    """Scale RoPE frequencies as Llama 3.1 does, for an original context of 8192 tokens."""
    rope_scaling_factor: float = field(default=8.0, metadata=in_range(at_least=1))
    """Context extension factor of --use-rope-scaling."""
    rotary_scaling_factor: float = field(default=1.0, metadata=in_range(at_least=1))
    """Context extension factor of YaRN (--position-embedding-type yarn, or --rope-type yarn)."""
    yarn_original_max_position_embeddings: int | None = field(default=AUTO, metadata=in_range(at_least=1))
    """YaRN: original context length in tokens. auto: 4096 with --rope-type yarn, as in Megatron-LM; else none."""
    yarn_beta_fast: float = field(default=32.0, metadata=in_range(above=0))
    """YaRN: channels with at least this many rotations over the original context are not scaled."""
    yarn_beta_slow: float = field(default=1.0, metadata=in_range(above=0))
    """YaRN: channels with at most this many rotations over the original context are fully scaled."""
    mscale: float = 1.0
    """YaRN: coefficient of the attention temperature in the numerator."""
    mscale_all_dim: float = 0.0
    """YaRN: coefficient of the attention temperature in the denominator."""
    yarn_correction_range_round_to_int: bool = True
    """YaRN: round the boundaries between scaled and unscaled channels to whole channels."""
    no_rope_freq: str | None = field(default=None, metadata=several_words())
    """Layers without RoPE: a number N for every Nth layer, or a list such as [0]*3+[1] with 1 for these layers."""
    window_size: str | None = field(default=None, metadata=several_words())
    """Sliding window: tokens visible to the left and to the right, such as 128,0; -1 to the left: no limit."""
    window_attn_skip_freq: str | None = field(default=None, metadata=several_words())
    """Layers without --window-size: a number N for every Nth layer, or a list such as [1]*3+[0] with 0 for these layers."""
    softmax_type: Literal["vanilla", "off-by-one", "learnable"] = "vanilla"
    """Extra term in the softmax denominator of attention: none (vanilla), a logit of 0 (off-by-one), or a learned sink logit per head (learnable)."""
    softmax_scale: float | None = field(default=None, metadata=in_range(above=0))
    """Factor of attention scores. none: 1 / sqrt(kv channels). No flag in Megatron-LM."""
    attn_logit_softcapping: float | None = field(default=None, metadata=in_range(above=0))
    """Soft limit of attention scores: cap * tanh(score / cap) (Gemma 2). Not in Megatron-LM."""
    final_logit_softcapping: float | None = field(default=None, metadata=in_range(above=0))
    """Soft limit of output logits: cap * tanh(logit / cap) (Gemma 2). Not in Megatron-LM."""
    z_loss_coeff: float = field(default=0.0, metadata=in_range(at_least=0))
    """Coefficient of the z-loss: the squared log-sum-exp of the output logits, per token; logged as `z loss`. Not in Megatron-LM."""
    embedding_multiplier: float = field(default=1.0, metadata=in_range(above=0))
    """Factor of the embedding output; Gemma uses sqrt(hidden size). Not in Megatron-LM."""
    fp32_residual_connection: bool = False
    """Keep the residual stream in fp32."""
    untie_embeddings_and_output_weights: bool = False
    """Use separate weights for embedding and output layer."""
    disable_bias_linear: bool = False
    """Use linear layers without biases."""
    add_qkv_bias: bool = False
    """Use biases in the QKV projection despite --disable-bias-linear."""
    hidden_dropout: float = field(default=0.1, metadata=in_range(at_least=0, below=1))
    """Dropout probability of residual branches."""
    attention_dropout: float = field(default=0.1, metadata=in_range(at_least=0, below=1))
    """Dropout probability of attention probabilities."""
    init_method_std: float = field(default=0.02, metadata=in_range(at_least=0))
    """Standard deviation of initial weights; output projections of residual branches divide it by sqrt(2 * layers)."""
    embedding_init_method_std: float | None = field(default=None, metadata=in_range(at_least=0))
    """Standard deviation of initial embeddings. none: --init-method-std."""
    spec: tuple[str, ...] = ()
    """Function that returns custom layers: file.py:function, module:function, or module and function (docs/models.md)."""
    spec_digest: str | None = AUTO
    """Digest of the file of --spec. auto: computed from the file."""
    heterogeneous_layers_config_path: str | None = None
    """JSON file with the sizes of each layer, in the format of Megatron-LM and NVIDIA's Puzzle models."""
    heterogeneous_layers_config_encoded_json: str | None = AUTO
    """Contents of that file, instead of its path. auto: read from the file."""
    use_mup: bool = False
    """Use maximal update parametrization (muP): scale initial weights, learning rates, attention and logits with the width."""
    mup_base_hidden_size: int | None = field(default=AUTO, metadata=in_range(at_least=1))
    """muP: hidden size for which learning rate and initial weights were tuned. auto with --use-mup: this model's hidden size."""
    mup_width_mult: float = field(default=AUTO, metadata=in_range(above=0))
    """muP: hidden size / base hidden size. Derived; another value is an error."""
    mup_base_head_dim: float | None = field(default=None, metadata=in_range(above=0))
    """muP: head channels of the base model; attention scores are multiplied by their square root. none: no factor."""
    mup_attn_scale_power: float = 1.0
    """muP: exponent of the head channels by which attention scores are divided."""
    mup_embedding_mult: float = field(default=1.0, metadata=in_range(above=0))
    """muP: factor of the embedding output."""
    mup_output_mult: float = field(default=AUTO, metadata=in_range(above=0))
    """muP: factor of the logits. auto or 1: 1 / width multiplier."""
    mtp_num_layers: int | None = field(default=None, metadata=in_range(at_least=0, at_most=1 << 16))
    """Layers of multi-token prediction (MTP, DeepSeek-V3): layer k predicts the token k + 1 positions ahead, in training only. none: 0."""
    mtp_loss_scaling_factor: float = field(default=0.1, metadata=in_range(at_least=0))
    """Factor of the mean of the losses of multi-token prediction in the loss of training."""
    make_vocab_size_divisible_by: int = field(default=128, metadata=in_range(at_least=1))
    """Pad the vocabulary to a multiple of this * tensor-parallel size."""
    padded_vocab_size: int = field(default=AUTO, metadata=in_range(at_least=1))
    """Rows of the embedding. auto: vocabulary of the tokenizer, padded."""
    transformer_impl: Literal["local", "transformer_engine"] = "local"
    """Implementation of layers: megatrain's own (local), or NVIDIA Transformer Engine."""
    attention_backend: Literal[
        "auto", "flash", "fused", "unfused", "local", "flash4", "flash2", "cudnn", "sdpa", "math"
    ] = "auto"
    """Attention kernel: a preference of Megatron-LM (auto, flash, fused, unfused, local), or a kernel: flash4 (flash-attn-4), flash2, cudnn, sdpa (torch's choice), math (eager)."""
