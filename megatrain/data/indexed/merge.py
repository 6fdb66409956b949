"""Concatenate datasets: the sequences and documents of the first, then of the second, and so on.

    a.bin/.idx/.json, b.bin/.idx/.json -> out.bin/.idx/.json

Loss masks of conversations are merged, too. Memory is bounded, and the output appears when it is complete.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Final

import numpy as np

from megatrain.config.errors import ConfigError, InputError, Problem
from megatrain.config.schema.tokenizer import is_same_tokenizer
from megatrain.data.indexed.object_store import exists, is_url
from megatrain.data.indexed.reader import IndexedDataset, loss_mask_of, read_description
from megatrain.data.indexed.writer import IndexedWriter

_SHARED: Final = (
    "tokenizer_type", "vocab_size", "eod", "append_eod", "json_key", "prompt_format", "chat_template",
)  # fmt: skip
"""Fields that are copied if all descriptions agree, else null."""


def merge(
    prefixes: Sequence[str | Path],
    output_prefix: str | Path,
    *,
    index_cache: str | None = None,
    log: Callable[[str], None] = print,
) -> None:
    """Write a dataset with all documents of the given ones, in order. A prefix may occur several times.

    `index_cache`: see `IndexedDataset`.

    Raises:
        ConfigError: the datasets are incompatible, or one of them would be overwritten.
    """
    if not prefixes:
        raise ConfigError("no datasets to merge are given", fix="give the prefixes of two or more datasets")
    _require_other_output(prefixes, Path(output_prefix))
    datasets = [IndexedDataset(prefix, index_cache=index_cache) for prefix in prefixes]
    _require_compatible(datasets)
    _merge_loss_masks(datasets, output_prefix, log)
    description = _merged_description(datasets, log)
    with IndexedWriter(output_prefix, datasets[0].dtype) as writer:
        for dataset in datasets:
            for elements in dataset.blocks(_ELEMENT_BYTES):
                writer.add_elements(elements)
            for first in range(0, dataset.num_documents, _DOCUMENTS):
                _add_boundaries(writer, dataset, first)
        writer.description = description
        if description is None:  # an existing file would describe other data
            Path(f"{output_prefix}.json").unlink(missing_ok=True)
    log(
        f"{writer.prefix}: {writer.num_documents:,} documents, {writer.num_sequences:,} sequences, "
        f"{writer.num_tokens:,} tokens of {writer.dtype.name}, from {len(datasets)} datasets"
    )


def _merge_loss_masks(
    datasets: Sequence[IndexedDataset], output_prefix: str | Path, log: Callable[[str], None]
) -> None:
    """Merge the loss masks of conversations. Raises ConfigError if only some datasets have one."""
    has_mask = {
        dataset.prefix: exists(f"{loss_mask_of(dataset.prefix)}.idx") for dataset in datasets if len(dataset)
    }
    if len(set(has_mask.values())) > 1:
        masked = next(prefix for prefix, has in has_mask.items() if has)
        plain = next(prefix for prefix, has in has_mask.items() if not has)
        raise ConfigError(
            f"{masked} has a loss mask ({loss_mask_of(masked)}.bin and .idx), and {plain} has none",
            fix="merge conversations and documents separately, and name both with --data-path",
        )
    output = loss_mask_of(str(output_prefix))
    if not any(has_mask.values()) and Path(f"{output}.idx").exists():
        raise ConfigError(
            f"{output}.idx: is the loss mask of other data, and the datasets have none",
            fix="give another --output-prefix, or remove the loss mask",
        )
    if any(has_mask.values()):
        masks = [loss_mask_of(dataset.prefix) for dataset in datasets if len(dataset)]
        merge(masks, output, index_cache=datasets[0].index_cache, log=log)


_DOCUMENTS: Final = 1 << 16
_ELEMENT_BYTES: Final = 1 << 24


def _require_other_output(prefixes: Sequence[str | Path], output_prefix: Path) -> None:
    inside = [
        prefix
        for prefix in prefixes
        if not is_url(str(prefix)) and Path(prefix).resolve() == output_prefix.resolve()
    ]
    if inside:
        raise ConfigError(f"{inside[0]}: is both an input and the output", fix="give another --output-prefix")
    path = Path(f"{output_prefix}.json")
    if path.exists() and not _is_description(str(output_prefix)):
        raise ConfigError(
            f"{path}: would be overwritten, but does not describe a dataset",
            fix="give another --output-prefix",
        )


def _require_compatible(datasets: Sequence[IndexedDataset]) -> None:
    """Raise ConfigError unless element types are equal, and all datasets with sequences or none of them have modes."""
    first = datasets[0]
    problems = [
        Problem(
            f"{other.prefix}: element type is {other.dtype.name}, but {first.prefix} has {first.dtype.name}",
            "make both with the same tokenizer",
        )
        for other in datasets
        if other.dtype != first.dtype
    ]
    filled = [dataset for dataset in datasets if len(dataset)]
    problems += [
        Problem(
            f"{other.prefix}: {_with_modes(other)}, but {filled[0].prefix} {_with_modes(filled[0])}",
            "merge datasets with modes and datasets without modes separately",
        )
        for other in filled
        if (other.modes is None) != (filled[0].modes is None)
    ]
    if problems:
        raise ConfigError.of(problems)


def _with_modes(dataset: IndexedDataset) -> str:
    return "has no modes" if dataset.modes is None else "has modes"


def _add_boundaries(writer: IndexedWriter, dataset: IndexedDataset, first: int) -> None:
    """Add the boundaries of a block of documents that starts at `first`."""
    boundaries = dataset.document_boundaries[first : first + _DOCUMENTS + 1]
    sequences = slice(int(boundaries[0]), int(boundaries[-1]))
    modes = None if dataset.modes is None else dataset.modes[sequences]
    writer.add_boundaries(dataset.lengths[sequences], np.diff(boundaries), modes)


def _description(prefix: str) -> dict[str, Any] | None:
    """Return the description of a dataset; None if there is no `.json`, or it is not a description. Raises InputError."""
    content = read_description(prefix)
    return content if content and "tokenizer_fingerprint" in content else None


def _is_description(prefix: str) -> bool:
    try:
        return _description(prefix) is not None
    except InputError:
        return False


def _merged_description(
    datasets: Sequence[IndexedDataset], log: Callable[[str], None]
) -> dict[str, Any] | None:
    """Merge the descriptions if all datasets have one. Raises InputError if they name different tokenizers."""
    found = {dataset.prefix: _description(dataset.prefix) for dataset in datasets}
    known = {prefix: description for prefix, description in found.items() if description is not None}
    _require_same_tokenizer(known)
    missing = [prefix for prefix in found if prefix not in known]
    if missing:
        if known:
            log(f"{missing[0]}.json is missing, so the result gets no description")
        return None
    parts = [known[dataset.prefix] for dataset in datasets]
    return _shared_fields(parts) | {
        "tokenizer_fingerprint": _shared_fingerprint(parts),
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


def _shared_fields(parts: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Return the fields that any description has, with their value if all agree, else null."""
    present = [name for name in _SHARED if any(name in part for part in parts)]
    values = {name: {json.dumps(part.get(name)) for part in parts} for name in present}
    return {name: json.loads(found.pop()) if len(found) == 1 else None for name, found in values.items()}


def _require_same_tokenizer(descriptions: Mapping[str, dict[str, Any]]) -> None:
    first = next(iter(descriptions), "")
    for prefix, description in descriptions.items():
        ours, theirs = (part["tokenizer_fingerprint"] for part in (description, descriptions[first]))
        if not (ours == theirs or (ours and theirs and is_same_tokenizer(ours, theirs))):
            raise InputError(
                f"{prefix}: was made with another tokenizer ({ours}) than {first} ({theirs})",
                fix="make both with the same tokenizer",
            )


def _shared_fingerprint(parts: Sequence[dict[str, Any]]) -> str | None:
    """Return the digests that the fingerprints of all descriptions have; None if there are none."""
    first, *others = [(part["tokenizer_fingerprint"] or "").split(":") for part in parts]
    return ":".join(digest for digest in first if all(digest in other for other in others)) or None


def _sum(parts: Sequence[dict[str, Any]], name: str) -> int | None:
    """Sum a count over all descriptions; None if one of them lacks it."""
    numbers = [number for part in parts if type(number := part.get(name)) is int]
    return sum(numbers) if len(numbers) == len(parts) else None


def _list(value: object) -> list[Any]:
    return value if isinstance(value, list) else []
