"""The pipeline's chunks, schedule and split, from Megatron-LM's flags and ours."""

import pytest

from megatrain.config import Facts
from megatrain.config.subjects.pipeline import PipelineError, layer_ranges, parse_layout

PP4 = "--pipeline-model-parallel-size 4"


@pytest.mark.parametrize(
    ("flags", "counts", "schedule"),
    [
        ("--num-layers 8", (2, 2, 2, 2), "1f1b"),
        ("--num-layers 12 --num-layers-per-virtual-pipeline-stage 1", (1,) * 12, "interleaved"),
        ("--num-layers 16 --num-virtual-stages-per-pipeline-rank 2", (2,) * 8, "interleaved"),
        ("--num-layers 12 --decoder-first-pipeline-num-layers 2 --decoder-last-pipeline-num-layers 2", (2, 4, 4, 2), "1f1b"),
        ("--num-layers 13 --decoder-first-pipeline-num-layers 4", (4, 3, 3, 3), "1f1b"),
        ("--num-layers 14 --decoder-last-pipeline-num-layers 2 --num-virtual-stages-per-pipeline-rank 2", (2, 2, 2, 1) * 2, "interleaved"),
        ("--num-layers 6 --num-virtual-stages-per-pipeline-rank 2 --account-for-embedding-in-pipeline-split --account-for-loss-in-pipeline-split", (0, 1, 1, 1, 1, 1, 1, 0), "interleaved"),
        ("--num-layers 15 --account-for-loss-in-pipeline-split", (4, 4, 4, 3), "1f1b"),
        ("--num-layers 14 --pipeline-model-parallel-layout Et*2|(tt|)*5t|tL", (2, 2, 2, 2, 2, 2, 1, 1), "interleaved"),
        ("--num-layers 13 --pipeline-model-parallel-layout Ett|(tttt|)*2,tttL", (2, 4, 4, 3), "1f1b"),
        ("--num-layers 8 --pipeline-schedule zb-v", (1,) * 8, "zb-v"),
        ("--num-layers 8 --pipeline-schedule dualpipe-v", (1,) * 8, "dualpipe-v"),
        ("--num-layers 8 --pipeline-schedule zb-h1", (2, 2, 2, 2), "zb-h1"),
    ],
)  # fmt: skip
def test_flags_give_layers_of_stages_and_a_schedule(plan_of, flags, counts, schedule):
    plan = plan_of(f"{PP4} {flags}", facts=Facts(world_size=4))
    assert plan.derived.pipeline_layers == counts
    assert plan.config.parallel.pipeline_schedule == schedule
    assert [len(layers) for layers in layer_ranges(counts)] == list(counts)


def test_an_automatic_split_balances_flops_with_the_head(plan_of):
    """A head as expensive as several layers leaves fewer layers to the last stage."""
    flags = f"{PP4} --num-layers 21 --pipeline-model-parallel-layout auto --vocab-size"
    small, large = (
        plan_of(f"{flags} {size}", facts=Facts(world_size=4)).derived.pipeline_layers for size in (128, 3000)
    )
    assert sum(small) == sum(large) == 21
    assert max(small) - min(small) == 1
    assert large[-1] < min(large[:-1])
    assert max(large[:-1]) - min(large[:-1]) <= 1


@pytest.mark.parametrize("layers", range(3, 40))
def test_an_automatic_split_has_every_layer_once(plan_of, layers):
    plan = plan_of(
        f"{PP4} --num-layers {layers} --pipeline-model-parallel-layout auto", facts=Facts(world_size=4)
    )
    counts = plan.derived.pipeline_layers
    assert sum(counts) == layers
    assert all(counts[:-1])


def test_one_stage_has_no_chunks(plan_of):
    plan = plan_of("--num-layers 4 --num-virtual-stages-per-pipeline-rank 2")
    assert (plan.derived.pipeline_chunks, plan.derived.pipeline_layers) == (1, (4,))


@pytest.mark.parametrize(
    ("layout", "stages"),
    [
        ("Ettt|tL", ["Ettt", "tL"]),
        ("E|(t|)*3 L", ["E", "t", "t", "t", "L"]),
        ("Et*2|t*3,L", ["Ett", "tttL"]),
    ],
)
def test_a_layout_is_expanded(layout, stages):
    assert parse_layout(layout) == stages


@pytest.mark.parametrize(
    ("layout", "depths", "layers", "stage"),
    [
        ("", 2, (2, 2), 1),
        ("Ett|ttmL", 1, (2, 2), 1),
        ("Ett|t|tmm|L", 2, (2, 1, 1, 0), 2),
        ("Ett|tt|m|L", 1, (2, 2, 0, 0), 2),
        ("Ett|ttL", 1, (2, 2), 1),
    ],
)
def test_multi_token_prediction_is_on_the_stage_of_its_letter(plan_of, layout, depths, layers, stage):
    flags = f"--pipeline-model-parallel-size 2 --mtp-num-layers {depths}"
    flags += f" --pipeline-model-parallel-layout {layout}" if layout else ""
    derived = plan_of(flags, facts=Facts(world_size=2)).derived
    assert (derived.pipeline_layers, derived.mtp_stage) == (layers, stage)


@pytest.mark.parametrize(
    ("layout", "depths", "named"),
    [("Ett|ttmL", 2, "1 layers of multi-token prediction (m) in 1 stages"), ("Ett|tt|m|mL", 2, "in 2 stages"),
     ("Ett|ttmL", 0, "--mtp-num-layers is 0"), ("Ett|tmtL", 1, "E) not first")],
)  # fmt: skip
def test_letters_of_multi_token_prediction_agree_with_its_layers(problems_of, layout, depths, named):
    flags = f"--pipeline-model-parallel-size 2 --mtp-num-layers {depths} --pipeline-model-parallel-layout {layout}"
    (problem,) = problems_of(flags, facts=Facts(world_size=2))
    assert named in problem
    assert "fix: " in problem


@pytest.mark.parametrize("layout", ["", "Ett|xL", "EEt|tL", "(tt"])
def test_a_layout_with_other_letters_is_an_error(layout):
    with pytest.raises(PipelineError):
        parse_layout(layout)
