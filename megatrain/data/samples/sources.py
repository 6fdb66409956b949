"""What a run reads: the words that name data, wherever they stand, and what the files say about themselves.

--data-path | --data-args-path FILE | --train-data-path ... | --per-split-data-args-path FILE -> blends by split
blends -> each dataset opened, held against its description and the tokenizer -> DatasetFacts, or problems
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import itertools
import json
import os
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import numpy as np

from megatrain.config.derive.datasets import SPLIT_NAMES, Blend, parse_blend, parse_weight
from megatrain.config.errors import ConfigError, InputError, Problem
from megatrain.config.facts import DatasetFacts
from megatrain.config.schema.data import DataConfig
from megatrain.data.indexed.reader import IndexedDataset
from megatrain.data.samples.index_cache import digest

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping, Sequence

SAMPLED_BYTES: Final = 1 << 16
"""How much of the beginning, the middle and the end of a large .bin goes into its digest."""
WHOLE_BYTES: Final = 1 << 22
"""Up to this size, all of a .bin does."""


def blends_from_config(data: DataConfig) -> dict[str, Blend]:
    """The blends that a configuration names, under `all` or under `train`, `valid` and `test`.

    Raises:
        ConfigError: a file of words cannot be read, or weights are wrong.
    """
    if data.data_path:
        return {"all": parse_blend(data.data_path)}
    if data.data_args_path is not None:
        return {"all": parse_blend(_words_of_file(Path(data.data_args_path)), "--data-args-path")}
    if data.per_split_data_args_path is not None:
        words = _words_by_split(Path(data.per_split_data_args_path))
        return {name: parse_blend(found, "--per-split-data-args-path") for name, found in words.items()}
    words = {name: getattr(data, f"{name}_data_path") for name in SPLIT_NAMES}
    return {name: parse_blend(found, f"--{name}-data-path") for name, found in words.items() if found}


def blends_from_facts(datasets: Iterable[DatasetFacts]) -> dict[str, Blend]:
    """The blends that these datasets form."""
    blends = {}
    for split, group in itertools.groupby(datasets, key=lambda dataset: dataset.split):
        members = list(group)
        weights = tuple(member.weight for member in members if member.weight is not None)
        blends[split] = Blend(tuple(member.prefix for member in members), weights or None)
    return blends


def used_eod(data: DataConfig, eod: int | None) -> int | None:
    """The end-of-document id of a run, if its samples depend on it: documents are told apart by it, or it has no loss."""
    is_used = data.eod_mask_loss or data.reset_position_ids or data.reset_attention_mask
    return eod if is_used else None


def inspect_datasets(
    blends: Mapping[str, Blend],
    *,
    vocab_size: int | None,
    tokenizer_fingerprint: str | None,
    eod: int | None = None,
) -> tuple[list[DatasetFacts], list[Problem]]:
    """What is known about every dataset, and everything that is wrong with any of them.

    Args:
        blends: as `blends_from_config` gives them.
        vocab_size: of the tokenizer; None: ids are not checked.
        tokenizer_fingerprint: of the tokenizer that training uses; None: it reads any ids (NullTokenizer).
        eod: as `used_eod` gives it; None: any end of documents will do.
    """
    facts: list[DatasetFacts] = []
    problems: list[Problem] = []
    seen: dict[str, DatasetFacts | None] = {}
    for split, blend in blends.items():
        for number, prefix in enumerate(blend.prefixes):
            if prefix not in seen:
                seen[prefix] = None
                try:
                    described = seen[prefix] = _facts_of(prefix)
                    problems += _description_problems(described, vocab_size, tokenizer_fingerprint, eod)
                except ConfigError as error:
                    problems += [_with_hint_at_weights(problem, prefix) for problem in error.problems]
            found = seen[prefix]
            if found is not None:
                weight = blend.weights[number] if blend.weights is not None else None
                facts.append(DatasetFacts(**(vars(found) | {"split": split, "weight": weight})))
    return facts, problems


def read_description(prefix: str) -> dict[str, Any] | None:
    """What `preprocess_data.py` wrote beside a dataset, or None where nothing is.

    Raises:
        InputError: the file is not what it should be.
    """
    path = Path(f"{prefix}.json")
    if not os.path.lexists(path):
        return None
    fix = "make the dataset anew, or move this file away to use the dataset without its description"
    if not path.is_file():
        raise InputError(f"{path}: is no file, or a link to none", fix=fix)
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise InputError(f"{path}: cannot be read: {error}", fix=fix) from error
    if not isinstance(content, dict):
        raise InputError(f"{path}: holds no JSON object", fix=fix)
    for name in ("tokenizer_type", "tokenizer_fingerprint"):
        if not isinstance(content.get(name), str | None):
            raise InputError(f"{path}: {name} is {content[name]!r}, and should be text", fix=fix)
    for name in ("vocab_size", "sequences", "tokens", "largest_id"):
        found = content.get(name)
        if found is not None and (type(found) is not int or found < 0):
            raise InputError(f"{path}: {name} is {found!r}, and should be a count", fix=fix)
    return content


def _facts_of(prefix: str) -> DatasetFacts:
    dataset = open_token_ids(prefix)
    return DatasetFacts(
        split="all",
        prefix=prefix,
        weight=None,
        num_sequences=len(dataset),
        num_tokens=dataset.num_tokens,
        digest=content_digest(dataset),
    )


def open_token_ids(prefix: str, *, mmap: bool = True) -> IndexedDataset:
    """A dataset whose elements are token ids."""
    with _naming(prefix):
        dataset = IndexedDataset(prefix, mmap=mmap)
    if dataset.dtype.kind not in "iu":
        raise InputError(
            f"{dataset.name}: elements are {dataset.dtype.name}, and token ids are integers",
            fix="give the prefix of a tokenized text dataset",
        )
    return dataset


def content_digest(dataset: IndexedDataset) -> str:
    """SHA-256 of the lengths of all sequences and of samples of the elements: whole files would take too long."""
    made = hashlib.sha256(digest(np.asarray(dataset.lengths)).encode())
    made.update(dataset.dtype.str.encode())
    size = dataset.num_tokens * dataset.dtype.itemsize
    with _naming(dataset.prefix), Path(dataset.name).open("rb") as file:
        if size <= WHOLE_BYTES:
            made.update(file.read())
            return made.hexdigest()
        for position in (0, size // 2, size - SAMPLED_BYTES):
            file.seek(position)
            made.update(file.read(SAMPLED_BYTES))
    return made.hexdigest()


@contextlib.contextmanager
def _naming(prefix: str) -> Iterator[None]:
    """Errors of the disk name the dataset."""
    try:
        yield
    except OSError as error:
        fix = "see that both files can be read from this host"
        if error.errno == errno.EMFILE:
            fix = (
                "raise the limit of open files (ulimit -n): each dataset needs two, and each cached index one"
            )
        raise InputError(
            f"{prefix}.bin and .idx: cannot be read: {error.strerror or error}", fix=fix
        ) from error


def _with_hint_at_weights(problem: Problem, prefix: str) -> Problem:
    """A number that is taken for a prefix was often meant to be a weight."""
    if parse_weight(prefix) is None or os.path.lexists(f"{prefix}.idx"):
        return problem
    hint = f"if {prefix} is a weight: each dataset has its own, before its prefix, such as 0.3 a 0.7 b"
    return Problem(problem.text, f"{hint}; if it is a prefix: {problem.fix}")


def _description_problems(
    dataset: DatasetFacts, vocab_size: int | None, tokenizer_fingerprint: str | None, eod: int | None
) -> Iterator[Problem]:
    """Whether a dataset is another than its description says, or was made with another tokenizer than this run's."""
    prefix = dataset.prefix
    description = read_description(prefix)
    if description is None:
        return
    for name, counted in (("sequences", dataset.num_sequences), ("tokens", dataset.num_tokens)):
        said = description.get(name)
        if said is not None and said != counted:
            yield Problem(
                f"{prefix}.json: {name} is {said}, and {prefix}.idx counts {counted}: it describes another dataset",
                "copy all three files of the dataset again, or move the .json away to use the data without its description",
            )
            return
    made_with = description.get("tokenizer_fingerprint")
    if tokenizer_fingerprint and made_with and made_with != tokenizer_fingerprint:
        yield Problem(
            f"{prefix}.bin was made with another tokenizer ({description.get('tokenizer_type')}, fingerprint"
            f" {made_with[:12]}) than this run uses (fingerprint {tokenizer_fingerprint[:12]})",
            "give --tokenizer-type and --tokenizer-model as in preprocess_data.py, or make the dataset anew",
        )
        return
    largest = description.get("largest_id")
    if vocab_size is not None and largest is not None and largest >= vocab_size:
        yield Problem(
            f"{prefix}.bin holds id {largest}, outside the vocabulary of {vocab_size}",
            "use the tokenizer that the data was made with, or the right --vocab-size",
        )
    ends_with = description.get("eod")
    if eod is not None and type(ends_with) is int and ends_with != eod:
        is_null = tokenizer_fingerprint is None
        same = "name the same eos_token in tokenizer_config.json as when the data was made"
        yield Problem(
            f"documents of {prefix}.bin end with id {ends_with}, and this run takes id {eod} for the end:"
            " --eod-mask-loss, --reset-position-ids and --reset-attention-mask would go by the wrong token",
            f"give --null-tokenizer-eod-id {ends_with}" if is_null else f"{same}, or make the dataset anew",
        )


def _words_of_file(path: Path) -> Sequence[str]:
    words = _text_of(path, "--data-args-path").split()
    if not words:
        raise InputError(
            f"--data-args-path {path}: the file names no data", fix="write the words of --data-path in it"
        )
    return words


def _words_by_split(path: Path) -> dict[str, list[str]]:
    flag = "--per-split-data-args-path"
    fix = 'write {"train": [...], "valid": [...], "test": [...]} with the words of --data-path for each'
    try:
        # As pairs: of an object that names a split twice, Python would keep the latter.
        content = json.loads(_text_of(path, flag), object_pairs_hook=_Pairs)
    except json.JSONDecodeError as error:
        raise InputError(
            f"{path}:{error.lineno}: not JSON: {error.msg} at column {error.colno}", fix=fix
        ) from error
    except (ValueError, RecursionError) as error:
        raise InputError(f"{flag} {path}: cannot be read: {error}", fix=fix) from error
    if not isinstance(content, _Pairs):
        raise InputError(f"{flag} {path}: holds no JSON object", fix=fix)
    words: dict[str, list[str]] = {}
    seen: set[str] = set()
    for name, value in content:
        if name not in SPLIT_NAMES:
            raise InputError(f"{flag} {path}: {name!r} is no split", fix=fix)
        if name in seen:
            raise InputError(f"{flag} {path}: {name!r} is there twice", fix=fix)
        seen.add(name)
        found = value.split() if isinstance(value, str) else value
        is_list = type(found) is list and all(type(word) in (str, int, float) for word in found)
        if found is not None and not is_list:
            raise InputError(f"{flag} {path}: {name!r} holds no list of words", fix=fix)
        if found:
            words[name] = [str(word) for word in found]
    if not words:
        raise InputError(f"{flag} {path}: the file names no data", fix=fix)
    return {name: words[name] for name in SPLIT_NAMES if name in words}


class _Pairs(list[tuple[str, Any]]):
    """A JSON object, of which no pair is lost."""


def _text_of(path: Path, flag: str) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, ValueError) as error:
        reason = error.strerror if isinstance(error, OSError) else "it is not UTF-8"
        raise InputError(
            f"{flag} {path}: cannot be read: {reason}", fix="give a text file that is there"
        ) from error
