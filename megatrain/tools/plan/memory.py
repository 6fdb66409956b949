"""Memory of a layout: an estimate that takes no time, and the plan of --dry-run for the ranks that need most.

weights of a rank, sizes of layers ─> `estimated_bytes`, to sort out what cannot fit
resolved plan ─> the engine's step on the meta device (training/planning/) ─> `planned_bytes`
"""

from __future__ import annotations

import functools
import math
from collections import Counter
from dataclasses import replace

import torch

from megatrain.config import Plan
from megatrain.config.model_spec.attention import AttentionSpec
from megatrain.config.model_spec.experts import ExpertsSpec
from megatrain.config.model_spec.layer import LayerSpec
from megatrain.config.model_spec.mlp import MlpSpec
from megatrain.config.model_spec.part import Part
from megatrain.config.schema.pipeline_schedules import PIPELINE_SCHEDULES
from megatrain.config.subjects.model import CHUNK_TOKENS
from megatrain.config.subjects.pipeline import layer_ranges
from megatrain.parallel.build_grid import build_grid
from megatrain.parallel.pipeline.actions import ActionKind
from megatrain.parallel.pipeline.schedule import PipelineSchedule
from megatrain.tools.plan.layouts import Layout, Workload
from megatrain.tools.plan.step_time import RankWeights, rank_weights
from megatrain.training.launch.memory_remedies import saves_activations
from megatrain.training.launch.ranks import grid_shape
from megatrain.training.planning.memory_plan import device_ledger, grouped_microbatches, record_step
from megatrain.training.planning.meta_step import meta_device_as

_OTHER_BYTES = 0.7e9
"""Temporary tensors, RoPE tables, batches and cuBLAS, of one H200 in case A1."""
_ESTIMATE_ERROR, _OMITTED_BYTES = 1.15, 4e9
"""A safe ratio of planned to estimated memory, and temporary tensors of the head and the loss, which estimates omit."""


def estimated_bytes(workload: Workload, layout: Layout) -> float:
    """Return an estimate of the peak memory of the rank that needs most."""
    return max(_rank_bytes(workload, layout))


def planned_bytes(workload: Workload, layout: Layout, plan: Plan, limit_bytes: float = math.inf) -> int:
    """Return the memory that --dry-run plans: of the rank that needs most by the estimate, and of the first and the last one.

    A step runs two rounds of micro-batches through the ranks, after which every schedule without groups of them has its peak.

    Args:
        plan: resolved with the layout's settings.
        limit_bytes: after a rank above the limit the others are not run, nor is one that needs less for certain.
    """
    estimates = _rank_bytes(workload, layout)
    ranks = sorted({0, layout.pp - 1, estimates.index(max(estimates))}, key=lambda rank: -estimates[rank])
    shape, device = grid_shape(plan), torch.device("meta")
    stages = shape.rank_lists("pp")[0]
    count = grouped_microbatches(plan) or min(plan.derived.num_microbatches, 2 * layout.pp + 2)
    most = 0
    with meta_device_as(as_cuda=True) as operations:
        for rank in ranks:
            if most > min(limit_bytes, _ESTIMATE_ERROR * estimates[rank] + _OMITTED_BYTES):
                break
            ledger = device_ledger(as_cuda=True, run=operations.run)
            grid = build_grid(shape, stages[rank])
            step = record_step(plan, grid, device, num_microbatches=count, ledger=ledger)
            most = max(most, step.memory().total)
    return most


def _rank_bytes(workload: Workload, layout: Layout) -> list[float]:
    """Return an estimate for each pipeline rank."""
    weights, placement = rank_weights(workload, layout), layout.placement
    numbers = layer_ranges(layout.split)
    is_long = workload.tokens(layout) >= 2 * CHUNK_TOKENS
    chunked = ("mlp",) if layout.recompute == "full" and is_long else ()
    whole = replace(layout, recompute="none", modules=chunked)  # whose MLPs hold a chunk of tokens
    saved_by, whole_by, deferred_by = (
        {sizes: count(workload, one, sizes) for sizes in set(workload.all_layers)}
        for count, one in ((_layer_bytes, layout), (_layer_bytes, whole), (_deferred_bytes, layout))
    )
    found = []
    for rank in range(layout.pp):
        stages = [placement.stage(rank, chunk) for chunk in range(layout.chunks)]
        layers = [workload.layers[number] for stage in stages for number in numbers[stage]]
        if len(layout.split) - 1 in stages:
            layers += workload.plan.derived.model_spec.used_mtp_layers
        kinds = Counter(layers)
        saved, deferred = (
            sum(by[sizes] * number for sizes, number in kinds.items()) for by in (saved_by, deferred_by)
        )
        again = max((whole_by[sizes] for sizes in kinds), default=0.0) if layout.recompute != "none" else 0.0
        found.append(
            _held_bytes(workload, layout, weights[rank])
            + _code_bytes(workload, layout, weights[rank])
            + _unsharded_bytes(layout, weights[rank], max(len(layers), 1))
            + max(
                saved * passes + deferred * waiting for passes, waiting in _in_flight(workload, layout, rank)
            )
            + again
            + _OTHER_BYTES
        )
    return found


def _held_bytes(workload: Workload, layout: Layout, weights: RankWeights) -> float:
    """Return bytes of weights (bf16), gradients, master weights, moments and their average (fp32)."""
    total = 0.0
    state = 12 if workload.plan.config.optimizer.ema_decay == 0 else 16
    for number, shards in ((weights.dense, layout.dp * layout.cp), (weights.experts, layout.expert_dp)):
        match layout.sharding:
            case "no_shard":
                total += (6 + state) * number
            case "optim":
                total += (6 + state / shards) * number
            case "optim_grads":
                total += (2 + (4 + state) / shards) * number
            case "optim_grads_params":
                total += (6 + state) / shards * number
    return total


def _code_bytes(workload: Workload, layout: Layout, weights: RankWeights) -> float:
    """Return bytes of the FP8 codes of weights, which ranks keep for a step: in one order, with blocks or experts in both."""
    precision = workload.plan.config.precision
    if precision.fp8_format is None or layout.sharding == "optim_grads_params":
        return 0.0
    return (
        weights.dense * (1 if precision.fp8_recipe in ("delayed", "tensorwise") else 2) + 2 * weights.experts
    )


def _unsharded_bytes(layout: Layout, weights: RankWeights, num_layers: int) -> float:
    """Return bytes of the full gradients, and weights, of two layers under ZeRO-2 and 3."""
    if layout.sharding not in ("optim_grads", "optim_grads_params"):
        return 0.0
    return 2 * 6 * (weights.dense + weights.experts) / num_layers


def _in_flight(workload: Workload, layout: Layout, rank: int) -> list[tuple[float, float]]:
    """Return what a rank holds at possible peaks, in passes of a micro-batch through all of its layers.

    Returns:
        Passes whose activations it holds, and passes whose weight gradients wait.
    """
    count, pp, chunks = layout.num_microbatches(workload.global_batch), layout.pp, layout.chunks
    in_flight = PIPELINE_SCHEDULES[layout.schedule].in_flight
    if in_flight is not None:
        return [(in_flight(pp, rank, chunks, count), 0.0)]
    return _deferring(layout.pipeline, rank, min(count, 2 * pp + 2))


@functools.lru_cache(maxsize=4096)
def _deferring(schedule: PipelineSchedule, rank: int, num_microbatches: int) -> list[tuple[float, float]]:
    """Count the passes of `_in_flight` in the actions of a schedule that defers weight gradients, all or some."""
    passes = [one for action in schedule.training(rank, num_microbatches) for one in action.passes]
    deferred = {(one.microbatch, one.chunk) for one in passes if one.kind is ActionKind.WEIGHT}
    saved = waiting = 0
    most: dict[int, int] = {}
    for one in passes:
        saved += {ActionKind.FORWARD: 1, ActionKind.BACKWARD: -1}.get(one.kind, 0)
        if one.kind is ActionKind.WEIGHT:
            waiting -= 1
        elif one.kind is ActionKind.BACKWARD:
            waiting += (one.microbatch, one.chunk) in deferred
        most[saved] = max(most.get(saved, 0), waiting)
    chunks = schedule.placement.num_chunks
    return [(saved / chunks, waiting / chunks) for saved, waiting in most.items()]


def _deferred_bytes(workload: Workload, layout: Layout, sizes: LayerSpec) -> float:
    """Return bytes that the weight gradients of a layer hold while they wait: inputs and gradients of outputs, in bf16."""
    tokens = workload.tokens(layout)
    elements = 0.0
    for one in sizes.linears(workload.hidden):
        ranks = layout.etp if one.num_experts else layout.tp
        rows = _rows_per_token(workload, layout, sizes.experts) if one.num_experts and sizes.experts else 1.0
        elements += rows * (one.local_inputs(ranks) + one.local_outputs(ranks))
    return 2 * elements * tokens


def _layer_bytes(workload: Workload, layout: Layout, sizes: LayerSpec) -> float:
    """Return bytes that a layer saves for the backward pass of a micro-batch, all in bf16."""
    h, tp = workload.hidden, layout.tp
    tokens = workload.tokens(layout)
    residual = 2 * h / (tp if layout.sequence_parallel else 1)
    if layout.recompute == "full":
        return residual * tokens
    norms = (
        0 if workload.plan.config.training.recompute_norms or "layernorm" in layout.modules else 2 * residual
    )
    total = 2 * residual + norms
    return (total + sum(_part_bytes(workload, layout, part) for part in sizes.parts)) * tokens


def _part_bytes(workload: Workload, layout: Layout, part: Part) -> float:
    """Return bytes that a part saves for a token; of an unknown part, the bytes of the inputs and outputs of its GEMMs."""
    if isinstance(part, AttentionSpec):
        return _attention_bytes(layout, part)
    if isinstance(part, MlpSpec):
        gate = 2 if part.is_gated else 1
        kept = gate + saves_activations(workload.plan)
        return 0.0 if "mlp" in layout.modules else 2 * kept * part.ffn_hidden_size / layout.tp
    if isinstance(part, ExpertsSpec):
        return _expert_bytes(workload, layout, part)
    linears = list(part.linears(workload.hidden))
    return sum(2 * (one.local_inputs(layout.tp) + one.local_outputs(layout.tp)) for one in linears)


def _attention_bytes(layout: Layout, part: AttentionSpec) -> float:
    tp = layout.tp
    queries, values = part.num_heads * part.head_dim, part.num_heads * part.v_head_dim
    keys = max(part.num_query_groups, tp) * part.head_dim
    if part.latent is not None:
        latents = part.latent.kv_rank + part.latent.qk_rope_head_dim + (part.latent.query_rank or 0)
        heads = 0 if "mla_up_proj" in layout.modules else 2 * queries + values
        return 2 * (2 * latents + (heads + values) / tp)
    twice = 1 if part.qk_norm == "none" else 2
    return 2 * (twice * (queries + keys) + keys + queries) / tp


def _expert_bytes(workload: Workload, layout: Layout, experts: ExpertsSpec) -> float:
    if "moe" in layout.modules:
        return 2.0 * workload.hidden
    width, gate = experts.latent_size or workload.hidden, 2 if experts.is_gated else 1
    config = workload.plan.config
    has_codes = config.experts.moe_fp8_dispatch and config.precision.fp8_format is not None
    one = (1 if has_codes else 2) * width + 2 * gate * experts.ffn_hidden_size / layout.etp
    routed = _rows_per_token(workload, layout, experts) * one
    kept = gate + saves_activations(workload.plan)
    return routed + 2 * workload.hidden + 2 * kept * experts.shared_ffn_hidden_size / layout.tp


def _rows_per_token(workload: Workload, layout: Layout, experts: ExpertsSpec) -> float:
    """Return the rows of experts that a rank has memory for, per token."""
    return experts.top_k * layout.etp / layout.tp * workload.row_factor(layout.ep)
