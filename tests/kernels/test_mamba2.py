"""Mamba-2's scan in chunks equals the recurrence token by token; documents are apart; gradients equal differences."""

from itertools import pairwise

import pytest
import torch
from torch import Tensor
from torch.autograd import gradcheck
from torch.nn import functional as F

from megatrain.kernels.mamba2 import gated_norm, mamba2_scan

BOUNDARIES = (0, 3, 9, 13, 13 + 7, 26)
"""Of the documents of two samples of 13 tokens."""


def drawn(s: int, heads: int = 4, groups: int = 2, b: int = 2) -> tuple[Tensor, ...]:
    random = torch.Generator().manual_seed(s)

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=random, dtype=torch.float64)

    dt, a = F.softplus(normal(b, s, heads)), -normal(heads).exp()
    return normal(b, s, heads, 3), dt, a, normal(b, s, groups, 5), normal(b, s, groups, 5), normal(heads)


def recurrence(x: Tensor, dt: Tensor, a: Tensor, b: Tensor, c: Tensor, d: Tensor) -> tuple[Tensor, Tensor]:
    samples, s, n, p = x.shape
    b, c = (tensor.repeat_interleave(n // tensor.shape[2], dim=2) for tensor in (b, c))
    state = x.new_zeros(samples, n, p, b.shape[-1])
    out = []
    for t in range(s):
        write = torch.einsum("zn,znp,znm->znpm", dt[:, t], x[:, t], b[:, t])
        state = (dt[:, t] * a).exp()[..., None, None] * state + write
        out.append(torch.einsum("znpm,znm->znp", state, c[:, t]) + d[:, None] * x[:, t])
    return torch.stack(out, dim=1), state


@pytest.mark.parametrize("s", [1, 13, 64, 130])
def test_chunks_are_the_recurrence(s: int) -> None:
    arguments = drawn(s)
    for found, expected in zip(mamba2_scan(*arguments), recurrence(*arguments), strict=True):
        torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-12)


def test_a_state_continues_a_sample() -> None:
    x, dt, a, b, c, d = drawn(130)
    whole, last = mamba2_scan(x, dt, a, b, c, d)
    parts = [(0, 70), (70, 71), (71, 130)]
    state, found = None, []
    for first, stop in parts:
        x_part, dt_part, b_part, c_part = (tensor[:, first:stop] for tensor in (x, dt, b, c))
        y, state = mamba2_scan(x_part, dt_part, a, b_part, c_part, d, initial_state=state)
        found.append(y)
    torch.testing.assert_close(torch.cat(found, dim=1), whole, rtol=1e-12, atol=1e-12)
    assert state is not None
    torch.testing.assert_close(state, last, rtol=1e-12, atol=1e-12)


def test_documents_are_apart() -> None:
    x, dt, a, b, c, d = drawn(13)
    found, last = mamba2_scan(x, dt, a, b, c, d, cu_seqlens=torch.tensor(BOUNDARIES, dtype=torch.int32))
    for first, stop in pairwise(BOUNDARIES):
        x_part, dt_part, b_part, c_part = (tensor.flatten(0, 1)[None, first:stop] for tensor in (x, dt, b, c))
        y, state = recurrence(x_part, dt_part, a, b_part, c_part, d)
        torch.testing.assert_close(found.flatten(0, 1)[None, first:stop], y, rtol=1e-12, atol=1e-12)
        if stop % 13 == 0:
            torch.testing.assert_close(last[stop // 13 - 1], state[0], rtol=1e-12, atol=1e-12)


def test_gradients_are_those_of_differences() -> None:
    arguments = [tensor.requires_grad_() for tensor in drawn(7)]
    boundaries = torch.tensor((0, 2, 7, 14), dtype=torch.int32)
    assert gradcheck(lambda *given: mamba2_scan(*given, cu_seqlens=boundaries), arguments)


def test_the_norm_is_of_each_group() -> None:
    y, z, weight = (
        torch.randn(2, 3, 8, dtype=torch.float64),
        torch.randn(2, 3, 8, dtype=torch.float64),
        torch.rand(8),
    )
    found = gated_norm(y, z, weight, 2, 1e-5)
    gated = y * z * z.sigmoid()
    expected = (
        torch.cat([F.rms_norm(part, (4,), eps=1e-5) for part in gated.split(4, dim=-1)], dim=-1) * weight
    )
    torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-12)
