"""The gated delta rule in chunks against its recurrence, token by token, and the convolution against torch's."""

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from megatrain.kernels.gated_delta import (
    causal_convolution,
    continue_gated_delta_rule,
    delta_rule,
)

DOCUMENTS = torch.tensor([[0] * 3 + [1] * 8 + [2] * 2, [5] * 8 + [6] + [7] * 4]).t()
"""Documents of two samples of 13 tokens: within a chunk of 4, at its boundary, of a single token."""
TWO_SAMPLES = [(sample, document) for sample in (0, 1) for document in DOCUMENTS[:, sample].unique()]


def drawn(*shape: int, seed: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def recurrence(q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor) -> Tensor:
    state = q.new_zeros(*q.shape[1:], v.shape[-1])
    outputs = []
    for t in range(q.shape[0]):
        state = state * g[t].exp()[..., None, None]
        error = v[t] - (state * k[t].unsqueeze(-1)).sum(-2)
        state = state + beta[t][..., None, None] * k[t].unsqueeze(-1) * error.unsqueeze(-2)
        outputs.append((state * q[t].unsqueeze(-1)).sum(-2))
    return torch.stack(outputs)


@pytest.mark.parametrize(("s", "chunk"), [(16, 4), (13, 4), (5, 64), (1, 64), (70, 64)])
def test_chunks_compute_the_recurrence_and_its_gradients(s: int, chunk: int) -> None:
    q, k, v = (drawn(s, 2, 3, d, seed=seed) for seed, d in enumerate((4, 4, 6)))
    inputs = [
        F.normalize(q, dim=-1),
        F.normalize(k, dim=-1),
        v,
        -F.softplus(drawn(s, 2, 3, seed=3)),
        drawn(s, 2, 3, seed=4).sigmoid(),
    ]
    leaves = [x.detach().requires_grad_() for x in inputs]
    (out, _), expected = continue_gated_delta_rule(*leaves, None, chunk=chunk), recurrence(*leaves)
    torch.testing.assert_close(out, expected, rtol=1e-10, atol=1e-12)
    dout = drawn(*out.shape, seed=5)
    found = torch.autograd.grad(out, leaves, dout)
    for one, other in zip(found, torch.autograd.grad(expected, leaves, dout), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-9, atol=1e-11)


def test_channels_with_a_decay_each_compute_the_recurrence_and_its_gradients() -> None:
    q, k, e, g = (drawn(21, 2, 3, 4, seed=seed) for seed in range(4))
    leaves = [x.requires_grad_() for x in (q, k, drawn(21, 2, 3, 6, seed=4), -2 * F.softplus(g), e / 3)]
    out, state = delta_rule(*leaves, chunk=4)
    expected = torch.zeros(2, 3, 4, 6, dtype=torch.float64)
    outputs = []
    for q, k, w, g, e in zip(*leaves, strict=True):
        expected = expected * g.exp().unsqueeze(-1)
        error = w - (expected * e.unsqueeze(-1)).sum(-2)
        expected = expected + k.unsqueeze(-1) * error.unsqueeze(-2)
        outputs.append((expected * q.unsqueeze(-1)).sum(-2))
    torch.testing.assert_close(out, torch.stack(outputs), rtol=1e-10, atol=1e-12)
    torch.testing.assert_close(state, expected, rtol=1e-10, atol=1e-12)
    dout = drawn(*out.shape, seed=5)
    found = torch.autograd.grad(out, leaves, dout)
    for one, other in zip(found, torch.autograd.grad(torch.stack(outputs), leaves, dout), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-9, atol=1e-11)


@pytest.mark.parametrize("per_channel", [False, True])
def test_a_document_computes_what_it_does_alone(*, per_channel: bool) -> None:
    q, k, w, e = (drawn(13, 2, 3, d, seed=seed) for seed, d in enumerate((4, 4, 6, 4)))
    g = -F.softplus(drawn(13, 2, 3, *([4] if per_channel else []), seed=4))
    leaves = [x.requires_grad_() for x in (q, k, w, g, e / 3)]
    out, state = delta_rule(*leaves, document_ids=DOCUMENTS, chunk=4)
    for sample, document in TWO_SAMPLES:
        tokens = DOCUMENTS[:, sample] == document
        alone, last = delta_rule(*(x[tokens, sample : sample + 1] for x in leaves), chunk=4)
        torch.testing.assert_close(out[tokens, sample : sample + 1], alone, rtol=1e-10, atol=1e-12)
    torch.testing.assert_close(state[1:], last, rtol=1e-10, atol=1e-12)
    before = torch.autograd.grad(out[11:, 0].sum(), leaves, retain_graph=True)
    assert all(gradient[:11].abs().max() == 0 and gradient[11:].abs().max() > 0 for gradient in before)


def test_the_first_document_continues_the_state() -> None:
    q, k, v = (drawn(13, 2, 3, d, seed=seed) for seed, d in enumerate((4, 4, 6)))
    k, g, beta = (
        F.normalize(k, dim=-1),
        -F.softplus(drawn(13, 2, 3, seed=3)),
        drawn(13, 2, 3, seed=4).sigmoid(),
    )
    arguments = (q, k, v, g, beta)
    expected, _ = continue_gated_delta_rule(*arguments, None, document_ids=DOCUMENTS, chunk=4)
    state, outputs = None, []
    for rows in (slice(0, 2), slice(2, 13)):
        parts = (x[rows] for x in arguments)
        out, state = continue_gated_delta_rule(*parts, state, document_ids=DOCUMENTS[rows], chunk=4)
        outputs.append(out)
    torch.testing.assert_close(torch.cat(outputs), expected, rtol=1e-10, atol=1e-12)


def test_a_strong_decay_does_not_overflow() -> None:
    q, k, v = (drawn(64, 1, 1, 4, seed=seed).float() for seed in range(3))
    out, _ = continue_gated_delta_rule(q, k, v, torch.full((64, 1, 1), -50.0), torch.ones(64, 1, 1), None)
    torch.testing.assert_close(out, (q * k).sum(-1, keepdim=True) * v)  # only the token's own write is left


def test_the_convolution_reads_earlier_tokens_only() -> None:
    x, weight = drawn(9, 2, 5, seed=0), drawn(5, 3, seed=1)
    expected = F.conv1d(x.permute(1, 2, 0), weight.unsqueeze(1), padding=2, groups=5)[..., :9]
    torch.testing.assert_close(causal_convolution(x, weight), expected.permute(2, 0, 1))


def test_the_convolution_stays_in_a_document() -> None:
    x, weight = drawn(13, 2, 5, seed=0), drawn(5, 4, seed=1)
    out = causal_convolution(x, weight, DOCUMENTS)
    for sample, document in TWO_SAMPLES:
        tokens = DOCUMENTS[:, sample] == document
        alone = causal_convolution(x[tokens, sample : sample + 1], weight)
        torch.testing.assert_close(out[tokens, sample : sample + 1], alone)
