"""The pipeline: its schedule, the model chunks of each rank, and the layers of each virtual stage.

    --pipeline-model-parallel-size 4                                12 layers   3  3  3  3
    --decoder-first-pipeline-num-layers 2                           14 layers   2  4  4  4
    --account-for-loss-in-pipeline-split                            15 layers   4  4  4  3
    --num-virtual-stages-per-pipeline-rank 2                        16 layers   2  2  2  2  2  2  2  2
    --pipeline-model-parallel-layout "Ett|(tttt|)*2tttL"            13 layers   2  4  4  3
    --pipeline-model-parallel-layout "Ett|ttt|m|L"                  5 layers    2  3  0  0, multi-token prediction alone
    --hybrid-layer-pattern "M*M-|M*M-"                              8 layers   4  4
    --pipeline-model-parallel-layout auto                           any number, balanced by FLOPs, head included

The embedding is on the first virtual stage, the head on the last one, as is multi-token prediction unless the layout has it
elsewhere (m), before the head's stage. Virtual stage k is chunk k // ranks of rank k % ranks.
"""

from __future__ import annotations

import itertools
import re
from bisect import bisect_left
from collections.abc import Callable, Iterator, Sequence
from itertools import accumulate, combinations, pairwise
from math import inf
from typing import Final

from megatrain.config.derive.families import num_layers
from megatrain.config.derive.hybrid_pattern import known_pattern
from megatrain.config.derive.vision import sample_length
from megatrain.config.errors import Problem
from megatrain.config.fixes import Change, fewer_ranks, use
from megatrain.config.plan import DerivedValue, Draft
from megatrain.config.registry import Problems, derives, rule
from megatrain.config.schema.pipeline_schedules import (
    ONE_CHUNK,
    PIPELINE_SCHEDULES,
    SEVERAL_CHUNKS,
    ZERO_BUBBLE,
)
from megatrain.config.schema.tree import flag_of
from megatrain.config.schema.values import UnresolvedError

_STAGES: Final = (
    "pipeline_model_parallel_layout",
    "decoder_first_pipeline_num_layers",
    "decoder_last_pipeline_num_layers",
    "num_virtual_stages_per_pipeline_rank",
    "num_layers_per_virtual_pipeline_stage",
)
"""Settings of the split of layers into stages, which a pattern of a hybrid may have itself."""
_MOST_MEASURED_RANKS: Final = 8
"""Pipeline ranks of the longest pipeline that was measured."""
_RANKS_OF_A_V: Final = 4
"""Pipeline ranks with which stages in the form of a V were the fastest."""
_COUNTED: Final = ("account_for_embedding_in_pipeline_split", "account_for_loss_in_pipeline_split")
"""Settings of what counts in that split."""


class PipelineError(UnresolvedError):
    """Settings of the pipeline that fit no model; the rule `pipeline_is_valid` reports the problem."""

    def __init__(self, text: str, fix: str) -> None:
        super().__init__(text)
        self.problem = Problem(text, fix)


@derives("derived.pipeline_chunks")
def pipeline_chunks(draft: Draft) -> DerivedValue:
    """Derive the number of model chunks of each rank."""
    return DerivedValue(*_chunks(draft))


@derives("derived.pipeline_layers")
def pipeline_layers(draft: Draft) -> DerivedValue:
    """Derive the number of layers of each virtual stage."""
    counts, reason = _layers(draft)
    _check_stages(counts, draft.derived.mtp_stage, _tower_layers(draft))
    return DerivedValue(counts, reason)


@derives("derived.tower_layers")
def tower_layers(draft: Draft) -> DerivedValue:
    """Derive the number of layers of the vision tower of each virtual stage."""
    return DerivedValue(found := _tower_layers(draft), "balanced by FLOPs" if found else "no split tower")


def _tower_layers(draft: Draft) -> tuple[int, ...]:
    """Return the layers of the vision tower of each virtual stage; empty: the first has them all."""
    pp = draft.config.parallel.pipeline_model_parallel_size
    vision = draft.derived.model_spec.vision if pp > 1 and _is_balanced(draft) else None
    if vision is None or vision.is_tower_frozen:
        return ()
    found = _balanced(draft, pp * draft.derived.pipeline_chunks)[0]
    return found if any(found[1:]) else ()


@derives("derived.mtp_stage")
def mtp_stage(draft: Draft) -> DerivedValue:
    """Derive the virtual stage of multi-token prediction."""
    return DerivedValue(*_mtp_stage(draft, draft.derived.pipeline_chunks))


@derives("parallel.pipeline_schedule")
def pipeline_schedule(draft: Draft) -> DerivedValue:
    """Derive the schedule for an open --pipeline-schedule."""
    if draft.config.parallel.pipeline_model_parallel_size == 1:
        return DerivedValue(ONE_CHUNK, "one stage")
    chunks = draft.derived.pipeline_chunks
    if fastest := _fastest(draft):
        return DerivedValue(fastest, "fastest in the simulator: weight gradients run where a rank would wait")
    if chunks == 1:
        return DerivedValue(ONE_CHUNK, "1 model chunk per rank")
    return DerivedValue(SEVERAL_CHUNKS, f"{chunks} model chunks per rank")


def _fastest(draft: Draft) -> str:
    """Return the schedule that is the simulator's best with balanced layers; empty: flags or sizes decide.

    A V of few ranks balances worse, that of many needs stages of half a layer's size, and few micro-batches leave no weight
    gradients for the bubble.
    """
    if draft.is_given("parallel.pipeline_schedule") or not _has_open_stages(draft):
        return ""
    pp = draft.config.parallel.pipeline_model_parallel_size
    per_rank = min(draft.derived.num_microbatches, num_layers(draft.config.model)) // pp
    return ZERO_BUBBLE[1] if pp == _RANKS_OF_A_V and per_rank > 1 else ZERO_BUBBLE[0] if per_rank else ""


def _has_open_stages(draft: Draft) -> bool:
    """Return whether no flag sets the stages of a model whose balanced stages were measured on GPUs."""
    config, parallel = draft.config, draft.config.parallel
    is_set = any(getattr(parallel, name) for name in (*_STAGES, *_COUNTED))
    is_other = config.model.model_family != "gpt" or draft.derived.transformer_impl != "local"
    is_other |= config.data.pack_documents
    has_more = (
        config.model.mtp_num_layers
        or config.model.spec
        or config.training.loss
        or config.distillation.export_kd_teacher_load
    )
    overlaps = config.experts.overlap_moe_expert_parallel_comm
    if is_set or is_other or has_more or overlaps or config.training.device != "cuda":
        return False
    return 1 < parallel.pipeline_model_parallel_size <= _MOST_MEASURED_RANKS


@rule
def pipeline_is_valid(draft: Draft) -> Problems:
    """Rule: the settings of the pipeline give every virtual stage something to compute."""
    try:
        chunks, _ = _chunks(draft)
        yield from _schedule_problems(draft, chunks)
        counts, _ = _layers(draft, chunks)
        _check_stages(counts, _mtp_stage(draft, chunks)[0], _tower_layers(draft))
    except PipelineError as error:
        yield error.problem
    group = draft.config.parallel.microbatch_group_size_per_virtual_pipeline_stage
    pp = draft.config.parallel.pipeline_model_parallel_size
    if group is not None and group < pp:
        yield Problem(
            f"--microbatch-group-size-per-virtual-pipeline-stage {group} is below --pipeline-model-parallel-size {pp}:"
            " stages would wait for one another for ever",
            f"use --microbatch-group-size-per-virtual-pipeline-stage {pp} or more",
        )


def _schedule_problems(draft: Draft, chunks: int) -> Problems:
    """Yield the problem of a schedule that has another number of model chunks."""
    schedule, pp = draft.config.parallel.pipeline_schedule, draft.config.parallel.pipeline_model_parallel_size
    needed = PIPELINE_SCHEDULES[schedule].num_chunks
    if pp > 1 and needed is not None and chunks != needed:
        yield Problem(
            f"--pipeline-schedule {schedule} has {needed} model chunk{'s' * (needed > 1)} per rank, not {chunks}",
            f"{_for_chunks(draft, needed)}, or remove --pipeline-schedule",
        )
    if pp > 1 and needed is None and chunks == 1:
        yield Problem(
            f"--pipeline-schedule {schedule} requires several model chunks per rank",
            f"{_for_chunks(draft, 2)}, or use --pipeline-schedule {ONE_CHUNK}",
        )


def _for_chunks(draft: Draft, chunks: int) -> str:
    """Return the change that gives each rank so many model chunks: of the flag that decides their number."""
    parallel = draft.config.parallel
    stages = parallel.pipeline_model_parallel_size * chunks
    if _stages_of_pattern(draft):
        return f"divide the layers of --hybrid-layer-pattern by `|` into {stages} stages"
    if parallel.pipeline_model_parallel_layout not in (None, "auto"):
        return f"divide the layers of --pipeline-model-parallel-layout by `|` into {stages} stages"
    is_by_layers = parallel.num_layers_per_virtual_pipeline_stage is not None
    return (
        f"use --num-virtual-stages-per-pipeline-rank {chunks}"
        + " in place of --num-layers-per-virtual-pipeline-stage" * is_by_layers
    )


def _chunks(draft: Draft) -> tuple[int, str]:
    """Return the chunks per rank, and the reason."""
    parallel, layers = draft.config.parallel, num_layers(draft.config.model)
    pp, layout = parallel.pipeline_model_parallel_size, parallel.pipeline_model_parallel_layout
    given = parallel.num_virtual_stages_per_pipeline_rank
    per_stage = parallel.num_layers_per_virtual_pipeline_stage
    if pp == 1:
        return 1, "one stage"
    if of_pattern := _stages_of_pattern(draft):
        return len(of_pattern) // pp, f"{len(of_pattern)} stages in --hybrid-layer-pattern / pp {pp}"
    if layout not in (None, "auto"):
        parts = len(parse_layout(layout))
        if parts % pp:
            raise PipelineError(
                f"--pipeline-model-parallel-layout {layout} has {parts} stages, not a multiple of"
                f" --pipeline-model-parallel-size {pp}",
                "divide the layers by `|` into as many stages as ranks, or a multiple of it; or use"
                " --pipeline-model-parallel-layout auto",
            )
        return parts // pp, f"{parts} stages in --pipeline-model-parallel-layout / pp {pp}"
    if given is not None and per_stage is not None:
        raise PipelineError(
            f"--num-virtual-stages-per-pipeline-rank {given} and --num-layers-per-virtual-pipeline-stage {per_stage}"
            " both set the number of model chunks",
            "give one of them",
        )
    if given is not None:
        return given, "--num-virtual-stages-per-pipeline-rank"
    if per_stage is not None:
        units = layers + _units_besides_layers(draft)
        if units % (pp * per_stage):
            raise PipelineError(
                f"{_counted(draft)}{_besides(draft)} is not divisible by --pipeline-model-parallel-size {pp} *"
                f" --num-layers-per-virtual-pipeline-stage {per_stage}",
                "use --pipeline-model-parallel-layout auto in place of --num-layers-per-virtual-pipeline-stage",
            )
        return units // (pp * per_stage), f"{units // pp} layers per rank / {per_stage}"
    is_given = draft.is_given("parallel.pipeline_schedule")
    schedule = parallel.pipeline_schedule if is_given else _fastest(draft) or ONE_CHUNK
    needed = PIPELINE_SCHEDULES[schedule].num_chunks or 1
    return needed, "default" if needed == 1 else f"--pipeline-schedule {schedule}"


def _layers(draft: Draft, chunks: int | None = None) -> tuple[tuple[int, ...], str]:
    """Return the number of layers of each virtual stage, and the reason."""
    parallel, layers = draft.config.parallel, num_layers(draft.config.model)
    pp = parallel.pipeline_model_parallel_size
    chunks = draft.derived.pipeline_chunks if chunks is None else chunks
    stages, layout = pp * chunks, parallel.pipeline_model_parallel_layout
    first, last = parallel.decoder_first_pipeline_num_layers, parallel.decoder_last_pipeline_num_layers
    if pp == 1:
        return (layers,), "one stage"
    if of_pattern := _stages_of_pattern(draft):
        return of_pattern, "--hybrid-layer-pattern"
    if _is_balanced(draft):
        return _balanced(draft, stages)[1], "balanced by FLOPs, with the head"
    if layout is not None:
        return _counts_of_layout(layout, layers), "--pipeline-model-parallel-layout"
    if first is not None or last is not None:
        return _uneven(draft, chunks, first, last), "--decoder-first- and --decoder-last-pipeline-num-layers"
    units = layers + _units_besides_layers(draft)
    if units % stages:
        besides = _units_besides_layers(draft)
        smaller = (
            {"model.num_layers": size} for size in range(layers - 1, 0, -1) if (size + besides) % stages == 0
        )
        larger = ({"model.num_layers": units // stages * stages + stages - besides} for _ in range(1))
        fewer = _fewer_stages(draft, lambda ranks: units % (ranks * chunks) == 0)
        raise PipelineError(
            f"{_counted(draft)}{_besides(draft)} is not divisible by {_number_of_stages(draft, chunks)}",
            "add --pipeline-model-parallel-layout auto, or " * (stages <= layers + 1)
            + use(draft, fewer, itertools.chain(smaller, larger)),
        )
    counts = [units // stages] * stages
    counts[0] -= parallel.account_for_embedding_in_pipeline_split
    counts[-1] -= parallel.account_for_loss_in_pipeline_split
    return tuple(counts), f"{units} / {stages} stages{_besides(draft)}"


def _is_balanced(draft: Draft) -> bool:
    parallel, is_given = draft.config.parallel, draft.is_given("parallel.pipeline_schedule")
    if parallel.pipeline_model_parallel_layout == "auto" or _fastest(draft):
        return True
    return is_given and parallel.pipeline_schedule != ONE_CHUNK and _has_open_stages(draft)


def _stages_of_pattern(draft: Draft) -> tuple[int, ...]:
    """Return the number of layers of each virtual stage that the pattern of a hybrid names; empty: it names none."""
    model, parallel = draft.config.model, draft.config.parallel
    pattern = known_pattern(model.hybrid_layer_pattern) if model.model_family == "hybrid" else None
    if pattern is None or len(pattern.stages) == 1:
        return ()
    given = [flag_of(name) for name in _STAGES if getattr(parallel, name) is not None]
    pp, stages = parallel.pipeline_model_parallel_size, len(pattern.stages)
    if given:
        raise PipelineError(
            f"--hybrid-layer-pattern {pattern.main} has {stages} stages (|), and {' and '.join(given)} splits layers, too",
            f"remove {' and '.join(given)}, or the signs | of the pattern",
        )
    if stages % pp:
        path = "parallel.pipeline_model_parallel_size"
        fewer = ({path: size} for size in range(pp - 1, 0, -1) if stages % size == 0)
        raise PipelineError(
            f"--hybrid-layer-pattern {pattern.main} has {stages} stages (|), not a multiple of"
            f" --pipeline-model-parallel-size {pp}",
            f"{use(draft, fewer)}, or end {pp} stages by | in the pattern, or a multiple of it",
        )
    return tuple(map(len, pattern.stages))


def _uneven(draft: Draft, chunks: int, first: int | None, last: int | None) -> tuple[int, ...]:
    """Return the layers of each virtual stage, given those of the first and the last rank."""
    layers, pp = num_layers(draft.config.model), draft.config.parallel.pipeline_model_parallel_size
    given = {0: first} if first is not None else {}
    given |= {pp - 1: last} if last is not None else {}
    rest, others = layers - sum(given.values()), pp - len(given)
    if rest < 0 or (rest % others if others else rest):
        raise PipelineError(
            f"{_counted(draft)} without {sum(given.values())} layers of the first and the last rank leaves {rest},"
            f" which do not divide over the other {others} ranks",
            "add --pipeline-model-parallel-layout auto in place of --decoder-first-pipeline-num-layers and"
            " --decoder-last-pipeline-num-layers",
        )
    per_rank = [given.get(rank, rest // others if others else 0) for rank in range(pp)]
    if any(count % chunks for count in per_rank):
        raise PipelineError(
            f"{' '.join(map(str, per_rank))} layers of the ranks do not divide into {chunks} model chunks",
            "use --pipeline-model-parallel-layout auto in place of --decoder-first-pipeline-num-layers and"
            " --decoder-last-pipeline-num-layers, or name the layers of each chunk in it",
        )
    return tuple(count // chunks for _ in range(chunks) for count in per_rank)


def parse_layout(layout: str) -> list[str]:
    """Return the stages of a --pipeline-model-parallel-layout as strings of E, t, m and L, with repetitions expanded."""
    text = re.sub(r"[\s,]", "", layout)
    expanded = re.sub(r"([EtmL|])\*(\d+)", lambda found: found[1] * int(found[2]), text)
    expanded = re.sub(r"\(([EtmL|]*)\)\*(\d+)", lambda found: found[1] * int(found[2]), expanded)
    if not re.fullmatch(r"[EtmL|]+", expanded) or expanded.count("E") > 1 or expanded.count("L") > 1:
        raise PipelineError(
            f"--pipeline-model-parallel-layout {layout} is not of the form Ett|(tt|)*2tL",
            "write E for the embedding, t for a layer, L for the loss, `|` between stages, and *N after a letter or"
            " parentheses for repetitions; or use --pipeline-model-parallel-layout auto",
        )
    return expanded.split("|")


def _counts_of_layout(layout: str, layers: int) -> tuple[int, ...]:
    stages = parse_layout(layout)
    counts = tuple(stage.count("t") for stage in stages)
    order = "".join(stages)
    if sum(counts) != layers:
        raise PipelineError(
            f"--pipeline-model-parallel-layout {layout} has {sum(counts)} layers (t), and --num-layers is {layers}",
            f"use --num-layers {sum(counts)}, or change the layout",
        )
    if not re.fullmatch(r"Et*m*L", order) or "E" not in stages[0] or "L" not in stages[-1]:
        raise PipelineError(
            f"--pipeline-model-parallel-layout {layout} has the embedding (E) not first, or the loss (L) not last",
            "begin the first stage with E, and end the last one with L; or use --pipeline-model-parallel-layout auto",
        )
    return counts


def _mtp_stage(draft: Draft, chunks: int) -> tuple[int | None, str]:
    """Return the virtual stage of multi-token prediction, None without it, and the reason."""
    parallel, depths = draft.config.parallel, draft.config.model.mtp_num_layers or 0
    layout = parallel.pipeline_model_parallel_layout
    has_layout = parallel.pipeline_model_parallel_size > 1 and layout not in (None, "auto")
    stages = parse_layout(layout) if layout is not None and has_layout else []
    found = [number for number, stage in enumerate(stages) for _ in range(stage.count("m"))]
    if found and (len(found) != depths or found[0] != found[-1]):
        raise PipelineError(
            f"--pipeline-model-parallel-layout {layout} has {len(found)} layers of multi-token prediction (m) in"
            f" {len(set(found))} stages, and --mtp-num-layers is {depths}",
            f"write {'m' * depths or 'no m'}, in one stage"
            if depths
            else "write no m, or add --mtp-num-layers",
        )
    if not depths:
        return None, "--mtp-num-layers is 0"
    last = parallel.pipeline_model_parallel_size * chunks - 1
    return (found[0], "m in --pipeline-model-parallel-layout") if found else (last, "the last virtual stage")


def _balanced(draft: Draft, stages: int) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Return the layers of the vision tower and the others by stage, of the split whose most expensive stage is cheapest and, among those, the most even one.

    Costs are FLOPs per token; the head counts as part of the last stage. The layers of a vision tower precede the others.
    """
    spec, length = draft.derived.model_spec, sample_length(draft.config)
    layers, head = spec.flops_per_token(length)
    if len(layers) < stages - 1:
        chunks = stages // draft.config.parallel.pipeline_model_parallel_size
        fewer = _fewer_stages(draft, lambda ranks: ranks * chunks <= len(layers) + 1)
        more = ({"model.num_layers": count} for count in range(stages - 1, stages + 1))
        raise PipelineError(
            f"--num-layers {len(layers)} are too few for {stages} stages", use(draft, fewer, more)
        )
    return balanced_split(layers, head, stages, tower=spec.vision_flops_per_token(length))


def balanced_split(
    layers: Sequence[int], head: int, stages: int, *, tower: Sequence[int] = ()
) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Return the layers of a vision tower and the others by stage; see `_balanced`. There are at least stages - 1 others.

    Args:
        layers, head, tower: costs.
    """
    costs = [*tower, *layers, head]
    edges = list(pairwise([*_balanced_starts(costs, stages), len(costs)]))
    of_tower = tuple(max(min(end, len(tower)) - start, 0) for start, end in edges)
    counts = [end - start - own for (start, end), own in zip(edges, of_tower, strict=True)]
    counts[-1] -= 1
    return of_tower, tuple(counts)


def _balanced_starts(costs: Sequence[int], stages: int) -> list[int]:
    """Return the starts of `stages` runs of costs: the largest sum is as small as possible, then the sum of squares."""
    sums = [0, *accumulate(costs)]
    bounds = sorted({b - a for a, b in combinations(sums, 2)})
    bound = bounds[bisect_left(bounds, x=True, key=lambda most: _num_runs(costs, most) <= stages)]
    best: list[dict[int, tuple[int, int]]] = [{0: (0, 0)}]
    """For each number of runs: by their end, the smallest sum of squares and the start of the last run."""
    for _ in range(stages):
        ends: dict[int, tuple[int, int]] = {}
        for start, (squares, _) in best[-1].items():
            for end in range(start + 1, len(costs) + 1):
                run = sums[end] - sums[start]
                if run > bound:
                    break
                ends[end] = min(ends.get(end, (squares + run**2, start)), (squares + run**2, start))
        best.append(ends)
    starts, end = [], len(costs)
    for ends in reversed(best[1:]):
        end = ends[end][1]
        starts.append(end)
    return starts[::-1]


def _num_runs(costs: Sequence[int], most: int) -> float:
    """Return the smallest number of runs of at most this cost; infinity if one cost is above it."""
    runs, run = 1, 0
    for cost in costs:
        if cost > most:
            return inf
        if run + cost > most:
            runs, run = runs + 1, 0
        run += cost
    return runs


def _check_stages(counts: Sequence[int], mtp_stage: int | None, tower: Sequence[int] = ()) -> None:
    """Raise PipelineError for a stage between first and last with neither layers nor `mtp_stage`, or for negative counts."""
    for stage, count in enumerate(counts):
        has_tower = bool(tower) and tower[stage] > 0
        is_between = 0 < stage < len(counts) - 1 and stage != mtp_stage and not has_tower
        if count < 0 or (count == 0 and is_between):
            raise PipelineError(
                f"virtual stage {stage} (from 0) would have no layers: {' '.join(map(str, counts))}",
                "use --pipeline-model-parallel-layout auto, or fewer stages (--pipeline-model-parallel-size,"
                " --num-virtual-stages-per-pipeline-rank), or more layers",
            )


def layer_ranges(counts: Sequence[int]) -> list[range]:
    """Return the numbers of the layers of each virtual stage."""
    starts = [sum(counts[:stage]) for stage in range(len(counts) + 1)]
    return [range(a, b) for a, b in pairwise(starts)]


def _counted(draft: Draft) -> str:
    """Return the number of layers with the setting that decides it."""
    model = draft.config.model
    count = num_layers(model)
    return (
        f"--hybrid-layer-pattern with {count} layers"
        if model.model_family == "hybrid"
        else f"--num-layers {count}"
    )


def _units_besides_layers(draft: Draft) -> int:
    parallel = draft.config.parallel
    return parallel.account_for_embedding_in_pipeline_split + parallel.account_for_loss_in_pipeline_split


def _besides(draft: Draft) -> str:
    parallel = draft.config.parallel
    names = {
        "embedding": parallel.account_for_embedding_in_pipeline_split,
        "loss": parallel.account_for_loss_in_pipeline_split,
    }
    counted = " and ".join(name for name, is_counted in names.items() if is_counted)
    return f" with the {counted} as layers" if counted else ""


def _fewer_stages(draft: Draft, fits: Callable[[int], bool]) -> Iterator[Change]:
    """Yield fewer pipeline ranks that fit."""
    path = "parallel.pipeline_model_parallel_size"
    return (change for change in fewer_ranks(draft, path) if fits(change[path]))


def _number_of_stages(draft: Draft, chunks: int) -> str:
    text = f"--pipeline-model-parallel-size {draft.config.parallel.pipeline_model_parallel_size}"
    return text if chunks == 1 else f"{text} * {chunks} model chunks"
