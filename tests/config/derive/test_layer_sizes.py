"""Sizes of each layer: the values of the JSON file, and errors with their place."""

import json
import math

import pytest

from megatrain.config import Facts

LAYERS = "--heterogeneous-layers-config-encoded-json"
FULL = {"attention": {}, "mlp": {}}


def flags(*blocks):
    return f"{LAYERS} {json.dumps({'block_configs': list(blocks)}, separators=(',', ':'))}"


def sizes(plan):
    return [
        (
            layer.attention.num_query_groups if layer.attention else 0,
            layer.dense.ffn_hidden_size if layer.dense else 0,
        )
        for layer in plan.derived.model_spec.layers
    ]


def test_all_layers_are_equal_without_a_file(plan_of):
    plan = plan_of("--group-query-attention --num-query-groups 2 --ffn-hidden-size 96")
    assert sizes(plan) == [(2, 96)] * 4


def test_each_layer_has_its_own_sizes(plan_of):
    plan = plan_of(
        flags(
            {"attention": {"num_query_groups": 2}, "mlp": {"ffn_hidden_size": 96}},
            {
                "attention": {"n_heads_in_group": 4, "no_op": False},
                "ffn": {"ffn_mult": 2.625, "sparsify": None},
            },
            {"attention": {"no_op": True, "n_heads_in_group": None}, "ffn": {"ffn_mult": None}},
            {"attention": {"num_query_groups": None}, "mlp": {"no_op": True}},
        )
        + " --ffn-hidden-size 80"
    )
    assert sizes(plan) == [(2, 96), (1, 256), (0, 80), (4, 0)]  # 2/3 * 2.625 * 64 = 112, up to 256
    assert str(plan.derived.model_spec) == (
        "4 layers, query groups 1 to 4, ffn 80 to 256, 1 without attention, 1 without MLP"
    )


def test_a_linear_layer_replaces_attention_or_an_mlp(plan_of):
    linear, given = {"replace_with_linear": True}, {"replace_with_linear": None, "no_op": False}
    blocks = [{"attention": linear, "mlp": given}, {"attention": given, "ffn": linear}]
    spec = plan_of(
        f"--num-layers 2 --hidden-size 64 --ffn-hidden-size 96 {flags(*blocks)}"
    ).derived.model_spec
    first, second = (
        [(one.weight, one.outputs, one.inputs) for one in layer.linears(64)] for layer in spec.layers
    )
    assert (first[0], second[-1]) == (("attention.linear", 64, 64), ("mlp.linear", 64, 64))
    assert (len(first), len(second)) == (3, 3)
    assert "1 with a linear layer as attention, 1 with a linear layer as MLP" in str(spec)


def test_copies_of_heads_follow_the_layers_and_not_the_flag(plan_of):
    """No layer has the --num-query-groups that tensor ranks could not hold."""
    blocks = [{"attention": {"num_query_groups": 4}, "mlp": {}}] * 2
    shape = "--num-layers 2 --hidden-size 48 --num-attention-heads 12 --group-query-attention --num-query-groups 3"
    plan = plan_of(
        f"{shape} --tensor-model-parallel-size 4 --ffn-hidden-size 96 {flags(*blocks)}",
        facts=Facts(world_size=4),
    )
    assert plan.derived.kv_copies == 1


def test_flops_depend_on_the_layers(plan_of):
    """A layer without MLP and one without attention have the FLOPs of one whole layer."""
    whole = plan_of("--num-layers 1 --ffn-hidden-size 96").derived.flops_per_iteration
    parts = flags({"attention": {}, "mlp": {"no_op": True}}, {"attention": {"no_op": True}, "mlp": {}})
    assert plan_of(f"--num-layers 2 --ffn-hidden-size 96 {parts}").derived.flops_per_iteration == whole


def test_an_output_gate_of_attention_adds_a_projection_of_the_width_of_the_queries(plan_of):
    shape = "--num-layers 3 --hidden-size 64 --num-attention-heads 4 --kv-channels 24"
    plain, gated = plan_of(shape), plan_of(f"{shape} --attention-output-gate")
    tokens = plain.derived.tokens_per_iteration
    added = gated.derived.flops_per_iteration - plain.derived.flops_per_iteration
    assert added == 6 * tokens * 3 * 64 * 4 * 24


def test_the_configuration_stores_the_contents_of_the_file(plan_of):
    text = json.dumps({"hidden_size": 1, "block_configs": [FULL] * 4}, indent=2)
    path = "--heterogeneous-layers-config-path sizes.json"
    plan = plan_of(path, facts=Facts(layers_config=text))
    kept = plan.config.model.heterogeneous_layers_config_encoded_json
    assert kept == json.dumps({"block_configs": [FULL] * 4}, separators=(",", ":"))
    assert plan_of(f"{path} {LAYERS} {kept}").derived == plan.derived


def broken(block):
    return flags(block, FULL, FULL, FULL)


@pytest.mark.parametrize(
    ("given", "words"),
    [
        (f'{LAYERS} {{"block_configs":', "line 1, column 18: Expecting value"),
        (flags(FULL), "block_configs has 1 layers, and --num-layers is 4"),
        (broken([]), "block_configs[0] is not an object"),
        (broken({"mlp": {}}), "block_configs[0] has no object `attention`"),
        (broken({"attention": {}}), "block_configs[0] has no object `mlp` or `ffn`"),
        (broken({**FULL, "ffn": {}}), "block_configs[0] has mlp and ffn together"),
        (broken({**FULL, "moe": {"n": 1}}), 'block_configs[0].moe {"n": 1} is not supported'),
        (broken({"attention": {"window_length": 8}, "mlp": {}}), "block_configs[0].attention.window_length 8 is not supported"),
        (broken({"attention": {}, "ffn": {"replace_with_linear": True, "no_op": True}}), "block_configs[0].ffn has no_op and replace_with_linear"),
        (broken({"attention": {"replace_with_linear": 1}, "ffn": {}}), "block_configs[0].attention.replace_with_linear 1 is not true or false"),
        (broken({"attention": {"num_query_groups": 1.5}, "mlp": {}}), "block_configs[0].attention.num_query_groups 1.5 is not a whole number above 0"),
        (broken({"attention": {"n_heads_in_group": 3}, "mlp": {}}), "block_configs[0].attention.n_heads_in_group 3 does not divide --num-attention-heads 4"),
        (broken({"attention": {}, "mlp": {"ffn_hidden_size": 0}}), "block_configs[0].mlp.ffn_hidden_size 0 is not a whole number above 0"),
        (broken({"attention": {}, "mlp": {"ffn_mult": "2"}}), 'block_configs[0].mlp.ffn_mult "2" is not a number above 0'),
        (broken({"attention": {}, "mlp": {"ffn_mult": math.nan}}), "block_configs[0].mlp.ffn_mult NaN is not a number above 0"),
        (broken({"attention": {}, "mlp": {"ffn_mult": 10**40}}), "is not a number above 0 and below 1e6"),
        (broken({"attention": {"no_op": 1}, "mlp": {}}), "block_configs[0].attention.no_op 1 is not true or false"),
        (broken({"attention": {}, "mlp": {"no_op": True, "ffn_hidden_size": 8}}), "block_configs[0].mlp has no_op and a size"),
    ],
)  # fmt: skip
def test_an_invalid_value_is_named_with_its_place(problems_of, given, words):
    (problem,) = problems_of(given.replace(", ", ",").replace('": ', '":'))
    assert words in problem
