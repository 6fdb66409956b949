"""The random words of C++'s `std::mt19937` and `std::mt19937_64`, by which Megatron-LM orders samples of sentences.

Source: Matsumoto and Nishimura, "Mersenne Twister", and Nishimura, "Tables of 64-bit Mersenne Twisters".
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

import numpy as np
import numpy.typing as npt

if TYPE_CHECKING:
    from collections.abc import Iterator

BLOCK: Final = 1 << 14
"""Words of 32 bits that are drawn at once."""
WORDS: Final = 312
"""Words of the state of the generator of 64 bits."""
MIDDLE: Final = 156
_MASK: Final = (1 << 64) - 1
_LOW_BITS: Final = np.uint64((1 << 31) - 1)
_TWIST: Final = np.uint64(0xB5026F5AA96619E9)


def words_32(seed: int) -> Iterator[npt.NDArray[np.int64]]:
    """Yield the words of `std::mt19937(seed)` in blocks, without end."""
    random = np.random.RandomState(seed)  # the same generator, seeded alike
    while True:
        yield np.frombuffer(random.bytes(4 * BLOCK), "<u4").astype(np.int64)


def words_64(seed: int, count: int) -> npt.NDArray[np.uint64]:
    """Return the first `count` words of `std::mt19937_64(seed)`."""
    first = seed & _MASK
    words = [first]
    for number in range(1, WORDS):
        first = (6364136223846793005 * (first ^ first >> 62) + number) & _MASK
        words.append(first)
    state = np.array(words, np.uint64)
    result = np.empty(-(-count // WORDS) * WORDS, np.uint64)
    for start in range(0, len(result), WORDS):
        _renew(state)
        result[start : start + WORDS] = state
    return _tempered(result)[:count]


def shuffled_by_64(count: int, seed: int) -> npt.NDArray[np.int64]:
    """Return 0 .. count - 1 in the order of Fisher and Yates, from the last place down, with words of `std::mt19937_64`."""
    if count < 2:
        return np.arange(count, dtype=np.int64)
    places = np.arange(count - 1, 0, -1, dtype=np.uint64)
    partners = words_64(seed, count - 1) % (places + np.uint64(1))
    order = list(range(count))
    for place, partner in zip(range(count - 1, 0, -1), partners.tolist(), strict=True):
        order[place], order[partner] = order[partner], order[place]
    return np.array(order, np.int64)


def _renew(state: npt.NDArray[np.uint64]) -> None:
    """Replace the state by the next one. Word k depends on k, k + 1 and k + 156: half of them are known at once."""
    ends = np.append(state[1:], state[0])
    mixed = (state & ~_LOW_BITS) | (ends & _LOW_BITS)
    state[:MIDDLE] = state[MIDDLE:] ^ _twisted(mixed[:MIDDLE])
    mixed[-1] = (mixed[-1] & ~_LOW_BITS) | (state[0] & _LOW_BITS)
    state[MIDDLE:] = state[:MIDDLE] ^ _twisted(mixed[MIDDLE:])


def _twisted(mixed: npt.NDArray[np.uint64]) -> npt.NDArray[np.uint64]:
    return (mixed >> np.uint64(1)) ^ ((mixed & np.uint64(1)) * _TWIST)


def _tempered(words: npt.NDArray[np.uint64]) -> npt.NDArray[np.uint64]:
    words ^= (words >> np.uint64(29)) & np.uint64(0x5555555555555555)
    words ^= (words << np.uint64(17)) & np.uint64(0x71D67FFFEDA60000)
    words ^= (words << np.uint64(37)) & np.uint64(0xFFF7EEE000000000)
    words ^= words >> np.uint64(43)
    return words
