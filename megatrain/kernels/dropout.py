"""Which elements dropout keeps: a function of a key and a place alone.

    (key, row, column) -> Philox4x32-10 -> 32 random bits -> kept unless below p

A row is a token (or a query of a head) of a sample, by its number in the whole run. So the same elements are kept
under every layout, in a second forward pass of recomputation, and after a restart.
"""

from __future__ import annotations

import torch
from torch import Tensor

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
    counters_a_row = -(-num_columns // WORDS)
    flat = rows.flatten()
    kept = torch.empty(flat.numel(), num_columns, dtype=torch.bool, device=rows.device)
    columns = torch.arange(counters_a_row, dtype=torch.int64, device=rows.device)
    threshold = round(p * 2**32)
    rows_a_pass = max(1, _CHUNK_COUNTERS // counters_a_row)
    for first in range(0, flat.numel(), rows_a_pass):
        part = flat[first : first + rows_a_pass]
        counters = part[:, None] * counters_a_row + columns
        words = torch.stack(philox(counters, key), dim=-1).flatten(1)[:, :num_columns]
        torch.ge(words, threshold, out=kept[first : first + rows_a_pass])
    return kept.view(*rows.shape, num_columns)
