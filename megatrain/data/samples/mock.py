"""Synthetic sequences for runs without data: sequence of length n is 1, 2, .. n - 1, then the end-of-document id.

Lengths and ids equal Megatron-LM's mock data, so that runs of both programs see the same samples.
Other lengths are those of --varlen-mock-dataset-config-json:

    {"type": "lognormal", "min_seq_len": 64, "max_seq_len": 131072, "mean_seq_len": 8192, "lognormal_sigma": 1.5}
    {"type": "uniform", "min_seq_len": 64, "max_seq_len": 4096}

`mean_seq_len` is the mean of the distribution before lengths are cut to the bounds.
"""

from __future__ import annotations

import json
import math
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import numpy as np
import numpy.typing as npt

from megatrain.config.errors import InputError

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


_FLAG: Final = "--varlen-mock-dataset-config-json"
_EXAMPLE: Final = '{"type": "lognormal", "min_seq_len": 64, "max_seq_len": 131072, "mean_seq_len": 8192, "lognormal_sigma": 1.5}'
_KEYS: Final = {
    "lognormal": {"min_seq_len", "max_seq_len", "mean_seq_len", "lognormal_sigma"},
    "uniform": {"min_seq_len", "max_seq_len"},
}
_IGNORED: Final = {"mode", "format"}
"""Megatron-LM's keys with one value here: a distribution, of packed documents."""


def mock_lengths(text: str, count: int) -> npt.NDArray[np.int32]:
    """Return the lengths of documents, at least 2 tokens each.

    Raises:
        InputError: the text is no file and no JSON of a known distribution.
    """
    values = _parsed(text)
    random, low, high = np.random.default_rng(0), int(values["min_seq_len"]), int(values["max_seq_len"])
    if values["type"] == "uniform":
        return random.integers(low, high + 1, count, dtype=np.int32)
    sigma = float(values["lognormal_sigma"])
    location = math.log(values["mean_seq_len"]) - sigma**2 / 2
    return np.clip(random.lognormal(location, sigma, count), low, high).astype(np.int32)


def _parsed(text: str) -> dict[str, Any]:
    try:
        values = json.loads(text if text.lstrip().startswith("{") else Path(text).read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise InputError(
            f"{_FLAG} {text}: {error}", fix=f"give JSON or a file of it, such as {_EXAMPLE}"
        ) from error
    kind = values.get("type") if isinstance(values, dict) else None
    wanted = _KEYS.get(kind) if isinstance(kind, str) else None
    if wanted is None:
        raise InputError(f"{_FLAG}: the type is {kind!r}, not {' or '.join(_KEYS)}", fix=f"use {_EXAMPLE}")
    given = values.keys() - {"type"} - _IGNORED
    if given != wanted or not all(map(_is_number, (values[key] for key in wanted))):
        raise InputError(
            f"{_FLAG}: {kind} needs the numbers {', '.join(sorted(wanted))}", fix=f"use {_EXAMPLE}"
        )
    if (
        not 2 <= values["min_seq_len"] <= values["max_seq_len"] < 2**31
        or min(values[key] for key in wanted) <= 0
    ):
        raise InputError(
            f"{_FLAG}: lengths from {values['min_seq_len']} to {values['max_seq_len']}",
            fix="use 2 or more tokens, and a larger max_seq_len than min_seq_len",
        )
    return dict(values)


def _is_number(value: Any) -> bool:
    """Return whether a value of JSON is a number that is a finite float."""
    return type(value) in (int, float) and abs(value) <= sys.float_info.max
