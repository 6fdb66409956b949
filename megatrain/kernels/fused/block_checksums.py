"""`checkpoint.block_checksums` on a GPU: each program reads a block, sums its words, and computes the crc32 of the sums.

A crc32 is linear over bits: each bit of the sums that is set adds (exclusive or) a constant to the crc32 of zeros.
"""

from __future__ import annotations

import threading

import torch
from torch import Tensor

from megatrain.kernels.fused.launching import jit, launch, power_of_two, tl

_COMPILING = threading.Lock()
"""Held during a launch: several threads read a checkpoint, and the first launch compiles the kernel."""


def block_checksums(words: Tensor, bits: Tensor) -> Tensor:
    """Return the checksum of each block, exclusive or that of zeros: words int64 [n, w] -> int32 [n].

    Args:
        bits: `crc32_of_bits`, int32 [64, sums].
    """
    num_sums = bits.shape[1]
    checksums = torch.empty(len(words), dtype=torch.int32, device=words.device)
    with _COMPILING:
        launch(
            _checksum, (len(words),), words, bits, checksums,
            WORDS=words.shape[1], SUMS=num_sums, WIDTH=power_of_two(num_sums), num_warps=8,
        )  # fmt: skip
    return checksums


@jit
def _checksum(X, BITS, CHECKSUMS, WORDS: tl.constexpr, SUMS: tl.constexpr, WIDTH: tl.constexpr):
    block = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, WIDTH)
    is_sum = column < SUMS
    sums = tl.zeros((WIDTH,), dtype=tl.int64)
    for start in range(0, WORDS, SUMS):
        word = start + column
        sums += tl.load(X + block * WORDS + word, mask=is_sum & (word < WORDS), other=0)
    found = tl.zeros((WIDTH,), dtype=tl.int32)
    for bit in range(64):
        crc = tl.load(BITS + bit * SUMS + column, mask=is_sum, other=0)
        found ^= tl.where(((sums >> bit) & 1) == 1, crc, 0)
    tl.store(CHECKSUMS + block, tl.xor_sum(found, axis=0))
