"""`--dry-run`: what a run would be, for any number of ranks, without a GPU and without memory for the model.

    request ─> facts, plan ─> a step of each pipeline stage without memory ─> DryRun ─> text, or one JSON object

Problems are those of a real start. Nothing is written, no process group is joined, and no index is built.
"""

from __future__ import annotations

import dataclasses
import json
from typing import Any

import torch

from megatrain.config import ConfigError, Facts, Plan, Request, resolve
from megatrain.config.derive.model import training_flops
from megatrain.config.environment import LaunchEnvironment, read_environment
from megatrain.parallel.build_grid import build_grid
from megatrain.parallel.pipeline.schedule import one_forward_one_backward
from megatrain.parallel.pipeline.simulator import simulate
from megatrain.training.engine import Engine
from megatrain.training.launch.facts import gather_facts
from megatrain.training.launch.ranks import grid_shape
from megatrain.training.planning.dry_run_data import dataset_uses
from megatrain.training.planning.dry_run_report import Axis, DryRun, Flops, Pipeline, RankLayout
from megatrain.training.planning.dry_run_text import as_text
from megatrain.training.planning.dry_run_timeline import timeline_of
from megatrain.training.planning.memory_plan import planned_memory
from megatrain.training.planning.model_tree import model_tree


def dry_run(request: Request) -> int:
    """Print what the run would be, on rank 0; returns the exit code.

    Raises:
        MegatrainError: the run would not start.
    """
    environment = read_environment()
    if environment.rank == 0:
        found = examine(request, environment)
        is_json = found.plan.config.training.dry_run == "json"
        print(json.dumps(to_dict(found)) if is_json else as_text(found), end="\n" if is_json else "")
    return 0


def examine(request: Request, environment: LaunchEnvironment) -> DryRun:
    """All that a dry run shows."""
    world_size, reason = _world_size(request, environment)
    elsewhere = dataclasses.replace(environment, world_size=world_size, local_world_size=1)
    facts = gather_facts(request, elsewhere)
    plan = _plan(request, facts)
    shape = grid_shape(plan)
    pipeline = _pipeline(plan)
    engines = [
        Engine(plan, build_grid(shape, rank), torch.device("meta")) for rank in shape.rank_lists("pp")[0]
    ]
    memory = planned_memory(plan, engines, pipeline.microbatches_in_flight)
    return DryRun(
        plan=plan,
        model=model_tree(
            [engine.model.registry for engine in engines], engines[0].model.spec.routers, ep=shape.ep
        ),
        flops=_flops(plan),
        memory=tuple(memory),
        device_memory_bytes=_device_memory(plan),
        ranks=_rank_layout(plan, reason),
        data=tuple(dataset_uses(plan, facts)),
        timeline=timeline_of(plan, facts),
        pipeline=pipeline,
    )


def to_dict(found: DryRun) -> dict[str, Any]:
    """The JSON object."""
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
        "notes": list(plan.notes),
    }
    return {"plan": shown} | {name: _plain(value) for name, value in values.items()} | {"memory": memory}


def _plain(value: Any) -> Any:
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return dataclasses.asdict(value)
    return [_plain(item) for item in value] if isinstance(value, tuple) else value


def _world_size(request: Request, environment: LaunchEnvironment) -> tuple[int, str]:
    given = request.known("parallel.world_size")
    if given is not None:
        return given, "--world-size"
    if environment.world_size > 1:
        return environment.world_size, "the ranks that were started"
    return request.fewest_ranks(), "as many as hold the model once; --world-size changes it"


def _plan(request: Request, facts: Facts) -> Plan:
    """The plan for GPUs where a number of ranks was given, as for another machine, else for this host.

    Whichever of the two cannot be, the other is taken.
    """
    is_elsewhere = request.known("parallel.world_size") is not None
    gpu = dataclasses.replace(facts, device="cuda", devices_per_node=None)
    cpu = dataclasses.replace(facts, device="cpu")
    errors = []
    for candidate in (gpu, cpu) if is_elsewhere or facts.device == "cuda" else (cpu, gpu):
        try:
            return resolve(request, candidate)
        except ConfigError as error:
            errors.append(error)
    raise min(errors, key=lambda error: len(error.problems))


def _flops(plan: Plan) -> Flops:
    derived, length = plan.derived, plan.config.data.seq_length
    samples = max(0, derived.train_samples - derived.start_consumed_samples)
    return Flops(
        per_iteration=derived.flops_per_iteration,
        per_token=derived.flops_per_iteration / derived.tokens_per_iteration,
        per_rank_and_iteration=derived.flops_per_iteration / derived.world_size,
        whole_run=training_flops(
            plan.config.model,
            plan.derived.layer_table,
            num_tokens=samples * length,
            sum_of_squared_lengths=samples * length**2,
        ),
    )


def _device_memory(plan: Plan) -> int | None:
    if plan.config.training.device == "cpu" or not torch.cuda.is_available():
        return None
    return int(torch.cuda.get_device_properties(0).total_memory)


def _pipeline(plan: Plan) -> Pipeline:
    stages, count = plan.config.parallel.pipeline_model_parallel_size, plan.derived.num_microbatches
    simulation = simulate([one_forward_one_backward(stage, stages, count) for stage in range(stages)])
    return Pipeline(
        schedule="1F1B",
        num_stages=stages,
        num_microbatches=count,
        bubble_share=simulation.bubble_fraction,
        microbatches_in_flight=simulation.peak_activations,
    )


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
