"""Attention of a block of queries to a block of keys, with dropout, softcaps and a bias of distances, without scores in memory.

    forward         a tile of queries, all their keys                            -> out, lse, and which probabilities dropout keeps
    dq_of_queries   a tile of queries, all their keys                            -> dq, and dout . out for the next kernel
    dkdv_of_keys    a tile of keys, all their queries in all heads of the group  -> dk, dv

Each result is written by one program: there are no atomic sums, and results are deterministic. With a bias dkdv_of_keys runs first
and stores the gradients of scores, from which dq_of_scores computes dq, and which two more kernels sum by bucket of the bias: computed
from scores a second time, with their bias, dq takes longer. Scores are fp32, the softmax has base 2. Causal masks, windows and
documents are one range of keys per query, and one range of queries per key.

Sources: FlashAttention-2, arXiv:2307.08691; `fused/attention_dropout.py` for the dropout mask.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from megatrain.kernels.attention.dropout import Dropout
from megatrain.kernels.attention.interface import DistanceBias, MaskSpec
from megatrain.kernels.fused import attention_kernels as kernels
from megatrain.kernels.fused.attention_dropout import stored_mask
from megatrain.kernels.fused.launching import cdiv, is_fake, launch, power_of_two
from megatrain.kernels.fused.random import halves
from megatrain.kernels.fused.sums import PROGRAMS


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

_BIASED = Tile(64, 128, 4, 2)
"""The tile of `forward` with a bias, for the narrowest heads."""
_OF_SCORES = Tile(64, 64, 4, 3)
"""The tile of `dq` from gradients of scores."""
_NEAR, _DISTANCES, _NEAR_WARPS = 2048, 128, 2
"""Values and most distances of a program of `gradients_near`, and its warps."""
_MARGIN = 128
"""A multiple of the queries and of the keys of all tiles."""
_MAX_BYTES = 2**30
"""Bytes of dropout masks and gradients of scores of one launch, unless a group of heads needs more."""
_LOG2_E = 1.4426950408889634


class Gradients(NamedTuple):
    """Gradients of a block's inputs."""

    q: Tensor
    k: Tensor
    v: Tensor
    bias: Tensor | None
    """Gradient of `DistanceBias.table`, in fp32."""
    sums: tuple[Tensor, Tensor] | None = None
    """Rows whose sums are those over rows and samples of q's, [rows, n d], and of k's and v's, [rows, 2 g d], in fp32."""


class Prepared(NamedTuple):
    """Padding and bias as kernels read them; without the one or the other any tensor."""

    tokens: Tensor
    bounds: Tensor
    """Bounds of the tokens of each sample, see `kernels.tokens_of_samples`."""
    bias: Tensor
    """In the dtype of the table, [n, distances], with distances that only rows outside have, so that tiles load it without a mask."""
    bias_2: Tensor
    """The same to base 2, in fp32."""


def prepared(q: Tensor, k: Tensor, mask: MaskSpec, bias: DistanceBias | None) -> Prepared:
    """Compute what both passes read."""
    tokens = bounds = wide = wide_2 = q
    if mask.is_token is not None:
        tokens, (b, sk) = mask.is_token.contiguous().view(torch.uint8), mask.is_token.shape
        bounds = torch.empty(b, 2, dtype=torch.int32, device=q.device)
        launch(kernels.tokens_of_samples, (b,), bounds, tokens, sk, BLOCK=1024)
    if bias is not None:
        table, n, (width, zero) = bias.table.contiguous(), q.shape[2], _distances(q, k)
        wide = torch.empty(n, width, dtype=table.dtype, device=q.device)
        wide_2 = torch.empty_like(wide, dtype=torch.float32)
        first = zero + 1 - q.shape[0]
        launch(
            kernels.bias_of_distances, (cdiv(width, 1024), n), wide, wide_2, table, bias.buckets, first, len(bias.buckets), n, width, BLOCK=1024
        )  # fmt: skip
    return Prepared(tokens, bounds, wide, wide_2)


def _distances(q: Tensor, k: Tensor) -> tuple[int, int]:
    """Return the number of distances of `Prepared.bias`, and the place of distance 0."""
    before, after = (cdiv(x.shape[0], _MARGIN) * _MARGIN for x in (q, k))
    return before + after, before


def forward(
    q: Tensor, k: Tensor, v: Tensor, mask: MaskSpec,
    *, scale: float, softcap: float | None, bias: DistanceBias | None = None, kept: Tensor | None = None, masks: Prepared | None = None,
    tiles: Tiles | None = None,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Implement `AttentionKernel.forward`; masks have no `explicit`.

    Args:
        bias: added to the scaled scores; None: none.
        masks: of `prepared`, if it is known.
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
        lse if first is None else first, *_masks(q, k, mask, bias, masks), *_numbers(q, k, mask, scale, softcap), *_dropout(mask.dropout, q),
        HAS_FIRST=first is not None, STORES_MASK=kept is not None, IS_ALIGNED=_is_aligned(mask.dropout),
        HAS_BIAS=bias is not None, **_constants(q, k, mask, softcap, tile),
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
    *, scale: float, softcap: float | None, bias: DistanceBias | None = None, kept: Tensor | None = None, masks: Prepared | None = None,
    has_sums: bool = False, tiles: Tiles | None = None,
) -> Gradients:  # fmt: skip
    """Implement `AttentionKernel.backward`; arguments as in `forward`. `has_sums`: sum the gradients too."""
    (sq, b, n, d), (sk, _, g, _), rule = q.shape, k.shape, mask.dropout
    shape = (0, 0) if bias is None else tuple(cdiv(x.shape[0], _MARGIN) * _MARGIN for x in (k, q))
    num_bytes = b * n * shape[0] * shape[1] * q.element_size()
    if rule is not None and kept is None:
        num_bytes += b * n * sq * _mask_width(k)
    if g > 1 and num_bytes > _MAX_BYTES:
        size = max(g * _MAX_BYTES // num_bytes, 1)
        return _backward_by_groups(
            size, dout, q, k, v, out, lse, mask, scale=scale, softcap=softcap, bias=bias, kept=kept, has_sums=has_sums, tiles=tiles
        )  # fmt: skip
    dout, q, k, v, out = (_with_contiguous_channels(x) for x in (dout, q, k, v, out))
    _, of_queries, of_keys = tiles or tiles_of(q, bias)
    dq, dk, dv = _new_gradients(q, k)
    tiles_q, tiles_k = cdiv(sq, of_queries.queries), cdiv(sk, of_keys.keys)
    lse = lse.permute(1, 2, 0).contiguous()
    of_rows = torch.empty_like(lse), torch.empty_like(lse), *_mask_of(q, k, rule, kept)
    sums, scores = (lse, lse), q
    if has_sums:
        sums = lse.new_empty(b * tiles_q, n * d), lse.new_empty(b * tiles_k, 2 * g * d)
    first, masks = _first_keys(q, k, mask), masks or prepared(q, k, mask, bias)
    end = _query_ends(first, sk)
    *padding, _, bias_at = _masks(q, k, mask, bias, masks)
    numbers = scale, *_numbers(q, k, mask, scale, softcap)
    if bias is None:
        launch(
            kernels.dq_of_queries, (tiles_q, n, b),
            *_with_strides(q, k, v, dout, out, dq), lse, *of_rows, sums[0], lse if first is None else first, *padding, *numbers,
            HAS_FIRST=first is not None, HAS_SUMS=has_sums, **_constants(q, k, mask, softcap, of_queries),
        )  # fmt: skip
    else:
        assert first is None, "a bias with windows or documents"
        assert softcap is None, "a bias with a softcap"
        scores = q.new_empty(b * n, *shape)
        launch(
            kernels.numbers_of_rows, (cdiv(sq, 64), n, b), *_with_strides(dout, out), lse, *of_rows[:2], sq, numbers[-1],
            CHANNELS=d, PADDED=max(power_of_two(d), 16), QUERIES=64,
        )  # fmt: skip
    launch(
        kernels.dkdv_of_keys, (tiles_k, g, b),
        *_with_strides(q, k, v, dout, dk, dv), scores, shape, *of_rows, sums[1], lse if end is None else end, *padding, masks.bias, bias_at, *numbers,
        HAS_END=end is not None, HAS_SUMS=has_sums, HAS_BIAS=bias is not None, **_constants(q, k, mask, softcap, of_keys),
    )  # fmt: skip
    dtable = None
    if bias is not None:
        far, factor = lse.new_empty(b, tiles_q, n, 2), scale * numbers[-1]
        constants = _constants(q, k, mask, softcap, of_queries)
        del constants["HAS_SOFTCAP"], constants["HAS_DROPOUT"]
        launch(
            kernels.dq_of_scores, (tiles_q, n, b), *_with_strides(k, dq), scores, shape, far, sums[0], *padding, bias.reach, factor, *numbers[1:4],
            HAS_SUMS=has_sums, **constants,
        )  # fmt: skip
        dtable = _bias_gradient(scores, far, q, k, mask, bias, masks, of_queries)
    return Gradients(dq, dk, dv, dtable, sums if has_sums else None)


def _mask_of(q: Tensor, k: Tensor, rule: Dropout | None, kept: Tensor | None) -> tuple[Tensor, int]:
    """Return the mask of dropout, computed unless the forward pass stored it, and its width."""
    (sq, b, n, _), width = q.shape, _mask_width(k)
    if rule is None:
        return q, width
    if kept is None:
        kept = stored_mask((b, n, sq), width, _dropout(rule, q), is_aligned=_is_aligned(rule))
    return kept, width


def _bias_gradient(
    scores: Tensor, far: Tensor, q: Tensor, k: Tensor, mask: MaskSpec, bias: DistanceBias, masks: Prepared, tile: Tile
) -> Tensor:  # fmt: skip
    """Return the gradient of the bias's table, fp32 [buckets, n], from gradients of scores and what `dq_of_scores` wrote to FAR with this tile."""
    (sq, b, n, _), sk, (queries, keys, *_) = q.shape, k.shape[0], tile
    assert sq == sk or not mask.is_causal, "as many queries as keys"
    # Rows of tiles that are not far, counted from the multiple of 8 at or before a key.
    step, sides = min(queries, keys), bias.reach + queries + keys - 2
    first = 0 if mask.is_causal else max(-((sides - keys) // step * step + keys - 8), -sk // 8 * 8)
    distances = min(sides // step * step, sq) - first
    block = min(max(power_of_two(distances), 32), _DISTANCES)
    rows, places, num = _NEAR // block, cdiv(distances, block), power_of_two(len(bias.table))
    parts = 8 * min(cdiv(PROGRAMS, 8 * places * n), b * cdiv(sk, 8 * rows))
    sums, dtable = far.new_empty(parts, places, n, num), far.new_empty(bias.table.shape)
    launch(
        kernels.gradients_near, (places, n, parts), scores, tuple(scores.shape[1:]), sums, bias.buckets, first // 8, bias.reach, b, sq, sk, masks.tokens,
        QUERIES=queries, KEYS=keys, ROWS=rows, DISTANCES=block, NUM=num, HAS_PADDING=mask.is_token is not None, num_warps=_NEAR_WARPS,
    )  # fmt: skip
    keep_factor = 1.0 if mask.dropout is None else mask.dropout.factor
    launch(
        kernels.gradients_of_buckets, (n,), sums, far, bias.buckets, dtable, len(dtable), parts * places, far.numel() // (2 * n), sq + sk - 1, keep_factor,
        NUM=num, BLOCK=64,
    )  # fmt: skip
    return dtable


def _new_gradients(q: Tensor, k: Tensor) -> tuple[Tensor, ...]:
    """Allocate dq, dk and dv; of as many queries as keys as views of one tensor, the gradient of a joint projection."""
    (sq, b, n, d), (sk, _, g, _) = q.shape, k.shape
    if sq == sk:
        dq, dk, dv = q.new_empty(sq, b, n + 2 * g, d).split((n, g, g), dim=2)
        return dq, dk, dv
    return q.new_empty(q.shape), *k.new_empty(sk, b, 2 * g, d).chunk(2, dim=2)


def _backward_by_groups(
    size: int, dout: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, mask: MaskSpec,
    *, bias: DistanceBias | None, kept: Tensor | None, has_sums: bool, **options: Any,
) -> Gradients:  # fmt: skip
    """Compute `backward` for `size` groups of heads after the other, as the memory of all would be large."""
    rule, heads = mask.dropout, q.shape[2] // k.shape[2] * size
    found = []
    for first in range(0, q.shape[2], heads):
        of_heads = slice(first, first + heads)
        of_groups = slice(first // heads * size, (first // heads + 1) * size)
        own_rule = None if rule is None else replace(rule, first_head=rule.first_head + first)
        own_bias = None if bias is None else bias._replace(table=bias.table[:, of_heads])
        found.append(
            backward(
                dout[:, :, of_heads], q[:, :, of_heads], k[:, :, of_groups], v[:, :, of_groups], out[:, :, of_heads], lse[:, :, of_heads],
                replace(mask, dropout=own_rule), bias=own_bias, kept=None if kept is None else kept[:, of_heads].contiguous(), has_sums=has_sums, **options,
            )
        )  # fmt: skip
    dq, dk, dv = (torch.cat(parts, dim=2) for parts in zip(*(one[:3] for one in found), strict=True))
    of_bias = [one.bias for one in found if one.bias is not None]
    sums = None
    if has_sums:
        of_queries, of_keys = zip(*(one.sums for one in found if one.sums is not None), strict=True)
        halves = zip(*(x.chunk(2, dim=1) for x in of_keys), strict=True)
        sums = torch.cat(of_queries, dim=1), torch.cat([x for parts in halves for x in parts], dim=1)
    return Gradients(dq, dk, dv, torch.cat(of_bias, dim=1) if of_bias else None, sums)


def tiles_of(q: Tensor, bias: DistanceBias | None = None) -> Tiles:
    """Return the tiles for the width of the heads."""
    width = max(power_of_two(q.shape[-1]), min(TILES))
    tiles = TILES[width]
    if bias is None:
        return tiles
    return Tiles(_BIASED if width == min(TILES) else tiles.forward, _OF_SCORES, tiles.dkdv)


def _with_contiguous_channels(x: Tensor) -> Tensor:
    return x if x.stride(-1) == 1 else x.contiguous()


def _with_strides(*tensors: Tensor) -> Iterator[Any]:
    """Yield the tensors, then the strides of rows, samples and heads of each."""
    yield from tensors
    for x in tensors:
        yield x.stride()[:3]


def _masks(
    q: Tensor, k: Tensor, mask: MaskSpec, bias: DistanceBias | None, masks: Prepared | None
) -> tuple[Any, ...]:
    """Return the mask of padding with its bounds, the bias to base 2, the distances of a head, the place of distance 0 in it, and the reach."""
    at = (0, 0, 0) if bias is None else (*_distances(q, k), bias.reach)
    tokens, bounds, _, bias_2 = masks or prepared(q, k, mask, bias)
    return tokens, bounds, bias_2, at


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


def _query_ends(first: Tensor | None, sk: int) -> Tensor | None:
    """Return the row after the last query that attends to each key, apart from causality: int32 [b, sk]; None: the last one."""
    if first is None:
        return None
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


def _constants(q: Tensor, k: Tensor, mask: MaskSpec, softcap: float | None, tile: Tile) -> dict[str, Any]:
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
        "IS_EVEN": q.shape[0] % tile.queries == 0 and k.shape[0] % tile.keys == 0,
        "num_warps": tile.warps,
        "num_stages": tile.stages,
        **({} if tile.registers is None else {"maxnreg": tile.registers}),
        "enable_fp_fusion": True,
    }
