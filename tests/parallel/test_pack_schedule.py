"""Schedules of packs: every document once, bounds kept, one order for each group, close to a lower bound."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from everyday import nightly

from megatrain.parallel.packs.schedule import (
    SCHEDULERS,
    Integers,
    Pack,
    PackCosts,
    PackDomain,
    balanced_packs,
    first_fit_packs,
    lower_bound,
)
from megatrain.parallel.packs.simulate import drawing, seconds_of, simulate

COSTS = PackCosts(token=1.0, pair=1 / 50_000, sent=0.04, each=100)
"""Attention takes as long as all else for a document of 50,000 tokens, as in Llama-3-8B."""


def domain(
    num_ranks: int, tokens: int = 32_768, *, sizes: tuple[int, ...] | None = None, multiple: int = 64
) -> PackDomain:
    sizes = sizes or tuple(2**power for power in range(num_ranks.bit_length()) if num_ranks % 2**power == 0)
    return PackDomain(num_ranks=num_ranks, sizes=sizes, tokens_per_rank=tokens, multiple=multiple)


def check(packs: list[Pack], lengths: Integers, where: PackDomain) -> None:
    documents = [document for pack in packs for document in pack.documents]
    assert sorted(documents) == list(range(len(lengths)))
    passes: dict[int, list[Pack]] = {rank: [] for rank in range(where.num_ranks)}
    for pack in packs:
        assert pack.documents
        assert pack.size in where.sizes
        assert pack.first % pack.size == 0
        assert pack.num_tokens == sum(lengths[list(pack.documents)]) <= where.capacity(pack.size)
        assert where.num_rows(pack.num_tokens, pack.size) <= where.tokens_per_rank
        numbers = {len(passes[rank]) for rank in pack.ranks}
        assert len(numbers) == 1, "a pass of a group has one number on all its ranks"
        for rank in pack.ranks:
            passes[rank].append(pack)


@pytest.mark.parametrize("count", [200, nightly(5000)])
def test_random_sets_keep_all_bounds(count: int) -> None:
    random = np.random.default_rng(count)
    for _ in range(count):
        ranks = int(random.choice([1, 2, 3, 4, 6, 8, 16]))
        multiple = int(random.choice([1, 2, 8]))
        where = domain(ranks, int(random.integers(1, 40)) * multiple, multiple=multiple)
        smallest = int(random.integers(len(where.sizes)))
        where = domain(ranks, where.tokens_per_rank, sizes=where.sizes[smallest:], multiple=multiple)
        longest = where.capacity(where.sizes[-1])
        lengths = random.integers(1, 1 + random.integers(1, longest + 1), random.integers(0, 60))
        costs = PackCosts(
            pair=float(random.choice([0, 0.01, 1])), sent=0.1, each=float(random.choice([0, 5]))
        )
        packs = balanced_packs(lengths, costs, where)
        check(packs, lengths, where)
        assert packs == balanced_packs(lengths.copy(), costs, where)
        assert simulate(packs, lengths, costs, where).time >= lower_bound(lengths, costs, where) * (
            1 - 1e-9
        ) * bool(packs)
        fixed = domain(ranks, where.tokens_per_rank, sizes=where.sizes[-1:], multiple=multiple)
        check(first_fit_packs(lengths, costs, fixed), lengths, fixed)


DISTRIBUTIONS = {
    # Quantiles, 0 to 100 % in steps of 10, of the tokens of documents.
    "web pages": (40, 130, 220, 320, 440, 590, 790, 1090, 1650, 3100, 131_072),
    "source code": (20, 180, 380, 640, 980, 1500, 2300, 3700, 6600, 15_000, 131_072),
    "books and chats": (30, 90, 160, 260, 420, 700, 1300, 4000, 60_000, 95_000, 131_072),
}


@pytest.mark.parametrize("num_ranks", [4, 8, 32])
@pytest.mark.parametrize("name", DISTRIBUTIONS)
def test_a_step_is_within_three_percent_of_the_lower_bound(name: str, num_ranks: int) -> None:
    quantiles = np.log(DISTRIBUTIONS[name])
    shares = (np.arange(24 * num_ranks) + 0.5) / (24 * num_ranks)
    lengths = np.exp(np.interp(shares, np.linspace(0, 1, 11), quantiles)).astype(np.int64)
    np.random.default_rng(0).shuffle(lengths)
    where = domain(num_ranks)
    packs = balanced_packs(lengths, COSTS, where)
    step = simulate(packs, lengths, COSTS, where)
    check(packs, lengths, where)
    assert step.time <= 1.03 * lower_bound(lengths, COSTS, where)
    fixed = domain(num_ranks, sizes=(4,))
    times = [
        simulate(one(lengths, COSTS, fixed), lengths, COSTS, fixed).time
        for one in (balanced_packs, first_fit_packs)
    ]
    assert step.time < times[0] <= times[1] * 1.001


def test_first_fit_fills_the_first_pack_with_room() -> None:
    lengths = np.random.default_rng(1).integers(1, 100, 300)
    packs: list[list[int]] = []
    free: list[int] = []
    for document, length in enumerate(lengths.tolist()):
        number = next((k for k, space in enumerate(free) if space >= length), len(free))
        if number == len(free):
            free.append(100)
            packs.append([])
        free[number] -= length
        packs[number].append(document)
    found = first_fit_packs(lengths, COSTS, domain(4, 50, sizes=(2,), multiple=1))
    assert [list(pack.documents) for pack in found] == packs
    assert [pack.first for pack in found[:4]] == [0, 2, 0, 2]


def test_passes_of_ranks_that_share_experts_wait_for_each_other() -> None:
    """Ranks 0 and 1 share experts. Their first passes have 40 rows: A is filled up with a document of 30 tokens, and waits for B.

    The second pass of rank 1 is empty, and filled up with 20 tokens. Ranks 2 and 3 share the next experts, and only rank 3 has
    documents: rank 2 runs an empty pass of as many rows as all first passes have.
    """
    lengths = np.array([10, 40, 20, 8])
    where = replace(domain(4, 40, sizes=(1,), multiple=1), num_in_step=2, filler_length=40)
    packs = [Pack(0, 1, (0,), 10), Pack(1, 1, (1,), 40), Pack(0, 1, (2,), 20), Pack(3, 1, (3,), 8)]
    costs = PackCosts(token=1.0, pair=0.1, each=1.0)
    step = simulate(packs, lengths, costs, where)
    first, longest = 1 + 40 + (10**2 + 30**2) / 10, 1 + 40 + 40**2 / 10
    second, last = 1 + 20 + 20**2 / 10, 1 + 40 + (8**2 + 32**2) / 10
    assert step.starts == (0, 0, longest, 0)
    assert step.ends == pytest.approx((first, longest, longest + second, last))
    assert step.time == pytest.approx(longest + second)
    assert step.idle_share == pytest.approx(1 - (first + longest + second + last) / (4 * step.time))
    rows = list(drawing(packs, step, where, width=262))
    assert rows[0] == f"rank 0  {'A' * 141}{'.' * 60}{'C' * 61}"
    assert rows[1] == f"rank 1  {'B' * 201}{'.' * 61}"
    alone = simulate(packs, lengths, costs, replace(where, num_in_step=1, filler_length=0))
    assert alone.time == longest


@pytest.mark.parametrize(("num_in_step", "start"), [(1, 20), (2, 20), (4, 30)])
def test_a_pass_waits_for_those_of_its_number_on_the_ranks_in_step(num_in_step: int, start: int) -> None:
    """B is on all ranks until 10, A on rank 0 until 20, C on rank 2 until 30; then rank 0 has D."""
    lengths = np.array([10, 40, 20, 5])
    packs = [Pack(0, 4, (1,), 40), Pack(0, 1, (0,), 10), Pack(2, 1, (2,), 20), Pack(0, 1, (3,), 5)]
    where = replace(domain(4, 40, multiple=1), num_in_step=num_in_step)
    assert simulate(packs, lengths, PackCosts(token=1.0), where).starts == (0, 10, 10, start)


def test_the_simulator_starts_a_pack_when_its_whole_group_is_ready() -> None:
    lengths = np.array([40, 10, 20])
    where = domain(2, 40, multiple=1)
    packs = [Pack(0, 1, (1,), 10), Pack(0, 2, (0,), 40), Pack(1, 1, (2,), 20)]
    costs = PackCosts(token=1.0, each=1.0)
    step = simulate(packs, lengths, costs, where)
    assert step.starts == (0, 11, 32)
    assert step.ends == (11, 32, 53)
    assert step.idle_share == pytest.approx(1 - (11 + 2 * 21 + 21) / (2 * 53))
    assert seconds_of(packs[1], lengths, costs, where) == 21
    rows = list(drawing(packs, step, where, width=53))
    assert rows == [f"rank 0  {'A' * 11}{'B' * 21}{'.' * 21}", f"rank 1  {'.' * 11}{'B' * 21}{'C' * 21}"]


def test_packs_that_cost_more_than_their_tokens_are_few() -> None:
    lengths, where = np.full(16, 10), domain(4, 40, multiple=1)
    assert len(balanced_packs(lengths, PackCosts(each=0), where)) == 4
    many = np.full(17, 10)
    costs = PackCosts(each=1000)
    packs = balanced_packs(many, costs, domain(4, 50, multiple=1))
    assert simulate(packs, many, costs, domain(4, 50, multiple=1)).time < 1100


def test_rows_that_fill_a_pack_count_in_its_time() -> None:
    where, costs = domain(2, 64, multiple=32), PackCosts()
    assert seconds_of(Pack(0, 2, (0,), 65), np.array([65]), costs, where) == 64


def test_an_empty_batch_has_no_packs() -> None:
    none = np.zeros(0, np.int64)
    for scheduler in SCHEDULERS.values():
        assert scheduler(none, COSTS, domain(4, sizes=(4,))) == []
