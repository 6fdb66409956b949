"""Core attention on one rank: attention stays within documents, and kernels agree with eager attention in fp64."""

import importlib.util
import itertools

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from megatrain.config.model_spec.attention import AttentionSpec
from megatrain.model.implementations.attention import LocalAttention, LocalContextAttention
from megatrain.parallel.batch import PassInfo
from megatrain.parallel.context.context_attention import ContextAttention
from megatrain.parallel.context_parallel import ContextParallel
from megatrain.parallel.documents import Documents
from megatrain.parallel.grid import RankGroup
from megatrain.parallel.tensor_parallel import TensorParallel

ALONE = RankGroup("tp", (0,), 0)
CP = ContextParallel(RankGroup("cp", (0,), 0))
S, B, HEADS, GROUPS, D = 24, 2, 4, 2, 16
CU_SEQLENS = [0, 1, 9, 24, 24, 40, 48]
"""Boundaries of documents in the concatenated samples; among them a document of one token and an empty one."""


def attend(
    x: tuple[Tensor, ...], documents: Documents | None, upstream: Tensor
) -> tuple[Tensor, list[Tensor]]:
    """Return the output, [s, b, n d], and the gradients of q, k and v."""
    q, k, v = (one.clone().requires_grad_() for one in x)
    is_half = q.is_cuda and q.dtype in (torch.bfloat16, torch.float16)
    spec = AttentionSpec(num_heads=HEADS, num_query_groups=GROUPS, head_dim=D)
    core = LocalAttention(spec, "flash2" if is_half else "sdpa")
    out = core(q, k, v, PassInfo(documents=documents))
    out.backward(upstream)
    return out.detach(), [one.grad for one in (q, k, v) if one.grad is not None]


def inputs(device: str, dtype: torch.dtype) -> tuple[tuple[Tensor, ...], Documents, Tensor]:
    torch.manual_seed(0)
    x = tuple(torch.randn(S, B, n, D, dtype=torch.float64) for n in (HEADS, GROUPS, GROUPS))
    upstream = torch.randn(S, B, HEADS * D, dtype=torch.float64).to(device, dtype)
    documents = Documents(torch.tensor(CU_SEQLENS, dtype=torch.int32, device=device), 16, B, S)
    return tuple(one.to(device, dtype) for one in x), documents, upstream


def documents_separately(x: tuple[Tensor, ...], upstream: Tensor) -> tuple[Tensor, list[Tensor]]:
    """Compute each document's attention separately."""
    q, k, v = (one.clone().requires_grad_() for one in x)
    packed = [one.transpose(0, 1).flatten(0, 1).transpose(0, 1) for one in (q, k, v)]  # [n, b s, d]
    parts = [
        F.scaled_dot_product_attention(
            *(one[:, start:end] for one in packed), is_causal=True, enable_gqa=True
        )
        for start, end in itertools.pairwise(CU_SEQLENS)
        if end > start
    ]
    out = torch.cat(parts, 1).permute(1, 0, 2).reshape(B, S, HEADS * D).transpose(0, 1)
    out.backward(upstream)
    return out.detach(), [one.grad for one in (q, k, v) if one.grad is not None]


def test_attention_stays_within_documents() -> None:
    x, documents, upstream = inputs("cpu", torch.float64)
    out, gradients = attend(x, documents, upstream)
    expected, expected_gradients = documents_separately(x, upstream)
    torch.testing.assert_close(out, expected)
    for found, wanted in zip(gradients, expected_gradients, strict=True):
        torch.testing.assert_close(found, wanted)
    assert not torch.allclose(out, attend(x, None, upstream)[0])


@pytest.mark.filterwarnings("ignore:Attempting to run cuBLAS")  # of the first backward pass that uses it
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
def test_attention_stays_within_documents_on_a_gpu(dtype: torch.dtype) -> None:
    x, documents, upstream = inputs("cuda", dtype)
    out, gradients = attend(x, documents, upstream)
    assert out.dtype == dtype
    expected, expected_gradients = documents_separately(tuple(one.double() for one in x), upstream.double())
    tolerance = {torch.float64: 1e-12, torch.float32: 1e-5}.get(dtype, 2e-2)
    torch.testing.assert_close(out.double(), expected, rtol=tolerance, atol=tolerance)
    for found, wanted in zip(gradients, expected_gradients, strict=True):
        torch.testing.assert_close(found.double(), wanted, rtol=tolerance, atol=tolerance)


def has_flash4() -> bool:
    return importlib.util.find_spec("flash_attn") is not None


@pytest.mark.filterwarnings("default")  # flash-attn-4 is built on what its own libraries deprecate
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("backend", ["flash4", "flash2", "cudnn", "sdpa"])
@pytest.mark.parametrize("window", [None, 100])
@pytest.mark.parametrize("has_documents", [False, True])
@pytest.mark.parametrize(("s", "heads", "groups", "d"), [(300, 4, 2, 64), (257, 8, 1, 128), (64, 2, 2, 32)])
def test_kernels_agree_with_eager_attention_in_fp64(
    backend: str, window: int | None, has_documents: bool, s: int, heads: int, groups: int, d: int
) -> None:
    if backend == "flash4" and not has_flash4():
        pytest.skip("needs flash-attn-4")
    if backend in ("cudnn", "sdpa") and (has_documents or window is not None):
        pytest.skip("these use FlashAttention-2")
    spec = AttentionSpec(num_heads=heads, num_query_groups=groups, head_dim=d, window=window)
    torch.manual_seed(0)
    qkv = torch.randn(s, 2, heads + 2 * groups, d, device="cuda", dtype=torch.bfloat16)
    upstream = torch.randn(s, 2, heads * d, device="cuda", dtype=torch.bfloat16)
    cu_seqlens = torch.tensor([0, 1, s // 3, s, 2 * s], dtype=torch.int32, device="cuda")
    info = PassInfo(documents=Documents(cu_seqlens, s, 2, s) if has_documents else None)
    tp = TensorParallel(ALONE, ALONE, sequence_parallel=False)
    found = []
    for core, x in (
        (LocalAttention(spec, backend), qkv),
        (
            LocalContextAttention(spec, None, 0, tp, ContextAttention(ALONE, CP), "math", torch.float64),
            qkv.double(),
        ),
    ):
        x = x.clone().requires_grad_()
        out = core(*x.split([heads, groups, groups], dim=2), info)
        out.backward(upstream.to(out.dtype))
        found.append((out.detach().double(), x.grad.double()))
    for one, other in zip(*found, strict=True):
        assert ((one - other).abs().max() / other.abs().max()).item() < 2e-2
