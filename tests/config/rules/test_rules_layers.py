"""Rules about layers with individual sizes: each fires, names its flags and a remedy."""

import pytest

from megatrain.config import Facts
from megatrain.config.rules.layers import LAYER_RULES

LAYERS = "--heterogeneous-layers-config-encoded-json"


def layers(groups, width, other_groups="4"):
    """Return the JSON of a layer with these sizes and three more layers."""
    sizes = [(groups, width), *[(other_groups, "96")] * 3]
    parts = [f'{{"attention":{{"num_query_groups":{g}}},"mlp":{{"ffn_hidden_size":{f}}}}}' for g, f in sizes]
    return f'{{"block_configs":[{",".join(parts)}]}}'


THREE = "--tensor-model-parallel-size 3 --hidden-size 48 --num-attention-heads 12 --ffn-hidden-size 96"
FULL, EMPTY = '{"attention":{},"mlp":{}}', '{"attention":{"no_op":true},"mlp":{"no_op":true}}'
NO_SECOND = f'{{"block_configs":[{FULL},{EMPTY},{FULL},{FULL}]}}'

CASES = {
    "layer_sizes_are_valid": [
        (f"{LAYERS} [{{}}]", "", None, ("--heterogeneous-layers-config-encoded-json", "block_configs"), ("no_op",)),
    ],
    "layers_divide_over_tp_ranks": [
        (f"{LAYERS} {layers('6', '64')}", "", None,
         ("--heterogeneous-layers-config-encoded-json", "layer 0", "6 query groups"), ("divisor of 4",)),
        (f"{LAYERS} {layers('4', '65')} --tensor-model-parallel-size 2", "", Facts(world_size=2),
         ("--heterogeneous-layers-config-encoded-json", "--tensor-model-parallel-size 2", "layer 0", "width 65"),
         ("width of 66",)),
        (f"{LAYERS} {layers('4', '96', '3')} {THREE}", "", Facts(world_size=3),
         ("--heterogeneous-layers-config-encoded-json", "--tensor-model-parallel-size 3", "layer 0", "4 query groups"),
         ("divisor of 3",)),
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
        ("--spec megatron.core.models.mamba.mamba_layer_specs mamba_stack_spec", "", None,
         ("mamba_stack_spec", "only the GPT layers"), ("remove --spec", "trains a GPT")),
    ],
}  # fmt: skip


@pytest.mark.parametrize(
    ("flags", "without", "facts", "named", "remedy"), [case for cases in CASES.values() for case in cases]
)
def test_a_problem_names_flags_and_remedy(assert_refused, flags, without, facts, named, remedy):
    assert_refused(flags, named, remedy, without=without, facts=facts)


def test_every_rule_has_a_case():
    assert set(CASES) == {rule.__name__ for rule in LAYER_RULES}
