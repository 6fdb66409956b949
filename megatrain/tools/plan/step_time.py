"""The predicted time of a training step, part by part.

layer times ─> times of virtual stages ─> pipeline: formula, or simulation
weights of a rank ─> data-parallel collectives and their overlap, optimizer
"""

from __future__ import annotations

import collections
import functools
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Final

from megatrain.config.schema.pipeline_schedules import PIPELINE_SCHEDULES
from megatrain.config.subjects.pipeline import layer_ranges
from megatrain.parallel.pipeline.simulator import StageCosts, simulate
from megatrain.tools.plan.hardware import Cluster
from megatrain.tools.plan.layer_times import LayerTimes, layer_weights
from megatrain.tools.plan.layouts import Layout, Workload
from megatrain.tools.plan.linear_times import Fp8, Times
from megatrain.tools.plan.network import Group

_SIMULATED_ROUNDS: Final = 3
"""Micro-batches that are simulated, in multiples of the ranks (and 2 in V): later ones repeat the same pattern."""


@dataclass(frozen=True, kw_only=True)
class StepTime:
    """Seconds of a step."""

    compute: float
    """Passes of the busiest rank, with the collectives of tensor, context and expert parallelism that they wait for."""
    bubble: float
    """Waiting for other pipeline ranks."""
    data_parallel: float
    """Exposed reduction of gradients and all-gather of weights."""
    optimizer: float
    rest: float

    @property
    def total(self) -> float:
        return self.compute + self.bubble + self.data_parallel + self.optimizer + self.rest


@dataclass(frozen=True)
class RankWeights:
    """Weights of a pipeline rank."""

    dense: float
    experts: float


def step_time(workload: Workload, layout: Layout, cluster: Cluster, *, is_simulated: bool) -> StepTime:
    """Return the predicted time of a step.

    Args:
        is_simulated: simulate the pipeline; otherwise use the formula of its schedule, which is faster.
    """
    stages = stage_times(workload, layout, cluster)
    ranks = _by_rank(layout, stages)
    busiest = max(ranks, key=lambda times: _seconds(layout, times))
    count = layout.num_microbatches(workload.global_batch)
    compute = _seconds(layout, busiest) * count
    pipeline = _simulated if is_simulated else _estimated
    alone = busiest.total - _seconds(layout, busiest)  # the first forward and the last backward pass
    duration = pipeline(workload, layout, cluster, stages, busiest) if layout.pp > 1 else compute + alone
    weights = max(rank_weights(workload, layout), key=lambda one: one.dense + one.experts)
    return StepTime(
        compute=compute,
        bubble=max(duration - compute, 0.0),
        data_parallel=_data_parallel(layout, cluster, weights, busiest, count),
        optimizer=_optimizer(layout, cluster, weights),
        rest=cluster.rates.step_seconds,
    )


def stage_times(workload: Workload, layout: Layout, cluster: Cluster) -> list[Times]:
    """Return the times of each virtual stage for one micro-batch."""
    in_bf16 = LayerTimes(workload, layout, cluster)
    in_fp8 = replace(in_bf16, fp8=Fp8.of(workload.plan.config, layout, cluster))
    of_kind = {
        (sizes, is_fp8): (in_fp8 if is_fp8 else in_bf16).layer(sizes) for sizes, is_fp8 in set(workload.kinds)
    }
    stages = []
    for layers in layer_ranges(layout.split):
        kinds = collections.Counter(workload.kinds[layers.start : layers.stop])
        stages.append(sum((of_kind[kind] * number for kind, number in kinds.items()), Times()))
    stages[0] += in_bf16.embedding()
    stages[-1] += in_bf16.head() + in_fp8.multi_token_prediction()
    return stages


def _seconds(layout: Layout, times: Times) -> float:
    """Return the seconds of a forward and a backward pass in the middle of a step."""
    return times.together if layout.overlaps_passes else times.total


def _by_rank(layout: Layout, stages: Sequence[Times]) -> list[Times]:
    placement = layout.placement
    return [
        sum((stages[placement.stage(rank, chunk)] for chunk in range(layout.chunks)), Times())
        for rank in range(layout.pp)
    ]


def _message(workload: Workload, layout: Layout, cluster: Cluster) -> float:
    """Return the seconds of hidden states between stages."""
    tokens = workload.tokens(layout)
    tokens /= layout.tp if layout.sequence_parallel else 1
    stride = layout.tp * layout.cp * layout.dp
    return Group(cluster, layout.pp, stride).message(2 * workload.hidden * tokens)


def _estimated(
    workload: Workload, layout: Layout, cluster: Cluster, stages: Sequence[Times], busiest: Times
) -> float:
    """Return the duration of a pipeline by the formula of its schedule."""
    count = layout.num_microbatches(workload.global_batch)
    bubble = PIPELINE_SCHEDULES[layout.schedule].bubble or 1 / layout.chunks
    mean = sum(stage.total for stage in stages) / layout.pp  # passes of the start and of the end run alone
    fill = (layout.pp - 1) * (bubble * mean + 2 * _message(workload, layout, cluster) * layout.chunks)
    return _seconds(layout, busiest) * count + fill


def _simulated(
    workload: Workload, layout: Layout, cluster: Cluster, stages: Sequence[Times], busiest: Times
) -> float:
    """Return the simulated duration of a pipeline; of many micro-batches, only the first are simulated."""
    count = layout.num_microbatches(workload.global_batch)
    few = min(count, _SIMULATED_ROUNDS * layout.pp * (2 if layout.placement.is_v else 1))
    few += (count - few) % layout.pp
    schedule = layout.pipeline
    costs = StageCosts(
        [one.forward for one in stages],
        [one.backward for one in stages],
        [one.weight for one in stages],
        _message(workload, layout, cluster),
        [_seconds(layout, one) / one.total for one in stages],
    )
    actions = [schedule.training(rank, few) for rank in range(layout.pp)]
    return simulate(actions, costs, layout.placement).duration + (count - few) * _seconds(layout, busiest)


@functools.lru_cache(maxsize=4096)
def _weights(workload: Workload, tp: int, ep: int, etp: int, split: tuple[int, ...]) -> list[RankWeights]:
    """Return the weights of each virtual stage on one rank."""
    found = []
    vocabulary = workload.vocabulary * workload.hidden / tp
    is_tied = not workload.plan.config.model.untie_embeddings_and_output_weights
    for number, own in enumerate(layer_ranges(split)):
        layers = list(workload.layers[own.start : own.stop])
        dense = vocabulary if number == 0 else 0.0
        if number == len(split) - 1:
            dense += vocabulary if not is_tied or len(split) > 1 else 0.0
            layers += workload.plan.derived.model_spec.mtp_layers
        parts = [layer_weights(workload, sizes, tp, ep, etp) for sizes in layers]
        found.append(RankWeights(dense + sum(a for a, _ in parts), sum(b for _, b in parts)))
    return found


def rank_weights(workload: Workload, layout: Layout) -> list[RankWeights]:
    """Return the weights of a rank of each pipeline stage."""
    stages = _weights(workload, layout.tp, layout.ep, layout.etp, layout.split)
    placement = layout.placement
    found = []
    for rank in range(layout.pp):
        own = [stages[placement.stage(rank, chunk)] for chunk in range(layout.chunks)]
        found.append(RankWeights(sum(one.dense for one in own), sum(one.experts for one in own)))
    return found


def _data_parallel(
    layout: Layout, cluster: Cluster, weights: RankWeights, busiest: Times, count: int
) -> float:
    """Return the exposed seconds of data parallelism.

    ZeRO-0 and 1 reduce during the last backward passes and gather during the first forward passes. ZeRO-2 reduces in every
    micro-batch; ZeRO-3 also gathers the weights in every forward and backward pass.
    """
    rates = cluster.rates
    reduce = gather = shared = 0.0
    stride = layout.tp
    for number, size, distance in (
        (weights.dense, layout.dp * layout.cp, stride),
        (weights.experts, layout.expert_dp, layout.ep * layout.etp),
    ):
        if number and size > 1:
            group = Group(cluster, size, distance)
            reduce += group.all_gather(4 * number)
            gather += group.all_gather(2 * number)
            shared += group.all_gather(4 * number) * (
                rates.reduce_exposed if group.is_in_node else rates.network_exposed
            )
    share = shared / reduce if reduce else 0.0
    chunks = layout.chunks if PIPELINE_SCHEDULES[layout.schedule].has_groups else 1

    def exposed(sent: float, passes: float) -> float:
        """Return what no pass hides: a chunk hides its own collective, and with groups of micro-batches those of all chunks before."""
        hidden = passes * (1 + layout.pp * (chunks - 1)) / chunks
        return max(sent - hidden, (sent - passes) / chunks, share * sent)

    backward = busiest.backward + busiest.weight
    reductions = count if layout.sharding in ("optim_grads", "optim_grads_params") else 1
    seconds = reductions * exposed(reduce, backward)
    if layout.sharding == "optim_grads_params":
        return seconds + count * (exposed(gather, busiest.forward) + exposed(gather, backward))
    return seconds + exposed(gather, busiest.forward)


def _optimizer(layout: Layout, cluster: Cluster, weights: RankWeights) -> float:
    """Return the seconds of the gradient norm, of the update of this rank's shards, and of clearing gradients."""
    rates = cluster.rates
    is_sharded = layout.sharding != "no_shard"
    shard = weights.dense / (layout.dp * layout.cp if is_sharded else 1)
    shard += weights.experts / (layout.expert_dp if is_sharded else 1)
    held = weights.dense + weights.experts
    return cluster.memory_seconds(rates.optimizer_bytes * shard + rates.gradient_bytes * held)
