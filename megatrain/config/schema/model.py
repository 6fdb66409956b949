"""Settings of the model. None depends on the number of ranks."""

from dataclasses import dataclass
from typing import Final, Literal

from megatrain.config.derive.hybrid_pattern import has_same_layers
from megatrain.config.schema.needs import Conflict, Need, conflict, contains, either, none_of, off, on, one_of
from megatrain.config.schema.resume_class import (
    FUNCTION,
    SAFE,
    SHAPE,
    SILENT,
    STEPS,
    has_no_position_weights,
    is_decreased,
    is_turned_off,
    is_turned_on,
)
from megatrain.config.schema.setting import ARGS, Section, setting
from megatrain.config.schema.values import AUTO, REQUIRED

_LATENTS, _NO_LATENTS = on("model.multi_latent_attention"), off("model.multi_latent_attention")
LINEAR_ATTENTION: Final = ("gated_delta_net", "gdn", "gdn2")
"""Values of --experimental-attention-variant."""
_LINEAR = either(
    one_of("model.experimental_attention_variant", *LINEAR_ATTENTION),
    contains("model.hybrid_layer_pattern", "G"),
    words="without --experimental-attention-variant gated_delta_net",
)
_SPARSE = one_of("model.experimental_attention_variant", "dsa")
_NOT_WITH_SELECTED_KEYS = (
    ("optimizer.qk_clip",),
    ("logging.log_max_attention_logit",),
    ("model.attn_logit_softcapping",),
    ("model.window_size",),
    ("model.softmax_type", "off-by-one", "learnable"),
)
"""Settings of attention that sparse attention does not have, with the values that turn them on."""
_ROPE = either(_LATENTS, one_of("model.position_embedding_type", "rope", "yarn"), words="without RoPE")
_NO_YARN = either(
    _LATENTS, none_of("model.position_embedding_type", "yarn"), words="with --position-embedding-type yarn"
)
_YARN_TYPES = (one_of("model.position_embedding_type", "yarn"), one_of("model.rope_type", "yarn"))
_YARN = either(*_YARN_TYPES, words="without YaRN")
_YARN_OR_LATENTS = either(*_YARN_TYPES, _LATENTS, words="without YaRN")
_SCALED = (one_of("model.position_embedding_type", "rope"), _NO_LATENTS)
_MUP = on("model.use_mup")
_T5 = one_of("model.model_family", "t5")
_TWO_DEPTHS = one_of("model.model_family", "t5", "vlm")
_HYBRID = one_of("model.model_family", "hybrid")
_RELATIVE = one_of("model.position_embedding_type", "relative")

NOT_IN_MEGATRON: Final = (
    "geglu use_parallel_residual norm_position qk_layernorm_width softmax_scale attn_logit_softcapping final_logit_softcapping"
    " embedding_multiplier latent_norm_epsilon window_rotary_base mamba_without_rmsnorm"
).split()
"""Settings that Megatron-LM has no argument for; without them another function would be computed there."""


_OF_DECODERS = (
    "model.multi_latent_attention",
    "model.experimental_attention_variant",
    "model.window_size",
    "model.attn_logit_softcapping",
)
_OF_TEXT = (
    "model.mtp_num_layers",
    "data.reset_attention_mask",
    "data.dataloader_inter_document_masking",
    "data.sft",
    "data.dataset",
)
_OF_PATTERNS = ("model.heterogeneous_layers_config_path", "model.window_attn_skip_freq", "model.no_rope_freq")
_NOT_OF_FAMILIES = (
    *((path, ("bert", "t5"), "") for path in _OF_DECODERS),
    *((path, ("bert", "t5", "vlm"), "") for path in _OF_TEXT),
    *((path, ("vlm",), "") for path in ("model.spec", "data.reset_position_ids")),
    *((path, ("hybrid",), ": the pattern describes the layers") for path in _OF_PATTERNS),
    ("model.use_parallel_residual", ("t5", "hybrid"), ""),
    ("training.calculate_per_token_loss", ("bert",), ": its losses are means over micro-batches"),
    ("parallel.tp_comm_overlap", ("t5",), ""),
)


def _excludes_latents(why: str, *of: str, when: Need | None = None) -> Conflict:
    return conflict("model.multi_latent_attention", of=of, when=when, why=f": {why}")


@dataclass(frozen=True, kw_only=True)
class ModelConfig(Section, on_resume=SHAPE):
    """Model: sizes, types of layers, initial weights."""

    model_family: Literal["gpt", "bert", "t5", "hybrid", "vlm"] = setting(
        "gpt",
        conflicts=(
            *(conflict(path, of=of, why=why) for path, of, why in _NOT_OF_FAMILIES),
            conflict("model.softmax_type", "off-by-one", "learnable", of=("bert", "t5")),
        ),
    )
    """Family of the model: a decoder (gpt), an encoder (bert), an encoder and a decoder (t5), a decoder of the layers of --hybrid-layer-pattern (hybrid), or a vision tower and a decoder (vlm). No flag in Megatron-LM, which has a script for each."""
    num_layers: int = setting(REQUIRED, at_least=1, at_most=1 << 16, example="GPT-2 small has 12")
    """Transformer layers of the model. T5 has as many in the encoder as in the decoder, a hybrid those of --hybrid-layer-pattern."""
    hybrid_layer_pattern: str | None = setting(None, adapts=has_same_layers, needs=_HYBRID)
    """Layers of a hybrid, a letter each: M Mamba-2, G gated delta net, * attention, + multi-latent attention, - MLP, E experts, P Mamba-2 and attention side by side. `|` ends a pipeline stage, and / precedes the layers of a depth of multi-token prediction."""
    hybrid_attention_ratio: float = setting(0.0, at_least=0, at_most=1, on_resume=SILENT, needs=_HYBRID)
    """Fraction of the --num-layers layers of a hybrid without --hybrid-layer-pattern that are attention; older form of the pattern."""
    hybrid_mlp_ratio: float = setting(0.0, at_least=0, at_most=1, on_resume=SILENT, needs=_HYBRID)
    """Fraction that are MLPs, likewise; the others are Mamba-2."""
    mamba_num_heads: int | None = setting(None, at_least=1, needs=_HYBRID)
    """Mamba-2: heads. none: 2 * hidden size / --mamba-head-dim."""
    mamba_head_dim: int = setting(64, at_least=1, needs=_HYBRID)
    """Mamba-2: channels per head."""
    mamba_num_groups: int = setting(8, at_least=1, needs=_HYBRID)
    """Mamba-2: groups of heads that share the projections into and out of the state, B and C."""
    mamba_state_dim: int = setting(128, at_least=1, needs=_HYBRID)
    """Mamba-2: state channels per channel of a head."""
    mamba_without_rmsnorm: bool = setting(False, needs=_HYBRID)
    """Mamba-2: no RMSNorm of the groups of channels after the gate. Not in Megatron-LM."""
    bert_no_binary_head: bool = setting(False, needs=one_of("model.model_family", "bert"))
    """BERT: no next-sentence head, no pooler and no token types."""
    decoder_num_layers: int | None = setting(None, at_least=1, needs=_TWO_DEPTHS)
    """vlm: layers of the language model; none: --num-layers. T5: no effect, as in Megatron-LM, where --encoder-num-layers is the depth of both stacks."""
    decoder_seq_length: int | None = setting(
        None, at_least=1, unit="tokens", on_resume=STEPS, taken_by=ARGS, needs=_T5
    )
    """T5: length of the decoder's part of a sample; --seq-length is that of the encoder's. It decides the padding alone, and may change on resume."""
    hidden_size: int = setting(
        REQUIRED,
        at_least=1,
        example="GPT-2 small has 768",
        multiple_of="parallel.tensor_model_parallel_size",
    )
    """Width of the residual stream."""
    num_attention_heads: int = setting(
        REQUIRED, at_least=1, example="GPT-2 small has 12", multiple_of="model.num_query_groups"
    )
    """Query heads per attention layer."""
    ffn_hidden_size: int = setting(AUTO, at_least=1)
    """Width of the MLP. auto: 4 * hidden size; with --swiglu or --geglu two thirds of that, rounded down to a multiple of 64."""
    kv_channels: int = setting(AUTO, at_least=1)
    """Channels per attention head. auto: hidden size / number of heads; with MLA those of queries and keys."""
    group_query_attention: bool = setting(
        False,
        conflicts=conflict(
            "model.multi_latent_attention",
            why=": every head has its own keys",
            fix="remove --group-query-attention and --num-query-groups, or --multi-latent-attention",
        ),
    )
    """Use grouped-query attention with --num-query-groups."""
    num_query_groups: int = setting(AUTO, at_least=1)
    """Key and value heads per attention layer. auto: one per query head; with --group-query-attention 1, as in Megatron-LM."""
    multi_latent_attention: bool = False
    """Use multi-latent attention (MLA, DeepSeek-V2): queries, keys and values are projected from latents of low rank."""
    q_lora_rank: int | None = setting(None, at_least=1, needs=_LATENTS)
    """MLA: channels of the latent of queries. none: queries are projected from the hidden states."""
    kv_lora_rank: int = setting(32, at_least=1, needs=_LATENTS)
    """MLA: channels of the latent of keys and values."""
    latent_norm_epsilon: float | None = setting(None, above=0, on_resume=FUNCTION, needs=_LATENTS)
    """MLA: epsilon of the norms of latents. none: --norm-epsilon. Not in Megatron-LM."""
    qk_head_dim: int = setting(128, at_least=1, needs=_LATENTS)
    """MLA: channels of a head of queries and keys without RoPE."""
    qk_pos_emb_head_dim: int = setting(64, at_least=1, needs=_LATENTS)
    """MLA: channels of a head of queries and keys with RoPE; all heads of keys share them."""
    v_head_dim: int = setting(128, at_least=1, needs=_LATENTS)
    """MLA: channels of a head of values."""
    max_position_embeddings: int | None = setting(
        None, at_least=1, unit="tokens", on_resume=SAFE, taken_by=ARGS
    )
    """Largest sequence length of the model: limit of --seq-length, and rows of a learned position embedding."""
    normalization: Literal["LayerNorm", "RMSNorm"] = "LayerNorm"
    """Type of normalization layers."""
    norm_epsilon: float = setting(1e-5, above=0, on_resume=FUNCTION)
    """Epsilon of normalization layers, added to the variance or mean square."""
    apply_layernorm_1p: bool = False
    """Store norm weights as their difference from 1."""
    norm_position: Literal["pre", "post", "both"] = "pre"
    """Position of the norm on a residual branch: before the sublayer, after it (OLMo 2), or both (Gemma 2). Megatron-LM has only pre."""
    use_parallel_residual: bool = False
    """Let attention and MLP of a layer both read its input, each through its norm, and add both outputs (GPT-NeoX). Not in Megatron-LM."""
    qk_layernorm: bool = False
    """Normalize queries and keys; with MLA the latents."""
    qk_l2_norm: bool = setting(
        False,
        on_resume=FUNCTION,
        conflicts=(
            _excludes_latents("its norms are those of the latents"),
            conflict("model.qk_layernorm", why=": both normalize queries and keys"),
        ),
    )
    """Divide queries and keys of each head by the root of their mean square, without weights (Llama 4)."""
    qk_layernorm_width: Literal["head", "all_heads"] = setting(
        "head",
        needs=on("model.qk_layernorm"),
        conflicts=(
            _excludes_latents(
                "--qk-layernorm normalizes the latents", "all_heads", when=on("model.qk_layernorm")
            ),
            conflict(
                "model.normalization",
                "LayerNorm",
                of=("all_heads",),
                when=on("model.qk_layernorm"),
                fix="use --normalization RMSNorm, or --qk-layernorm-width head",
            ),
        ),
    )
    """Channels that --qk-layernorm normalizes together: of each head, as in Megatron-LM, or of all heads (OLMo 2)."""
    attention_output_gate: bool = setting(False, conflicts=_excludes_latents("latents have no gate"))
    """Multiply the output of each attention head, channel by channel, by the sigmoid of a projection (Qwen3-Next)."""
    swiglu: bool = False
    """Use a gated MLP with SiLU (SwiGLU)."""
    geglu: bool = False
    """Use a gated MLP with tanh-approximated GELU (Gemma). Not in Megatron-LM."""
    quick_geglu: bool = False
    """Use a gated MLP with sigmoid-approximated GELU (GPT-OSS)."""
    squared_relu: bool = setting(False, on_resume=FUNCTION)
    """Use squared ReLU as the activation of the MLP."""
    no_bias_gelu_fusion: bool = setting(False, on_resume=FUNCTION)
    """Use exact GELU. Without this flag and with biases, Megatron-LM uses the tanh approximation."""
    activation_func_clamp_value: float | None = setting(None, above=0, on_resume=FUNCTION)
    """Clamp of --quick-geglu: the gate to at most this, the linear part to this magnitude."""
    glu_linear_offset: float = setting(
        0.0, on_resume=FUNCTION, needs=on("model.swiglu", "model.geglu", "model.quick_geglu")
    )
    """GLU offset: act(gate) * (up + offset)."""
    experimental_attention_variant: Literal["gated_delta_net", "gdn", "gdn2", "dsa"] | None = setting(
        None,
        conflicts=(
            _excludes_latents("linear attention replaces attention by heads", *LINEAR_ATTENTION),
            conflict("model.model_family", "hybrid", "vlm", of=("dsa",)),
            *(conflict(path, *values, of=("dsa",)) for path, *values in _NOT_WITH_SELECTED_KEYS),
        ),
    )
    """Linear attention in the layers that --linear-attention-freq selects: gated delta net, under two names, or its second variant (gdn2), whose decay and gates are per channel; in a hybrid, that of layers G. Or DeepSeek sparse attention (dsa) in all layers: latent attention to the keys that an indexer selects for each query."""
    dsa_indexer_n_heads: int = setting(64, at_least=1, needs=_SPARSE)
    """Sparse attention: heads of the indexer."""
    dsa_indexer_head_dim: int = setting(128, at_least=1, needs=_SPARSE)
    """Sparse attention: channels per head of the indexer."""
    dsa_indexer_topk: int = setting(2048, at_least=1, unit="tokens", on_resume=FUNCTION, needs=_SPARSE)
    """Sparse attention: keys that a query attends to."""
    dsa_indexer_loss_coeff: float = setting(0.0, at_least=0, on_resume=STEPS, taken_by=ARGS, needs=_SPARSE)
    """Sparse attention: factor of the divergence of the indexer's scores from the attention probabilities. 0: the indexer is not trained."""
    dsa_indexer_use_sparse_loss: bool = setting(False, on_resume=STEPS, taken_by=ARGS, needs=_SPARSE)
    """Sparse attention: the divergence is that of the selected keys alone."""
    dsa_indexer_k_norm_epsilon: float | None = setting(None, above=0, on_resume=FUNCTION, needs=_SPARSE)
    """Sparse attention: epsilon of the LayerNorm of the indexer's keys. none: --norm-epsilon."""
    dsa_indexer_rope_interleaved: bool = setting(False, on_resume=FUNCTION, needs=_SPARSE)
    """Sparse attention: adjacent channels of the indexer's heads form a pair of RoPE; otherwise channels of both halves."""
    dsa_indexer_scoring_relu: bool = setting(True, on_resume=FUNCTION, needs=_SPARSE)
    """Sparse attention: products of the indexer's queries and keys below 0 count as 0."""
    linear_attention_freq: str | None = setting(None, joins_words=True, needs=_LINEAR)
    """Layers with linear attention: a number N for all but every Nth layer, or a list such as [1]*3+[0] with 1 for these layers."""
    linear_conv_kernel_dim: int = setting(4, at_least=1, needs=_LINEAR)
    """Linear attention: tokens that the convolution of queries, keys and values covers."""
    linear_key_head_dim: int = setting(128, at_least=1, needs=_LINEAR)
    """Linear attention: channels per head of queries and keys."""
    linear_value_head_dim: int = setting(128, at_least=1, needs=_LINEAR)
    """Linear attention: channels per head of values."""
    linear_num_key_heads: int = setting(16, at_least=1, needs=_LINEAR)
    """Linear attention: heads of queries and keys."""
    linear_num_value_heads: int = setting(
        32, at_least=1, needs=_LINEAR, multiple_of="model.linear_num_key_heads"
    )
    """Linear attention: heads of values, a multiple of the heads of queries and keys."""
    position_embedding_type: Literal["learned_absolute", "rope", "yarn", "relative", "none"] = setting(
        "learned_absolute",
        adapts=has_no_position_weights,
        conflicts=conflict(
            "model.multi_latent_attention",
            of=("yarn",),
            why=", which has RoPE of its own",
            fix="use --position-embedding-type rope --rope-type yarn",
        ),
    )
    """Type of position embedding: learned, RoPE, RoPE with YaRN scaling, T5's relative position bias, or none."""
    relative_attention_num_buckets: int = setting(32, at_least=4, needs=_RELATIVE)
    """Relative positions: buckets of distances, each with a bias per head."""
    relative_attention_max_distance: int = setting(
        128, at_least=1, unit="tokens", on_resume=FUNCTION, needs=_RELATIVE
    )
    """Relative positions: distance from which all are in the last bucket."""
    rope_type: Literal["rope", "yarn"] = setting(AUTO, on_resume=FUNCTION, needs=_LATENTS)
    """MLA: type of its RoPE, which it has under every --position-embedding-type. auto: yarn with --multi-latent-attention, as in Megatron-LM."""
    rotary_base: float = setting(10000.0, above=0, on_resume=FUNCTION, needs=_ROPE)
    """Base of the RoPE frequencies (theta)."""
    window_rotary_base: float | None = setting(
        None, above=0, on_resume=FUNCTION, needs=(_ROPE, on("model.window_size"))
    )
    """Base of the RoPE frequencies in layers with --window-size, which have no scaling of RoPE then (Gemma 3). none: as in other layers. Not in Megatron-LM."""
    rotary_percent: float = setting(
        1.0,
        above=0,
        at_most=1,
        on_resume=FUNCTION,
        needs=(
            _ROPE,
            _NO_YARN,
            either(_NO_LATENTS, none_of("model.rope_type", "yarn"), words="with --rope-type yarn"),
        ),
    )
    """Fraction of the channels of a head to which RoPE is applied. YaRN rotates all."""
    rotary_interleaved: bool = setting(
        False,
        on_resume=FUNCTION,
        needs=_ROPE,
        conflicts=_excludes_latents("adjacent channels always form a pair"),
    )
    """Apply RoPE to pairs of adjacent channels instead of channels half a head apart."""
    rotary_seq_len_interpolation_factor: int | None = setting(
        None, at_least=1, on_resume=FUNCTION, needs=(_ROPE, _NO_LATENTS, _NO_YARN)
    )
    """Divide positions by this factor before RoPE; not with YaRN."""
    use_rope_scaling: bool = setting(False, on_resume=FUNCTION, needs=_SCALED)
    """Scale RoPE frequencies as Llama 3.1 does, for an original context of 8192 tokens."""
    rope_scaling_factor: float = setting(
        8.0, at_least=1, on_resume=FUNCTION, needs=(*_SCALED, on("model.use_rope_scaling"))
    )
    """Context extension factor of --use-rope-scaling."""
    rotary_scaling_factor: float = setting(1.0, at_least=1, on_resume=FUNCTION, needs=_YARN_OR_LATENTS)
    """Context extension factor of YaRN (--position-embedding-type yarn, or --rope-type yarn)."""
    yarn_original_max_position_embeddings: int | None = setting(
        AUTO, at_least=1, unit="tokens", on_resume=FUNCTION, needs=_YARN
    )
    """YaRN: original context length in tokens. auto: 4096 with --rope-type yarn, as in Megatron-LM; else none."""
    yarn_beta_fast: float = setting(32.0, above=0, on_resume=FUNCTION, needs=_YARN)
    """YaRN: channels with at least this many rotations over the original context are not scaled."""
    yarn_beta_slow: float = setting(1.0, above=0, on_resume=FUNCTION, needs=_YARN)
    """YaRN: channels with at most this many rotations over the original context are fully scaled."""
    mscale: float = setting(1.0, on_resume=FUNCTION, needs=_YARN)
    """YaRN: coefficient of the attention temperature in the numerator."""
    mscale_all_dim: float = setting(0.0, on_resume=FUNCTION, needs=_YARN_OR_LATENTS)
    """YaRN: coefficient of the attention temperature in the denominator."""
    yarn_correction_range_round_to_int: bool = setting(True, on_resume=FUNCTION, needs=_YARN)
    """YaRN: round the boundaries between scaled and unscaled channels to whole channels."""
    no_rope_freq: str | None = setting(
        None,
        joins_words=True,
        on_resume=FUNCTION,
        needs=_ROPE,
        conflicts=_excludes_latents("all layers have RoPE"),
    )
    """Layers without RoPE: a number N for every Nth layer, or a list such as [0]*3+[1] with 1 for these layers."""
    window_size: str | None = setting(None, joins_words=True, on_resume=FUNCTION)
    """Sliding window: tokens visible to the left and to the right, such as 128,0; -1 to the left: no limit."""
    window_attn_skip_freq: str | None = setting(
        None, joins_words=True, on_resume=FUNCTION, needs=on("model.window_size")
    )
    """Layers without --window-size: a number N for every Nth layer, or a list such as [1]*3+[0] with 0 for these layers."""
    softmax_type: Literal["vanilla", "off-by-one", "learnable"] = "vanilla"
    """Extra term in the softmax denominator of attention: none (vanilla), a logit of 0 (off-by-one), or a learned sink logit per head (learnable)."""
    softmax_scale: float | None = setting(None, above=0, on_resume=FUNCTION)
    """Factor of attention scores. none: 1 / sqrt(kv channels). No flag in Megatron-LM."""
    attn_logit_softcapping: float | None = setting(None, above=0, on_resume=FUNCTION)
    """Soft limit of attention scores: cap * tanh(score / cap) (Gemma 2). Not in Megatron-LM."""
    final_logit_softcapping: float | None = setting(None, above=0, on_resume=FUNCTION)
    """Soft limit of output logits: cap * tanh(logit / cap) (Gemma 2). Not in Megatron-LM."""
    z_loss_coeff: float = setting(
        0.0,
        at_least=0,
        on_resume=STEPS,
        taken_by=ARGS,
        conflicts=conflict("training.loss", why=", whose function has the cross-entropy only"),
    )
    """Coefficient of the z-loss: the squared log-sum-exp of the output logits, per token; logged as `z loss`. Not in Megatron-LM."""
    embedding_multiplier: float = setting(1.0, above=0, on_resume=FUNCTION)
    """Factor of the embedding output; Gemma uses sqrt(hidden size). Not in Megatron-LM."""
    fp32_residual_connection: bool = setting(False, on_resume=SAFE, taken_by=ARGS)
    """Keep the residual stream in fp32."""
    untie_embeddings_and_output_weights: bool = setting(False, adapts=is_turned_on)
    """Use separate weights for embedding and output layer."""
    disable_bias_linear: bool = setting(False, adapts=is_turned_off)
    """Use linear layers without biases."""
    add_qkv_bias: bool = setting(False, adapts=is_turned_on, needs=_NO_LATENTS)
    """Use biases in the QKV projection despite --disable-bias-linear."""
    hidden_dropout: float = setting(0.1, at_least=0, below=1, on_resume=STEPS, taken_by=ARGS)
    """Dropout probability of residual branches."""
    attention_dropout: float = setting(0.1, at_least=0, below=1, on_resume=STEPS, taken_by=ARGS)
    """Dropout probability of attention probabilities."""
    init_method_std: float = setting(0.02, at_least=0, on_resume=SAFE)
    """Standard deviation of initial weights; output projections of residual branches divide it by sqrt(2 * layers)."""
    embedding_init_method_std: float | None = setting(None, at_least=0, on_resume=SAFE)
    """Standard deviation of initial embeddings. none: --init-method-std."""
    spec: tuple[str, ...] = setting((), on_resume=STEPS)
    """Function that returns custom layers: file.py:function, module:function, or module and function (docs/models.md)."""
    spec_digest: str | None = setting(AUTO, on_resume=STEPS)
    """Digest of the file of --spec. auto: computed from the file."""
    heterogeneous_layers_config_path: str | None = setting(
        None, on_resume=SILENT, conflicts=_excludes_latents("its layers have no latents")
    )
    """JSON file with the sizes of each layer, in the format of Megatron-LM and NVIDIA's Puzzle models."""
    heterogeneous_layers_config_encoded_json: str | None = setting(
        AUTO, conflicts=_excludes_latents("its layers have no latents")
    )
    """Contents of that file, instead of its path. auto: read from the file."""
    use_mup: bool = setting(
        False, on_resume=FUNCTION, conflicts=_excludes_latents("no rule scales the latents")
    )
    """Use maximal update parametrization (muP): scale initial weights, learning rates, attention and logits with the width."""
    mup_base_hidden_size: int | None = setting(AUTO, at_least=1, on_resume=FUNCTION, needs=_MUP)
    """muP: hidden size for which learning rate and initial weights were tuned. auto with --use-mup: this model's hidden size."""
    mup_width_mult: float = setting(AUTO, above=0, on_resume=FUNCTION, needs=_MUP)
    """muP: hidden size / base hidden size. Derived; another value is an error."""
    mup_base_head_dim: float | None = setting(
        None, above=0, on_resume=FUNCTION, needs=(_MUP, off("model.softmax_scale"))
    )
    """muP: head channels of the base model; attention scores are multiplied by their square root. none: no factor."""
    mup_attn_scale_power: float = setting(1.0, on_resume=FUNCTION, needs=_MUP)
    """muP: exponent of the head channels by which attention scores are divided."""
    mup_embedding_mult: float = setting(1.0, above=0, on_resume=FUNCTION, needs=_MUP)
    """muP: factor of the embedding output."""
    mup_output_mult: float = setting(AUTO, above=0, on_resume=FUNCTION, needs=_MUP)
    """muP: factor of the logits. auto or 1: 1 / width multiplier."""
    mtp_num_layers: int | None = setting(
        None,
        at_least=0,
        at_most=1 << 16,
        adapts=is_decreased,
        conflicts=conflict(
            "model.position_embedding_type",
            "learned_absolute",
            why=", as in Megatron-LM",
            fix="use --position-embedding-type rope, or remove --mtp-num-layers",
        ),
    )
    """Layers of multi-token prediction (MTP, DeepSeek-V3): layer k predicts the token k + 1 positions ahead, in training only. none: 0."""
    mtp_use_repeated_layer: bool = setting(
        False,
        needs=on("model.mtp_num_layers"),
        conflicts=conflict(
            "experts.moe_router_load_balancing_type",
            "global_aux_loss",
            when=on("model.mtp_num_layers"),
            why=", which counts the tokens of a router once per micro-batch",
            fix="use --moe-router-load-balancing-type aux_loss, or remove --mtp-use-repeated-layer",
        ),
    )
    """Use the weights of the first depth of multi-token prediction in all depths."""
    mtp_loss_scaling_factor: float = setting(
        0.1, at_least=0, on_resume=STEPS, taken_by=ARGS, needs=on("model.mtp_num_layers")
    )
    """Factor of the mean of the losses of multi-token prediction in the loss of training."""
    make_vocab_size_divisible_by: int = setting(128, at_least=1, on_resume=SAFE, taken_by=ARGS)
    """Pad the vocabulary to a multiple of this * tensor-parallel size."""
    padded_vocab_size: int = setting(
        AUTO, at_least=1, on_resume=SILENT, multiple_of="parallel.tensor_model_parallel_size"
    )
    """Rows of the embedding. auto: vocabulary of the tokenizer, padded."""
    transformer_impl: Literal["local", "transformer_engine"] = setting("local", on_resume=SAFE)
    """Implementation of layers: megatrain's own (local), or NVIDIA Transformer Engine."""
    attention_backend: Literal[
        "auto", "flash", "fused", "unfused", "local", "flash4", "flash2", "cudnn", "sdpa", "math"
    ] = setting("auto", on_resume=SAFE)
    """Attention kernel: a preference of Megatron-LM (auto, flash, fused, unfused, local), or a kernel: flash4 (flash-attn-4), flash2, cudnn, sdpa (torch's choice), math (eager)."""
