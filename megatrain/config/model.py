"""What the model is: its sizes and the parts it is made of. Nothing here depends on the number of ranks."""

from dataclasses import dataclass, field
from typing import Literal

from megatrain.config.values import AUTO, REQUIRED, in_range


@dataclass(frozen=True, kw_only=True)
class ModelConfig:
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
    """Longest sequence that the model is meant for; only checked against --seq-length."""
    normalization: Literal["LayerNorm", "RMSNorm"] = "LayerNorm"
    """Kind of the norms."""
    norm_epsilon: float = field(default=1e-5, metadata=in_range(above=0))
    """Added to the variance, or the mean square, inside a norm."""
    swiglu: bool = False
    """Use a gated MLP with SiLU in place of GELU."""
    position_embedding_type: Literal["learned_absolute", "rope", "none"] = "learned_absolute"
    """How the model knows the places of tokens."""
    rotary_base: float = field(default=10000.0, metadata=in_range(above=0))
    """Base of the wavelengths of rotary embeddings."""
    untie_embeddings_and_output_weights: bool = False
    """Give the output layer weights of its own instead of those of the embedding."""
    disable_bias_linear: bool = False
    """Leave out the biases of linear layers."""
    hidden_dropout: float = field(default=0.1, metadata=in_range(at_least=0, below=1))
    """Share of the residual branches' values that training drops."""
    attention_dropout: float = field(default=0.1, metadata=in_range(at_least=0, below=1))
    """Share of the attention probabilities that training drops."""
    init_method_std: float = field(default=0.02, metadata=in_range(at_least=0))
    """Standard deviation of the initial weights; projections back to the residual stream divide it by sqrt(2 * layers)."""
    make_vocab_size_divisible_by: int = field(default=128, metadata=in_range(at_least=1))
    """The vocabulary is padded to a multiple of this times the tensor-parallel size."""
    padded_vocab_size: int = field(default=AUTO, metadata=in_range(at_least=1))
    """Rows of the embedding. Left open: the tokenizer's vocabulary, padded."""
    transformer_impl: Literal["local", "transformer_engine"] = "local"
    """Where the parts of layers come from: our own, or NVIDIA Transformer Engine's."""
