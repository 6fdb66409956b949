"""The cost model of `megatrain plan` against reported speeds of other programs on thousands of GPUs: one set of constants for all.

Megatron-LM's table of models is an image without text; hidden sizes and layers are those that give its numbers of parameters with
its vocabulary, and divide over its stages. It does not state the batch of 462 billion parameters: 1,536 sequences are assumed.

DeepSeek-V3 ran with kernels for the dispatch of tokens that this program does not have. Its case takes the bandwidth that they
were reported to reach; another test predicts this program's dispatch.
"""

from __future__ import annotations

import contextlib
import dataclasses
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import Final
from unittest import mock

import pytest
from everyday import nightly

from megatrain.config.model_spec.experts import ExpertsSpec
from megatrain.tools.plan.hardware import Cluster
from megatrain.tools.plan.layer_times import LayerTimes
from megatrain.tools.plan.layouts import Layout, Workload, layouts
from megatrain.tools.plan.linear_times import Times
from megatrain.tools.plan.search import Run
from megatrain.tools.plan.step_time import StepTime, step_time
from megatrain.training.planning.gpus import GPUS

_MODELS: Final = Path(__file__).parents[3] / "configs" / "models"
_MEGATRON: Final = (
    "--seq-length 4096 --max-position-embeddings 4096 --untie-embeddings-and-output-weights --tokenizer-type NullTokenizer"
    " --vocab-size 131071 --mock-data --bf16 --hidden-dropout 0 --attention-dropout 0 --train-iters 10 --micro-batch-size 1"
    " --tensor-model-parallel-size 8 --sequence-parallel --tp-comm-overlap"
)
_177B: Final = (
    f"{_MEGATRON} --num-layers 96 --hidden-size 12288 --num-attention-heads 96 --pipeline-model-parallel-size 6"
    " --num-virtual-stages-per-pipeline-rank 8 --global-batch-size 1152"
)
_README: Final = "Megatron-LM, README, training speed and scalability (version 0.8)"
_LLAMA: Final = "arXiv:2407.21783, table 4"


@dataclass(frozen=True)
class Reported:
    """A reported speed."""

    name: str
    source: str
    num_gpus: int
    mfu: float
    """Of the FLOPs of Megatron-LM's formula."""
    flags: str
    tolerance: float = 0.10
    config: str | None = None
    """File of configs/models/."""
    gpu: str = "H100"

    def planned(self, more: str = "") -> tuple[Workload, Layout, Cluster]:
        gpu = GPUS[self.gpu]
        cluster = Cluster(gpu=gpu, num_gpus=self.num_gpus, gpus_per_node=8, network_rate=gpu.network_rate)
        config = [] if self.config is None else ["--config", str(_MODELS / f"{self.config}.yaml")]
        run = Run.of([*config, *self.flags.split(), *more.split()], cluster)
        return run.workload(), Layout.of(run.plan()), cluster


_HOURS: Final = 180_000
"""H800 hours for a trillion tokens, arXiv:2412.19437, table 1."""
_V3_LAYOUT: Final = (
    "--tensor-model-parallel-size 1 --no-sequence-parallel --pipeline-model-parallel-size 16 --expert-model-parallel-size 64"
    " --pipeline-schedule dualpipe-v --num-virtual-stages-per-pipeline-rank 2 --overlap-moe-expert-parallel-comm"
)
_DEEPEP_RATES: Final = (51e9, 50e9)
"""Bytes per second and rank of DeepEP between 64 ranks on H800: tokens in FP8, and sums in bf16, once for each host.
Source: deepseek-ai/DeepEP, docs/legacy.md, normal kernels."""
_FP8: Final = "--fp8-format hybrid --fp8-recipe blockwise"
V3: Final = Reported(
    "DeepSeek-V3",
    "arXiv:2412.19437, sections 3.2 and 3.3: 180,000 H800 hours for a trillion tokens, 62.9 million tokens a step",
    2048,
    0.405,
    f"{_V3_LAYOUT} {_FP8}",
    tolerance=0.15,
    config="deepseek_v3",
    gpu="H800",
)
REPORTED: Final = (
    V3,
    Reported("405B", _LLAMA, 16_384, 0.41, "--num-virtual-stages-per-pipeline-rank 6", config="llama3_405b"),
    Reported(
        "405B, 8,192 GPUs",
        _LLAMA,
        8192,
        0.43,
        "--num-virtual-stages-per-pipeline-rank 6",
        config="llama3_405b",
    ),
    Reported(
        "405B, 131,072 tokens",
        _LLAMA,
        16_384,
        0.38,
        "--seq-length 131072 --max-position-embeddings 131072 --context-parallel-size 16 --global-batch-size 128",
        config="llama3_405b",
    ),
    Reported(
        "462B",
        f"{_README}: 47 to 48 %",
        6144,
        0.475,
        f"{_MEGATRON} --num-layers 112 --hidden-size 18432 --num-attention-heads 144 --pipeline-model-parallel-size 16"
        " --num-virtual-stages-per-pipeline-rank 7 --global-batch-size 1536",
    ),
    Reported("177B, 96 GPUs", _README, 96, 0.47, _177B),
    Reported("177B, 4,608 GPUs", _README, 4608, 0.42, _177B),
)


def with_reported_dispatch(case: Reported) -> AbstractContextManager[object]:
    """Replace the times of this program's all-to-alls by those of DeepEP, which uses 20 of 132 SMs (arXiv:2412.19437, 3.2.2)."""

    def sent(self: LayerTimes, experts: ExpertsSpec, row: float) -> Times:
        copies = row * (self.layout.ep // 8) * experts.router.share_of_tokens(self.layout.ep // 8)
        codes = 0.5 if self.fp8 is not None else 1.0
        one = copies / 2 * (codes / _DEEPEP_RATES[0] + 1 / _DEEPEP_RATES[1])
        return Times(one, one, sends=2 * one, exposed_sends=2 * one * self.cluster.rates.network_exposed)

    return mock.patch.object(LayerTimes, "_sent", sent) if case is V3 else contextlib.nullcontext()


def predicted_mfu(case: Reported, time: StepTime, workload: Workload) -> float:
    return workload.flops / (time.total * case.num_gpus * GPUS[case.gpu].peak)


@pytest.mark.parametrize(
    "case",
    [
        case if case.name in ("DeepSeek-V3", "462B") else pytest.param(case, marks=pytest.mark.nightly)
        for case in REPORTED
    ],
    ids=lambda case: case.name,
)
def test_a_predicted_step_is_near_the_reported_one(case: Reported) -> None:
    workload, layout, cluster = case.planned()
    with with_reported_dispatch(case):
        time = step_time(workload, layout, cluster, is_simulated=True)
    assert predicted_mfu(case, time, workload) == pytest.approx(case.mfu, rel=case.tolerance)


def test_deepseek_v3_takes_its_gpu_hours_gains_with_fp8_and_by_each_part_of_its_layout() -> None:
    workload, layout, cluster = V3.planned()
    seconds = _HOURS * 3600 * workload.global_batch * workload.seq_length / 1e12 / V3.num_gpus
    in_bf16, _, _ = dataclasses.replace(V3, flags=_V3_LAYOUT).planned()
    one_by_one = dataclasses.replace(layout, overlaps_passes=False)
    with with_reported_dispatch(V3):
        whole, alone, wide = (
            step_time(one, how, cluster, is_simulated=False).total
            for one, how in ((workload, layout), (workload, one_by_one), (in_bf16, layout))
        )
    assert whole == pytest.approx(seconds, rel=0.15)
    assert workload.flops / (seconds * V3.num_gpus * cluster.gpu.peak) == pytest.approx(V3.mfu, rel=0.01)
    assert alone > 1.25 * whole
    assert wide > 1.1 * whole


def test_this_programs_dispatch_in_fp8_comes_near_the_reported_gpu_hours_of_deepseek_v3() -> None:
    """Without rates of other programs: a copy of a token for each rank, in FP8; in bf16 it is further off."""
    hours = []
    for flags in ("", "--moe-fp8-dispatch"):
        workload, layout, cluster = V3.planned(f"--moe-alltoall-ranks-per-host 1 {flags}")
        time = step_time(workload, layout, cluster, is_simulated=True)
        tokens = workload.global_batch * workload.seq_length
        hours.append(time.total * V3.num_gpus / 3600 / tokens * 1e12)
    in_bf16, in_fp8 = hours
    assert in_fp8 == pytest.approx(_HOURS, rel=0.15)
    assert in_bf16 > 1.15 * _HOURS


@pytest.mark.parametrize(
    ("gpu", "is_overlapped", "gain"),
    [
        ("H100", False, 1.19),
        nightly("H100", True, 1.03),
        nightly("H800", False, 1.08),
        nightly("H800", True, 0.96),
    ],
)
def test_forwarding_gains_where_the_network_is_not_hidden_or_nvlink_is_fast(
    gpu: str, is_overlapped: bool, gain: float
) -> None:
    """The layout of DeepSeek-V3 with this program's dispatch: a copy of a token for each host, against one for each rank.

    The NVLink of an H800 has less than half of the rate, and kernels that overlap computation cost half of their time.
    """
    times = []
    for flags in ("", "--moe-alltoall-ranks-per-host 1"):
        workload, layout, cluster = dataclasses.replace(V3, gpu=gpu).planned(flags)
        layout = dataclasses.replace(layout, overlaps_passes=is_overlapped)
        times.append(step_time(workload, layout, cluster, is_simulated=True).total)
    assert times[1] / times[0] == pytest.approx(gain, abs=0.01)


@pytest.mark.nightly
def test_the_reported_layout_of_deepseek_v3_is_searched_and_near_the_fastest() -> None:
    """With this program's dispatch in FP8, which saves the inputs of experts in FP8, as DeepSeek does; memory is not searched."""
    workload, layout, cluster = V3.planned("--moe-alltoall-ranks-per-host 1 --moe-fp8-dispatch")
    found = [
        one
        for one in layouts(workload, 2048, 8, (1,))
        if (one.recompute, one.pp, one.cp) == ("selective", 16, 1) and "moe" not in one.modules
    ]
    times = {one: step_time(workload, one, cluster, is_simulated=False).total for one in found}
    reported = dataclasses.replace(layout, modules=next(iter(found)).modules)
    assert reported in times
    assert times[reported] <= 1.02 * min(times.values())
