"""flash-attn-4 writes into tensors laid out for the next operation; a stand-in computes its results."""

import itertools
from typing import Any

import pytest
import torch
from torch import Tensor

from megatrain.kernels.attention import backends
from megatrain.kernels.attention.backends import Flash4
from megatrain.kernels.attention.eager import EagerAttention
from megatrain.kernels.attention.flash4 import Flash4Functions, determinism_options
from megatrain.kernels.attention.interface import CuSeqlens, MaskSpec
from megatrain.kernels.qkv import fused_view

SCALE = 0.5
EAGER = EagerAttention(scale=SCALE)
S, B, D = 6, 2, 4
ENDS = (0, 2, 6, 7, 12)
"""Cumulative lengths of documents in two concatenated samples."""


@pytest.fixture(autouse=True)
def _stand_in(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(backends, "flash4", lambda: Flash4Functions(forward, backward))


def forward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    out: Tensor,
    lse: Tensor,
    softmax_scale: float,
    causal: bool,
    **options: Any,
) -> None:
    assert softmax_scale == SCALE
    for rows, lse_rows in documents(options, lse):
        found, sums = EAGER.forward(*(rows(x) for x in (q, k, v)), MaskSpec(is_causal=causal))
        rows(out).copy_(found)
        lse_rows(lse).copy_(sums.permute(1, 2, 0))


def backward(
    q: Tensor, k: Tensor, v: Tensor, out: Tensor, dout: Tensor, lse: Tensor,
    *, dq: Tensor, dk: Tensor, dv: Tensor, softmax_scale: float, causal: bool, deterministic: bool, **options: Any,
) -> None:  # fmt: skip
    assert deterministic == torch.are_deterministic_algorithms_enabled()
    assert softmax_scale == SCALE
    for rows, lse_rows in documents(options, lse):
        given = [rows(x) for x in (dout, q, k, v, out)]
        found = EAGER.backward(*given, lse_rows(lse).permute(2, 0, 1), MaskSpec(is_causal=causal))
        for into, gradient in zip((dq, dk, dv), found, strict=True):
            rows(into).copy_(gradient)


def documents(options: dict[str, Any], lse: Tensor) -> list[Any]:
    """Return per document, or for all samples, functions that view [b, s, n, d] or [t, n, d] as [s, b, n, d], and an lse as [b, n, s]."""
    if "cu_seqlens_q" not in options:
        assert lse.dim() == 3
        return [(lambda x: x.transpose(0, 1), lambda x: x)]
    ends = options["cu_seqlens_q"].tolist()
    assert (options["max_seqlen_q"], options["max_seqlen_k"], lse.dim()) == (S, S, 2)
    parts = [slice(*two) for two in itertools.pairwise(ends)]
    return [(lambda x, p=p: x[p].unsqueeze(1), lambda x, p=p: x[:, p].unsqueeze(0)) for p in parts]


@pytest.mark.parametrize("groups", [1, 2, 4])
@pytest.mark.parametrize("has_documents", [False, True])
def test_results_have_the_layout_of_the_projection(groups: int, has_documents: bool) -> None:
    torch.manual_seed(0)
    sizes = (4, groups, groups)
    qkv, dout = torch.randn(S, B, 4 + 2 * groups, D).double(), torch.randn(S, B, 4, D).double()
    q, k, v = qkv.split(sizes, dim=2)
    ends = torch.tensor(ENDS, dtype=torch.int32)
    spec = MaskSpec(is_causal=True, cu_seqlens=CuSeqlens(ends, ends, S, S) if has_documents else None)
    out, lse = Flash4(SCALE).forward(q, k, v, spec)
    gradients = Flash4(SCALE).backward(dout, q, k, v, out, lse, spec)
    parts = [slice(a, b) for a, b in itertools.pairwise(ENDS)] if has_documents else None
    expected = one_by_one(q, k, v, dout, parts or [slice(0, S), slice(S, 2 * S)])
    for found, reference in zip((out, lse.double(), *gradients), expected, strict=True):
        torch.testing.assert_close(found, reference, rtol=1e-6, atol=1e-6)
    if not has_documents:
        assert out.is_contiguous()
        assert fused_view(gradients) is not None


def one_by_one(q: Tensor, k: Tensor, v: Tensor, dout: Tensor, parts: list[slice]) -> list[Tensor]:
    """Return output, log-sum-exp and gradients of parts of the concatenated samples."""
    flat = [x.transpose(0, 1).reshape(B * S, 1, -1, D) for x in (q, k, v, dout)]
    results: list[list[Tensor]] = []
    for part in parts:
        one, two, three, upstream = (x[part] for x in flat)
        out, lse = EAGER.forward(one, two, three, MaskSpec(is_causal=True))
        gradients = EAGER.backward(upstream, one, two, three, out, lse, MaskSpec(is_causal=True))
        results.append([out, lse, *gradients])
    whole = [torch.cat(pieces).squeeze(1) for pieces in zip(*results, strict=True)]
    return [x.unflatten(0, (B, S)).transpose(0, 1) for x in whole]


def test_blocks_with_more_keys_than_queries() -> None:
    torch.manual_seed(1)
    q, dout = torch.randn(S, B, 4, D).double(), torch.randn(S, B, 4, D).double()
    k, v = torch.randn(2, 2 * S, B, 2, D).double()
    spec = MaskSpec()
    out, lse = Flash4(SCALE).forward(q, k, v, spec)
    found = (out, lse.double(), *Flash4(SCALE).backward(dout, q, k, v, out, lse, spec))
    expected_out, expected_lse = EAGER.forward(q, k, v, spec)
    expected = EAGER.backward(dout, q, k, v, expected_out, expected_lse, spec)
    for one, other in zip(found, (expected_out, expected_lse, *expected), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-6, atol=1e-6)


def test_the_backward_pass_follows_torchs_deterministic_mode() -> None:
    assert determinism_options() == {"deterministic": False}
    torch.use_deterministic_algorithms(mode=True)
    try:
        assert determinism_options() == {"deterministic": True}
        test_results_have_the_layout_of_the_projection(groups=2, has_documents=False)
    finally:
        torch.use_deterministic_algorithms(mode=False)
