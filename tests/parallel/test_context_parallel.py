"""The zig-zag split of samples against positions written by hand, and by brute force."""

import pytest
import torch

from megatrain.parallel.batch import Batch
from megatrain.parallel.context_parallel import ContextParallel, to_rank_order, to_sequence_order
from megatrain.parallel.documents import Documents
from megatrain.parallel.grid import RankGroup

CPU = torch.device("cpu")


def ranks(size: int) -> list[ContextParallel]:
    return [ContextParallel(RankGroup("cp", tuple(range(size)), rank)) for rank in range(size)]


@pytest.mark.parametrize(
    ("size", "positions"),
    [
        (1, [[0, 1, 2, 3, 4, 5, 6, 7]]),
        (2, [[0, 1, 6, 7], [2, 3, 4, 5]]),
        (4, [[0, 7], [1, 6], [2, 5], [3, 4]]),
    ],
)
def test_a_rank_has_a_chunk_from_the_front_and_its_mirror_image(
    size: int, positions: list[list[int]]
) -> None:
    sample = torch.arange(8)
    for cp, wanted in zip(ranks(size), positions, strict=True):
        assert cp.positions(8 // size, CPU).tolist() == wanted
        assert cp.shard(sample[None], 1)[0].tolist() == wanted
        assert [position for run in cp.position_ranges(8 // size) for position in run] == wanted


def test_chunks_that_lie_side_by_side_are_one_run() -> None:
    assert [cp.position_ranges(4) for cp in ranks(2)] == [(range(2), range(6, 8)), (range(2, 6),)]
    assert ranks(2)[1].chunks(4) == (range(2, 4), range(4, 6))


def test_one_rank_has_sequences_of_any_length() -> None:
    (cp,) = ranks(1)
    assert cp.positions(5, CPU).tolist() == [0, 1, 2, 3, 4]
    assert to_sequence_order(torch.arange(5), 1).tolist() == [0, 1, 2, 3, 4]


@pytest.mark.parametrize("size", [2, 3, 4])
def test_rows_of_the_ranks_are_put_in_order_and_back(size: int) -> None:
    whole = torch.randn(12 * size, 2, 3)
    held = torch.cat([cp.shard(whole, 0) for cp in ranks(size)])
    assert torch.equal(to_sequence_order(held, size), whole)
    assert torch.equal(to_rank_order(whole, size), held)


@pytest.mark.parametrize("size", [1, 2, 4])
def test_every_rank_has_as_many_pairs_of_queries_and_keys(size: int) -> None:
    pairs = {int((cp.positions(16 // size, CPU) + 1).sum()) for cp in ranks(size)}
    assert len(pairs) == 1


def batch_of(mask: list[list[int]]) -> Batch:
    b, s = len(mask), len(mask[0])
    ids = torch.arange(b * s).view(b, s)
    documents = Documents(torch.tensor([0, 3, s, 2 * s], dtype=torch.int32), s, b, s)
    return Batch(
        tokens=ids, labels=ids + 1, loss_mask=torch.tensor(mask, dtype=torch.float32),
        position_ids=ids % s, documents=documents,
    )  # fmt: skip


def test_a_part_divides_by_the_tokens_of_all_parts() -> None:
    batch = batch_of([[1, 1, 1, 0, 0, 0, 1, 0], [1, 0, 0, 0, 0, 0, 0, 1]])
    parts = [cp.shard_batch(batch) for cp in ranks(2)]
    assert [part.tokens.tolist() for part in parts] == [
        [[0, 1, 6, 7], [8, 9, 14, 15]],
        [[2, 3, 4, 5], [10, 11, 12, 13]],
    ]
    assert [part.position_ids[0].tolist() for part in parts] == [[0, 1, 6, 7], [2, 3, 4, 5]]
    assert [part.loss_mask.sum().item() for part in parts] == [5, 1]
    assert [part.loss_denominator.item() for part in parts] == [6, 6]
    assert all(part.documents is batch.documents for part in parts)


def test_means_of_chunks_divide_by_each_rank_s_own_tokens() -> None:
    batch = batch_of([[1, 1, 1, 0, 0, 0, 1, 0], [1, 0, 0, 0, 0, 0, 0, 1]])
    assert [cp.shard_batch(batch, has_chunk_means=True).loss_denominator.item() for cp in ranks(2)] == [10, 2]


def test_what_holds_no_tokens_has_none_afterwards() -> None:
    empty = torch.empty(0, 0)
    assert ranks(4)[1].shard(empty, 1).shape == (0, 0)


@pytest.mark.parametrize("positions", [range(2), range(2, 6), range(3, 4), range(8)])
def test_cu_seqlens_within_positions_cut_every_document(positions: range) -> None:
    cu_seqlens = [0, 3, 3, 8, 10, 16]
    documents = Documents(torch.tensor(cu_seqlens, dtype=torch.int32), 6, 2, 8)
    laid = [sample * 8 + position for sample in range(2) for position in positions]
    expected = [sum(one < boundary for one in laid) for boundary in cu_seqlens]
    assert documents.cu_seqlens_within(positions).tolist() == expected
    assert documents.cu_seqlens_within(positions).dtype == torch.int32
