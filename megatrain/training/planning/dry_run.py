"""`--dry-run`: the model, FLOPs, memory, ranks, data and timeline of a run, for any number of ranks and without a GPU.

    request ─> facts, plan ─> a step of each pipeline stage on the meta device ─> DryRun ─> text, or one JSON object

A dry run raises the errors of a real start. It writes no files except copies of indices from object stores, joins no process group and builds no index.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass

import torch

from megatrain.config import ConfigError, Facts, Plan, Request
from megatrain.config.derive.batch_sizes import batch_sizes
from megatrain.config.environment import LaunchEnvironment
from megatrain.parallel.build_grid import build_grid
from megatrain.parallel.pipeline.simulator import Simulation, simulate
from megatrain.training.batches import build_samples
from megatrain.training.build import build_pipeline
from megatrain.training.engine import Engine
from megatrain.training.launch.facts import gather_facts, plan_on_any_device
from megatrain.training.launch.ranks import grid_shape
from megatrain.training.planning.data_and_timeline import (
    DatasetUse,
    Duration,
    Timeline,
    dataset_uses,
    duration_of,
    timeline_of,
)
from megatrain.training.planning.gpus import Gpu, assumed_gpu, with_gpu
from megatrain.training.planning.host_memory import HostMemory, host_memory, host_use
from megatrain.training.planning.memory_limit import HostUse, ignored_flag, memory_warning
from megatrain.training.planning.memory_plan import StageMemory, planned_memory
from megatrain.training.planning.model_tree import ModelTree, model_tree
from megatrain.training.planning.packs import PackedStep, packed_step


@dataclass(frozen=True, kw_only=True)
class Flops:
    """Floating-point operations by Megatron-LM's formula, without recomputation."""

    per_iteration: int
    """FLOPs of an iteration with the full global batch."""
    per_token: float
    per_rank_and_iteration: float
    whole_run: int
    """FLOPs of all samples that remain."""


@dataclass(frozen=True, kw_only=True)
class Axis:
    """The process groups of one axis: `count` groups of `size` ranks each, with `stride` between the ranks of a group."""

    size: int
    count: int
    stride: int
    first: tuple[int, ...]
    """Ranks of the first group; for more than eight the first three and the last."""
    last: tuple[int, ...]
    """Ranks of the last group, in the same form."""


@dataclass(frozen=True, kw_only=True)
class RankLayout:
    """The process groups of the run."""

    world_size: int
    reason: str
    """Source of the world size."""
    axes: dict[str, Axis]
    """By axis: tp, dp, pp and, where used, cp, etp and ep."""
    stages: tuple[tuple[int, ...], ...]
    """Ranks of each pipeline stage; for more than eight the first three and the last."""


@dataclass(frozen=True, kw_only=True)
class Pipeline:
    """Cost of the pipeline schedule, from the simulator: forward 1, backward 2 (zero bubble: 1, and weight gradients 1),
    messages 0.
    """

    schedule: str
    num_stages: int
    """Pipeline ranks."""
    num_chunks: int
    """Model chunks of each rank."""
    layers: tuple[int, ...]
    """Layers of each virtual stage."""
    num_microbatches: int
    bubble_share: float
    """Fraction of all stages' time spent waiting."""
    first_num_microbatches: int
    """Micro-batches of the first iteration: other than `num_microbatches` if the global batch grows."""
    first_bubble_share: float
    """Fraction of the time spent waiting in the first iteration."""
    microbatches_in_flight: tuple[int, ...]
    """Peak number of forward passes of chunks whose backward pass has not run, by rank."""


@dataclass(frozen=True, kw_only=True)
class DryRun:
    """The content of a dry run. Field names are the keys of the JSON object."""

    plan: Plan
    model: ModelTree
    flops: Flops
    memory: tuple[StageMemory, ...]
    """Memory of one rank of each pipeline stage."""
    assumed_gpu: str | None
    """GPU that the host lacks, or that --assume-gpu names; None: this host's GPU, or none."""
    device_memory_bytes: int | None
    """Memory of a GPU; None: the run is on CPUs."""
    memory_warning: str | None
    """The memory does not suffice; with the remedies."""
    ranks: RankLayout
    data: tuple[DatasetUse, ...]
    timeline: Timeline
    duration: Duration
    pipeline: Pipeline
    packs: PackedStep | None
    """Packs of the first global batch; None: documents are not packed."""
    host_memory: HostMemory | None
    """Host memory of --async-save; None: the run does not save in the background."""
    host_use: HostUse | None
    """All host memory; None: everything lies on GPUs."""


def examine(request: Request, environment: LaunchEnvironment) -> DryRun:
    """Plan the run and return the content of the dry run.

    Raises:
        MegatrainError: the run would not start.
    """
    world_size, reason = _world_size(request, environment)
    facts = gather_facts(request, dataclasses.replace(environment, world_size=world_size))
    facts = dataclasses.replace(facts, ranks_per_node=None)  # this host need not be one of the run's
    gpu = assumed_gpu(request)
    plan = _plan(request, facts if gpu is None else with_gpu(facts, gpu))
    shape = grid_shape(plan)
    pipeline = _pipeline(plan)
    engines = [
        Engine(plan, build_grid(shape, rank), torch.device("meta")) for rank in shape.rank_lists("pp")[0]
    ]
    memory = planned_memory(plan, engines, pipeline.microbatches_in_flight)
    device_bytes = _device_memory(plan, gpu)
    data = tuple(dataset_uses(plan, facts))
    copies = host_memory(plan, engines, environment)
    on_host = host_use(plan, memory, copies, environment)
    largest = max(stage.total for stage in memory)
    warning = memory_warning(plan, largest, device_bytes, on_host, gpu.name if gpu else None)
    ignored = ignored_flag(plan)
    if ignored is not None and warning is not None and device_bytes is not None and largest > device_bytes:
        text, _, fix = warning.partition("\n  fix: ")
        raise ConfigError(f"{ignored}; {text}", fix=fix)
    timeline = timeline_of(plan, facts, data)
    model = model_tree(
        [engine.model.registry for engine in engines], engines[0].model.spec.routers_by_name, ep=shape.ep
    )
    device_name = facts.device_name if gpu is None else gpu.name
    return DryRun(
        plan=plan,
        model=model,
        flops=_flops(plan),
        memory=tuple(memory),
        assumed_gpu=gpu.name if gpu and plan.config.training.device == "cuda" else None,
        device_memory_bytes=device_bytes,
        memory_warning=warning,
        ranks=_rank_layout(plan, reason),
        data=data,
        timeline=timeline,
        duration=duration_of(plan, engines[0], model.parameters, timeline.checkpoints, device_name),
        pipeline=pipeline,
        packs=_packs(plan, facts),
        host_memory=copies,
        host_use=on_host,
    )


def _world_size(request: Request, environment: LaunchEnvironment) -> tuple[int, str]:
    given = request.known("parallel.world_size")
    if given is not None:
        return given, "--world-size"
    if environment.world_size > 1:
        return environment.world_size, "number of launched ranks"
    return request.fewest_ranks(), "smallest number for this layout; change it with --world-size"


def _plan(request: Request, facts: Facts) -> Plan:
    """Return the plan for GPUs with --assume-gpu or --world-size, unless for --device cpu; else for this host's device, or the other."""
    for_gpus = any(request.known(path) is not None for path in ("training.assume_gpu", "parallel.world_size"))
    if for_gpus and request.known("training.device") != "cpu":
        return plan_on_any_device(request, facts, ("cuda",))
    is_gpu_first = facts.device == "cuda"
    return plan_on_any_device(request, facts, ("cuda", "cpu") if is_gpu_first else ("cpu", "cuda"))


def _flops(plan: Plan) -> Flops:
    derived, length = plan.derived, plan.config.data.seq_length
    samples = max(0, derived.train_samples - derived.start_consumed_samples)
    lengths = {"num_tokens": samples * length, "sum_of_squared_lengths": samples * length**2}
    return Flops(
        per_iteration=derived.flops_per_iteration,
        per_token=derived.flops_per_iteration / derived.tokens_per_iteration,
        per_rank_and_iteration=derived.flops_per_iteration / derived.world_size,
        whole_run=derived.model_spec.training_flops(**lengths)
        + (0 if derived.distillation is None else derived.distillation.forward_flops(**lengths)),
    )


def _device_memory(plan: Plan, gpu: Gpu | None) -> int | None:
    if plan.config.training.device == "cpu":
        return None
    return int(torch.cuda.get_device_properties(0).total_memory if gpu is None else gpu.memory_bytes)


def _pipeline(plan: Plan) -> Pipeline:
    stages, count = plan.config.parallel.pipeline_model_parallel_size, plan.derived.num_microbatches
    pipeline = build_pipeline(plan)
    sizes = batch_sizes(plan.config, data_parallel_size=plan.derived.data_parallel_size)
    first = sizes.num_microbatches(plan.derived.start_consumed_samples)

    def simulated(num_microbatches: int) -> Simulation:
        actions = [pipeline.training(rank, num_microbatches) for rank in range(stages)]
        return simulate(actions, placement=pipeline.placement)

    simulation = simulated(count)
    return Pipeline(
        schedule=pipeline.kind,
        num_stages=stages,
        num_chunks=pipeline.placement.num_chunks,
        layers=plan.derived.pipeline_layers,
        num_microbatches=count,
        bubble_share=simulation.bubble_fraction,
        first_num_microbatches=first,
        first_bubble_share=simulated(first).bubble_fraction,
        microbatches_in_flight=simulation.peak_activations,
    )


def _packs(plan: Plan, facts: Facts) -> PackedStep | None:
    if not plan.config.data.pack_documents or facts.untokenized:
        return None
    samples = build_samples(plan, facts, log=lambda _: None).train
    return None if samples is None else packed_step(plan, samples)


def _rank_layout(plan: Plan, reason: str) -> RankLayout:
    shape = grid_shape(plan)
    axes = {}
    cp = ("cp",) if shape.cp > 1 else ()
    experts = ("etp", "ep") if shape.has_experts else ()
    for name in ("tp", *cp, "dp", "pp", *experts):
        lists = shape.expert_lists(name) if name in experts else shape.rank_lists(name)
        size = len(lists[0])
        stride = lists[0][1] - lists[0][0] if size > 1 else 1
        axes[name] = Axis(
            size=size, count=len(lists), stride=stride, first=_shortened(lists[0]), last=_shortened(lists[-1])
        )
    stages = tuple(map(_shortened, shape.rank_lists("tp-cp-ep-dp")))
    return RankLayout(world_size=shape.world_size, reason=reason, axes=axes, stages=stages)


def _shortened(ranks: list[int]) -> tuple[int, ...]:
    return tuple(ranks) if len(ranks) <= 8 else (*ranks[:3], ranks[-1])
