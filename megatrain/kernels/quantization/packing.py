"""Small integers in 32-bit words, as the layout pack-quantized of compressed-tensors has them."""

from __future__ import annotations

import torch
from torch import Tensor


def pack(values: Tensor, num_bits: int) -> Tensor:
    """Pack integers of 4 or 8 bits along rows: [r, c] -> int32 [r, ceil(c * bits / 32)].

    The first integer is in the lowest bits of a word, each as its distance from the most negative one.
    """
    per_word = 32 // num_bits
    unsigned = values.to(torch.int64) + (1 << num_bits - 1)
    unsigned = torch.nn.functional.pad(unsigned, (0, -values.shape[1] % per_word)).unflatten(
        1, (-1, per_word)
    )
    words = (unsigned << torch.arange(per_word, device=values.device) * num_bits).sum(-1)
    return torch.where(words >= 1 << 31, words - (1 << 32), words).to(torch.int32)


def unpack(words: Tensor, num_bits: int, num_columns: int) -> Tensor:
    """Return the integers of `pack`: int8 [r, `num_columns`]."""
    per_word = 32 // num_bits
    shifts = torch.arange(per_word, device=words.device) * num_bits
    parts = (words.to(torch.int64)[..., None] >> shifts) & ((1 << num_bits) - 1)
    return (parts.flatten(1)[:, :num_columns] - (1 << num_bits - 1)).to(torch.int8)
