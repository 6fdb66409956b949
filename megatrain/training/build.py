"""Builds the parts of an engine from a plan: model, buffers, optimizer, loss scaler, schedules, executor.

plan ─> model ─> buffers ─> data parallelism ─> optimizer
└──> executor
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final, TypeVar

import torch

from megatrain.config import Plan
from megatrain.config.derive.vision import rank_length, sample_length
from megatrain.config.schema.optimizer import OptimizerConfig
from megatrain.config.subjects.device import TRIED
from megatrain.config.subjects.experts import experts_are_split
from megatrain.config.subjects.fp8 import gathers_codes
from megatrain.config.subjects.pipeline import layer_ranges
from megatrain.config.user_function import user_function
from megatrain.kernels.side_stream import SideStream
from megatrain.model.families.vision import message_rows
from megatrain.model.gpt import Model, build_model
from megatrain.model.layer_context import ExpertCommunication
from megatrain.model.recompute import Recompute
from megatrain.model.user_loss import UserLoss
from megatrain.optim.loss_scale import DynamicLossScaler, LossScaler
from megatrain.optim.lr_schedule import HyperparamSchedules, LrSchedule, WeightDecaySchedule
from megatrain.optim.matrix_update import MatrixUpdate
from megatrain.optim.muon import Muon, MuonRule, SecondMoment
from megatrain.optim.qk_clip import QkClip
from megatrain.optim.sharded import ShardedOptimizer
from megatrain.optim.soap import Soap, SoapRule
from megatrain.optim.update_rules import AdamwRule, LionRule, SgdRule, UpdateRule
from megatrain.parallel.allocate_buffers import allocate_buffers
from megatrain.parallel.data_parallel import DataParallel, DataParallelOptions, FlatBuffers
from megatrain.parallel.fp8.weight_gather import Fp8WeightGather
from megatrain.parallel.grid import RankGrid
from megatrain.parallel.packs.context import PackContext
from megatrain.parallel.packs.executor import PackExecutor
from megatrain.parallel.pipeline.executor import Executor, LateGradients
from megatrain.parallel.pipeline.graph_trial import MIN_WARMUP_STEPS, GpuClock, Trial
from megatrain.parallel.pipeline.graphed_passes import (
    Capture,
    GraphedPasses,
    Graphs,
    MicrobatchGraphs,
)
from megatrain.parallel.pipeline.graphed_stages import RecordedExecutor, StageGraphs
from megatrain.parallel.pipeline.interleave import Turns
from megatrain.parallel.pipeline.point_to_point import connect_channels
from megatrain.parallel.pipeline.schedule import PipelineSchedule, placement_of
from megatrain.parallel.pipeline.segments import Segment, SegmentHooks
from megatrain.parallel.rank_capacity import RankCapacities
from megatrain.parallel.tensor_parallel import TensorParallel
from megatrain.training.distillation.teacher import TeacherFirst, after_teacher, build_distillation
from megatrain.training.parts.attention_logits import AttentionLogits, attention_specs
from megatrain.training.parts.fp8_recipes import fp8_recipes
from megatrain.training.parts.offloaded_modules import OffloadChoice, offload_activations
from megatrain.training.parts.trial_parts import try_parts

AnyExecutor = TypeVar("AnyExecutor", bound=Executor)


def build_model_from_plan(plan: Plan, grid: RankGrid, device: torch.device) -> Model:
    """Build this rank's part of the model; its parameters have no memory until `build_buffers` runs."""
    config = plan.config
    if device.type != "meta":
        try_parts(plan, device)
    communication = _expert_communication(plan)
    distillation = build_distillation(plan, grid, device, communication)
    model = build_model(
        plan.derived.model_spec,
        grid,
        seq_length=max(sample_length(config), config.model.decoder_seq_length or 0),
        sequence_parallel=config.parallel.sequence_parallel,
        overlaps_tp=config.parallel.tp_comm_overlap,
        dtype=getattr(torch, plan.config.precision.params_dtype),
        device=device,
        seed=config.training.seed,
        # Plans build on the meta device, where nothing is computed: Transformer Engine is not imported.
        implementation="local" if device.type == "meta" else plan.derived.transformer_impl,
        attention=plan.derived.attention_backend,
        cp_comm_types=plan.derived.cp_comm_types or ("p2p",),
        recompute=_recompute(plan),
        placement=build_pipeline(plan).placement,
        stages=layer_ranges(plan.derived.pipeline_layers),
        tower_stages=layer_ranges(plan.derived.tower_layers) or None,
        mtp_stage=plan.derived.mtp_stage,
        fp8=fp8_recipes(plan, grid, device),
        qat=plan.derived.qat,
        communication=communication,
        user_loss=_user_loss(plan, device) if device.type != "meta" else None,
        others=distillation,
        has_packs=bool(plan.derived.pack_group_sizes),
    )
    return dataclasses.replace(model, distillation=distillation)


def _user_loss(plan: Plan, device: torch.device) -> UserLoss | None:
    function = user_function(plan.config, "training.loss")
    if function is None:
        return None
    return UserLoss(function, plan.derived.vocab_size, device, digest=plan.config.training.loss_digest)


def _expert_communication(plan: Plan) -> ExpertCommunication:
    experts = plan.config.experts
    has_side = experts.moe_shared_expert_overlap and not _recomputes_experts(plan)
    return ExpertCommunication(
        dispatcher="alltoall" if experts.sends_by_alltoall else "allgather",
        capacities=None
        if experts.moe_expert_rank_capacity_factor is None
        else RankCapacities(experts.moe_expert_rank_capacity_factor),
        side=SideStream() if has_side else None,
        turns=Turns() if _overlaps_passes(plan) or plan.derived.graphs_in_turn else None,
    )


def _overlaps_passes(plan: Plan) -> bool:
    return plan.config.experts.overlap_moe_expert_parallel_comm and experts_are_split(plan)


def _recomputes_experts(plan: Plan) -> bool:
    """Return whether the backward pass runs the shared expert forward again, on the stream that needs it first."""
    recompute = _recompute(plan)
    return recompute.kind in ("uniform", "block") or any(map(recompute.has_part, ("moe", "shared_experts")))


def build_pipeline(plan: Plan) -> PipelineSchedule:
    """Return the schedules of the pipeline."""
    parallel = plan.config.parallel
    kind = parallel.pipeline_schedule
    return PipelineSchedule(
        kind,
        placement_of(kind, parallel.pipeline_model_parallel_size, plan.derived.pipeline_chunks),
        parallel.microbatch_group_size_per_virtual_pipeline_stage,
        posts_receives=parallel.overlap_p2p_communication,
        combines=_overlaps_passes(plan),
    )


def build_buffers(plan: Plan, model: Model, grid: RankGrid, device: torch.device) -> FlatBuffers:
    """Allocate the flat buffers of weights and gradients, and point the model's parameters into them."""
    strategy = plan.config.parallel.data_parallel_sharding_strategy
    return allocate_buffers(
        model.registry,
        grid=grid,
        keep_full_weights=strategy != "optim_grads_params",
        keep_full_gradients=strategy in ("no_shard", "optim"),
        weight_dtype=getattr(torch, plan.config.precision.params_dtype),
        grad_dtype=getattr(torch, plan.derived.master_dtype),
        device=device,
    )


def build_data_parallel(plan: Plan, buffers: FlatBuffers, grid: RankGrid) -> DataParallel:
    """Build the communication of gradients and weights between replicas."""
    config = plan.config
    data_parallel = DataParallel(
        buffers,
        grid,
        DataParallelOptions(
            overlap_grad_reduce=config.parallel.overlap_grad_reduce,
            overlap_param_gather=config.parallel.overlap_param_gather,
            grad_dtype=torch.bfloat16 if config.precision.grad_reduce_in_bf16 else None,
        ),
    )
    if gathers_codes(plan):
        plain = data_parallel.weights
        data_parallel.weights = Fp8WeightGather(
            plain.memory, plain.groups, buffers.buckets, grid.tp, overlap=plain.overlap
        )
    return data_parallel


def build_optimizer(plan: Plan, data_parallel: DataParallel, grid: RankGrid) -> ShardedOptimizer:
    """Build the optimizer over this rank's shards of the buffers."""
    optimizer = plan.config.optimizer
    return ShardedOptimizer(
        data_parallel,
        UPDATE_RULES[optimizer.of_elements](optimizer),
        matrices=_matrix_update(plan, data_parallel.buffers, grid),
        clip_grad=optimizer.clip_grad,
        master_dtype=getattr(torch, plan.derived.master_dtype),
        moment_dtypes=_optimizer_state_dtypes(plan),
        ema_decay=optimizer.ema_decay,
        offload_fraction=optimizer.optimizer_offload_fraction if optimizer.optimizer_cpu_offload else 0.0,
    )


def build_attention_logits(
    plan: Plan, model: Model, optimizer: ShardedOptimizer, grid: RankGrid, device: torch.device
) -> AttentionLogits | None:
    """Build what measures attention logits and, with --qk-clip, lets the optimizer scale weights by them."""
    config = plan.config.optimizer
    if not (config.qk_clip or plan.config.logging.log_max_attention_logit):
        return None
    clip = None
    if config.qk_clip:
        alpha, threshold = config.qk_clip_alpha, config.qk_clip_threshold
        specs, shards = attention_specs(model.spec), optimizer.buffers.shards
        clip = QkClip(specs, shards, alpha=alpha, threshold=threshold)
        optimizer.after_update = clip.scale
    return AttentionLogits(model, grid, device, clip)


def build_executor(
    plan: Plan,
    model: Model,
    hooks: SegmentHooks,
    grid: RankGrid,
    device: torch.device,
    kind: type[AnyExecutor],
) -> AnyExecutor:
    """Build the executor that runs pipeline schedules over the model's segments."""
    config = plan.config
    strategy = config.parallel.data_parallel_sharding_strategy
    has_late_gradients = grid.ep.size > 1 and strategy in ("no_shard", "optim")
    late: LateGradients = "all" if type(hooks) is SegmentHooks else "before_last"
    connect_channels(grid, device)
    rows = model.tp.sequence_rows(sample_length(config) // model.cp.size)
    segments: Sequence[Segment] = model.segments
    if config.training.offloads_activations:
        hooks, segments = offload_activations(model.segments, _offload_choice(plan), hooks, device)
    build: Callable[..., Any] = kind
    if isinstance(model.cp, PackContext):
        build = functools.partial(PackExecutor, cp=model.cp, tp=model.tp)
    executor: AnyExecutor = build(
        segments,
        grid,
        hidden_shape=(rows, config.training.micro_batch_size, config.model.hidden_size),
        dtype=model.hidden_dtype,
        device=device,
        hooks=hooks,
        chunks=model.chunks,
        placement=model.placement,
        hidden_rows=[
            _hidden_rows(plan, model.tp, rows, stage) for stage in range(model.placement.num_stages)
        ],
        late_gradients=late if has_late_gradients else "none",
        turns=model.communication.turns,
    )
    return executor


def _offload_choice(plan: Plan) -> OffloadChoice:
    training = plan.config.training
    modules = training.offload_modules if training.fine_grained_activation_offloading else ()
    return OffloadChoice(training.cpu_offloading_num_layers, modules, training.min_offloaded_tensor_size)


def _hidden_rows(plan: Plan, tp: TensorParallel, rows: int, stage: int) -> tuple[int, int]:
    """Return the rows that a virtual stage receives in evaluation and in training.

    They are the rows of a sample, with its depths of prediction in training, of decoder and memory, or a message of the tower.
    """
    spec, mtp_stage = plan.derived.model_spec, plan.derived.mtp_stage
    if any(plan.derived.tower_layers[stage:]) and stage > 0:
        shares = plan.config.parallel.context_parallel_size * (
            tp.size if plan.config.vision.spread_images else 1
        )
        return (message_rows(spec, plan.config.training.micro_batch_size, shares),) * 2
    if mtp_stage is not None and stage == mtp_stage + 1:
        return rows, rows * (1 + spec.num_depths)
    start, length = plan.decoder_stage, spec.stacks[-1].seq_length
    if start is not None and stage > start:
        assert length is not None, "a decoder after an encoder has a length of its own"
        rows += tp.sequence_rows(length)
    return rows, rows


def build_training_passes(
    plan: Plan,
    model: Model,
    executor: Executor,
    data_parallel: DataParallel,
    grid: RankGrid,
    device: torch.device,
    report: Callable[[str], None],
) -> Executor | GraphedPasses | TeacherFirst:
    """Return what runs the passes of training: the executor, after a teacher's, or CUDA graphs of them (plans and CPUs record none).

    Args:
        report: receives sentences for the log.
    """
    if not plan.derived.cuda_graphs or device.type != "cuda":
        return after_teacher(executor, model)
    num_warmup_steps, trial = max(plan.config.training.cuda_graph_warmup_steps, 1), None
    if plan.config.training.cuda_graph_impl in TRIED:
        num_warmup_steps = max(num_warmup_steps, MIN_WARMUP_STEPS)
        trial = Trial(GpuClock(device), grid.world, device, report)
    recorder = Capture(device)

    def make_graphs() -> Graphs:
        in_turn = plan.derived.graphs_in_turn and trial is not None and trial.has_twice_the_memory
        return build_graphs(plan, model, grid, device, recorder, in_turn=in_turn)

    return GraphedPasses(executor, make_graphs, data_parallel, num_warmup_steps, recorder, trial)


def build_graphs(
    plan: Plan,
    model: Model,
    grid: RankGrid,
    device: torch.device,
    recorder: Capture,
    *,
    in_turn: bool = False,
) -> Graphs:
    """Build what records the passes of training and replays them; `in_turn`: those of two micro-batches in turn."""
    build = functools.partial(build_executor, plan, model, SegmentHooks(), grid, device)
    if model.placement.num_stages > 1 or _overlaps_passes(plan) or in_turn:
        schedule = dataclasses.replace(build_pipeline(plan), combines=True)
        own_schedule = functools.partial(schedule.training, grid.pp.rank) if in_turn else None
        return StageGraphs(build(RecordedExecutor), recorder, model.tp.peers, own_schedule)
    return MicrobatchGraphs(
        build(Executor), recorder, casts_weights=model.fp8 is not None, peers=model.tp.peers
    )


def build_loss_scaler(plan: Plan) -> LossScaler:
    """Build the loss scaler: constant with --loss-scale, dynamic with --fp16 alone, 1 otherwise."""
    precision = plan.config.precision
    is_checked = plan.config.training.check_for_nan_in_loss_and_grad and plan.config.resilience.on_nan != (
        "skip",
    )
    if precision.fp16 and precision.loss_scale is None:
        return DynamicLossScaler(
            scale=precision.initial_loss_scale,
            minimum=precision.min_loss_scale,
            window=precision.loss_scale_window,
            hysteresis=precision.hysteresis,
            skips_all=not is_checked,
        )
    return LossScaler(
        precision.loss_scale or 1.0,
        skips_gradients=precision.fp16 and precision.loss_scale is not None,
        skips_all=not is_checked,
    )


def build_schedules(plan: Plan) -> HyperparamSchedules:
    """Build the schedules of learning rates and weight decay."""
    values = plan.derived.schedule
    rate = LrSchedule.of(values)
    of_kind = {kind: group for group in plan.derived.lr_groups.groups for kind in group.kinds}
    return HyperparamSchedules(
        lr=rate,
        lr_by_kind={
            kind: dataclasses.replace(rate, lr=group.lr, min_lr=group.min_lr)
            for kind, group in of_kind.items()
        },
        eps_scales={kind: group.eps_scale for kind, group in of_kind.items()},
        weight_decay=WeightDecaySchedule(
            style=values.weight_decay_incr_style,
            start=values.start_weight_decay,
            end=values.end_weight_decay,
            increase_samples=values.weight_decay_incr_samples,
        ),
    )


def _recompute(plan: Plan) -> Recompute:
    """Return the parts that the plan recomputes in the backward pass."""
    training, mlp_rows = plan.config.training, _mlp_rows(plan)
    parts: tuple[str, ...] = ("mlp_act",) if training.recompute_mlp_act else ()
    if training.recompute_granularity == "full":
        assert training.recompute_method is not None, "a rule asks for it"
        layers = training.recompute_num_layers or 1
        return Recompute(kind=training.recompute_method, num_layers=layers, mlp_rows=mlp_rows, parts=parts)
    is_selective = training.recompute_granularity == "selective" or training.recompute_activations
    parts += (training.recompute_modules or ("core_attn",)) if is_selective else ()
    if training.recompute_norms:
        parts += ("layernorm",)
    return Recompute(kind="parts" if parts else "none", parts=parts, mlp_rows=mlp_rows)


def _mlp_rows(plan: Plan) -> int | None:
    """Return the rows of a sequence of the full length that an MLP computes at once; None: all."""
    parallel, chunks = plan.config.parallel, plan.config.training.mlp_chunks_for_training
    if chunks == 1:
        return None
    split = parallel.tensor_model_parallel_size if parallel.sequence_parallel else 1
    return -(-rank_length(plan.config) // (split * chunks))


UPDATE_RULES: Final[Mapping[str, Callable[[OptimizerConfig], UpdateRule]]] = {
    "adam": lambda config: AdamwRule(beta1=config.adam_beta1, beta2=config.adam_beta2, eps=config.adam_eps),
    "sgd": lambda config: SgdRule(momentum=config.sgd_momentum),
    "lion": lambda config: LionRule(beta1=config.lion_beta1, beta2=config.lion_beta2),
}
"""Update rule of each optimizer of single elements: with Muon and SOAP, of all but the matrices of layers."""


def _matrix_update(plan: Plan, buffers: FlatBuffers, grid: RankGrid) -> MatrixUpdate | None:
    """Return the update of the layers' matrices by Muon or SOAP, or None with another optimizer."""
    optimizer = plan.config.optimizer
    if not optimizer.has_matrices:
        return None
    if optimizer.optimizer == "soap":
        soap = SoapRule(
            beta1=optimizer.adam_beta1,
            beta2=optimizer.adam_beta2,
            eps=optimizer.adam_eps,
            shampoo_beta=optimizer.soap_shampoo_beta,
            frequency=optimizer.soap_precondition_frequency,
            max_dim=optimizer.soap_max_preconditioner_dim,
        )
        device, dtype = buffers.weights.shards[0].device, getattr(torch, plan.derived.master_dtype)
        return Soap(soap, buffers.shards, grid, device=device, dtype=dtype)
    rule = MuonRule(
        momentum=optimizer.muon_momentum,
        is_nesterov=optimizer.muon_nesterov,
        num_steps=optimizer.muon_num_ns_steps,
        coefficients=optimizer.muon_coefficient_type,
        scale_mode=optimizer.muon_scale_mode,
        extra_scale=optimizer.muon_extra_scale_factor,
        splits_qkv=not optimizer.muon_no_split_qkv,
        dtype=torch.bfloat16 if optimizer.muon_fp32_matmul_prec == "medium" else torch.float32,
        has_tf32=optimizer.muon_fp32_matmul_prec == "high",
        second_moment=SecondMoment(optimizer.adaptive_muon_beta2, optimizer.adaptive_muon_eps)
        if optimizer.optimizer == "adaptive_muon"
        else None,
    )
    return Muon(rule, buffers.shards, grid)


def _optimizer_state_dtypes(plan: Plan) -> dict[str, torch.dtype]:
    """Return the dtype of each kind of optimizer state that is kept in lower precision than the master weights."""
    optimizer = plan.config.optimizer
    dtypes = {"exp_avg": optimizer.exp_avg_dtype, "exp_avg_sq": optimizer.exp_avg_sq_dtype}
    return {kind: torch.bfloat16 for kind, dtype in dtypes.items() if dtype == "bf16"}
