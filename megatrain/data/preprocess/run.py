"""JSON Lines and Parquet to `.bin/.idx`: `preprocess_data.py`.

    input files -> ChunkReader -> Workers (parse, tokenize) -> in order: Outputs -> <prefix>_<key>_document
                                                                           `-> bad lines: stop, skip, quarantine

Output is whole or not there at all, its bytes do not depend on the number of workers, and an interrupted run goes on.
"""

from __future__ import annotations

import functools
import signal
from collections.abc import Iterable, Sequence
from importlib import metadata
from pathlib import Path
from typing import Any, Final, NoReturn

from megatrain.config.errors import ConfigError, MegatrainError, Problem, describe
from megatrain.config.schema.tokenizer import missing_end_of_document
from megatrain.data.indexed.writer import token_dtype
from megatrain.data.preprocess.bad_lines import BadLines
from megatrain.data.preprocess.encoder import EncoderSettings, make_encoder
from megatrain.data.preprocess.flags import PreprocessSettings, parse_settings
from megatrain.data.preprocess.inputs import InputFile, find_inputs
from megatrain.data.preprocess.journal import Journal
from megatrain.data.preprocess.lines import CHUNK_BYTES, Chunk, Position
from megatrain.data.preprocess.outputs import JOURNAL_SECONDS, Outputs, files_of_run, output_prefixes
from megatrain.data.preprocess.readers import ChunkReader
from megatrain.data.preprocess.sentences import SplitSettings, load_splitter
from megatrain.data.preprocess.workers import Workers
from megatrain.data.progress import Progress, say
from megatrain.data.tokenizers.build import Tokenizer, load_tokenizer

FORMAT: Final = 2
"""Of the journal and of what is written; a run of another format is not gone on with."""


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command. Returns the exit code: 0, or 2 for input and flags that cannot work, 1 for other failures."""
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, _stop)
    try:
        preprocess(parse_settings(argv))
    except MegatrainError as error:
        return _tell(error, describe(error), error.exit_code)
    except OSError as error:
        return _tell(error, f"error: {error}\n  fix: make room or mend the disk, run again", 1)
    except _StoppedError as stop:
        return _tell(stop, f"stopped by {stop.signal.name}", 128 + stop.signal)
    return 0


def preprocess(
    settings: PreprocessSettings,
    *,
    chunk_bytes: int = CHUNK_BYTES,
    journal_seconds: float = JOURNAL_SECONDS,
    workers_type: type[Workers[Any, Any]] = Workers,
) -> None:
    """Tokenize the input, and write one dataset and one description for each key.

    Args:
        chunk_bytes: text that a worker gets at once.
        journal_seconds: time between two notes of how far the run is.
        workers_type: what the workers are made by.

    Raises:
        ConfigError: the input, the tokenizer or a line of the input cannot be used.
        MegatrainError: a worker died, or the output cannot be written.
    """
    for flag in settings.without_effect:
        say(f"{flag} has no effect: output is in the order of the input anyway, and workers share all files")
    reader = ChunkReader(
        files=find_inputs(settings.input),
        json_keys=settings.json_keys,
        max_line_bytes=settings.max_line_mb * 1_000_000,
        chunk_bytes=chunk_bytes,
    )
    encoder = _encoder_settings(settings)
    tokenizer = load_tokenizer(settings.tokenizer)
    _require_all_that_is_needed(settings, reader, encoder, tokenizer)
    if settings.append_eod and tokenizer.note:
        say(tokenizer.note)
    with (
        Journal(settings.output_prefix, say) as journal,
        Outputs(
            journal,
            _prefixes(settings),
            token_dtype(tokenizer.vocab_size),
            BadLines(settings.on_bad_line, settings.output_prefix, say),
            say,
            settings=_fingerprint(settings, reader, tokenizer),
            journal_seconds=journal_seconds,
        ) as outputs,
    ):
        progress = _progress(settings, reader, outputs)
        with progress.running():
            if not outputs.is_complete:
                with workers_type(settings.workers, functools.partial(make_encoder, encoder)) as workers:
                    chunks = reader.chunks(outputs.position)
                    most_bytes = _HELD_CHUNKS * settings.workers * chunk_bytes
                    for chunk in workers.map(chunks, size=_num_bytes, most_bytes=most_bytes):
                        outputs.add(chunk)
                        progress.add(chunk.num_documents, bytes_read=chunk.end.bytes_read)
            outputs.finish(_description(settings, tokenizer, reader.files))
    _say_summary(progress, outputs)


_HELD_CHUNKS: Final = 4
"""Chunks whose bytes a worker may have on its way: those under way together, which may be larger than asked for."""


def _num_bytes(chunk: Chunk) -> int:
    return chunk.num_bytes


def _prefixes(settings: PreprocessSettings) -> dict[str, str]:
    return output_prefixes(settings.output_prefix, settings.json_keys, is_split=settings.split_sentences)


def _progress(settings: PreprocessSettings, reader: ChunkReader, outputs: Outputs) -> Progress:
    """Progress from where the run begins, which is said if that is not the beginning."""
    start = outputs.position
    if start != Position():
        place = f"{start.document:,} lines of file {start.file + 1} of {len(reader.files)}"
        say(f"going on with an interrupted run, after {outputs.num_documents:,} documents, {place}")
    return Progress(
        total_bytes=sum(file.num_bytes for file in reader.files),
        log_interval=settings.log_interval,
        documents=outputs.num_documents,
        bytes_read=start.bytes_read,
    )


def _require_all_that_is_needed(
    settings: PreprocessSettings, reader: ChunkReader, encoder: EncoderSettings, tokenizer: Tokenizer
) -> None:
    """Raises ConfigError for what would go wrong later, before any work."""
    reader.require_readable()
    _require_no_input_among_outputs(
        reader.files, files_of_run(settings.output_prefix, _prefixes(settings).values())
    )
    _require_eod(settings, tokenizer)
    if encoder.split:
        load_splitter(encoder.split)


def _encoder_settings(settings: PreprocessSettings) -> EncoderSettings:
    return EncoderSettings(
        tokenizer=settings.tokenizer,
        json_keys=settings.json_keys,
        append_eod=settings.append_eod,
        split=SplitSettings(lang=settings.lang, keep_newlines=settings.keep_newlines)
        if settings.split_sentences
        else None,
        keep_bad_lines=settings.on_bad_line == "quarantine",
    )


def _require_no_input_among_outputs(files: Sequence[InputFile], paths: Iterable[Path]) -> None:
    outputs = {path.resolve() for path in paths}
    problems = [
        Problem(f"{file.path}: would be overwritten by the output", "give another --output-prefix")
        for file in files
        if file.path.resolve() in outputs
    ]
    if problems:
        raise ConfigError.of(problems)


def _require_eod(settings: PreprocessSettings, tokenizer: Tokenizer) -> None:
    if settings.append_eod and tokenizer.eod is None:
        raise ConfigError.of([missing_end_of_document(settings.tokenizer, needed_by="--append-eod")])


def _fingerprint(settings: PreprocessSettings, reader: ChunkReader, tokenizer: Tokenizer) -> dict[str, Any]:
    """All that decides about the bytes of the output, by the words that say what has changed."""
    return {
        "format": FORMAT,
        "--input": [[str(file.path.resolve()), file.num_bytes, file.mtime_ns] for file in reader.files],
        "--json-keys": list(settings.json_keys),
        "tokenizer": [tokenizer.fingerprint, tokenizer.vocab_size, tokenizer.eod],
        "--append-eod": settings.append_eod,
        "sentences": [settings.split_sentences, settings.keep_newlines, settings.lang],
        "--max-line-mb": settings.max_line_mb,
        "--on-bad-line": settings.on_bad_line,
        "library versions": _library_versions(settings),
    }


def _library_versions(settings: PreprocessSettings) -> dict[str, str | None]:
    """Of what turns text into ids. An upgrade may change them, so nobody goes on with what another version began."""
    names = ["tokenizers", "sentencepiece", "tiktoken"] + ["nltk"] * settings.split_sentences
    return {name: _version(name) for name in names}


def _version(package: str) -> str | None:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def _description(
    settings: PreprocessSettings, tokenizer: Tokenizer, files: Sequence[InputFile]
) -> dict[str, Any]:
    """What made a dataset, so that training can see whether its tokenizer is the same."""
    return {
        "tokenizer_type": settings.tokenizer.tokenizer_type,
        "tokenizer_fingerprint": tokenizer.fingerprint,
        "vocab_size": tokenizer.vocab_size,
        "eod": tokenizer.eod,
        "append_eod": settings.append_eod,
        "sources": [{"path": str(file.path), "bytes": file.num_bytes} for file in files],
    }


def _say_summary(progress: Progress, outputs: Outputs) -> None:
    say(f"done: {progress.summary()}")
    for output in outputs.keys.values():
        writer = output.writer
        say(
            f"  {writer.prefix}: {writer.num_documents:,} documents, {writer.num_sequences:,} sequences, "
            f"{writer.num_tokens:,} tokens of {writer.dtype.name}"
        )
    if outputs.bad_lines.num_lines:
        place = f"; see {outputs.bad_lines.path}" if outputs.bad_lines.are_put_aside else ""
        say(f"  {outputs.bad_lines.num_lines:,} bad lines were left out{place}")


class _StoppedError(BaseException):
    """Unwinds, so that workers are ended and locks are let go."""

    def __init__(self, number: int) -> None:
        self.signal = signal.Signals(number)


def _stop(number: int, _frame: object) -> NoReturn:
    raise _StoppedError(number)


def _tell(error: BaseException, text: str, code: int) -> int:
    """Say what went wrong and what became of the output; the exit code."""
    say("\n  ".join((text, *getattr(error, "__notes__", ()))))
    return code
