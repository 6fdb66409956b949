"""The largest attention logit of each head over a rank's queries and the keys of whole samples, block by block."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

import torch
from torch import Tensor

from megatrain.kernels.attention.largest_logits import largest_logits
from megatrain.kernels.dtypes import accumulation_dtype
from megatrain.parallel.context.block_masks import BlockMasks
from megatrain.parallel.context.latent_context import gather_samples
from megatrain.parallel.context_parallel import ContextParallel
from megatrain.parallel.documents import Documents

BLOCK: Final = 1024
"""Queries and keys of a block: its scores take 4 MiB for each head and sample, in fp32."""


def largest_causal_logits(
    q: Tensor,
    k: Tensor,
    cp: ContextParallel,
    *,
    scale: float,
    window: int | None = None,
    documents: Documents | None = None,
    block: int = BLOCK,
) -> Tensor:
    """Return the largest logit of each head over the pairs of causal attention, [n]; on the meta device of one block.

    Args:
        q: queries of this rank's rows, [s/cp, b, n, d].
        k: keys of the same rows, or of whole samples in the order of the sequence, [s, b, g, d].
        scale: factor of the scores, above 0.
        window: number of earlier tokens that a query attends to; None: all.
        documents: documents of the whole samples, which attention does not cross.
        block: queries and keys of a block.
    """
    if cp.size > 1 and k.shape[0] == q.shape[0]:
        k = gather_samples(k, cp)
    masks = BlockMasks(device=q.device, needs_explicit_mask=True, window=window, documents=documents)
    found = torch.full((q.shape[2],), float("-inf"), dtype=accumulation_dtype(q.dtype), device=q.device)
    for first_row, queries, keys in _blocks(cp.position_ranges(q.shape[0]), window, block):
        rows = q[first_row : first_row + len(queries)]
        mask = masks.between((queries,), (keys,))
        found = torch.maximum(found, largest_logits(rows, k[keys.start : keys.stop], mask, scale))
        if q.is_meta:
            break
    return found


def _blocks(chunks: tuple[range, ...], window: int | None, size: int) -> Iterator[tuple[int, range, range]]:
    """Yield the first row, the positions of the queries and those of the keys of each block."""
    row = 0
    for chunk in chunks:
        for start in chunk[::size]:
            queries = range(start, min(start + size, chunk.stop))
            oldest = 0 if window is None else max(0, start - window)
            yield row, queries, queries
            for key in range(oldest, start, size):
                yield row, queries, range(key, min(key + size, start))
            row += len(queries)
