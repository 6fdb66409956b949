"""The gated delta rule in chunks against its recurrence, token by token, and the convolution against torch's."""

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from megatrain.kernels.gated_delta import causal_convolution, gated_delta_rule


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
    out, expected = gated_delta_rule(*leaves, chunk), recurrence(*leaves)
    torch.testing.assert_close(out, expected, rtol=1e-10, atol=1e-12)
    dout = drawn(*out.shape, seed=5)
    found = torch.autograd.grad(out, leaves, dout)
    for one, other in zip(found, torch.autograd.grad(expected, leaves, dout), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-9, atol=1e-11)


def test_a_strong_decay_does_not_overflow() -> None:
    q, k, v = (drawn(64, 1, 1, 4, seed=seed).float() for seed in range(3))
    out = gated_delta_rule(q, k, v, torch.full((64, 1, 1), -50.0), torch.ones(64, 1, 1))
    torch.testing.assert_close(out, (q * k).sum(-1, keepdim=True) * v)  # only the token's own write is left


def test_the_convolution_reads_earlier_tokens_only() -> None:
    x, weight = drawn(9, 2, 5, seed=0), drawn(5, 3, seed=1)
    expected = F.conv1d(x.permute(1, 2, 0), weight.unsqueeze(1), padding=2, groups=5)[..., :9]
    torch.testing.assert_close(causal_convolution(x, weight), expected.permute(2, 0, 1))
