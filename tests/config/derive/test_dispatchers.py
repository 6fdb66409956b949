"""The choice between an all-to-all of tokens and an all-gather of them all."""

import pytest

from megatrain.config import Facts

QWEN = "--num-experts 128 --moe-router-topk 8 --moe-token-dispatcher-type alltoall"


@pytest.mark.parametrize(
    ("flags", "ep", "expected", "reason"),
    [
        (QWEN, 2, True, "99.7 % of the tokens go to each rank"),
        (QWEN, 4, False, "memory for 4 times the rows"),
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
