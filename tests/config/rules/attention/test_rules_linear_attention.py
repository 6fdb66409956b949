"""Rules about linear attention: each fires, names its flags and a remedy; the FLOPs are Megatron-LM's formula."""

import pytest

from megatrain.config import Facts

DELTANET = "--experimental-attention-variant gated_delta_net --linear-attention-freq 2"
CASES = {
    "multiples_are_multiples": [
        (f"{DELTANET} --linear-num-key-heads 6 --linear-num-value-heads 8", "", Facts(world_size=2),
         ("--linear-num-value-heads 8", "--linear-num-key-heads 6"), ("--linear-num-value-heads 12", "--linear-num-key-heads 4")),
    ],
    "heads_with_states_divide_over_context_ranks": [
        (f"{DELTANET} --linear-num-key-heads 2 --linear-num-value-heads 6 --context-parallel-size 4", "", Facts(world_size=4),
         ("--context-parallel-size 4", "6 heads", "share 2"), ("--context-parallel-size 2",)),
        (f"{DELTANET} --linear-num-key-heads 6 --linear-num-value-heads 12 --context-parallel-size 4", "", Facts(world_size=4),
         ("--context-parallel-size 4", "12 heads", "share 6"), ("--context-parallel-size 2",)),
    ],
    "linear_attention_has_layers": [
        ("--experimental-attention-variant gated_delta_net", "", Facts(world_size=2),
         ("--experimental-attention-variant gated_delta_net", "--linear-attention-freq"), ("--linear-attention-freq 4",)),
        ("--experimental-attention-variant gdn --linear-attention-freq [1,0]", "", Facts(world_size=2),
         ("--linear-attention-freq", "2 entries for 4 layers"), ("--linear-attention-freq [1]*3+[0]",)),
    ],
}  # fmt: skip


def test_a_problem_names_flags_and_remedy(assert_refused, flags, without, facts, named, remedy):
    assert_refused(flags, named, remedy, without=without, facts=facts)


def test_every_other_layer_keeps_attention(plan_of):
    layers = plan_of(DELTANET).derived.model_spec.layers
    assert [(layer.attention is not None, layer.linear_attention is not None) for layer in layers] == [
        (False, True),
        (True, False),
    ] * 2


@pytest.mark.parametrize("variant", ["gated_delta_net", "gdn2"])
def test_flops_of_a_layer_follow_the_formula_of_megatron_lm(variant, plan_of):
    shape = "--num-layers 1 --hidden-size 64 --num-attention-heads 4 --linear-attention-freq [1] --linear-conv-kernel-dim 3"
    heads = "--linear-num-key-heads 2 --linear-key-head-dim 8 --linear-num-value-heads 4 --linear-value-head-dim 6"
    plan = plan_of(f"--experimental-attention-variant {variant} {shape} {heads} --ffn-hidden-size 96")
    qk, v = 2 * 8, 4 * 6
    strengths = 2 * 4 if variant == "gated_delta_net" else 2 * qk + v
    linear = 64 * (2 * qk + 2 * v + strengths) + 3 * (2 * qk + v) + 4 * 6**2 * 4 + 64 * v
    matrices = 3 if plan.derived.model_spec.layers[0].dense.is_gated else 2
    rest = matrices * 64 * 96 + 64 * plan.config.model.padded_vocab_size
    assert plan.derived.flops_per_iteration == 6 * plan.derived.tokens_per_iteration * (linear + rest)
