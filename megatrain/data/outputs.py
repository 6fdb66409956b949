"""Where preprocessing writes to: a dataset a key, the bad lines, and the journal that lets an interrupted run go on.

    add(chunk)  -> partial files         every few seconds, between chunks: flush them, then write down how far they are
    finish()    -> all files complete -> written down -> each gets its name -> the journal goes

Whatever ends the run, the next one with the same settings cuts the partial files to the journal and goes on from there.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from types import TracebackType
from typing import Any, Final, Self

import numpy.typing as npt

from megatrain.data.bad_lines import BadLines
from megatrain.data.encoder import EncodedChunk
from megatrain.data.indexed_writer import IndexedWriter, WriterState
from megatrain.data.journal import Journal
from megatrain.data.lines import Position

JOURNAL_SECONDS: Final = 5.0
"""Work that a crash may cost, and then some."""


class KeyOutput:
    """The dataset of one key, and what its tokens are."""

    def __init__(self, prefix: str, dtype: npt.DTypeLike, state: Mapping[str, Any] | None) -> None:
        counts = dict(state or {"largest_id": -1, "eod_count": 0})
        self.largest_id: int = counts.pop("largest_id")
        self.eod_count: int = counts.pop("eod_count")
        resume_from = WriterState(**counts) if state else None
        self.writer = IndexedWriter(prefix, dtype, resume_from=resume_from)

    def state(self) -> dict[str, Any]:
        """How far it is, on the disk."""
        return asdict(self.writer.state()) | {"largest_id": self.largest_id, "eod_count": self.eod_count}

    def counts(self) -> dict[str, Any]:
        """What its `.json` says of its content."""
        return {
            "documents": self.writer.num_documents,
            "sequences": self.writer.num_sequences,
            "tokens": self.writer.num_tokens,
            "largest_id": None if self.largest_id < 0 else self.largest_id,
            "eod_count": self.eod_count,
        }


class Outputs:
    """All files of a run. Entering finds out what a former run has left to go on from."""

    def __init__(
        self,
        journal: Journal,
        prefixes: Mapping[str, str],
        dtype: npt.DTypeLike,
        bad_lines: BadLines,
        say: Callable[[str], None],
        *,
        settings: Mapping[str, Any],
        journal_seconds: float,
    ) -> None:
        """`prefixes`: of the dataset of each key. `settings`: all that decides about their bytes, as JSON has it."""
        self.position = Position()
        self.is_complete = False
        self.bad_lines = bad_lines
        self._journal = journal
        self._prefixes = prefixes
        self._dtype = dtype
        self._say = say
        self._settings = settings
        self._journal_seconds = journal_seconds
        self._written_at = time.monotonic()
        self._journaled_documents = 0
        self.keys: dict[str, KeyOutput] = {}

    def __enter__(self) -> Self:
        """Open the partial files, new or those of an interrupted run."""
        left = self._journal.read()
        self.keys = self._made(left)
        if left and not self._can_resume(left):
            self._journal.remove()
            left = {}
            self.keys = self._made(left)
        self.is_complete = bool(left) and left["is_complete"]
        self.position = Position(**left["position"]) if left else Position()
        self._journaled_documents = self.num_documents
        self.bad_lines.num_lines = left["bad_lines"]["num_lines"] if left else 0
        with contextlib.ExitStack() as opened:
            opened.callback(self._close)
            if not self.is_complete:
                for output in self.keys.values():
                    output.writer.open()
                self.bad_lines.open(num_bytes=left["bad_lines"]["num_bytes"] if left else 0)
            opened.pop_all()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """After an error, keep what the journal counts; without a journal, nothing. The error says which."""
        self._close()
        if error is None:
            return
        if self._journal.exists:
            documents = self._journaled_documents
            error.add_note(f"{documents:,} documents are done and kept: the same command goes on from there")
            return
        error.add_note("nothing was kept")
        for output in self.keys.values():
            output.writer.discard()
        self.bad_lines.discard()

    @property
    def num_documents(self) -> int:
        """Documents of the first key; all keys have as many."""
        return next(iter(self.keys.values())).writer.num_documents

    def add(self, chunk: EncodedChunk) -> None:
        """The next chunk. Raises InputError for a bad line that stops the run."""
        self.bad_lines.take(chunk.bad_lines)
        for output, part in zip(self.keys.values(), chunk.keys, strict=True):
            output.writer.add_documents(part.elements, part.lengths, part.sequences_per_document)
            output.largest_id = max(output.largest_id, part.largest_id)
            output.eod_count += part.eod_count
        self.position = chunk.end
        if time.monotonic() - self._written_at >= self._journal_seconds:
            self._write_journal()

    def finish(self, description: Mapping[str, Any]) -> None:
        """Complete all files, then give them their names."""
        if not self.is_complete:
            for key, output in self.keys.items():
                specific = {"json_key": key, **output.counts(), "skipped_lines": self.bad_lines.num_lines}
                output.writer.description = {**description, **specific}
                output.writer.seal()
            self.is_complete = True
            self._write_journal()  # from here on, a run that is killed is finished by the next one
        self.bad_lines.publish()
        for output in self.keys.values():
            output.writer.publish()
        self._journal.remove()

    def _made(self, left: Mapping[str, Any]) -> dict[str, KeyOutput]:
        states = left.get("keys", {})
        return {
            key: KeyOutput(prefix, self._dtype, states.get(key)) for key, prefix in self._prefixes.items()
        }

    def _can_resume(self, left: Mapping[str, Any]) -> bool:
        """Whether what is left belongs to this run and is all there; says so if not."""
        before = left.get("settings", {})
        changed = [name for name in self._settings if before.get(name) != self._settings[name]]
        if changed:
            names = ", ".join(changed)
            self._say(f"the remains of another run with this prefix are dropped: it had other {names}")
        is_there = left.get("is_complete", False) or (
            all(output.writer.can_resume() for output in self.keys.values())
            and self.bad_lines.can_resume(left["bad_lines"]["num_bytes"])
        )
        if not changed and not is_there:
            self._say("the remains of an interrupted run are dropped: its partial files are not all there")
        return not changed and is_there

    def _write_journal(self) -> None:
        self._journal.write(
            {
                "settings": self._settings,
                "is_complete": self.is_complete,
                "position": asdict(self.position),
                "bad_lines": {
                    "num_bytes": self.bad_lines.num_bytes(),
                    "num_lines": self.bad_lines.num_lines,
                },
                "keys": {key: output.state() for key, output in self.keys.items()},
            }
        )
        self._journaled_documents = self.num_documents
        self._written_at = time.monotonic()

    def _close(self) -> None:
        for output in self.keys.values():
            output.writer.close()
        self.bad_lines.close()


def output_prefixes(prefix: str, keys: Sequence[str], *, is_split: bool) -> dict[str, str]:
    """The dataset of each key, by Megatron-LM's rule of names."""
    return {key: f"{prefix}_{key}_{'sentence' if is_split else 'document'}" for key in keys}


def files_of(prefix: str) -> list[Path]:
    """What a dataset is made of."""
    return [Path(f"{prefix}{suffix}") for suffix in (".bin", ".idx", ".json")]
