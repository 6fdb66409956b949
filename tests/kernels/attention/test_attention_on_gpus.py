"""GPU attention kernels against eager attention in fp64: the head sizes and dtypes that `config/subjects/attention_kernel.py`
allows them, and deterministic mode.
"""

import dataclasses
from collections.abc import Iterator

import pytest
import torch
from kernel_reference import DTYPES, MAX_ERRORS, head_sizes_of
from torch import Tensor

from megatrain.kernels.attention.backends import CuDnn, Flash2, Flash4, TritonAttention
from megatrain.kernels.attention.dropout import Dropout
from megatrain.kernels.attention.eager import EagerAttention
from megatrain.kernels.attention.flash4 import determinism_options
from megatrain.kernels.attention.interface import AttentionKernel, CuSeqlens, MaskSpec

pytestmark = [
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU"),
    pytest.mark.filterwarnings("ignore"),  # of flash-attn-4's libraries
]
S, SHORT, B, HEADS = 520, 300, 2, 4
"""Tokens of a sample, queries of blocks that are not square (the last tokens), samples, heads."""
WINDOW = 150
ENDS = [0, 1, 257, S, 585, 585, 2 * S]
"""Cumulative lengths of documents in concatenated samples: one has one token, one ends after a tile, one is empty."""
KERNELS = {"flash4": Flash4, "cudnn": CuDnn, "flash2": Flash2, "triton": TritonAttention}
CASES = [
    (backend, d, name)
    for backend, d in head_sizes_of(*KERNELS)
    for name in ("causal", "documents")
    if (backend, name) != ("cudnn", "documents")
]


def made(backend: str, d: int) -> AttentionKernel:
    if backend == "flash4":
        pytest.importorskip("flash_attn.cute")
    return KERNELS[backend](d**-0.5)


def spec_of(name: str) -> tuple[MaskSpec, Tensor]:
    """Return a mask by rules, and the equivalent explicit mask, [1 or b, 1, sq, sk]."""
    queries = SHORT if name in ("whole", "run") else S
    distance = torch.arange(S - queries, S)[:, None] - torch.arange(S)
    mask = (distance >= 0)[None, None]
    match name:
        case "whole":
            return MaskSpec(), torch.ones_like(mask)
        case "window":
            return MaskSpec(is_causal=True, window=WINDOW), mask & (distance <= WINDOW)
        case "documents":
            ends = torch.tensor(ENDS, dtype=torch.int32)
            number = torch.bucketize(torch.arange(B * S), ends, right=True).view(B, 1, S)
            is_same = number.unsqueeze(-1) == number.unsqueeze(-2)
            cu_seqlens = CuSeqlens(ends.cuda(), ends.cuda(), S, S)
            return MaskSpec(is_causal=True, cu_seqlens=cu_seqlens), mask & is_same
        case _:
            return MaskSpec(is_causal=True), mask


def inputs(queries: int, groups: int, d: int, dtype: torch.dtype) -> list[Tensor]:
    """Return q, k and v as views of a QKV projection, and the gradient of the output."""
    generator = torch.Generator().manual_seed(d)
    qkv = torch.randn(S, B, HEADS + 2 * groups, d, generator=generator).to("cuda", dtype)
    dout = torch.randn(queries, B, HEADS, d, generator=generator).to("cuda", dtype)
    q, k, v = qkv.split((HEADS, groups, groups), dim=2)
    return [q[S - queries :], k, v, dout]


def of(kernel: AttentionKernel, x: list[Tensor], spec: MaskSpec) -> list[Tensor]:
    """Return output, log-sum-exp and gradients."""
    q, k, v, dout = x
    out, lse = kernel.forward(q, k, v, spec)
    return [out, lse, *kernel.backward(dout, q, k, v, out, lse, spec)]


def check(
    found: list[Tensor],
    x: list[Tensor],
    mask: Tensor,
    dropout: Dropout | None = None,
    softcap: float | None = None,
) -> None:
    eager = EagerAttention(scale=x[0].shape[-1] ** -0.5, softcap=softcap)
    expected = of(eager, [one.double().cpu() for one in x], MaskSpec(explicit=mask, dropout=dropout))
    names = ("out", "lse", "dq", "dk", "dv")
    for name, own, wanted in zip(names, found, expected, strict=True):
        error = ((own.double().cpu() - wanted).abs().max() / wanted.abs().max()).item()
        assert error < MAX_ERRORS[x[0].dtype], f"{name} is off by {error}"


@pytest.mark.parametrize(("backend", "d", "name"), CASES)
def test_head_sizes(backend: str, d: int, name: str) -> None:
    kernel, (spec, mask) = made(backend, d), spec_of(name)
    groups = 2 if name == "causal" else HEADS  # ungrouped heads use another backward path
    x = inputs(S, groups, d, DTYPES[d])
    check(of(kernel, x, spec), x, mask)


@pytest.fixture
def _deterministic(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Set torch's deterministic mode as `training/launch/ranks.py` does."""
    monkeypatch.setattr(torch.utils.deterministic, "fill_uninitialized_memory", False)
    torch.use_deterministic_algorithms(mode=True)
    yield
    torch.use_deterministic_algorithms(mode=False)


@pytest.mark.usefixtures("_deterministic")
@pytest.mark.parametrize("backend", ["flash4", "flash2", "triton"])
@pytest.mark.parametrize("name", ["whole", "causal", "run", "window", "documents"])
@pytest.mark.parametrize(("groups", "d"), [(2, 128), (4, 64)])
def test_deterministic_kernels_are_exact_and_repeatable(backend: str, name: str, groups: int, d: int) -> None:
    assert determinism_options() == {"deterministic": True}
    kernel, (spec, mask) = made(backend, d), spec_of(name)
    x = inputs(mask.shape[2], groups, d, torch.bfloat16)
    found = of(kernel, x, spec)
    check(found, x, mask)
    for one, other in zip(found, of(kernel, x, spec), strict=True):
        assert torch.equal(one, other)


@pytest.mark.usefixtures("_deterministic")
@pytest.mark.parametrize("name", ["whole", "causal", "run", "window", "documents"])
@pytest.mark.parametrize(("groups", "d"), [(2, 128), (4, 64), (1, 80), (2, 256)])
@pytest.mark.parametrize("first_key", [0, 64, 30])
def test_dropout_and_softcaps(name: str, groups: int, d: int, first_key: int) -> None:
    """The same probabilities are dropped as on a CPU, in blocks at any position; twice the same bits."""
    spec, mask = spec_of(name)
    queries = mask.shape[2]
    end = first_key + S
    rule = Dropout(p=0.1, key=2**63 + 5, num_heads=HEADS + 3, first_sample=2**31, first_head=2)
    rule = rule.of_block([range(end - queries, end)], [range(first_key, end)])
    spec, kernel = dataclasses.replace(spec, dropout=rule), TritonAttention(d**-0.5, softcap=3.0)
    x = inputs(queries, groups, d, DTYPES.get(d, torch.bfloat16))
    found = of(kernel, x, spec)
    check(found, x, mask, rule, softcap=3.0)
    for one, other in zip(found, of(kernel, x, spec), strict=True):
        assert torch.equal(one, other)
