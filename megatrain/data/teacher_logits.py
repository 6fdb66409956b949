"""Cached outputs of a teacher: for each token of each sample its k most likely next tokens, and the probability of all others.

    FOLDER/manifest.json        sizes, and digests of data, tokenizer and teacher
    FOLDER/shard-000000.bin     records of samples 0, 1, 2 ...

    a record:  ids [s, k] int32 | log-probabilities [s, k] fp16 or fp32 | log of the rest's probability [s] fp32 | hash of the tokens, int64

Samples have the numbers of the run, so that a record is found without an index.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, NamedTuple

import numpy as np
import numpy.typing as npt

from megatrain.config.errors import InputError
from megatrain.storage.files import replace_file
from megatrain.storage.untrusted_json import (
    InvalidError,
    flag,
    integer,
    json_object,
    optional,
    parse_json,
    record,
    text,
)

MANIFEST_NAME: Final = "manifest.json"
VERSION: Final = 1
_DTYPES: Final = {"fp16": np.float16, "fp32": np.float32}
_SHARD_BYTES: Final = 1 << 28
_MAX_MANIFEST_BYTES: Final = 1 << 20
_COUNT: Final = integer(0, 1 << 50)
_TEXT: Final = text(max_characters=10_000)


@dataclass(frozen=True, kw_only=True)
class LogitsManifest:
    """Description of a folder of cached outputs."""

    version: int
    seq_length: int
    top_k: int
    dtype: str
    vocab_size: int
    num_samples: int
    samples_per_shard: int
    data_digest: str
    """Digest of the samples and their order."""
    tokenizer_fingerprint: str | None
    teacher: str
    """Folder of the teacher, for messages."""
    teacher_checksum: int
    is_complete: bool
    """False: `megatrain cache-logits` has not written all shards yet."""

    @property
    def record_type(self) -> np.dtype[Any]:
        """The record of a sample."""
        return np.dtype([
            ("ids", "<i4", (self.seq_length, self.top_k)),
            ("log_probabilities", np.dtype(_DTYPES[self.dtype]).newbyteorder("<"), (self.seq_length, self.top_k)),
            ("log_rest", "<f4", (self.seq_length,)),
            ("token_hash", "<i8"),
        ])  # fmt: skip

    @property
    def num_shards(self) -> int:
        return -(-self.num_samples // self.samples_per_shard)

    def samples_of(self, shard: int) -> range:
        """Return the samples of a shard."""
        first = shard * self.samples_per_shard
        return range(first, min(first + self.samples_per_shard, self.num_samples))

    def shard_path(self, folder: Path, shard: int) -> Path:
        return folder / f"shard-{shard:06d}.bin"

    def write(self, folder: Path) -> None:
        """Write the manifest durably."""
        replace_file(folder / MANIFEST_NAME, [json.dumps(dataclasses.asdict(self), indent=1).encode()])


_CHECK: Final = record(
    {
        "version": integer(VERSION, VERSION),
        "seq_length": integer(1, 1 << 30),
        "top_k": integer(1, 1 << 20),
        "dtype": _TEXT,
        "vocab_size": integer(1, 1 << 30),
        "num_samples": _COUNT,
        "samples_per_shard": integer(1, 1 << 50),
        "data_digest": _TEXT,
        "tokenizer_fingerprint": optional(_TEXT),
        "teacher": _TEXT,
        "teacher_checksum": _COUNT,
        "is_complete": flag,
    }
)


def read_logits_manifest(folder: Path, *, is_complete: bool = True) -> LogitsManifest:
    """Read the manifest of a folder; of one that must be complete, compare the sizes of its shards with it. Raises InputError."""
    path = folder / MANIFEST_NAME
    fix = "write the folder with `megatrain cache-logits`, or name another one"
    try:
        content = json_object(parse_json(path.read_bytes(), max_bytes=_MAX_MANIFEST_BYTES), "the manifest")
        _CHECK(content, "the manifest")
        found = LogitsManifest(**content)
        if found.dtype not in _DTYPES:
            raise InvalidError(f"dtype is {found.dtype}")
    except (OSError, ValueError) as error:
        reason = error.strerror if isinstance(error, OSError) else str(error)
        raise InputError(f"{path}: {reason}", fix=fix) from error
    if not is_complete:
        return found
    if not found.is_complete:
        raise InputError(f"{folder} is not complete", fix="run `megatrain cache-logits` again: it continues")
    for shard in range(found.num_shards):
        file = found.shard_path(folder, shard)
        size = len(found.samples_of(shard)) * found.record_type.itemsize
        if not file.is_file() or file.stat().st_size != size:
            raise InputError(f"{file} is missing or does not have {size} bytes", fix=fix)
    return found


def samples_per_shard(record_bytes: int, micro_batch_size: int) -> int:
    """Return the samples of a shard of about 256 MiB, a multiple of the micro-batch."""
    passes = max(1, _SHARD_BYTES // (record_bytes * micro_batch_size))
    return passes * micro_batch_size


def hash_weights(seq_length: int) -> npt.NDArray[np.int64]:
    """Return the weight of each position in the hash of a sample's tokens: the sum of weight * id, which int64 holds."""
    positions = np.arange(1, seq_length + 1, dtype=np.int64)
    return (positions * 2654435761) % (1 << 20) + 1


class TopTokens(NamedTuple):
    """The cached outputs of consecutive samples."""

    ids: npt.NDArray[np.int32]
    """[b, s, k]."""
    log_probabilities: npt.NDArray[Any]
    """[b, s, k]."""
    log_rest: npt.NDArray[np.float32]
    """[b, s]."""
    token_hash: npt.NDArray[np.int64]
    """[b]."""


class LogitsReader:
    """Reads records by the number of their sample."""

    def __init__(self, folder: Path, manifest: LogitsManifest) -> None:
        self.folder, self.manifest = folder, manifest
        self._shards: dict[int, npt.NDArray[Any]] = {}

    def read(self, first: int, count: int) -> TopTokens:
        """Return the outputs of samples `first` to `first + count - 1`."""
        records = np.stack([self._record(number) for number in range(first, first + count)])
        return TopTokens(*(records[name] for name in TopTokens._fields))

    def _record(self, number: int) -> npt.NDArray[Any]:
        shard, row = divmod(number, self.manifest.samples_per_shard)
        if shard not in self._shards:
            path = self.manifest.shard_path(self.folder, shard)
            self._shards = {shard: np.memmap(path, self.manifest.record_type, mode="r")}
        found: npt.NDArray[Any] = self._shards[shard][row]
        return found


def write_shard(path: Path, manifest: LogitsManifest, parts: Sequence[TopTokens]) -> None:
    """Write a shard durably and as a whole."""
    count = sum(len(part.ids) for part in parts)
    records = np.zeros(count, manifest.record_type)
    for name in TopTokens._fields:
        records[name] = np.concatenate([getattr(part, name) for part in parts])
    replace_file(path, [records.tobytes()])
