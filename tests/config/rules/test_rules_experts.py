"""Rules about experts: each fires, names its flags and a remedy."""

from megatrain.config import Facts
from megatrain.config.model_spec.experts import ExpertsSpec, RouterSpec
from megatrain.config.model_spec.mlp import MlpSpec

OF_EXPERTS = ExpertsSpec(router=RouterSpec(num_experts=6, top_k=2), expert=MlpSpec(ffn_hidden_size=16))
ETP = "--tensor-model-parallel-size 2 --sequence-parallel"
FOUR = "--num-experts 4"

CASES = {
    "ranks_of_a_host_divide_expert_ranks": [
        (f"{FOUR} --expert-model-parallel-size 4 --moe-token-dispatcher-type alltoall --moe-alltoall-ranks-per-host 3", "",
         Facts(world_size=4), ("--moe-alltoall-ranks-per-host 3", "--expert-model-parallel-size 4"),
         ("--moe-alltoall-ranks-per-host 2",)),
    ],
    "multiples_are_multiples": [
        (f"{FOUR} --expert-model-parallel-size 3", "", Facts(world_size=3),
         ("--num-experts 4", "--expert-model-parallel-size 3"),
         ("--expert-model-parallel-size 1", "--num-experts 6")),
    ],
    "conflicting_settings": [
        ("--num-experts 4 --moe-router-enable-expert-bias", "", None,
         ("--moe-router-enable-expert-bias", "--moe-router-score-function softmax"),
         ("--moe-router-score-function sigmoid", "--moe-router-enable-expert-bias")),
        (("--num-experts 4 --moe-router-load-balancing-type quantile_balancing --moe-router-enable-expert-bias"
          " --moe-router-score-function sigmoid"), "", None,
         ("--moe-router-load-balancing-type quantile_balancing", "--moe-router-enable-expert-bias"), ("remove --", ", or --")),
        (("--num-experts 4 --moe-router-load-balancing-type sinkhorn --moe-router-enable-expert-bias"
          " --moe-router-score-function sigmoid"), "", None,
         ("--moe-router-load-balancing-type sinkhorn", "--moe-router-enable-expert-bias"), ("remove --", ", or --")),
        (f"{FOUR} --overlap-moe-expert-parallel-comm --moe-shared-expert-intermediate-size 64 --moe-shared-expert-overlap", "", None,
         ("--overlap-moe-expert-parallel-comm", "--moe-shared-expert-overlap"), ("remove --moe-shared-expert-overlap",)),
    ],
    "expert_layers_are_valid": [
        ("--num-experts 4 --moe-layer-freq [0]*2+[1]", "", None, ("--moe-layer-freq", "3 entries"), ("[0]*1+[1]*3",)),
        ("--num-experts 4 --moe-layer-freq [0]*4", "", None,
         ("--moe-layer-freq [0]*4", "--num-experts"), ("--moe-layer-freq", "--num-experts")),
    ],
    "experts_have_a_width": [
        ("--num-experts 4 --moe-ffn-hidden-size none", "", None,
         ("--moe-ffn-hidden-size none",), ("--moe-ffn-hidden-size",)),
    ],
    "topk_fits_num_experts": [
        ("--num-experts 4 --moe-router-topk 6", "", None,
         ("--moe-router-topk 6", "--num-experts 4"), ("--moe-router-topk 2",)),
    ],
    "top1_routing_has_a_gradient": [
        ("--num-experts 4 --moe-router-topk 1", "", None,
         ("--moe-router-topk 1",), ("--moe-router-pre-softmax", "--moe-router-score-function sigmoid")),
    ],
    "overlapped_passes_are_combined": [
        (f"{FOUR} {ETP} --pipeline-model-parallel-size 2 --pipeline-schedule zb-h1 --overlap-moe-expert-parallel-comm", "", Facts(world_size=4),
         ("--overlap-moe-expert-parallel-comm", "zb-h1"), ("--pipeline-schedule dualpipe-v", "--no-overlap-moe-expert-parallel-comm")),
        (f"{FOUR} {ETP} --num-layers 2 --pipeline-model-parallel-size 2 --overlap-moe-expert-parallel-comm", "", Facts(world_size=4),
         ("--overlap-moe-expert-parallel-comm", "1f1b"), ("use --no-overlap-moe-expert-parallel-comm",)),
        (f"{FOUR} --expert-model-parallel-size 2 --pipeline-model-parallel-size 2 --overlap-moe-expert-parallel-comm", "", Facts(world_size=4),
         ("--overlap-moe-expert-parallel-comm", "--pipeline-model-parallel-size 2"),
         ("--pipeline-schedule dualpipe-v",)),
    ],
    "expert_groups_are_valid": [
        ("--num-experts 6 --moe-router-num-groups 4 --moe-router-group-topk 2", "", None,
         ("--num-experts 6", "--moe-router-num-groups 4"), ("--moe-router-num-groups 3",)),
        ("--num-experts 8 --moe-router-num-groups 4 --moe-router-group-topk 5", "", None,
         ("--moe-router-group-topk 5", "--moe-router-num-groups 4"), ("--moe-router-group-topk 2",)),
        ("--num-experts 8 --moe-router-num-groups 4 --moe-router-group-topk 2 --moe-router-topk 3", "", None,
         ("--moe-router-topk 3", "--moe-router-group-topk 2"), ("--moe-router-topk 2",)),
        ("--num-experts 8 --moe-router-num-groups 4", "", None,
         ("--moe-router-num-groups", "--moe-router-group-topk"),
         ("--moe-router-num-groups 2", "--moe-router-group-topk 1")),
        ("--num-experts 8 --moe-router-group-score-topk 1", "", None,
         ("--moe-router-group-score-topk 1 requires",), ("--moe-router-num-groups 2",)),
        ("--num-experts 8 --moe-router-num-groups 4 --moe-router-group-topk 2 --moe-router-group-score-topk 3", "", None,
         ("--moe-router-group-score-topk 3", "2 experts of a group"), ("--moe-router-group-score-topk 2 or less",)),
    ],
    "load_balancing_is_valid": [
        ("--num-experts 4 --moe-router-load-balancing-type aux_loss none --moe-aux-loss-coeff 1e-2 0", "", None,
         ("--moe-router-load-balancing-type aux_loss none",), ("one of them",)),
        ("--num-experts 4 --moe-router-load-balancing-type aux_loss seq_aux_loss --moe-aux-loss-coeff 1e-2", "", None,
         ("--moe-router-load-balancing-type", "--moe-aux-loss-coeff"), ("--moe-aux-loss-coeff 1e-2 1e-2",)),
    ],
    "quantile_balancing_is_possible": [
        (("--num-experts 4 --moe-router-load-balancing-type quantile_balancing --moe-router-num-groups 2"
          " --moe-router-group-topk 1"), "", None,
         ("quantile_balancing", "--moe-router-num-groups"), ("--moe-router-num-groups", "aux_loss")),
        ("--num-experts 4 --moe-router-load-balancing-type quantile_balancing --moe-router-topk 4", "", None,
         ("quantile_balancing", "--moe-router-topk 4"), ("--moe-router-load-balancing-type none",)),
    ],
    "weight_gradients_read_sent_codes": [
        (f"{FOUR} --fp8-format e4m3 --no-fp8-wgrad --moe-fp8-dispatch", "", None,
         ("--moe-fp8-dispatch", "--no-fp8-wgrad"), ("remove --no-fp8-wgrad", "--moe-fp8-dispatch")),
    ],
    "expert_ranks_have_experts": [
        ("--expert-model-parallel-size 2", "", Facts(world_size=2),
         ("--expert-model-parallel-size 2", "--num-experts"), ("--num-experts", "--expert-model-parallel-size")),
    ],
    "experts_require_sequence_parallel": [
        ("--num-experts 4 --tensor-model-parallel-size 2", "", Facts(world_size=2),
         ("--tensor-model-parallel-size 2", "--sequence-parallel"), ("--sequence-parallel",)),
    ],
    "custom_experts_are_those_of_flags": [
        ("--spec my.py:layers", "", Facts(digests={"model.spec": "1"}, custom_layers=lambda _, layers: tuple(one.with_part(OF_EXPERTS) for one in layers)),
         ("--spec", "--num-experts", "layer 0", "6 experts"), ("--num-experts 6",)),
    ],
}  # fmt: skip


def test_a_problem_names_flags_and_remedy(assert_refused, flags, without, facts, named, remedy):
    assert_refused(flags, named, remedy, without=without, facts=facts)
