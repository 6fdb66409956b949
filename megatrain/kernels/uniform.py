"""Uniform numbers that are a function of a key and a place alone, as dropout's are.

    (key, row, column) -> Philox4x32-10 -> 32 random bits -> (bits + 1/2) / 2^32

A row is a token by its number in the whole run, so that the same numbers come under every layout, in a second forward
pass of recomputation, and after a restart.
"""

from __future__ import annotations

import torch
from torch import Tensor

from megatrain.kernels.normal import WORDS, philox

_CHUNK_COUNTERS = 1 << 20


def fill_uniform(out: Tensor, rows: Tensor, *, key: int, low: float, high: float) -> None:
    """Fill `out` with numbers between `low` and `high`, rounded to its dtype from double precision.

    Args:
        out: [rows, columns], any float dtype.
        rows: numbers of the rows, int64 [rows], whatever their order.
        key: of the stream, from `kernels.normal.stream_key`.
    """
    num_columns = out.shape[1]
    counters_a_row = -(-num_columns // WORDS)
    columns = torch.arange(counters_a_row, dtype=torch.int64, device=out.device)
    rows_a_pass = max(1, _CHUNK_COUNTERS // counters_a_row)
    for first in range(0, out.shape[0], rows_a_pass):
        part = slice(first, first + rows_a_pass)
        counters = rows[part, None] * counters_a_row + columns
        words = torch.stack(philox(counters, key), dim=-1).flatten(1)[:, :num_columns]
        out[part] = (words.double() + 0.5) * ((high - low) / 2**32) + low
