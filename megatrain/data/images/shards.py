"""Tar shards of WebDataset, read through an index of the places of their members.

    shard    a/0007.jpg  a/0007.json  a/0008.jpg ...    members of a sample have one key, and follow one another
    index    shard, offset, bytes and name of each member; the first member of each sample      (cached, with a digest)

The key is the name up to the first dot of its last part.
"""

from __future__ import annotations

import hashlib
import tarfile
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import numpy as np
import numpy.typing as npt

from megatrain.config.errors import InputError, MegatrainError
from megatrain.data.samples.sources import sampled_parts

if TYPE_CHECKING:
    from megatrain.data.samples.index_cache import IndexCache

_FIX: Final = "copy the shard again, or leave it out"


@dataclass(frozen=True)
class Member:
    """A file of a shard."""

    shard: Path
    name: str
    offset: int
    size: int

    @property
    def key(self) -> str:
        return split_name(self.name)[0]

    @property
    def kind(self) -> str:
        """The rest of the name, such as `jpg`."""
        return split_name(self.name)[1]

    def read(self) -> bytes:
        """Return its bytes. Raises MegatrainError if the shard has become shorter since it was indexed."""
        with self.shard.open("rb") as file:
            file.seek(self.offset)
            found = file.read(self.size)
        if len(found) < self.size:
            raise MegatrainError(f"{self.shard}: the shard ends within {self.name}", fix=_FIX)
        return found


def split_name(name: str) -> tuple[str, str]:
    """Return the key of a member, and its kind."""
    folder, slash, last = name.rpartition("/")
    key, _, kind = last.partition(".")
    return f"{folder}{slash}{key}", kind


@dataclass(frozen=True)
class ShardIndex:
    """The places of the members of shards.

    Attributes:
        arrays: shard, offset, size and end of the name of each member, the names joined, and the first member of each
            sample with the number of members at the end.
    """

    shards: tuple[Path, ...]
    digest: str
    arrays: dict[str, npt.NDArray[Any]]

    def __len__(self) -> int:
        """Return the number of samples."""
        return len(self.arrays["samples"]) - 1

    @cached_property
    def _names(self) -> bytes:
        return self.arrays["names"].tobytes()

    def members(self, sample: int) -> list[Member]:
        """Return the members of a sample."""
        first, end = self.arrays["samples"][sample : sample + 2].tolist()
        return [self._member(number) for number in range(first, end)]

    def _member(self, number: int) -> Member:
        ends = self.arrays["name_ends"]
        start = int(ends[number - 1]) if number else 0
        name = self._names[start : int(ends[number])].decode()
        shard = self.shards[int(self.arrays["shards"][number])]
        return Member(shard, name, int(self.arrays["offsets"][number]), int(self.arrays["sizes"][number]))


def file_digest(path: Path) -> str:
    """Return the SHA-256 of the size of a file and of its contents; of a large one, of its start, middle and end."""
    size = path.stat().st_size
    result = hashlib.sha256(str(size).encode())
    with path.open("rb") as file:
        for position, count in sampled_parts(size):
            file.seek(position)
            result.update(file.read(count))
    return result.hexdigest()


def index_of_shards(shards: list[Path], cache: IndexCache) -> ShardIndex:
    """Return the index of shards. Raises InputError for one that is damaged or has no samples."""
    digests = [file_digest(shard) for shard in shards]
    digest = hashlib.sha256("".join(digests).encode()).hexdigest()
    key = {"digest": digest, "changed": [shard.stat().st_mtime_ns for shard in shards]}
    if cache.folder is None:
        arrays = _arrays_of(shards)
    else:
        arrays = cache.get_or_build("shards", key, lambda: _arrays_of(shards))
    return ShardIndex(tuple(shards), digest, arrays)


def _arrays_of(shards: list[Path]) -> dict[str, npt.NDArray[Any]]:
    members = [(number, one) for number, shard in enumerate(shards) for one in _members_of(shard)]
    keys = [(number, one.key) for number, one in members]
    starts = [place for place, key in enumerate(keys) if not place or key != keys[place - 1]]
    names = [one.name.encode() for _, one in members]
    return {
        "shards": np.array([number for number, _ in members], np.int32),
        "offsets": np.array([one.offset for _, one in members], np.int64),
        "sizes": np.array([one.size for _, one in members], np.int64),
        "name_ends": np.cumsum([len(name) for name in names], dtype=np.int64),
        "names": np.frombuffer(b"".join(names), np.uint8),
        "samples": np.array([*starts, len(members)], np.int64),
    }


def _members_of(shard: Path) -> list[Member]:
    """Return the files of a shard. Raises InputError if it is cut off, no tar file, compressed, or without files."""
    found: list[Member] = []
    size = shard.stat().st_size
    try:
        with tarfile.open(shard, "r:") as archive:
            for one in archive:
                if one.isfile() and one.offset_data + one.size > size:
                    raise tarfile.ReadError(f"it ends within {one.name}")
                if one.isfile():
                    found.append(Member(shard, one.name, one.offset_data, one.size))
            end = archive.offset
    except tarfile.TarError as error:
        after = f" after sample {found[-1].key}" if found else ""
        raise InputError(f"{shard}: the shard is damaged{after}: {error}", fix=_FIX) from error
    with shard.open("rb") as file:
        file.seek(end)
        if file.read(tarfile.BLOCKSIZE) != bytes(tarfile.BLOCKSIZE):
            after = f" after sample {found[-1].key}" if found else ""
            raise InputError(f"{shard}: the shard is cut off{after}: it has no end mark", fix=_FIX)
    if not found:
        raise InputError(f"{shard}: the shard has no samples", fix="leave it out")
    return found
