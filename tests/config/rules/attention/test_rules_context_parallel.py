"""Rules about context parallelism: each fires, names its flags and a remedy."""

from megatrain.config import Facts

CASES = {
    "sequence_divides_over_context_ranks": [
        ("--context-parallel-size 4 --seq-length 20", "", Facts(world_size=4),
         ("--seq-length 20", "--context-parallel-size 4"), ("--seq-length 24",)),
        ("--context-parallel-size 2 --tensor-model-parallel-size 4 --sequence-parallel --seq-length 12", "", Facts(world_size=8),
         ("--seq-length 12", "--context-parallel-size 2", "--sequence-parallel", "--tensor-model-parallel-size 4"),
         ("--seq-length 16",)),
    ],
    "cp_comm_type_is_given_per_layer": [
        ("--cp-comm-type all_gather all_gather all_gather", "", None,
         ("--cp-comm-type", "3", "4"), ("--cp-comm-type all_gather",)),
    ],
    "levels_multiply_to_context_ranks": [
        ("--cp-comm-type a2a+p2p --context-parallel-size 4", "", Facts(world_size=4),
         ("--cp-comm-type a2a+p2p", "--context-parallel-size 4"), ("--hierarchical-context-parallel-sizes 2 2",)),
        ("--cp-comm-type a2a+p2p --context-parallel-size 8 --hierarchical-context-parallel-sizes 3 2", "", Facts(world_size=8),
         ("--cp-comm-type a2a+p2p", "--context-parallel-size 8", "--hierarchical-context-parallel-sizes 3 2"),
         ("--hierarchical-context-parallel-sizes 2 4",)),
        ("--cp-comm-type a2a+p2p --context-parallel-size 2 --hierarchical-context-parallel-sizes 2 1", "", Facts(world_size=2),
         ("--cp-comm-type a2a+p2p", "--context-parallel-size 2", "--hierarchical-context-parallel-sizes 2 1"),
         ("--cp-comm-type p2p",)),
    ],
    "heads_divide_over_context_ranks": [
        ("--cp-comm-type a2a --context-parallel-size 8", "", Facts(world_size=8),
         ("--cp-comm-type a2a", "layer 0", "8", "4 heads"), ("--cp-comm-type p2p",)),
    ],
}  # fmt: skip


def test_a_problem_names_flags_and_remedy(assert_refused, flags, without, facts, named, remedy):
    assert_refused(flags, named, remedy, without=without, facts=facts)
