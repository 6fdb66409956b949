"""Shared by the preprocessing tests: runs in this process, and input files."""

from __future__ import annotations

import functools
import json
from pathlib import Path
from typing import TYPE_CHECKING, Any
from unittest import mock

import megatrain.data.preprocess.run as module
from megatrain.data.preprocess.run import main, preprocess

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator
    from typing import Self

NULL = ("--tokenizer-type", "NullTokenizer", "--vocab-size", "100")


class InlineWorkers:
    """A stand-in for `Workers` that works in this process."""

    def __init__(self, _num_workers: int, make: Any) -> None:
        self.work = make()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        pass

    def map(self, items: Iterable[Any], **_: Any) -> Iterator[Any]:
        return map(self.work, items)


def run(*arguments: object, prefix: object, **options: Any) -> int:
    """Run the command in this process only; return the exit code. `options` are those of `preprocess`."""
    inline = functools.partial(preprocess, **{"workers_type": InlineWorkers, **options})
    with mock.patch.object(module, "preprocess", inline):
        return main([*map(str, arguments), "--output-prefix", str(prefix)])


def numbers(path: Path, documents: Iterable[Any]) -> Path:
    """Write a JSON Lines file."""
    path.write_text("".join(json.dumps({"text": text}) + "\n" for text in documents))
    return path


def content_of(folder: Path, prefix: str = "out") -> dict[str, bytes]:
    """Return the content of all files of a run, by name."""
    return {path.name: path.read_bytes() for path in sorted(folder.glob(f"{prefix}*"))}
