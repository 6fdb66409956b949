"""Samples cut into pieces: the same tokens and labels, in shorter sequences."""

from __future__ import annotations

import pytest
import torch

from megatrain.config import ConfigError
from megatrain.config.derive.batch_sizes import parse_steps, with_fitting_lengths
from megatrain.data.pieces import PieceLoader, cut
from megatrain.parallel.batch import Batch
from megatrain.parallel.documents import Documents
from megatrain.tools.parity.measure import engine_of, local_batches, tiny_plan
from megatrain.tools.parity.rows import Layout
from megatrain.training.build import build_schedules


def batch_of(ends: list[int], samples: int = 2, length: int = 8) -> Batch:
    """Return a micro-batch with documents that end at these places of the concatenated samples."""
    text = torch.arange(samples * (length + 1)).view(samples, length + 1)
    bounds = torch.tensor(ends, dtype=torch.int32)
    documents = Documents(bounds, int(bounds.diff().max()), samples, length)
    places = torch.arange(samples * length)
    starts = bounds[torch.bucketize(places, bounds, right=True) - 1]
    return Batch(
        tokens=text[:, :-1],
        labels=text[:, 1:],
        loss_mask=torch.ones(samples, length).index_fill(1, torch.tensor([3]), 0),
        position_ids=(places - starts).view(samples, length),
        documents=documents,
    )


def test_pieces_have_the_tokens_of_their_sample() -> None:
    whole = batch_of([0, 3, 4, 8, 13, 16])
    found = cut(whole, 2)
    assert found.pieces == 2
    for name in ("tokens", "labels", "loss_mask"):
        assert torch.equal(getattr(found, name).flatten(), getattr(whole, name).flatten())
    assert found.tokens.tolist()[1] == [4, 5, 6, 7]
    assert found.labels.tolist()[1] == [5, 6, 7, 8], "the first label of the next piece"
    assert found.position_ids.tolist() == [[0, 1, 2, 0], [0, 1, 2, 3], [0, 1, 2, 3], [0, 0, 1, 2]]
    assert found.loss_denominator == whole.loss_denominator
    documents = found.documents
    assert documents is not None
    expected = batch_of([0, 3, 4, 8, 12, 13, 16], samples=4, length=4).documents
    assert torch.equal(documents.mask, expected.mask)
    assert (documents.num_samples, documents.seq_length, documents.max_seqlen) == (4, 4, 4)
    assert documents.cu_seqlens.dtype == torch.int32
    assert cut(whole, 1) is whole


class Recorded:
    """A loader of the same micro-batch."""

    is_closed = False

    def microbatches(self, consumed_samples: int, num_microbatches: int) -> list[Batch]:
        return [batch_of([0, 8, 16])] * num_microbatches

    def spans(self, sample: int) -> list[int]:
        return [sample]

    def close(self) -> None:
        self.is_closed = True


def test_the_consumed_samples_decide_the_length() -> None:
    steps = parse_steps("0:2 80:4 160:8", seq_length=8)
    loader = PieceLoader(Recorded(), lambda consumed: 8 // steps.at(consumed))
    lengths = [loader.microbatches(consumed, 1)[0].tokens.shape[1] for consumed in (0, 9, 10, 19, 20, 1000)]
    assert lengths == [2, 2, 4, 4, 8, 8]
    assert loader.spans(7) == [7]
    loader.close()
    assert loader.loader.is_closed


@pytest.mark.parametrize(
    ("text", "longest", "unit", "expected"),
    [
        ("0:5,1k:16", 16, 1, "0:8,1k:16"),
        ("0:1 1k:2 2k:64", 16, 4, "0:4 1k:4 2k:16"),
        ("0:7", 24, 2, "0:8"),
        ("0:1k 1b:3000", 4000, 8, "0:1000 1b:4000"),
    ],
)
def test_a_fix_has_the_next_lengths_that_fit(text: str, longest: int, unit: int, expected: str) -> None:
    assert with_fitting_lengths(text, longest, unit) == expected


def test_a_length_has_the_words_of_its_flag() -> None:
    with pytest.raises(ConfigError, match="--seq-length-schedule '16': '16' has no colon"):
        parse_steps("16", seq_length=16, flag="--seq-length-schedule", value="length", example=2048)


def test_a_piece_is_a_document_of_its_own() -> None:
    """The oracle: whole samples whose attention and positions stay within documents of the length of a piece."""
    pieces, reports = 3, []
    for words in ("", "documents"):
        plan = tiny_plan(Layout.of(words), 1)
        engine = engine_of(plan, 0)
        batches = list(local_batches(0, Layout.of(""), 0))
        batches = [as_documents(batch, pieces) if words else cut(batch, pieces) for batch in batches]
        reports.append(engine.step(batches, build_schedules(plan).at(1)))
    assert reports[0].lm_loss == pytest.approx(reports[1].lm_loss, rel=1e-12)
    assert reports[0].grad_norm == pytest.approx(reports[1].grad_norm, rel=1e-10)


def as_documents(batch: Batch, pieces: int) -> Batch:
    samples, length = batch.tokens.shape
    short = length // pieces
    bounds = torch.arange(samples * pieces + 1, dtype=torch.int32) * short
    return Batch(
        tokens=batch.tokens,
        labels=batch.labels,
        loss_mask=batch.loss_mask,
        position_ids=(torch.arange(length) % short).expand(samples, -1),
        documents=Documents(bounds, short, samples, length),
    )
