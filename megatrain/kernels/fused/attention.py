"""Attention of a block of queries to a block of keys, with dropout and softcaps, without scores in memory.

    forward          a tile of queries, all their keys                            -> out, lse
    dq_of_queries    a tile of queries, all their keys                            -> dq, and dout . out for the next kernel
    dkdv_of_keys     a tile of keys, all their queries in all heads of the group  -> dk, dv

Each result is written by one program: there are no atomic sums, and results are deterministic. Scores are fp32, the softmax
has base 2. Causal masks, windows and documents are one range of keys per query, and one range of queries per key.

Sources: FlashAttention-2, arXiv:2307.08691; `fused/attention_dropout.py` for the dropout mask.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from megatrain.kernels.attention.interface import MaskSpec
from megatrain.kernels.fused import attention_kernels as kernels
from megatrain.kernels.fused.launching import cdiv, is_fake, launch, power_of_two
from megatrain.kernels.fused.random import halves


class Tile(NamedTuple):
    """Scores that a program holds, and its resources."""

    queries: int
    keys: int
    """A multiple of 64."""
    warps: int
    stages: int


class Tiles(NamedTuple):
    """The tile of each kernel."""

    forward: Tile
    dq: Tile
    dkdv: Tile


TILES = {
    64: Tiles(Tile(64, 64, 4, 2), Tile(64, 64, 4, 3), Tile(64, 64, 4, 1)),
    128: Tiles(Tile(64, 64, 4, 3), Tile(128, 64, 8, 3), Tile(32, 64, 4, 2)),
    256: Tiles(Tile(128, 64, 8, 2), Tile(64, 64, 8, 2), Tile(32, 64, 8, 2)),
}
"""Tiles by the least power of two that is at least the head width."""

_LOG2_E = 1.4426950408889634


def forward(
    q: Tensor, k: Tensor, v: Tensor, mask: MaskSpec, *, scale: float, softcap: float | None, tiles: Tiles | None = None
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Implement `AttentionKernel.forward`; masks have no `explicit`."""
    (sq, b, n, _), tile = q.shape, (tiles or tiles_of(q)).forward
    q, k, v = (_with_contiguous_channels(x) for x in (q, k, v))
    out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
    lse = torch.empty(b, n, sq, dtype=torch.float32, device=q.device)
    first = _first_keys(q, k, mask)
    launch(
        kernels.forward, (cdiv(sq, tile.queries), n, b),
        *_with_strides(q, k, v, out), lse, lse if first is None else first, *_numbers(q, k, mask, scale, softcap),
        HAS_FIRST=first is not None, **_constants(q, k, mask, softcap, tile),
    )  # fmt: skip
    return out, lse.permute(2, 0, 1)


def backward(
    dout: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, mask: MaskSpec,
    *, scale: float, softcap: float | None, tiles: Tiles | None = None,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """Implement `AttentionKernel.backward`."""
    (sq, b, n, _), (sk, _, g, _) = q.shape, k.shape
    _, of_queries, of_keys = tiles or tiles_of(q)
    dout, q, k, v, out = (_with_contiguous_channels(x) for x in (dout, q, k, v, out))
    lse = lse.permute(1, 2, 0).contiguous()
    dq, dk, dv = (torch.empty(x.shape, dtype=x.dtype, device=x.device) for x in (q, k, v))
    dout_dot_out = torch.empty_like(lse)
    first, numbers = _first_keys(q, k, mask), _numbers(q, k, mask, scale, softcap)
    launch(
        kernels.dq_of_queries, (cdiv(sq, of_queries.queries), n, b),
        *_with_strides(q, k, v, dout, out, dq), lse, dout_dot_out, lse if first is None else first, scale, *numbers,
        HAS_FIRST=first is not None, **_constants(q, k, mask, softcap, of_queries),
    )  # fmt: skip
    end = None if first is None else _query_ends(first, sk)
    launch(
        kernels.dkdv_of_keys, (cdiv(sk, of_keys.keys), g, b),
        *_with_strides(q, k, v, dout, dk, dv), lse, dout_dot_out, lse if end is None else end, scale, *numbers,
        HAS_END=end is not None, **_constants(q, k, mask, softcap, of_keys),
    )  # fmt: skip
    return dq, dk, dv


def tiles_of(q: Tensor) -> Tiles:
    return TILES[max(power_of_two(q.shape[-1]), min(TILES))]


def _with_contiguous_channels(x: Tensor) -> Tensor:
    return x if x.stride(-1) == 1 else x.contiguous()


def _with_strides(*tensors: Tensor) -> Iterator[Any]:
    """Yield the tensors, then the strides of rows, samples and heads of each."""
    yield from tensors
    for x in tensors:
        yield x.stride()[:3]


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


def _numbers(q: Tensor, k: Tensor, mask: MaskSpec, scale: float, softcap: float | None) -> tuple[Any, ...]:
    """Return the sizes, the factors of scores and the numbers of dropout, whose sample kernels may read from memory."""
    assert scale > 0, f"scale {scale}"
    sizes = (q.shape[0], k.shape[0], q.shape[2] // k.shape[2])
    into_tanh = 0.0 if softcap is None else 2 * _LOG2_E * scale / softcap
    factors = (into_tanh, (scale if softcap is None else softcap) * _LOG2_E)
    rule = mask.dropout
    if rule is None:
        return (*sizes, *factors, *[0] * 5, 1.0, *[0] * 7)
    if isinstance(rule.first_sample, Tensor):
        first_head: tuple[Any, ...] = (rule.first_sample, rule.first_head)
    else:
        first_head = halves("<Q", rule.first_sample * rule.num_heads + rule.first_head)
    streams = (*first_head, rule.num_heads, *halves("<Q", rule.key))
    return (
        *sizes,
        *factors,
        *streams,
        rule.factor,
        rule.threshold,
        *_spans(rule.queries),
        *_spans(rule.keys),
    )


def _spans(ranges: Sequence[range]) -> tuple[int, int, int]:
    """Return the start of one or two ranges of positions, the rows of the first, and the jump from its end to the second."""
    first, second = ranges[0], ranges[-1]
    assert len(ranges) <= 2
    return first.start, len(first), second.start - first.stop if len(ranges) > 1 else 0


def _constants(q: Tensor, k: Tensor, mask: MaskSpec, softcap: float | None, tile: Tile) -> dict[str, Any]:
    channels, rule = q.shape[-1], mask.dropout
    return {
        "CHANNELS": channels,
        "PADDED": max(power_of_two(channels), 16),
        "QUERIES": tile.queries,
        "KEYS": tile.keys,
        "IS_CAUSAL": mask.is_causal,
        "HAS_SOFTCAP": softcap is not None,
        "HAS_DROPOUT": rule is not None,
        "IS_ALIGNED": rule is not None and rule.has_whole_blocks,
        "IS_EVEN": q.shape[0] % tile.queries == 0 and k.shape[0] % tile.keys == 0,
        "num_warps": tile.warps,
        "num_stages": tile.stages,
        "enable_fp_fusion": True,
    }
