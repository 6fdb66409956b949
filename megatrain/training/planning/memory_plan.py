"""How much memory a rank of each pipeline stage needs at the peak of a step, and for what.

    plan ─> the engine's own step in a `shadow`, on the meta device ─> `Ledger` ─> bytes by class at the peak

Every tensor that a step makes is one that the engine, its executor and its kernels make when they run; there is no
formula for any of them. Told by rule are the sizes that the CUDA allocator rounds to, what attention's backward
kernels take for themselves, and cuBLAS's work space. Not in it: the CUDA context, NCCL's own buffers, and what the
allocator holds in pieces that fit nothing. What --optimizer-cpu-offload takes of the host's memory stands apart.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from types import CodeType
from typing import Any, Final

import torch
from torch import Tensor

from megatrain.config import Plan
from megatrain.optim.offload import zeros_on_host
from megatrain.parallel import bucket_memory, collectives
from megatrain.parallel.batch import Batch, Documents
from megatrain.parallel.grid import RankGrid
from megatrain.parallel.pipeline import executor
from megatrain.parallel.pipeline.executor import SegmentHooks, SegmentPass
from megatrain.parallel.pipeline.schedule import ActionKind
from megatrain.training.build import build_schedules
from megatrain.training.engine import Engine
from megatrain.training.planning.meta_step import shadow
from megatrain.training.planning.model_tree import layer_numbers, segment_name
from megatrain.training.planning.storage_ledger import Ledger, Peak, Run, Storage, run_as_it_is

CUBLAS_BYTES: Final = 32 << 20
"""Work space of cuBLAS on Hopper, which torch takes from its allocator. Source: torch's notes on CUBLAS_WORKSPACE_CONFIG."""


@dataclass(frozen=True, kw_only=True)
class Held:
    """Bytes that a rank holds for the whole run."""

    weights: int
    gradients: int
    master_weights: int
    """0 where they are the weights themselves."""
    optimizer_state: int
    on_host: int
    """Of master weights and optimizer state in the host's memory, and of room for what travels. Not in `total`."""

    @property
    def total(self) -> int:
        """On the device."""
        return self.weights + self.gradients + self.master_weights + self.optimizer_state


@dataclass(frozen=True, kw_only=True)
class StageMemory:
    """Bytes of a rank of a pipeline stage at the peak of a step."""

    held: Held
    activations: int
    """What forward passes keep for their backward passes, of all micro-batches in flight."""
    temporaries: int
    """Of what goes on at the peak, with what is computed again."""
    communication: int
    """Of collectives, of weights and gradients that are whole for a while, and of messages between stages: hidden states that have arrived, and what is still on its way."""
    other: int
    """Position tables, the step's batches, cuBLAS's work space, and what the allocator adds by rounding to `held`."""
    peak_at: str
    """What goes on at the peak, and in which function."""

    @property
    def total(self) -> int:
        return self.held.total + self.activations + self.temporaries + self.communication + self.other


def held_by(engine: Engine) -> Held:
    """What an engine has made, which may be on the meta device."""
    sizes = {
        name: sum(tensor.nbytes for tensor in tensors) for name, tensors in _held_tensors(engine).items()
    }
    return Held(**sizes)


def _held_tensors(engine: Engine) -> dict[str, list[Tensor]]:
    optimizer, buffers = engine.optimizer, engine.buffers
    first = optimizer.num_on_device
    has_main = optimizer.master_weights[0].dtype != buffers.weights.dtype
    on_host = [x for kind in optimizer.kinds for x in optimizer.state(kind)[first:]]
    return {
        "weights": buffers.weights.kept,
        "gradients": buffers.gradients.kept,
        "master_weights": optimizer.master_weights[:first] if has_main else [],
        "optimizer_state": [x for kind in optimizer.kinds[1:] for x in optimizer.state(kind)[:first]],
        "on_host": on_host + (optimizer.host_updates.staging_buffers if optimizer.host_updates is not None else []),
    }


@dataclass(frozen=True, kw_only=True)
class FollowedStep:
    """What a step of one rank made."""

    engine: Engine
    by_class: dict[str, int]
    """Bytes at the peak, under the names of `StageMemory`."""
    peak: Peak

    def memory(self) -> StageMemory:
        """With names."""
        return StageMemory(
            held=held_by(self.engine),
            peak_at=_told(self.engine, self.peak.moment, self.peak.maker),
            **self.by_class,
        )


def planned_memory(plan: Plan, engines: Sequence[Engine], in_flight: Sequence[int]) -> list[StageMemory]:
    """The memory that ranks of the stages would need.

    Of stages that are alike but for how far they run ahead, the first and the last are followed: between them memory
    grows evenly from stage to stage, as what a micro-batch in flight keeps is always the same.

    Args:
        engines: of one rank of each stage, without memory.
        in_flight: for each stage, how many micro-batches it holds at most between forward and backward.
    """
    of_gpu, device = plan.config.training.device == "cuda", torch.device("meta")
    found: list[StageMemory] = []
    with shadow(of_gpu=of_gpu) as sizes:
        for run in _alike(plan, engines, in_flight):
            ends = [
                follow_step(
                    plan,
                    engines[stage].grid,
                    device,
                    num_microbatches=_steady(plan, engines[stage], in_flight[stage]),
                    ledger=counting_ledger(of_gpu=of_gpu, run=sizes.run),
                )
                for stage in {run.start: None, run.stop - 1: None}
            ]
            for place, stage in enumerate(run):
                first, last = ends[0].by_class, ends[-1].by_class
                by_class = {
                    name: first[name] + (last[name] - first[name]) * place // max(len(run) - 1, 1)
                    for name in first
                }
                known = FollowedStep(engine=engines[stage], by_class=by_class, peak=ends[0].peak)
                found.append(known.memory())
    return found


def counting_ledger(*, of_gpu: bool, run: Run = run_as_it_is) -> Ledger:
    """Counts as the device's allocator does, and what its kernels take for themselves."""
    if not of_gpu:
        return Ledger(run=run, on_host=_ON_HOST)
    return Ledger(run=run, rounded=allocated, work_space=work_space, on_host=_ON_HOST)


def follow_step(
    plan: Plan, grid: RankGrid, device: torch.device, *, num_microbatches: int, ledger: Ledger
) -> FollowedStep:
    """Run one step of a new engine on `device`, and account for its storages.

    Micro-batches of the plan that are left out count with their ids alone.
    """
    with ledger:
        engine = Engine(plan, grid, device)
        before = ledger.num_bytes
        batches = [_batch(plan, device, reads_labels=grid.pp.is_last) for _ in range(num_microbatches)]
        of_a_batch = (ledger.num_bytes - before) // num_microbatches
        watched = _Watched(engine.executor.hooks)
        engine.executor.hooks, ledger.moment = watched, lambda: watched.moment
        ledger.peak = Peak()  # of the step, whatever building took
        began = ledger.num_events
        engine.step(batches, build_schedules(plan).at(0))
    by_class = dict.fromkeys(("activations", "temporaries", "communication", "other"), 0)
    for storage in ledger.living_at_peak():
        by_class["other" if storage.born <= began else _class_of(storage)] += storage.num_bytes
    by_class["other"] += (plan.derived.num_microbatches - num_microbatches) * of_a_batch
    by_class["other"] += (CUBLAS_BYTES if plan.config.training.device == "cuda" else 0) - held_by(engine).total
    by_class["temporaries"] += ledger.peak.work_space
    return FollowedStep(engine=engine, by_class=by_class, peak=ledger.peak)


@dataclass(frozen=True, eq=False)
class Moment:
    """One segment_pass of a segment; another object for each."""

    kind: ActionKind
    segment: int


class _Watched:
    """An executor's hooks, that also tell what it does."""

    def __init__(self, hooks: SegmentHooks) -> None:
        self.hooks = hooks
        self.moment: object = None
        """A `Moment`; between them something else, None before and after all passes."""
        self._left = 0

    def on_schedule(self, passes: Sequence[SegmentPass]) -> None:
        self._left = len(passes)
        self.hooks.on_schedule(passes)

    def before(self, segment_pass: SegmentPass) -> None:
        self.moment = Moment(segment_pass.kind, segment_pass.segment)
        self.hooks.before(segment_pass)

    def after(self, segment_pass: SegmentPass) -> None:
        self.hooks.after(segment_pass)
        self._left -= 1
        self.moment = object() if self._left else None

    def on_gradients(self, segment: int, *, is_last: bool) -> None:
        self.hooks.on_gradients(segment, is_last=is_last)


def _steady(plan: Plan, engine: Engine, in_flight: int) -> int:
    """Micro-batches after which a step of the stage has all in memory that more of them would bring.

    Those in flight, and messages that are still kept, of which there may be as many as stages.
    """
    return min(plan.derived.num_microbatches, in_flight + engine.grid.pp.size + 1)


def _alike(plan: Plan, engines: Sequence[Engine], in_flight: Sequence[int]) -> list[range]:
    """The stages in runs whose memory grows evenly: the same layers, and each time as many more micro-batches in flight."""
    runs: list[range] = []
    for stage, engine in enumerate(engines):
        last = runs[-1] if runs else range(0)
        is_steady = in_flight[stage] + engine.grid.pp.size < plan.derived.num_microbatches
        if last and is_steady and _parts(engines[last.start]) == _parts(engine):
            steps = {in_flight[a] - in_flight[a + 1] for a in range(last.start, stage)}
            starts_steady = in_flight[last.start] + engine.grid.pp.size < plan.derived.num_microbatches
            if len(steps) == 1 and starts_steady:
                runs[-1] = range(last.start, stage + 1)
                continue
        runs.append(range(stage, stage + 1))
    return runs


def _parts(engine: Engine) -> list[object]:
    """What a stage is made of: the same list for stages whose tensors have the same sizes."""
    registry, layers = engine.model.registry, engine.model.spec.layers
    shapes = [(entry.segment, entry.layout.shape) for entry in registry.entries.values()]
    return [*shapes, *(layers[number] for number in layer_numbers(registry))]


def allocated(num_bytes: int) -> int:
    """What the CUDA caching allocator counts for a tensor of so many bytes.

    Blocks are multiples of 512 bytes. From 10 MiB on, memory is taken in multiples of 2 MiB, of which a rest of at
    most 1 MiB stays with the block. Source: c10/cuda/CUDACachingAllocator.cpp.
    """
    size = max(_rounded_up(num_bytes, 512), 512)
    if size < 10 << 20:
        return size
    segment = _rounded_up(size, 2 << 20)
    return segment if segment - size <= 1 << 20 else size


def work_space(func: Any, args: tuple[Any, ...]) -> int:
    """What the backward kernels of attention take for themselves, in bytes.

    The gradient of queries is summed in fp32, a number a query is kept in fp32, and the flash kernel forms the
    gradients of keys and values for each head of the queries before it sums those of a group.
    Source: aten/src/ATen/native/transformers/cuda/flash_attn/flash_api.cpp.
    """
    if func not in _ATTENTION_BACKWARD:
        return 0
    query, key = args[1], args[2]
    heads_dim = -3 if query.dim() == 4 else -2
    numbers = query.numel() // query.shape[-1]
    expanded = 0
    if query.shape[heads_dim] != key.shape[heads_dim] and "flash" in func.name():
        groups = query.shape[heads_dim] // key.shape[heads_dim]
        expanded = 2 * groups * key.numel() * key.element_size()
    return int(4 * query.numel() + 4 * numbers + expanded)


_ATTENTION_BACKWARD = {
    torch.ops.aten._scaled_dot_product_flash_attention_backward.default,
    torch.ops.aten._scaled_dot_product_efficient_attention_backward.default,
    torch.ops.aten._flash_attention_backward.default,
}


def _rounded_up(number: int, multiple: int) -> int:
    return -(-number // multiple) * multiple


def _batch(plan: Plan, device: torch.device, *, reads_labels: bool) -> Batch:
    """A micro-batch of the plan's sizes. Where documents matter, each sample is one.

    Args:
        reads_labels: whether the batch will keep which of them count.
    """
    data, b = plan.config.data, plan.config.training.micro_batch_size
    s = data.seq_length
    documents = None
    if data.reset_attention_mask or data.dataloader_inter_document_masking:
        borders = torch.arange(0, (b + 1) * s, s, dtype=torch.int32, device=device)
        documents = Documents(borders, s, b, s)
    ids = [torch.zeros(b, s, dtype=torch.int64, device=device) for _ in range(3)]
    batch = Batch(
        tokens=ids[0],
        labels=ids[1],
        loss_mask=torch.ones(b, s, device=device),
        position_ids=ids[2],
        documents=documents,
    )
    if reads_labels:
        batch.counts  # noqa: B018 (formed once)
    return batch


def _class_of(storage: Storage) -> str:
    """Of what a step makes."""
    if storage.maker is not None and storage.maker.co_filename == bucket_memory.__file__:
        return "communication"
    is_forward = isinstance(storage.moment, Moment) and storage.moment.kind is ActionKind.FORWARD
    if is_forward and storage.outlives_moment:
        return "activations"
    if storage.maker is not None and storage.maker.co_filename in _COMMUNICATION:
        return "communication"
    return "temporaries"


_ON_HOST = (zeros_on_host.__code__,)
_COMMUNICATION = (collectives.__file__, executor.__file__)


def _told(engine: Engine, moment: object, maker: CodeType | None) -> str:
    """`backward pass of layer 3, in rms_norm_backward`."""
    function = "" if maker is None else f", in {maker.co_name}"
    if not isinstance(moment, Moment):
        return f"{'optimizer' if moment is None else 'between segments'}{function}"
    names = {ActionKind.FORWARD: "forward pass", ActionKind.BACKWARD: "backward pass", ActionKind.WEIGHT: "weight gradients"}
    return f"{names[moment.kind]} of {segment_name(engine.model.registry, moment.segment)}{function}"
