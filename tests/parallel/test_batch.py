"""Micro-batches ahead for multi-token prediction: shifted tokens, labels and masks."""

import pytest
import torch

from megatrain.parallel.batch import Batch
from megatrain.parallel.batches_ahead import with_batches_ahead
from megatrain.parallel.context_parallel import ContextParallel
from megatrain.parallel.documents import Documents
from megatrain.parallel.grid import RankGroup


def batch_of(documents: Documents | None = None) -> Batch:
    """Two samples of 8 tokens: 10 to 17 and 20 to 27. Label 12 is ignored."""
    tokens = torch.stack((torch.arange(10, 18), torch.arange(20, 28)))
    labels = (tokens + 1).masked_fill(tokens == 11, -100)
    return Batch(
        tokens=tokens,
        labels=labels,
        loss_mask=torch.ones(2, 8),
        position_ids=torch.arange(8).expand(2, 8),
        documents=documents,
    )


def test_batches_ahead_end_with_their_samples() -> None:
    one, two = with_batches_ahead(batch_of(), 2).ahead
    assert one.tokens.tolist() == [[*range(11, 18), 0], [*range(21, 28), 0]]
    assert two.tokens.tolist() == [[*range(12, 18), 0, 0], [*range(22, 28), 0, 0]]
    assert two.labels[1].tolist() == [*range(23, 29), 0, 0]
    assert one.loss_mask.tolist() == [[0, *[1] * 6, 0], [*[1] * 7, 0]]
    assert [float(each.loss_denominator) for each in (one, two)] == [13, 12]


def test_batches_ahead_do_not_cross_documents() -> None:
    documents = Documents(torch.tensor([0, 3, 8, 16], dtype=torch.int32), 8, 2, 8)
    one, two = with_batches_ahead(batch_of(documents), 2).ahead
    assert one.tokens[0].tolist() == [11, 12, 0, 14, 15, 16, 17, 0]
    assert two.labels[0].tolist() == [13, 0, 0, 16, 17, 18, 0, 0]
    assert two.loss_mask[0].tolist() == [1, 0, 0, 1, 1, 1, 0, 0]


@pytest.mark.parametrize("has_chunk_means", [False, True])
def test_context_ranks_share_the_batches_ahead(*, has_chunk_means: bool) -> None:
    whole = with_batches_ahead(batch_of(), 1)
    ranks = [ContextParallel(RankGroup("cp", (0, 1), rank)) for rank in range(2)]
    shards = [rank.shard_batch(whole, has_chunk_means=has_chunk_means) for rank in ranks]
    assert [shard.ahead[0].tokens[0].tolist() for shard in shards] == [[11, 12, 17, 0], [13, 14, 15, 16]]
    counts = [float(shard.ahead[0].loss_denominator) for shard in shards]
    assert counts == ([2 * 5, 2 * 8] if has_chunk_means else [13, 13])
