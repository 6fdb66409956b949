"""Counts that the model's shape decides: floating-point operations and padded vocabulary rows.

    one token, each layer:  h*(q + 2k)  queries, keys, values      q = heads * channels
                           q*h         attention's output         k = groups * channels
                           m*h*f       the MLP                    m = 3 if gated, else 2; of experts, all widths that a token meets
    and once:              h*v         the output layer           v = padded vocabulary
    pairs of tokens:       q           scores and their use, causal half of two products

Each of these is a multiply and an add, in the forward and twice in the backward: times 6. Recomputation, norms,
softmax and embedding are not counted.

Source: Megatron-LM, training/training.py; its numbers are in tests/golden. It takes --quick-geglu for an MLP without
a gate, and windows for whole sequences; of these only the second is kept.
"""

from megatrain.config.derive.layer_sizes import LayerTable
from megatrain.config.schema.model import ModelConfig


def training_flops(
    model: ModelConfig, table: LayerTable, *, num_tokens: int, sum_of_squared_lengths: int
) -> int:
    """Operations of forward and backward over documents with this many tokens and this sum of squared lengths."""
    h = model.hidden_size
    per_token, per_pair = h * model.padded_vocab_size, 0
    for layer in table.layers:
        q, k = layer.head_channels * layer.num_heads, layer.head_channels * layer.num_query_groups
        matrices = 3 if layer.is_gated else 2
        per_token += matrices * h * layer.active_width + h * (q + 2 * k) + q * h
        per_pair += q
    return 6 * (num_tokens * per_token + sum_of_squared_lengths * per_pair)


def padded_vocabulary(vocab_size: int, *, divisible_by: int, tp_size: int) -> int:
    """Rows of the embedding: the next multiple at which every tensor-parallel rank holds a multiple of `divisible_by`."""
    multiple = divisible_by * tp_size
    return -(-vocab_size // multiple) * multiple
