"""Attention of context ranks against that of one rank, output and gradients, in fp64."""

from __future__ import annotations

from unittest import mock

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from megatrain.kernels.normal import stream_key
from megatrain.model.implementations import local_attention
from megatrain.model.implementations.local_attention import LocalCoreAttention, LocalMathAttention
from megatrain.model.specs import AttentionSpec
from megatrain.parallel.batch import Documents, PassInfo
from megatrain.parallel.context import ContextParallel
from megatrain.parallel.grid import RankGroup
from megatrain.parallel.groups import make_group
from megatrain.parallel.tensor import TensorParallel
from megatrain.tools.worker_pool import WorkerPool

S, B, HEADS, GROUPS, D = 24, 2, 4, 2, 8
BORDERS = [0, 1, 9, 24, 24, 40, 48]
ALONE = RankGroup("tp", (0,), 0)


def spec(**options: object) -> AttentionSpec:
    return AttentionSpec(num_heads=HEADS, num_query_groups=GROUPS, head_channels=D, **options)


CASES = {
    "fused": spec(),
    "fused, by length": spec(),
    "fused, window": spec(window=5),
    "fused, window, by length": spec(window=5),
    "written out": spec(softcap=2.0),
    "written out, window, dropout": spec(softcap=3.0, window=7, dropout=0.3),
    "written out, a sink": spec(sink="zero", dropout=0.1),
}


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("has_documents", [False, True])
@pytest.mark.parametrize("size", [2, 4])
def test_context_ranks_attend_as_one_rank_does(
    pool: WorkerPool, name: str, size: int, has_documents: bool
) -> None:
    (whole,) = pool.run(1, on_a_rank, name, has_documents)
    found = pool.run(size, on_a_rank, name, has_documents)
    for rank, own in enumerate(found):
        cp = ContextParallel(RankGroup("cp", tuple(range(size)), rank))
        for one, expected in zip(own, whole, strict=True):
            torch.testing.assert_close(one, cp.shard(expected, 0), rtol=1e-12, atol=1e-13)


def on_a_rank(rank: int, world_size: int, name: str, has_documents: bool) -> list[Tensor]:
    """Output and gradients of queries, keys and values of this rank's rows."""
    ranks = tuple(range(world_size))
    cp = ContextParallel(RankGroup("cp", ranks, rank, make_group("cp", [ranks]) if world_size > 1 else None))
    torch.manual_seed(0)
    whole = [torch.randn(S, B, n, D, dtype=torch.float64) for n in (HEADS, GROUPS, GROUPS)]
    upstream = torch.randn(S, B, HEADS * D, dtype=torch.float64)
    q, k, v = (cp.shard(x, 0).requires_grad_() for x in whole)
    documents = Documents(torch.tensor(BORDERS, dtype=torch.int32), 16, B, S) if has_documents else None
    info = PassInfo(first_sample=6, documents=documents)
    out = attend(name, cp, q, k, v, info)
    out.backward(cp.shard(upstream, 0))
    return [out.detach(), *(x.grad for x in (q, k, v) if x.grad is not None)]


def attend(name: str, cp: ContextParallel, q: Tensor, k: Tensor, v: Tensor, info: PassInfo) -> Tensor:
    case = CASES[name]
    if "fused" not in name:
        tp = TensorParallel(ALONE, ALONE, sequence_parallel=False)
        return LocalMathAttention(case, None, stream_key(3, name), tp, cp, q.dtype)(q, k, v, info)
    core = LocalCoreAttention(case, "sdpa", cp)
    if "by length" not in name:
        return core(q, k, v, info)
    with mock.patch.object(local_attention, "varlen_attn", document_by_document):
        return core._by_length(
            *(q, *local_attention._whole(k, v, cp)), info.documents, local_attention._by_length
        )


def document_by_document(
    q: Tensor, k: Tensor, v: Tensor, borders_q: Tensor, borders_k: Tensor, longest_q: int, longest_k: int,
    *, window_size: tuple[int, int], scale: float | None, **_: object,
) -> Tensor:  # fmt: skip
    """What the kernel of a GPU does: the last query of each document sees its last key."""
    outs = []
    ends = zip(borders_q.tolist()[1:], borders_k.tolist()[1:], strict=True)
    start_q = start_k = 0
    for end_q, end_k in ends:
        n, m = end_q - start_q, end_k - start_k
        assert n <= min(m, longest_q)
        assert m <= longest_k
        behind = torch.arange(n)[:, None] + (m - n) - torch.arange(m)
        mask = (behind >= 0) & (behind <= (window_size[0] if window_size[0] >= 0 else m))
        one = (x.transpose(0, 1) for x in (q[start_q:end_q], k[start_k:end_k], v[start_k:end_k]))
        outs.append(
            F.scaled_dot_product_attention(*one, attn_mask=mask, scale=scale, enable_gqa=True).transpose(0, 1)
        )
        start_q, start_k = end_q, end_k
    return torch.cat(outs)
