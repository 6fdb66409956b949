"""Rules about layers with individual sizes: each fires, names its flags and a remedy."""

from megatrain.config import Facts

LAYERS = "--heterogeneous-layers-config-encoded-json"


def layers(groups, width, other_groups="4"):
    """Return the JSON of a layer with these sizes and three more layers."""
    sizes = [(groups, width), *[(other_groups, "96")] * 3]
    parts = [f'{{"attention":{{"num_query_groups":{g}}},"mlp":{{"ffn_hidden_size":{f}}}}}' for g, f in sizes]
    return f'{{"block_configs":[{",".join(parts)}]}}'


THREE = "--tensor-model-parallel-size 3 --hidden-size 48 --num-attention-heads 12 --ffn-hidden-size 96"
FULL, EMPTY = '{"attention":{},"mlp":{}}', '{"attention":{"no_op":true},"mlp":{"no_op":true}}'
NO_SECOND = f'{{"block_configs":[{FULL},{EMPTY},{FULL},{FULL}]}}'

DELTANET = "--experimental-attention-variant gated_delta_net --linear-attention-freq 2"
GQA, FOUR = "--group-query-attention", "--num-experts 4"

CASES = {
    "layer_sizes_are_valid": [
        (f"{LAYERS} [{{}}]", "", None, ("--heterogeneous-layers-config-encoded-json", "block_configs"), ("no_op",)),
    ],
    "linears_divide_over_ranks": [
        (f"{LAYERS} {layers('4', '65')} --tensor-model-parallel-size 2", "", Facts(world_size=2),
         ("--heterogeneous-layers-config-encoded-json", "--tensor-model-parallel-size 2", "layer 0", "width 65"),
         ("--tensor-model-parallel-size 1", "66")),
        (f"{LAYERS} {layers('4', '96', '3')} {THREE}", "", Facts(world_size=3),
         ("--heterogeneous-layers-config-encoded-json", "--tensor-model-parallel-size 3", "layer 0", "4 query groups"),
         ("--tensor-model-parallel-size 1", "divisor of 3")),
        ("--num-attention-heads 4 --tensor-model-parallel-size 8", "", Facts(world_size=8),
         ("--num-attention-heads 4", "--tensor-model-parallel-size 8"),
         ("--tensor-model-parallel-size 4", "--num-attention-heads 8")),
        (f"{GQA} --num-attention-heads 12 --kv-channels 4 --num-query-groups 4 --tensor-model-parallel-size 6 --hidden-size 48 --ffn-hidden-size 96", "", Facts(world_size=6),
         ("--tensor-model-parallel-size 6", "--num-query-groups 4"),
         ("--tensor-model-parallel-size 2", "--num-query-groups 3")),
        (f"{GQA} --num-attention-heads 12 --kv-channels 4 --num-query-groups 3 --tensor-model-parallel-size 2", "", Facts(world_size=2),
         ("--num-query-groups 3", "--tensor-model-parallel-size 2"),
         ("--tensor-model-parallel-size 1", "--num-query-groups 4")),
        ("--ffn-hidden-size 101 --tensor-model-parallel-size 2", "", Facts(world_size=2),
         ("--ffn-hidden-size 101", "--tensor-model-parallel-size 2"), ("--ffn-hidden-size 102",)),
        (f"{FOUR} --moe-ffn-hidden-size 33 --expert-tensor-parallel-size 2", "", Facts(world_size=2),
         ("--moe-ffn-hidden-size 33", "--expert-tensor-parallel-size 2", "--tensor-model-parallel-size"),
         ("--expert-tensor-parallel-size 1", "--moe-ffn-hidden-size 34")),
        (("--num-experts 4 --moe-shared-expert-intermediate-size 33 --tensor-model-parallel-size 2"
          " --sequence-parallel"), "", Facts(world_size=2),
         ("--moe-shared-expert-intermediate-size 33", "--tensor-model-parallel-size 2"),
         ("--moe-shared-expert-intermediate-size 34",)),
        (f"{DELTANET} --linear-num-key-heads 3 --linear-num-value-heads 6 --tensor-model-parallel-size 2", "", Facts(world_size=2),
         ("--linear-num-key-heads 3", "--tensor-model-parallel-size 2"), ("--linear-num-key-heads 6",)),
        (f"{DELTANET} --linear-num-key-heads 2 --linear-num-value-heads 6 --tensor-model-parallel-size 4", "", Facts(world_size=4),
         ("--linear-num-key-heads 2", "--tensor-model-parallel-size 4"),
         ("--tensor-model-parallel-size 2",)),
    ],
    "query_groups_fit_the_heads_of_layers": [
        (f"{LAYERS} {layers('6', '64')}", "", None,
         ("--heterogeneous-layers-config-encoded-json", "layer 0", "6 query groups"), ("divisor of 4",)),
        (f"{LAYERS} {layers('1', '64', '2')} --tensor-model-parallel-size 4", "", Facts(world_size=4),
         ("--heterogeneous-layers-config-encoded-json", "--tensor-model-parallel-size 4", "layer 0", "layer 1"),
         ("--tensor-model-parallel-size 1",)),
    ],
    "stages_are_not_empty": [
        (f"{LAYERS} {NO_SECOND} --pipeline-model-parallel-size 4 --global-batch-size 8", "", Facts(world_size=4),
         ("--heterogeneous-layers-config-encoded-json", "--pipeline-model-parallel-size 4", "stage 1"),
         ("--pipeline-model-parallel-size",)),
    ],
    "spec_names_a_function": [
        ("--spec gpt", "", None, ("--spec gpt",), ("file.py:function",)),
        ("--spec a b c", "", None, ("--spec", "a b c"), ("file.py:function",)),
        ("--spec megatron.core.models.retro.decoder_spec get_retro_decoder_block_spec", "", None,
         ("get_retro_decoder_block_spec", "only the plain layers"), ("remove --spec", "another model")),
    ],
}  # fmt: skip


def test_a_problem_names_flags_and_remedy(assert_refused, flags, without, facts, named, remedy):
    assert_refused(flags, named, remedy, without=without, facts=facts)
