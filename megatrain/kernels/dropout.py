"""Which elements dropout keeps: a function of a key and a place alone.

    (key, row, column) -> Philox4x32-10 -> 32 random bits -> kept unless below p

A row is a token (or a query of a head) of a sample, by its number in the whole run. So the same elements are kept
under every layout, in a second forward pass of recomputation, and after a restart.
"""

from __future__ import annotations

import torch
from torch import Tensor

from megatrain.kernels.fused import random as fused
from megatrain.kernels.fused.launching import is_fused
from megatrain.kernels.normal import WORDS, philox

_CHUNK_COUNTERS = 1 << 20


def keep_mask(rows: Tensor, num_columns: int, *, key: int, p: float) -> Tensor:
    """True where an element is kept.

    Args:
        rows: numbers of the rows, int64 [...], whatever their order.
        num_columns: elements of a row.
        key: of the stream, from `kernels.normal.stream_key`.
        p: share that is dropped.
    Returns:
        bool [..., num_columns].
    """
    flat = rows.flatten()
    kept = torch.empty(flat.numel(), num_columns, dtype=torch.bool, device=rows.device)
    fill = fused.keep_mask if is_fused(rows) else fill_reference
    fill(kept, flat, key, round(p * 2**32))
    return kept.view(*rows.shape, num_columns)


def fill_reference(kept: Tensor, flat: Tensor, key: int, threshold: int) -> None:
    """Put what `keep_mask` returns into `kept`, bool [rows, columns]; with torch's operators."""
    num_columns = kept.shape[1]
    counters_a_row = -(-num_columns // WORDS)
    columns = torch.arange(counters_a_row, dtype=torch.int64, device=flat.device)
    rows_a_pass = max(1, _CHUNK_COUNTERS // counters_a_row)
    for first in range(0, flat.numel(), rows_a_pass):
        part = flat[first : first + rows_a_pass]
        counters = part[:, None] * counters_a_row + columns
        words = torch.stack(philox(counters, key), dim=-1).flatten(1)[:, :num_columns]
        torch.ge(words, threshold, out=kept[first : first + rows_a_pass])
