"""Without --cp-comm-type, heads are exchanged where sizes allow it on one host, and the plan has the reason."""

import pytest

from megatrain.config import Facts

HEADS = "--num-attention-heads 8 --hidden-size 64 --max-position-embeddings 64 --seq-length 32"
GROUPS = "--group-query-attention --num-query-groups"


@pytest.mark.parametrize(
    ("flags", "ranks", "chosen", "reason"),
    [
        ("--context-parallel-size 4", 4, "a2a", "heads divide"),
        (f"--context-parallel-size 4 {GROUPS} 2", 4, "a2a", "heads divide"),
        ("--context-parallel-size 2 --tensor-model-parallel-size 4", 8, "a2a", "heads divide"),
        ("--context-parallel-size 4 --tensor-model-parallel-size 4", 16, "p2p", "16 tensor and context ranks are not on one host"),
        (f"--context-parallel-size 4 --num-attention-heads 12 --kv-channels 8 {GROUPS} 6", 4, "p2p", "12 heads and 6 query groups"),
        ("--context-parallel-size 4 --cp-comm-type p2p", 4, "p2p", "--cp-comm-type"),
        ("--context-parallel-size 4 --window-size 8,0", 4, "all_gather", "windows"),
        ("--context-parallel-size 4 --reset-attention-mask", 4, "all_gather", "documents"),
        ("--context-parallel-size 4 --multi-latent-attention --kv-lora-rank 8 --normalization RMSNorm --position-embedding-type rope", 4, "p2p", "query group"),
    ],
)  # fmt: skip
def test_sizes_decide(plan_of, flags, ranks, chosen, reason):
    plan = plan_of(f"{HEADS} {flags}", facts=Facts(world_size=ranks, ranks_per_node=8))
    assert plan.derived.cp_comm_types == (chosen,)
    assert reason in plan.origins["derived.cp_comm_types"].detail


@pytest.mark.parametrize(("per_host", "chosen"), [(4, "a2a"), (2, "p2p"), (1, "p2p"), (None, "a2a")])
def test_hosts_decide(plan_of, per_host, chosen):
    plan = plan_of(f"{HEADS} --context-parallel-size 4", facts=Facts(world_size=4, ranks_per_node=per_host))
    assert plan.derived.cp_comm_types == (chosen,)
