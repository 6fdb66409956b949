"""Experts in place of an MLP: each token goes to some of them, and their outputs are summed by weight.

hidden ─ + ─ norm ──┬─ router ─ send ─┬─ expert ─┬─ bring back ─ + ─ end ─
                    │                 ├─ expert ─┤              │
                    │                 └─ expert ─┘              │
                    └─ shared MLP, times its gate ──────────────┘

    expert e       gate and up [f, h], stacked by rows with those of its neighbours; down [h, f] likewise
    over ep        ranks hold different experts; over etp each holds a slice of f
    shared MLP     over tp as any MLP
"""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor, nn

from megatrain.kernels.moe.routing import expert_capacity
from megatrain.model import functions
from megatrain.model.branches import branch_end, first_norm
from megatrain.model.implementations.leaves import GroupedMlp, Leaves
from megatrain.model.layouts import (
    Columns,
    Weights,
    columns_layout,
    expert_columns_layout,
    expert_rows_layout,
    router_layout,
    rows_layout,
)
from megatrain.model.recompute import Recompute, Recomputed
from megatrain.model.router import Router
from megatrain.model.specs import ExpertsSpec, GptSpec, MlpSpec, NormPosition, RouterSpec
from megatrain.parallel.batch import PassInfo
from megatrain.parallel.experts import ExpertParallel
from megatrain.parallel.grid import RankGroup
from megatrain.parallel.layout import Init, LaidOutModule, ParamLayout
from megatrain.parallel.tensor import TensorParallel
from megatrain.parallel.token_dispatcher import AllGatherExchange, AllToAllExchange, Exchange, LocalExchange
from megatrain.parallel.tokens import TokenSplit

Dispatcher = Literal["allgather", "alltoall"]


@dataclass(frozen=True, kw_only=True)
class ExpertRanks:
    """Who holds which tokens and which experts, and how the first travel to the second."""

    split: TokenSplit
    dp: RankGroup
    """Ranks that read other samples."""
    parallel: ExpertParallel
    dispatcher: Dispatcher
    dtype: torch.dtype
    """Of the weights."""
    seed: int
    """Of jitter."""


class ExpertBranch(nn.Module):
    """A branch of the residual stream: the experts of a layer, and the MLP beside them."""

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
        prefix, tp = f"decoder.layers.{number}.mlp", ranks.split.tp
        self.norm = leaves.residual_norm(first_norm(gpt, position, prefix, tp))
        experts = _experts(spec, gpt, number, prefix, leaves, ranks)
        shared = _shared(spec, gpt, prefix, leaves, ranks)
        if shared is not None and recompute.has_part("shared_experts"):
            shared = Recomputed(shared)
        parts = experts if shared is None else Beside(experts, shared)
        self.parts = Recomputed(parts) if recompute.has_part("moe") else parts
        self.end = branch_end(gpt, position, prefix, leaves, tp)

    def forward(self, residual: Tensor, delta: Tensor | None, info: PassInfo) -> tuple[Tensor, Tensor]:
        residual, x = self.norm.of_sum(residual, delta)
        return residual, self.end(self.parts(x, info), info)


class Experts(nn.Module):
    """Those that the router picks for each token."""

    def __init__(self, router: Router, exchange: Exchange, experts: GroupedMlp) -> None:
        super().__init__()
        self.router = router
        self.exchange = exchange
        self.experts = experts

    def forward(self, x: Tensor, info: PassInfo) -> Tensor:  # [s/tp, b, h] -> [s/tp, b, h]
        routes = self.router(x, info)
        visitors = self.exchange.send(x.flatten(0, 1), routes)
        return self.exchange.bring_back(self.experts(visitors, info), visitors).view_as(x)


class SharedMlp(nn.Module):
    """An MLP that sees all tokens."""

    def __init__(self, spec: MlpSpec, gpt: GptSpec, prefix: str, leaves: Leaves, tp: TensorParallel) -> None:
        super().__init__()
        h, f = gpt.hidden_size, spec.ffn_hidden_size
        columns = [Columns(f"{prefix}.{name}.weight", f) for name in _first_weights(spec)]
        self.fc1 = leaves.column_linear(None, Weights(columns_layout(columns, h, Init(std=gpt.init_std), tp)))
        down = rows_layout(f"{prefix}.down.weight", h, f, Init(std=gpt.output_init_std), tp)
        self.fc2 = leaves.activation_row_linear(spec, Weights(down))

    def forward(self, x: Tensor, info: PassInfo) -> Tensor:  # [s/tp, b, h] -> [s/tp, b, h]
        return self.fc2(self.fc1(x, None, info)[1], info)


class Gated(LaidOutModule):
    """What a part gives for each token, times a sigmoid of the token."""

    weight: Tensor

    def __init__(self, part: nn.Module, layout: ParamLayout, dtype: torch.dtype) -> None:
        super().__init__()
        self.part = part
        self.add_weight("weight", layout, dtype)

    def forward(self, x: Tensor, info: PassInfo) -> Tensor:
        weight = functions.as_leaf(self.weight, self.weight_grads.get("weight"))
        out: Tensor = self.part(x, info) * (x @ weight.t()).sigmoid()
        return out


class Beside(nn.Module):
    """Two parts that see the same tokens, summed."""

    def __init__(self, one: nn.Module, other: nn.Module) -> None:
        super().__init__()
        self.one, self.other = one, other

    def forward(self, x: Tensor, info: PassInfo) -> Tensor:
        out: Tensor = self.one(x, info) + self.other(x, info)
        return out


def _experts(
    spec: ExpertsSpec, gpt: GptSpec, number: int, prefix: str, leaves: Leaves, ranks: ExpertRanks
) -> Experts:
    h, f, etp = gpt.hidden_size, spec.expert.ffn_hidden_size, ranks.parallel.etp
    own = [f"{prefix}.experts.{expert}" for expert in ranks.parallel.own(spec.router.num_experts)]
    first = [[Columns(f"{name}.{x}.weight", f) for x in _first_weights(spec.expert)] for name in own]
    router = Router(
        spec.router,
        number,
        f"{prefix}.router",
        hidden_size=h,
        init=Init(std=gpt.init_std),
        dtype=ranks.dtype,
        split=ranks.split,
        dp=ranks.dp,
        seed=ranks.seed,
    )
    fc1 = expert_columns_layout(first, h, Init(std=gpt.init_std), etp)
    fc2 = expert_rows_layout([f"{x}.down.weight" for x in own], h, f, Init(std=gpt.output_init_std), etp)
    mlp = leaves.grouped_mlp(spec.expert, fc1, fc2, len(own))
    return Experts(router, _exchange(spec.router, ranks), mlp)


def _exchange(spec: RouterSpec, ranks: ExpertRanks) -> Exchange:
    ep, etp, num_ranks = ranks.parallel.ep, ranks.parallel.etp, ranks.split.num_ranks
    rows_each = None
    if spec.is_padded:
        assert spec.capacity_factor is not None, "a rule asks for it"
        of_batch = functools.partial(
            expert_capacity, spec.capacity_factor, top_k=spec.top_k, num_experts=spec.num_experts
        )
        num_batches = _most_overlapped(ep.size * etp.size, num_ranks)  # that send to the same experts

        def rows_each(num_tokens: int) -> int:
            return num_batches * of_batch(num_tokens=num_tokens * num_ranks)

    if ep.size * etp.size == 1:
        return LocalExchange(spec.num_experts, rows_each)
    kind = AllToAllExchange if ranks.dispatcher == "alltoall" else AllGatherExchange
    return kind(spec.num_experts, ep, etp, rows_each)


def _most_overlapped(run: int, batch: int) -> int:
    """Of runs of `batch` ranks, how many a run of `run` ranks may touch, where both cut the same ranks from the first on."""
    if run % batch == 0 or batch % run == 0:
        return max(1, run // batch)
    return (run - 2) // batch + 2


def _shared(
    spec: ExpertsSpec, gpt: GptSpec, prefix: str, leaves: Leaves, ranks: ExpertRanks
) -> nn.Module | None:
    if spec.shared is None:
        return None
    tp = ranks.split.tp
    shared = SharedMlp(spec.shared, gpt, f"{prefix}.shared", leaves, tp)
    if not spec.has_shared_gate:
        return shared
    layout = router_layout(f"{prefix}.shared_gate.weight", 1, gpt.hidden_size, Init(std=gpt.init_std), tp)
    return Gated(shared, layout, ranks.dtype)


def _first_weights(spec: MlpSpec) -> list[str]:
    return ["gate", "up"] if spec.is_gated else ["up"]
