"""Attention of a block of queries to a block of keys, with dropout, softcaps and a bias of distances, without scores in memory.

    forward         a tile of queries, all their keys                            -> out, lse, and which probabilities dropout keeps
    dq_of_queries   a tile of queries, all their keys                            -> dq, and dout . out for the next kernel
    dkdv_of_keys    a tile of keys, all their queries in all heads of the group  -> dk, dv

Each result is written by one program: there are no atomic sums, and results are deterministic. For the gradient of a bias the
second kernel also writes gradients of scores: those near the diagonal, where each distance has its own bias, and the sums of the
others. Scores are fp32, the softmax has base 2. Causal masks, windows and documents are one range of keys per query, and one range of queries per key.

Sources: FlashAttention-2, arXiv:2307.08691; `fused/attention_dropout.py` for the dropout mask.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import pad

from megatrain.kernels.attention.dropout import Dropout
from megatrain.kernels.attention.interface import DistanceBias, MaskSpec
from megatrain.kernels.fused import attention_kernels as kernels
from megatrain.kernels.fused.attention_dropout import stored_mask
from megatrain.kernels.fused.launching import cdiv, is_fake, launch, power_of_two
from megatrain.kernels.fused.random import halves
from megatrain.kernels.fused.sums import column_sums


class Tile(NamedTuple):
    """Scores that a program holds, and its resources."""

    queries: int
    keys: int
    """A multiple of 64."""
    warps: int
    stages: int
    registers: int | None = None
    """Most registers of a thread; None: the compiler's choice."""


class Tiles(NamedTuple):
    """The tile of each kernel."""

    forward: Tile
    dq: Tile
    dkdv: Tile


TILES = {
    64: Tiles(Tile(64, 64, 4, 3, 168), Tile(64, 64, 4, 3), Tile(64, 64, 4, 2)),
    128: Tiles(Tile(64, 64, 4, 3), Tile(128, 64, 8, 3), Tile(32, 64, 4, 2)),
    256: Tiles(Tile(128, 64, 8, 2), Tile(64, 64, 8, 2), Tile(32, 64, 8, 2)),
}
"""Tiles by the least power of two that is at least the head width."""

_BIASED = Tile(64, 128, 4, 2), Tile(64, 64, 4, 2, 168)
"""Tiles of `forward` and `dq` with a bias, for the narrowest heads."""
_MARGIN = 128
"""A multiple of the queries and of the keys of all tiles."""
_MAX_KEPT_BYTES = 2**29
"""Bytes of the dropout mask of one launch, unless a group of heads needs more."""
_LOG2_E = 1.4426950408889634


class Gradients(NamedTuple):
    """Gradients of a block's inputs."""

    q: Tensor
    k: Tensor
    v: Tensor
    bias: Tensor | None
    """Gradient of `DistanceBias.values`: beyond the reach the sum of each direction is right, not the single distances."""
    sums: tuple[Tensor, Tensor] | None = None
    """Sums over rows and samples of q's, [n d], and of k's and v's, [2 g d], in fp32."""


def forward(
    q: Tensor, k: Tensor, v: Tensor, mask: MaskSpec,
    *, scale: float, softcap: float | None, bias: DistanceBias | None = None, kept: Tensor | None = None, tiles: Tiles | None = None,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Implement `AttentionKernel.forward`; masks have no `explicit`.

    Args:
        bias: added to the scaled scores; None: none.
        kept: of `memory_for_mask`, gets the mask of dropout; None: the backward pass computes it again.
    """
    (sq, b, n, _), tile = q.shape, (tiles or tiles_of(q, bias)).forward
    q, k, v = (_with_contiguous_channels(x) for x in (q, k, v))
    out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
    lse = torch.empty(b, n, sq, dtype=torch.float32, device=q.device)
    first = _first_keys(q, k, mask)
    launch(
        kernels.forward, (cdiv(sq, tile.queries), n, b),
        *_with_strides(q, k, v, out), lse, *((lse, 0) if kept is None else (kept, kept.shape[-1])),
        lse if first is None else first, *_masks(q, k, mask, bias), *_numbers(q, k, mask, scale, softcap), *_dropout(mask.dropout, q),
        HAS_FIRST=first is not None, STORES_MASK=kept is not None, IS_ALIGNED=_is_aligned(mask.dropout),
        **_constants(q, k, mask, softcap, bias, tile),
    )  # fmt: skip
    return out, lse.permute(2, 0, 1)


def memory_for_mask(q: Tensor, k: Tensor, rule: Dropout | None) -> Tensor | None:
    """Return memory for the mask of dropout until the backward pass, uint8 [b, n, sq, keys / 8], at most a quarter of q, k, v and out.

    None: it would be more, or positions are not aligned.
    """
    (sq, b, n, d), width = q.shape, _mask_width(k)
    if not _is_aligned(rule) or width > 2 * d:
        return None
    return torch.empty(b, n, sq, width, dtype=torch.uint8, device=q.device)


def _mask_width(k: Tensor) -> int:
    return cdiv(k.shape[0], _MARGIN) * _MARGIN // 8


def backward(
    dout: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, mask: MaskSpec,
    *, scale: float, softcap: float | None, bias: DistanceBias | None = None, kept: Tensor | None = None,
    has_sums: bool = False, tiles: Tiles | None = None,
) -> Gradients:  # fmt: skip
    """Implement `AttentionKernel.backward`; `bias` and `kept` as in `forward`. `has_sums`: sum the gradients too, if all heads are computed together."""
    (sq, b, n, d), (sk, _, g, _), rule = q.shape, k.shape, mask.dropout
    width = _mask_width(k)
    if rule is not None and kept is None and g > 1 and b * n * sq * width > _MAX_KEPT_BYTES:
        return _backward_by_group(
            dout, q, k, v, out, lse, mask, scale=scale, softcap=softcap, bias=bias, tiles=tiles
        )
    _, of_queries, of_keys = tiles or tiles_of(q, bias)
    dout, q, k, v, out = (_with_contiguous_channels(x) for x in (dout, q, k, v, out))
    lse = lse.permute(1, 2, 0).contiguous()
    dq, dk, dv = _new_gradients(q, k)
    lse_2, dout_dot_out = torch.empty_like(lse), torch.empty_like(lse)
    scores = _ScoreGradients(lse, lse, (0, 0))
    if bias is not None:
        scores = _new_score_gradients(q, k, bias.reach, of_queries, is_causal=mask.is_causal)
    first, masks, numbers = (
        _first_keys(q, k, mask),
        _masks(q, k, mask, bias),
        _numbers(q, k, mask, scale, softcap),
    )
    if rule is None:
        kept = lse
    elif kept is None:
        kept = stored_mask((b, n, sq), width, _dropout(rule, q), is_aligned=_is_aligned(rule))
    of_rows = lse_2, dout_dot_out, kept, width
    tiles_q, tiles_k = cdiv(sq, of_queries.queries), cdiv(sk, of_keys.keys)
    sums = lse, lse
    if has_sums:
        sums = lse.new_empty(b * tiles_q, n * d), lse.new_empty(b * tiles_k, 2 * g * d)
    launch(
        kernels.dq_of_queries, (tiles_q, n, b),
        *_with_strides(q, k, v, dout, out, dq), lse, *of_rows, *scores, sums[0], lse if first is None else first, *masks, scale, *numbers,
        HAS_FIRST=first is not None, HAS_SUMS=has_sums, **_constants(q, k, mask, softcap, bias, of_queries),
    )  # fmt: skip
    end = None if first is None else _query_ends(first, sk)
    launch(
        kernels.dkdv_of_keys, (tiles_k, g, b),
        *_with_strides(q, k, v, dout, dk, dv), *of_rows, sums[1], lse if end is None else end, *masks, scale, *numbers,
        HAS_END=end is not None, HAS_SUMS=has_sums, **_constants(q, k, mask, softcap, bias, of_keys),
    )  # fmt: skip
    dbias = None
    if bias is not None:
        assert first is None, "a bias with windows or documents"
        assert softcap is None, "a bias with a softcap"
        dbias = scores.sums_of_distances(sq, sk)
        dbias = (dbias if rule is None else dbias * rule.factor).to(bias.values.dtype)
    return Gradients(dq, dk, dv, dbias, (column_sums(sums[0]), column_sums(sums[1])) if has_sums else None)


def _new_gradients(q: Tensor, k: Tensor) -> tuple[Tensor, ...]:
    """Allocate dq, dk and dv; of as many queries as keys as views of one tensor, the gradient of a joint projection."""
    (sq, b, n, d), (sk, _, g, _) = q.shape, k.shape
    if sq == sk:
        dq, dk, dv = q.new_empty(sq, b, n + 2 * g, d).split((n, g, g), dim=2)
        return dq, dk, dv
    return q.new_empty(q.shape), *k.new_empty(sk, b, 2 * g, d).chunk(2, dim=2)


class _ScoreGradients(NamedTuple):
    """Gradients of scores that `dq_of_queries` stores for the gradient of a bias of distances."""

    far: Tensor
    """Sums over the tiles with one bias before and after each query, fp32 [b, n, 2, sq]."""
    near: Tensor
    """Gradients of the other tiles, [b, tiles, n, queries of a tile, width], in the dtype of q."""
    near_at: tuple[int, int]
    """The width, and the first key less the first query of a tile."""

    def sums_of_distances(self, sq: int, sk: int) -> Tensor:
        """Return the gradient of the bias, fp32 [n, sq + sk - 1]; that of far distances is a sum, in part at the first and the last one."""
        _, _, n, queries, width = self.near.shape
        sums = column_sums(self.near.flatten(0, 1).flatten(1))
        # A key in column c has the distance c + first - i from query i: each row moves by one place from the row below it.
        rows = pad(sums.view(n, queries, width).flip(1), (0, queries)).flatten(1)[:, :-queries]
        near, zero = rows.view(n, queries, -1).sum(1), queries - 1 - self.near_at[1]
        gradient = torch.zeros(n, sq + sk - 1, dtype=torch.float32, device=near.device)
        start, end = max(1 - sq, -zero), min(sk, near.shape[1] - zero)
        gradient[:, start + sq - 1 : end + sq - 1] = near[:, start + zero : end + zero]
        far = self.far.sum((0, 3))
        gradient[:, 0] += far[:, 0]
        gradient[:, -1] += far[:, 1]
        return gradient


def _new_score_gradients(q: Tensor, k: Tensor, reach: int, tile: Tile, *, is_causal: bool) -> _ScoreGradients:
    """Allocate them for tiles of `dq_of_queries`; see `DistanceBias` for the reach."""
    (sq, b, n, _), sk, (queries, keys, *_) = q.shape, k.shape[0], tile
    assert queries % keys == 0, "tiles of queries begin where tiles of keys do"
    assert sq == sk or not is_causal, "as many queries as keys"
    tiles = cdiv(sq, queries)
    first = -min((reach + keys - 2) // keys * keys, (tiles - 1) * queries)
    last = min((reach + queries - 2) // keys * keys, (cdiv(sk, keys) - 1) * keys)
    width = (min(last, queries - keys) if is_causal else last) - first + keys
    near = q.new_empty(b, tiles, n, queries, width)
    return _ScoreGradients(q.new_empty(b, n, 2, sq, dtype=torch.float32), near, (width, first))


def _backward_by_group(
    dout: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, mask: MaskSpec, *, bias: DistanceBias | None, **options: Any
) -> Gradients:  # fmt: skip
    """Compute `backward` for one group of heads after the other, as the dropout mask of all would be large."""
    groups, rule = k.shape[2], mask.dropout
    assert rule is not None
    by_group = zip(*(x.chunk(groups, dim=2) for x in (dout, q, k, v, out, lse)), strict=True)
    found = []
    for number, (dout, q, k, v, out, lse) in enumerate(by_group):  # noqa: PLR1704
        heads = q.shape[2]
        of_group = replace(mask, dropout=replace(rule, first_head=rule.first_head + number * heads))
        values = None if bias is None else bias.values[number * heads : (number + 1) * heads]
        own = None if bias is None or values is None else DistanceBias(values, bias.reach)
        found.append(backward(dout, q, k, v, out, lse, of_group, bias=own, **options))
    dq, dk, dv = (torch.cat(parts, dim=2) for parts in zip(*(one[:3] for one in found), strict=True))
    of_bias = [one.bias for one in found if one.bias is not None]
    return Gradients(dq, dk, dv, torch.cat(of_bias) if of_bias else None)


def tiles_of(q: Tensor, bias: DistanceBias | None = None) -> Tiles:
    """Return the tiles for the width of the heads."""
    width = max(power_of_two(q.shape[-1]), min(TILES))
    is_biased = bias is not None and width == min(TILES)
    return Tiles(*_BIASED, TILES[width].dkdv) if is_biased else TILES[width]


def _with_contiguous_channels(x: Tensor) -> Tensor:
    return x if x.stride(-1) == 1 else x.contiguous()


def _with_strides(*tensors: Tensor) -> Iterator[Any]:
    """Yield the tensors, then the strides of rows, samples and heads of each."""
    yield from tensors
    for x in tensors:
        yield x.stride()[:3]


def _masks(q: Tensor, k: Tensor, mask: MaskSpec, bias: DistanceBias | None) -> tuple[Any, ...]:
    """Return the mask of padding with its bounds, the bias, and the distances of a head, the place of distance 0 in it, and the reach.

    The bias is to base 2, and gets distances that only rows outside have, so that tiles load it without a mask.
    """
    tokens = bounds = q
    if mask.is_token is not None:
        tokens, (b, sk) = mask.is_token.contiguous().view(torch.uint8), mask.is_token.shape
        bounds = torch.empty(b, 2, dtype=torch.int32, device=q.device)
        launch(kernels.tokens_of_samples, (b,), bounds, tokens, sk, BLOCK=1024)
    if bias is None:
        return tokens, bounds, q, (0, 0, 0)
    before, after = (cdiv(x.shape[0], _MARGIN) * _MARGIN for x in (q, k))
    wide = pad(bias.values.float() * _LOG2_E, (before + 1 - q.shape[0], after - k.shape[0]))
    return tokens, bounds, wide, (before + after, before, bias.reach)


def _first_keys(q: Tensor, k: Tensor, mask: MaskSpec) -> Tensor | None:
    """Return the row of the first key that each query attends to, int32 [b, sq], ascending; None: 0 for all."""
    (sq, b, *_), sk = q.shape, k.shape[0]
    if (mask.window is None and mask.cu_seqlens is None) or is_fake(q):
        return None
    row = torch.arange(sq, dtype=torch.int32, device=q.device)
    first = torch.zeros(b, sq, dtype=torch.int32, device=q.device)
    if mask.cu_seqlens is not None:
        of_queries, of_keys = mask.cu_seqlens[:2]
        sample = torch.arange(b, dtype=torch.int32, device=q.device).unsqueeze(1)
        document = torch.bucketize(sample * sq + row, of_queries, right=True) - 1
        first = of_keys[document] - sample * sk
    if mask.window is not None:
        first = torch.maximum(first, row + (sk - sq - mask.window))
    return first


def _query_ends(first: Tensor, sk: int) -> Tensor:
    """Return the row after the last query that attends to each key, apart from causality: int32 [b, sk]."""
    keys = torch.arange(sk, dtype=torch.int32, device=first.device).expand(first.shape[0], sk)
    return torch.searchsorted(first, keys.contiguous(), right=True, out_int32=True)


def _numbers(q: Tensor, k: Tensor, mask: MaskSpec, scale: float, softcap: float | None) -> tuple[float, ...]:
    """Return the sizes, the factors of scores and that of probabilities that dropout keeps."""
    assert scale > 0, f"scale {scale}"
    into_tanh = 0.0 if softcap is None else 2 * _LOG2_E * scale / softcap
    factor = (scale if softcap is None else softcap) * _LOG2_E
    keep_factor = 1.0 if mask.dropout is None else mask.dropout.factor
    return q.shape[0], k.shape[0], q.shape[2] // k.shape[2], into_tanh, factor, keep_factor


def _dropout(rule: Dropout | None, unused: Tensor) -> tuple[Any, ...]:
    """Return the first sample, in memory that CUDA graphs read at each replay, and the numbers of dropout."""
    if rule is None:
        return (unused, *[0] * 11)
    first = rule.first_sample
    if not isinstance(first, Tensor):  # the same kernels then run in a graph: they are compiled once
        first = torch.full((), first, dtype=torch.int64, device=unused.device)
    streams = (first, rule.first_head, rule.num_heads, *halves("<Q", rule.key))
    return (*streams, rule.threshold, *_spans(rule.queries), *_spans(rule.keys))


def _is_aligned(rule: Dropout | None) -> bool:
    return rule is not None and rule.has_whole_blocks


def _spans(ranges: Sequence[range]) -> tuple[int, int, int]:
    """Return the start of one or two ranges of positions, the rows of the first, and the jump from its end to the second."""
    first, second = ranges[0], ranges[-1]
    assert len(ranges) <= 2
    return first.start, len(first), second.start - first.stop if len(ranges) > 1 else 0


def _constants(
    q: Tensor, k: Tensor, mask: MaskSpec, softcap: float | None, bias: DistanceBias | None, tile: Tile
) -> dict[str, Any]:
    channels = q.shape[-1]
    return {
        "CHANNELS": channels,
        "PADDED": max(power_of_two(channels), 16),
        "QUERIES": tile.queries,
        "KEYS": tile.keys,
        "IS_CAUSAL": mask.is_causal,
        "HAS_SOFTCAP": softcap is not None,
        "HAS_DROPOUT": mask.dropout is not None,
        "HAS_PADDING": mask.is_token is not None,
        "HAS_BIAS": bias is not None,
        "IS_EVEN": q.shape[0] % tile.queries == 0 and k.shape[0] % tile.keys == 0,
        "num_warps": tile.warps,
        "num_stages": tile.stages,
        **({} if tile.registers is None else {"maxnreg": tile.registers}),
        "enable_fp_fusion": True,
    }
