"""Checksums of the blocks of a chunk, so that a range is verified without reading the rest.

    block ─> 64-bit words ─> 1023 sums, of every 1023rd word each ─> crc32 of the sums

A crc32 of the block itself takes about as long as reading it from the page cache; the sums take a fifth of that. Every change of
a single word is found, and so are zeroed, repeated and exchanged pages: 1023 and the words of a page have no common divisor, so
that two pages of a block are never summed alike. This module does not import torch; `kernels/block_checksums.py` computes the same
checksums on a GPU.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Final

import numpy as np
from numpy.typing import NDArray

NUM_SUMS: Final = 1023
_WORD: Final = np.dtype("<u8")
CRC32_OF_ZEROS: Final = zlib.crc32(bytes(NUM_SUMS * _WORD.itemsize))
"""Checksum of a block of zeros."""


def checksum_of_sums(block: memoryview) -> int:
    """Return the crc32 of 1023 sums modulo 2^64, little-endian: the i-th sums the words i, i + 1023, i + 2046, ...

    The block is padded with zeros to whole words.
    """
    num_words, num_bytes_left = divmod(len(block), _WORD.itemsize)
    words = np.frombuffer(block, _WORD, num_words)
    num_rows, num_words_left = divmod(num_words, NUM_SUMS)
    in_rows = words[: num_rows * NUM_SUMS].reshape(num_rows, NUM_SUMS)
    sums = np.add.reduce(in_rows, axis=0, dtype=_WORD)
    sums[:num_words_left] += words[num_words - num_words_left :]
    if num_bytes_left:
        last = bytes(block[-num_bytes_left:]).ljust(_WORD.itemsize, b"\0")
        sums[num_words_left : num_words_left + 1] += np.frombuffer(last, _WORD)
    return zlib.crc32(sums)


def crc32_of_bits() -> NDArray[np.uint32]:
    """Return what each bit of the sums adds to the crc32, uint32 [64, 1023]: bit b of sum i is in row b.

    The crc32 of the sums is the crc32 of zeros, exclusive or the constants of all bits that are set.
    """
    of_zero = zlib.crc32(bytes(1))
    table = np.array([zlib.crc32(bytes([byte])) ^ of_zero for byte in range(256)], np.uint32)
    number = np.arange(256, dtype=np.uint32)
    after = np.stack(
        [table, number, number << 8, number << 16]
    )  # of a crc32's bytes, once one more byte follows

    def later(crc: NDArray[np.uint32]) -> NDArray[np.uint32]:
        first, second, third, fourth = (crc >> shift & 0xFF for shift in (0, 8, 16, 24))
        found: NDArray[np.uint32] = after[0][first] ^ after[1][second] ^ after[2][third] ^ after[3][fourth]
        return found

    found = table[1 << np.arange(8)][None]  # of the bits of the last byte
    while len(found) < NUM_SUMS * _WORD.itemsize:
        found = np.concatenate([later(found), found])
        after = later(after)  # twice as many bytes follow
    return np.ascontiguousarray(found[-NUM_SUMS * _WORD.itemsize :].reshape(NUM_SUMS, 64).T)


@dataclass(frozen=True)
class BlockFormat:
    """How a chunk is cut into blocks, and the checksum of a block."""

    num_bytes: int = 1 << 20
    """Bytes of a block; the last block of a chunk may be smaller."""
    checksum: Callable[[memoryview], int] = checksum_of_sums

    def blocks(self, data: memoryview) -> Iterator[memoryview]:
        """Yield the blocks of a chunk's bytes."""
        for start in range(0, len(data), self.num_bytes):
            yield data[start : start + self.num_bytes]

    def matches(self, number: int, block: memoryview, checksums: str) -> bool:
        """Return whether a block has the checksum of this number."""
        return self.checksum(block) == int(checksums[8 * number : 8 * number + 8], 16)

    def checksums(self, data: memoryview) -> str:
        """Return the checksum of each block, eight hexadecimal digits each."""
        return "".join(f"{self.checksum(block):08x}" for block in self.blocks(data))


BLOCKS: Final = BlockFormat()
"""The blocks of checkpoints that are written."""
