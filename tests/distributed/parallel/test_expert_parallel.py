"""Dispatch to experts on other ranks against a loop over all tokens and experts in one process, in fp64."""

from __future__ import annotations

import functools
from typing import Any, NamedTuple
from unittest import mock

import pytest
import torch
from everyday import one_in, only
from torch import Tensor

from megatrain.kernels.moe.routing import Routing
from megatrain.parallel import expert_parallel
from megatrain.parallel.collectives import begin_all_to_all_into
from megatrain.parallel.expert_parallel import (
    AllGatherDispatcher,
    AllToAllDispatcher,
    DispatchedTokens,
    LocalDispatcher,
    RowsPerExpert,
    TokenDispatcher,
)
from megatrain.parallel.grid import RankGroup
from megatrain.parallel.process_groups import make_group
from megatrain.parallel.rank_lists import GridShape
from megatrain.tools.worker_pool import WorkerPool

H, F, E, T = 6, 4, 8, 24
"""Channels, channels of experts, experts, tokens of all ranks."""
RANKS_PER_HOST = {"hosts": 2, "wide hosts": 4}
KINDS = ["allgather", "alltoall", *RANKS_PER_HOST]
CASES = ["even", "uneven", "one", "dropped", "none", "padded"]


class Problem(NamedTuple):
    """Inputs of all ranks together."""

    x: Tensor
    up: Tensor
    """[E, F, H]; down: [E, H, F]."""
    down: Tensor
    routing: Routing
    gradient: Tensor

    def in_dtype(self, dtype: torch.dtype) -> Problem:
        x, up, down, probs, gradient = (
            part.to(dtype) for part in (self.x, self.up, self.down, self.routing.probs, self.gradient)
        )
        return Problem(x, up, down, self.routing._replace(probs=probs), gradient)


def problem(case: str, top_k: int) -> Problem:
    """Return tokens and their experts.

    uneven: half of the experts get no tokens, so that some ranks get none. one: all tokens of one rank of two or four
    choose the first experts. dropped, padded: each expert has a capacity of five, and the first exceeds it. none: all
    assignments are dropped.
    """
    generator = torch.Generator().manual_seed(top_k)
    x, up, down, gradient, weights, scores = (
        torch.randn(*shape, generator=generator, dtype=torch.float64)
        for shape in [(T, H), (E, F, H), (E, H, F), (T, H), (T, top_k), (T, E)]
    )
    if case == "uneven":
        scores[:, E // 2 :] = -100
    if case == "one":
        scores[: T // 2] = -100 * torch.arange(E, dtype=torch.float64)
    if case in ("dropped", "padded"):
        scores[:, 0] += 2
    experts = scores.topk(top_k).indices
    kept = None
    if case in ("dropped", "padded"):
        chosen = torch.nn.functional.one_hot(experts.flatten(), E)
        kept = ((chosen.cumsum(0) * chosen).sum(1) <= 5).view_as(experts)
        assert not kept.all()
    if case == "none":
        kept = torch.zeros_like(experts, dtype=torch.bool)
    return Problem(x, up, down, Routing(experts, weights, kept), gradient)


def expected_of(given: Problem) -> tuple[Tensor, ...]:
    """Return the sum over each token's experts, and all gradients."""
    x, up, down, weights = (
        part.clone().requires_grad_() for part in (given.x, given.up, given.down, given.routing.probs)
    )
    sums = []
    for token in range(T):
        total = torch.zeros(H, dtype=torch.float64)
        for slot, expert in enumerate(given.routing.experts[token].tolist()):
            if given.routing.kept is None or given.routing.kept[token, slot]:
                total = total + weights[token, slot] * (down[expert] @ torch.tanh(up[expert] @ x[token]))
        sums.append(total)
    nothing = 0 * sum(
        part.sum() for part in (x, up, down, weights)
    )  # all get a gradient, also without assignments
    out = torch.stack(sums) + nothing
    out.backward(given.gradient)
    return out.detach(), *(part.grad for part in (x, weights, up, down))  # type: ignore[return-value]


def experts_of(dispatched: DispatchedTokens, up: Tensor, down: Tensor) -> Tensor:
    """Apply each expert to its rows; rows that must not be read are NaN."""
    parts, start = [], 0
    for number, end in enumerate(dispatched.ends.tolist()):
        hidden = torch.tanh(dispatched.rows[start:end] @ up[number].T)
        parts.append((hidden * dispatched.probs[start:end, None]) @ down[number].T)
        start = end
    unused = torch.full_like(dispatched.rows[start:], float("nan"))
    return torch.cat([*parts, unused])


def run_rank(
    given: Problem, dispatcher: TokenDispatcher, tokens: slice, experts: slice, channels: slice
) -> tuple[Tensor, ...]:
    x, weights = (part[tokens].clone().requires_grad_() for part in (given.x, given.routing.probs))
    up = given.up[experts, channels].clone().requires_grad_()
    down = given.down[experts, :, channels].clone().requires_grad_()
    routing = Routing(
        given.routing.experts[tokens],
        weights,
        None if given.routing.kept is None else given.routing.kept[tokens],
    )
    dispatched = dispatcher.begin_dispatch(x, lambda: routing)()
    out = dispatcher.begin_combine(experts_of(dispatched, up, down), dispatched)()
    out.backward(given.gradient[tokens])
    return out.detach(), *(part.grad for part in (x, weights, up, down))  # type: ignore[return-value]


def on_a_rank(
    rank: int,
    world_size: int,
    kind: str,
    case: str,
    top_k: int,
    ep: int,
    etp: int,
    dtype: torch.dtype = torch.float64,
) -> tuple[Tensor, ...]:
    rows_per_expert = (lambda num_tokens: 5 + 0 * num_tokens) if case == "padded" else None
    dispatcher, groups = dispatcher_of(kind, rank, ep, etp, rows_per_expert)
    t, e, f = T // world_size, E // ep, F // etp
    own_ep, own_etp = groups[0].rank, groups[1].rank
    return run_rank(
        problem(case, top_k).in_dtype(dtype),
        dispatcher,
        slice(rank * t, (rank + 1) * t),
        slice(own_ep * e, (own_ep + 1) * e),
        slice(own_etp * f, (own_etp + 1) * f),
    )


def dispatcher_of(
    kind: str, rank: int, ep: int, etp: int = 1, rows_per_expert: RowsPerExpert | None = None
) -> tuple[TokenDispatcher, list[RankGroup]]:
    """Return a dispatcher with its groups ep and etp. "hosts": an all-to-all to hosts, then to the ranks of a host."""
    shape = GridShape(dp=ep * etp, ep=ep, etp=etp, ep_host=RANKS_PER_HOST.get(kind, 1))
    hosts, peers = shape.expert_levels()
    ep_ranks, etp_ranks = (_group(name, shape.expert_lists(name), rank) for name in ("ep", "etp"))
    known = (E, ep_ranks, etp_ranks, rows_per_expert)
    if kind == "allgather":
        return AllGatherDispatcher(*known), [ep_ranks, etp_ranks]
    steps = (_group("ep_peers", peers, rank), _group("ep_host", hosts, rank)) if hosts else (ep_ranks,)
    return AllToAllDispatcher(*known, steps=steps), [ep_ranks, etp_ranks]


def _group(name: str, lists: list[list[int]], rank: int) -> RankGroup:
    own = next(ranks for ranks in lists if rank in ranks)
    handle = make_group(name, lists) if len(own) > 1 else None
    return RankGroup(name, tuple(own), own.index(rank), handle)


close = functools.partial(torch.testing.assert_close, rtol=1e-12, atol=1e-13)


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("top_k", [1, 3])
def test_one_rank_matches_a_loop_over_experts(case: str, top_k: int) -> None:
    given, everything = problem(case, top_k), slice(None)
    dispatcher = LocalDispatcher(E, (lambda num_tokens: num_tokens // 2) if case == "padded" else None)
    for found, expected in zip(
        run_rank(given, dispatcher, *[everything] * 3), expected_of(given), strict=True
    ):
        close(found, expected)


@pytest.mark.parametrize(
    ("kind", "ep", "etp", "case"),
    one_in(
        4,
        [
            (kind, *sizes, case)
            for kind in KINDS
            for case in CASES
            for sizes in [(1, 1), (2, 1), (4, 1), (8, 1), (1, 2), (2, 2), (4, 2)]
            if sizes[0] > RANKS_PER_HOST.get(kind, 0)
        ],
    ),
)
def test_ranks_match_one_process(pool: WorkerPool, kind: str, ep: int, etp: int, case: str) -> None:
    top_k = 3 if ep < 4 else 2
    out, dx, dweights, dup, ddown = expected_of(problem(case, top_k))
    found = pool.run(ep * etp, on_a_rank, kind, case, top_k, ep, etp)
    for expected, parts in zip(
        (out, dx, dweights), zip(*(one[:3] for one in found), strict=True), strict=True
    ):
        close(torch.cat(parts), expected)
    by_expert = [found[first * etp : (first + 1) * etp] for first in range(ep)]
    close(torch.cat([torch.cat([one[3] for one in ranks], 1) for ranks in by_expert]), dup)
    close(torch.cat([torch.cat([one[4] for one in ranks], 2) for ranks in by_expert]), ddown)


@pytest.mark.parametrize("case", only(["even"], ["even", "uneven", "dropped", "none"]))
def test_both_dispatchers_have_the_same_bits_in_deterministic_mode(pool: WorkerPool, case: str) -> None:
    """A token has terms of up to four ranks in bf16, whose sum depends on their order and on how often it is rounded."""
    found = [pool.run(4, on_a_deterministic_rank, kind, case, 5, 4, 1, torch.bfloat16) for kind in KINDS[:2]]
    for one, other in zip(*found, strict=True):
        assert all(map(torch.equal, one, other))


def on_a_deterministic_rank(*arguments: Any) -> tuple[Tensor, ...]:
    torch.use_deterministic_algorithms(mode=True)
    try:
        return on_a_rank(*arguments)
    finally:
        torch.use_deterministic_algorithms(mode=False)


def test_sums_return_by_host_in_a_fixed_order(pool: WorkerPool) -> None:
    """Slots of the router on a rank, then ranks of a host, then hosts; each of these sums is rounded once, to bf16."""
    given = problem("even", 5).in_dtype(torch.bfloat16)
    probs = given.routing.probs
    sums = []
    for token in range(T):
        hosts = []
        for host in range(2):
            ranks = []
            for rank in (2 * host, 2 * host + 1):
                terms = [
                    given.x[token] * probs[token, slot]
                    for slot, expert in enumerate(given.routing.experts[token].tolist())
                    if expert // (E // 4) == rank
                ]
                ranks.append(rounded_sum(terms))
            hosts.append(rounded_sum(ranks))
        sums.append(rounded_sum(hosts))
    found = torch.cat(pool.run(4, sum_of_scaled_rows))
    assert torch.equal(found, torch.stack(sums))
    assert not torch.equal(found, torch.cat(pool.run(4, sum_of_scaled_rows, "alltoall")))


def rounded_sum(terms: list[Tensor]) -> Tensor:
    return sum((one.float() for one in terms), torch.zeros(H)).bfloat16()


def sum_of_scaled_rows(rank: int, world_size: int, kind: str = "hosts") -> Tensor:
    """Return the sums of this rank's tokens over experts that multiply a row by its probability."""
    given = problem("even", 5).in_dtype(torch.bfloat16)
    dispatcher, _ = dispatcher_of(kind, rank, world_size)
    own = slice(rank * T // world_size, (rank + 1) * T // world_size)
    routing = Routing(given.routing.experts[own], given.routing.probs[own], None)
    dispatched = dispatcher.begin_dispatch(given.x[own], lambda: routing)()
    return dispatcher.begin_combine(dispatched.rows * dispatched.probs[:, None], dispatched)()


@pytest.mark.parametrize(("kind", "copies"), [("alltoall", 2), ("hosts", 1)])
def test_a_token_goes_once_to_each_other_rank_or_host(pool: WorkerPool, kind: str, copies: int) -> None:
    """Four ranks on two hosts, and experts of every token on all ranks."""
    assert pool.run(4, rows_sent_to_other_hosts, kind) == [copies * T // 4] * 4


def rows_sent_to_other_hosts(rank: int, world_size: int, kind: str) -> int:
    dispatcher, _ = dispatcher_of(kind, rank, world_size)
    sent = 0

    def counted(
        out: Tensor, x: Tensor, group: RankGroup, *, to_ranks: list[int], from_ranks: list[int]
    ) -> Any:
        nonlocal sent
        sent += sum(n for to, n in zip(group.ranks, to_ranks, strict=True) if to // 2 != rank // 2)
        return begin_all_to_all_into(out, x, group, to_ranks=to_ranks, from_ranks=from_ranks)

    experts = torch.arange(0, E, E // 4).expand(T // 4, 4)
    with mock.patch.object(expert_parallel, "begin_all_to_all_into", counted):
        dispatcher.begin_dispatch(
            torch.ones(T // 4, H), lambda: Routing(experts, torch.ones(T // 4, 4), None)
        )()
    return sent
