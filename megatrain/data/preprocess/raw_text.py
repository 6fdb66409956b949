"""Text among the datasets of a run: tokenized once, into a dataset that later starts find.

    --data-path corpus.jsonl -> key of its files and of the tokenizer -> FOLDER/corpus.jsonl-KEY_text_document.bin, .idx, .json

FOLDER is --data-cache-path, or `.tokenized` next to the text. The dataset is that of `preprocess_data.py --append-eod`, byte by
byte; of conversations (--sft) with their loss mask. An interrupted run resumes, and a second run on the same text waits.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from megatrain.config.errors import ConfigError, Problem
from megatrain.config.schema.tokenizer import TokenizerConfig, missing_end_of_document
from megatrain.data.files import FileLock, log_to_stderr
from megatrain.data.indexed.object_store import is_url
from megatrain.data.preprocess.documents import CHUNK_BYTES
from megatrain.data.preprocess.flags import PreprocessSettings
from megatrain.data.preprocess.inputs import InputFile, find_inputs, has_text_suffix
from megatrain.data.preprocess.outputs import journal_files, output_prefixes
from megatrain.data.preprocess.run import FORMAT, preprocess

_FOLDER: Final = ".tokenized"
"""A name that `find_inputs` leaves out: the folder may lie in one whose files are text."""
_CHUNKS_PER_WORKER: Final = 4
_OFTEN: Final = 1 << 62
"""Documents between two lines of progress: only time counts then."""


def is_text(name: str) -> bool:
    """Return whether a name of --data-path is text, not the prefix of a dataset: a folder, or a file by its suffix."""
    if not is_url(name) and os.path.lexists(f"{name}.idx"):
        return False
    return Path(name).is_dir() or has_text_suffix(name)


@dataclass(frozen=True, kw_only=True)
class RawText:
    """Files of text that stand for a dataset."""

    settings: PreprocessSettings
    files: Sequence[InputFile]

    @classmethod
    def of(
        cls,
        name: str,
        config: TokenizerConfig,
        *,
        tokenizer: Mapping[str, Any],
        sft: bool,
        cache_folder: str | None,
    ) -> RawText:
        """Find the files of a name, and the dataset that they become.

        Args:
            name: a file, a folder or a glob.
            tokenizer: `tokenizer_fingerprint`, `vocab_size` and `eod_id` of the tokenizer of `config`.
            sft: the files have conversations.
            cache_folder: --data-cache-path, if it is given.

        Raises:
            ConfigError: no such files, or the tokenizer has no end-of-document token.
        """
        if tokenizer["eod_id"] is None:
            raise ConfigError.of([missing_end_of_document(config, needed_by=f"text ({name})")])
        files = find_inputs([name], log=lambda _: None)
        folder = Path(cache_folder) if cache_folder is not None else Path(name).parent / _FOLDER
        if Path(name).resolve() in folder.resolve().parents and not folder.name.startswith("."):
            raise ConfigError(
                f"--data-cache-path {folder} lies in {name}, whose files are read as text",
                fix="give --data-cache-path a folder outside it, or one whose name starts with a dot",
            )
        key = [FORMAT, sft, *(tokenizer[part] for part in ("tokenizer_fingerprint", "vocab_size", "eod_id"))]
        key += [
            [
                file.path.relative_to(file.folder or file.path.parent).as_posix(),
                file.content,
                file.compression,
                file.num_bytes,
                file.mtime_ns,
            ]
            for file in files
        ]
        stem = re.sub(r"[^\w.-]+", "_", Path(name).name)
        digest = hashlib.sha256(json.dumps(key).encode()).hexdigest()[:12]
        cpus = len(os.sched_getaffinity(0))
        num_bytes = sum(file.num_bytes for file in files)
        settings = PreprocessSettings(
            input=(name,),
            output_prefix=str(folder / f"{stem}-{digest}"),
            json_keys=("messages",) if sft else ("text",),
            sft=sft,
            append_eod=not sft,
            workers=max(1, min(cpus, num_bytes // (_CHUNKS_PER_WORKER * CHUNK_BYTES))),
            tokenizer=config,
            log_interval=_OFTEN,
        )
        return cls(settings=settings, files=files)

    @property
    def prefix(self) -> str:
        """Prefix of the dataset."""
        settings = self.settings
        return next(
            iter(output_prefixes(settings.output_prefix, settings.json_keys, is_split=False).values())
        )

    @property
    def is_tokenized(self) -> bool:
        """True if the dataset is complete: its journal is removed last."""
        return Path(f"{self.prefix}.idx").is_file() and not self._journal.exists()

    @property
    def _journal(self) -> Path:
        return journal_files(self.settings.output_prefix)[0]

    def __str__(self) -> str:
        """Return the name with the number and size of its files."""
        megabytes = sum(file.num_bytes for file in self.files) / 1e6
        count = f"{len(self.files):,} files, " * (len(self.files) != 1)
        return f"{self.settings.input[0]} ({count}{megabytes:,.1f} MB)"

    def tokenize(self) -> None:
        """Write the dataset, unless another run has written it meanwhile.

        Raises:
            MegatrainError: as `preprocess`.
        """
        target = Path(self.settings.output_prefix)
        lock = FileLock(Path(f"{target}.tokenizing.lock"), target=str(target))
        try:
            lock.acquire(waits=True)
        except ConfigError as error:
            fix = "give --data-cache-path a writable folder that all hosts share"
            raise ConfigError(error.problems[0].text, fix=fix) from error
        with contextlib.ExitStack() as ends:
            ends.callback(lock.release)
            if self.is_tokenized:
                return
            log_to_stderr(f"tokenizing {self} into {self.prefix}, processes: {self.settings.workers}")
            try:
                preprocess(self.settings)
            except ConfigError as error:
                error.problems = tuple(map(_of_preprocessing, error.problems))
                raise


def _of_preprocessing(problem: Problem) -> Problem:
    """Return a problem whose fix names flags that only preprocess_data.py has, as one that says so."""
    return Problem(
        problem.text, re.sub(r"(?=--(?:on-bad-line|json-keys|input))", "preprocess_data.py ", problem.fix)
    )
