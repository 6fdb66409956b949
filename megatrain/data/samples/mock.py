"""Made-up sequences for runs without data: sequence of length n is 1, 2, .. n - 1, then the end-of-document id.

The lengths and ids are Megatron-LM's mock data, so that runs of both programs see the same samples.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

import numpy as np
import numpy.typing as npt

if TYPE_CHECKING:
    from megatrain.data.indexed.reader import Elements

NUM_SEQUENCES: Final = 100_000
LONGEST: Final = 4096
"""Every sequence is shorter than this."""
MOCK_SPLIT: Final = "1,1,1"


class MockSequences:
    """As `IndexedDataset`, without files: one sequence a document."""

    def __init__(self, *, vocab_size: int, eod: int) -> None:
        self.name = "mock data"
        self.lengths: npt.NDArray[np.int32] = np.random.default_rng(0).integers(
            1, LONGEST, NUM_SEQUENCES, dtype=np.int32
        )
        self._longest: npt.NDArray[np.int64] = np.arange(1, LONGEST, dtype=np.int64) % vocab_size
        self._eod = eod

    def __len__(self) -> int:
        """Number of sequences."""
        return len(self.lengths)

    def document_of(self, sequence: int) -> int:
        """The document that a sequence belongs to."""
        return sequence

    def read(self, sequence: int, offset: int = 0, length: int | None = None) -> Elements:
        """`length` elements of a sequence from `offset` on; None: to its end."""
        elements = self._longest[: self.lengths[sequence]].copy()
        elements[-1] = self._eod
        return elements[offset : None if length is None else offset + length]
