"""The scan of Mamba-2, and the gated norm after it.

    S_t = exp(dt_t A) S_(t-1) + dt_t x_t B_t^T        state [p, m] of each head, 0 before its document
    y_t = S_t C_t + D x_t

In chunks as the gated delta rule (`kernels.gated_delta`), without erasures: torch operators, differentiated by autograd, in the
accumulation dtype, on any device. GPUs have fused kernels of the scan for 16-bit inputs (`fused/scans/mamba2.py`), and of the norm.

Source: Dao and Gu, Transformers are SSMs, arXiv:2405.21060, section 6.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn import functional as F

from megatrain.kernels.dtypes import accumulation_dtype
from megatrain.kernels.fused.launching import is_fused
from megatrain.kernels.fused.scans import gated_norm as fused_norm
from megatrain.kernels.fused.scans import mamba2 as fused
from megatrain.kernels.fused.scans.chunks import has_kernel
from megatrain.kernels.gated_delta import delta_rule
from megatrain.kernels.qkv import Place


def mamba2_scan(
    x: Tensor,
    dt: Tensor,
    A: Tensor,  # noqa: N803 (the names of the paper)
    B: Tensor,  # noqa: N803
    C: Tensor,  # noqa: N803
    D: Tensor,  # noqa: N803
    *,
    cu_seqlens: Tensor | None = None,
    initial_state: Tensor | None = None,
    places: Sequence[Place] | None = None,
) -> tuple[Tensor, Tensor]:
    """Scan the tokens of samples.

    Args:
        x: [b, s, n, p].
        dt: step sizes, above 0, [b, s, n].
        A: [n], below 0.
        B, C: [b, s, g, m]; head h reads group h g // n.
        D: [n].
        cu_seqlens: boundaries of documents in the concatenated samples, from 0 to b * s, which no state crosses;
            None: each sample is one document.
        initial_state: state before the first token of each sample, [b, n, p, m], for its first document; None: 0.
        places: where kernels write the gradients of x, B and C, as [s, b, n p] and [s, b, g m]; None: anywhere.
    Returns:
        y [b, s, n, p] in the dtype of x, and the state after the last token in the accumulation dtype.
    """
    if has_kernel(x, x.shape[-1], B.shape[-1]):
        return fused.mamba2_scan(
            x, dt, A, B, C, D, cu_seqlens=cu_seqlens, initial_state=initial_state, places=places
        )
    dtype = accumulation_dtype(x.dtype)
    wide, dt = x.to(dtype).transpose(0, 1), dt.to(dtype).transpose(0, 1)
    k, q = (
        of_groups.transpose(0, 1).repeat_interleave(x.shape[2] // B.shape[2], dim=2) for of_groups in (B, C)
    )
    state = None if initial_state is None else initial_state.transpose(-1, -2)
    ids = None if cu_seqlens is None else document_ids(cu_seqlens, x.shape[0], x.shape[1])
    y, state = delta_rule(q, k, dt.unsqueeze(-1) * wide, dt * A.to(dtype), None, state, document_ids=ids)
    y = y + D.to(dtype).unsqueeze(-1) * wide
    return y.transpose(0, 1).to(x.dtype), state.transpose(-1, -2)


def document_ids(cu_seqlens: Tensor, b: int, s: int) -> Tensor:
    """Return the document of each token, [s, b], from the boundaries in the concatenated samples."""
    tokens = torch.arange(b * s, device=cu_seqlens.device)
    ids: Tensor = torch.bucketize(tokens, cu_seqlens, right=True).view(b, s).t()
    return ids


def gated_norm(
    y: Tensor, gate: Tensor, weight: Tensor, num_groups: int, eps: float, *, gate_place: Place | None = None
) -> Tensor:
    """Return the RMSNorm of y SiLU(gate) over each group of channels, times the weight: y, gate [..., d], weight [d].

    A kernel writes the gradient of the gate into its place, if given.
    """
    if is_fused(y):
        return fused_norm.gated_norm(y, gate, weight, num_groups, eps, gate_place)
    dtype = accumulation_dtype(y.dtype)
    gated = (y.to(dtype) * F.silu(gate.to(dtype))).unflatten(-1, (num_groups, -1))
    normed = gated * torch.rsqrt(gated.square().mean(-1, keepdim=True) + eps)
    out: Tensor = (normed.flatten(-2) * weight.to(dtype)).to(y.dtype)
    return out
