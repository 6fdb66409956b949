r"""Rows of conversations about images, from files of JSON Lines as LLaVA has them, or from tar shards of WebDataset.

    {"id": "7", "image": "cat.jpg", "conversations": [{"from": "human", "value": "<image>\nWhat is it?"}, {"from": "gpt", "value": "A cat."}]}
    {"text": "<image> A cat.", "image": ["cat.jpg"]}          text, which is learned whole
    0007.jpg  0007.json  |  0007.jpg  0007.txt                 members of a shard with one key: images, and a row or a caption

`image` is a name or a list of names below the folder of the file; a row without it is text.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import numpy as np
import numpy.typing as npt

from megatrain.config.errors import InputError
from megatrain.data.images.shards import ShardIndex, file_digest, index_of_shards

if TYPE_CHECKING:
    from megatrain.data.samples.index_cache import IndexCache

MARK: Final = "<image>"
_ROLES: Final = {
    "human": "user",
    "user": "user",
    "gpt": "assistant",
    "assistant": "assistant",
    "system": "system",
}
_IMAGES: Final = ("jpg", "jpeg", "png", "webp", "gif", "bmp", "tif", "tiff", "ppm")


@dataclass(frozen=True)
class Turn:
    """A part of a conversation; `text` is the role of text that is all learned."""

    role: str
    text: str


@dataclass(frozen=True)
class Row:
    """A conversation and its images.

    Attributes:
        name: of the sample, for messages.
        images: their names.
        read: returns the bytes of an image.
    """

    name: str
    turns: tuple[Turn, ...]
    images: tuple[str, ...]
    read: Callable[[str], bytes]

    def checked(self, most: int) -> Row:
        """Return the row. Raises InputError if its text has other images, or if it has more images than `most`."""
        marks = sum(turn.text.count(MARK) for turn in self.turns)
        if marks != len(self.images):
            raise InputError(
                f"{self.name} has {marks} {MARK} in its text and {len(self.images)} images",
                fix=f"write one {MARK} for each image",
            )
        if marks > most:
            raise InputError(
                f"{self.name} has {marks} images, more than --images-per-sample {most}",
                fix=f"use --images-per-sample {marks}, or leave images out",
            )
        return self


@dataclass(frozen=True)
class JsonLines:
    """The rows of a file of JSON Lines, by number.

    Attributes:
        offsets: of the lines that are not empty.
    """

    path: Path
    offsets: npt.NDArray[np.int64]
    digest: str

    def __len__(self) -> int:
        """Return the number of rows."""
        return len(self.offsets)

    def __getitem__(self, number: int) -> Row:
        offset = int(self.offsets[number])
        with self.path.open("rb") as file:
            file.seek(offset)
            text = file.readline()
        where = f"{self.path}, byte {offset}"
        found = _object(text, where)
        name = f"sample {found['id']} ({where})" if "id" in found else f"the sample of {where}"
        return Row(name, tuple(_turns(found, name)), _images(found, name), self._read)

    def _read(self, image: str) -> bytes:
        return (self.path.parent / image).read_bytes()


@dataclass(frozen=True)
class Shards:
    """The samples of tar shards, by number."""

    index: ShardIndex

    @property
    def digest(self) -> str:
        return self.index.digest

    def __len__(self) -> int:
        """Return the number of samples."""
        return len(self.index)

    def __getitem__(self, number: int) -> Row:
        members = self.index.members(number)
        name = f"sample {members[0].key} ({members[0].shard})"
        of_kind = {one.kind.rpartition(".")[2].lower(): one for one in members}
        images = {one.name: one for one in members if one.kind.rpartition(".")[2].lower() in _IMAGES}
        if "json" in of_kind:
            found = _object(of_kind["json"].read(), name)
            turns = tuple(_turns(found, name))
        elif "txt" in of_kind:
            text = _text(of_kind["txt"].read(), name)
            marks = "" if MARK in text else MARK * len(images)
            turns = (Turn("text", f"{marks}{text}"),)
        else:
            raise InputError(
                f"{name} has no text: its members are {', '.join(one.name for one in members)}",
                fix="write a member .json with a conversation, or .txt with a caption, for each key",
            )
        return Row(name, turns, tuple(images), lambda image: images[image].read())


Rows = JsonLines | Shards
"""Rows by number, with the `digest` of their files. Raises InputError, which names the row, where one is read."""


def open_rows(paths: list[Path], cache: IndexCache) -> Rows:
    """Open one file of JSON Lines, or the shards of one dataset. Raises InputError if they cannot be read."""
    try:
        if all(path.suffix == ".tar" for path in paths):
            return Shards(index_of_shards(paths, cache))
        (path,) = paths
        digest = file_digest(path)
        offsets = _line_offsets(path, digest, cache)
    except OSError as error:
        where = error.filename or paths[0]
        raise InputError(
            f"--image-data-path {where}: {error.strerror}", fix="name a file of JSON Lines, or tar shards"
        ) from error
    if not len(offsets):
        raise InputError(f"--image-data-path {path} has no samples", fix="write a sample on each line")
    return JsonLines(path, offsets, digest)


def _line_offsets(path: Path, digest: str, cache: IndexCache) -> npt.NDArray[np.int64]:
    """Return the offset of each line that is not empty."""

    def build() -> dict[str, npt.NDArray[Any]]:
        offsets, at = [], 0
        with path.open("rb") as file:
            for line in file:
                if line.strip():
                    offsets.append(at)
                at += len(line)
        return {"offsets": np.array(offsets, np.int64)}

    status = path.stat()
    key = {"digest": digest, "changed": status.st_mtime_ns}
    num_rows = status.st_size >> 8  # of at least 256 bytes
    return cache.arrays("lines", num_rows, key, build)["offsets"]


def _text(content: bytes, where: str) -> str:
    try:
        return content.decode()
    except UnicodeDecodeError as error:
        raise InputError(f"{where}: its caption is not UTF-8: {error}", fix="write it in UTF-8") from error


def _object(text: bytes, where: str) -> Mapping[str, Any]:
    try:
        row = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise InputError(f"{where}: no JSON: {error}", fix="correct the line") from error
    if not isinstance(row, dict):
        raise InputError(f"{where}: no object", fix="write a sample on each line (docs/data.md)")
    return row


def _images(row: Mapping[str, Any], name: str) -> tuple[str, ...]:
    found = row.get("image", row.get("images")) or []
    names = [found] if isinstance(found, str) else found
    if not isinstance(names, list) or not all(isinstance(one, str) for one in names):
        raise InputError(
            f"{name} has images that are no names: {found!r}",
            fix="write the name of a file, or a list of names",
        )
    return tuple(names)


def _turns(row: Mapping[str, Any], name: str) -> Iterator[Turn]:
    if isinstance(row.get("text"), str):
        yield Turn("text", row["text"])
        return
    turns = row.get("conversations", row.get("messages"))
    for turn in turns if isinstance(turns, list) and turns else [None]:
        given = turn if isinstance(turn, dict) else {}
        role, text = given.get("from", given.get("role")), given.get("value", given.get("content"))
        if not isinstance(role, str) or role not in _ROLES or not isinstance(text, str):
            raise InputError(
                f"{name} has a turn without a role or a text",
                fix="write conversations of objects with `from` (human, gpt) and `value`, or a `text`",
            )
        yield Turn(_ROLES[role], text)
