"""Builds the experts of a layer: router, dispatcher, this rank's experts, latent projections, shared expert."""

from __future__ import annotations

import functools

from torch import nn

from megatrain.config.model_spec.experts import ExpertsSpec, RouterSpec
from megatrain.kernels.moe.routing import expert_capacity
from megatrain.model.experts.experts import ExpertBranch, Experts
from megatrain.model.experts.pack_router import PackRouter
from megatrain.model.experts.router import Router
from megatrain.model.experts.shared import LatentProjection, SharedExpert, WithSharedExpert
from megatrain.model.layer import Sequential, branch_output
from megatrain.model.layer_context import LayerContext, LayerRanks
from megatrain.model.layouts import (
    Columns,
    LinearLayout,
    expert_columns_bias_layout,
    expert_columns_layout,
    expert_rows_bias_layout,
    expert_rows_layout,
)
from megatrain.model.recompute import RecomputedModule
from megatrain.parallel.expert_parallel import (
    AllGatherDispatcher,
    AllToAllDispatcher,
    LocalDispatcher,
    TokenDispatcher,
)
from megatrain.parallel.fp8.row_dispatch import RoundingDispatcher
from megatrain.parallel.layout import Init
from megatrain.parallel.packs.context import PackContext


def expert_branch(spec: ExpertsSpec, context: LayerContext) -> ExpertBranch:
    """Build the branch of a layer's experts."""
    recompute = context.recompute
    norm = context.builder.residual_norm(context.branch_norm(spec))
    experts = _experts(spec, context)
    mlp: nn.Module = experts
    if spec.shared is not None:
        shared = SharedExpert(spec, context)
        is_recomputed = recompute.has_part("shared_experts")
        mlp = WithSharedExpert(
            experts,
            RecomputedModule(shared) if is_recomputed else shared,
            context.ranks.communication.side,
        )
    mlp = RecomputedModule(mlp) if recompute.has_part("moe") else mlp
    return ExpertBranch(norm, mlp, branch_output(spec, context))


def _experts(spec: ExpertsSpec, context: LayerContext) -> Experts:
    gpt, ranks, builder, prefix = context.model, context.ranks, context.builder, context.name(spec)
    init = Init(std=gpt.init_std)
    router = (PackRouter if isinstance(ranks.split.cp, PackContext) else Router)(
        spec.router,
        context.number,
        f"{prefix}.router",
        hidden_size=gpt.hidden_size,
        init=init,
        dtype=ranks.dtype,
        split=ranks.split,
        dp=ranks.dp,
        seed=ranks.seed,
    )
    latents = [
        LatentProjection(linear, context, std, has_bias=spec.expert.has_bias)
        for linear, std in zip(
            spec.linears_of("mlp", gpt.hidden_size), (init, context.output_init), strict=False
        )
    ]
    before, after = latents[:1], latents[1:]
    fc1, fc2 = _expert_weights(spec, context)
    mlp = builder.grouped_mlp(spec.expert, fc1, fc2, ranks.parallel)
    recipe = builder.recipe_of(fc2)
    in_fp8 = recipe is not None and recipe.casts_before_dispatch
    dispatcher = _token_dispatcher(spec.router, ranks, in_fp8=in_fp8)
    return Experts(router, dispatcher, mlp, Sequential(before), Sequential(after))


def _expert_weights(spec: ExpertsSpec, context: LayerContext) -> tuple[LinearLayout, LinearLayout]:
    """Return the layouts of both linear layers of this rank's experts."""
    gpt, parallel, has_bias = context.model, context.ranks.parallel, spec.expert.has_bias
    names = [f"{context.name(spec)}.experts.{one}" for one in parallel.own(spec.num_experts)]
    fc1, fc2 = spec.linears_of("mlp.experts", gpt.hidden_size)
    (down,), etp = fc2.pieces, parallel.etp

    def columns(kind: str) -> list[list[Columns]]:
        return [
            [Columns(f"{name}.{piece.name}.{kind}", piece.size) for piece in fc1.pieces] for name in names
        ]

    downs = [f"{name}.{down.name}" for name in names]
    weights = expert_columns_layout(columns("weight"), fc1.inputs, Init(std=gpt.init_std), etp)
    biases = expert_columns_bias_layout(columns("bias"), etp) if has_bias else None
    down_weights = expert_rows_layout(
        [f"{name}.weight" for name in downs], down.size, fc2.inputs, context.output_init, etp
    )
    down_biases = (
        expert_rows_bias_layout([f"{name}.bias" for name in downs], down.size, etp) if has_bias else None
    )
    return LinearLayout(weights, biases), LinearLayout(down_weights, down_biases)


def _token_dispatcher(spec: RouterSpec, ranks: LayerRanks, *, in_fp8: bool) -> TokenDispatcher:
    """Build the dispatcher of a layer. `in_fp8`: it rounds tokens to FP8, and an all-to-all sends their codes."""
    ep, etp, num_ranks = ranks.parallel.ep, ranks.parallel.etp, ranks.split.num_ranks
    rows_per_expert = None
    if spec.is_padded:
        assert spec.capacity_factor is not None, "a rule requires it"
        capacity = functools.partial(
            expert_capacity, spec.capacity_factor, top_k=spec.top_k, num_experts=spec.num_experts
        )
        num_batches = _max_batches(ep.size * etp.size, num_ranks)  # that share experts

        def rows_per_expert(num_tokens: int) -> int:
            return num_batches * capacity(num_tokens=num_tokens * num_ranks)

    communication = ranks.communication
    give_turn = None if communication.turns is None else communication.turns.give
    common = (spec.num_experts, ep, etp, rows_per_expert, give_turn)
    if ep.size * etp.size == 1:
        dispatcher: TokenDispatcher = LocalDispatcher(spec.num_experts, rows_per_expert)
    elif communication.dispatcher == "alltoall":
        return AllToAllDispatcher(*common, steps=ranks.parallel.steps, in_fp8=in_fp8)
    else:
        bounds = communication.capacities if rows_per_expert is None else None
        dispatcher = AllGatherDispatcher(*common, None if bounds is None else bounds.add_layer())
    return RoundingDispatcher(dispatcher) if in_fp8 else dispatcher


def _max_batches(expert_ranks: int, batch_ranks: int) -> int:
    """Return the most micro-batches, of `batch_ranks` consecutive ranks each, that a group of `expert_ranks` overlaps."""
    if expert_ranks % batch_ranks == 0 or batch_ranks % expert_ranks == 0:
        return max(1, expert_ranks // batch_ranks)
    return (expert_ranks - 2) // batch_ranks + 2
