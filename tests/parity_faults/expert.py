"""Planted faults of experts and routers, each with the layout in which parity must find it."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch import Tensor

from megatrain.kernels.moe import dispatch_steps, routing
from megatrain.kernels.moe.dispatch_steps import StepRows
from megatrain.kernels.moe.permute import Permutation, sort_by_expert, unpermute_values
from megatrain.kernels.moe.routing import load_quantiles, within_capacity
from megatrain.kernels.moe.routing_losses import load_balancing_loss
from megatrain.model import layer_context
from megatrain.model.experts import router, shared
from megatrain.model.experts.router import ROUTER_METRICS, Router
from megatrain.model.experts.shared import SharedExpert
from megatrain.model.implementations.grouped_mlp import LocalGroupedMlp
from megatrain.model.layouts import replicated_layout, router_layout
from megatrain.parallel import expert_parallel
from megatrain.parallel.batch import PassInfo
from megatrain.parallel.collectives import Transfer
from megatrain.parallel.data_parallel import GradientReduction
from megatrain.parallel.expert_parallel import AllToAllDispatcher
from megatrain.parallel.grid import RankGrid, RankGroup
from megatrain.parallel.layout import ParamLayout
from megatrain.parallel.pipeline.interleave import Turns, Work
from megatrain.parallel.rank_capacity import RankCapacities
from megatrain.parallel.rank_lists import Family
from megatrain.tools.parity.runs.program import Patch
from megatrain.training.engine import Engine


def _expert_gradients_scaled() -> AbstractContextManager[Any]:
    """Scale the gradients of experts, as if divided by their own number of replicas."""
    mark_ready = GradientReduction.mark_ready

    def scaled(self: GradientReduction, number: int, *, is_last: bool) -> None:
        if is_last and self.families[number].replicas.name == "expert_replicas":
            self.memory.full[number] *= 2
        mark_ready(self, number, is_last=is_last)

    return mock.patch.object(GradientReduction, "mark_ready", scaled)


def _norm_without_experts() -> AbstractContextManager[Any]:
    owns = RankGrid.owns

    def dense_alone(self: RankGrid, copies: Sequence[str], family: Family) -> bool:
        return family == "dense" and owns(self, copies, family)

    return mock.patch.object(RankGrid, "owns", dense_alone)


def _of_own_tokens(*known: Any) -> ParamLayout:
    return _not_summed(router_layout(*known))


def _not_summed(layout: ParamLayout) -> ParamLayout:
    """Return the layout of a replicated weight whose gradients are not summed over ranks with other tokens."""
    pieces = tuple(dataclasses.replace(piece, grad_sum_groups=()) for piece in layout.pieces)
    return dataclasses.replace(layout, pieces=pieces)


def _overflow_ignored() -> AbstractContextManager[Any]:
    """Use the gradients of a step in which experts lacked memory."""
    return mock.patch.object(RankCapacities, "begin_check", return_value=lambda: False)


def _loads_of_the_attempt_before() -> AbstractContextManager[Any]:
    """Compare the loads of the attempt before with the capacities."""
    begin_check = RankCapacities.begin_check

    def late(self: RankCapacities, *known: Any) -> Callable[[], bool]:
        answers = vars(self).setdefault("answers", [lambda: False])
        answers.append(begin_check(self, *known))
        return answers.pop(0)

    return mock.patch.object(RankCapacities, "begin_check", late)


def _gradients_of_a_failed_attempt_kept() -> AbstractContextManager[Any]:
    """Add the gradients of an attempt in which experts lacked memory to those of the next one."""
    compute = Engine._compute_gradients

    def again(self: Engine, *known: Any) -> Any:
        while (infos := compute(self, *known)) is None:
            pass
        return infos

    return mock.patch.object(Engine, "_compute_gradients", again)


def _row_read_twice() -> AbstractContextManager[Any]:
    """Return the output of the row before the last one for the last row's assignment too."""

    def doubled(*known: Any, **more: Any) -> Permutation:
        found = sort_by_expert(*known, **more)
        last = found.rows.max()
        return found._replace(rows=found.rows.where(found.rows != last, last - 1))

    return mock.patch.object(expert_parallel, "sort_by_expert", doubled)


def _router_not_reduced() -> AbstractContextManager[Any]:
    return mock.patch.object(router, "router_layout", _of_own_tokens)


def _gate_not_reduced() -> AbstractContextManager[Any]:
    return mock.patch.object(shared, "router_layout", _of_own_tokens)


def _projections_not_reduced() -> AbstractContextManager[Any]:
    def projected(*known: Any) -> ParamLayout:
        return _not_summed(replicated_layout(*known))

    return mock.patch.object(layer_context, "replicated_layout", projected)


def _shared_expert_without_gradient() -> AbstractContextManager[Any]:
    """Leave the shared expert's gradient out on the last rank, as if its replicas were not reduced."""
    forward = SharedExpert.forward

    def detached(self: SharedExpert, x: Tensor, info: PassInfo) -> Tensor:
        out = forward(self, x, info)
        return out.detach() if dist.get_rank() == dist.get_world_size() - 1 else out

    return mock.patch.object(SharedExpert, "forward", detached)


def _output_bias_on_each_slice() -> AbstractContextManager[Any]:
    forward = LocalGroupedMlp.forward

    def added(self: LocalGroupedMlp, *inputs: Any) -> Tensor:
        self.adds_output_bias = True
        return forward(self, *inputs)

    return mock.patch.object(LocalGroupedMlp, "forward", added)


def _quantiles_per_rank() -> AbstractContextManager[Any]:
    def of_half(logits: Tensor, bias: Tensor, top_k: int) -> Tensor:
        return load_quantiles(logits[: len(logits) // 2], bias, top_k)

    return mock.patch.object(router, "load_quantiles", of_half)


def _router_loss_doubled() -> AbstractContextManager[Any]:
    """Double the loss, as if each of two ranks added the loss of the whole micro-batch."""

    def doubled(*known: Tensor, top_k: int, num_tokens: int) -> Tensor:
        return 2 * load_balancing_loss(*known, top_k=top_k, num_tokens=num_tokens)

    return mock.patch.object(router, "load_balancing_loss", doubled)


def _logged_loss_doubled() -> AbstractContextManager[Any]:
    """Double the logged loss only; gradients stay right."""
    forward = Router.forward

    def doubled(self: Router, x: Tensor, info: PassInfo) -> Any:
        routing = forward(self, x, info)
        metrics = info.router_metrics[self.layer].clone()
        metrics[ROUTER_METRICS.index("aux_loss")] *= 2
        info.router_metrics[self.layer] = metrics
        return routing

    return mock.patch.object(Router, "forward", doubled)


def _expert_slices_not_reduced() -> AbstractContextManager[Any]:
    """Skip the sum over expert tensor ranks: each token gets its own rank's partial output."""

    def own_rows(x: Tensor, group: RankGroup) -> tuple[Tensor, Transfer]:
        return x.chunk(group.size)[group.rank].clone(), Transfer()

    return mock.patch.object(expert_parallel, "begin_reduce_scatter", own_rows)


def _probs_of_other_tokens() -> AbstractContextManager[Any]:
    return mock.patch.object(
        expert_parallel,
        "unpermute_values",
        lambda numbers, order: unpermute_values(numbers, order).roll(1, 0),
    )


def _late_gradients_dropped() -> AbstractContextManager[Any]:
    """Forget the weight gradients that wait for the next transfer of the backward pass."""

    def forget(info: PassInfo) -> None:
        info.late = None if info.late is None else []

    return mock.patch.object(PassInfo, "compute_late", forget)


def _gradients_in_turn_dropped() -> AbstractContextManager[Any]:
    """Drop the weight gradients of a backward pass that runs in turn with a forward pass."""
    run = Turns.run

    def dropping(self: Turns, backward: Work, forward: Work) -> None:
        with mock.patch.object(PassInfo, "compute_weight_gradient", return_value=None):
            run(self, backward, forward)

    return mock.patch.object(Turns, "run", dropping)


def _experts_reversed() -> AbstractContextManager[Any]:
    """Reverse the order of a rank's experts for received rows."""

    def turned(experts: Tensor, *, num_experts: int, **known: Any) -> Permutation:
        if "first_expert" in known:
            place = experts - known["first_expert"]
            is_own = (place >= 0) & (place < num_experts)
            experts = torch.where(is_own, num_experts - 1 - place + known["first_expert"], experts)
        return sort_by_expert(experts, num_experts=num_experts, **known)

    return mock.patch.object(expert_parallel, "sort_by_expert", turned)


def _capacity_per_rank() -> AbstractContextManager[Any]:
    """Apply the capacity to each half of the tokens, as if per rank."""

    def own_room(experts: Tensor, weights: Tensor, capacity: int, policy: Any) -> Tensor:
        half = len(experts) // 2
        parts = [slice(0, half), slice(half, None)]
        return torch.cat([within_capacity(experts[p], weights[p], -(-capacity // 2), policy) for p in parts])

    return mock.patch.object(routing, "within_capacity", own_room)


def _host_sum_doubled() -> AbstractContextManager[Any]:
    """Add the sum that the first host returns twice."""
    total, all_to_all = AllToAllDispatcher._sum, AllToAllDispatcher._all_to_all

    def doubled(self: AllToAllDispatcher, x: Tensor, group: RankGroup, step: StepRows, *more: Any) -> Tensor:
        out = all_to_all(self, x, group, step, *more)
        if group.name == "ep_peers":
            out[: step.from_ranks[0]] *= 2
        return out

    def of_doubled(*known: Any) -> Tensor:
        with mock.patch.object(AllToAllDispatcher, "_all_to_all", doubled):
            return total(*known)

    return mock.patch.object(AllToAllDispatcher, "_sum", of_doubled)


def _forwarded_to_other_rank() -> AbstractContextManager[Any]:
    """Forward the rows of the last rank of a host to its first one."""
    all_to_all = AllToAllDispatcher._all_to_all

    def turned(self: AllToAllDispatcher, x: Tensor, group: RankGroup, step: StepRows, *more: Any) -> Tensor:
        if group.name == "ep_host":
            sent = sum(step.to_ranks)
            x = torch.cat((x[:sent].roll(step.to_ranks[-1], 0), x[sent:]))
        return all_to_all(self, x, group, step, *more)

    return mock.patch.object(AllToAllDispatcher, "_all_to_all", turned)


def _second_host_forgotten() -> AbstractContextManager[Any]:
    """Send a token with experts on two hosts to the first of them alone."""
    sort_steps = dispatch_steps.sort_steps

    def once(experts: Tensor, num_experts: int, *known: Any) -> Any:
        host = experts.div(num_experts // 2, rounding_mode="floor")
        is_lost = (host == 1) & (host == 0).any(1, keepdim=True)
        return sort_steps(experts.masked_fill(is_lost, -1), num_experts, *known)

    return mock.patch.object(expert_parallel, "sort_steps", once)


EXPERT_FAULTS: dict[str, tuple[Patch, str]] = {
    "expert gradients of another scale": (_expert_gradients_scaled, "dp2 mixtral ep2"),
    "gradient norm without experts": (_norm_without_experts, "dp2 mixtral ep2"),
    "router gradient not reduced under sp": (_router_not_reduced, "tp2 sp mixtral ep2"),
    "router loss added by each tensor rank": (_router_loss_doubled, "tp2 sp mixtral auxloss"),
    "router loss added by each stage": (_router_loss_doubled, "pp2 mixtral auxloss"),
    "router loss logged by each stage": (_logged_loss_doubled, "pp2 mixtral auxloss"),
    "expert tensor slices not summed": (_expert_slices_not_reduced, "dp2 mixtral etp2"),
    "gradients of routing probabilities at other tokens": (_probs_of_other_tokens, "dp2 mixtral ep2"),
    "late weight gradients dropped": (_late_gradients_dropped, "dp2 mixtral ep2"),
    "weight gradients of passes in turn dropped": (_gradients_in_turn_dropped, "dp2 mixtral ep2 moeoverlap"),
    "rows computed by another expert": (_experts_reversed, "dp2 mixtral ep2 alltoall"),
    "the sum of a host added twice": (_host_sum_doubled, "dp4 mixtral ep4 hosts"),
    "tokens forwarded to another rank of the host": (_forwarded_to_other_rank, "dp4 mixtral ep4 hosts"),
    "the second host of a token forgotten": (_second_host_forgotten, "dp4 mixtral ep4 hosts"),
    "assignments above a rank's capacity dropped": (_overflow_ignored, "dp2 mixtral ep2 scarce"),
    "loads of the attempt before": (_loads_of_the_attempt_before, "dp2 mixtral ep2 scarce"),
    "gradients of a failed attempt kept": (_gradients_of_a_failed_attempt_kept, "dp2 mixtral ep2 scarce"),
    "a row of experts' memory read twice": (_row_read_twice, "dp2 mixtral ep2 scarce"),
    "expert capacity applied per rank": (_capacity_per_rank, "tp2 sp mixtral ep2 dropping"),
    "latent projections not reduced under sp": (
        _projections_not_reduced,
        "tp2 sp latentexperts ep2",
    ),
    "gate of the shared expert not reduced under sp": (_gate_not_reduced, "tp2 sp qwenmoe"),
    "gradient of the shared expert missing a replica": (_shared_expert_without_gradient, "dp2 latentexperts"),
    "output bias of experts added by each slice": (_output_bias_on_each_slice, "dp2 biasedexperts etp2"),
    "load quantiles of a rank's tokens": (_quantiles_per_rank, "tp2 sp mixtral quantiles"),
}
"""Context manager and layout of each fault."""
