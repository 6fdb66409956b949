"""Kernels of attention that tell the log-sum-exp: each against scores written out, forward and backward."""

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
    """q, k, v, and what comes back from the output."""
    generator = torch.Generator().manual_seed(4)
    sizes = [(shape.queries, shape.heads), (shape.keys, shape.groups), (shape.keys, shape.groups)]
    made = [
        torch.randn(rows, shape.b, heads, shape.d, generator=generator, dtype=torch.float64)
        for rows, heads in (*sizes, sizes[0])
    ]
    return [x.to(torch.bfloat16).to(device, dtype) for x in made]  # numbers that bf16 holds


def plain(
    q: Tensor, k: Tensor, v: Tensor, upstream: Tensor, mask: Tensor, *, softcap: float | None = None
) -> list[Tensor]:
    """Output, log-sum-exp and gradients, by autograd."""
    leaves = [x.clone().requires_grad_() for x in (q, k, v)]
    q, k, v = leaves
    k, v = (x.repeat_interleave(q.shape[2] // k.shape[2], dim=2) for x in (k, v))
    scores = torch.einsum("ibnd,jbnd->bnij", q, k) * SCALE
    if softcap is not None:
        scores = softcap * torch.tanh(scores / softcap)
    scores = scores.masked_fill(~mask, float("-inf"))
    sees_one = mask.any(-1, keepdim=True)
    shares = scores.masked_fill(~sees_one, 0).softmax(-1) * sees_one
    out = torch.einsum("bnij,jbnd->ibnd", shares, v)
    out.backward(upstream)
    grads = [x.grad for x in leaves if x.grad is not None]
    return [out.detach(), scores.logsumexp(-1).permute(2, 0, 1).detach(), *grads]


def of(kernel: AttentionKernel, x: list[Tensor], spec: MaskSpec) -> list[Tensor]:
    q, k, v, upstream = x
    out, lse = kernel.forward(q, k, v, spec)
    return [out, lse, *kernel.backward(upstream, q, k, v, out, lse.masked_fill(lse == -torch.inf, 0), spec)]


def all_seen(shape: Shape) -> Tensor:
    return torch.ones(1, 1, shape.queries, shape.keys, dtype=torch.bool)


WHOLE, CAUSAL = MaskSpec(), MaskSpec(is_causal=True)
SHORT = Shape(queries=7, keys=12)


@pytest.mark.parametrize("kernel", [CpuFlash(SCALE), EagerAttention(scale=SCALE)], ids=["cpu", "written"])
@pytest.mark.parametrize("groups", [1, 2, 4])
@pytest.mark.parametrize("kind", ["whole", "causal", "mask"])
def test_a_block_is_the_sum_written_out(kernel: AttentionKernel, groups: int, kind: str) -> None:
    shape = Shape(queries=12 if kind == "causal" else 7, groups=groups)
    mask, spec = all_seen(shape), WHOLE
    if kind == "causal":
        mask, spec = mask.tril(), CAUSAL
    elif kind == "mask":
        mask = torch.rand(shape.b, 1, 7, 12, generator=torch.Generator().manual_seed(2)) < 0.5
        mask[1, :, 3] = False  # a query that sees no key
        spec = MaskSpec(explicit=mask)
    x = inputs(shape)
    for found, expected in zip(of(kernel, x, spec), plain(*x, mask), strict=True):
        torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-13)


def test_softcaps_bend_scores() -> None:
    shape = Shape()
    x = inputs(shape)
    found = of(EagerAttention(scale=SCALE, softcap=0.8), x, CAUSAL)
    for own, expected in zip(found, plain(*x, all_seen(shape).tril(), softcap=0.8), strict=True):
        torch.testing.assert_close(own, expected, rtol=1e-12, atol=1e-13)


@pytest.mark.parametrize("kernel", [CpuFlash(SCALE), EagerAttention(scale=SCALE)], ids=["cpu", "written"])
def test_a_causal_view_that_is_not_square_needs_a_mask(kernel: AttentionKernel) -> None:
    x = inputs(SHORT)
    with pytest.raises(AssertionError, match="not square"):
        kernel.forward(*x[:3], CAUSAL)


@pytest.mark.parametrize("cut", [1, 5, 11])
def test_blocks_join_to_the_whole(cut: int) -> None:
    """A causal block, keys that all queries see, and keys that the last queries alone see."""
    shape = Shape(keys=2 * 12)
    q, k, v, upstream = inputs(shape)
    kernel = CpuFlash(SCALE)
    mask = all_seen(shape)
    mask[..., :12] = mask[..., :12].tril()
    mask[..., :cut, 12:] = False
    expected_out, expected_lse, *expected = plain(q, k, v, upstream, mask)
    blocks = [(slice(12), slice(None), CAUSAL), (slice(12, 24), slice(cut, None), WHOLE)]
    joined = SoftmaxMerge(*kernel.forward(q, k[:12], v[:12], CAUSAL))
    joined.add(*kernel.forward(q[cut:], k[12:], v[12:], WHOLE), rows=slice(cut, None))
    torch.testing.assert_close(joined.out, expected_out, rtol=1e-12, atol=1e-13)
    torch.testing.assert_close(joined.lse, expected_lse, rtol=1e-12, atol=1e-13)
    total = torch.zeros_like(q)
    for keys, rows, spec in blocks:
        out, lse = joined.out[rows], joined.lse[rows]
        dq, dk, dv = kernel.backward(upstream[rows], q[rows], k[keys], v[keys], out, lse, spec)
        total[rows] += dq
        torch.testing.assert_close(dk, expected[1][keys], rtol=1e-12, atol=1e-13)
        torch.testing.assert_close(dv, expected[2][keys], rtol=1e-12, atol=1e-13)
    torch.testing.assert_close(total, expected[0], rtol=1e-12, atol=1e-13)


def test_a_block_that_is_hidden_from_a_query_changes_nothing() -> None:
    q, k, v, _ = inputs(Shape())
    kernel = CpuFlash(SCALE)
    joined = SoftmaxMerge(*kernel.forward(q, k, v, CAUSAL))
    out, lse = joined.out.clone(), joined.lse.clone()
    mask = all_seen(Shape())
    mask[:, :, 4:] = False
    joined.add(*kernel.forward(q, k, v, MaskSpec(explicit=mask)))
    assert torch.equal(joined.out[4:], out[4:])
    assert torch.equal(joined.lse[4:], lse[4:])
    assert not joined.lse[:4].eq(lse[:4]).any()


def test_a_sink_joins_once() -> None:
    shape = Shape()
    q, k, v, upstream = inputs(shape)
    sink = torch.tensor([-1.0, 0.0, 2.0, 5.0], dtype=torch.float64, requires_grad=True)
    repeated = [x.repeat_interleave(2, dim=2) for x in (k, v)]
    scores = torch.einsum("ibnd,jbnd->bnij", q, repeated[0]) * SCALE
    scores = torch.cat((scores, sink.view(-1, 1, 1).expand(shape.b, 4, 12, 1)), -1)
    expected = torch.einsum("bnij,jbnd->ibnd", scores.softmax(-1)[..., :12], repeated[1])
    expected.backward(upstream)
    joined = SoftmaxMerge(*CpuFlash(SCALE).forward(q, k, v, WHOLE))
    joined.add_sink(sink.detach())
    torch.testing.assert_close(joined.out, expected.detach())
    found = sink_gradient(upstream, joined.out, joined.lse, sink.detach())
    torch.testing.assert_close(found, sink.grad)


BORDERS = [0, 1, 9, 12, 14, 14, 24]
"""Of documents in two samples of 12 tokens; one is empty."""


def rules() -> dict[str, tuple[Shape, MaskSpec, Tensor]]:
    """Views by rules, and the masks that they mean."""
    short, square = SHORT, Shape()
    distance = torch.arange(5, 12)[:, None] - torch.arange(12)
    queries = torch.tensor([0, 0, 4, 7, 7, 7, 14], dtype=torch.int32)  # of the last 7 rows of each sample
    keys = torch.tensor(BORDERS, dtype=torch.int32)
    number = torch.bucketize(torch.arange(24), keys, right=True).view(2, 1, 12)
    is_same = number[..., 5:].unsqueeze(-1) == number.unsqueeze(-2)
    return {
        "whole": (short, WHOLE, all_seen(short)),
        "causal": (square, CAUSAL, all_seen(square).tril()),
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
    (backend, name) for backend in ("flash2", "flash4") for name in rules()
]
"""Kernels of GPUs, and what they take."""


@pytest.mark.parametrize(("backend", "name"), RULES)
def test_kernels_of_gpus_are_planned_without_one(backend: str, name: str) -> None:
    """Tensors without memory: the sizes, and that torch takes such arguments."""
    kernel = attention_kernel(backend, SCALE)
    shape, spec, _ = rules()[name]
    x = inputs(shape, torch.bfloat16, "meta")
    if spec.cu_seqlens is not None:
        meta = [border.to("meta") for border in spec.cu_seqlens[:2]]
        spec = MaskSpec(is_causal=True, window=spec.window, cu_seqlens=CuSeqlens(meta[0], meta[1], 7, 10))
    out, lse, *gradients = of(kernel, x, spec)
    assert (out.shape, lse.shape) == (x[0].shape, x[0].shape[:3])
    assert (out.dtype, lse.dtype) == (torch.bfloat16, torch.float32)
    assert [one.shape for one in gradients] == [one.shape for one in x[:3]]


@pytest.mark.parametrize("name", ["run", "window", "documents"])
def test_cudnn_is_never_asked_for_what_it_does_not_take(name: str) -> None:
    shape, spec, _ = rules()[name]
    with pytest.raises(AssertionError, match=r"no windows|not square"):
        of(CuDnn(SCALE), inputs(shape, torch.bfloat16, "meta"), spec)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize(("backend", "name"), RULES)
@pytest.mark.parametrize("groups", [2, 4])
@pytest.mark.filterwarnings("ignore")  # of flash-attn-4's libraries
def test_kernels_of_gpus_are_the_sum_written_out(backend: str, name: str, groups: int) -> None:
    if backend == "flash4":
        pytest.importorskip("flash_attn.cute")
    shape, spec, mask = rules()[name]
    shape = Shape(queries=shape.queries, keys=shape.keys, groups=groups, d=64)
    if spec.cu_seqlens is not None:
        moved = [border.cuda() for border in spec.cu_seqlens[:2]]
        spec = MaskSpec(is_causal=True, window=spec.window, cu_seqlens=CuSeqlens(moved[0], moved[1], 7, 10))
    x = inputs(shape, torch.bfloat16, "cuda")
    found = of(attention_kernel(backend, SCALE), x, spec)
    for own, expected in zip(found, plain(*inputs(shape), mask), strict=True):
        error = (own.double().cpu() - expected).abs().max() / expected.abs().max()
        assert error < 0.02, f"{backend}, {name}: off by {error}"
