"""The teacher of a run on one rank: a model that only runs forward, under the layout of the run.

    one pipeline rank       a micro-batch's pass runs when its head, or the first layer of a pair, asks for the outputs
    several, or passes      the passes of all micro-batches of the step run before those of the student: the last rank keeps
    that run in turn        their final hidden states

It has no gradients, no optimizer and no saved activations. Each rank reads its part of the weights from the checkpoint. Where the
run shards its weights over replicas, so are the teacher's: its passes gather them segment by segment, and the output layer's stay
whole. Its pipeline stages are balanced by its own FLOPs.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from megatrain.checkpoint.adaptation import Adaptation
from megatrain.checkpoint.load import Loaded, restore_expert_biases
from megatrain.config import Plan
from megatrain.config.subjects.pipeline import layer_ranges
from megatrain.model.distillation import Distillation, KeptLayer, TeacherHead, TeacherOutputs
from megatrain.model.gpt import Model, build_model
from megatrain.model.head import Head
from megatrain.model.layer_context import ExpertCommunication
from megatrain.optim.sharded import WEIGHT, TensorSource, fill_weights
from megatrain.parallel.allocate_buffers import allocate_buffers
from megatrain.parallel.batch import Batch, PassInfo
from megatrain.parallel.context_parallel import ContextParallel
from megatrain.parallel.data_parallel import DataParallel, DataParallelOptions
from megatrain.parallel.grid import RankGrid, RankGroup
from megatrain.parallel.layout import ParamLayout
from megatrain.parallel.pipeline.actions import Action, Placement
from megatrain.parallel.pipeline.executor import Executor
from megatrain.parallel.pipeline.schedule import PipelineSchedule
from megatrain.training.distillation.cached import RunCachedTeacher
from megatrain.training.launch.foreign_checkpoints import load_any
from megatrain.training.parts.fp8_recipes import fp8_recipes_of_teacher


class _Parts:
    """The modules in which a teacher differs from a model that is trained."""

    def __init__(self, wanted: set[int]) -> None:
        self.wanted, self.kept = wanted, dict[int, KeptLayer]()
        self.last: TeacherHead | None = None

    def head(self, *arguments: Any) -> Head:
        self.last = TeacherHead(*arguments)
        return self.last

    def layer(self, number: int, layer: nn.Module, *_: Any) -> nn.Module:
        if number not in self.wanted:
            return layer
        self.kept[number] = KeptLayer(layer)
        return self.kept[number]


class RunTeacher:
    """The teacher on one rank. Implements `Teacher` of the model.

    Args:
        plan: has a teacher.
        device: of its weights.
    """

    def __init__(
        self, plan: Plan, grid: RankGrid, device: torch.device, communication: ExpertCommunication
    ) -> None:
        spec, parallel = plan.derived.distillation, plan.config.parallel
        assert spec is not None, "a run with a teacher"
        self.path, self.device = spec.path, device
        is_sharded = parallel.data_parallel_sharding_strategy == "optim_grads_params"
        self.grid = grid if is_sharded else with_whole_weights(grid)
        self.dtype = getattr(torch, plan.config.precision.params_dtype)
        self.parts = _Parts({pair.teacher for pair in spec.pairs if pair.teacher is not None})
        self.model = build_model(
            spec.model,
            self.grid,
            seq_length=plan.config.data.seq_length,
            sequence_parallel=parallel.sequence_parallel,
            dtype=self.dtype,
            device=device,
            implementation="local" if device.type == "meta" else plan.derived.transformer_impl,
            attention=spec.attention,
            communication=ExpertCommunication(dispatcher=communication.dispatcher),
            placement=Placement(parallel.pipeline_model_parallel_size),
            stages=layer_ranges(spec.stages),
            others=self.parts,
            fp8=fp8_recipes_of_teacher(plan, self.grid, device, len(spec.model.layers)),
        )
        self.buffers = allocate_buffers(
            self.model.registry,
            grid=self.grid,
            weight_dtype=self.dtype,
            device=device,
            keep_full_weights=not is_sharded,
            whole_segments=() if self.parts.last is None else (len(self.model.segments) - 1,),
        )
        options = DataParallelOptions(overlap_param_gather=parallel.overlap_param_gather)
        self._parallel = DataParallel(self.buffers, self.grid, options)
        self._schedule = PipelineSchedule("1f1b", self.model.placement)
        rows = self.model.tp.sequence_rows(plan.config.data.seq_length // self.model.cp.size)
        self._executor = Executor(
            self.model.segments,
            self.grid,
            hidden_shape=(rows, plan.config.training.micro_batch_size, spec.model.hidden_size),
            dtype=self.model.hidden_dtype,
            device=device,
            hooks=self._parallel,
        )
        self._computed: dict[int, Batch] = {}
        """Micro-batches whose outputs are kept, by number."""

    @property
    def head(self) -> TeacherHead:
        assert self.parts.last is not None, "the last pipeline rank has the head"
        return self.parts.last

    def outputs(self, batch: Batch, info: PassInfo) -> TeacherOutputs:
        """Return the outputs of the micro-batch of this pass; computes them if they are not known."""
        number = info.microbatch
        if self._computed.get(number) is not batch:
            assert self.grid.pp.size == 1, "TeacherFirst has run the passes"
            self.forget()
            self.run([batch], [info])
        layers = {one: layer.found[number] for one, layer in self.parts.kept.items()}
        return TeacherOutputs(self.head.found[number], layers)

    def run(self, batches: Sequence[Batch], infos: Sequence[PassInfo]) -> None:
        """Compute the outputs of micro-batches."""
        passes = [
            PassInfo(
                microbatch=info.microbatch,
                first_sample=info.first_sample,
                documents=info.documents,
                is_training=False,
            )
            for info in infos
        ]
        with torch.no_grad():
            self._executor.run(self._schedule.evaluation(self.grid.pp.rank, len(batches)), batches, passes)
        self._computed |= {info.microbatch: batch for info, batch in zip(infos, batches, strict=True)}

    def forget(self) -> None:
        """Free all outputs."""
        self._computed.clear()
        kept: list[dict[int, Tensor]] = [layer.found for layer in self.parts.kept.values()]
        for found in (*kept, *([] if self.parts.last is None else [self.parts.last.found])):
            found.clear()

    def draw(self, source: TensorSource) -> None:
        """Fill the weights from a source in place of a checkpoint."""
        fill_weights(self.buffers, source)
        self._parallel.all_gather_all_weights()

    def load(self, *, vocab_size: int, allows_format_torch: bool) -> Loaded:
        """Load the weights; all ranks call it. Raises MegatrainError on all ranks."""
        weights = _Weights(self._parallel)
        adaptation = Adaptation(
            upcycling=None,
            unties_head=False,
            adds_biases=False,
            drops_mtp=True,
            max_tokens=vocab_size,
            seed=0,
        )
        loaded = load_any(
            self.path,
            weights,
            self.grid,
            vocab_size=vocab_size,
            allows_format_torch=allows_format_torch,
            adaptation=adaptation,
        )
        biases = loaded.state.get("expert_biases", {})
        known = self.model.expert_biases.state()
        restore_expert_biases(self.model, {k: v for k, v in biases.items() if k in known}, loaded.path)
        return loaded


class TeacherFirst:
    """Runs the teacher's passes of a step before the student's.

    Args:
        executor: runs the student's.
    """

    def __init__(self, executor: Executor, teacher: RunTeacher) -> None:
        self.executor, self.teacher = executor, teacher

    def run(self, actions: Sequence[Action], batches: Sequence[Batch], infos: Sequence[PassInfo]) -> None:
        """Run the schedule; see `Executor`."""
        self.teacher.run(batches, infos)
        self.executor.run(actions, batches, infos)
        self.teacher.forget()


def after_teacher(executor: Executor, model: Model) -> Executor | TeacherFirst:
    """Return what runs the passes of training: the executor, after a teacher's passes where its head cannot ask for them."""
    teacher = None if model.distillation is None else model.distillation.teacher
    is_ahead = executor.grid.pp.size > 1 or model.communication.turns is not None
    return TeacherFirst(executor, teacher) if isinstance(teacher, RunTeacher) and is_ahead else executor


def build_distillation(
    plan: Plan, grid: RankGrid, device: torch.device, communication: ExpertCommunication
) -> Distillation | None:
    """Return the teacher of a run and its losses, without weights; None: it has no teacher."""
    spec = plan.derived.distillation
    if spec is None:
        return None
    if spec.teacher is None:
        cached = RunCachedTeacher(Path(spec.path), ContextParallel(grid.cp), device)
        return Distillation(spec, None, grid.cp, cached)
    return Distillation(spec, RunTeacher(plan, grid, device, communication), grid.cp)


def with_whole_weights(grid: RankGrid) -> RankGrid:
    """Return a grid on which each rank holds all of its weights, since nothing shards an optimizer's state."""
    alone = RankGroup("alone", (grid.rank,), 0)
    return dataclasses.replace(
        grid,
        dp_shard=alone,
        dp_copies=grid.replicas,
        expert_shard=alone,
        expert_copies=grid.expert_replicas,
        matrix=alone,
        expert_matrix=alone,
    )


class _Weights:
    """The weights of a teacher as what a checkpoint is loaded into. Implements `LoadTarget`."""

    kinds: Sequence[str] = (WEIGHT,)
    step_count = 0

    def __init__(self, parallel: DataParallel) -> None:
        self.parallel, self.buffers = parallel, parallel.buffers

    def kinds_of(self, layout: ParamLayout) -> Sequence[str]:  # noqa: ARG002 (the signature of an optimizer)
        """Return the kinds of state of a parameter."""
        return self.kinds

    def fill(self, kind: str, source: TensorSource) -> None:
        """Fill the weights."""
        assert kind == WEIGHT
        fill_weights(self.buffers, source)

    def sync_model_weights(self) -> None:
        """All-gather those that each rank keeps whole; others are gathered by passes."""
        self.parallel.all_gather_all_weights()
