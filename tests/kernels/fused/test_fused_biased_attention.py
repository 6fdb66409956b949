"""Our attention kernel with padding and a bias of distances, for encoders and cross-attention, against eager attention in fp64."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from fused_helpers import DEVICE, DTYPES, drawn
from torch import Tensor

from megatrain.kernels.attention.dropout import Dropout
from megatrain.kernels.attention.interface import DistanceBias, MaskSpec
from megatrain.kernels.attention.masked import eager_masked_attention, fused_masked_attention
from megatrain.kernels.fused import attention
from megatrain.kernels.fused.attention import Tile, Tiles

pytestmark = [  # in the interpreter: the log of 0, and probabilities of padding, which are dropped after the sums
    pytest.mark.filterwarnings("ignore:divide by zero:RuntimeWarning"),
    pytest.mark.filterwarnings("ignore:(overflow|invalid value) encountered:RuntimeWarning"),
]
B = 2
TILES = Tiles(Tile(64, 64, 4, 1), Tile(128, 64, 4, 1), Tile(32, 64, 4, 1))
"""Small tiles, of different sizes in each kernel."""
RULE = Dropout(p=0.1, key=0x9234_5678_9ABC_DEF1, num_heads=6, first_sample=2**33, first_head=2)


def padding(sk: int) -> Tensor:
    """A sample without padding but one of its tokens, and one whose first token alone is none."""
    tokens = torch.ones(B, sk, dtype=torch.bool, device=DEVICE)
    tokens[0, 3], tokens[1, 1:] = False, False
    return tokens


def found(x: list[Tensor], spec: MaskSpec, bias: DistanceBias | None) -> list[Tensor | None]:
    """Return the output and the gradients of q, k, v and bias."""
    q, k, v, dout = x
    options = {"scale": 0.3, "softcap": None, "bias": bias, "tiles": TILES}
    out, lse = attention.forward(q, k, v, spec, **options)
    results = [out, *attention.backward(dout, q, k, v, out, lse, spec, **options)[:4]]
    kept = attention.memory_for_mask(q, k, spec.dropout)
    if kept is not None:  # of the forward pass
        out, lse = attention.forward(q, k, v, spec, **options, kept=kept)
        *again, sums = attention.backward(dout, q, k, v, out, lse, spec, **options, kept=kept, has_sums=True)
        assert all(torch.equal(x, y) for x, y in zip(results, [out, *again], strict=True) if x is not None)
        assert sums is not None
        of_keys = torch.cat((again[1], again[2]), dim=2)
        for found_sums, gradient in zip(sums, (again[0], of_keys), strict=True):
            wanted = gradient.double().sum((0, 1)).flatten()
            torch.testing.assert_close(
                found_sums.double().sum(0), wanted, rtol=1e-4, atol=1e-4 * wanted.abs().max().item()
            )
    return results


def expected(x: list[Tensor], spec: MaskSpec, bias: DistanceBias | None) -> list[Tensor | None]:
    """Return the same in fp64 by eager attention, with a mask and a bias in memory, differentiated by torch."""
    q, k, v, dout = (one.double().requires_grad_() for one in x)
    (sq, b, n, _), sk = q.shape, k.shape[0]
    table = None if bias is None else bias.table.double().requires_grad_()
    of_pairs = torch.arange(sk, device=DEVICE) - torch.arange(sq, device=DEVICE)[:, None] + sq - 1
    mask = torch.ones(1, 1, sq, sk, dtype=torch.bool, device=DEVICE)
    mask = mask.tril() if spec.is_causal else mask
    mask = mask if spec.is_token is None else mask & spec.is_token[:, None, None]
    kept = None if spec.dropout is None else spec.dropout.mask(b, n, q.device) * spec.dropout.factor
    by_pair = None
    if bias is not None and table is not None:
        by_pair = table[bias.buckets[of_pairs]].permute(2, 0, 1)[None]
    out = eager_masked_attention(q, k, v, mask=mask, bias=by_pair, scale=0.3, kept=kept)
    out.backward(dout)
    return [out.detach(), q.grad, k.grad, v.grad, None if table is None else table.grad]


def check(
    sq: int, sk: int, spec: MaskSpec, *, has_bias: bool, heads: int = 2, groups: int = 2, d: int = 16,
    reach: int = 30, dtype: torch.dtype = torch.float32,
) -> None:  # fmt: skip
    shapes = (sq, B, heads, d), (sk, B, groups, d), (sk, B, groups, d), (sq, B, heads, d)
    x = [drawn(*shape, dtype=dtype, seed=seed) for seed, shape in enumerate(shapes)]
    bias = None
    if has_bias:  # a bucket of each distance, and one beyond the reach
        buckets = torch.arange(1 - sq, sk, dtype=torch.int32).clamp(-reach, reach).to(DEVICE) + reach
        bias = DistanceBias(drawn(2 * reach + 1, heads, dtype=dtype), buckets, reach)
    bound = 1e-5 if dtype == torch.float32 else 8 * torch.finfo(dtype).eps
    for name, own, wanted in zip(
        ("out", "dq", "dk", "dv", "dbias"), found(x, spec, bias), expected(x, spec, bias), strict=True
    ):
        assert (own is None) == (wanted is None), name
        if own is None or wanted is None:
            continue
        assert own.shape == wanted.shape
        error, size = (own.double() - wanted).abs().max(), wanted.abs().max()
        assert error <= bound * size.clamp(min=1), f"{name} is off by {error} of {size}"


SIZES = {"encoder": (130, 130), "whole tiles": (128, 128), "few queries": (70, 200), "few keys": (200, 70)}


@pytest.mark.parametrize("name", SIZES)
@pytest.mark.parametrize("has_padding", [True, False])
@pytest.mark.parametrize("has_bias", [True, False])
def test_padding_and_bias(name: str, *, has_padding: bool, has_bias: bool) -> None:
    sq, sk = SIZES[name]
    rule = RULE.of_block([range(sq)], [range(sk)])
    check(sq, sk, MaskSpec(is_token=padding(sk) if has_padding else None, dropout=rule), has_bias=has_bias)


@pytest.mark.parametrize("p", [0.0, 0.1])
@pytest.mark.parametrize("s", [128, 150])
def test_a_causal_decoder_with_a_bias(s: int, p: float) -> None:
    rule = dataclasses.replace(RULE, p=p).of_block([range(s)], [range(s)])
    check(s, s, MaskSpec(is_causal=True, dropout=rule if p else None), has_bias=True)


@pytest.mark.parametrize("reach", [1, 64, 300])
@pytest.mark.parametrize("is_causal", [True, False])
def test_distances_with_one_bias(reach: int, *, is_causal: bool) -> None:
    """All but the own token, whole tiles, and none."""
    check(200, 200, MaskSpec(is_causal=is_causal), has_bias=True, reach=reach)


@pytest.mark.parametrize("d", [64, 72])
@pytest.mark.parametrize("dtype", DTYPES)
def test_head_widths_groups_and_dtypes(d: int, dtype: torch.dtype) -> None:
    rule = RULE.of_block([range(70)], [range(70)])
    check(
        70,
        70,
        MaskSpec(is_token=padding(70), dropout=rule),
        has_bias=True,
        heads=4,
        groups=2,
        d=d,
        dtype=dtype,
    )


@pytest.mark.parametrize("has_bias", [True, False])
def test_gradients_by_group_are_those_of_all_heads(
    monkeypatch: pytest.MonkeyPatch, *, has_bias: bool
) -> None:
    """Large masks and gradients of scores are stored for one group of heads after the other, or computed again where no bias needs them."""
    rule = RULE.of_block([range(70)], [range(70)])
    monkeypatch.setattr(attention, "_MAX_BYTES", 0)
    check(70, 70, MaskSpec(dropout=rule, is_token=padding(70)), has_bias=has_bias, heads=4, groups=2)


def test_layers_add_the_gradient_of_their_table_in_fp32() -> None:
    dtype, s, reach = torch.bfloat16, 70, 30
    q, k, v, dout = (drawn(s, B, 2, 16, dtype=dtype, seed=seed) for seed in range(4))
    buckets = torch.arange(1 - s, s, dtype=torch.int32).clamp(-reach, reach).to(DEVICE) + reach
    table = drawn(2 * reach + 1, 2, dtype=dtype)
    bias = DistanceBias(table, buckets, reach, torch.zeros(table.shape, device=DEVICE))
    for _ in range(2):
        leaf = q.clone().requires_grad_()
        fused_masked_attention(leaf, k, v, MaskSpec(), bias=bias, scale=0.3).backward(dout)
    out, lse = attention.forward(q, k, v, MaskSpec(), scale=0.3, softcap=None, bias=bias)
    of_one = attention.backward(dout, q, k, v, out, lse, MaskSpec(), scale=0.3, softcap=None, bias=bias).bias
    assert of_one is not None
    assert torch.equal(bias.table_grad, 2 * of_one)
