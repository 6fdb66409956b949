"""`kernels.block_checksums` in one kernel: each program has a few of a block's sums, and adds the constants of their bits."""

from __future__ import annotations

import threading

import torch
from torch import Tensor

from megatrain.kernels.fused.launching import cdiv, jit, launch, tl

_COLUMNS, _ROWS = 64, 32
"""Sums of a program, and words that it adds to each at once: it reads 512 contiguous bytes of each row."""
_LAUNCHING = threading.Lock()
"""Held during a launch: several threads read a checkpoint, and the first launch compiles the kernel."""


def partial_checksums(words: Tensor, bits: Tensor) -> Tensor:
    """Implement `kernels.block_checksums.partial_checksums`: one number for each program."""
    num_words, num_sums = words.shape[1], bits.shape[1]
    found = torch.empty(len(words), cdiv(num_sums, _COLUMNS), dtype=torch.int32, device=words.device)
    with _LAUNCHING:
        launch(
            _add_bits, tuple(found.shape), words, bits, found, found.shape[1],
            WORDS=num_words, SUMS=num_sums, ROWS=_ROWS, COLUMNS=_COLUMNS, num_warps=4,
        )  # fmt: skip
    return found


@jit
def _add_bits(
    X, BITS, FOUND, programs, WORDS: tl.constexpr, SUMS: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr
):  # fmt: skip
    block, program = tl.program_id(0).to(tl.int64), tl.program_id(1)
    column = program * COLUMNS + tl.arange(0, COLUMNS)
    is_sum = column < SUMS
    bit = tl.arange(0, 64)[:, None] * SUMS + column[None, :]
    crcs = tl.load(BITS + bit, mask=is_sum[None, :], other=0)
    partial = tl.zeros((ROWS, COLUMNS), dtype=tl.int64)
    for row in range(0, tl.cdiv(WORDS, SUMS), ROWS):
        word = (row + tl.arange(0, ROWS))[:, None] * SUMS + column[None, :]
        partial += tl.load(X + block * WORDS + word, mask=is_sum[None, :] & (word < WORDS), other=0)
    sums = tl.sum(partial, axis=0)
    is_set = (sums[None, :] >> tl.arange(0, 64)[:, None]) & 1
    found = tl.xor_sum(tl.where(is_set == 1, crcs, 0), axis=0)
    tl.store(FOUND + block * programs + program, tl.xor_sum(found, axis=0))
