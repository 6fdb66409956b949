"""Synthetic sequences for runs without data: sequence of length n is 1, 2, .. n - 1, then the end-of-document id.

Lengths and ids equal Megatron-LM's mock data, so that runs of both programs see the same samples.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

import numpy as np
import numpy.typing as npt

from megatrain.data.samples.mock_lengths import mock_lengths

if TYPE_CHECKING:
    from megatrain.data.indexed.reader import Elements

NUM_SEQUENCES: Final = 100_000
MAX_LENGTH: Final = 4096
"""Exclusive upper bound of sequence lengths."""
MOCK_SPLIT: Final = "1,1,1"


class MockSequences:
    """A `SequenceSource` without files; each sequence is a document.

    Args:
        lengths: see `mock_lengths`; None: Megatron-LM's.
    """

    def __init__(self, *, vocab_size: int, eod: int, lengths: str | None = None) -> None:
        self.name = "mock data"
        self.lengths: npt.NDArray[np.int32] = (
            np.random.default_rng(0).integers(1, MAX_LENGTH, NUM_SEQUENCES, dtype=np.int32)
            if lengths is None
            else mock_lengths(lengths, NUM_SEQUENCES)
        )
        longest = max(MAX_LENGTH, int(self.lengths.max()) + 1)
        self._elements: npt.NDArray[np.int64] = np.arange(1, longest, dtype=np.int64) % vocab_size
        self._eod = eod

    def __len__(self) -> int:
        """Return the number of sequences."""
        return len(self.lengths)

    def document_of(self, sequence: int) -> int:
        """Return the document of a sequence."""
        return sequence

    def read(self, sequence: int, offset: int = 0, length: int | None = None) -> Elements:
        """Return `length` elements of a sequence starting at `offset`; None: to its end."""
        elements = self._elements[: self.lengths[sequence]].copy()
        elements[-1] = self._eod
        return elements[offset : None if length is None else offset + length]
