"""Joins datasets into one: the sequences and documents of the first, then those of the second, and so on.

    a.bin/.idx/.json, b.bin/.idx/.json -> out.bin/.idx/.json

Only a piece of a dataset is in memory at any time, and the output appears when it is whole.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, Final

import numpy as np

from megatrain.config.errors import ConfigError, InputError, Problem
from megatrain.data.indexed.reader import Elements, IndexedDataset
from megatrain.data.indexed.writer import IndexedWriter
from megatrain.data.samples.sources import read_description

_SHARED: Final = ("tokenizer_type", "tokenizer_fingerprint", "vocab_size", "eod", "append_eod", "json_key")
"""What a description says once: null where the datasets differ, such as in the key that the text came from."""


def merge(
    prefixes: Sequence[str | Path], output_prefix: str | Path, *, say: Callable[[str], None] = print
) -> None:
    """Write one dataset that holds all documents of these, in this order. A dataset may be named several times.

    Raises:
        ConfigError: the datasets do not fit together, or one of them would be overwritten.
    """
    if not prefixes:
        raise ConfigError("there is nothing to merge", fix="name the prefixes of two datasets or more")
    _require_other_output(prefixes, Path(output_prefix))
    datasets = [IndexedDataset(prefix) for prefix in prefixes]
    _require_alike(datasets)
    description = _merged_description(datasets, say)
    with IndexedWriter(output_prefix, datasets[0].dtype) as writer:
        for dataset in datasets:
            for elements in _elements(dataset):
                writer.add_elements(elements)
            for first in range(0, dataset.num_documents, _DOCUMENTS):
                _add_cuts(writer, dataset, first)
        writer.description = description
        if description is None:  # one of a former merge would speak of other data
            Path(f"{output_prefix}.json").unlink(missing_ok=True)
    say(
        f"{writer.prefix}: {writer.num_documents:,} documents, {writer.num_sequences:,} sequences, "
        f"{writer.num_tokens:,} tokens of {writer.dtype.name}, from {len(datasets)} datasets"
    )


_DOCUMENTS: Final = 1 << 16
_ELEMENT_BYTES: Final = 1 << 24


def _require_other_output(prefixes: Sequence[str | Path], output_prefix: Path) -> None:
    inside = [prefix for prefix in prefixes if Path(prefix).resolve() == output_prefix.resolve()]
    if inside:
        raise ConfigError(
            f"{inside[0]}: is to be read and to be written", fix="give the output another prefix"
        )
    path = Path(f"{output_prefix}.json")
    if path.exists() and not _is_description(str(output_prefix)):
        raise ConfigError(
            f"{path}: would be overwritten, and describes no dataset", fix="give the output another prefix"
        )


def _require_alike(datasets: Sequence[IndexedDataset]) -> None:
    """All have the same element type, and either all have modes or none has. Those without sequences have no modes."""
    first = datasets[0]
    problems = [
        Problem(
            f"{other.prefix}: holds {other.dtype.name}, and {first.prefix} {first.dtype.name}",
            "make both with the same tokenizer",
        )
        for other in datasets
        if other.dtype != first.dtype
    ]
    filled = [dataset for dataset in datasets if len(dataset)]
    problems += [
        Problem(
            f"{other.prefix}: {_with_modes(other)}, and {filled[0].prefix} {_with_modes(filled[0])}",
            "merge those with modes and those without apart",
        )
        for other in filled
        if (other.modes is None) != (filled[0].modes is None)
    ]
    if problems:
        raise ConfigError.of(problems)


def _with_modes(dataset: IndexedDataset) -> str:
    return "has no modes" if dataset.modes is None else "has modes"


def _elements(dataset: IndexedDataset) -> Iterator[Elements]:
    count = _ELEMENT_BYTES // dataset.dtype.itemsize
    with Path(f"{dataset.prefix}.bin").open("rb") as file:
        while len(elements := np.fromfile(file, dataset.dtype, count)):
            yield elements


def _add_cuts(writer: IndexedWriter, dataset: IndexedDataset, first: int) -> None:
    """How the elements of some documents, from the first on, are cut."""
    borders = dataset.document_borders[first : first + _DOCUMENTS + 1]
    sequences = slice(int(borders[0]), int(borders[-1]))
    modes = None if dataset.modes is None else dataset.modes[sequences]
    writer.add_cuts(dataset.lengths[sequences], np.diff(borders), modes)


def _description(prefix: str) -> dict[str, Any] | None:
    """What a dataset's `.json` says; None if there is none, or if it is about something else. Raises InputError."""
    content = read_description(prefix)
    return content if content and "tokenizer_fingerprint" in content else None


def _is_description(prefix: str) -> bool:
    try:
        return _description(prefix) is not None
    except InputError:
        return False


def _merged_description(
    datasets: Sequence[IndexedDataset], say: Callable[[str], None]
) -> dict[str, Any] | None:
    """The descriptions as one, if all datasets have one. Raises InputError where they name different tokenizers."""
    found = {dataset.prefix: _description(dataset.prefix) for dataset in datasets}
    known = {prefix: description for prefix, description in found.items() if description is not None}
    for prefix, description in known.items():
        first, expected = next(iter(known.items()))
        ours, theirs = description["tokenizer_fingerprint"], expected["tokenizer_fingerprint"]
        if ours != theirs:
            raise InputError(
                f"{prefix}: was made with another tokenizer ({ours}) than {first} ({theirs})",
                fix="make both with the same tokenizer",
            )
    missing = [prefix for prefix in found if prefix not in known]
    if missing:
        if known:
            say(f"{missing[0]}.json is missing, so that the result gets no description either")
        return None
    parts = [known[dataset.prefix] for dataset in datasets]
    shared = {name: {json.dumps(part.get(name)) for part in parts} for name in _SHARED}
    return {
        name: json.loads(values.pop()) if len(values) == 1 else None for name, values in shared.items()
    } | {
        "sources": [source for part in parts for source in _list(part.get("sources"))],
        "documents": sum(dataset.num_documents for dataset in datasets),
        "sequences": sum(map(len, datasets)),
        "tokens": sum(dataset.num_tokens for dataset in datasets),
        "largest_id": max(
            (part["largest_id"] for part in parts if part.get("largest_id") is not None), default=None
        ),
        "eod_count": _sum(parts, "eod_count"),
        "skipped_lines": _sum(parts, "skipped_lines"),
    }


def _sum(parts: Sequence[dict[str, Any]], name: str) -> int | None:
    """None if a description does not say."""
    numbers = [number for part in parts if type(number := part.get(name)) is int]
    return sum(numbers) if len(numbers) == len(parts) else None


def _list(value: object) -> list[Any]:
    return value if isinstance(value, list) else []
