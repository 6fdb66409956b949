"""Prints a dry run: as text, the plan and a paragraph for each part of `DryRun`; or as one JSON object."""

from __future__ import annotations

import dataclasses
import itertools
import json
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Final

from megatrain.config import Request, render_plan
from megatrain.config.derive.batch_sizes import micro_batches
from megatrain.config.environment import read_environment
from megatrain.config.subjects.data_plans import train_end
from megatrain.training.launch.memory_remedies import gigabytes
from megatrain.training.planning.data_and_timeline import Landmark, Repeated
from megatrain.training.planning.dry_run import Axis, DryRun, examine
from megatrain.training.planning.host_memory import HostMemory
from megatrain.training.planning.memory_limit import comparison
from megatrain.training.planning.memory_plan import StageMemory
from megatrain.training.planning.model_tree import Block, StageTree

_MAX_LANDMARKS: Final = 16
_MAX_DATASETS: Final = 20
_MANY_CHECKPOINTS: Final = 5
"""More checkpoints than these are worth a word on --keep-last."""
_OPERATION_SECONDS: Final = 7e-6
"""Usual time of Python, autograd and dispatch for an operation."""
_MAX_DRAWN_RANKS: Final = 16
_MEMORY_TITLES: Final = (
    "",
    "weights",
    "gradients",
    "master",
    "optimizer",
    "activations",
    "temporaries",
    "communication",
    "other",
    "total",
    "peak",
)


def print_dry_run(request: Request) -> int:
    """Print the dry run on rank 0; return the exit code.

    Raises:
        MegatrainError: the run would not start.
    """
    environment = read_environment()
    if environment.rank == 0:
        found = examine(request, environment)
        is_json = found.plan.config.training.dry_run == "json"
        print(json.dumps(to_dict(found)) if is_json else as_text(found), end="\n" if is_json else "")
    return 0


def as_text(found: DryRun) -> str:
    """Return the text that `--dry-run` prints."""
    sections = (
        _model(found),
        _flops(found),
        _memory(found),
        _ranks(found),
        itertools.chain(_pipeline(found), _host(found)),
        *([_packs(found)] if found.packs is not None else []),
        _data(found),
        _timeline(found),
    )
    text = "\n\n".join("\n".join(lines) for lines in sections)
    warning = f"warning: {found.memory_warning}\n\n" if found.memory_warning else ""
    return f"{render_plan(found.plan)}\n{text}\n\n{warning}> dry run: nothing was started\n"


def to_dict(found: DryRun) -> dict[str, Any]:
    """Return the JSON object."""
    plan = found.plan
    values = {
        field.name: getattr(found, field.name) for field in dataclasses.fields(found) if field.name != "plan"
    }
    memory = [
        dataclasses.asdict(stage) | {"held_total": stage.held.total, "total": stage.total}
        for stage in found.memory
    ]
    shown = {
        "config": plan.config.to_dict(),
        "derived": dataclasses.asdict(plan.derived),
        "origins": {path: str(origin) for path, origin in plan.origins.items()},
        "notes": [{"grade": note.grade, "text": note} for note in plan.notes],
    }
    return {"plan": shown} | {name: _plain(value) for name, value in values.items()} | {"memory": memory}


def _plain(value: Any) -> Any:
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return dataclasses.asdict(value)
    return [_plain(item) for item in value] if isinstance(value, tuple) else value


def _model(found: DryRun) -> Iterator[str]:
    model = found.model
    active = f", {model.active_parameters:,} active per token"
    is_sparse = model.active_parameters < model.parameters
    yield f"model: {model.parameters:,} parameters{active if is_sparse else ''}"
    yield f"  {_parts(model.by_part)}"
    for tree in model.stages:
        yield f"  a rank of {_stages(tree.stages)} holds {tree.parameters:,}: {_parts(tree.by_part)}"
        yield from _tree(tree)


def _tree(tree: StageTree) -> Iterator[str]:
    names = [len(tensors.name) for block in tree.blocks for tensors in block.tensors]
    width = max(names, default=0) + 2
    for block in tree.blocks:
        if block.layers:
            yield f"    {_layers(block)}"
        margin = "      " if block.layers else "    "
        for tensors in block.tensors:
            part = "" if tensors.rank_shape == tensors.shape else f", per rank {_shape(tensors.rank_shape)}"
            yield f"{margin}{tensors.name:<{width + 6 - len(margin)}}{_shape(tensors.shape)}{part}"


def _layers(block: Block) -> str:
    """Return `layer 3`, or `layers 0 to 4, 20 to 24, each`."""
    numbers, kind = block.layers, "layer" if block.stack == "decoder" else f"{block.stack} layer"
    starts = [number for number in numbers if number - 1 not in numbers]
    ends = [number for number in numbers if number + 1 not in numbers]
    spans = [f"{a}" if a == b else f"{a} to {b}" for a, b in zip(starts, ends, strict=True)]
    return f"{kind} {numbers[0]}" if len(numbers) == 1 else f"{kind}s {', '.join(spans)}, each"


def _flops(found: DryRun) -> Iterator[str]:
    flops, derived = found.flops, found.plan.derived
    yield "FLOPs: by Megatron-LM's formula, without recomputation"
    yield f"  {flops.per_token:.4g} per token, {flops.per_iteration:.4g} per iteration of {derived.tokens_per_iteration:,} tokens"
    yield f"  {flops.per_rank_and_iteration:.4g} per rank and iteration, {flops.whole_run:.4g} in the whole run"


def _memory(found: DryRun) -> Iterator[str]:
    yield "memory of a rank at the peak of a step, in GB"
    rows = [_MEMORY_TITLES, *_memory_rows(found.memory)]
    widths = [max(len(row[column]) for row in rows) for column in range(len(_MEMORY_TITLES))]
    for row in rows:
        cells = [
            cell.rjust(width) if 0 < number < len(row) - 1 else cell.ljust(width)
            for number, (cell, width) in enumerate(zip(row, widths, strict=True))
        ]
        yield f"  {'  '.join(cells)}".rstrip()
    yield "  other: RoPE tables, batches, cuBLAS; not included: the CUDA context, NCCL, fragmentation"
    of_teacher = max(stage.held.teacher for stage in found.memory)
    if of_teacher:
        yield f"  total includes the weights of the teacher, up to {gigabytes(of_teacher)} GB"
    if found.plan.config.experts.num_experts is not None:
        yield "  every expert is assumed to get the same number of tokens"
    for flag, sizes in _offloaded(found).items():
        yield f"  {flag}: up to {gigabytes(max(sizes))} GB of host memory per rank, not in the table"
    yield from _host_memory(found.host_memory)
    if found.host_use is not None and (found.plan.config.training.device == "cpu" or _offloaded(found)):
        yield f"  host memory: {found.host_use}"
    largest = max(stage.total for stage in found.memory)
    compared = comparison(found.plan, largest, found.device_memory_bytes, found.assumed_gpu)
    if compared is not None:
        yield f"  {compared}"


def _offloaded(found: DryRun) -> dict[str, list[int]]:
    """Return the bytes of a rank of each stage in host memory, by the flag that puts them there."""
    is_whole = found.plan.config.training.cpu_offloading_num_layers > 0
    flag = "--cpu-offloading-num-layers" if is_whole else "--fine-grained-activation-offloading"
    sizes = {
        "--optimizer-cpu-offload": [stage.held.on_host for stage in found.memory],
        flag: [stage.activations_on_host for stage in found.memory],
    }
    return {name: of_stages for name, of_stages in sizes.items() if any(of_stages)}


def _host_memory(memory: HostMemory | None) -> Iterator[str]:
    if memory is None:
        return
    yield (
        f"  --async-save: {gigabytes(max(memory.per_rank))} GB of host memory per rank, for a copy of its {', '.join(memory.kinds)};"
        f" {gigabytes(memory.per_host)} GB on a host of {memory.ranks_per_host} rank{'s' * (memory.ranks_per_host > 1)} ({memory.reason})"
    )
    available = f"the {gigabytes(memory.available)} GB that this host has available"
    if memory.per_host > memory.available:
        yield f"    more than {available}: the run would not start here"
    else:
        yield f"    it fits into {available}"


def _equal_stages(memory: Sequence[StageMemory]) -> list[tuple[tuple[int, ...], StageMemory]]:
    """Group the stages that have the same memory."""
    rows: dict[StageMemory, list[int]] = {}
    for number, stage in enumerate(memory):
        rows.setdefault(stage, []).append(number)
    return [(tuple(stages), stage) for stage, stages in rows.items()]


def _memory_rows(memory: Sequence[StageMemory]) -> Iterator[tuple[str, ...]]:
    for stages, stage in _equal_stages(memory):
        held = stage.held
        numbers = (
            held.weights,
            held.gradients,
            held.master_weights,
            held.optimizer_state,
            stage.activations,
            stage.temporaries,
            stage.communication,
            stage.other,
            stage.total,
        )
        yield (_stages(stages), *(gigabytes(number) for number in numbers), stage.peak_at)


def _ranks(found: DryRun) -> Iterator[str]:
    ranks = found.ranks
    sizes = " x ".join(f"{name} {axis.size}" for name, axis in ranks.axes.items())
    yield f"ranks: {ranks.world_size:,} ({ranks.reason}) = {sizes}"
    for name, axis in ranks.axes.items():
        if axis.size > 1:
            yield f"  {name}  {_groups(axis)}"
    if len(ranks.stages) > 1:
        size = ranks.world_size // len(ranks.stages)
        stages = [
            f"{number}: {_ranks_of_stage(members, size)}" for number, members in enumerate(ranks.stages)
        ]
        shown = stages if len(stages) <= 8 else [*stages[:3], "...", stages[-1]]
        yield f"  ranks of the stages  {', '.join(shown)}"


def _ranks_of_stage(ranks: Sequence[int], size: int) -> str:
    is_contiguous = ranks[-1] - ranks[0] + 1 == size
    return f"{ranks[0]} to {ranks[-1]}" if is_contiguous and size > 1 else _ranks_of(ranks, size)


def _groups(axis: Axis) -> str:
    first = _ranks_of(axis.first, axis.size)
    if axis.count == 1:
        return f"one group: {first}"
    return f"{axis.count:,} groups of {axis.size}: {first} | ... | {_ranks_of(axis.last, axis.size)}"


def _ranks_of(shown: Sequence[int], size: int) -> str:
    if len(shown) == size:
        return " ".join(map(str, shown))
    return f"{' '.join(map(str, shown[:-1]))} ... {shown[-1]}"


def _pipeline(found: DryRun) -> Iterator[str]:
    pipeline = found.pipeline
    if pipeline.num_stages == 1:
        yield f"pipeline: one stage, {micro_batches(pipeline.num_microbatches)}"
        return
    chunks = f" of {pipeline.num_chunks} model chunks" if pipeline.num_chunks > 1 else ""
    yield (
        f"pipeline: {pipeline.schedule}, {pipeline.num_stages} stages{chunks}, {micro_batches(pipeline.num_microbatches)},"
        f" bubble {pipeline.bubble_share:.1%} of the time"
    )
    if pipeline.first_num_microbatches != pipeline.num_microbatches:
        yield (
            f"  first iteration: {micro_batches(pipeline.first_num_microbatches)},"
            f" bubble {pipeline.first_bubble_share:.1%} of the time"
        )
    if len(set(pipeline.layers)) > 1:
        yield f"  layers of the virtual stages: {' '.join(map(str, pipeline.layers))}"


def _host(found: DryRun) -> Iterator[str]:
    """Yield the time of the host, which starts the operations of a GPU unless a graph has them."""
    if found.plan.config.training.device == "cuda" and not found.plan.derived.cuda_graphs:
        each = max(stage.operations for stage in found.memory)
        total = each * found.pipeline.num_microbatches
        yield (
            f"host: {each:,} operations a micro-batch, {total:,} an iteration: {_OPERATION_SECONDS * total:.2g} s at"
            f" {1e6 * _OPERATION_SECONDS:.0f} us each, during which the GPU computes"
        )


def _packs(found: DryRun) -> Iterator[str]:
    packs = found.packs
    assert packs is not None
    yield (
        f"packs: the first global batch has {packs.documents:,} documents of {packs.tokens:,} tokens, the longest {packs.longest:,}"
    )
    groups = ", ".join(f"{count:,} on {size} rank{'s' * (size > 1)}" for size, count in packs.packs.items())
    yield f"  {packs.scheduler}: {groups}; idle {packs.idle_share:.1%}, {packs.time_over_bound - 1:.1%} above a lower bound"
    if packs.ranks_in_step > 1:
        yield f"  {packs.ranks_in_step} ranks share experts or weights: their passes of one number begin together, and wait for the longest"
    for name, ratio in packs.time_by_scheduler.items():
        yield f"  {name} with groups of the largest size would take {ratio:.2f} x as long"
    yield from (f"  {line}" for line in packs.drawing[:_MAX_DRAWN_RANKS])


def _data(found: DryRun) -> Iterator[str]:
    yield "data: requested samples of each dataset, and estimated tokens and epochs"
    for use in found.data[:_MAX_DATASETS]:
        samples = "all" if use.samples is None else f"{use.samples:,}"
        tokens = "" if use.tokens is None else f"  {use.tokens:,} tokens"
        epochs = "" if use.epochs is None else f"  {use.epochs:.4g} epochs"
        yield f"  {use.split:<5}  {samples:>15}{tokens}{epochs}  {use.dataset}"
    if len(found.data) > _MAX_DATASETS:
        yield f"  and {len(found.data) - _MAX_DATASETS} more, see --dry-run json"
    if not found.data:
        yield "  none"
    missing = _missing_samples(found)
    if missing:
        yield (
            f"  WARNING: about {missing:,} training samples are missing, since datasets without weights are read once: the run will not"
            " start unless each dataset has a weight, or --train-iters is less"
        )


def _missing_samples(found: DryRun) -> int:
    """Return the training samples that datasets without weights lack, as estimated; conversations have no estimate."""
    plan = found.plan
    samples = [use.samples or 0 for use in found.data if use.split == "train"]
    if not samples or plan.derived.later_phases or plan.config.data.sft:
        return 0
    if plan.config.data.dataloader_type != "single":
        return 0
    return max(0, train_end(plan) - plan.derived.train_start - sum(samples))


def _timeline(found: DryRun) -> Iterator[str]:
    timeline = found.timeline
    yield (
        f"timeline: iterations {timeline.start_iteration + 1:,} to {timeline.train_iters:,},"
        f" {timeline.train_samples:,} samples, {timeline.train_tokens:,} tokens"
    )
    yield f"  {'iteration':>12}  {'samples before':>16}  {'lr':>12}  {'batch':>8}"
    for mark in _shortened(timeline.landmarks):
        if mark is None:
            yield f"  {'...':>12}"
        else:
            yield (
                f"  {mark.iteration:>12,}  {mark.consumed_samples:>16,}  {mark.lr:>12.6g}"
                f"  {mark.global_batch_size:>8,}  {mark.what}"
            )
    samples = timeline.evaluations.samples_each
    each = "" if samples is None else f", {samples:,} samples each"
    yield f"  evaluations: {_repeated(timeline.evaluations)}{each if timeline.evaluations.count else ''}"
    yield f"  checkpoints: {_repeated(timeline.checkpoints)}"
    yield from _duration(found)


def _duration(found: DryRun) -> Iterator[str]:
    """Yield what the checkpoints take, how long the run takes, and what a failure costs."""
    duration, saves, ranks = found.duration, found.timeline.checkpoints, found.ranks.world_size
    each = duration.checkpoint_bytes
    if saves.count:
        kept = (
            "all" if duration.kept_checkpoints == saves.count else f"{duration.kept_checkpoints:,} are kept,"
        )
        text = f"{kept} {_size(each * duration.kept_checkpoints)}"
        fewer = (
            f" (--keep-last 3: {_size(3 * each)})" if duration.kept_checkpoints > _MANY_CHECKPOINTS else ""
        )
        yield f"    {_size(each)} each, {text}{fewer}"
    hours = duration.hours(max(0, found.timeline.train_iters - found.timeline.start_iteration))
    if not hours or duration.seconds_per_iteration is None:
        return
    name = found.assumed_gpu or "GPU"
    yield (
        f"  duration: about {_time(hours)}, {duration.seconds_per_iteration:.3g} s an iteration, if {ranks:,} x {name} reach"
        " 40% of their bf16 peak (`megatrain plan` predicts it)"
    )
    between = duration.hours(saves.interval) if saves.count and saves.interval else None
    lost = (between or hours) / 2
    every = "no save before the end" if between is None else f"{_time(between)} between saves"
    yield f"  failure: {every}; one loses {_time(lost)} on average, {lost * ranks:,.3g} GPU hours, and the time of a start"


def _size(num_bytes: int) -> str:
    return f"{num_bytes / 1e12:,.1f} TB" if num_bytes >= 1e12 else f"{num_bytes / 1e9:,.3g} GB"


def _time(hours: float) -> str:
    """Return hours in the unit that fits."""
    if hours >= 48:
        return f"{hours / 24:,.1f} days"
    return f"{hours:.1f} hours" if hours >= 1 else f"{hours * 60:.2g} minutes"


def _shortened(marks: Sequence[Landmark]) -> list[Landmark | None]:
    """Return all landmarks, or with None in place of most of a long batch size ramp-up."""
    if len(marks) <= _MAX_LANDMARKS:
        return list(marks)
    half = _MAX_LANDMARKS // 2
    kept = [
        mark
        for number, mark in enumerate(marks)
        if number < half or number >= len(marks) - half or not mark.what.startswith("batch")
    ]
    return [*kept[:half], None, *kept[half:]]


def _repeated(found: Repeated) -> str:
    if not found.count:
        return "none"
    if found.count == 1 or found.interval is None:
        return f"{found.count}, after iteration {found.first:,}"
    return f"{found.count:,}, every {found.interval:,} iterations, the first after iteration {found.first:,}"


def _parts(counts: Mapping[str, int]) -> str:
    return ", ".join(f"{name} {count:,}" for name, count in counts.items() if count)


def _stages(stages: Sequence[int]) -> str:
    if len(stages) == 1:
        return f"stage {stages[0]}"
    if list(stages) == list(range(stages[0], stages[-1] + 1)):
        return f"stages {stages[0]} to {stages[-1]}"
    return f"stages {', '.join(map(str, stages))}"


def _shape(shape: Sequence[int]) -> str:
    return " x ".join(map(str, shape))
