"""What the model is: its sizes and the parts it is made of. Nothing here depends on the number of ranks."""

from dataclasses import dataclass, field
from typing import Literal

from megatrain.config.schema.values import AUTO, REQUIRED, CheckedSection, in_range


@dataclass(frozen=True, kw_only=True)
class ModelConfig(CheckedSection):
    """The model: sizes, kinds of layers, initial values."""

    num_layers: int = field(default=REQUIRED, metadata=in_range(at_least=1))
    """Transformer layers of the whole model."""
    hidden_size: int = field(default=REQUIRED, metadata=in_range(at_least=1))
    """Width of the residual stream."""
    num_attention_heads: int = field(default=REQUIRED, metadata=in_range(at_least=1))
    """Query heads of each attention layer."""
    ffn_hidden_size: int = field(default=AUTO, metadata=in_range(at_least=1))
    """Width inside the MLP. Left open: 4 times the hidden size, or with --swiglu two thirds of that, down to a multiple of 64."""
    kv_channels: int = field(default=AUTO, metadata=in_range(at_least=1))
    """Channels of each attention head. Left open: the hidden size divided by the number of heads."""
    group_query_attention: bool = False
    """Let several query heads share a key and value head; --num-query-groups says how many there are of those."""
    num_query_groups: int = field(default=AUTO, metadata=in_range(at_least=1))
    """Key and value heads of each attention layer. Left open: one for each query head."""
    max_position_embeddings: int | None = field(default=None, metadata=in_range(at_least=1))
    """Longest sequence that the model is meant for: checked against --seq-length, and the rows of a learned table of positions."""
    normalization: Literal["LayerNorm", "RMSNorm"] = "LayerNorm"
    """Kind of the norms."""
    norm_epsilon: float = field(default=1e-5, metadata=in_range(above=0))
    """Added to the variance, or the mean square, inside a norm."""
    apply_layernorm_1p: bool = False
    """Keep the weights of norms as their distance from 1."""
    norm_position: Literal["pre", "post", "both"] = "pre"
    """Where norms stand on a residual branch: before its part, after it (OLMo 2), or both (Gemma 2). Megatron-LM knows pre alone."""
    qk_layernorm: bool = False
    """Norm queries and keys."""
    qk_layernorm_width: Literal["head", "all_heads"] = "head"
    """Over which channels --qk-layernorm works: each head's own, as in Megatron-LM, or those of all heads together (OLMo 2)."""
    swiglu: bool = False
    """Use a gated MLP with SiLU in place of GELU."""
    geglu: bool = False
    """Use a gated MLP with GELU, approximated by tanh (Gemma). Not in Megatron-LM."""
    quick_geglu: bool = False
    """Use a gated MLP with GELU, approximated by a logistic function (GPT-OSS)."""
    squared_relu: bool = False
    """Use the square of ReLU in place of GELU."""
    no_bias_gelu_fusion: bool = False
    """Use the exact GELU: with biases Megatron-LM fuses them with GELU's approximation by tanh unless this is given."""
    activation_func_clamp_value: float | None = field(default=None, metadata=in_range(above=0))
    """Largest gate of --quick-geglu, and largest size of what it gates."""
    glu_linear_offset: float = 0.0
    """Added to what a gated MLP gates."""
    position_embedding_type: Literal["learned_absolute", "rope", "yarn", "none"] = "learned_absolute"
    """How the model knows the places of tokens."""
    rotary_base: float = field(default=10000.0, metadata=in_range(above=0))
    """Base of the wavelengths of rotary embeddings."""
    rotary_percent: float = field(default=1.0, metadata=in_range(above=0, at_most=1))
    """Share of a head's channels that rotary embeddings turn."""
    rotary_interleaved: bool = False
    """Let rotary embeddings pair neighbouring channels, not those half a head apart."""
    rotary_seq_len_interpolation_factor: int | None = field(default=None, metadata=in_range(at_least=1))
    """Divide positions by this before rotary embeddings."""
    use_rope_scaling: bool = False
    """Stretch long rotary waves as Llama 3.1 does, from 8192 tokens on."""
    rope_scaling_factor: float = field(default=8.0, metadata=in_range(at_least=1))
    """How far --use-rope-scaling stretches."""
    rotary_scaling_factor: float = field(default=1.0, metadata=in_range(at_least=1))
    """How far --position-embedding-type yarn stretches."""
    yarn_original_max_position_embeddings: int | None = field(default=None, metadata=in_range(at_least=1))
    """Longest sequence before stretching with --position-embedding-type yarn."""
    yarn_beta_fast: float = field(default=32.0, metadata=in_range(above=0))
    """Turns over the original length from which on YaRN keeps a channel."""
    yarn_beta_slow: float = field(default=1.0, metadata=in_range(above=0))
    """Turns over the original length up to which YaRN stretches a channel whole."""
    mscale: float = 1.0
    """Strength of YaRN's growth of queries and keys."""
    mscale_all_dim: float = 0.0
    """Strength by which that growth is divided again."""
    yarn_correction_range_round_to_int: bool = True
    """Let YaRN's ramp start and end at whole channels."""
    no_rope_freq: str | None = None
    """Layers without rotary embeddings: every such layer, or a list such as [0]*3+[1] with 1 for each of them."""
    window_size: str | None = None
    """Tokens that attention sees to the left and to the right, such as 128,0; -1 to the left: all."""
    window_attn_skip_freq: str | None = None
    """Layers that --window-size leaves out: every such layer, or a list such as [1]*3+[0] with 0 for each of them."""
    softmax_type: Literal["vanilla", "off-by-one", "learnable"] = "vanilla"
    """What attention's softmax sums over besides the keys: nothing, a score of 0, or a learned score for each head."""
    softmax_scale: float | None = field(default=None, metadata=in_range(above=0))
    """Factor of attention's scores; none: 1 / sqrt(kv channels). No flag in Megatron-LM."""
    attn_logit_softcapping: float | None = field(default=None, metadata=in_range(above=0))
    """Keep attention's scores within this, by tanh (Gemma 2). Not in Megatron-LM."""
    final_logit_softcapping: float | None = field(default=None, metadata=in_range(above=0))
    """Keep the logits within this, by tanh (Gemma 2). Not in Megatron-LM."""
    z_loss_coeff: float = field(default=0.0, metadata=in_range(at_least=0))
    """Add this times the square of the logarithm of the softmax's sum to each token's loss; logged as `z loss`. Not in Megatron-LM."""
    embedding_multiplier: float = field(default=1.0, metadata=in_range(above=0))
    """Factor of the embedding's output, the square root of the hidden size in Gemma. Not in Megatron-LM."""
    fp32_residual_connection: bool = False
    """Keep the residual stream in fp32."""
    untie_embeddings_and_output_weights: bool = False
    """Give the output layer weights of its own instead of those of the embedding."""
    disable_bias_linear: bool = False
    """Leave out the biases of linear layers."""
    add_qkv_bias: bool = False
    """Give queries, keys and values biases although --disable-bias-linear is on."""
    hidden_dropout: float = field(default=0.1, metadata=in_range(at_least=0, below=1))
    """Share of the residual branches' values that training drops."""
    attention_dropout: float = field(default=0.1, metadata=in_range(at_least=0, below=1))
    """Share of the attention probabilities that training drops."""
    init_method_std: float = field(default=0.02, metadata=in_range(at_least=0))
    """Standard deviation of the initial weights; projections back to the residual stream divide it by sqrt(2 * layers)."""
    embedding_init_method_std: float | None = field(default=None, metadata=in_range(at_least=0))
    """Standard deviation of the embeddings' initial values; none: --init-method-std."""
    spec: tuple[str, ...] = ()
    """Layers from a function of your own: file.py:function, module:function, or module and function (docs/models.md)."""
    spec_digest: str | None = AUTO
    """Fingerprint of the file that --spec names. Left open: the file's."""
    heterogeneous_layers_config_path: str | None = None
    """JSON file with the sizes of each layer, as Megatron-LM and the models of NVIDIA's Puzzle have it."""
    heterogeneous_layers_config_encoded_json: str | None = AUTO
    """What that file holds, in place of the file. Left open: read from it."""
    use_mup: bool = False
    """Scale initial values, learning rates, attention and logits with the width (muP), so that settings found for a narrow model hold."""
    mup_base_hidden_size: int | None = field(default=AUTO, metadata=in_range(at_least=1))
    """Hidden size that the learning rate and its like were found for. Left open with --use-mup: this model's own."""
    mup_width_mult: float = field(default=AUTO, metadata=in_range(above=0))
    """Hidden size divided by that. It follows from the two; another value is refused."""
    mup_base_head_dim: float | None = field(default=None, metadata=in_range(above=0))
    """Channels of a head of the base model: where given, --use-mup multiplies attention's scores with their square root."""
    mup_attn_scale_power: float = 1.0
    """With --use-mup, attention's scores are divided by the channels of a head to the power of this."""
    mup_embedding_mult: float = field(default=1.0, metadata=in_range(above=0))
    """With --use-mup, factor of the embedding's output."""
    mup_output_mult: float = field(default=AUTO, metadata=in_range(above=0))
    """With --use-mup, factor of the logits. Left open, or 1: 1 / the width multiplier."""
    make_vocab_size_divisible_by: int = field(default=128, metadata=in_range(at_least=1))
    """The vocabulary is padded to a multiple of this times the tensor-parallel size."""
    padded_vocab_size: int = field(default=AUTO, metadata=in_range(at_least=1))
    """Rows of the embedding. Left open: the tokenizer's vocabulary, padded."""
    transformer_impl: Literal["local", "transformer_engine"] = "local"
    """Where the parts of layers come from: our own, or NVIDIA Transformer Engine's."""
    attention_backend: Literal[
        "auto", "flash", "fused", "unfused", "local", "flash4", "flash2", "cudnn", "sdpa", "math"
    ] = "auto"
    """Kernel of attention: by Megatron-LM's names, or flash4 (flash-attn-4), flash2, cudnn, sdpa (torch's choice), math."""
