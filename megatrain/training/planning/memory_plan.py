"""Plan the memory of a rank of each pipeline stage at the peak of a training step, by class.

    plan ─> the engine's own step on the meta device ─> `StorageLedger` ─> bytes by class at the peak

The engine, its executor and its kernels allocate all tensors of the step themselves; there is no formula for any of
them. Three sizes follow rules instead: the rounding of the CUDA allocator, the workspace of attention's backward
kernels, and the workspace of cuBLAS. Not included are the CUDA context, NCCL's own buffers, and memory that the
allocator loses to fragmentation. Host memory of --optimizer-cpu-offload is counted separately.
"""

from __future__ import annotations

import inspect
import itertools
import threading
from collections.abc import Sequence
from dataclasses import dataclass, replace
from types import CodeType
from typing import Any, Final

import torch
from torch import Tensor

from megatrain.config import Plan
from megatrain.config.derive.vision import sample_length
from megatrain.config.environment import NO_WORKSPACE
from megatrain.config.schema.data import MASKED_FAMILIES
from megatrain.config.schema.pipeline_schedules import PIPELINE_SCHEDULES
from megatrain.data.samples.masked_dataset import array_shapes
from megatrain.kernels.host_copy import zeros_on_host
from megatrain.model.gpt import Model
from megatrain.model.parts import failures_of_parts
from megatrain.optim.sharded import WEIGHT, ShardedOptimizer
from megatrain.parallel import collectives
from megatrain.parallel.batch import Batch
from megatrain.parallel.data_parallel import BucketMemory
from megatrain.parallel.documents import Documents
from megatrain.parallel.family_batch import family_batch
from megatrain.parallel.grid import RankGrid
from megatrain.parallel.pipeline.actions import ActionKind
from megatrain.parallel.pipeline.activation_offload import ActivationOffload
from megatrain.parallel.pipeline.executor import Executor
from megatrain.parallel.pipeline.point_to_point import PointToPoint
from megatrain.parallel.pipeline.segments import SegmentHooks, SegmentPass
from megatrain.parallel.pipeline.simulator import simulate
from megatrain.parallel.tensor_overlap.peer_memory import Slots
from megatrain.training.build import (
    build_buffers,
    build_data_parallel,
    build_model_from_plan,
    build_optimizer,
    build_pipeline,
    build_schedules,
)
from megatrain.training.distillation.teacher import RunTeacher
from megatrain.training.engine import Engine
from megatrain.training.planning.meta_step import (
    Peak,
    Run,
    Storage,
    StorageLedger,
    meta_device_as,
    run_with_torch,
)
from megatrain.training.planning.model_tree import layers_of, segment_name
from megatrain.training.planning.packs import largest_pack

CUBLAS_BYTES: Final = 32 << 20
"""Workspace of cuBLAS on Hopper, which torch takes from its allocator. Source: torch's notes on CUBLAS_WORKSPACE_CONFIG."""


@dataclass(frozen=True, kw_only=True)
class ResidentMemory:
    """Bytes that a rank keeps allocated for the whole run."""

    weights: int
    gradients: int
    master_weights: int
    """0 if the weights themselves are the master weights."""
    optimizer_state: int
    on_host: int
    """Host memory: offloaded master weights and optimizer state, and staging buffers. Not in `total`."""
    teacher: int = 0
    """Weights of a teacher."""

    @property
    def total(self) -> int:
        """Bytes on the device."""
        return self.weights + self.gradients + self.master_weights + self.optimizer_state + self.teacher


@dataclass(frozen=True, kw_only=True)
class StageMemory:
    """Bytes of one rank of a pipeline stage at the peak of a step."""

    held: ResidentMemory
    activations: int
    """Tensors saved for backward passes, of all micro-batches in flight."""
    temporaries: int
    """Temporary tensors of the operations at the peak, including recomputed activations."""
    communication: int
    """Buffers of collectives, weights and gradients that are unsharded for a while, and received or pending messages between stages."""
    other: int
    """RoPE tables, the step's batches, the workspace of cuBLAS, and the allocator's rounding of `held`."""
    activations_on_host: int
    """Host memory of offloaded activations. Not in `total`."""
    peak_at: str
    """The pass that runs at the peak, and the function that allocates."""
    operations: int
    """Torch operations, also views, that the host starts for the passes of a micro-batch."""

    @property
    def total(self) -> int:
        return self.held.total + self.activations + self.temporaries + self.communication + self.other


def resident_memory(optimizer: ShardedOptimizer, model: Model) -> ResidentMemory:
    """Return the bytes that an engine with this optimizer and model, possibly on the meta device, keeps allocated."""
    teacher = None if model.distillation is None else model.distillation.teacher
    sizes = {
        name: sum(tensor.nbytes for tensor in tensors)
        for name, tensors in _resident_tensors(optimizer).items()
    }
    of_teacher = sum(x.nbytes for x in teacher.buffers.weights.kept) if isinstance(teacher, RunTeacher) else 0
    return ResidentMemory(**sizes, teacher=of_teacher)


def planned_resident_memory(plan: Plan, grid: RankGrid) -> ResidentMemory:
    """Return what the rank of `grid` will keep allocated. Only weights, gradients and optimizer are built, on the meta device."""
    device = torch.device("meta")
    model = build_model_from_plan(plan, grid, device)
    buffers = build_buffers(plan, model, grid, device)
    return resident_memory(build_optimizer(plan, build_data_parallel(plan, buffers, grid), grid), model)


def _resident_tensors(optimizer: ShardedOptimizer) -> dict[str, list[Tensor]]:
    buffers, first = optimizer.buffers, optimizer.num_on_device
    has_master = optimizer.master_dtype != buffers.weights.dtype
    masters = zip(optimizer.master_weights[:first], buffers.shards, strict=False)
    kept = [optimizer.master_weights, *optimizer.moments.values()]
    kinds = set(optimizer.kinds) - {WEIGHT, *optimizer.moments}
    factors = [x for kind in kinds for x in optimizer.state(kind)]
    return {
        "weights": buffers.weights.kept,
        "gradients": buffers.gradients.kept,
        "master_weights": [x for x, shard in masters if has_master and shard.bucket.is_trained],
        "optimizer_state": [x for flats in kept[1:] for x in flats[:first]] + factors,
        "on_host": [x for flats in kept for x in flats[first:]]
        + (optimizer.host_updates.staging_buffers if optimizer.host_updates is not None else []),
    }


@dataclass(frozen=True, kw_only=True)
class RecordedStep:
    """The memory of one rank's step."""

    engine: Engine
    by_class: dict[str, int]
    """Bytes at the peak, by field of `StageMemory`."""
    peak: Peak
    operations: int

    def memory(self) -> StageMemory:
        """Return the memory by class."""
        return StageMemory(
            held=resident_memory(self.engine.optimizer, self.engine.model),
            peak_at=_description(self.engine, self.peak.activity, self.peak.creator),
            operations=self.operations,
            **self.by_class,
        )


def planned_memory(plan: Plan, engines: Sequence[Engine], in_flight: Sequence[int]) -> list[StageMemory]:
    """Return the memory of a rank of each pipeline stage.

    Among consecutive stages with the same layers, only the first and the last are run. Memory grows linearly between them,
    because every micro-batch in flight saves the same tensors.

    Args:
        engines: one engine of each stage, on the meta device.
        in_flight: peak number of micro-batches between forward and backward, by stage.
    """
    as_cuda, device = plan.config.training.device == "cuda", torch.device("meta")
    found: list[StageMemory] = []
    with meta_device_as(as_cuda=as_cuda) as operations:
        for stages in _linear_ranges(plan, engines, in_flight):
            ends = [
                record_step(
                    plan,
                    engines[stage].grid,
                    device,
                    num_microbatches=_num_microbatches(plan, engines[stage], in_flight[stage]),
                    ledger=device_ledger(as_cuda=as_cuda, run=operations.run),
                )
                for stage in {stages.start: None, stages.stop - 1: None}
            ]
            for position, stage in enumerate(stages):
                first, last = ends[0].by_class, ends[-1].by_class
                by_class = {
                    name: first[name] + (last[name] - first[name]) * position // max(len(stages) - 1, 1)
                    for name in first
                }
                step = replace(ends[0], engine=engines[stage], by_class=by_class)
                found.append(step.memory())
    return found


def planned_rank_memory(plan: Plan, grid: RankGrid) -> StageMemory:
    """Return the memory of one rank, without those of the other pipeline stages."""
    as_cuda, device = plan.config.training.device == "cuda", torch.device("meta")
    pipeline = build_pipeline(plan)
    actions = [pipeline.training(rank, plan.derived.num_microbatches) for rank in range(grid.pp.size)]
    in_flight = simulate(actions, placement=pipeline.placement).peak_activations[grid.pp.rank]
    count = _num_microbatches(plan, Engine(plan, grid, device), in_flight)
    with meta_device_as(as_cuda=as_cuda) as operations:
        ledger = device_ledger(as_cuda=as_cuda, run=operations.run)
        return record_step(plan, grid, device, num_microbatches=count, ledger=ledger).memory()


def device_ledger(*, as_cuda: bool, run: Run = run_with_torch) -> StorageLedger:
    """Return a ledger that counts as the allocator of the planned device does, with the workspace of its kernels."""
    if not as_cuda:
        return StorageLedger(run=run, host_creators=_HOST_CREATORS)
    return StorageLedger(
        run=run, round_bytes=allocator_bytes, workspace=kernel_workspace, host_creators=_HOST_CREATORS
    )


def record_step(
    plan: Plan, grid: RankGrid, device: torch.device, *, num_microbatches: int, ledger: StorageLedger
) -> RecordedStep:
    """Run one step of a new engine on `device` and classify its storages at the peak.

    The plan's other micro-batches are not run; only their token ids count.
    """
    with ledger:
        engine = Engine(plan, grid, device)
        before = ledger.num_bytes
        batches = [_batch(plan, device) for _ in range(num_microbatches)]
        batch_bytes = (ledger.num_bytes - before) // num_microbatches
        offload = engine.executor.hooks
        hooks = _ActivityHooks(offload)
        engine.executor.hooks, ledger.current_activity = hooks, lambda: hooks.activity
        ledger.peak = Peak()  # ignore the peak while the engine is built
        last_event = ledger.num_events
        with failures_of_parts(plan.derived.model_spec):
            engine.step(batches, build_schedules(plan).at(0))
    passes_end = max((s.allocated_at for s in ledger.storages if s.activity is not None), default=0)
    by_class = dict.fromkeys(("activations", "temporaries", "communication", "other"), 0)
    for storage in ledger.live_at_peak():
        memory_class = "other" if storage.allocated_at <= last_event else _memory_class(storage)
        by_class[memory_class] += storage.num_bytes
    if not plan.config.data.pack_documents:  # whose sizes and number are not known
        by_class["other"] += (plan.derived.num_microbatches - num_microbatches) * batch_bytes
    has_workspace = plan.config.training.device == "cuda" and plan.derived.cublas_workspace != NO_WORKSPACE
    by_class["other"] += CUBLAS_BYTES if has_workspace else 0
    by_class["other"] -= resident_memory(engine.optimizer, engine.model).total
    by_class["temporaries"] += ledger.peak.workspace
    if plan.derived.cuda_graphs:  # which keep the memory of their passes
        by_class["temporaries"] += _peak_after(passes_end, ledger.storages)
    by_class["activations_on_host"] = (
        offload.buffers.num_bytes if isinstance(offload, ActivationOffload) else 0
    )
    operations = ledger.num_operations // num_microbatches
    return RecordedStep(engine=engine, by_class=by_class, peak=ledger.peak, operations=operations)


def _peak_after(event: int, storages: Sequence[Storage]) -> int:
    """Return the most bytes of storages allocated after an event, such as an update's, that are live at a time."""
    changes = [
        change
        for storage in storages
        if storage.allocated_at > event
        for change in ((storage.allocated_at, storage.num_bytes), (storage.freed_at, -storage.num_bytes))
        if change[0] is not None
    ]
    return max(itertools.accumulate(num_bytes for _, num_bytes in sorted(changes)), default=0)


@dataclass(frozen=True, eq=False)
class _Activity:
    """One pass of a micro-batch through a segment. Each pass has an object of its own."""

    kind: ActionKind
    segment: int


class _ActivityHooks(SegmentHooks):
    """Hooks of an executor that also record which pass runs. Passes that run in turn have a thread each."""

    def __init__(self, hooks: SegmentHooks) -> None:
        super().__init__(hooks)
        self._own = threading.local()
        self._num_left = 0

    @property
    def activity(self) -> object:
        """An `_Activity`; another object between passes; None before the first pass and after the last."""
        return getattr(self._own, "activity", None)

    def on_schedule(self, passes: Sequence[SegmentPass]) -> None:
        self._num_left = len(passes)
        super().on_schedule(passes)

    def before(self, segment_pass: SegmentPass) -> None:
        self._own.activity = _Activity(segment_pass.kind, segment_pass.segment)
        super().before(segment_pass)

    def after(self, segment_pass: SegmentPass) -> None:
        super().after(segment_pass)
        self._num_left -= 1
        self._own.activity = object() if self._num_left else None


def _num_microbatches(plan: Plan, engine: Engine, in_flight: int) -> int:
    """Return a small number of micro-batches that gives a step its full peak memory.

    These are the micro-batches in flight and pending messages, at most as many as virtual stages.
    """
    return grouped_microbatches(plan) or min(
        plan.derived.num_microbatches, in_flight + engine.model.placement.num_stages + 1
    )


def grouped_microbatches(plan: Plan) -> int | None:
    """Return a small number of micro-batches that gives a step its full peak memory; None for a schedule without groups.

    Chunks repeat the same passes for each group of micro-batches, from the third group at the latest. A rest joins the first group.
    """
    parallel, count = plan.config.parallel, plan.derived.num_microbatches
    if not PIPELINE_SCHEDULES[parallel.pipeline_schedule].has_groups:
        return None
    group = parallel.microbatch_group_size_per_virtual_pipeline_stage or parallel.pipeline_model_parallel_size
    return min(count, 3 * group + count % group)


def _linear_ranges(plan: Plan, engines: Sequence[Engine], in_flight: Sequence[int]) -> list[range]:
    """Split the stages into ranges whose memory grows linearly.

    The stages of a range have the same layers, and the same difference in micro-batches in flight to the next stage.
    """
    ranges: list[range] = []
    for stage, engine in enumerate(engines):
        last = ranges[-1] if ranges else range(0)
        is_steady = in_flight[stage] + engine.grid.pp.size < plan.derived.num_microbatches
        is_steady &= len(engine.model.chunks) == 1
        if last and is_steady and _structure(engines[last.start]) == _structure(engine):
            steps = {in_flight[a] - in_flight[a + 1] for a in range(last.start, stage)}
            starts_steady = in_flight[last.start] + engine.grid.pp.size < plan.derived.num_microbatches
            if len(steps) == 1 and starts_steady:
                ranges[-1] = range(last.start, stage + 1)
                continue
        ranges.append(range(stage, stage + 1))
    return ranges


def _structure(engine: Engine) -> list[object]:
    """Return a list that is equal for stages whose tensors have the same sizes."""
    registry, spec = engine.model.registry, engine.model.spec
    layers = {spec.layer_name(number): layer for number, layer in enumerate(spec.layers)}
    shapes = [(entry.segment, entry.layout.shape) for entry in registry.entries.values()]
    teacher = None if engine.model.distillation is None else engine.model.distillation.teacher
    if isinstance(teacher, RunTeacher):
        shapes += [(-1, entry.layout.shape) for entry in teacher.model.registry.entries.values()]
    return [*shapes, *(layers[f"{one.stack}.layers.{one.number}"] for one in layers_of(registry))]


def allocator_bytes(num_bytes: int) -> int:
    """Return the bytes that the CUDA caching allocator counts for a tensor of `num_bytes`.

    Blocks are multiples of 512 bytes. From 10 MiB on, memory is taken in multiples of 2 MiB, and a remainder of at most
    1 MiB stays with the block. Source: c10/cuda/CUDACachingAllocator.cpp.
    """
    size = max(_rounded_up(num_bytes, 512), 512)
    if size < 10 << 20:
        return size
    segment = _rounded_up(size, 2 << 20)
    return segment if segment - size <= 1 << 20 else size


def kernel_workspace(func: Any, args: tuple[Any, ...]) -> int:
    """Return the bytes that attention's backward kernels allocate for themselves; 0 for other operations.

    The gradient of the queries is summed in fp32, with one more fp32 number per query. With grouped queries, the flash
    kernel computes gradients of keys and values per query head before it sums them over each group.
    Source: aten/src/ATen/native/transformers/cuda/flash_attn/flash_api.cpp.
    """
    if func not in _ATTENTION_BACKWARD:
        return 0
    query, key = args[1], args[2]
    heads_dim = -3 if query.dim() == 4 else -2
    num_queries = query.numel() // query.shape[-1]
    expanded = 0
    if query.shape[heads_dim] != key.shape[heads_dim] and "flash" in func.name():
        groups = query.shape[heads_dim] // key.shape[heads_dim]
        expanded = 2 * groups * key.numel() * key.element_size()
    return int(4 * query.numel() + 4 * num_queries + expanded)


_ATTENTION_BACKWARD = {
    torch.ops.aten._scaled_dot_product_flash_attention_backward.default,
    torch.ops.aten._scaled_dot_product_efficient_attention_backward.default,
    torch.ops.aten._flash_attention_backward.default,
}


def _rounded_up(number: int, multiple: int) -> int:
    return -(-number // multiple) * multiple


def _batch(plan: Plan, device: torch.device) -> Batch:
    """Return a micro-batch of the plan's sizes; each sample is one document, or is all padding."""
    data, b = plan.config.data, plan.config.training.micro_batch_size
    if data.pack_documents:
        return largest_pack(plan, device)
    s, model = sample_length(plan.config), plan.config.model
    vision = plan.derived.model_spec.vision
    if model.model_family in MASKED_FAMILIES or vision is not None:
        images = None if vision is None else vision.image_shape
        shapes = array_shapes(model.model_family, s, model.decoder_seq_length, images)
        arrays = {
            name: torch.zeros(b, *shape, dtype=torch.int64, device=device) for name, shape in shapes.items()
        }
        return family_batch(model.model_family, arrays)
    documents = None
    if data.has_documents:
        cu_seqlens = torch.arange(0, (b + 1) * s, s, dtype=torch.int32, device=device)
        documents = Documents(cu_seqlens, s, b, s)
    ids = [torch.zeros(b, s, dtype=torch.int64, device=device) for _ in range(3)]
    return Batch(
        tokens=ids[0],
        labels=ids[1],
        loss_mask=torch.ones(b, s, device=device),
        position_ids=ids[2],
        documents=documents,
    )


def _memory_class(storage: Storage) -> str:
    """Return the class of a storage that the step allocates."""
    if storage.creator in _BUCKET_CODE or storage.creator in _PEER_CODE:
        return "communication"
    is_forward = isinstance(storage.activity, _Activity) and storage.activity.kind is ActionKind.FORWARD
    if is_forward and storage.outlives_activity:
        return "activations"
    if storage.creator is not None and (
        storage.creator.co_filename == collectives.__file__ or storage.creator in _MESSAGE_CODE
    ):
        return "communication"
    return "temporaries"


def _code_of(*classes: type) -> frozenset[CodeType]:
    """Return the code of all methods of these classes."""
    methods = (inspect.unwrap(method) for one in classes for method in vars(one).values() if callable(method))
    return frozenset(method.__code__ for method in methods if inspect.isfunction(method))


_HOST_CREATORS = (zeros_on_host.__code__,)
_BUCKET_CODE = _code_of(BucketMemory)
_PEER_CODE = _code_of(Slots)
_MESSAGE_CODE = _code_of(PointToPoint) | {Executor._empty.__code__}


def _description(engine: Engine, activity: object, creator: CodeType | None) -> str:
    """Return the pass and the function at the peak: `backward pass of layer 3, in rms_norm_backward`."""
    function = "" if creator is None else f", in {creator.co_name}"
    if not isinstance(activity, _Activity):
        return f"{'optimizer' if activity is None else 'between segments'}{function}"
    names = {
        ActionKind.FORWARD: "forward pass",
        ActionKind.BACKWARD: "backward pass",
        ActionKind.WEIGHT: "weight gradients",
    }
    return f"{names[activity.kind]} of {segment_name(engine.model.registry, activity.segment)}{function}"
