"""What the tests of data share: the recorded numbers and how arrays compare with them."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from megatrain.data.indexed.reader import IndexedDataset
from megatrain.data.indexed.writer import IndexedWriter

if TYPE_CHECKING:
    from collections.abc import Sequence

GOLDEN = Path(__file__).parents[1] / "golden"
EXPECTED: dict[str, Any] = json.loads((GOLDEN / "expected.json").read_text())


def digest(array: Any) -> str:
    """SHA-256 of an array as the recording takes it: of int64, little endian, row by row."""
    return hashlib.sha256(np.ascontiguousarray(array).astype("<i8").tobytes()).hexdigest()


def check_array(array: Any, recorded: dict[str, Any]) -> None:
    """An array is the recorded one, in values and in shape."""
    array = np.asarray(array)
    assert list(array.shape) == recorded["shape"]
    flat = array.reshape(-1)
    if "values" in recorded:
        assert flat.tolist() == np.asarray(recorded["values"]).reshape(-1).tolist()
    else:
        assert flat[:8].tolist() == recorded["first"]
        assert flat[-4:].tolist() == recorded["last"]
    assert digest(array) == recorded["sha256"]


def recorded_lengths(name: str) -> np.ndarray:
    """The lengths of sequences from an .idx whose .bin is not part of the project."""
    content = (GOLDEN / f"{name}.idx").read_bytes()
    return np.frombuffer(content, "<i4", int.from_bytes(content[18:26], "little"), 34)


def write_dataset(
    prefix: Path, documents: Sequence[Sequence[Sequence[int]]], dtype: str = "uint16"
) -> IndexedDataset:
    """Write documents, each a list of sequences, and open them."""
    with IndexedWriter(prefix, dtype) as writer:
        for document in documents:
            writer.add_document(document)
    return IndexedDataset(prefix)
