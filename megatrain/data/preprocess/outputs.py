"""The output files of preprocessing: a dataset per key, bad lines, and the journal that makes a run resumable.

    add(chunk)  -> partial files         every few seconds, between chunks: flush them, then write their sizes to the journal
    finish()    -> all files complete -> journaled -> renamed to their final names -> journal removed

    <prefix>.preprocess.json   journal          <prefix>.preprocess.lock   lock: one run at a time per prefix

However a run ends, the next run with the same settings truncates the partial files to the journal and resumes there.
"""

from __future__ import annotations

import hashlib
import itertools
import json
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any, Final, Self

import numpy.typing as npt

from megatrain.data.files import FileLock, report_write_errors, write_json
from megatrain.data.indexed.writer import IndexedWriter, WriterState, dataset_files
from megatrain.data.preprocess.bad_lines import BadLines, bad_lines_files
from megatrain.data.preprocess.documents import Position
from megatrain.data.preprocess.encoder import EncodedChunk
from megatrain.storage.files import fsync_folder, read_regular

_MAX_JOURNAL_BYTES: Final = 1 << 28

JOURNAL_SECONDS: Final = 5.0
"""Seconds between two journal entries: about the work that a crash costs."""


class KeyOutput:
    """The dataset of one key, and counts of its tokens."""

    def __init__(self, prefix: str, dtype: npt.DTypeLike, state: Mapping[str, Any] | None) -> None:
        counts = dict(state or {"largest_id": -1, "eod_count": 0})
        self.largest_id: int = counts.pop("largest_id")
        self.eod_count: int = counts.pop("eod_count")
        resume_from = WriterState(**counts) if state else None
        self.writer = IndexedWriter(prefix, dtype, resume_from=resume_from)

    def state(self) -> dict[str, Any]:
        """Return the flushed state of the dataset."""
        return asdict(self.writer.state()) | {"largest_id": self.largest_id, "eod_count": self.eod_count}

    def counts(self) -> dict[str, Any]:
        """Return the counts of the dataset's `.json`."""
        return {
            "documents": self.writer.num_documents,
            "sequences": self.writer.num_sequences,
            "tokens": self.writer.num_tokens,
            "largest_id": None if self.largest_id < 0 else self.largest_id,
            "eod_count": self.eod_count,
        }


class Outputs:
    """All output files of a run. Entering the `with` block resumes an interrupted run if possible."""

    def __init__(
        self,
        journal: Journal,
        prefixes: Mapping[str, str],
        dtypes: Mapping[str, npt.DTypeLike],
        bad_lines: BadLines,
        log: Callable[[str], None],
        *,
        settings: Mapping[str, Any],
        journal_seconds: float,
    ) -> None:
        """Prepare the files.

        Args:
            journal: the entered journal of the output prefix.
            prefixes: dataset prefix of each key.
            dtypes: element type of each dataset, by key.
            bad_lines: handles bad lines.
            log: receives a line if an interrupted run cannot be resumed.
            settings: JSON of everything that determines the bytes of the output.
            journal_seconds: minimum time between two journal entries.
        """
        self.position = Position()
        self.is_complete = False
        self.bad_lines = bad_lines
        self._journal = journal
        self._prefixes = prefixes
        self._dtypes = dtypes
        self._log = log
        self._settings = settings
        self._journal_seconds = journal_seconds
        self._written_at = time.monotonic()
        self._journaled_documents = 0
        self.keys: dict[str, KeyOutput] = {}

    def __enter__(self) -> Self:
        """Lock all datasets and open the partial files: new ones, or the partial files of an interrupted run."""
        try:
            entry = self._load_journal()
            self.is_complete = bool(entry) and entry["is_complete"]
            self.position = Position(**entry["position"]) if entry else Position()
            self._journaled_documents = self.num_documents
            self.bad_lines.num_lines = entry["bad_lines"]["num_lines"] if entry else 0
            if not self.is_complete:
                for output in self.keys.values():
                    output.writer.open()
                self.bad_lines.open(num_bytes=entry["bad_lines"]["num_bytes"] if entry else 0)
        except BaseException:
            self._cleanup()
            raise
        return self

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        """After an error, keep the documents that the journal covers, and add a note about them to the error."""
        if error is not None:
            kept = (
                f"{self._journaled_documents:,} documents are done and kept: run the same command to resume"
            )
            error.add_note(kept if self._journal.exists else "nothing was kept")
        self._cleanup()

    @property
    def num_documents(self) -> int:
        """Documents so far, which is the same number for all keys."""
        return next(iter(self.keys.values())).writer.num_documents

    def add(self, chunk: EncodedChunk) -> None:
        """Write the next chunk. Raises InputError for a bad line that stops the run."""
        self.bad_lines.handle(chunk.bad_lines, bytes_read=chunk.end.bytes_read)
        if self.bad_lines.stops:
            return
        for output, part in zip(self.keys.values(), chunk.keys, strict=True):
            output.writer.add_documents(part.elements, part.lengths, part.sequences_per_document)
            output.largest_id = max(output.largest_id, part.largest_id)
            output.eod_count += part.eod_count
        self.position = chunk.end
        if time.monotonic() - self._written_at >= self._journal_seconds:
            self._write_journal()

    def finish(self, description: Mapping[str, Any]) -> None:
        """Complete all files, then rename them to their final names."""
        if not self.is_complete:
            for key, output in self.keys.items():
                specific = {"json_key": key, **output.counts(), "skipped_lines": self.bad_lines.num_lines}
                output.writer.description = {**description, **specific}
                output.writer.finalize()
            self.is_complete = True
            self._write_journal()  # if this run is killed after this line, the next run finishes it
        self.bad_lines.commit()
        for output in self.keys.values():
            output.writer.commit()
        self._journal.remove()

    def _load_journal(self) -> Mapping[str, Any]:
        """Create and lock the writers; return the journal entry that they resume from, or an empty dict."""
        entry, reason = self._usable_journal()
        self._create_writers(entry)
        problem = self._partial_files_problem(entry) if entry else None
        if problem is not None:
            reason = f"its partial files are incomplete or damaged: {problem}"
            self.bad_lines.num_lines = self.bad_lines.crc32 = 0
            self._close()
            entry = {}
            self._create_writers(entry)
        if reason:
            self._log(f"an interrupted run cannot continue, starting over: {reason}")
            self._journal.remove()  # not before all writers are locked: the files may belong to another run until then
        return entry

    def _usable_journal(self) -> tuple[Mapping[str, Any], str]:
        """Return the journal of a run with these settings, or an empty dict and the reason."""
        try:
            entry = self._journal.read()
        except DamagedJournalError as error:
            return {}, str(error)
        changed = self._changed(entry) if entry else []
        if changed:
            return {}, f"it had other settings: {', '.join(changed)}"
        return entry, ""

    def _changed(self, entry: Mapping[str, Any]) -> list[str]:
        """Return the names of the settings that differ from the journal."""
        before = entry["settings"]
        if before["format"] != self._settings["format"]:
            return ["format"]
        changed = [name for name in self._settings if before.get(name) != self._settings[name]]
        # Without a bad line so far, all policies have the same output.
        return [name for name in changed if name != "--on-bad-line" or entry["bad_lines"]["num_lines"]]

    def _create_writers(self, entry: Mapping[str, Any]) -> None:
        states = entry["keys"] if entry else {}
        self.keys = {
            key: KeyOutput(prefix, self._dtypes[key], states.get(key))
            for key, prefix in self._prefixes.items()
        }
        for output in self.keys.values():
            output.writer.lock()

    def _partial_files_problem(self, entry: Mapping[str, Any]) -> str | None:
        """Return why the files of an interrupted run cannot be used, or None. They are read whole: some may be damaged."""
        self._log("checking the files of an interrupted run")
        bad_bytes, self.bad_lines.crc32 = entry["bad_lines"]["num_bytes"], entry["bad_lines"]["crc32"]
        is_complete, bad_lines = entry["is_complete"], self.bad_lines
        if not (bad_lines.can_commit if is_complete else bad_lines.can_resume)(bad_bytes):
            return f"bad lines of {bad_lines.path}"
        writers = [output.writer for output in self.keys.values()]
        problems = (writer.commit_problem() if is_complete else writer.resume_problem() for writer in writers)
        return next((problem for problem in problems if problem is not None), None)

    def _write_journal(self) -> None:
        self._journal.write(
            {
                "settings": self._settings,
                "is_complete": self.is_complete,
                "position": asdict(self.position),
                "bad_lines": {
                    "num_bytes": self.bad_lines.num_bytes(),
                    "num_lines": self.bad_lines.num_lines,
                    "crc32": self.bad_lines.crc32,
                },
                "keys": {key: output.state() for key, output in self.keys.items()},
            }
        )
        self._journaled_documents = self.num_documents
        self._written_at = time.monotonic()

    def _cleanup(self) -> None:
        """Close and unlock all files. Without a journal, remove them: they cannot be resumed."""
        if not self._journal.exists:
            for output in self.keys.values():
                output.writer.discard()
            self.bad_lines.discard()
        self._close()

    def _close(self) -> None:
        for output in self.keys.values():
            output.writer.close()
        self.bad_lines.close()


class DamagedJournalError(Exception):
    """The journal is damaged; the message names the file."""


class Journal:
    """The progress of an unfinished run on disk, locked while its `with` block runs.

    Writing replaces the file as a whole, so that after a power failure one of its versions exists. The file contains a
    digest of itself; a file with another digest is not used.
    """

    def __init__(self, prefix: str, log: Callable[[str], None]) -> None:
        self._path, self._partial, lock = journal_files(prefix)
        self._lock = FileLock(lock, target=f"--output-prefix {prefix}", log=log)

    def __enter__(self) -> Self:
        """Acquire the lock. Raises InputError if another run has it or the folder is not writable."""
        self._lock.acquire()
        return self

    def __exit__(self, *error: object) -> None:
        """Release the lock."""
        self._lock.release()

    @property
    def exists(self) -> bool:
        """True if there is a run to resume."""
        return self._path.is_file()

    def read(self) -> dict[str, Any]:
        """Return the last written content, or an empty dict. Raises DamagedJournalError."""
        try:
            content = json.loads(read_regular(self._path, max_bytes=_MAX_JOURNAL_BYTES))
        except FileNotFoundError:
            return {}
        except (ValueError, RecursionError) as error:
            raise DamagedJournalError(f"{self._path} is damaged") from error
        if not isinstance(content, dict) or content.pop("digest", None) != _digest(content):
            raise DamagedJournalError(f"{self._path} is damaged")
        return content

    def write(self, content: Mapping[str, Any]) -> None:
        """Replace the content."""
        write_json(self._partial, {**content, "digest": _digest(content)})
        with report_write_errors(self._path):
            self._partial.replace(self._path)
            fsync_folder(self._path.parent)

    def remove(self) -> None:
        """Remove the journal: no run can be resumed any more."""
        self._path.unlink(missing_ok=True)
        self._partial.unlink(missing_ok=True)


def output_prefixes(prefix: str, keys: Sequence[str], *, is_split: bool) -> dict[str, str]:
    """Return the dataset prefix of each key, named as in Megatron-LM."""
    return {key: f"{prefix}_{key}_{'sentence' if is_split else 'document'}" for key in keys}


def files_of_run(prefix: str, dataset_prefixes: Iterable[str]) -> list[Path]:
    """Return all files that a run with this output prefix creates, replaces or removes."""
    datasets = itertools.chain.from_iterable(map(dataset_files, dataset_prefixes))
    return [*datasets, *bad_lines_files(prefix), *journal_files(prefix)]


def journal_files(prefix: str) -> tuple[Path, Path, Path]:
    """Return the paths of a journal, its partial file and its lock."""
    return (
        Path(f"{prefix}.preprocess.json"),
        Path(f"{prefix}.preprocess.json.partial"),
        Path(f"{prefix}.preprocess.lock"),
    )


def _digest(content: Mapping[str, Any]) -> str:
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()
