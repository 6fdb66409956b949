"""The experts of a layer in place of its MLP: each token goes to some experts, whose outputs are summed by probability.

hidden ─ + ─ norm ──┬─ router ───────────┐
                    ├─ latent projection ┴─ dispatch ─┬─ expert ─┬─ combine ─ latent projection ─ + ─ output ─
                    │                                 ├─ expert ─┤                                │
                    │                                 └─ expert ─┘                                │
                    └─ shared expert, times its gate ─────────────────────────────────────────────┘

    expert e       gate and up [f, h], stacked by rows with those of the rank's other experts; down [h, f] likewise
    over ep        ranks hold different experts; over etp each rank holds a slice of f
    shared expert  over tp, as any MLP
    latents        routed experts may process [t, l] in place of [t, h]: every rank projects its own tokens
"""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor, nn

from megatrain.kernels.moe.routing import expert_capacity
from megatrain.kernels.side_stream import SideStream
from megatrain.model import functions
from megatrain.model.implementations.leaves import GroupedMlp, Leaves, Pointwise
from megatrain.model.layer import Sequential, branch_output
from megatrain.model.layouts import (
    Columns,
    Weights,
    branch_norm_weights,
    columns_bias_layout,
    columns_layout,
    expert_columns_bias_layout,
    expert_columns_layout,
    expert_rows_bias_layout,
    expert_rows_layout,
    router_layout,
    rows_layout,
    stream_layout,
)
from megatrain.model.recompute import Recompute, RecomputedModule
from megatrain.model.router import Router
from megatrain.model.specs import ExpertsSpec, GptSpec, MlpSpec, NormPosition, RouterSpec
from megatrain.parallel.batch import PassInfo
from megatrain.parallel.context_parallel import TokenSplit
from megatrain.parallel.expert_parallel import (
    AllGatherDispatcher,
    AllToAllDispatcher,
    ExpertParallel,
    LocalDispatcher,
    TokenDispatcher,
)
from megatrain.parallel.grid import RankGroup
from megatrain.parallel.layout import Init, LaidOutModule
from megatrain.parallel.tensor_parallel import TensorParallel

DispatcherType = Literal["allgather", "alltoall"]


@dataclass(frozen=True, kw_only=True)
class ExpertRanks:
    """Distribution of the tokens and the experts over ranks."""

    split: TokenSplit
    dp: RankGroup
    """Data-parallel ranks."""
    parallel: ExpertParallel
    dispatcher: DispatcherType
    dtype: torch.dtype
    """Dtype of the weights."""
    seed: int
    """Seed of the router's jitter."""
    side: SideStream | None = None
    """Stream of the shared expert on a GPU; None: that of the other experts."""


class ExpertBranch(nn.Module):
    """The branch of a layer with experts: norm, experts and shared expert, output."""

    def __init__(
        self,
        spec: ExpertsSpec,
        gpt: GptSpec,
        number: int,
        position: NormPosition,
        leaves: Leaves,
        ranks: ExpertRanks,
        recompute: Recompute,
    ) -> None:
        super().__init__()
        prefix, tp = f"{gpt.layer_name(number)}.mlp", ranks.split.tp
        self.norm = leaves.residual_norm(branch_norm_weights(gpt, position, prefix, tp))
        experts = _experts(spec, gpt, number, prefix, leaves, ranks)
        mlp: nn.Module = experts
        if spec.shared is not None:
            shared = SharedExpert(spec, spec.shared, gpt, prefix, leaves, ranks)
            is_recomputed = recompute.has_part("shared_experts")
            mlp = ParallelSum(experts, RecomputedModule(shared) if is_recomputed else shared, ranks.side)
        self.mlp = RecomputedModule(mlp) if recompute.has_part("moe") else mlp
        self.output = branch_output(gpt, position, prefix, leaves, tp)

    def forward(self, residual: Tensor, delta: Tensor | None, info: PassInfo) -> tuple[Tensor, Tensor]:
        residual, x = self.norm.add_and_norm(residual, delta)
        return residual, self.output(self.mlp(x, info), info)


class Experts(nn.Module):
    """The routed experts. `to_latent` and `from_latent` project their inputs and outputs, or do nothing."""

    def __init__(
        self,
        router: Router,
        dispatcher: TokenDispatcher,
        experts: GroupedMlp,
        to_latent: Sequential,
        from_latent: Sequential,
    ) -> None:
        super().__init__()
        self.router = router
        self.dispatcher = dispatcher
        self.experts = experts
        self.to_latent, self.from_latent = to_latent, from_latent

    def forward(self, x: Tensor, info: PassInfo) -> Tensor:  # [s/tp, b, h] -> [s/tp, b, h]
        routing = self.router(x, info)
        dispatched = self.dispatcher.dispatch(self.to_latent(x, info).flatten(0, 1), routing)
        rows = self.dispatcher.combine(self.experts(dispatched, info), dispatched)
        out: Tensor = self.from_latent(rows.unflatten(0, x.shape[:2]), info)
        return out


class LatentProjection(nn.Module):
    """A linear layer of this rank's tokens, whose weight every tensor rank holds: [s/tp, b, i] -> [s/tp, b, o]."""

    def __init__(
        self,
        name: str,
        num_outputs: int,
        num_inputs: int,
        init: Init,
        leaves: Leaves,
        has_bias: bool,
        tp: TensorParallel,
    ) -> None:
        super().__init__()
        self.linear = leaves.replicated_linear(
            None,
            Weights(
                router_layout(f"{name}.weight", num_outputs, num_inputs, init, tp),
                stream_layout(f"{name}.bias", num_outputs, Init(), tp) if has_bias else None,
            ),
        )

    def forward(self, x: Tensor, info: PassInfo) -> Tensor:
        out: Tensor = self.linear(x, None, info)[1]
        return out


class SharedExpert(LaidOutModule):
    """An MLP without norm that computes all tokens; its output may be multiplied by a sigmoid gate of each token."""

    gate: Tensor

    def __init__(
        self, spec: ExpertsSpec, mlp: MlpSpec, gpt: GptSpec, prefix: str, leaves: Leaves, ranks: ExpertRanks
    ) -> None:
        super().__init__()
        h, f, tp, init = gpt.hidden_size, mlp.ffn_hidden_size, ranks.split.tp, Init(std=gpt.init_std)
        columns, biases = (
            [Columns(f"{prefix}.shared.{name}.{kind}", f) for name in mlp.fc1_names]
            for kind in ("weight", "bias")
        )
        fc1_bias = columns_bias_layout(biases, tp) if mlp.has_bias else None
        self.fc1 = leaves.column_linear(None, Weights(columns_layout(columns, h, init, tp), fc1_bias))
        down = rows_layout(f"{prefix}.shared.down.weight", h, f, Init(std=gpt.output_init_std), tp)
        fc2_bias = stream_layout(f"{prefix}.shared.down.bias", h, Init(), tp) if mlp.has_bias else None
        self.fc2 = leaves.activation_row_linear(mlp, Weights(down, fc2_bias))
        if spec.has_shared_gate:
            self.add_weight(
                "gate", router_layout(f"{prefix}.shared_gate.weight", 1, h, init, tp), ranks.dtype
            )

    def forward(self, x: Tensor, info: PassInfo) -> Tensor:  # [s/tp, b, h] -> [s/tp, b, h]
        out = self.fc2(self.fc1(x, None, info)[1], info)
        if "gate" in self.layouts:
            gate = functions.as_leaf(self.gate, self.weight_grads.get("gate"))
            out = out * (x @ gate.t()).sigmoid()
        return out


class ParallelSum(nn.Module):
    """Two modules applied to the same input, their outputs summed. With `side` the second one runs there on a GPU."""

    def __init__(self, first: nn.Module, second: nn.Module, side: SideStream | None = None) -> None:
        super().__init__()
        self.first, self.second = first, second
        self.side = side

    def forward(self, x: Tensor, info: PassInfo) -> Tensor:
        out: Tensor
        # Deferred weight gradients would read memory of the side stream after it is free there.
        if self.side is None or not x.is_cuda or info.splits_backward:
            out = self.first(x, info) + self.second(x, info)
            return out
        second = self.side.fork(lambda: self.second(x, info), x)
        out = self.first(x, info)
        return out + self.side.join(second)


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
    kind = AllToAllDispatcher if ranks.dispatcher == "alltoall" else AllGatherDispatcher
    return kind(spec.num_experts, ep, etp, rows_per_expert)


def _max_batches(expert_ranks: int, batch_ranks: int) -> int:
    """Return the most micro-batches, of `batch_ranks` consecutive ranks each, that a group of `expert_ranks` overlaps."""
    if expert_ranks % batch_ranks == 0 or batch_ranks % expert_ranks == 0:
        return max(1, expert_ranks // batch_ranks)
    return (expert_ranks - 2) // batch_ranks + 2
