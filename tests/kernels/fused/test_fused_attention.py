"""Our attention kernel against eager attention in fp64: masks, groups, head widths, softcaps, and the same dropout mask.

Sizes are small and uneven, so that Triton's interpreter can run them; `test_attention_on_gpus.py` has larger ones.
"""

from __future__ import annotations

import dataclasses

import pytest
import torch
from fused_helpers import DEVICE, DTYPES, drawn
from torch import Tensor

from megatrain.kernels.attention.dropout import Dropout
from megatrain.kernels.attention.eager import EagerAttention
from megatrain.kernels.attention.interface import CuSeqlens, MaskSpec, SoftmaxMerge
from megatrain.kernels.fused import attention
from megatrain.kernels.fused.attention import Tile, Tiles
from megatrain.parallel.documents import Documents

pytestmark = pytest.mark.filterwarnings(
    "ignore:divide by zero:RuntimeWarning"
)  # log of 0, in the interpreter
B = 2
TILES = Tiles(forward=Tile(64, 64, 4, 1), dq=Tile(64, 128, 4, 1), dkdv=Tile(32, 64, 4, 1))
"""Small tiles, of different sizes in each kernel."""
RULE = Dropout(p=0.1, key=0x9234_5678_9ABC_DEF1, num_heads=6, first_sample=2**33, first_head=2)
"""A stream whose numbers do not fit in 32 bits."""


def rules(
    sq: int, sk: int, window: int | None = None, ends: list[int] | None = None
) -> tuple[MaskSpec, Tensor]:
    """Return a causal mask by rules and the equivalent explicit mask; `ends`: of documents in samples of `sk` tokens."""
    query, key = torch.arange(sk - sq, sk)[:, None], torch.arange(sk)
    mask = ((query >= key) & (query - key <= (sk if window is None else window))).expand(B, 1, sq, sk)
    cu_seqlens = None
    if ends is not None:
        documents = Documents(torch.tensor(ends, dtype=torch.int32), sk, B, sk)
        number = documents.document_ids
        mask = mask & (number[:, sk - sq :].unsqueeze(-1) == number.unsqueeze(-2)).unsqueeze(1)
        of_queries, of_keys = (documents.cu_seqlens_within(range(sk - n, sk)).to(DEVICE) for n in (sq, sk))
        cu_seqlens = CuSeqlens(of_queries, of_keys, sq, sk)
    return MaskSpec(is_causal=True, window=window, cu_seqlens=cu_seqlens), mask.to(DEVICE)


def inputs(
    sq: int, sk: int, heads: int, groups: int, d: int, dtype: torch.dtype = torch.float32
) -> list[Tensor]:
    """Return q, k, v as views of fused projections, and the gradient of the output."""
    q, kv = drawn(sq, B, heads + 1, d, dtype=dtype), drawn(sk, B, 2 * groups, d, dtype=dtype)
    return [q[:, :, 1:], kv[:, :, :groups], kv[:, :, groups:], drawn(sq, B, heads, d, dtype=dtype, seed=1)]


def check(x: list[Tensor], spec: MaskSpec, mask: Tensor | None, softcap: float | None = None) -> None:
    """Compare output, log-sum-exp and gradients with those of eager attention."""
    q, k, v, dout = x
    scale, dtype = q.shape[-1] ** -0.5, q.dtype
    options = {"scale": scale, "softcap": softcap, "tiles": TILES}
    out, lse = attention.forward(q, k, v, spec, **options)
    found = [out, lse, *attention.backward(dout, q, k, v, out, lse, spec, **options)[:3]]
    eager, exact = EagerAttention(scale=scale, softcap=softcap), [one.double() for one in x]
    expected_spec = MaskSpec(explicit=mask, dropout=spec.dropout)
    expected_out, expected_lse = eager.forward(*exact[:3], expected_spec)
    gradients = eager.backward(exact[3], *exact[:3], expected_out, expected_lse, expected_spec)
    # A product of rounded factors per term: a few units of the dtype's rounding, relative to the largest value.
    bound = 1e-5 if dtype == torch.float32 else 8 * torch.finfo(dtype).eps
    for name, own, wanted in zip(
        ("out", "lse", "dq", "dk", "dv"), found, [expected_out, expected_lse, *gradients], strict=True
    ):
        assert own.dtype == (torch.float32 if name == "lse" else dtype)
        assert torch.equal(own.isneginf(), wanted.isneginf()), name
        finite = wanted.isfinite()
        error, size = (own.double() - wanted)[finite].abs().max(), wanted[finite].abs().max()
        assert error <= bound * size.clamp(min=1), f"{name} is off by {error} of {size}"


WHOLE = [0, 200, 400]
CASES = {
    "causal": (130, 130, {}),
    "causal, whole tiles": (128, 128, {}),
    "last queries": (70, 200, {}),
    "window": (150, 150, {"window": 20}),
    "the query alone": (70, 70, {"window": 0}),
    "window over several tiles": (70, 300, {"window": 190}),
    "documents": (200, 200, {"ends": [0, 1, 150, 200, 331, 331, 400]}),
    "documents, last queries, window": (70, 200, {"window": 40, "ends": [0, 10, 150, 200, 215, 340, 400]}),
    "samples as documents": (200, 200, {"ends": WHOLE}),
}


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("p", [0.0, 0.1])
def test_masks(name: str, p: float) -> None:
    sq, sk, options = CASES[name]
    spec, mask = rules(sq, sk, **options)
    if p:
        rule = RULE.of_block([range(sk - sq, sk)], [range(sk)])
        spec = dataclasses.replace(spec, dropout=rule)
    check(inputs(sq, sk, heads=2, groups=1, d=16), spec, mask)


@pytest.mark.parametrize("d", [8, 64, 72, 128, 256])
@pytest.mark.parametrize(("heads", "groups"), [(4, 4), (4, 2), (3, 1)])
def test_head_widths_and_groups(d: int, heads: int, groups: int) -> None:
    spec, mask = rules(70, 70)
    rule = RULE.of_block([range(70)], [range(70)])
    check(inputs(70, 70, heads, groups, d), dataclasses.replace(spec, dropout=rule), mask, softcap=0.7)


BLOCKS = {
    "two chunks": ((range(64, 128), range(256, 320)), (range(64, 128), range(256, 320))),
    "a chunk that ends in a block": ((range(96, 144),), (range(96), range(144, 192))),
    "small chunks": ((range(6, 12), range(36, 42)), (range(12, 18), range(30, 36))),
    "keys from the middle of a block": ((range(130, 180),), (range(35, 180),)),
}
"""Positions of queries and keys on context ranks."""


@pytest.mark.parametrize("name", BLOCKS)
@pytest.mark.parametrize("p", [0.1, 0.5])
def test_dropout_is_a_function_of_positions(name: str, p: float) -> None:
    queries, keys = BLOCKS[name]
    rule = dataclasses.replace(RULE, p=p).of_block(queries, keys)
    sq, sk = (sum(map(len, part)) for part in (queries, keys))
    check(inputs(sq, sk, heads=2, groups=2, d=32), MaskSpec(dropout=rule), None)


def test_the_first_sample_is_read_from_memory() -> None:
    """CUDA graphs repeat kernels with other samples."""
    q, k, v, dout = inputs(70, 70, heads=2, groups=1, d=16)
    rule = RULE.of_block([range(70)], [range(70)])
    found = []
    for sample in (
        rule.first_sample,
        torch.tensor(rule.first_sample, device=DEVICE),
        torch.tensor(3, device=DEVICE),
    ):
        spec = MaskSpec(dropout=dataclasses.replace(rule, first_sample=sample))
        out, lse = attention.forward(q, k, v, spec, scale=0.25, softcap=None, tiles=TILES)
        backward = attention.backward(dout, q, k, v, out, lse, spec, scale=0.25, softcap=None, tiles=TILES)
        found.append(torch.cat([part.flatten() for part in (out, *backward)]))
    assert torch.equal(found[0], found[1])
    assert not torch.equal(found[0], found[2])


def test_blocks_with_merged_outputs_have_the_gradients_of_the_whole() -> None:
    """The backward pass of a block takes the merged output and log-sum-exp."""
    q, k, v, dout = inputs(64, 192, heads=2, groups=1, d=16)
    queries, parts = [range(192, 256)], [range(128), range(128, 192)]
    options = {"scale": 0.25, "softcap": None, "tiles": TILES}
    specs = [MaskSpec(dropout=RULE.of_block(queries, [part])) for part in parts]
    blocks = [(k[part.start : part.stop], v[part.start : part.stop]) for part in parts]
    merge = SoftmaxMerge(*attention.forward(q, *blocks[0], specs[0], **options))
    merge.add(*attention.forward(q, *blocks[1], specs[1], **options))
    whole = MaskSpec(dropout=RULE.of_block(queries, [range(192)]))
    out, lse = attention.forward(q, k, v, whole, **options)
    dq, dk, dv, _ = attention.backward(dout, q, k, v, out, lse, whole, **options)
    torch.testing.assert_close(merge.out, out)
    torch.testing.assert_close(merge.lse, lse)
    grads = [
        attention.backward(dout, q, *block, merge.out.to(q.dtype), merge.lse, spec, **options)
        for block, spec in zip(blocks, specs, strict=True)
    ]
    torch.testing.assert_close(grads[0][0] + grads[1][0], dq, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(torch.cat([one[1] for one in grads]), dk, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(torch.cat([one[2] for one in grads]), dv, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("dtype", DTYPES)
def test_dtypes(dtype: torch.dtype) -> None:
    spec, mask = rules(100, 100)
    rule = RULE.of_block([range(100)], [range(100)])
    check(inputs(100, 100, 2, 1, 64, dtype), dataclasses.replace(spec, dropout=rule), mask)
