"""Checksums of blocks of a checkpoint on the device that holds them (checkpoint/block_checksums.py has their definition).

A crc32 is linear over bits: each bit that is set adds (exclusive or) a constant to the crc32 of zeros. On GPUs one fused kernel
reads the blocks once, at memory bandwidth; the reference here runs on any device.
"""

from __future__ import annotations

import torch
from torch import Tensor

from megatrain.kernels.fused import block_checksums as fused
from megatrain.kernels.fused.launching import is_fused


def partial_checksums(words: Tensor, bits: Tensor) -> Tensor:
    """Return numbers whose exclusive or, with the checksum of zeros, is the checksum of each block.

    Args:
        words: of the blocks, int64 [n, words of a block].
        bits: what each bit of the sums adds, int32 [64, sums].

    Returns:
        int32 [n, some numbers]; the host does not wait for them.
    """
    if is_fused(words):
        return fused.partial_checksums(words, bits)
    num_sums = bits.shape[1]
    in_rows = words.shape[1] // num_sums * num_sums
    sums = words[:, :in_rows].unflatten(1, (-1, num_sums)).sum(1)
    sums[:, : words.shape[1] - in_rows] += words[:, in_rows:]
    found = torch.zeros_like(sums, dtype=torch.int32)
    for bit, crcs in enumerate(bits):
        found ^= (sums >> bit & 1).int() * crcs
    return found
