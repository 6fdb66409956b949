"""Cross-entropy and z-loss over a split vocabulary against torch's own, losses and gradients, in fp64."""

import pytest
import torch
from torch.nn import functional as F

from megatrain.parallel.build_grid import build_grid
from megatrain.parallel.process_groups import make_group
from megatrain.parallel.rank_lists import GridShape
from megatrain.parallel.tensor_parallel import (
    VocabShard,
    vocab_parallel_cross_entropy,
    vocab_parallel_logits_gradient,
)
from megatrain.tools.worker_pool import WorkerPool

NUM_TOKENS = 40
SPLITS = [(1, 13, 13), (1, 13, 16), (2, 13, 7), (3, 13, 5), (4, 13, 4), (4, 5, 2), (4, 13, 40), (8, 13, 2)]
"""Ranks, ids and rows per rank: with (8, 13, 2) one rank holds an id and a padded row, with (4, 13, 40) three ranks hold
only padding."""


@pytest.mark.parametrize("z_loss_coeff", [0.0, 0.2])
@pytest.mark.parametrize(("size", "vocab_size", "rows"), SPLITS)
def test_losses_and_gradients_match_torch(
    pool: WorkerPool, size: int, vocab_size: int, rows: int, z_loss_coeff: float
) -> None:
    logits, labels, scale = case(vocab_size)
    logits.requires_grad_()
    losses = F.cross_entropy(logits, labels, reduction="none")
    log_sums = logits.logsumexp(-1)
    ((losses + z_loss_coeff * log_sums.square()) * scale).sum().backward()
    found = pool.run(size, on_a_rank, vocab_size, rows, z_loss_coeff)
    for own_losses, own_log_sums, _ in found:
        torch.testing.assert_close(own_losses, losses.detach(), rtol=1e-13, atol=1e-14)
        torch.testing.assert_close(own_log_sums, log_sums.detach(), rtol=1e-13, atol=1e-14)
    joined = torch.cat([gradient for _, _, gradient in found], dim=1)
    torch.testing.assert_close(joined[:, :vocab_size], logits.grad, rtol=1e-12, atol=1e-15)
    assert not joined[:, vocab_size:].any()


def case(vocab_size: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return large and small logits, labels with all ids, and scales, some of them 0."""
    generator = torch.Generator().manual_seed(vocab_size)
    logits = 20 * torch.randn(NUM_TOKENS, vocab_size, generator=generator, dtype=torch.float64)
    labels = torch.arange(NUM_TOKENS) % vocab_size
    return logits, labels, torch.rand(NUM_TOKENS, generator=generator, dtype=torch.float64).round(decimals=1)


def on_a_rank(
    rank: int, world_size: int, vocab_size: int, rows: int, z_loss_coeff: float
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    grid = build_grid(GridShape(tp=world_size), rank, make_group)
    logits, labels, scale = case(vocab_size)
    padding = torch.full((NUM_TOKENS, rows * world_size - vocab_size), 1e3, dtype=torch.float64)
    own = torch.cat((logits, padding), dim=1)[:, rank * rows : (rank + 1) * rows].clone()
    vocab = VocabShard(grid.tp, rows, vocab_size)
    known = vocab_parallel_cross_entropy(own, labels, vocab)
    losses, log_sums = known.losses.clone(), known.log_sums.clone()
    return (
        losses,
        log_sums,
        vocab_parallel_logits_gradient(known, scale, vocab, torch.float64, z_loss_coeff=z_loss_coeff),
    )


def test_a_label_outside_the_vocabulary_has_an_infinite_loss_on_every_rank(pool: WorkerPool) -> None:
    for infinite, finite in pool.run(3, with_wrong_labels):
        assert infinite == [float("inf")] * 3
        assert all(0 < loss < 100 for loss in finite)


def with_wrong_labels(rank: int, world_size: int) -> tuple[list[float], list[float]]:
    """Return the losses of labels in the padding, after all rows, and huge; then those of real ids."""
    grid = build_grid(GridShape(tp=world_size), rank, make_group)
    labels = torch.tensor([13, 15, 10**12, 0, 7, 12])
    logits = torch.randn(6, 5, generator=torch.Generator().manual_seed(rank), dtype=torch.float64)
    losses = vocab_parallel_cross_entropy(logits, labels, VocabShard(grid.tp, 5, 13)).losses.tolist()
    return losses[:3], losses[3:]
