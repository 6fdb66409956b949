"""Where preprocessing writes to: a dataset a key, the bad lines, and the journal that lets an interrupted run go on.

    add(chunk)  -> partial files         every few seconds, between chunks: flush them, then write down how far they are
    finish()    -> all files complete -> written down -> each gets its name -> the journal goes

Whatever ends the run, the next one with the same settings cuts the partial files to the journal and goes on from there.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from types import TracebackType
from typing import Any, Final, Self

import numpy.typing as npt

from megatrain.data.indexed.writer import IndexedWriter, WriterState, dataset_files
from megatrain.data.preprocess.bad_lines import BadLines, bad_lines_files
from megatrain.data.preprocess.encoder import EncodedChunk
from megatrain.data.preprocess.journal import DamagedError, Journal, journal_files
from megatrain.data.preprocess.lines import Position

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
        """Lock all datasets, and open the partial files, new or those of an interrupted run."""
        try:
            left = self._found()
            self.is_complete = bool(left) and left["is_complete"]
            self.position = Position(**left["position"]) if left else Position()
            self._journaled_documents = self.num_documents
            self.bad_lines.num_lines = left["bad_lines"]["num_lines"] if left else 0
            if not self.is_complete:
                for output in self.keys.values():
                    output.writer.open()
                self.bad_lines.open(num_bytes=left["bad_lines"]["num_bytes"] if left else 0)
        except BaseException:
            self._end()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """After an error, keep what the journal counts; without a journal, nothing. The error says which."""
        if error is not None:
            kept = f"{self._journaled_documents:,} documents are done and kept: the same command goes on from there"
            error.add_note(kept if self._journal.exists else "nothing was kept")
        self._end()

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

    def _found(self) -> Mapping[str, Any]:
        """Make and lock the writers; the journal that they go on from, or nothing, and then it says why."""
        left, reason = self._usable_journal()
        self._make_writers(left)
        if left and not self._is_all_there(left):
            reason = "an interrupted run are dropped: its partial files are not all there"
            self._let_go()
            left = {}
            self._make_writers(left)
        if reason:
            self._say(f"the remains of {reason}")
            self._journal.remove()  # not before all is locked: until then, nothing here may be ours to remove
        return left

    def _usable_journal(self) -> tuple[Mapping[str, Any], str]:
        """The journal of a run with these settings, or nothing and the reason why it is of no use."""
        try:
            left = self._journal.read()
        except DamagedError as error:
            return {}, f"an interrupted run are dropped: {error}"
        changed = self._changed(left) if left else []
        if changed:
            return {}, f"another run with this prefix are dropped: it had other {', '.join(changed)}"
        return left, ""

    def _changed(self, left: Mapping[str, Any]) -> list[str]:
        """The settings that are not those of the run that left this."""
        before = left["settings"]
        if before["format"] != self._settings["format"]:
            return ["format"]
        changed = [name for name in self._settings if before.get(name) != self._settings[name]]
        # Where no line was bad yet, all policies have done the same.
        return [name for name in changed if name != "--on-bad-line" or left["bad_lines"]["num_lines"]]

    def _make_writers(self, left: Mapping[str, Any]) -> None:
        states = left["keys"] if left else {}
        self.keys = {
            key: KeyOutput(prefix, self._dtype, states.get(key)) for key, prefix in self._prefixes.items()
        }
        for output in self.keys.values():
            output.writer.lock()

    def _is_all_there(self, left: Mapping[str, Any]) -> bool:
        writers = [output.writer for output in self.keys.values()]
        bad_bytes = left["bad_lines"]["num_bytes"]
        if left["is_complete"]:
            return all(writer.can_publish() for writer in writers) and self.bad_lines.can_publish(bad_bytes)
        return all(writer.can_resume() for writer in writers) and self.bad_lines.can_resume(bad_bytes)

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

    def _end(self) -> None:
        """Let go of all files. What no journal counts is removed: nobody can go on from it."""
        if not self._journal.exists:
            for output in self.keys.values():
                output.writer.discard()
            self.bad_lines.discard()
        self._let_go()

    def _let_go(self) -> None:
        for output in self.keys.values():
            output.writer.close()
        self.bad_lines.close()


def output_prefixes(prefix: str, keys: Sequence[str], *, is_split: bool) -> dict[str, str]:
    """The dataset of each key, by Megatron-LM's rule of names."""
    return {key: f"{prefix}_{key}_{'sentence' if is_split else 'document'}" for key in keys}


def files_of_run(prefix: str, dataset_prefixes: Iterable[str]) -> list[Path]:
    """All files that a run with this output prefix makes, replaces or removes."""
    datasets = itertools.chain.from_iterable(map(dataset_files, dataset_prefixes))
    return [*datasets, *bad_lines_files(prefix), *journal_files(prefix)]
