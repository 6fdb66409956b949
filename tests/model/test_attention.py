"""Core attention: documents packed into samples see themselves alone."""

import itertools

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from megatrain.model.implementations.local_attention import LocalCoreAttention
from megatrain.model.specs import AttentionSpec
from megatrain.parallel.batch import Documents, PassInfo

S, B, HEADS, GROUPS, D = 24, 2, 4, 2, 16
BORDERS = [0, 1, 9, 24, 24, 40, 48]
"""Of the samples laid end to end: a document of one token, one that fills half a sample, an empty one."""


def attend(
    x: tuple[Tensor, ...], documents: Documents | None, upstream: Tensor
) -> tuple[Tensor, list[Tensor]]:
    """The output [s, b, n d] and the gradients of q, k and v."""
    q, k, v = (one.clone().requires_grad_() for one in x)
    core = LocalCoreAttention(AttentionSpec(num_heads=HEADS, num_query_groups=GROUPS, head_channels=D))
    out = core(q, k, v, PassInfo(documents=documents))
    out.backward(upstream)
    return out.detach(), [one.grad for one in (q, k, v) if one.grad is not None]


def inputs(device: str, dtype: torch.dtype) -> tuple[tuple[Tensor, ...], Documents, Tensor]:
    torch.manual_seed(0)
    x = tuple(torch.randn(S, B, n, D, dtype=torch.float64) for n in (HEADS, GROUPS, GROUPS))
    upstream = torch.randn(S, B, HEADS * D, dtype=torch.float64).to(device, dtype)
    documents = Documents(torch.tensor(BORDERS, dtype=torch.int32, device=device), 16, B)
    return tuple(one.to(device, dtype) for one in x), documents, upstream


def one_by_one(x: tuple[Tensor, ...], upstream: Tensor) -> tuple[Tensor, list[Tensor]]:
    """Each document attended to on its own."""
    q, k, v = (one.clone().requires_grad_() for one in x)
    laid = [one.transpose(0, 1).flatten(0, 1).transpose(0, 1) for one in (q, k, v)]  # [n, b s, d]
    parts = [
        F.scaled_dot_product_attention(*(one[:, start:end] for one in laid), is_causal=True, enable_gqa=True)
        for start, end in itertools.pairwise(BORDERS)
        if end > start
    ]
    out = torch.cat(parts, 1).permute(1, 0, 2).reshape(B, S, HEADS * D).transpose(0, 1)
    out.backward(upstream)
    return out.detach(), [one.grad for one in (q, k, v) if one.grad is not None]


def test_documents_see_themselves_alone() -> None:
    x, documents, upstream = inputs("cpu", torch.float64)
    out, gradients = attend(x, documents, upstream)
    expected, expected_gradients = one_by_one(x, upstream)
    torch.testing.assert_close(out, expected)
    for found, wanted in zip(gradients, expected_gradients, strict=True):
        torch.testing.assert_close(found, wanted)
    assert not torch.allclose(out, attend(x, None, upstream)[0])


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
def test_documents_see_themselves_alone_on_a_gpu(dtype: torch.dtype) -> None:
    x, documents, upstream = inputs("cuda", dtype)
    out, gradients = attend(x, documents, upstream)
    assert out.dtype == dtype
    expected, expected_gradients = one_by_one(tuple(one.double() for one in x), upstream.double())
    tolerance = {torch.float64: 1e-12, torch.float32: 1e-5}.get(dtype, 2e-2)
    torch.testing.assert_close(out.double(), expected, rtol=tolerance, atol=tolerance)
    for found, wanted in zip(gradients, expected_gradients, strict=True):
        torch.testing.assert_close(found.double(), wanted, rtol=tolerance, atol=tolerance)
