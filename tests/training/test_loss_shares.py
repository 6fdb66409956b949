"""Weight of each token in the loss, by micro-batches and by tokens."""

import pytest
import torch
from everyday import one_in

from megatrain.parallel.batch import Batch
from megatrain.tools.parity.measure import engine_of, local_batches, tiny_plan
from megatrain.tools.parity.rows import Layout


def gradients_of(layout: Layout, batches: list[Batch], *flags: str) -> tuple[float, torch.Tensor]:
    engine = engine_of(tiny_plan(layout, 1, *flags), 0)
    loss = engine.accumulate_gradients(batches).lm_loss.item()
    return loss, torch.cat(engine.buffers.gradients.full) / engine.loss_scaler.scale


def joined(batches: list[Batch]) -> list[Batch]:
    """One micro-batch of all samples."""
    fields = ("tokens", "labels", "loss_mask", "position_ids")
    return [Batch(**{name: torch.cat([getattr(one, name) for one in batches]) for name in fields})]


@pytest.mark.parametrize("scale", ["noscale", "scale"])
def test_by_tokens_micro_batches_make_no_difference(scale: str) -> None:
    layout = Layout.of(f"tokens {scale}")
    batches = list(local_batches(0, layout, 0))
    loss, found = gradients_of(layout, batches)
    # A single micro-batch is its own mean, under both rules.
    whole, expected = gradients_of(Layout.of(""), joined(batches))
    assert loss == pytest.approx(whole, rel=1e-12)
    torch.testing.assert_close(found, expected, rtol=1e-9, atol=1e-12)


def test_by_micro_batches_each_has_the_same_weight() -> None:
    layout = Layout.of("")
    batches = list(local_batches(0, layout, 0))
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
    (batch,) = joined(list(local_batches(0, layout, 0)))
    batch.loss_mask.zero_()
    loss, found = gradients_of(layout, [batch])
    assert loss == 0.0
    assert not found.any()


@pytest.mark.parametrize(
    "losses",
    one_in(
        2,
        ["seq_aux_loss --moe-aux-loss-coeff 0.2 --moe-z-loss-coeff 0.1", "aux_loss --moe-aux-loss-coeff 0.3"],
    ),
)
def test_by_tokens_losses_of_routers_count_all_tokens_over_the_tokens_that_count(losses: str) -> None:
    """As in Megatron-LM: each micro-batch's loss times its tokens, masked or not, over the step's counted tokens."""
    flags = f"--moe-router-load-balancing-type {losses}".split()
    means, batches = Layout.of("mixtral"), list(local_batches(0, Layout.of(""), 0))
    counted = torch.tensor([batch.loss_mask.sum().item() for batch in batches])
    expected = torch.zeros(())
    for batch, count in zip(batches, counted.tolist(), strict=True):
        _, of_tokens = gradients_of(means, [batch])
        _, of_both = gradients_of(means, [batch], *flags)
        expected = expected + count * of_tokens + batch.tokens.numel() * (of_both - of_tokens)
    _, found = gradients_of(Layout.of("mixtral tokens scale"), batches, *flags)
    torch.testing.assert_close(found, expected / counted.sum(), rtol=1e-9, atol=1e-12)
