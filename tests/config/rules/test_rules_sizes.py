"""Rules about sizes: each fires, names its flags and a remedy."""

import pytest

from megatrain.config import ConfigError, Facts

GQA = "--group-query-attention"


FOUR = "--num-experts 4"

CASES = {
    "multiples_are_multiples": [
        (f"{GQA} --num-query-groups 3", "", None,
         ("--num-attention-heads 4", "--num-query-groups 3"), ("--num-query-groups 2",)),
        ("--num-attention-heads 6 --kv-channels 2 --ffn-hidden-size 9 --tensor-model-parallel-size 3", "", Facts(world_size=3),
         ("--hidden-size 64", "--tensor-model-parallel-size 3"),
         ("--hidden-size 66", "--tensor-model-parallel-size 1")),
        ("--padded-vocab-size 101 --tensor-model-parallel-size 2", "", Facts(world_size=2),
         ("--padded-vocab-size 101", "--tensor-model-parallel-size 2"), ("--padded-vocab-size 102",)),
    ],
    "query_groups_have_an_effect": [
        ("--num-query-groups 2", "", None,
         ("--num-query-groups 2", "--group-query-attention", "4 key and value heads"), ("add --group-query-attention", "remove --num-query-groups")),
    ],
    "hidden_size_divides_over_heads": [
        ("--hidden-size 62", "", None,
         ("--hidden-size 62", "--num-attention-heads 4"), ("--hidden-size 64", "--kv-channels")),
    ],
    "ffn_size_is_positive": [
        ("--hidden-size 16", "", None, ("--hidden-size 16", "width 0"), ("--ffn-hidden-size 64",)),
    ],
    "pipeline_is_valid": [
        ("--pipeline-model-parallel-size 3", "", Facts(world_size=3),
         ("--num-layers 4", "--pipeline-model-parallel-size 3"),
         ("--pipeline-model-parallel-layout auto", "--num-layers 3")),
        ("--pipeline-model-parallel-size 8", "", Facts(world_size=8),
         ("--num-layers 4", "--pipeline-model-parallel-size 8"), ("--num-layers 8",)),
        ("--pipeline-model-parallel-size 8 --pipeline-model-parallel-layout auto", "", Facts(world_size=8),
         ("--num-layers 4", "8 stages"), ("--pipeline-model-parallel-size 4", "--num-layers 7")),
        ("--pipeline-model-parallel-size 2 --pipeline-model-parallel-layout Et|t|tL", "", Facts(world_size=2),
         ("--pipeline-model-parallel-layout Et|t|tL", "3 stages", "--pipeline-model-parallel-size 2"), ("stages",)),
        ("--pipeline-model-parallel-size 2 --pipeline-model-parallel-layout Ett|tL", "", Facts(world_size=2),
         ("has 3 layers", "--num-layers is 4"), ("--num-layers 3",)),
        ("--pipeline-model-parallel-size 2 --pipeline-model-parallel-layout tt|ttL", "", Facts(world_size=2),
         ("--pipeline-model-parallel-layout", "E"), ("first stage with E",)),
        ("--pipeline-model-parallel-size 2 --pipeline-model-parallel-layout Ett|xL", "", Facts(world_size=2),
         ("Ett|xL", "not of the form"), ("write E",)),
        ("--pipeline-model-parallel-size 4 --pipeline-model-parallel-layout Ett||tt|L", "", Facts(world_size=4),
         ("virtual stage 1", "no layers"), ("fewer stages",)),
        ("--pipeline-model-parallel-size 2 --num-layers-per-virtual-pipeline-stage 1 --num-virtual-stages-per-pipeline-rank 2", "", Facts(world_size=2),
         ("--num-virtual-stages-per-pipeline-rank 2", "--num-layers-per-virtual-pipeline-stage 1"), ("one of them",)),
        ("--pipeline-model-parallel-size 2 --num-layers-per-virtual-pipeline-stage 3", "", Facts(world_size=2),
         ("--num-layers 4", "--num-layers-per-virtual-pipeline-stage 3"), ("--pipeline-model-parallel-layout auto",)),
        ("--pipeline-model-parallel-size 2 --decoder-first-pipeline-num-layers 5", "", Facts(world_size=2),
         ("--num-layers 4", "5 layers"), ("--pipeline-model-parallel-layout auto",)),
        ("--pipeline-model-parallel-size 2 --decoder-first-pipeline-num-layers 1 --num-virtual-stages-per-pipeline-rank 2", "", Facts(world_size=2),
         ("1 3 layers", "2 model chunks"), ("--pipeline-model-parallel-layout",)),
        ("--pipeline-model-parallel-size 2 --pipeline-schedule interleaved", "", Facts(world_size=2),
         ("--pipeline-schedule interleaved", "several model chunks"), ("--num-virtual-stages-per-pipeline-rank 2",)),
        ("--pipeline-model-parallel-size 2 --pipeline-schedule zb-h1 --num-virtual-stages-per-pipeline-rank 2", "", Facts(world_size=2),
         ("--pipeline-schedule zb-h1", "1 model chunk per rank, not 2"), ("--num-virtual-stages-per-pipeline-rank 1",)),
        ("--pipeline-model-parallel-size 2 --pipeline-schedule dualpipe-v --num-virtual-stages-per-pipeline-rank 1", "", Facts(world_size=2),
         ("--pipeline-schedule dualpipe-v", "2 model chunks per rank, not 1"), ("--num-virtual-stages-per-pipeline-rank 2",)),
        ("--pipeline-model-parallel-size 2 --pipeline-schedule zb-v --pipeline-model-parallel-layout Ett|ttL", "", Facts(world_size=2),
         ("--pipeline-schedule zb-v", "2 model chunks per rank, not 1"), ("--pipeline-model-parallel-layout by `|` into 4 stages",)),
        ("--pipeline-model-parallel-size 2 --pipeline-schedule zb-v --num-layers-per-virtual-pipeline-stage 2", "", Facts(world_size=2),
         ("--pipeline-schedule zb-v", "2 model chunks per rank, not 1"), ("2 in place of --num-layers-per-virtual-pipeline-stage",)),
        ("--pipeline-model-parallel-size 2 --num-virtual-stages-per-pipeline-rank 2 --microbatch-group-size-per-virtual-pipeline-stage 1", "", Facts(world_size=2),
         ("--microbatch-group-size-per-virtual-pipeline-stage 1", "--pipeline-model-parallel-size 2"), ("--microbatch-group-size-per-virtual-pipeline-stage 2",)),
    ],
    "ranks_hold_whole_replicas": [
        ("--pipeline-model-parallel-size 2", "", Facts(world_size=3),
         ("--tensor-model-parallel-size 1", "--pipeline-model-parallel-size 2", "3"), ("start 4 ranks", "torchrun")),
        ("--pipeline-model-parallel-size 2 --dry-run --world-size 3", "", Facts(world_size=3),
         ("--world-size 3", "--tensor-model-parallel-size 1", "--pipeline-model-parallel-size 2"),
         ("--world-size 4",)),
        ("--context-parallel-size 3 --seq-length 48", "", Facts(world_size=4),
         ("--tensor-model-parallel-size 1", "--context-parallel-size 3", "--pipeline-model-parallel-size 1", "4"),
         ("start 6 ranks",)),
    ],
    "ranks_hold_all_experts": [
        (f"{FOUR} --expert-model-parallel-size 4 --pipeline-model-parallel-size 2", "", Facts(world_size=12),
         ("--expert-tensor-parallel-size 1", "--expert-model-parallel-size 4", "--pipeline-model-parallel-size 2", "12"),
         ("start 16 ranks",)),
    ],
    "expert_ranks_match_dense_ranks": [
        ((f"{FOUR} --sequence-parallel --expert-model-parallel-size 4 --tensor-model-parallel-size 2 --pipeline-model-parallel-size 2"
          " --expert-tensor-parallel-size 1 --use-tp-pp-dp-mapping"), "", Facts(world_size=8),
         ("--use-tp-pp-dp-mapping", "--expert-tensor-parallel-size 1", "--expert-model-parallel-size 4", "--tensor-model-parallel-size 2", "--context-parallel-size 1"),
         ("--use-tp-pp-dp-mapping", "--expert-tensor-parallel-size 1", "--expert-model-parallel-size")),
        (f"{FOUR} --context-parallel-size 2 --pipeline-model-parallel-size 2 --use-tp-pp-dp-mapping", "", Facts(world_size=4),
         ("--use-tp-pp-dp-mapping", "--expert-tensor-parallel-size 1", "--expert-model-parallel-size 1", "--tensor-model-parallel-size 1", "--context-parallel-size 2"),
         ("--use-tp-pp-dp-mapping", "--expert-tensor-parallel-size 1", "--expert-model-parallel-size")),
    ],
    "global_batch_divides_into_passes": [
        ("--global-batch-size 9", "", Facts(world_size=2),
         ("--global-batch-size 9", "--micro-batch-size 2"), ("--global-batch-size 12",)),
        ("--global-batch-size 3 --decrease-batch-size-if-needed", "", Facts(world_size=2),
         ("--global-batch-size 3", "--micro-batch-size 2", "--decrease-batch-size-if-needed"),
         ("--global-batch-size 4",)),
    ],
    "evaluation_batch_divides_into_passes": [
        ("--eval-global-batch-size 7", "", None,
         ("--eval-global-batch-size 7", "--micro-batch-size 2"), ("--eval-global-batch-size 8",)),
        ("--eval-micro-batch-size 4 --global-batch-size 6", "", None,
         ("--eval-global-batch-size 6", "--eval-micro-batch-size 4"), ("--eval-global-batch-size 8",)),
    ],
    "sequence_divides_over_tp_ranks": [
        ("--seq-length 127 --tensor-model-parallel-size 2 --sequence-parallel", "", Facts(world_size=2),
         ("--sequence-parallel", "--seq-length 127", "--tensor-model-parallel-size 2"),
         ("--seq-length 128", "--sequence-parallel")),
    ],
    "sequence_fits_the_model": [
        ("--max-position-embeddings 64", "", None,
         ("--seq-length 128", "--max-position-embeddings 64"), ("--max-position-embeddings 128", "--seq-length 64")),
    ],
}  # fmt: skip


def test_a_problem_names_flags_and_remedy(assert_refused, flags, without, facts, named, remedy):
    assert_refused(flags, named, remedy, without=without, facts=facts)


def test_several_problems_of_sizes_offer_the_same_number_of_tensor_ranks_first(plan_of):
    with pytest.raises(ConfigError) as caught:
        plan_of(
            "--tensor-model-parallel-size 3 --ffn-hidden-size 256 --dry-run --world-size 8",
            facts=Facts(world_size=8),
        )
    fixes = [problem.fix for problem in caught.value.problems]
    assert len(fixes) == 4
    assert all(fix.startswith("use --tensor-model-parallel-size 2") for fix in fixes), fixes
