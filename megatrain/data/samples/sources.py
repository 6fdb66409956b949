"""The datasets that a run reads: data flags to blends, and each dataset checked against its description.

--data-path | --data-args-path FILE | --train-data-path ... | --per-split-data-args-path FILE -> blends by split
blends -> each dataset opened, compared with its description and the tokenizer -> DatasetFacts, or problems
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import itertools
import json
import os
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import numpy as np

from megatrain.config.derive.datasets import SPLIT_NAMES, Blend, parse_blend, parse_weight
from megatrain.config.errors import ConfigError, InputError, Problem
from megatrain.config.facts import DatasetFacts
from megatrain.config.schema.data import DataConfig
from megatrain.config.schema.tokenizer import is_same_tokenizer
from megatrain.data.indexed.object_store import exists, is_url
from megatrain.data.indexed.reader import IndexedDataset, loss_mask_of, read_description
from megatrain.data.samples.index_cache import digest

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping, Sequence

SAMPLED_BYTES: Final = 1 << 16
"""Bytes of the beginning, the middle and the end of a large .bin that its digest covers."""
WHOLE_BYTES: Final = 1 << 22
"""Up to this size, the digest covers the whole .bin."""


def blends_from_config(data: DataConfig) -> dict[str, Blend]:
    """Return the blends of a configuration, under `all` or under `train`, `valid` and `test`.

    Raises:
        ConfigError: a file of data arguments cannot be read, or weights are invalid.
    """
    if data.data_path:
        return {"all": parse_blend(data.data_path)}
    if data.data_args_path is not None:
        return {"all": parse_blend(_read_data_args(Path(data.data_args_path)), "--data-args-path")}
    if data.per_split_data_args_path is not None:
        by_split = _read_data_args_by_split(Path(data.per_split_data_args_path))
        return {name: parse_blend(found, "--per-split-data-args-path") for name, found in by_split.items()}
    by_split = {name: getattr(data, f"{name}_data_path") for name in SPLIT_NAMES}
    return {name: parse_blend(found, f"--{name}-data-path") for name, found in by_split.items() if found}


def flags_of_blends(data: DataConfig) -> dict[str, str]:
    """Return the flag that names the datasets of each split, with the keys of `blends_from_config`."""
    if data.data_path or data.data_args_path is not None:
        return {"all": "--data-path" if data.data_path else "--data-args-path"}
    is_file = data.per_split_data_args_path is not None
    return {name: "--per-split-data-args-path" if is_file else f"--{name}-data-path" for name in SPLIT_NAMES}


def blends_from_facts(datasets: Iterable[DatasetFacts], from_iteration: int = 0) -> dict[str, Blend]:
    """Group the datasets of a phase of training into blends."""
    blends = {}
    datasets = [dataset for dataset in datasets if dataset.from_iteration == from_iteration]
    for split, group in itertools.groupby(datasets, key=lambda dataset: dataset.split):
        members = list(group)
        weights = tuple(member.weight for member in members if member.weight is not None)
        blends[split] = Blend(tuple(member.prefix for member in members), weights or None)
    return blends


def used_eod(data: DataConfig, eod: int | None) -> int | None:
    """Return the end-of-document id if the samples of a run depend on it, through masks, positions or the loss."""
    is_used = data.eod_mask_loss or data.reset_position_ids or data.reset_attention_mask
    return eod if is_used else None


def inspect_datasets(
    blends: Mapping[str, Blend],
    *,
    flags: Mapping[str, str] | None = None,
    vocab_size: int | None,
    tokenizer_fingerprint: str | None,
    eod: int | None = None,
    conversations: bool = False,
    sentences: bool = False,
    index_cache: str | None = None,
    cache_folder: str | None = None,
) -> tuple[list[DatasetFacts], list[Problem]]:
    """Return the facts about every dataset, and all problems with any of them.

    Args:
        blends: as `blends_from_config` returns them.
        flags: flag of each blend, which its problems name.
        vocab_size: vocabulary size of the tokenizer; None: ids are not checked.
        tokenizer_fingerprint: fingerprint of the training tokenizer; None: it reads any ids (NullTokenizer).
        eod: as `used_eod` returns it; None: not checked.
        conversations: the datasets have loss masks (--sft).
        sentences: samples depend on the documents of sequences (BERT and T5).
        index_cache: see `IndexedDataset`.
        cache_folder: --data-cache-path, if it is given.
    """
    facts: list[DatasetFacts] = []
    problems: list[Problem] = []
    seen: set[str] = set()
    prefixes = dict.fromkeys(prefix for blend in blends.values() for prefix in blend.prefixes)
    inspected_one = partial(
        _facts_or_error,
        conversations=conversations,
        sentences=sentences,
        index_cache=index_cache,
        cache_folder=cache_folder,
    )
    with ThreadPoolExecutor(len(os.sched_getaffinity(0))) as threads:
        inspected = dict(zip(prefixes, threads.map(inspected_one, prefixes), strict=True))
    for split, blend in blends.items():
        place = f"{flags[split]}: " if flags else ""
        for number, prefix in enumerate(blend.prefixes):
            found = inspected[prefix]
            if prefix not in seen:
                seen.add(prefix)
                try:
                    if isinstance(found, ConfigError):
                        raise found
                    found_here = [*_description_problems(found, vocab_size, tokenizer_fingerprint, eod)]
                except ConfigError as error:
                    found_here = [_with_blend_hint(problem, prefix) for problem in error.problems]
                problems += [Problem(f"{place}{problem.text}", problem.fix) for problem in found_here]
            if isinstance(found, DatasetFacts):
                weight = blend.weights[number] if blend.weights is not None else None
                facts.append(DatasetFacts(**(vars(found) | {"split": split, "weight": weight})))
    return facts, problems


def _facts_or_error(
    prefix: str, *, conversations: bool, sentences: bool, index_cache: str | None, cache_folder: str | None
) -> DatasetFacts | ConfigError:
    try:
        dataset = open_token_ids(prefix, index_cache=index_cache, cache_folder=cache_folder)
        return DatasetFacts(
            split="all",
            prefix=prefix,
            weight=None,
            num_sequences=len(dataset),
            num_tokens=dataset.num_tokens,
            num_documents=dataset.num_documents,
            digest=dataset_digest(dataset, conversations=conversations, sentences=sentences),
            has_loss_mask=conversations or exists(f"{loss_mask_of(prefix)}.idx"),
            chat_template=(read_description(prefix) or {}).get("chat_template") if conversations else None,
        )
    except ConfigError as error:
        return error


def open_token_ids(
    prefix: str, *, mmap: bool = True, index_cache: str | None = None, cache_folder: str | Path | None = None
) -> IndexedDataset:
    """Open a dataset, with a stamp in `cache_folder` or next to it. Raises InputError unless its elements are integers."""
    folders = [Path(prefix).parent / "index_cache"]
    if cache_folder is not None:
        folders.insert(0, Path(cache_folder))
    with _report_read_errors(prefix):
        dataset = IndexedDataset(prefix, mmap=mmap, index_cache=index_cache, stamp_folders=folders)
    if dataset.dtype.kind not in "iu":
        raise InputError(
            f"{dataset.name}: elements are {dataset.dtype.name}, but token ids are integers",
            fix="give the prefix of a tokenized text dataset",
        )
    return dataset


def open_loss_mask(dataset: IndexedDataset, *, mmap: bool = True) -> IndexedDataset:
    """Open the loss mask of a dataset of conversations. Raises InputError if it is missing or has other sequences."""
    prefix = loss_mask_of(dataset.prefix)
    if not exists(f"{prefix}.idx"):
        raise InputError(
            f"{dataset.prefix}: has no loss mask ({prefix}.bin and .idx), which --sft needs",
            fix="make both from conversations in JSON Lines with preprocess_data.py --sft, or remove --sft",
        )
    mask = open_token_ids(prefix, mmap=mmap, index_cache=dataset.index_cache)
    if not np.array_equal(mask.lengths, dataset.lengths):
        raise InputError(
            f"{prefix}: its sequences are not those of {dataset.prefix}",
            fix="make both again with preprocess_data.py --sft",
        )
    return mask


def dataset_digest(dataset: IndexedDataset, *, conversations: bool, sentences: bool = False) -> str:
    """Return the digest of a dataset, with that of its loss mask or of its documents if samples depend on them."""
    digest_of_tokens = content_digest(dataset)
    if not (conversations or sentences):
        return digest_of_tokens
    more = (
        content_digest(open_loss_mask(dataset))
        if conversations
        else str(dataset.known("documents", lambda: digest(dataset.document_boundaries)))
    )
    return hashlib.sha256((digest_of_tokens + more).encode()).hexdigest()


def content_digest(dataset: IndexedDataset) -> str:
    """Return the SHA-256 of all sequence lengths and of parts of the elements: reading whole files would take too long."""
    return str(dataset.known("content", lambda: _computed_digest(dataset)))


def _computed_digest(dataset: IndexedDataset) -> str:
    result = hashlib.sha256(digest(np.asarray(dataset.lengths)).encode())
    result.update(dataset.dtype.str.encode())
    for position, count in sampled_parts(dataset.num_tokens * dataset.dtype.itemsize):
        result.update(dataset.read_bytes(position, count).data)
    return result.hexdigest()


def sampled_parts(size: int) -> list[tuple[int, int]]:
    """Return the parts of a file, position and bytes, that its digest covers: all of it, or start, middle and end of a large one."""
    if size <= WHOLE_BYTES:
        return [(0, size)]
    return [(position, SAMPLED_BYTES) for position in (0, size // 2, size - SAMPLED_BYTES)]


@contextlib.contextmanager
def _report_read_errors(prefix: str) -> Iterator[None]:
    """Convert read errors to InputError that names the dataset."""
    try:
        yield
    except OSError as error:
        fix = "make both files readable on this host"
        if error.errno == errno.EMFILE:
            fix = "raise the limit of open files (ulimit -n): each dataset needs two, each cached index one"
        raise InputError(
            f"{prefix}.bin and .idx: cannot be read: {error.strerror or error}", fix=fix
        ) from error


def _with_blend_hint(problem: Problem, prefix: str) -> Problem:
    """Extend the fix if the prefix looks like a part of a blend, or like several parts in one text."""
    if is_url(prefix) or os.path.lexists(f"{prefix}.idx"):
        return problem
    parts = prefix.split()
    if len(parts) > 1:
        hint = f"if {prefix!r} is a blend: give a list in YAML, [{', '.join(parts)}], or separate words after the flag"
    elif parse_weight(prefix) is not None:
        hint = f"if {prefix} is a weight: give each dataset a weight before its prefix, such as 0.3 a 0.7 b"
    else:
        return problem
    return Problem(problem.text, f"{hint}; if it is a prefix: {problem.fix}")


def _description_problems(
    dataset: DatasetFacts, vocab_size: int | None, tokenizer_fingerprint: str | None, eod: int | None
) -> Iterator[Problem]:
    """Yield contradictions between a dataset, its description and the tokenizer of this run."""
    prefix = dataset.prefix
    description = read_description(prefix)
    if description is None:
        return
    for name, counted in (("sequences", dataset.num_sequences), ("tokens", dataset.num_tokens)):
        described = description.get(name)
        if described is not None and described != counted:
            yield Problem(
                f"{prefix}.json: {name} is {described}, but {prefix}.idx counts {counted}: it describes another dataset",
                "copy all three files of the dataset again, or move the .json away to use the data without a description",
            )
            return
    made_with = description.get("tokenizer_fingerprint")
    if tokenizer_fingerprint and made_with and not is_same_tokenizer(made_with, tokenizer_fingerprint):
        yield Problem(
            f"{prefix}.bin was made with another tokenizer ({description.get('tokenizer_type')}, fingerprint"
            f" {made_with[:12]}) than this run uses (fingerprint {tokenizer_fingerprint[:12]})",
            "give --tokenizer-type, --tokenizer-model, --vocab-file, --merge-file and --tokenizer-hf-no-include-special-tokens"
            " as to preprocess_data.py, or make the dataset again",
        )
        return
    largest = description.get("largest_id")
    if vocab_size is not None and largest is not None and largest >= vocab_size:
        yield Problem(
            f"{prefix}.bin contains id {largest}, outside the vocabulary of {vocab_size}",
            "use the tokenizer that the data was made with, or the right --vocab-size",
        )
    data_eod = description.get("eod")
    if eod is not None and type(data_eod) is int and data_eod != eod:
        is_null = tokenizer_fingerprint is None
        fix = "name the same eos_token in tokenizer_config.json as when the data was made, or make the dataset again"
        yield Problem(
            f"documents of {prefix}.bin end with id {data_eod}, but the end-of-document id of this run is {eod}:"
            " --eod-mask-loss, --reset-position-ids and --reset-attention-mask would use the wrong token",
            f"give --null-tokenizer-eod-id {data_eod}" if is_null else fix,
        )


def _read_data_args(path: Path) -> Sequence[str]:
    arguments = _read_text(path, "--data-args-path").split()
    if not arguments:
        raise InputError(
            f"--data-args-path {path}: the file is empty", fix="write the arguments of --data-path in it"
        )
    return arguments


def _read_data_args_by_split(path: Path) -> dict[str, list[str]]:
    flag = "--per-split-data-args-path"
    fix = 'write {"train": [...], "valid": [...], "test": [...]} with the arguments of --data-path for each'
    try:
        # Pairs: a dict would silently keep only the last of two equal keys.
        content = json.loads(_read_text(path, flag), object_pairs_hook=_Pairs)
    except json.JSONDecodeError as error:
        raise InputError(
            f"{path}:{error.lineno}: not JSON: {error.msg} at column {error.colno}", fix=fix
        ) from error
    except (ValueError, RecursionError) as error:
        raise InputError(f"{flag} {path}: cannot be read: {error}", fix=fix) from error
    if not isinstance(content, _Pairs):
        raise InputError(f"{flag} {path}: contains no JSON object", fix=fix)
    arguments: dict[str, list[str]] = {}
    seen: set[str] = set()
    for name, value in content:
        if name not in SPLIT_NAMES:
            raise InputError(f"{flag} {path}: {name!r} is not a split", fix=fix)
        if name in seen:
            raise InputError(f"{flag} {path}: {name!r} occurs twice", fix=fix)
        seen.add(name)
        found = value.split() if isinstance(value, str) else value
        is_list = type(found) is list and all(type(argument) in (str, int, float) for argument in found)
        if found is not None and not is_list:
            raise InputError(f"{flag} {path}: {name!r} is not a list of arguments", fix=fix)
        if found:
            arguments[name] = [str(argument) for argument in found]
    if not arguments:
        raise InputError(f"{flag} {path}: the file names no datasets", fix=fix)
    return {name: arguments[name] for name in SPLIT_NAMES if name in arguments}


class _Pairs(list[tuple[str, Any]]):
    """The key-value pairs of a JSON object, including equal keys."""


def _read_text(path: Path, flag: str) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, ValueError) as error:
        reason = error.strerror if isinstance(error, OSError) else "it is not UTF-8"
        raise InputError(
            f"{flag} {path}: cannot be read: {reason}", fix="give an existing UTF-8 text file"
        ) from error
