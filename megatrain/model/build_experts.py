"""Builds the experts of a layer: router, dispatcher, this rank's experts, latent projections, shared expert."""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import Literal

import torch
from torch import nn

from megatrain.kernels.moe.routing import expert_capacity
from megatrain.kernels.side_stream import SideStream
from megatrain.model.experts import ExpertBranch, Experts
from megatrain.model.implementations.leaves import Leaves, Pointwise
from megatrain.model.layer import Sequential, branch_output
from megatrain.model.layouts import (
    Columns,
    Weights,
    branch_norm_weights,
    expert_columns_bias_layout,
    expert_columns_layout,
    expert_rows_bias_layout,
    expert_rows_layout,
)
from megatrain.model.recompute import Recompute, RecomputedModule
from megatrain.model.router import Router
from megatrain.model.shared_expert import LatentProjection, SharedExpert, WithSharedExpert
from megatrain.model.specs import ExpertsSpec, GptSpec, NormPosition, RouterSpec
from megatrain.parallel.context_parallel import TokenSplit
from megatrain.parallel.expert_parallel import (
    AllGatherDispatcher,
    AllToAllDispatcher,
    ExpertParallel,
    LocalDispatcher,
    TokenDispatcher,
)
from megatrain.parallel.grid import RankGroup
from megatrain.parallel.layout import Init
from megatrain.parallel.pipeline.interleave import Turns

DispatcherType = Literal["allgather", "alltoall"]


@dataclass(frozen=True, kw_only=True)
class ExpertCommunication:
    """The way in which ranks exchange tokens, and what overlaps it."""

    dispatcher: DispatcherType = "allgather"
    side: SideStream | None = None
    """Stream of the shared expert on a GPU; None: that of the other experts."""
    turns: Turns | None = None
    """Turns of a forward and a backward pass, which a pass gives up before it waits; None: passes run one after the other."""


@dataclass(frozen=True, kw_only=True)
class ExpertRanks:
    """Distribution of the tokens and the experts over ranks."""

    split: TokenSplit
    dp: RankGroup
    """Data-parallel ranks."""
    parallel: ExpertParallel
    communication: ExpertCommunication = ExpertCommunication()
    dtype: torch.dtype
    """Dtype of the weights."""
    seed: int
    """Seed of the router's jitter."""


def expert_branch(
    spec: ExpertsSpec,
    gpt: GptSpec,
    number: int,
    position: NormPosition,
    leaves: Leaves,
    ranks: ExpertRanks,
    recompute: Recompute,
) -> ExpertBranch:
    """Build the branch of layer `number`."""
    prefix, tp = f"{gpt.layer_name(number)}.mlp", ranks.split.tp
    norm = leaves.residual_norm(branch_norm_weights(gpt, position, prefix, tp))
    experts = _experts(spec, gpt, number, prefix, leaves, ranks)
    mlp: nn.Module = experts
    if spec.shared is not None:
        shared = SharedExpert(
            spec.shared, gpt, prefix, leaves, tp, ranks.dtype, has_gate=spec.has_shared_gate
        )
        is_recomputed = recompute.has_part("shared_experts")
        mlp = WithSharedExpert(
            experts, RecomputedModule(shared) if is_recomputed else shared, ranks.communication.side
        )
    mlp = RecomputedModule(mlp) if recompute.has_part("moe") else mlp
    return ExpertBranch(norm, mlp, branch_output(gpt, position, prefix, leaves, tp))


def _experts(
    spec: ExpertsSpec, gpt: GptSpec, number: int, prefix: str, leaves: Leaves, ranks: ExpertRanks
) -> Experts:
    init, output_init, tp = Init(std=gpt.init_std), Init(std=gpt.output_init_std), ranks.split.tp
    router = Router(
        spec.router,
        number,
        f"{prefix}.router",
        hidden_size=gpt.hidden_size,
        init=init,
        dtype=ranks.dtype,
        split=ranks.split,
        dp=ranks.dp,
        seed=ranks.seed,
    )
    h, latent, has_bias = gpt.hidden_size, spec.latent_size, spec.expert.has_bias
    before: list[Pointwise] = []
    after: list[Pointwise] = []
    if latent is not None:
        before = [LatentProjection(f"{prefix}.latent_down", latent, h, init, leaves, has_bias, tp)]
        after = [LatentProjection(f"{prefix}.latent_up", h, latent, output_init, leaves, has_bias, tp)]
    mlp = leaves.grouped_mlp(
        spec.expert, *_expert_weights(spec, gpt, f"{prefix}.experts", ranks.parallel), ranks.parallel
    )
    return Experts(router, _token_dispatcher(spec.router, ranks), mlp, Sequential(before), Sequential(after))


def _expert_weights(
    spec: ExpertsSpec, gpt: GptSpec, prefix: str, parallel: ExpertParallel
) -> tuple[Weights, Weights]:
    """Return the layouts of both linear layers of this rank's experts."""
    names = [f"{prefix}.{expert}" for expert in parallel.own(spec.router.num_experts)]
    width, f, etp = spec.latent_size or gpt.hidden_size, spec.expert.ffn_hidden_size, parallel.etp

    def columns(kind: str) -> list[list[Columns]]:
        return [[Columns(f"{name}.{x}.{kind}", f) for x in spec.expert.fc1_names] for name in names]

    downs, has_bias = [f"{name}.down" for name in names], spec.expert.has_bias
    fc1 = expert_columns_layout(columns("weight"), width, Init(std=gpt.init_std), etp)
    fc1_bias = expert_columns_bias_layout(columns("bias"), etp) if has_bias else None
    fc2 = expert_rows_layout(
        [f"{name}.weight" for name in downs], width, f, Init(std=gpt.output_init_std), etp
    )
    fc2_bias = expert_rows_bias_layout([f"{name}.bias" for name in downs], width, etp) if has_bias else None
    return Weights(fc1, fc1_bias), Weights(fc2, fc2_bias)


def _token_dispatcher(spec: RouterSpec, ranks: ExpertRanks) -> TokenDispatcher:
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

    if ep.size * etp.size == 1:
        return LocalDispatcher(spec.num_experts, rows_per_expert)
    kind = AllToAllDispatcher if ranks.communication.dispatcher == "alltoall" else AllGatherDispatcher
    turns = ranks.communication.turns
    give_turn = None if turns is None else turns.give
    return kind(spec.num_experts, ep, etp, rows_per_expert, give_turn)


def _max_batches(expert_ranks: int, batch_ranks: int) -> int:
    """Return the most micro-batches, of `batch_ranks` consecutive ranks each, that a group of `expert_ranks` overlaps."""
    if expert_ranks % batch_ranks == 0 or batch_ranks % expert_ranks == 0:
        return max(1, expert_ranks // batch_ranks)
    return (expert_ranks - 2) // batch_ranks + 2
