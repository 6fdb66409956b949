"""The cost model of `megatrain plan` against measured steps, and against what must hold for any constants."""

from __future__ import annotations

import dataclasses

import pytest

from megatrain.config import Facts, parse, resolve
from megatrain.config.model_spec.experts import RouterSpec
from megatrain.tools.plan.hardware import Cluster
from megatrain.tools.plan.layouts import Layout, Workload, layouts
from megatrain.tools.plan.linear_times import Fp8, Gemm, Times
from megatrain.tools.plan.memory import estimated_bytes
from megatrain.tools.plan.network import Group
from megatrain.tools.plan.search import Run
from megatrain.tools.plan.step_time import rank_weights, step_time
from megatrain.training.planning.gpus import GPUS
from scripts.plan_accuracy import MEASURED, Measured, predicted
from tests.everyday import one_in

TOLERANCE = 0.10
GPU = GPUS["H200"]
CLUSTER = Cluster(gpu=GPU, num_gpus=64, gpus_per_node=8, network_rate=GPU.network_rate)


def planned(case: Measured) -> tuple[Workload, Layout]:
    facts = Facts(
        world_size=case.world_size, device="cuda", device_name="NVIDIA H200", device_capability=(9, 0)
    )
    plan = resolve(parse(case.words), facts)
    return Workload(plan), Layout.of(plan)


@pytest.mark.parametrize("case", MEASURED, ids=lambda case: case.name)
def test_a_predicted_step_is_within_ten_percent_of_the_measured_one(case: Measured) -> None:
    workload, layout = planned(case)
    cluster = dataclasses.replace(CLUSTER, num_gpus=case.world_size)
    for is_simulated in (True, False):
        time = step_time(workload, layout, cluster, is_simulated=is_simulated)
        for milliseconds in case.milliseconds:
            assert time.total * 1e3 == pytest.approx(milliseconds, rel=TOLERANCE)


@pytest.mark.parametrize(
    "case", one_in(20, [case for case in MEASURED if not case.note]), ids=lambda case: case.name
)
def test_planned_memory_is_within_two_percent_of_the_measured_one(case: Measured) -> None:
    found = predicted(case)
    assert found.memory_bytes / 1e9 == pytest.approx(case.gigabytes, rel=0.02)


@pytest.mark.parametrize("case", [case for case in MEASURED if not case.note], ids=lambda case: case.name)
def test_the_estimate_of_memory_is_near_the_measured_peak(case: Measured) -> None:
    workload, layout = planned(case)
    assert estimated_bytes(workload, layout) / 1e9 == pytest.approx(case.gigabytes, rel=0.1)


def test_the_schedules_rank_as_measured() -> None:
    times = {}
    for case in MEASURED:
        if case.name in ("1f1b", "interleaved", "zb-h1", "zb-v", "dualpipe-v"):
            times[case.name] = step_time(*planned(case), CLUSTER, is_simulated=True).total
    assert max(times["interleaved"], times["zb-h1"]) < times["1f1b"] < min(times["zb-v"], times["dualpipe-v"])


def test_weights_of_the_ranks_are_those_of_the_model() -> None:
    """Llama-3-8B: 8.03 billion parameters, in four stages and two tensor ranks each."""
    workload, layout = planned(case_of("B1 dp2"))
    whole = rank_weights(workload, layout)[0].dense
    assert whole == pytest.approx(8.030e9, rel=1e-3)
    split = dataclasses.replace(layout, tp=2, pp=4, split=(8, 8, 8, 8))
    parts = [one.dense for one in rank_weights(workload, split)]
    assert sum(parts) * 2 == pytest.approx(whole, rel=1e-3)


def test_collectives_between_nodes_are_slower_and_share_the_adapters_of_a_node() -> None:
    inside, across = Group(CLUSTER, 8), Group(CLUSTER, 8, stride=8)
    assert inside.is_in_node
    assert not across.is_in_node
    assert across.all_gather(1e9) > 3 * inside.all_gather(1e9)
    assert Group(CLUSTER, 64).all_gather(1e9) < across.all_gather(1e9)
    assert inside.all_reduce(1e9) == pytest.approx(2 * inside.all_gather(1e9), rel=0.05)
    assert Group(CLUSTER, 1).all_to_all(1e9) == 0


def test_small_gemms_and_few_rows_per_expert_are_slow() -> None:
    large, small = Gemm(8192, 4096, 4096), Gemm(64, 4096, 4096)
    assert small.times(CLUSTER).forward > 2 * large.times(CLUSTER).forward * 64 / 8192
    many, few = Gemm(65536, 1536, 2048, 16), Gemm(65536, 1536, 2048, 256)
    assert few.times(CLUSTER).forward > 1.5 * many.times(CLUSTER).forward


def case_of(name: str) -> Measured:
    return next(case for case in MEASURED if case.name == name)


def test_fp8_gemms_take_less_time_than_bf16_and_their_casts_less_than_the_saving() -> None:
    """A layer of case A2: GEMMs of one scale reach twice the rate of bf16, casts take a tenth of the time."""
    workload, layout = planned(case_of("A2 delayed"))
    gemm = Gemm(8192, 28672, 4096)
    fp8 = Fp8.of(workload.plan.config, layout, CLUSTER)
    assert fp8 is not None
    in_bf16, in_fp8 = gemm.times(CLUSTER), gemm.times(CLUSTER, fp8)
    times = {
        recipe: gemm.times(CLUSTER, dataclasses.replace(fp8, recipe=recipe)).total
        for recipe in ("delayed", "tensorwise", "blockwise")
    }
    assert 0.5 * in_bf16.total < in_fp8.total < 0.65 * in_bf16.total
    assert times["delayed"] < times["tensorwise"] < times["blockwise"] < in_bf16.total
    sharded = dataclasses.replace(fp8, casts_per_weight=1.0)
    assert gemm.times(CLUSTER, sharded).forward > in_fp8.forward  # a cast of the weight in each micro-batch


def test_casts_count_the_bytes_of_the_kernels() -> None:
    """Per token: 3 bytes of an input in each pass, 4 of a gradient; a weight's cast and its transposed codes."""
    rows, outputs, inputs = 8192.0, 6144.0, 4096.0
    fp8 = Fp8("delayed", True, 0.25, 1, Group(CLUSTER, 1))
    rates = dataclasses.replace(CLUSTER.rates, gemm_seconds=0.0)
    cluster = dataclasses.replace(CLUSTER, rates=rates)
    found = Gemm(rows, outputs, inputs).times(cluster, fp8)
    flops = 2 * rows * outputs * inputs
    casts = found.forward - flops / cluster.compute_rate(rates.fp8_gemms)
    assert casts == pytest.approx(cluster.cast_seconds(3 * rows * inputs + 3 / 4 * outputs * inputs))
    casts = found.backward - flops / cluster.compute_rate(rates.fp8_exact_gemms)
    expected = 3 * rows * inputs + 4 * rows * outputs + 2 * outputs * inputs
    assert casts == pytest.approx(cluster.cast_seconds(expected))


def test_an_all_gather_of_tokens_replaces_the_all_to_all_where_a_run_does_so() -> None:
    workload, layout = planned(case_of("B6 ep2"))
    without, _ = planned(case_of("B6, all-to-all"))
    assert [workload.gathers_tokens(ep) for ep in (2, 4, 8, 16)] == [True, True, True, False]
    assert [workload.row_factor(ep) for ep in (1, 2, 4, 8)] == [1, 2, 1.25, 1.25]
    assert not without.gathers_tokens(2)
    faster, slower = (step_time(one, layout, CLUSTER, is_simulated=True).total for one in (workload, without))
    waits = CLUSTER.rates.host_wait_seconds * 16 * 4  # layers, micro-batches
    assert slower - faster > waits
    assert estimated_bytes(workload, layout) > estimated_bytes(without, layout) + 5e9


def test_node_limited_routing_sends_a_token_to_its_nodes_only() -> None:
    """DeepSeek-V3: 8 of 256 experts, of 4 of 8 groups. A token has at most 4 copies for 8 nodes, and 7.4 for 64 ranks."""
    limited = RouterSpec(num_experts=256, top_k=8, num_groups=8, group_top_k=4)
    free = RouterSpec(num_experts=256, top_k=8)
    assert 8 * limited.share_of_tokens(8) == pytest.approx(4)
    assert 64 * limited.share_of_tokens(64) == pytest.approx(7.36, abs=0.01)
    assert 8 * free.share_of_tokens(8) == pytest.approx(5.3, abs=0.1)
    assert limited.share_of_tokens(1) == free.share_of_tokens(1) == 1


def test_an_all_to_all_sends_a_token_once_to_each_host_where_a_run_does_so() -> None:
    workload, _ = planned(case_of("B6, all-to-all"))
    group = Group(dataclasses.replace(CLUSTER, num_gpus=64), 64)
    assert workload.ranks_that_forward(group, 1) == 8
    assert workload.ranks_that_forward(group, 8) == 1
    assert workload.ranks_that_forward(Group(CLUSTER, 8), 1) == 1


def test_passes_that_run_together_take_the_longer_of_computing_and_sends() -> None:
    times = Times(forward=3.0, backward=4.0, weight=1.0, sends=2.0, exposed_sends=0.5)
    assert times.total == 8
    assert times.together == 6.5
    assert dataclasses.replace(times, sends=5.0).together == 5
    assert (times + times).together == (times * 2).together == 13


def test_overlapped_gemms_hide_the_collectives_of_tensor_ranks() -> None:
    plain, layout = planned(case_of("B3 tp2"))
    overlapped, _ = planned(case_of("B3 tp2, overlap"))
    slow, fast = (step_time(one, layout, CLUSTER, is_simulated=True).total for one in (plain, overlapped))
    assert 0.92 < fast / slow < 0.97  # 1,525 of 1,624 ms


def test_the_model_overlaps_products_where_a_run_does_so() -> None:
    """The workload of a search is that of one GPU, which overlaps nothing."""
    case = case_of("B3 tp4, overlap")
    run = Run.of(case.words, dataclasses.replace(CLUSTER, num_gpus=4))
    workload, layout = run.workload(), Layout.of(run.plan())
    assert workload.overlaps_products(layout, GPU.capability)
    time = step_time(workload, layout, dataclasses.replace(CLUSTER, num_gpus=4), is_simulated=True).total
    assert time * 1e3 == pytest.approx(case.milliseconds[0], rel=0.05)
    eager = Run.of([*case.words, "--no-tp-comm-overlap"], run.cluster).workload()
    assert not eager.overlaps_products(layout, GPU.capability)
    for changed in ({"tp": 8}, {"sequence_parallel": False}, {"cp": 16}):
        assert not workload.overlaps_products(dataclasses.replace(layout, **changed), GPU.capability)
    assert not workload.overlaps_products(layout, (8, 0))


def test_layouts_use_all_gpus_and_divide_the_batch() -> None:
    workload, _ = planned(case_of("B6 ep2"))
    found = list(layouts(workload, 16, 8))
    assert len(found) == len(set(found))
    assert {one.ep for one in found} == {1, 2, 4, 8, 16}
    for one in found:
        assert one.tp * one.cp * one.pp * one.dp == 16
        assert workload.global_batch % (one.dp * one.micro_batch) == 0
        assert sum(one.split) == 16
        assert len(one.split) == one.pp * one.chunks
