"""The gated delta rule: linear attention whose state forgets by a decay and replaces what it stored under a key.

    S_t = exp(g_t) S_(t-1) + k_t (w_t - (exp(g_t) S_(t-1))^T e_t)^T        state [dk, dv] of each head
    o_t = S_t^T q_t                                                       w = beta v,  e = beta k

The second variant (gated delta net 2) has a decay for each channel of keys, and gates per channel: w = write * v, e = erase * k.

Chunks of tokens are GEMMs; only the state passes from chunk to chunk. With the sums c_i of g within a chunk
and D_ij = exp(c_i - c_j) for j <= i in the same document, the values that a chunk writes solve a triangular system:

    (I + (E K^T * D) below the diagonal) (U, R) = (W, exp(c) E)        V' = U - R S
    O = exp(c) Q S + (Q K^T * D) V'                     S <- exp(c_last) S + (exp(c_last - c) K)^T V'

torch operators, differentiated by autograd, in the accumulation dtype, on any device. GPUs have fused kernels of the first
variant and of the convolution for 16-bit inputs (`fused/scans`).

Source: Yang et al., Gated Delta Networks, arXiv:2412.06464; the chunks: arXiv:2406.06484.
"""

from __future__ import annotations

import functools

import torch
from torch import Tensor
from torch.nn import functional as F

from megatrain.config.model_spec.activation import ActivationFunction
from megatrain.kernels.activations import SILU
from megatrain.kernels.dtypes import accumulation_dtype
from megatrain.kernels.fused.launching import is_fused
from megatrain.kernels.fused.scans import convolution
from megatrain.kernels.fused.scans import gated_delta as fused
from megatrain.kernels.fused.scans import unit_heads as fused_heads
from megatrain.kernels.qkv import Place

CHUNK = 64
"""Tokens of a chunk."""
_MIN_SQUARE = 1e-6
"""Added to the squared length of queries and keys."""
_CHANNEL_CHUNK = 16
"""Tokens of a chunk if each channel has its decay: the decays between its tokens are [c, c, dk]."""


def continue_gated_delta_rule(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    state: Tensor | None,
    *,
    document_ids: Tensor | None = None,
    chunk: int = CHUNK,
    place: Place | None = None,
) -> tuple[Tensor, Tensor]:
    """Apply the rule to the next tokens of sequences.

    Args:
        q, k: [s, b, nk, dk], normalized and scaled by the caller; n / nk consecutive heads of values share one.
        v: [s, b, n, dv].
        g: logarithm of the decay, at most 0, [s, b, n].
        beta: strength of a write, 0 to 1, [s, b, n].
        state: state after the tokens before, [b, n, dk, dv] in the accumulation dtype; None: empty.
        document_ids: document of each token, int [s, b], whose first token starts from an empty state; that of the first row
            continues `state`. None: each sequence is one document.
        chunk: tokens of a chunk.
        place: where kernels write the gradient of v, as [s, b, n dv]; None: anywhere.
    Returns:
        Outputs [s, b, n, dv] in the dtype of v, and the state after the last token.
    """
    if fused.has_rule_kernel(k, v):
        q, k = q.to(v.dtype), k.to(v.dtype)
        return fused.gated_delta_rule(q, k, v, g, beta, document_ids=document_ids, state=state, place=place)
    dtype = accumulation_dtype(v.dtype)
    q, k = (x.repeat_interleave(v.shape[2] // x.shape[2], dim=2) for x in (q, k))
    k, beta = k.to(dtype), beta.to(dtype).unsqueeze(-1)
    out, state = delta_rule(
        q, k, beta * v.to(dtype), g, beta * k, state, document_ids=document_ids, chunk=chunk
    )
    return out.to(v.dtype), state


def delta_rule(
    q: Tensor,
    k: Tensor,
    written: Tensor,
    g: Tensor,
    erased: Tensor | None,
    state: Tensor | None = None,
    *,
    document_ids: Tensor | None = None,
    chunk: int | None = None,
) -> tuple[Tensor, Tensor]:
    """Apply the rule with any writes and erasures: see `continue_gated_delta_rule`.

    Args:
        g: logarithm of the decay, [s, b, n], or of each channel of keys, [s, b, n, dk].
        written: values to be read under the keys, [s, b, n, dv].
        erased: keys under which the state loses what it has, [s, b, n, dk]; None: it only decays.
    Returns:
        Outputs and state in the accumulation dtype.
    """
    s, dtype = q.shape[0], accumulation_dtype(written.dtype)
    g = g.unsqueeze(-1) if g.dim() == k.dim() - 1 else g
    chunk = min(chunk or (CHUNK if g.shape[-1] == 1 else _CHANNEL_CHUNK), s)
    q, k, values = (_chunks(x.to(dtype), chunk) for x in (q, k, written))
    decay = _Decay(_chunks(g.double(), chunk), document_ids, dtype)
    within, read = decay.between(q, k), None
    if erased is not None:
        erased = _chunks(erased.to(dtype), chunk)
        right = torch.cat((values, decay.enter * erased), dim=-1)
        solved = torch.linalg.solve_triangular(
            decay.between(erased, k), right, upper=False, unitriangular=True
        )
        values, read = solved.split([written.shape[-1], k.shape[-1]], dim=-1)
    q, k, kept = q * decay.enter, k * decay.leave, decay.kept.transpose(-1, -2)
    if state is None:
        state = q.new_zeros(*q.shape[:2], k.shape[-1], written.shape[-1])
    outputs = []
    for number in range(q.shape[2]):
        new = values[:, :, number]
        if read is not None:
            new = new - read[:, :, number] @ state
        outputs.append(q[:, :, number] @ state + within[:, :, number] @ new)
        state = kept[:, :, number] * state + k[:, :, number].transpose(-1, -2) @ new
    return torch.cat(outputs, dim=2)[:, :, :s].permute(2, 0, 1, 3), state


class _Decay:
    """Decays within chunks, 0 between documents.

    Sums are fp64: small differences of large sums count, also in their gradients.

    Args:
        g: logarithms, fp64 [b, n, chunks, c, 1 or dk].
        document_ids: [s, b].

    Attributes:
        enter: from the start of the chunk to each token, [b, n, chunks, c, 1 or dk].
        leave: from each token to the end of the chunk, as `enter`.
        kept: of the whole chunk, [b, n, chunks, 1, 1 or dk].
    """

    def __init__(self, g: Tensor, document_ids: Tensor | None, dtype: torch.dtype) -> None:
        self._sums, self._dtype = _running_sums(g), dtype
        last = self._sums[..., -1:, :]
        enter, leave, kept = self._sums, last - self._sums, last
        self._mask = g.new_ones(g.shape[-2], g.shape[-2], dtype=torch.bool).tril()
        if document_ids is not None:
            ids = _document_chunks(document_ids, g.shape[-2])
            final = ids[..., -1:, :]
            before = torch.cat((ids[:, :, :1, :1], final[:, :, :-1]), dim=2)
            enter, leave = enter.where(ids == before, -torch.inf), leave.where(ids == final, -torch.inf)
            kept = kept.where(before == final, -torch.inf)
            self._mask = self._mask & (ids == ids.transpose(-1, -2))
        self.enter, self.leave, self.kept = (x.to(dtype).exp() for x in (enter, leave, kept))

    def between(self, x: Tensor, y: Tensor) -> Tensor:
        """Return the products of x_i and y_j, [b, n, chunks, c, dk], decayed from j to i; 0 for j > i: [b, n, chunks, c, c]."""
        if self._sums.shape[-1] == 1:
            return x @ y.transpose(-1, -2) * self._pairs.squeeze(-1)
        return torch.einsum("...id,...jd,...ijd->...ij", x, y, self._pairs)

    @functools.cached_property
    def _pairs(self) -> Tensor:
        """Decays from token j to i, [..., i, j, 1 or dk]; that of a token to itself is 1, without a gradient."""
        differences = self._sums.unsqueeze(-2) - self._sums.unsqueeze(-3)
        mask = self._mask.unsqueeze(-1)
        is_itself = torch.eye(mask.shape[-2], dtype=torch.bool, device=mask.device).unsqueeze(-1)
        return differences.masked_fill(is_itself, 0.0).where(mask, -torch.inf).to(self._dtype).exp()


def causal_convolution(x: Tensor, weight: Tensor, document_ids: Tensor | None = None) -> Tensor:
    """Convolve each channel with its own kernel over its last tokens: x [s, b, c], weight [c, kernel size] -> [s, b, c].

    The last weight belongs to the token itself; tokens before the sequence, or its document (int [s, b]), are 0.
    """
    s, kernel_size = x.shape[0], weight.shape[1]
    padded = F.pad(x, (0, 0, 0, 0, kernel_size - 1, 0))
    total = x * weight[:, -1]
    for distance in range(1, min(kernel_size, s)):
        earlier = padded[kernel_size - 1 - distance :][:s]
        if document_ids is not None:
            same = document_ids[distance:] == document_ids[:-distance]
            earlier = earlier * F.pad(same, (0, 0, distance, 0)).unsqueeze(-1)
        total = total + earlier * weight[:, -1 - distance]
    return total


def activated_convolution(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    activation: ActivationFunction,
    document_ids: Tensor | None = None,
    place: Place | None = None,
) -> Tensor:
    """Convolve, see `causal_convolution`, add a bias [c] and activate: [s, b, c] in the dtype of x, rounded once.

    A kernel writes the gradient of x into `place`, if given.
    """
    is_silu = activation.name == SILU.name and weight.shape[1] <= convolution.MAX_WIDTH
    if is_silu and is_fused(x) and x.element_size() == 2:
        y = convolution.causal_conv(
            x.transpose(0, 1), weight, bias, has_silu=True, document_ids=document_ids, place=place
        )
        return y.transpose(0, 1)
    dtype = accumulation_dtype(x.dtype)
    total = causal_convolution(x.to(dtype), weight.to(dtype), document_ids)
    activated: Tensor = activation.value(total if bias is None else total + bias)
    return activated.to(x.dtype)


def unit_heads(x: Tensor, scale: float, *, place: Place | None = None) -> Tensor:
    """Divide each head of x [s, b, n, d] by its length, and multiply by `scale`; in the dtype of x.

    A kernel writes the gradient of x into `place` [s, b, n d], if given.
    """
    if is_fused(x):
        return fused_heads.unit_heads(x, scale, _MIN_SQUARE, place)
    wide = x.to(accumulation_dtype(x.dtype))
    unit: Tensor = (wide * torch.rsqrt(wide.square().sum(-1, keepdim=True) + _MIN_SQUARE) * scale).to(x.dtype)
    return unit


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


def _document_chunks(ids: Tensor, chunk: int) -> Tensor:
    """[s, b] -> [b, 1, chunks, chunk, 1]; the last document continues through the padding."""
    padding = -len(ids) % chunk
    padded = torch.cat((ids, ids[-1:].expand(padding, -1))) if padding else ids
    chunks: Tensor = padded.t().unflatten(1, (-1, chunk))
    return chunks[:, None, ..., None]
