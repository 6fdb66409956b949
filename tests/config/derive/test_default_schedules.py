"""Without flags about stages, GPUs run the schedule and the split that the simulator finds fastest."""

import pytest

from megatrain.config import Facts

GPUS = Facts(device="cuda", world_size=4)
STAGES = "--pipeline-model-parallel-size 4 --num-layers 16 --global-batch-size 8 --micro-batch-size 1"


@pytest.mark.parametrize(
    ("flags", "facts", "schedule"),
    [
        ("", GPUS, "zb-v"),
        ("", Facts(world_size=4), "1f1b"),
        ("--global-batch-size 7", GPUS, "zb-h1"),
        ("--global-batch-size 3", GPUS, "1f1b"),
        ("--pipeline-model-parallel-size 2", GPUS, "zb-h1"),
        ("--num-layers 4", GPUS, "zb-h1"),
        ("--pipeline-schedule 1f1b", GPUS, "1f1b"),
        ("--num-virtual-stages-per-pipeline-rank 2", GPUS, "interleaved"),
        ("--pipeline-model-parallel-layout auto", GPUS, "1f1b"),
        ("--decoder-first-pipeline-num-layers 4", GPUS, "1f1b"),
        ("--account-for-embedding-in-pipeline-split --account-for-loss-in-pipeline-split --num-layers 14", GPUS, "1f1b"),
        ("--mtp-num-layers 1", GPUS, "1f1b"),
    ],
)  # fmt: skip
def test_sizes_and_flags_decide(plan_of, flags, facts, schedule):
    plan = plan_of(f"{STAGES} {flags}", facts=facts)
    assert plan.config.parallel.pipeline_schedule == schedule
    assert sum(plan.derived.pipeline_layers) == plan.config.model.num_layers


@pytest.mark.parametrize(("flags", "chunks"), [("", 2), ("--pipeline-schedule zb-h1", 1)])
def test_the_head_has_fewer_layers(plan_of, flags, chunks):
    plan = plan_of(f"{STAGES} --vocab-size 100000 {flags}", facts=GPUS)
    assert plan.derived.pipeline_chunks == chunks
    assert plan.derived.pipeline_layers[-1] < max(plan.derived.pipeline_layers)


def test_a_given_1f1b_has_the_stages_of_megatron(plan_of):
    plan = plan_of(f"{STAGES} --vocab-size 100000 --pipeline-schedule 1f1b", facts=GPUS)
    assert plan.derived.pipeline_layers == (4, 4, 4, 4)


def test_eight_ranks_have_balanced_stages(plan_of):
    flags = "--pipeline-model-parallel-size 8 --num-layers 32 --global-batch-size 32 --vocab-size 100000"
    plan = plan_of(f"{STAGES} {flags}", facts=Facts(device="cuda", world_size=8))
    assert plan.config.parallel.pipeline_schedule == "zb-h1"
    assert plan.derived.pipeline_layers[-1] < max(plan.derived.pipeline_layers)
