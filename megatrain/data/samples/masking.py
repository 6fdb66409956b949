"""Choose the words of a text to mask, as Megatron-LM does: whole words, in runs of several, until a share of tokens is masked.

    ids -> words -> shuffled -> a run of n words from each on, unless it is too long or masked already -> positions

Source: Megatron-LM, core/datasets/masked_dataset.py.
"""

from __future__ import annotations

import bisect
import functools
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

import numpy as np
import numpy.typing as npt

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from megatrain.data.tokenizers.mask_tokens import MaskVocabulary

Ids = npt.NDArray[np.int64]

_GEOMETRIC: Final = 0.2
"""Probability that a run of geometric length ends after each word."""


@dataclass(frozen=True, kw_only=True)
class MaskOptions:
    """How words are chosen."""

    probability: float
    """Share of the tokens that are masked, at most."""
    max_words: int
    """Words of the longest run."""
    is_geometric: bool
    """The number of words of a run is geometric; else it is drawn with probabilities proportional to 1 / n."""
    longer_first: bool = False
    """Reverse the probabilities: longer runs are more likely."""
    whole_words: bool = True
    """False: each token is a word."""

    @functools.cached_property
    def cumulative_shares(self) -> list[float]:
        """Return the probability of a run of at most 1, 2, .. words, with the rounding of `RandomState.choice`."""
        shares = 1.0 / np.arange(1, self.max_words + 1)
        shares /= shares.sum(keepdims=True)
        shares = shares[::-1] if self.longer_first else shares
        cumulative = np.cumsum(shares / shares.sum(keepdims=True))
        cumulative /= cumulative[-1]
        found: list[float] = cumulative.tolist()
        return found


def masked_runs(
    ids: Ids, target: int, vocabulary: MaskVocabulary, options: MaskOptions, random: np.random.RandomState
) -> Iterator[Ids]:
    """Yield the positions of each run of words to mask, in the order in which they are drawn.

    The caller may draw from `random` for a run before it asks for the next.

    Args:
        ids: tokens of the sample, [t].
        target: the length that the sample was cut for; at most its share is masked, which may be no token at all.
        vocabulary, options: see there.
        random: generator of the sample.
    """
    positions = np.flatnonzero((ids != vocabulary.cls) & (ids != vocabulary.sep))
    begins = np.ones(len(positions), bool)
    if options.whole_words:
        begins[1:] = ~vocabulary.continues[ids[positions[1:]]]
    bounds: list[int] = [*np.flatnonzero(begins).tolist(), len(positions)]
    num_words = len(bounds) - 1
    budget = min(options.probability * target, max(1, round(options.probability * len(ids))))
    draw_length = _length_drawer(options, random)
    order = np.arange(num_words)
    random.shuffle(order)
    is_masked = bytearray(len(positions))
    num_masked = 0
    for word in order.tolist():
        if num_masked >= budget:
            return
        start, length = bounds[word], draw_length()
        while length and num_masked + bounds[min(word + length, num_words)] - start > budget:
            length -= 1
        end = bounds[min(word + length, num_words)]
        if not length or is_masked.find(1, start, end) >= 0:
            continue
        is_masked[start:end] = b"\1" * (end - start)
        num_masked += end - start
        yield positions[start:end]


def _length_drawer(options: MaskOptions, random: np.random.RandomState) -> Callable[[], int]:
    """Return a function that draws the number of words of a run."""
    if options.is_geometric:
        return lambda: min(int(random.geometric(_GEOMETRIC)), options.max_words)
    cumulative, draw = options.cumulative_shares, random.random_sample
    return lambda: 1 + bisect.bisect_right(cumulative, draw())
