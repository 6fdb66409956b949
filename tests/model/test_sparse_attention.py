"""Sparse attention: the keys of the largest scores, and the loss of the indexer, against their formulas in fp64."""

from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import torch

from megatrain.config.model_spec.attention import IndexerSpec
from megatrain.model.families import sparse_attention
from megatrain.tools.parity.measure import engine_of, gradients_of, local_batches, tiny_plan
from megatrain.tools.parity.rows import Layout

S, B, HEADS, CHANNELS = 11, 2, 3, 4


@pytest.mark.parametrize("has_sparse_loss", [False, True])
def test_the_indexer_computes_the_formulas_of_the_paper(
    has_sparse_loss: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """KL(target || softmax of sum_h w_h relu(q_h k)), over all earlier keys or the selected ones; a few queries at a time."""
    monkeypatch.setattr(sparse_attention, "_PAIRS", 3 * B * HEADS * S)
    spec = IndexerSpec(
        num_heads=HEADS, head_dim=CHANNELS, top_k=4, norm_epsilon=1e-6, loss_coeff=0.3, has_sparse_loss=has_sparse_loss
    )  # fmt: skip
    torch.manual_seed(0)
    q = torch.randn(S, B, HEADS, CHANNELS, dtype=torch.float64, requires_grad=True)
    k = torch.randn(S, B, CHANNELS, dtype=torch.float64, requires_grad=True)
    weights = torch.randn(S, B, HEADS, dtype=torch.float64, requires_grad=True)
    attention = torch.randn(B, S, S, dtype=torch.float64)

    def target(rows: slice, is_compared: torch.Tensor) -> torch.Tensor:
        scores = attention[:, rows, : is_compared.shape[-1]].masked_fill(~is_compared, float("-inf"))
        return scores.softmax(-1)

    selected, loss = sparse_attention._Selection.apply(q, k, weights, spec, target)
    found = torch.autograd.grad(2 * loss, (q, k, weights))
    for count in (1, 5, S):
        last = sparse_attention.selected_keys(q[-count:], k, weights[-count:], spec)
        assert torch.equal(last, selected[:, -count:])

    expected = torch.zeros((), dtype=torch.float64)
    for b in range(B):
        for s in range(S):
            keys = k[: s + 1, b]
            scores = sum(weights[s, b, h] * (keys @ q[s, b, h]).relu() for h in range(HEADS))
            scores = scores / (HEADS * CHANNELS) ** 0.5
            best = scores.sort(descending=True, stable=True).indices[:4]
            assert selected[b, s].nonzero().flatten().tolist() == sorted(best.tolist())
            compared = best.sort().values if has_sparse_loss else torch.arange(s + 1)
            p, log_q = attention[b, s][compared].softmax(-1), scores[compared].log_softmax(-1)
            expected = expected + 0.3 * (p * (p.log() - log_q)).sum() / (S * B)
    assert float(loss.detach()) == pytest.approx(float(expected.detach()), rel=1e-7)
    for ours, formula in zip(found, torch.autograd.grad(2 * expected, (q, k, weights)), strict=True):
        torch.testing.assert_close(ours, formula, rtol=1e-6, atol=1e-9)


def test_the_loss_of_the_indexer_trains_the_indexer_alone() -> None:
    """Inputs of the indexer pass no gradient on, and attention passes none to the indexer."""
    layout = Layout.of("dsa")
    trained, idle = (_gradients(layout, coeff) for coeff in ("0.5", "0"))
    assert trained.keys() == idle.keys()
    for name, values in trained.items():
        if ".index_" in name:
            assert values.any()
            assert not idle[name].any()
        else:
            assert (values == idle[name]).all(), name


@pytest.mark.parametrize("words", ["dsa", "dsa uniform"])
def test_the_logged_loss_is_a_mean_over_layers_and_micro_batches_without_its_coefficient(
    words: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Recomputed passes do not count twice."""
    layout, found, forward = Layout.of(words), set[float](), sparse_attention.Indexer.forward

    def noted(self: sparse_attention.Indexer, *args: Any) -> Any:
        selected, loss = forward(self, *args)
        found.add(float(loss.detach()) / self.spec.loss_coeff)
        return selected, loss

    monkeypatch.setattr(sparse_attention.Indexer, "forward", noted)
    logged = []
    for coeff in ("0.5", "0.25"):
        engine = engine_of(tiny_plan(layout, 1, "--dsa-indexer-loss-coeff", coeff), 0)
        losses = engine.accumulate_gradients(list(local_batches(0, layout, 0)), first_sample=0)
        assert losses.indexer_loss is not None
        logged.append(float(losses.indexer_loss))
    assert logged == pytest.approx([sum(found) / len(found)] * 2, rel=1e-12)


def _gradients(layout: Layout, loss_coeff: str) -> dict[str, npt.NDArray[np.float64]]:
    engine = engine_of(tiny_plan(layout, 1, "--dsa-indexer-loss-coeff", loss_coeff), 0)
    engine.accumulate_gradients(list(local_batches(0, layout, 0)), first_sample=0)
    return {part.name: part.values for part in gradients_of(engine)}
