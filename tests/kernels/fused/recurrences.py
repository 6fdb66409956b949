"""The recurrences that chunked scans compute, token by token in fp64: the oracles of their tests."""

import torch
from torch import Tensor


def mamba2_recurrence(
    x: Tensor, dt: Tensor, a: Tensor, b: Tensor, c: Tensor, d: Tensor, starts: list[int], state: Tensor | None
) -> tuple[Tensor, Tensor]:
    """x [b, s, n, p], dt [b, s, n], B and C [b, s, g, m] -> y and the last state [b, n, p, m].

    `starts`: tokens of the concatenated samples at which the state is 0. The state before a sample is `state`, or 0.
    """
    samples, s, n, p = x.shape
    b, c = (tensor.repeat_interleave(n // tensor.shape[2], dim=2) for tensor in (b, c))
    ys, lasts = [], []
    for sample in range(samples):
        now = x.new_zeros(n, p, b.shape[-1]) if state is None else state[sample]
        for t in range(s):
            now = now * (t == 0 or sample * s + t not in starts)
            write = (dt[sample, t, :, None] * x[sample, t])[:, :, None] * b[sample, t, :, None]
            now = (dt[sample, t] * a).exp()[:, None, None] * now + write
            ys.append((now * c[sample, t, :, None]).sum(-1) + d[:, None] * x[sample, t])
        lasts.append(now)
    return torch.stack(ys).view(x.shape), torch.stack(lasts)


def delta_recurrence(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, starts: list[int], state: Tensor | None
) -> tuple[Tensor, Tensor]:
    """q and k [s, b, nk, dk], v [s, b, n, dv], g and beta [s, b, n] -> outputs and the last state [b, n, dk, dv].

    `starts` and `state` are those of `mamba2_recurrence`.
    """
    s, samples, n, dv = v.shape
    q, k = (tensor.repeat_interleave(n // tensor.shape[2], dim=2) for tensor in (q, k))
    outputs, lasts = [], []
    for sample in range(samples):
        now = v.new_zeros(n, q.shape[-1], dv) if state is None else state[sample]
        for t in range(s):
            key, query = k[t, sample, :, :, None], q[t, sample, :, :, None]
            now = now * (t == 0 or sample * s + t not in starts)
            now = g[t, sample].exp()[:, None, None] * now
            new = beta[t, sample, :, None] * (v[t, sample] - (now * key).sum(1))
            now = now + key * new[:, None]
            outputs.append((now * query).sum(1))
        lasts.append(now)
    return torch.stack(outputs).view(samples, s, n, dv).transpose(0, 1), torch.stack(lasts)


def convolution_sums(
    x: Tensor, weight: Tensor, bias: Tensor | None, starts: list[int], before: Tensor | None
) -> Tensor:
    """Sum of each channel's last tokens, x [b, s, c] and weight [c, width], before the activation."""
    (samples, s, _), width = x.shape, weight.shape[1]
    if before is None:
        before = x.new_zeros(samples, width - 1, x.shape[2])
    padded = torch.cat((before, x), dim=1)
    rows = []
    for sample in range(samples):
        document = 1 - width
        for t in range(s):
            document = t if t > 0 and sample * s + t in starts else document
            row = x.new_zeros(x.shape[2]) if bias is None else bias
            for back in range(width):
                if t - back >= document:
                    row = row + weight[:, width - 1 - back] * padded[sample, t + width - 1 - back]
            rows.append(row)
    return torch.stack(rows).view(x.shape)
