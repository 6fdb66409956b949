"""Core attention with windows, softcaps, sinks, scales, documents and dropout against loops over queries, in fp64."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from megatrain.config.model_spec.attention import AttentionSpec
from megatrain.config.model_spec.latent_attention import LatentSizes
from megatrain.config.model_spec.norm import NormSpec
from megatrain.kernels.random import attention_keep_mask, dropout_threshold, stream_key
from megatrain.model.implementations.local_builder import LocalBuilder
from megatrain.model.layouts import Columns, columns_bias_layout
from megatrain.parallel.batch import PassInfo
from megatrain.parallel.context_parallel import ContextParallel
from megatrain.parallel.documents import Documents
from megatrain.parallel.grid import RankGroup
from megatrain.parallel.layout import ShardedModule
from megatrain.parallel.tensor_parallel import TensorParallel

S, B, HEADS, GROUPS, D = 12, 2, 4, 2, 8
CU_SEQLENS = [0, 1, 9, 12, 17, 24]
NAME = "decoder.layers.0.attention"
TP = TensorParallel(RankGroup("tp", (0,), 0), RankGroup("kv", (0,), 0), sequence_parallel=False)
CP = ContextParallel(RankGroup("cp", (0,), 0))


def spec(**options: object) -> AttentionSpec:
    return AttentionSpec(num_heads=HEADS, num_query_groups=GROUPS, head_dim=D, **options)


def reference(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    spec: AttentionSpec,
    documents: list[int] | None,
    sink: Tensor,
    info: PassInfo,
) -> Tensor:
    """Compute attention query by query."""
    kept = torch.ones(B, HEADS, S, S, dtype=torch.bool)
    if spec.dropout and info.is_training:
        heads = torch.arange(info.first_sample, info.first_sample + B)[:, None] * HEADS + torch.arange(HEADS)
        key = stream_key(3, f"{NAME}.dropout")
        kept = attention_keep_mask(heads, torch.arange(S), range(S), key=key, p=spec.dropout)
    dropped = dropout_threshold(spec.dropout) / 2**16 if info.is_training else 0
    factor = 1 / (1 - dropped)
    out = torch.zeros(S, B, HEADS, v.shape[-1], dtype=q.dtype)
    for b in range(B):
        for n in range(HEADS):
            for i in range(S):
                first = 0 if spec.window is None else max(0, i - spec.window)
                if documents is not None:
                    first = max(first, max(x for x in documents if x <= b * S + i) - b * S)
                keys = slice(first, i + 1)
                scores = k[keys, b, n // 2] @ q[i, b, n] * (spec.scale or 1 / math.sqrt(D))
                if spec.softcap:
                    scores = spec.softcap * torch.tanh(scores / spec.softcap)
                e = scores.exp()
                total = e.sum()
                if spec.sink != "none":
                    total = total + (sink[n].exp() if spec.sink == "learned" else 1)
                p = e / total * kept[b, n, i, keys] * factor
                out[i, b, n] = p @ v[keys, b, n // 2]
    return out.flatten(2)


NARROW = LatentSizes(query_rank=None, kv_rank=4, qk_nope_head_dim=6, qk_rope_head_dim=2, v_head_dim=5)
CASES = {
    "narrow values": spec(latent=NARROW),
    "narrow values and a window": spec(latent=NARROW, window=3),
    "narrow values and dropout": spec(latent=NARROW, dropout=0.3),
    "narrow values and all": spec(
        latent=NARROW, window=6, scale=0.9, softcap=2.0, sink="learned", dropout=0.2
    ),
    "window": spec(window=3),
    "window of the query alone": spec(window=0),
    "scale": spec(scale=0.7),
    "softcap": spec(softcap=1.5, window=5),
    "off by one": spec(sink="zero"),
    "learned sink": spec(sink="learned", window=4, scale=0.5),
    "dropout": spec(dropout=0.3),
    "all": spec(window=6, scale=0.9, softcap=2.0, sink="learned", dropout=0.2),
}


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("has_documents", [False, True])
@pytest.mark.parametrize("is_training", [False, True])
def test_attention_matches_a_loop_over_queries(name: str, has_documents: bool, is_training: bool) -> None:
    case, generator = CASES[name], torch.Generator().manual_seed(1)
    width = case.v_head_dim
    shapes = [(S, B, HEADS, D), (S, B, GROUPS, D), (S, B, GROUPS, width), (HEADS,)]
    inputs = [torch.randn(*shape, dtype=torch.float64, generator=generator) for shape in shapes]
    upstream = torch.randn(S, B, HEADS * width, dtype=torch.float64, generator=generator)
    documents = Documents(torch.tensor(CU_SEQLENS, dtype=torch.int32), 8, B, S) if has_documents else None
    info = PassInfo(documents=documents, first_sample=10, is_training=is_training)

    theirs = [x.clone().requires_grad_() for x in inputs]
    expected = reference(*theirs[:3], case, CU_SEQLENS[:-1] if has_documents else None, theirs[3], info)
    expected.backward(upstream)

    layout = columns_bias_layout([Columns("sink", HEADS)], TP)
    builder = LocalBuilder(TP, CP, torch.float64, NormSpec(), seed=3)
    core = builder.core_attention(case, layout if case.sink == "learned" else None, NAME)
    if case.sink == "learned":
        assert isinstance(core, ShardedModule)
        core.sink = torch.nn.Parameter(inputs[3].clone())
        core.weight_grads["sink"] = torch.zeros(HEADS, dtype=torch.float64)
    ours = [x.clone().requires_grad_() for x in inputs[:3]]
    found = core(*ours, info)
    found.backward(upstream)
    torch.testing.assert_close(found, expected, rtol=1e-11, atol=1e-12)
    for own, their in zip(ours, theirs, strict=False):
        torch.testing.assert_close(own.grad, their.grad, rtol=1e-10, atol=1e-12)
    if case.sink == "learned":
        torch.testing.assert_close(core.weight_grads["sink"], theirs[3].grad, rtol=1e-10, atol=1e-12)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("name", ["window", "window of the query alone", "scale"])
@pytest.mark.parametrize("has_documents", [False, True])
def test_windows_on_a_gpu_match_the_cpu(name: str, has_documents: bool) -> None:
    case, generator = CASES[name], torch.Generator().manual_seed(1)
    shapes = [(S, B, HEADS, 16), (S, B, GROUPS, 16), (S, B, GROUPS, 16)]
    # bf16 represents the inputs exactly, so the test compares the arithmetic, not their rounding.
    inputs = [torch.randn(*shape, generator=generator).bfloat16().double() for shape in shapes]
    core = LocalBuilder(TP, CP, torch.float64, NormSpec(), seed=3).core_attention(case, None, NAME)
    found = []
    for device, dtype in (("cpu", torch.float64), ("cuda", torch.bfloat16)):
        cu_seqlens = torch.tensor(CU_SEQLENS, dtype=torch.int32, device=device)
        info = PassInfo(documents=Documents(cu_seqlens, 8, B, S) if has_documents else None)
        x = [one.detach().to(device, dtype).requires_grad_() for one in inputs]
        out = core(*x, info)
        out.backward(torch.ones_like(out))
        found.append([out.detach().double().cpu(), *(one.grad.double().cpu() for one in x)])
    for cpu, cuda in zip(*found, strict=True):
        assert (cuda - cpu).abs().max() <= 1e-2 * cpu.abs().max()  # the error of bf16 on a CPU is 6e-3
