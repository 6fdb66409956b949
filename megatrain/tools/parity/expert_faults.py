"""Faults of experts and routers that parity must find, each with the layout in which it shows."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Any
from unittest import mock

import torch
from torch import Tensor

from megatrain.kernels.moe.permute import Permutation, sort_by_expert, unpermute_values
from megatrain.kernels.moe.routing import within_capacity
from megatrain.kernels.moe.routing_losses import load_balancing_loss
from megatrain.model import router
from megatrain.model.layouts import router_layout
from megatrain.model.router import ROUTER_METRICS, Router
from megatrain.parallel import token_dispatcher
from megatrain.parallel.batch import PassInfo
from megatrain.parallel.data_parallel import GradientReduction
from megatrain.parallel.grid import RankGrid, RankGroup
from megatrain.parallel.layout import ParamLayout
from megatrain.parallel.rank_lists import Family

Plant = Callable[[], AbstractContextManager[Any]]


def _gradients_of_experts_scaled() -> AbstractContextManager[Any]:
    """As where they are divided by their own replicas, which are fewer than those of dense layers."""
    formed = GradientReduction.formed

    def scaled(self: GradientReduction, number: int, *, is_last: bool) -> None:
        if is_last and self.families[number].replicas.name == "expert_replicas":
            self.memory.wholes[number] *= 2
        formed(self, number, is_last=is_last)

    return mock.patch.object(GradientReduction, "formed", scaled)


def _norm_without_experts() -> AbstractContextManager[Any]:
    owns = RankGrid.owns

    def dense_alone(self: RankGrid, copies: Sequence[str], family: Family) -> bool:
        return family == "dense" and owns(self, copies, family)

    return mock.patch.object(RankGrid, "owns", dense_alone)


def _router_not_summed() -> AbstractContextManager[Any]:
    def of_own_tokens(*known: Any) -> ParamLayout:
        layout = router_layout(*known)
        pieces = tuple(dataclasses.replace(piece, grad_sum_group=None) for piece in layout.pieces)
        return dataclasses.replace(layout, pieces=pieces)

    return mock.patch.object(router, "router_layout", of_own_tokens)


def _loss_of_routers_doubled() -> AbstractContextManager[Any]:
    """As where each of two ranks adds the loss of the whole micro-batch."""

    def doubled(*known: Tensor, top_k: int, num_tokens: int) -> Tensor:
        return 2 * load_balancing_loss(*known, top_k=top_k, num_tokens=num_tokens)

    return mock.patch.object(router, "load_balancing_loss", doubled)


def _loss_told_by_each_stage() -> AbstractContextManager[Any]:
    """The named loss alone: gradients are right."""
    forward = Router.forward

    def telling(self: Router, x: Tensor, info: PassInfo) -> Any:
        routing = forward(self, x, info)
        told = info.router_metrics[self.layer].clone()
        told[ROUTER_METRICS.index("aux_loss")] *= 2
        info.router_metrics[self.layer] = told
        return routing

    return mock.patch.object(Router, "forward", telling)


def _slices_not_summed() -> AbstractContextManager[Any]:
    """An expert's slices on several ranks: each token gets what its own rank's slice gave."""

    def own_rows(x: Tensor, group: RankGroup) -> Tensor:
        return x.chunk(group.size)[group.rank].clone()

    return mock.patch.object(token_dispatcher, "reduce_scatter", own_rows)


def _weights_of_other_tokens() -> AbstractContextManager[Any]:
    return mock.patch.object(
        token_dispatcher, "unpermute_values", lambda numbers, order: unpermute_values(numbers, order).roll(1, 0)
    )


def _rows_of_another_expert() -> AbstractContextManager[Any]:
    """Where rows arrive, those of a rank's first expert pass for those of its last one."""

    def turned(experts: Tensor, *, num_experts: int, **known: Any) -> Permutation:
        if "first" in known:
            place = experts - known["first"]
            is_own = (place >= 0) & (place < num_experts)
            experts = torch.where(is_own, num_experts - 1 - place + known["first"], experts)
        return sort_by_expert(experts, num_experts=num_experts, **known)

    return mock.patch.object(token_dispatcher, "sort_by_expert", turned)


def _drops_of_each_rank() -> AbstractContextManager[Any]:
    """Room is shared out by a rank's own tokens."""

    def own_room(experts: Tensor, weights: Tensor, capacity: int, policy: Any) -> Tensor:
        half = len(experts) // 2
        parts = [slice(0, half), slice(half, None)]
        return torch.cat([within_capacity(experts[p], weights[p], -(-capacity // 2), policy) for p in parts])

    return mock.patch.object(router, "within_capacity", own_room)


EXPERT_FAULTS: dict[str, tuple[Plant, str]] = {
    "gradients of experts of another scale": (_gradients_of_experts_scaled, "dp2 mixtral ep2"),
    "norm without experts": (_norm_without_experts, "dp2 mixtral ep2"),
    "router not synchronised under sp": (_router_not_summed, "tp2 sp mixtral ep2"),
    "loss of routers added by each tensor rank": (_loss_of_routers_doubled, "tp2 sp mixtral auxloss"),
    "loss of routers added by each stage": (_loss_of_routers_doubled, "pp2 mixtral auxloss"),
    "loss of routers told by each stage": (_loss_told_by_each_stage, "pp2 mixtral auxloss"),
    "slices of experts not summed": (_slices_not_summed, "dp2 mixtral etp2"),
    "gradients of weights at other tokens": (_weights_of_other_tokens, "dp2 mixtral ep2"),
    "rows taken for those of another expert": (_rows_of_another_expert, "dp2 mixtral ep2 alltoall"),
    "room of experts shared out by rank": (_drops_of_each_rank, "tp2 sp mixtral ep2 dropping"),
}
"""What is planted, and in which layout."""
