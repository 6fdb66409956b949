"""The gated delta rule: linear attention whose state forgets by a decay and replaces what it stored under a key.

    S_t = exp(g_t) S_(t-1) + beta_t k_t (v_t - exp(g_t) S_(t-1)^T k_t)^T        state [dk, dv] of each head
    o_t = S_t^T q_t

Chunks of tokens are GEMMs; only the state passes from chunk to chunk. With the sums c_i of g within a chunk
and D_ij = exp(c_i - c_j) for j <= i, the values that a chunk writes solve a triangular system:

    (I + beta (K K^T * D) below the diagonal) (U, W) = (beta V, beta exp(c) K)        V' = U - W S
    O = exp(c) Q S + (Q K^T * D) V'                     S <- exp(c_last) S + (exp(c_last - c) K)^T V'

torch operators, differentiated by autograd, in the accumulation dtype, on any device.

Source: Yang et al., Gated Delta Networks, arXiv:2412.06464; the chunks: arXiv:2406.06484.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F

from megatrain.kernels.dtypes import accumulation_dtype

CHUNK = 64
"""Tokens of a chunk."""


def gated_delta_rule(q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, chunk: int = CHUNK) -> Tensor:
    """Apply the rule to whole sequences, from an empty state: see `continue_gated_delta_rule`."""
    return continue_gated_delta_rule(q, k, v, g, beta, None, chunk)[0]


def continue_gated_delta_rule(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, state: Tensor | None, chunk: int = CHUNK
) -> tuple[Tensor, Tensor]:
    """Apply the rule to the next tokens of sequences.

    Args:
        q, k: [s, b, n, dk], normalized and scaled by the caller.
        v: [s, b, n, dv].
        g: logarithm of the decay, at most 0, [s, b, n].
        beta: strength of a write, 0 to 1, [s, b, n].
        state: state after the tokens before, [b, n, dk, dv] in the accumulation dtype; None: empty.
        chunk: tokens of a chunk.
    Returns:
        Outputs [s, b, n, dv] in the dtype of v, and the state after the last token.
    """
    s, dtype = q.shape[0], accumulation_dtype(v.dtype)
    chunk = min(chunk, s)
    q, k, wide_v = (_chunks(x.to(dtype), chunk) for x in (q, k, v))
    decay, beta = (_chunks(x.to(dtype).unsqueeze(-1), chunk) for x in (g, beta))
    sums = _running_sums(decay)  # [b, n, chunks, c, 1]
    between = (sums - sums.transpose(-1, -2)).tril().exp().tril()
    system = (beta * k) @ k.transpose(-1, -2) * between
    right = torch.cat((beta * wide_v, beta * sums.exp() * k), dim=-1)
    written, read = torch.linalg.solve_triangular(system, right, upper=False, unitriangular=True).split(
        [v.shape[-1], k.shape[-1]], dim=-1
    )
    within = (q @ k.transpose(-1, -2)) * between
    q, last = q * sums.exp(), sums[..., -1:, :]
    k, last = k * (last - sums).exp(), last.exp()
    if state is None:
        state = q.new_zeros(*q.shape[:2], k.shape[-1], v.shape[-1])
    outputs = []
    for number in range(q.shape[2]):
        new = written[:, :, number] - read[:, :, number] @ state
        outputs.append(q[:, :, number] @ state + within[:, :, number] @ new)
        state = last[:, :, number] * state + k[:, :, number].transpose(-1, -2) @ new
    return torch.cat(outputs, dim=2)[:, :, :s].permute(2, 0, 1, 3).to(v.dtype), state


def causal_convolution(x: Tensor, weight: Tensor) -> Tensor:
    """Convolve each channel with its own kernel over its last tokens: x [s, b, c], weight [c, kernel size] -> [s, b, c].

    The last weight belongs to the token itself; tokens before the sequence are 0.
    """
    kernel_size = weight.shape[1]
    padded = F.pad(x, (0, 0, 0, 0, kernel_size - 1, 0))
    total = padded[: x.shape[0]] * weight[:, 0]
    for place in range(1, kernel_size):
        total = total + padded[place : place + x.shape[0]] * weight[:, place]
    return total


def _running_sums(x: Tensor) -> Tensor:
    """Return the sums of each row and all rows before it; `cumsum` has no deterministic kernel on GPUs."""
    shift = 1
    while shift < x.shape[-2]:
        x = x + F.pad(x[..., :-shift, :], (0, 0, shift, 0))
        shift *= 2
    return x


def _chunks(x: Tensor, chunk: int) -> Tensor:
    """[s, b, n, d] -> [b, n, chunks, chunk, d]; the last chunk is padded with zeros, which write nothing."""
    x = x.permute(1, 2, 0, 3)
    padded: Tensor = F.pad(x, (0, 0, 0, -x.shape[2] % chunk)).unflatten(2, (-1, chunk))
    return padded
