"""Rules about packs of documents: each fires, names its flags and a remedy."""

import pytest

from megatrain.config import Facts

FOUR = Facts(world_size=4)
PACKS = (
    "--pack-documents --calculate-per-token-loss --seq-length 16 --micro-batch-size 1 --global-batch-size 16"
)
DYNAMIC = f"{PACKS} --dynamic-context-parallel"
"""With the working run's flags: a run that resolves."""
STATES = "--experimental-attention-variant gated_delta_net --linear-attention-freq 2 --linear-num-key-heads 2 --linear-num-value-heads 2"
"""Two heads with states, which do not divide over four ranks."""


HYBRID = "--model-family hybrid --hybrid-layer-pattern"


def refused(flags, words, remedy, facts=FOUR):
    return (f"{PACKS} {flags}", "", facts, (words, "--pack-documents"), (remedy,))


CASES = {
    "longest_document_fits_a_group": [
        (f"{DYNAMIC} --max-seqlen-per-dp-cp-rank 2", "", FOUR,
         ("--max-seqlen-per-dp-cp-rank 2", "4 ranks", "--seq-length 16"), ("--max-seqlen-per-dp-cp-rank 4",)),
        (f"{DYNAMIC} --max-seqlen-per-dp-cp-rank 7", "", FOUR,
         ("--max-seqlen-per-dp-cp-rank 7", "multiple of 2"), ("--max-seqlen-per-dp-cp-rank 8",)),
    ],
    "dynamic_context_parallelism_has_packs": [
        ("--dynamic-context-parallel", "", FOUR, ("--dynamic-context-parallel",), ("--pack-documents", "remove --dynamic-context-parallel")),
        ("--hybrid-context-parallel", "", FOUR, ("--dynamic-context-parallel",), ("--pack-documents",)),
        (f"{DYNAMIC} --sequence-packing-scheduler dp_balanced", "", FOUR,
         ("--dynamic-context-parallel", "dp_balanced"), ("--sequence-packing-scheduler default_dynamic_cp",)),
    ],
    "smallest_group_fits_the_ranks": [
        (f"{DYNAMIC} --min-dynamic-context-parallel-size 3", "", FOUR,
         ("--min-dynamic-context-parallel-size 3", "4 ranks"), ("--min-dynamic-context-parallel-size 4",)),
        (f"{DYNAMIC} --min-dynamic-context-parallel-size 8", "", FOUR,
         ("--min-dynamic-context-parallel-size 8", "4 ranks"), ("--min-dynamic-context-parallel-size 4",)),
        (f"{DYNAMIC} {STATES} --min-dynamic-context-parallel-size 4", "", FOUR,
         ("--min-dynamic-context-parallel-size 4", "heads with states"), ("--min-dynamic-context-parallel-size 2",)),
    ],
    "batch_has_documents_for_all_ranks": [
        (f"{DYNAMIC} --context-parallel-size 4 --cp-comm-type all_gather --global-batch-size 3", "", FOUR,
         ("--global-batch-size 3", "4"), ("--global-batch-size 4",)),
    ],
    "packs_are_supported": [
        refused("--micro-batch-size 2", "--micro-batch-size 2", "--micro-batch-size 1"),
        refused("--no-calculate-per-token-loss", "means of micro-batches", "--calculate-per-token-loss"),
        refused("--pipeline-model-parallel-size 2 --pipeline-schedule zb-h1", "--pipeline-schedule zb-h1", "--pipeline-schedule 1f1b"),
        refused("--pipeline-model-parallel-size 2 --num-virtual-stages-per-pipeline-rank 2", "--pipeline-schedule interleaved",
                "--pipeline-schedule 1f1b"),
        refused("--num-experts 4 --disable-bias-linear --moe-expert-capacity-factor 1", "--moe-expert-capacity-factor",
                "remove --moe-expert-capacity-factor"),
        refused("--num-experts 4 --disable-bias-linear --moe-router-load-balancing-type sinkhorn",
                "--moe-router-load-balancing-type sinkhorn", "seq_aux_loss, aux_loss or none"),
        refused("--num-experts 4 --disable-bias-linear --moe-router-load-balancing-type global_aux_loss --moe-aux-loss-coeff 0.1",
                "--moe-router-load-balancing-type global_aux_loss", "seq_aux_loss, aux_loss or none"),
        refused("--num-experts 4 --disable-bias-linear --expert-model-parallel-size 2 --overlap-moe-expert-parallel-comm",
                "--overlap-moe-expert-parallel-comm", "remove --overlap-moe-expert-parallel-comm"),
        refused("--mtp-num-layers 1", "--mtp-num-layers 1", "remove --mtp-num-layers"),
        refused(f"{HYBRID} *-*-/*-", "--mtp-num-layers 1", "use --hybrid-layer-pattern *-*-"),
        refused(f"{HYBRID} *-*-/*- --mtp-num-layers 1", "--mtp-num-layers 1", "*-*-, and remove --mtp-num-layers"),
        refused("--model-family vlm --dynamic-context-parallel --img-h 28 --img-w 28 --patch-dim 14", "--model-family vlm",
                "remove --pack-documents and --dynamic-context-parallel"),
        refused("--attention-dropout 0.1", "--attention-dropout 0.1", "--attention-dropout 0"),
        refused("--fp4-format e2m1", "--fp4-format e2m1", "remove --fp4-format"),
        refused("--cp-comm-type p2p", "--cp-comm-type p2p", "--cp-comm-type a2a or all_gather"),
    ],
}  # fmt: skip


def test_a_problem_names_flags_and_remedy(assert_refused, flags, without, facts, named, remedy):
    assert_refused(flags, named, remedy, without=without, facts=facts)


@pytest.mark.parametrize(
    ("flags", "sizes", "rows"),
    [
        (DYNAMIC, (1, 2, 4), 4),
        (f"{DYNAMIC} --min-dynamic-context-parallel-size 2 --seq-length 18", (2, 4), 6),
        (f"{PACKS} --context-parallel-size 2", (2,), 8),
        (PACKS, (1,), 16),
        (f"{DYNAMIC} {STATES}", (1, 2), 8),
        (
            f"{DYNAMIC} --tensor-model-parallel-size 2 --sequence-parallel --max-seqlen-per-dp-cp-rank 12",
            (1, 2),
            12,
        ),
    ],
)
def test_groups_hold_the_longest_document(plan_of, flags, sizes, rows):
    plan = plan_of(flags, facts=FOUR)
    assert plan.derived.pack_group_sizes == sizes
    assert plan.config.parallel.max_seqlen_per_dp_cp_rank == rows


@pytest.mark.parametrize(
    ("flags", "comm_type"),
    [
        (DYNAMIC, "a2a"),
        (f"{DYNAMIC} --num-attention-heads 2 --hidden-size 32", "all_gather"),
        (f"{DYNAMIC} --cp-comm-type all_gather", "all_gather"),
    ],
)
def test_heads_are_exchanged_where_they_divide_over_all_groups(plan_of, flags, comm_type):
    facts = Facts(world_size=4, ranks_per_node=4)
    assert plan_of(flags, facts=facts).derived.cp_comm_types == (comm_type,)
