"""Core attention of context ranks against that of one rank, output and gradients, in fp64."""

from __future__ import annotations

import itertools
from typing import Any, cast

import pytest
import torch
from everyday import one_in
from torch import Tensor

from megatrain.config.model_spec.attention import AttentionSpec
from megatrain.config.model_spec.norm import NormSpec
from megatrain.model.implementations.local_builder import LocalBuilder
from megatrain.model.layouts import Columns, columns_bias_layout
from megatrain.parallel.batch import PassInfo
from megatrain.parallel.build_grid import build_grid
from megatrain.parallel.context.context_attention import ContextAttention
from megatrain.parallel.context_parallel import ContextParallel
from megatrain.parallel.documents import Documents
from megatrain.parallel.grid import RankGroup
from megatrain.parallel.process_groups import make_group
from megatrain.parallel.rank_lists import GridShape
from megatrain.parallel.tensor_parallel import TensorParallel
from megatrain.tools.worker_pool import WorkerPool

S, B, HEADS, GROUPS, D = 48, 2, 4, 2, 8
CU_SEQLENS = [0, 1, 19, 48, 48, 77, 96]
ALONE = RankGroup("alone", (0,), 0)
TP = TensorParallel(ALONE, ALONE, sequence_parallel=False)


def spec(**options: Any) -> AttentionSpec:
    return AttentionSpec(num_heads=HEADS, num_query_groups=GROUPS, head_dim=D, **options)


CASES = {
    "plain": spec(),
    "window": spec(window=7),
    "softcap, window, dropout": spec(softcap=3.0, window=9, dropout=0.3),
    "learned sink": spec(sink="learned", scale=0.7),
    "zero sink, dropout": spec(sink="zero", dropout=0.1),
}
COMM_TYPES = {"p2p": (1, 4), "all_gather": (1, 4), "a2a": (4, 1), "a2a+p2p": (2, 2), "a2a+all_gather": (2, 2)}
"""Number of ranks that exchange heads (a2a), and of ranks in the ring or all-gather of keys and values."""


@pytest.mark.parametrize(
    ("name", "has_documents", "comm_type"), one_in(3, itertools.product(CASES, (False, True), COMM_TYPES))
)
def test_context_ranks_match_one_rank(
    pool: WorkerPool, name: str, comm_type: str, has_documents: bool
) -> None:
    ((*whole, whole_sink),) = pool.run(1, on_a_rank, name, "one rank", (1, 1), has_documents)
    found = pool.run(4, on_a_rank, name, comm_type, COMM_TYPES[comm_type], has_documents)
    for rank, (*own, _) in enumerate(found):
        cp = ContextParallel(RankGroup("cp", (0, 1, 2, 3), rank))
        for one, expected in zip(own, whole, strict=True):
            torch.testing.assert_close(one, cp.shard(expected, 0), rtol=1e-11, atol=1e-12)
    torch.testing.assert_close(sum(sink for *_, sink in found), whole_sink, rtol=1e-11, atol=1e-12)


def on_a_rank(
    rank: int, world_size: int, name: str, comm_type: str, sizes: tuple[int, int], has_documents: bool
) -> list[Tensor]:
    """Return output and gradients of q, k and v of this rank's rows, and its part of the sinks' gradient."""
    grid = build_grid(GridShape(tp=sizes[0], dp=sizes[1]), rank, make_group)  # two levels of context ranks
    cp = ContextParallel(grid.world)
    context = ContextAttention(grid.tp, ContextParallel(grid.dp), gathers="all_gather" in comm_type)
    torch.manual_seed(0)
    whole = [torch.randn(S, B, n, D, dtype=torch.float64) for n in (HEADS, GROUPS, GROUPS)]
    upstream, sink = (
        torch.randn(S, B, HEADS * D, dtype=torch.float64),
        torch.randn(HEADS, dtype=torch.float64),
    )
    q, k, v = (cp.shard(x, 0).requires_grad_() for x in whole)
    documents = Documents(torch.tensor(CU_SEQLENS, dtype=torch.int32), 29, B, S) if has_documents else None
    info = PassInfo(first_sample=6, documents=documents)

    case = CASES[name]
    layout = columns_bias_layout([Columns("sink", HEADS)], TP) if case.sink == "learned" else None
    leaves = LocalBuilder(TP, cp, torch.float64, NormSpec(), seed=3, context=context)
    core = cast("Any", leaves.core_attention(case, layout, "attention"))
    sink_gradient = torch.zeros_like(sink)
    if layout is not None:
        core.sink = torch.nn.Parameter(sink)
        core.weight_grads["sink"] = sink_gradient
    out = core(q, k, v, info)
    out.backward(cp.shard(upstream, 0))
    return [out.detach(), *(x.grad for x in (q, k, v) if x.grad is not None), sink_gradient]
