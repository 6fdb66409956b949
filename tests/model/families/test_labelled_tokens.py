"""The output layer of BERT computes the logits of labelled tokens only: losses and gradients are those of all tokens."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from megatrain.data.samples.masked_dataset import BERT_WORDS
from megatrain.data.samples.masking import masked_runs
from megatrain.data.tokenizers.mask_tokens import MaskVocabulary
from megatrain.model.families.masked_lm import LabelledTokens
from megatrain.parallel.batch import Batch

B, S, H = 3, 10, 4


def batch_with(counts: list[int]) -> Batch:
    """Return a batch whose samples have these numbers of labels, at drawn places."""
    generator = torch.Generator().manual_seed(1)
    mask = torch.zeros(B, S)
    for row, count in zip(mask, counts, strict=True):
        row[torch.randperm(S, generator=generator)[:count]] = 1
    ids = torch.randint(5, 90, (B, S), generator=generator)
    places = torch.arange(S).expand(B, S)
    return Batch(tokens=ids, labels=ids, loss_mask=mask, position_ids=places)


@pytest.mark.parametrize("counts", [[3, 0, 2], [3, 3, 3], [0, 0, 0], [1, 5, 1]])
def test_loss_and_gradient_are_those_of_all_tokens(counts: list[int]) -> None:
    batch = batch_with(counts)
    mask, labels = batch.loss_mask.t().flatten(), batch.labels.t().flatten()
    x = torch.randn(B * S, H, dtype=torch.float64, generator=torch.Generator().manual_seed(2))
    whole, part = x.clone().requires_grad_(), x.clone().requires_grad_()
    (whole.sin() * labels[:, None] * mask[:, None]).sum().backward()
    rows, own_labels, own_mask = LabelledTokens(3).of(part, labels, mask, batch)
    assert len(rows) == 3 * B
    assert own_mask.sum() == sum(counts)
    taken = own_mask > 0
    assert torch.equal(rows[taken], x[mask > 0])  # in order, also if one sample has more than its share
    assert torch.equal(own_labels[taken], labels[mask > 0])
    (rows.sin() * own_labels[:, None] * own_mask[:, None]).sum().backward()
    assert torch.equal(part.grad, whole.grad)


def test_more_labels_than_expected_make_the_loss_nan() -> None:
    batch = batch_with([4, 4, 4])
    mask, labels = batch.loss_mask.t().flatten(), batch.labels.t().flatten()
    _, _, own_mask = LabelledTokens(3).of(torch.randn(B * S, H), labels, mask, batch)
    assert own_mask.isnan().all()


def test_samples_have_at_most_the_labels_that_the_head_expects() -> None:
    """The bound of `max_labels` is that of `masked_runs`."""
    vocabulary = MaskVocabulary(size=100, cls=1, sep=2, mask=3, continues=np.zeros(100, bool))
    random, counts = np.random.RandomState(0), []
    for length in (6, 7, 61, 125):
        for _ in range(20):
            ids = random.randint(5, 100, length)
            runs = masked_runs(ids, length, vocabulary, BERT_WORDS, random)
            counts.append((sum(map(len, runs)), int(BERT_WORDS.probability * length)))
    assert all(found <= bound for found, bound in counts)
    assert any(found == bound > 0 for found, bound in counts)
