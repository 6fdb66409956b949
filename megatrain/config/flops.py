"""Counts that the model's shape decides: floating-point operations and padded vocabulary rows.

    one token, one layer:  h*(q + 2k)  queries, keys, values      q = heads * channels
                           q*h         attention's output         k = groups * channels
                           m*h*f       the MLP                    m = 3 if gated, else 2
    and once:              h*v         the output layer           v = padded vocabulary
    pairs of tokens:       q           scores and their use, causal half of two products

Each of these is a multiply and an add, in the forward and twice in the backward: times 6. Recomputation, norms,
softmax and embedding are not counted.

Source: Megatron-LM, training/training.py; its numbers are in tests/golden. It takes --quick-geglu for an MLP without
a gate, and windows for whole sequences; of these only the second is kept.
"""

from megatrain.config.model import ModelConfig


def training_flops(model: ModelConfig, *, num_tokens: int, sum_of_squared_lengths: int) -> int:
    """Operations of forward and backward over documents with this many tokens and this sum of squared lengths."""
    h = model.hidden_size
    q = model.kv_channels * model.num_attention_heads
    k = model.kv_channels * model.num_query_groups
    matrices = 3 if model.swiglu or model.geglu or model.quick_geglu else 2
    layer = matrices * h * model.ffn_hidden_size + h * (q + 2 * k) + q * h
    per_token = model.num_layers * layer + h * model.padded_vocab_size
    return 6 * (num_tokens * per_token + sum_of_squared_lengths * model.num_layers * q)


def padded_vocabulary(vocab_size: int, *, divisible_by: int, tp_size: int) -> int:
    """Rows of the embedding: the next multiple at which every tensor-parallel rank holds a multiple of `divisible_by`."""
    multiple = divisible_by * tp_size
    return -(-vocab_size // multiple) * multiple
