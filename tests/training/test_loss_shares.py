"""Weight of each token in the loss, by micro-batches and by tokens."""

import pytest
import torch

from megatrain.parallel.batch import Batch
from megatrain.tools.parity.measure import engine_of, own_batches, tiny_plan
from megatrain.tools.parity.rows import Layout


def gradients_of(layout: Layout, batches: list[Batch]) -> tuple[float, torch.Tensor]:
    engine = engine_of(tiny_plan(layout, 1), 0)
    loss = engine.accumulate_gradients(batches).lm_loss.item()
    return loss, torch.cat(engine.buffers.gradients.full) / engine.loss_scaler.scale


def joined(batches: list[Batch]) -> list[Batch]:
    """One micro-batch of all samples."""
    fields = ("tokens", "labels", "loss_mask", "position_ids")
    return [Batch(**{name: torch.cat([getattr(one, name) for one in batches]) for name in fields})]


@pytest.mark.parametrize("scale", ["noscale", "scale"])
def test_by_tokens_micro_batches_make_no_difference(scale: str) -> None:
    layout = Layout.of(f"tokens {scale}")
    batches = list(own_batches(0, layout, 0))
    loss, found = gradients_of(layout, batches)
    # A single micro-batch is its own mean, under both rules.
    whole, expected = gradients_of(Layout.of(""), joined(batches))
    assert loss == pytest.approx(whole, rel=1e-12)
    torch.testing.assert_close(found, expected, rtol=1e-9, atol=1e-12)


def test_by_micro_batches_each_has_the_same_weight() -> None:
    layout = Layout.of("")
    batches = list(own_batches(0, layout, 0))
    loss, found = gradients_of(layout, batches)
    singles = [gradients_of(layout, [batch]) for batch in batches]
    torch.testing.assert_close(
        found, torch.stack([gradients for _, gradients in singles]).mean(0), rtol=1e-9, atol=1e-12
    )
    tokens = torch.tensor([batch.loss_mask.sum().item() for batch in batches])
    losses = torch.tensor([one for one, _ in singles])
    assert loss == pytest.approx(
        float((losses * tokens).sum() / tokens.sum()), rel=1e-6
    )  # the log's is by tokens


def test_a_batch_without_tokens_has_no_gradient() -> None:
    layout = Layout.of("tokens")
    (batch,) = joined(list(own_batches(0, layout, 0)))
    batch.loss_mask.zero_()
    loss, found = gradients_of(layout, [batch])
    assert loss == 0.0
    assert not found.any()
