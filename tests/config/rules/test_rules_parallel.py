"""Rules about data parallelism: each fires, names its flags and a remedy."""

import pytest

from megatrain.config import Facts

FOUR = "--num-experts 4"
HASHES = "--check-weight-hash-across-dp-replicas-interval 5"

CASES = {
    "sharding_settings_agree": [
        ("--no-use-distributed-optimizer --data-parallel-sharding-strategy optim_grads", "", Facts(world_size=4),
         ("--data-parallel-sharding-strategy optim_grads", "--no-use-distributed-optimizer"),
         ("--data-parallel-sharding-strategy optim_grads", "--no-use-distributed-optimizer")),
        ("--no-use-distributed-optimizer --use-megatron-fsdp", "", Facts(world_size=4),
         ("--use-megatron-fsdp", "--no-use-distributed-optimizer"),
         ("--use-megatron-fsdp", "--no-use-distributed-optimizer")),
        ("--use-distributed-optimizer --data-parallel-sharding-strategy no_shard", "", Facts(world_size=4),
         ("--data-parallel-sharding-strategy no_shard", "--use-distributed-optimizer"),
         ("--data-parallel-sharding-strategy no_shard", "--use-distributed-optimizer")),
    ],
    "instances_divide_replicas": [
        ("--num-distributed-optimizer-instances 3", "", Facts(world_size=4),
         ("--num-distributed-optimizer-instances 3", "4 data-parallel"),
         ("--num-distributed-optimizer-instances 2",)),
        ("--num-distributed-optimizer-instances 3 --context-parallel-size 2", "", Facts(world_size=4),
         ("--num-distributed-optimizer-instances 3", "data-parallel 2", "context-parallel 2"),
         ("--num-distributed-optimizer-instances 2",)),
    ],
    "instances_divide_replicas_of_experts": [
        (f"{FOUR} --expert-model-parallel-size 4 --num-distributed-optimizer-instances 2", "", Facts(world_size=4),
         ("--num-distributed-optimizer-instances 2", "1 replicas", "4 ranks"),
         ("--num-distributed-optimizer-instances 1",)),
    ],
    "instances_shard_optimizer_state": [
        ("--num-distributed-optimizer-instances 2 --no-use-distributed-optimizer", "", Facts(world_size=2),
         ("--num-distributed-optimizer-instances 2", "--no-use-distributed-optimizer"),
         ("--num-distributed-optimizer-instances", "--no-use-distributed-optimizer")),
    ],
    "bf16_reduction_requires_bf16_weights": [
        ("--grad-reduce-in-bf16", "", None,
         ("--grad-reduce-in-bf16", "float32"), ("--bf16", "--grad-reduce-in-bf16")),
    ],
    "gathered_codes_differ_from_own_weights": [
        (f"--fp8-format hybrid --fp8-param-gather {HASHES}", "", Facts(world_size=2),
         ("--check-weight-hash-across-dp-replicas-interval 5", "--fp8-param-gather"), ("remove --check-weight-hash",)),
    ],
    "overlapped_products_are_on_one_host": [
        ("--tp-comm-overlap --tensor-model-parallel-size 4 --sequence-parallel", "",
         Facts(device="cuda", world_size=12, ranks_per_node=6, devices_per_node=6),
         ("--tp-comm-overlap with --tensor-model-parallel-size 4 and 6 ranks per host",),
         ("remove --tp-comm-overlap", "--tensor-model-parallel-size that divides 6")),
    ],
}  # fmt: skip


def test_a_problem_names_flags_and_remedy(assert_refused, flags, without, facts, named, remedy):
    assert_refused(flags, named, remedy, without=without, facts=facts)


@pytest.mark.parametrize(
    ("flags", "ranks"),
    [
        ("", 2),
        ("--fp8-format hybrid", 1),
        ("--fp8-format e4m3 --fp8-recipe blockwise", 2),
        ("--fp8-format hybrid --no-use-distributed-optimizer", 2),
        ("--fp8-format hybrid --num-distributed-optimizer-instances 2", 2),
    ],
)
def test_replicas_that_gather_no_codes_can_be_compared(plan_of, flags, ranks):
    notes = plan_of(f"{flags} --fp8-param-gather {HASHES}", facts=Facts(world_size=ranks)).notes
    assert len([note for note in notes if "--fp8-param-gather has no effect" in note]) == 1
