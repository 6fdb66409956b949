"""The choice between an all-to-all of tokens and an all-gather of them all."""

import pytest

from megatrain.config import Facts

QWEN = "--num-experts 128 --moe-router-topk 8 --moe-token-dispatcher-type alltoall"


@pytest.mark.parametrize(
    ("flags", "ep", "expected", "reason"),
    [
        (QWEN, 2, True, "99.7 % of the tokens go to each rank"),
        (QWEN, 4, False, "memory for 4 times the rows"),  # on CPUs
        (QWEN, 1, False, "--expert-model-parallel-size 1"),
        (f"{QWEN} --no-moe-alltoall-as-allgather", 2, False, "--no-moe-alltoall-as-allgather"),
        (f"{QWEN} --moe-alltoall-as-allgather", 4, True, "--moe-alltoall-as-allgather"),
        (f"{QWEN} --moe-token-dispatcher-type flex", 2, True, "99.7 %"),
        (f"{QWEN} --moe-router-num-groups 4 --moe-router-group-topk 2", 2, False, "83.3 %"),
        ("--num-experts 8 --moe-token-dispatcher-type alltoall", 2, False, "78.6 %"),
        ("--num-experts 128 --moe-router-topk 8", 2, False, "alltoall is not given"),
        ("", 1, False, "alltoall is not given"),
    ],
)
def test_all_tokens_are_gathered_where_nearly_all_go_to_each_rank(plan_of, flags, ep, expected, reason):
    plan = plan_of(f"{flags} --expert-model-parallel-size {ep}", facts=Facts(world_size=ep))
    assert plan.config.experts.moe_alltoall_as_allgather is expected
    origin = plan.origins["experts.moe_alltoall_as_allgather"]
    assert reason in (origin.detail or "") or origin.kind == "flag"


DEEPSEEK = "--num-experts 64 --moe-router-topk 6 --moe-token-dispatcher-type alltoall"


@pytest.mark.parametrize(
    ("flags", "ep", "ranks_per_node", "gathers", "factor"),
    [
        (QWEN, 2, 8, True, None),
        (QWEN, 4, 4, True, 1.25),
        (QWEN, 4, None, True, 1.25),
        (QWEN, 4, 2, False, None),  # two hosts
        (QWEN, 8, 8, True, 1.25),  # 66.7 %
        (QWEN, 16, 8, False, None),
        ("--num-experts 8 --moe-token-dispatcher-type alltoall", 8, 8, False, None),  # 25 %
        (DEEPSEEK, 4, 8, True, 1.25),
        (DEEPSEEK, 4, 1, True, 1.25),  # each rank sees one GPU
        (f"{DEEPSEEK} --moe-expert-rank-capacity-factor 2", 4, 8, True, 2.0),
        (f"{QWEN} --moe-alltoall-as-allgather", 8, 8, True, 1.25),
        (f"{QWEN} --moe-alltoall-as-allgather --moe-expert-rank-capacity-factor none", 8, 8, True, None),
        ("--num-experts 64 --moe-router-topk 6", 4, 8, False, 1.25),  # an all-gather is asked for
        (f"{QWEN} --moe-expert-capacity-factor 1 --moe-pad-expert-input-to-capacity", 4, 8, True, None),
    ],
)
def test_gpus_of_one_host_gather_tokens_with_bounded_memory(
    plan_of, flags, ep, ranks_per_node, gathers, factor
):
    facts = Facts(world_size=ep, device="cuda", device_name="NVIDIA H200", ranks_per_node=ranks_per_node)
    plan = plan_of(f"{flags} --expert-model-parallel-size {ep}", facts=facts)
    assert plan.config.experts.moe_alltoall_as_allgather is gathers
    assert plan.config.experts.moe_expert_rank_capacity_factor == factor


V3 = (
    "--num-experts 256 --moe-router-topk 8 --moe-router-num-groups 8 --moe-router-group-topk 4"
    " --moe-router-score-function sigmoid --moe-token-dispatcher-type alltoall"
)


@pytest.mark.parametrize(
    ("flags", "ep", "ranks_per_node", "expected", "reason"),
    [
        (V3, 64, 8, 8, "3.5 copies of a token go to other hosts, not 6.44"),
        (V3.replace("alltoall", "flex"), 64, 8, 8, "3.5 copies"),
        (V3, 64, None, 8, "3.5 copies"),  # a plan without its hosts
        (V3, 64, 64, 1, "on one host"),
        (V3, 8, 8, 1, "the ranks of experts are on one host"),  # and all ranks on 16
        (V3, 64, 1, 1, "not two or more on each host of 1"),
        (V3, 64, 3, 1, "not two or more on each host of 3"),
        (
            f"{V3} --tensor-model-parallel-size 2 --sequence-parallel",
            32,
            8,
            4,
            "copies",
        ),  # each on two etp ranks
        (f"{V3} --moe-alltoall-ranks-per-host 1", 64, 8, 1, "--moe-alltoall-ranks-per-host"),
        (f"{V3} --moe-alltoall-ranks-per-host 4", 64, 8, 4, "--moe-alltoall-ranks-per-host"),
        (f"{QWEN} --moe-router-topk 1 --moe-router-pre-softmax", 16, 8, 1, "less than forwarding costs"),
        ("--num-experts 8 --moe-token-dispatcher-type alltoall", 8, 4, 1, "0.786 copies of a token"),
        (V3.replace("alltoall", "allgather"), 64, 8, 1, "sends no tokens by all-to-all"),
    ],
)
def test_ranks_of_a_host_forward_tokens_where_this_saves_more_than_it_costs(
    plan_of, flags, ep, ranks_per_node, expected, reason
):
    facts = Facts(world_size=128 if ep == 8 else 64, ranks_per_node=ranks_per_node)
    plan = plan_of(f"{flags} --expert-model-parallel-size {ep}", facts=facts)
    assert plan.config.experts.moe_alltoall_ranks_per_host == expected
    origin = plan.origins["experts.moe_alltoall_ranks_per_host"]
    assert reason in (origin.detail or "") or origin.kind == "flag"
