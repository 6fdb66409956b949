"""Attention over context ranks against attention of whole sequences: outputs and gradients of q, k, v and sinks, in fp64."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
from everyday import one_in
from torch import Tensor

from megatrain.kernels.attention.backends import CpuFlash, attention_kernel
from megatrain.kernels.attention.dropout import Dropout
from megatrain.kernels.attention.eager import EagerAttention
from megatrain.kernels.attention.interface import AttentionKernel, MaskSpec
from megatrain.parallel.build_grid import build_grid
from megatrain.parallel.context.block_masks import BlockMasks
from megatrain.parallel.context.context_attention import ContextAttention
from megatrain.parallel.context_parallel import ContextParallel
from megatrain.parallel.documents import Documents
from megatrain.parallel.grid import RankGrid
from megatrain.parallel.process_groups import make_group
from megatrain.parallel.rank_lists import GridShape
from megatrain.tools.worker_pool import WorkerPool

S, B, HEADS, D = 48, 2, 4, 8
CU_SEQLENS = [0, 1, 13, 30, 30, 48, 61, 90, 96]
"""Boundaries in the concatenated samples: documents that end in a chunk, cross several, and an empty one."""
DROPOUT = Dropout(p=0.3, key=5, num_heads=HEADS, first_sample=3)


class ByRules:
    """A stand-in for kernels of GPUs: it takes rules, not explicit masks."""

    needs_explicit_mask = False
    eager = EagerAttention(scale=0.4)

    def forward(self, q: Tensor, k: Tensor, v: Tensor, spec: MaskSpec) -> tuple[Tensor, Tensor]:
        return self.eager.forward(q, k, v, as_mask(spec, len(q), len(k)))

    def backward(self, *tensors: Any) -> tuple[Tensor, Tensor, Tensor]:
        *known, spec = tensors
        return self.eager.backward(*known, as_mask(spec, len(known[1]), len(known[2])))


def as_mask(spec: MaskSpec, num_queries: int, num_keys: int) -> MaskSpec:
    """Return the explicit mask: per document, the last query at the position of the last key."""
    assert spec.explicit is None
    if not spec.is_causal:
        assert spec.cu_seqlens is None
        return spec
    mask = torch.zeros(B * num_queries, B * num_keys, dtype=torch.bool)
    queries = torch.arange(0, (B + 1) * num_queries, num_queries)
    keys = torch.arange(0, (B + 1) * num_keys, num_keys)
    if spec.cu_seqlens is not None:
        queries, keys = spec.cu_seqlens.cu_seqlens_q, spec.cu_seqlens.cu_seqlens_k
        assert int(queries.diff().max()) <= spec.cu_seqlens.max_seqlen_q
        assert int(keys.diff().max()) <= spec.cu_seqlens.max_seqlen_k
    for i in range(len(queries) - 1):
        rows, columns = slice(queries[i], queries[i + 1]), slice(keys[i], keys[i + 1])
        part = mask[rows, columns]
        offset = part.shape[1] - part.shape[0]
        part.fill_(value=True).tril_(offset)
        if spec.window is not None:
            part.triu_(offset - spec.window)
    by_sample = mask.view(B, num_queries, B, num_keys)
    return MaskSpec(explicit=torch.stack([by_sample[b, :, b] for b in range(B)]).unsqueeze(1))


@dataclass(frozen=True)
class Case:
    groups: int = 2
    kernel: str = "cpu"
    window: int | None = None
    softcap: float | None = None
    has_documents: bool = False
    has_sink: bool = False
    has_dropout: bool = False
    d: int = D

    def attention(self, q: Tensor) -> AttentionKernel:
        if q.is_cuda:
            return attention_kernel(self.kernel, 0.4)
        if self.kernel != "eager":
            return CpuFlash(0.4) if self.kernel == "cpu" else ByRules()
        return EagerAttention(scale=0.4, softcap=self.softcap)

    def masks(self, q: Tensor, *, first_head: int = 0, num_heads: int = HEADS) -> BlockMasks:
        """Return the masks of a rank with these heads."""
        return BlockMasks(
            device=q.device,
            needs_explicit_mask=self.attention(q).needs_explicit_mask,
            window=self.window,
            documents=Documents(torch.tensor(CU_SEQLENS, dtype=torch.int32, device=q.device), 29, B, S)
            if self.has_documents
            else None,
            dropout=replace(DROPOUT, first_head=first_head) if self.has_dropout else None,
        )


CASES = {
    "plain": Case(),
    "a key for each query": Case(groups=4),
    "one key for all queries": Case(groups=1),
    "eager": Case(kernel="eager"),
    "documents": Case(has_documents=True),
    "window": Case(window=5),
    "wide window, documents, sink": Case(window=19, has_documents=True, has_sink=True),
    "sink": Case(has_sink=True),
    "all eager options": Case(
        kernel="eager", window=11, softcap=1.5, has_documents=True, has_sink=True, has_dropout=True
    ),
}


def inputs(case: Case) -> tuple[list[Tensor], Tensor]:
    """Return q, k, v and a sink, and the gradient of the output: values that bf16 represents."""
    generator = torch.Generator().manual_seed(3)
    d = case.d
    shapes = [(S, B, HEADS, d), (S, B, case.groups, d), (S, B, case.groups, d), (HEADS,), (S, B, HEADS, d)]
    made = (2 * torch.randn(*shape, dtype=torch.float64, generator=generator) for shape in shapes)
    *x, upstream = (one.bfloat16().double() for one in made)
    return x, upstream


def whole(case: Case) -> list[Tensor]:
    """Return the output of whole sequences and the gradients, by explicit scores."""
    (q, k, v, sink), upstream = inputs(case)
    leaves = [x.requires_grad_() for x in (q, k, v, sink)]
    k, v = (x.repeat_interleave(HEADS // case.groups, dim=2) for x in (k, v))
    scores = torch.einsum("ibnd,jbnd->bnij", q, k) * 0.4
    if case.softcap is not None:
        scores = case.softcap * torch.tanh(scores / case.softcap)
    positions = torch.arange(S)
    distance = positions[:, None] - positions
    mask = (distance >= 0) & (distance <= (S if case.window is None else case.window))
    mask = mask.expand(B, 1, S, S)
    if case.has_documents:
        number = torch.bucketize(torch.arange(B * S), torch.tensor(CU_SEQLENS), right=True).view(B, 1, S)
        mask = mask & (number.unsqueeze(-1) == number.unsqueeze(-2))
    scores = scores.masked_fill(~mask, float("-inf"))
    if case.has_sink:
        scores = torch.cat((scores, sink.view(-1, 1, 1).expand(B, HEADS, S, 1)), dim=-1)
    probs = scores.softmax(-1)[..., :S]
    if case.has_dropout:
        kept = DROPOUT.of_block([range(S)], [range(S)]).mask(B, HEADS, probs.device)
        probs = probs * kept * DROPOUT.factor
    out = torch.einsum("bnij,jbnd->ibnd", probs, v)
    out.backward(upstream)
    return [out.detach(), *(torch.zeros(1) if x.grad is None else x.grad for x in leaves)]


def own_rows(x: Tensor, rank: int, size: int) -> Tensor:
    chunks = x.chunk(2 * size)
    return torch.cat((chunks[rank], chunks[2 * size - 1 - rank]))


def on_a_rank(
    rank: int, world_size: int, case: Case, how: str, heads_size: int, dtype: torch.dtype, kind: str = "cpu"
) -> list[Tensor]:
    """This rank's rows of the output and the gradients, and its part of the sink's."""
    shape = GridShape(tp=heads_size, dp=world_size // heads_size)  # the two levels of context ranks
    grid = build_grid(shape, rank, make_group)
    (q, k, v, sink), upstream = inputs(case)
    device = torch.device(kind, rank) if kind == "cuda" else torch.device(kind)
    q, k, v = (own_rows(x, rank, world_size).to(device, dtype).requires_grad_() for x in (q, k, v))
    sink = sink.to(device, dtype).requires_grad_()
    out = attend(q, k, v, sink if case.has_sink else None, case, how, grid)
    out.backward(own_rows(upstream, rank, world_size).to(device, dtype))
    grads = [torch.zeros(1) if x.grad is None else x.grad.cpu() for x in (q, k, v, sink)]
    return [out.detach().cpu(), *grads]


def attend(
    q: Tensor, k: Tensor, v: Tensor, sink: Tensor | None, case: Case, how: str, grid: RankGrid
) -> Tensor:
    context = ContextAttention(grid.tp, ContextParallel(grid.dp), gathers=how == "all_gather")
    own = HEADS // grid.tp.size
    masks = case.masks(q, first_head=own * grid.tp.rank, num_heads=own)
    q, k, v = context.sequence_to_heads(q, k, v)
    sink = None if sink is None else sink[own * grid.tp.rank : own * (grid.tp.rank + 1)]
    return context.heads_to_sequence(context.attend(q, k, v, sink, case.attention(q), masks))


LAYOUTS = [("p2p", 2, 1), ("p2p", 3, 1), ("p2p", 4, 1), ("all_gather", 2, 1), ("all_gather", 3, 1), ("all_gather", 4, 1),
           ("a2a", 2, 2), ("a2a", 4, 4), ("a2a+p2p", 4, 2), ("a2a+p2p", 8, 2), ("a2a+p2p", 8, 4)]  # fmt: skip
"""How ranks communicate, their number, and how many of them exchange heads."""


@pytest.mark.parametrize(
    ("how", "size", "heads_size", "name"),
    one_in(4, [(*layout, name) for name in CASES for layout in LAYOUTS]),
)
def test_attention_over_ranks_is_that_of_whole_sequences(
    pool: WorkerPool, name: str, how: str, size: int, heads_size: int
) -> None:
    case = CASES[name]
    check(case, pool.run(size, on_a_rank, case, how, heads_size, torch.float64))


def check(case: Case, found: list[list[Tensor]]) -> None:
    """Check that every rank's rows are those of whole sequences; parts of the sink's gradient add up to it."""
    expected = whole(case)
    for number, want in enumerate(expected[:4]):
        for rank, parts in enumerate(found):
            torch.testing.assert_close(
                parts[number], own_rows(want, rank, len(found)), rtol=1e-11, atol=1e-12
            )
    if case.has_sink:
        torch.testing.assert_close(sum(parts[4] for parts in found), expected[4], rtol=1e-11, atol=1e-12)


RUNS = [("all_gather", 2, 1), ("all_gather", 4, 1), ("all_gather", 4, 2), ("a2a", 4, 4)]


@pytest.mark.parametrize(("how", "size", "heads_size"), RUNS)
@pytest.mark.parametrize("name", ["plain", "documents", "window", "wide window, documents, sink"])
def test_kernels_without_explicit_masks_get_equivalent_rules(
    pool: WorkerPool, name: str, how: str, size: int, heads_size: int
) -> None:
    case = replace(CASES[name], kernel="rules")
    check(case, pool.run(size, on_a_rank, case, how, heads_size, torch.float64))


@pytest.mark.parametrize(
    ("how", "size", "heads_size"), [("p2p", 4, 1), ("all_gather", 4, 1), ("a2a+p2p", 4, 2)]
)
def test_sums_of_bf16_inputs_use_the_accumulation_dtype(
    pool: WorkerPool, how: str, size: int, heads_size: int
) -> None:
    case = CASES["sink"]
    check_bf16(case, pool.run(size, on_a_rank, case, how, heads_size, torch.bfloat16))


def check_bf16(case: Case, found: list[list[Tensor]]) -> None:
    """Check the same within the rounding of bf16."""
    for number, want in enumerate(whole(case)[:4]):
        for rank, parts in enumerate(found):
            assert parts[number].dtype == torch.bfloat16
            part = own_rows(want, rank, len(found))
            error = (parts[number].double() - part).abs().max() / part.abs().max()
            assert error < 0.02, f"{number} of rank {rank} is off by {error}"


@pytest.fixture(scope="module")
def two_gpus() -> Iterator[WorkerPool]:
    with WorkerPool(2, device="cuda", timeout_seconds=600) as pool:
        yield pool


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
@pytest.mark.parametrize("backend", ["flash4", "flash2", "cudnn", "math"])
@pytest.mark.parametrize(("how", "heads_size"), [("p2p", 1), ("all_gather", 1), ("a2a", 2)])
@pytest.mark.parametrize("name", ["plain", "sink", "window", "wide window, documents, sink"])
@pytest.mark.filterwarnings("ignore")  # of flash-attn-4's libraries
def test_two_gpus_attend_to_whole_sequences(
    two_gpus: WorkerPool, name: str, how: str, heads_size: int, backend: str
) -> None:
    if backend == "flash4":
        pytest.importorskip("flash_attn.cute")
    case = replace(CASES[name], kernel=backend, d=64)
    has_rules = case.window is not None or case.has_documents
    if how == "p2p" and backend != "math" and has_rules:
        pytest.skip("kernels without explicit masks need contiguous keys")
    if backend == "cudnn" and (how == "all_gather" or has_rules):
        pytest.skip("cuDNN does not support these blocks")
    check_bf16(case, two_gpus.run(2, on_a_rank, case, how, heads_size, torch.bfloat16, "cuda"))
