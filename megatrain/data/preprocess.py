"""JSON Lines to `.bin/.idx`: `preprocess_data.py`.

    input -> chunks of lines -> workers (parse, tokenize) -> in order: one IndexedWriter a key -> <prefix>_<key>_document
                                                          `-> bad lines: stop, or leave them out

Output is whole or not there at all, and its bytes do not depend on the number of workers.
"""

from __future__ import annotations

import contextlib
import difflib
import functools
import json
import signal
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from megatrain.config.errors import InputError, MegatrainError
from megatrain.data.encoder import EncodedChunk, EncoderSettings, make_encoder
from megatrain.data.indexed_writer import IndexedWriter, token_dtype
from megatrain.data.lines import CHUNK_BYTES, BadLine, chunks, read_lines
from megatrain.data.preprocess_flags import PreprocessSettings, parse_settings
from megatrain.data.tokenizer import Tokenizer, load_tokenizer
from megatrain.data.workers import Workers

if TYPE_CHECKING:
    from collections.abc import Sequence

SHOWN_BAD_LINES: Final = 20
"""Bad lines printed one by one when they are left out; the others are counted."""


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command. Returns the exit code: 0, or 2 for input and flags that cannot work, 1 for other failures."""
    signal.signal(signal.SIGTERM, _end_by_signal)
    try:
        preprocess(parse_settings(argv))
    except MegatrainError as error:
        print(f"error: {error}", file=sys.stderr)
        return error.exit_code
    except OSError as error:
        print(
            f"error: {error}\n  fix: nothing was kept; make room or mend the disk, run again", file=sys.stderr
        )
        return 1
    except KeyboardInterrupt:
        print("interrupted: nothing was kept", file=sys.stderr)
        return 128 + signal.SIGINT
    return 0


def preprocess(settings: PreprocessSettings, *, chunk_bytes: int = CHUNK_BYTES) -> None:
    """Tokenize the input, `chunk_bytes` at once, and write one dataset and one description for each key.

    Raises:
        InputError: a file is missing, or a line is bad and bad lines stop the run.
        MegatrainError: a worker died.
    """
    files = [settings.input]
    sizes = [_size_of_input(file) for file in files]
    tokenizer = load_tokenizer(settings.tokenizer)
    make = functools.partial(
        make_encoder,
        EncoderSettings(
            tokenizer=settings.tokenizer,
            json_keys=settings.json_keys,
            append_eod=settings.append_eod,
        ),
    )
    progress = _Progress(sum(sizes), settings.log_interval)
    with contextlib.ExitStack() as stack:
        writers = {
            key: stack.enter_context(
                IndexedWriter(_output(settings.output_prefix, key), token_dtype(tokenizer.vocab_size))
            )
            for key in settings.json_keys
        }
        # The workers end before the files are put in place: what is entered last is left first.
        workers = stack.enter_context(Workers(settings.workers, make))
        for encoded in workers.map(chunks(read_lines(files), chunk_bytes)):
            for bad_line in encoded.bad_lines:
                if settings.on_bad_line == "stop":
                    raise InputError(
                        str(bad_line), fix="mend the line, or leave such lines out: --on-bad-line skip"
                    )
                progress.skip(bad_line)
            for writer, part in zip(writers.values(), encoded.keys, strict=True):
                writer.add_documents(part.elements, part.lengths, part.sequences_per_document)
            progress.add(encoded)
    sources = [{"path": str(file), "bytes": size} for file, size in zip(files, sizes, strict=True)]
    for key, writer in writers.items():
        description = _description(settings, tokenizer, writer) | {
            "json_key": key,
            "skipped_lines": progress.num_skipped,
            "sources": sources,
        }
        _write_description(Path(f"{writer.prefix}.json"), description)
    progress.finish(list(writers.values()))


def _output(prefix: str, key: str) -> str:
    return f"{prefix}_{key}_document"


def _size_of_input(file: Path) -> int:
    try:
        with file.open("rb"):
            return file.stat().st_size
    except FileNotFoundError as error:
        names = [path.name for path in file.parent.glob("*")] if file.parent.is_dir() else []
        near = difflib.get_close_matches(file.name, names, n=3)
        fix = (
            f"{file.parent} holds {', '.join(near)}" if near else "give --input the path of a JSON Lines file"
        )
        raise InputError(f"{file}: there is no such file", fix=fix) from error
    except OSError as error:
        raise InputError(
            f"{file}: cannot be read: {error.strerror}", fix="give --input a readable file"
        ) from error


def _description(settings: PreprocessSettings, tokenizer: Tokenizer, writer: IndexedWriter) -> dict[str, Any]:
    """What made a dataset, so that training can see whether its tokenizer is the same."""
    return {
        "tokenizer_type": settings.tokenizer.tokenizer_type,
        "tokenizer_fingerprint": tokenizer.fingerprint,
        "vocab_size": tokenizer.vocab_size,
        "eod": tokenizer.eod,
        "append_eod": settings.append_eod,
        "documents": writer.num_documents,
        "sequences": writer.num_sequences,
        "tokens": writer.num_tokens,
    }


def _write_description(path: Path, description: dict[str, Any]) -> None:
    partial = path.with_name(f"{path.name}.partial")
    try:
        partial.write_text(json.dumps(description, indent=2) + "\n", encoding="utf-8")
        partial.replace(path)
    finally:
        partial.unlink(missing_ok=True)


def _end_by_signal(number: int, _frame: object) -> None:
    """Unwind, so that temporary files are removed and workers ended."""
    sys.exit(128 + number)


@dataclass
class _Progress:
    """Counts what was done, and says so every `log_interval` documents."""

    total_bytes: int
    log_interval: int
    start: float = field(default_factory=time.monotonic)
    num_documents: int = 0
    num_bytes: int = 0
    num_skipped: int = 0

    def add(self, encoded: EncodedChunk) -> None:
        before = self.num_documents // self.log_interval
        self.num_documents += encoded.num_documents
        self.num_bytes += encoded.input_bytes
        if self.num_documents // self.log_interval > before:
            print(self._line(), file=sys.stderr, flush=True)

    def skip(self, bad_line: BadLine) -> None:
        self.num_skipped += 1
        if self.num_skipped <= SHOWN_BAD_LINES:
            print(f"skipped: {bad_line}", file=sys.stderr, flush=True)
        if self.num_skipped == SHOWN_BAD_LINES:
            print("skipped: further bad lines are only counted", file=sys.stderr, flush=True)

    def finish(self, writers: Sequence[IndexedWriter]) -> None:
        print(
            self._line() + (f" | {self.num_skipped} lines skipped" if self.num_skipped else ""),
            file=sys.stderr,
        )
        for writer in writers:
            print(
                f"{writer.prefix}: {writer.num_documents} documents, {writer.num_tokens} tokens",
                file=sys.stderr,
            )

    def _line(self) -> str:
        seconds = max(time.monotonic() - self.start, 1e-9)
        bytes_per_second = self.num_bytes / seconds
        left = max(self.total_bytes - self.num_bytes, 0) / max(bytes_per_second, 1e-9)
        return (
            f"{self.num_documents} documents | {self.num_documents / seconds:.1f} documents/s | "
            f"{bytes_per_second / 1e6:.2f} MB/s | {int(left) // 3600}:{int(left) // 60 % 60:02}:{int(left) % 60:02} left"
        )
