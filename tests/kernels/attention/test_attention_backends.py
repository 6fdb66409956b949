"""Attention kernels and the merge of blocks against plain softmax attention, forward and backward."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
import torch
from torch import Tensor

from megatrain.kernels.attention.backends import CpuFlash, CuDnn, attention_kernel
from megatrain.kernels.attention.eager import EagerAttention
from megatrain.kernels.attention.interface import (
    AttentionKernel,
    CuSeqlens,
    MaskSpec,
    SoftmaxMerge,
    sink_gradient,
)

SCALE = 0.3


@dataclass(frozen=True)
class Shape:
    """Rows of queries and keys, samples, heads, groups, channels."""

    queries: int = 12
    keys: int = 12
    b: int = 2
    heads: int = 4
    groups: int = 2
    d: int = 16


def inputs(shape: Shape, dtype: torch.dtype = torch.float64, device: str = "cpu") -> list[Tensor]:
    """Return q, k, v, and the gradient of the output."""
    generator = torch.Generator().manual_seed(4)
    sizes = [(shape.queries, shape.heads), (shape.keys, shape.groups), (shape.keys, shape.groups)]
    made = [
        torch.randn(rows, shape.b, heads, shape.d, generator=generator, dtype=torch.float64)
        for rows, heads in (*sizes, sizes[0])
    ]
    return [x.to(torch.bfloat16).to(device, dtype) for x in made]  # rounded to bf16


def plain(
    q: Tensor, k: Tensor, v: Tensor, upstream: Tensor, mask: Tensor, *, softcap: float | None = None
) -> list[Tensor]:
    """Return output, log-sum-exp and gradients by autograd."""
    leaves = [x.clone().requires_grad_() for x in (q, k, v)]
    q, k, v = leaves
    k, v = (x.repeat_interleave(q.shape[2] // k.shape[2], dim=2) for x in (k, v))
    scores = torch.einsum("ibnd,jbnd->bnij", q, k) * SCALE
    if softcap is not None:
        scores = softcap * torch.tanh(scores / softcap)
    scores = scores.masked_fill(~mask, float("-inf"))
    has_keys = mask.any(-1, keepdim=True)
    probs = scores.masked_fill(~has_keys, 0).softmax(-1) * has_keys
    out = torch.einsum("bnij,jbnd->ibnd", probs, v)
    out.backward(upstream)
    grads = [x.grad for x in leaves if x.grad is not None]
    return [out.detach(), scores.logsumexp(-1).permute(2, 0, 1).detach(), *grads]


def of(kernel: AttentionKernel, x: list[Tensor], spec: MaskSpec) -> list[Tensor]:
    q, k, v, upstream = x
    out, lse = kernel.forward(q, k, v, spec)
    return [out, lse, *kernel.backward(upstream, q, k, v, out, lse.masked_fill(lse == -torch.inf, 0), spec)]


def all_allowed(shape: Shape) -> Tensor:
    return torch.ones(1, 1, shape.queries, shape.keys, dtype=torch.bool)


WHOLE, CAUSAL = MaskSpec(), MaskSpec(is_causal=True)
SHORT = Shape(queries=7, keys=12)


@pytest.mark.parametrize("kernel", [CpuFlash(SCALE), EagerAttention(scale=SCALE)], ids=["cpu", "eager"])
@pytest.mark.parametrize("groups", [1, 2, 4])
@pytest.mark.parametrize("kind", ["whole", "causal", "mask"])
def test_a_block_is_plain_attention(kernel: AttentionKernel, groups: int, kind: str) -> None:
    shape = Shape(queries=12 if kind == "causal" else 7, groups=groups)
    mask, spec = all_allowed(shape), WHOLE
    if kind == "causal":
        mask, spec = mask.tril(), CAUSAL
    elif kind == "mask":
        mask = torch.rand(shape.b, 1, 7, 12, generator=torch.Generator().manual_seed(2)) < 0.5
        mask[1, :, 3] = False  # a query without keys
        spec = MaskSpec(explicit=mask)
    x = inputs(shape)
    for found, expected in zip(of(kernel, x, spec), plain(*x, mask), strict=True):
        torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-13)


def test_softcaps_bound_scores() -> None:
    shape = Shape()
    x = inputs(shape)
    found = of(EagerAttention(scale=SCALE, softcap=0.8), x, CAUSAL)
    for own, expected in zip(found, plain(*x, all_allowed(shape).tril(), softcap=0.8), strict=True):
        torch.testing.assert_close(own, expected, rtol=1e-12, atol=1e-13)


@pytest.mark.parametrize("kernel", [CpuFlash(SCALE), EagerAttention(scale=SCALE)], ids=["cpu", "eager"])
def test_a_causal_block_that_is_not_square_needs_an_explicit_mask(kernel: AttentionKernel) -> None:
    x = inputs(SHORT)
    with pytest.raises(AssertionError, match="not square"):
        kernel.forward(*x[:3], CAUSAL)


@pytest.mark.parametrize("cut", [1, 5, 11])
def test_merged_blocks_are_the_whole(cut: int) -> None:
    """A causal block, and a block whose keys only the last queries attend to."""
    shape = Shape(keys=2 * 12)
    q, k, v, upstream = inputs(shape)
    kernel = CpuFlash(SCALE)
    mask = all_allowed(shape)
    mask[..., :12] = mask[..., :12].tril()
    mask[..., :cut, 12:] = False
    expected_out, expected_lse, *expected = plain(q, k, v, upstream, mask)
    blocks = [(slice(12), slice(None), CAUSAL), (slice(12, 24), slice(cut, None), WHOLE)]
    merged = SoftmaxMerge(*kernel.forward(q, k[:12], v[:12], CAUSAL))
    merged.add(*kernel.forward(q[cut:], k[12:], v[12:], WHOLE), rows=slice(cut, None))
    torch.testing.assert_close(merged.out, expected_out, rtol=1e-12, atol=1e-13)
    torch.testing.assert_close(merged.lse, expected_lse, rtol=1e-12, atol=1e-13)
    total = torch.zeros_like(q)
    for keys, rows, spec in blocks:
        out, lse = merged.out[rows], merged.lse[rows]
        dq, dk, dv = kernel.backward(upstream[rows], q[rows], k[keys], v[keys], out, lse, spec)
        total[rows] += dq
        torch.testing.assert_close(dk, expected[1][keys], rtol=1e-12, atol=1e-13)
        torch.testing.assert_close(dv, expected[2][keys], rtol=1e-12, atol=1e-13)
    torch.testing.assert_close(total, expected[0], rtol=1e-12, atol=1e-13)


def test_a_masked_block_does_not_change_a_query() -> None:
    q, k, v, _ = inputs(Shape())
    kernel = CpuFlash(SCALE)
    merged = SoftmaxMerge(*kernel.forward(q, k, v, CAUSAL))
    out, lse = merged.out.clone(), merged.lse.clone()
    mask = all_allowed(Shape())
    mask[:, :, 4:] = False
    merged.add(*kernel.forward(q, k, v, MaskSpec(explicit=mask)))
    assert torch.equal(merged.out[4:], out[4:])
    assert torch.equal(merged.lse[4:], lse[4:])
    assert not merged.lse[:4].eq(lse[:4]).any()


def test_a_sink_enters_the_denominator_once() -> None:
    shape = Shape()
    q, k, v, upstream = inputs(shape)
    sink = torch.tensor([-1.0, 0.0, 2.0, 5.0], dtype=torch.float64, requires_grad=True)
    repeated = [x.repeat_interleave(2, dim=2) for x in (k, v)]
    scores = torch.einsum("ibnd,jbnd->bnij", q, repeated[0]) * SCALE
    scores = torch.cat((scores, sink.view(-1, 1, 1).expand(shape.b, 4, 12, 1)), -1)
    expected = torch.einsum("bnij,jbnd->ibnd", scores.softmax(-1)[..., :12], repeated[1])
    expected.backward(upstream)
    merged = SoftmaxMerge(*CpuFlash(SCALE).forward(q, k, v, WHOLE))
    merged.add_sink(sink.detach())
    torch.testing.assert_close(merged.out, expected.detach())
    found = sink_gradient(upstream, merged.out, merged.lse, sink.detach())
    torch.testing.assert_close(found, sink.grad)


CU_SEQLENS = [0, 1, 9, 12, 14, 14, 24]
"""Cumulative lengths of documents in two samples of 12 tokens; one is empty."""


def rules() -> dict[str, tuple[Shape, MaskSpec, Tensor]]:
    """Return masks by rules, and the equivalent explicit masks."""
    short, square = SHORT, Shape()
    distance = torch.arange(5, 12)[:, None] - torch.arange(12)
    queries = torch.tensor([0, 0, 4, 7, 7, 7, 14], dtype=torch.int32)  # in the last 7 rows of each sample
    keys = torch.tensor(CU_SEQLENS, dtype=torch.int32)
    number = torch.bucketize(torch.arange(24), keys, right=True).view(2, 1, 12)
    is_same = number[..., 5:].unsqueeze(-1) == number.unsqueeze(-2)
    return {
        "whole": (short, WHOLE, all_allowed(short)),
        "causal": (square, CAUSAL, all_allowed(square).tril()),
        "run": (short, CAUSAL, (distance >= 0)[None, None]),
        "window": (
            short,
            MaskSpec(is_causal=True, window=3),
            ((distance >= 0) & (distance <= 3))[None, None],
        ),
        "documents": (
            short,
            MaskSpec(is_causal=True, window=4, cu_seqlens=CuSeqlens(queries, keys, 7, 10)),
            is_same & (distance >= 0) & (distance <= 4),
        ),
    }


RULES = [("cudnn", name) for name in ("whole", "causal")] + [
    (backend, name) for backend in ("flash2", "flash4", "triton") for name in rules()
]
"""GPU kernels and the rules that they support."""


@pytest.mark.parametrize(("backend", "name"), RULES)
def test_gpu_kernels_run_on_the_meta_device(backend: str, name: str) -> None:
    """Meta tensors: shapes, and torch's acceptance of the arguments."""
    kernel = attention_kernel(backend, SCALE)
    shape, spec, _ = rules()[name]
    x = inputs(shape, torch.bfloat16, "meta")
    if spec.cu_seqlens is not None:
        cu_seqlens = [one.to("meta") for one in spec.cu_seqlens[:2]]
        spec = MaskSpec(
            is_causal=True, window=spec.window, cu_seqlens=CuSeqlens(cu_seqlens[0], cu_seqlens[1], 7, 10)
        )
    out, lse, *gradients = of(kernel, x, spec)
    assert (out.shape, lse.shape) == (x[0].shape, x[0].shape[:3])
    assert (out.dtype, lse.dtype) == (torch.bfloat16, torch.float32)
    assert [one.shape for one in gradients] == [one.shape for one in x[:3]]


@pytest.mark.parametrize("name", ["run", "window", "documents"])
def test_cudnn_refuses_rules_that_it_does_not_support(name: str) -> None:
    shape, spec, _ = rules()[name]
    with pytest.raises(AssertionError, match=r"no windows|not square"):
        of(CuDnn(SCALE), inputs(shape, torch.bfloat16, "meta"), spec)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize(("backend", "name"), RULES)
@pytest.mark.parametrize("groups", [2, 4])
@pytest.mark.filterwarnings("ignore")  # of flash-attn-4's libraries
def test_gpu_kernels_are_plain_attention(backend: str, name: str, groups: int) -> None:
    if backend == "flash4":
        pytest.importorskip("flash_attn.cute")
    shape, spec, mask = rules()[name]
    shape = Shape(queries=shape.queries, keys=shape.keys, groups=groups, d=64)
    if spec.cu_seqlens is not None:
        cu_seqlens = [one.cuda() for one in spec.cu_seqlens[:2]]
        spec = MaskSpec(
            is_causal=True, window=spec.window, cu_seqlens=CuSeqlens(cu_seqlens[0], cu_seqlens[1], 7, 10)
        )
    x = inputs(shape, torch.bfloat16, "cuda")
    found = of(attention_kernel(backend, SCALE), x, spec)
    for own, expected in zip(found, plain(*inputs(shape), mask), strict=True):
        error = (own.double().cpu() - expected).abs().max() / expected.abs().max()
        assert error < 0.02, f"{backend}, {name}: off by {error}"
