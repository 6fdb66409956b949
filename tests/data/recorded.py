"""Shared by data tests: recorded numbers, and the comparison of arrays with them."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from megatrain.data.indexed.reader import IndexedDataset
from megatrain.data.indexed.writer import IndexedWriter

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

GOLDEN = Path(__file__).parents[1] / "golden"
EXPECTED: dict[str, Any] = json.loads((GOLDEN / "expected.json").read_text())
GPT_CASES = [
    case
    for case in EXPECTED["gpt"]
    if case["add_extra_token_to_sequence"] and case["drop_last_partial_validation_sequence"]
]
"""The cases with Megatron-LM's defaults, which its command line cannot change."""


def digest(array: Any) -> str:
    """Return the SHA-256 of an array in the recording's form: int64, little endian, row-major."""
    return hashlib.sha256(np.ascontiguousarray(array).astype("<i8").tobytes()).hexdigest()


def check_array(array: Any, recorded: dict[str, Any]) -> None:
    """Assert that an array equals the recorded one, in values and shape."""
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
    """Return the sequence lengths of an .idx whose .bin is not part of the project."""
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


def check_recorded(prefix: Path | str, recorded: Mapping[str, Any]) -> None:
    """Check that the files of a dataset have the recorded sizes and digests."""
    for suffix in ("bin", "idx"):
        content = Path(f"{prefix}.{suffix}").read_bytes()
        assert len(content) == recorded[f"{suffix}_bytes"]
        assert hashlib.sha256(content).hexdigest() == recorded[f"{suffix}_sha256"]
