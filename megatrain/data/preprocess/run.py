"""Preprocess JSON Lines, text and Parquet into `.bin/.idx`: the command `preprocess_data.py`.

    input files -> ChunkReader -> Workers (parse, tokenize) -> in order: Outputs -> <prefix>_<key>_document
                                                                           `-> bad lines: stop, skip, quarantine

Output files are complete or absent, their bytes do not depend on the number of workers, and an interrupted run can be
resumed.
"""

from __future__ import annotations

import functools
import hashlib
import itertools
import json
import signal
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from importlib import metadata
from pathlib import Path
from typing import Any, Final, NoReturn

import numpy as np

from megatrain.config.errors import ConfigError, InputError, MegatrainError, Problem, describe
from megatrain.config.schema.tokenizer import missing_end_of_document
from megatrain.data.files import log_to_stderr
from megatrain.data.indexed.reader import loss_mask_of
from megatrain.data.indexed.writer import token_dtype
from megatrain.data.preprocess.bad_lines import BadLines
from megatrain.data.preprocess.chat_template import has_template, load_template
from megatrain.data.preprocess.conversations import (
    ROW_KEYS,
    ConversationSettings,
    message_keys,
    special_words,
    template_source,
)
from megatrain.data.preprocess.documents import CHUNK_BYTES, Chunk, Position
from megatrain.data.preprocess.encoder import MASK_DTYPE, EncoderSettings, make_encoder
from megatrain.data.preprocess.flags import WITHOUT_EFFECT, PreprocessSettings, parse_settings
from megatrain.data.preprocess.inputs import InputFile, find_inputs
from megatrain.data.preprocess.outputs import JOURNAL_SECONDS, Journal, Outputs, files_of_run, output_prefixes
from megatrain.data.preprocess.progress import Progress
from megatrain.data.preprocess.readers import ChunkReader
from megatrain.data.preprocess.sentences import SplitSettings, available_splitter
from megatrain.data.preprocess.workers import Workers
from megatrain.data.tokenizers.build import Tokenizer, load_tokenizer

FORMAT: Final = 5
"""Version of the journal and of the output; a run with another version is not resumed."""


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command. Return the exit code: 0, 2 for invalid input or flags, 1 for other failures."""
    try:
        with _stopped_by_signals():
            preprocess(parse_settings(argv))
    except MegatrainError as error:
        return _report(error, describe(error), error.exit_code)
    except OSError as error:
        return _report(error, f"error: {error}\n  fix: free disk space or repair the disk, then run again", 1)
    except _StoppedError as stop:
        return _report(stop, f"stopped by {stop.signal.name}", 128 + stop.signal)
    return 0


def preprocess(
    settings: PreprocessSettings,
    *,
    chunk_bytes: int = CHUNK_BYTES,
    journal_seconds: float = JOURNAL_SECONDS,
    workers_type: type[Workers[Any, Any]] = Workers,
) -> None:
    """Tokenize the input and write a dataset with a description for each key.

    Args:
        chunk_bytes: bytes of text per chunk.
        journal_seconds: minimum time between two journal entries.
        workers_type: class of the worker pool.

    Raises:
        ConfigError: the input, the tokenizer or a line of the input is invalid.
        MegatrainError: a worker died, or the output cannot be written.
    """
    for flag in settings.without_effect:
        log_to_stderr(f"{flag} has no effect: {WITHOUT_EFFECT[flag]}")
    reader = ChunkReader(
        files=find_inputs(settings.input, settings.input_format),
        json_keys=message_keys(settings.json_keys[0]) if settings.sft else settings.json_keys,
        row_keys=ROW_KEYS if settings.sft else (),
        text_documents=settings.text_documents,
        max_line_bytes=settings.max_line_mb * 1_000_000,
        chunk_bytes=chunk_bytes,
    )
    encoder = _encoder_settings(settings)
    tokenizer = load_tokenizer(settings.tokenizer)
    _check_inputs(settings, reader, tokenizer)
    _log_notes(settings, encoder, tokenizer)
    with (
        Journal(settings.output_prefix, log_to_stderr) as journal,
        Outputs(
            journal,
            _prefixes(settings),
            _dtypes(settings, tokenizer),
            BadLines(settings.on_bad_line, settings.output_prefix, log_to_stderr),
            log_to_stderr,
            settings=_fingerprint(settings, reader, encoder, tokenizer),
            journal_seconds=journal_seconds,
        ) as outputs,
    ):
        progress = _progress(settings, reader, outputs)
        with progress.running():
            if not outputs.is_complete:
                with workers_type(settings.workers, functools.partial(make_encoder, encoder)) as workers:
                    chunks = reader.chunks(outputs.position)
                    max_bytes = _CHUNKS_IN_FLIGHT * settings.workers * chunk_bytes
                    for chunk in workers.map(chunks, size=_num_bytes, max_bytes=max_bytes):
                        outputs.add(chunk)
                        progress.add(chunk.num_documents, bytes_read=chunk.end.bytes_read)
            outputs.bad_lines.finish()
            _require_tokens(outputs)
            outputs.finish(_description(settings, encoder, tokenizer, reader.files))
    _log_summary(progress, outputs)


_CHUNKS_IN_FLIGHT: Final = 4
"""Chunks per worker whose bytes may be in flight; a chunk may be larger than `chunk_bytes`."""


def _num_bytes(chunk: Chunk) -> int:
    return chunk.num_bytes


def _prefixes(settings: PreprocessSettings) -> dict[str, str]:
    prefixes = output_prefixes(settings.output_prefix, settings.json_keys, is_split=settings.split_sentences)
    if settings.sft:
        ((key, prefix),) = prefixes.items()
        prefixes[f"loss mask of {key}"] = loss_mask_of(prefix)
    return prefixes


def _dtypes(settings: PreprocessSettings, tokenizer: Tokenizer) -> dict[str, np.dtype[Any]]:
    """Return the element type of each output dataset: the tokens of each key, or tokens and a loss mask."""
    ids = token_dtype(tokenizer.vocab_size)
    dtypes = (ids, MASK_DTYPE) if settings.sft else (ids,) * len(settings.json_keys)
    return dict(zip(_prefixes(settings), dtypes, strict=True))


def _progress(settings: PreprocessSettings, reader: ChunkReader, outputs: Outputs) -> Progress:
    """Return the progress at the start of the run; log it if the run resumes another one."""
    start = outputs.position
    if start != Position():
        position = f"{start.document:,} lines of file {start.file + 1} of {len(reader.files)}"
        log_to_stderr(f"resuming an interrupted run after {outputs.num_documents:,} documents, {position}")
    return Progress(
        total_bytes=sum(file.num_bytes for file in reader.files),
        log_interval=settings.log_interval,
        documents=outputs.num_documents,
        bytes_read=start.bytes_read,
    )


def _check_inputs(settings: PreprocessSettings, reader: ChunkReader, tokenizer: Tokenizer) -> None:
    """Raise ConfigError before any work for problems that would appear later."""
    _require_one_key(settings, reader.files)
    reader.require_readable()
    _require_distinct_files(reader.files, files_of_run(settings.output_prefix, _prefixes(settings).values()))
    if (settings.append_eod or settings.sft) and tokenizer.eod is None:
        flag = "--sft" if settings.sft else "--append-eod"
        raise ConfigError.of([missing_end_of_document(settings.tokenizer, needed_by=flag)])
    if settings.sft and tokenizer.encode(""):
        raise ConfigError(
            "the tokenizer adds special tokens to every text, and a conversation consists of several texts",
            fix="add --tokenizer-hf-no-include-special-tokens, here and in training: the prompt format writes them",
        )


def _log_notes(settings: PreprocessSettings, encoder: EncoderSettings, tokenizer: Tokenizer) -> None:
    """Log what the user may not expect of the tokenizer and the prompt format."""
    if (settings.append_eod or settings.sft) and tokenizer.note:
        log_to_stderr(tokenizer.note)
    if settings.sft and settings.append_eod:
        log_to_stderr("--append-eod has no effect: conversations end with the end-of-document token")
    conversations = encoder.conversations
    if conversations is None or settings.tokenizer.tokenizer_type == "NullTokenizer":
        return
    # Twice as long: some tokenizers write a space before a text.
    lacking = [
        word
        for word in special_words(conversations)
        if len(tokenizer.encode(word * 2)) - len(tokenizer.encode(word)) != 1
    ]
    if lacking:
        log_to_stderr(
            f"the tokenizer has no token {', '.join(lacking)}, which the prompt format {conversations.prompt_format}"
            f" writes: {'it becomes' if len(lacking) == 1 else 'each becomes'} several tokens of text"
        )
    if conversations.template is not None and conversations.template.now:
        log_to_stderr(f"the chat template writes the time; this run writes {conversations.template.now[:16]}")


def _require_one_key(settings: PreprocessSettings, files: Sequence[InputFile]) -> None:
    """Raise ConfigError if text files would make several datasets; log if --text-documents has no effect."""
    texts = [file for file in files if file.content == "text"]
    if texts and settings.sft:
        raise ConfigError(
            f"{texts[0].path}: is text, and --sft reads conversations",
            fix="give --input JSON Lines or Parquet with messages",
        )
    if texts and len(settings.json_keys) > 1:
        raise ConfigError(
            f"{texts[0].path}: is text, which has no keys, but --json-keys has {len(settings.json_keys)}",
            fix="give --json-keys one name, which the dataset gets, or preprocess text files in a run of their own",
        )
    if not texts and settings.text_documents != "file":
        log_to_stderr(
            "--text-documents has no effect: no input file is text (.txt, .md, --input-format text)"
        )


def _encoder_settings(settings: PreprocessSettings) -> EncoderSettings:
    return EncoderSettings(
        tokenizer=settings.tokenizer,
        json_keys=settings.json_keys,
        append_eod=settings.append_eod,
        split=_split_settings(settings) if settings.split_sentences else None,
        conversations=_conversation_settings(settings) if settings.sft else None,
        keep_bad_lines=settings.on_bad_line == "quarantine",
    )


def _split_settings(settings: PreprocessSettings) -> SplitSettings:
    splitter = available_splitter(settings.lang)
    if splitter == "syntok":
        log_to_stderr(
            "sentences are those of syntok, since nltk's punkt models are missing: Megatron-LM has others"
        )
    return SplitSettings(lang=settings.lang, keep_newlines=settings.keep_newlines, splitter=splitter)


def _conversation_settings(settings: PreprocessSettings) -> ConversationSettings:
    prompt_format, file = settings.sft_tokenizer_prompt_format, settings.chat_template
    is_template = prompt_format == "default" or file is not None
    if prompt_format is None:
        is_template = is_template or has_template(settings.tokenizer)
        prompt_format = "default" if is_template else "chatml"
        log_to_stderr(f"--sft-tokenizer-prompt-format {prompt_format}")
    template = load_template(settings.tokenizer, file) if is_template else None
    return ConversationSettings(key=settings.json_keys[0], prompt_format=prompt_format, template=template)


def _require_distinct_files(files: Sequence[InputFile], paths: Iterable[Path]) -> None:
    outputs = {path.resolve() for path in paths}
    problems = [
        Problem(f"{file.path}: would be overwritten by the output", "give another --output-prefix")
        for file in files
        if file.path.resolve() in outputs
    ]
    if problems:
        raise ConfigError.of(problems)


def _require_tokens(outputs: Outputs) -> None:
    """Raise InputError if a dataset would have no tokens: training could not read it."""
    for key, output in outputs.keys.items():
        if output.writer.num_tokens:
            continue
        found = f"{output.writer.num_documents:,} documents, and none has a token under key {key!r}"
        skipped = f" (bad lines skipped: {outputs.bad_lines.num_lines:,})" * bool(outputs.bad_lines.num_lines)
        raise InputError(
            f"{output.writer.prefix} would be empty: --input has {found}{skipped}",
            fix="give --input files with text, and --json-keys its keys",
        )


def _fingerprint(
    settings: PreprocessSettings, reader: ChunkReader, encoder: EncoderSettings, tokenizer: Tokenizer
) -> dict[str, Any]:
    """Return everything that determines the bytes of the output, under the names that messages use."""
    return {
        "format": FORMAT,
        "--input": _digest(reader.files),
        "--text-documents": settings.text_documents,
        "--json-keys": list(settings.json_keys),
        "tokenizer": [tokenizer.fingerprint, tokenizer.vocab_size, tokenizer.eod],
        "--append-eod": settings.append_eod,
        "--sft": repr(_of_one_day(encoder.conversations)),
        "sentences": [encoder.split and vars(encoder.split)],
        "--max-line-mb": settings.max_line_mb,
        "--on-bad-line": settings.on_bad_line,
        "library versions": _library_versions(settings),
    }


def _of_one_day(conversations: ConversationSettings | None) -> ConversationSettings | None:
    """Return the settings without the time of day: a run that is resumed on the same day writes the same date."""
    if conversations is None or conversations.template is None:
        return conversations
    template = conversations.template
    return replace(conversations, template=replace(template, now=template.now[:10]))


def _digest(files: Sequence[InputFile]) -> str:
    """Return a digest of the names, contents' kinds, sizes and times of files: a folder may have millions."""
    digest = hashlib.sha256()
    for file in files:
        entry = [str(file.path.resolve()), file.content, file.compression, file.num_bytes, file.mtime_ns]
        digest.update(json.dumps(entry).encode())
    return digest.hexdigest()


def _library_versions(settings: PreprocessSettings) -> dict[str, str | None]:
    """Return the versions of tokenizer libraries. An upgrade may change ids, so a run does not resume across versions."""
    names = ["tokenizers", "sentencepiece", "tiktoken"]
    names += ["nltk", "syntok"] * settings.split_sentences + ["jinja2"] * settings.sft
    return {name: _version(name) for name in names}


def _version(package: str) -> str | None:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def _description(
    settings: PreprocessSettings, encoder: EncoderSettings, tokenizer: Tokenizer, files: Sequence[InputFile]
) -> dict[str, Any]:
    """Return the description of a dataset, so that training can compare tokenizers."""
    return {
        "tokenizer_type": settings.tokenizer.tokenizer_type,
        "tokenizer_fingerprint": tokenizer.fingerprint,
        "vocab_size": tokenizer.vocab_size,
        "eod": tokenizer.eod,
        "append_eod": settings.append_eod or settings.sft,
        **_described_format(encoder.conversations),
        "sources": _sources(files),
    }


def _described_format(settings: ConversationSettings | None) -> dict[str, str]:
    if settings is None:
        return {}
    return {"prompt_format": settings.prompt_format, "chat_template": template_source(settings)}


def _sources(files: Sequence[InputFile]) -> list[dict[str, Any]]:
    """Return the files that were given, and the folders with the number of their files."""
    sources: list[dict[str, Any]] = []
    for folder, group in itertools.groupby(files, key=lambda file: file.folder):
        sizes = [(str(file.path), file.num_bytes) for file in group]
        if folder is None:
            sources += [{"path": path, "bytes": num_bytes} for path, num_bytes in sizes]
        else:
            total = sum(num_bytes for _, num_bytes in sizes)
            sources.append({"path": str(folder), "files": len(sizes), "bytes": total})
    return sources


def _log_summary(progress: Progress, outputs: Outputs) -> None:
    log_to_stderr(f"done: {progress.summary()}")
    for output in outputs.keys.values():
        writer = output.writer
        log_to_stderr(
            f"  {writer.prefix}: {writer.num_documents:,} documents, {writer.num_sequences:,} sequences, "
            f"{writer.num_tokens:,} tokens of {writer.dtype.name}"
        )
    bad_lines = outputs.bad_lines
    if bad_lines.num_lines:
        file = f" to {bad_lines.path}" if bad_lines.has_quarantined else ""
        were = "line was" if bad_lines.num_lines == 1 else "lines were"
        log_to_stderr(f"  {bad_lines.num_lines:,} bad {were} {'quarantined' if file else 'skipped'}{file}")


class _StoppedError(BaseException):
    """A signal as an exception, so that workers are stopped and locks released."""

    def __init__(self, number: int) -> None:
        self.signal = signal.Signals(number)


@contextmanager
def _stopped_by_signals() -> Iterator[None]:
    """Raise SIGTERM, SIGINT and a SIGHUP that is not ignored as exceptions inside the context; restore their handlers after it."""

    def stop(number: int, _frame: object) -> NoReturn:
        raise _StoppedError(number)

    is_hangup_ignored = signal.getsignal(signal.SIGHUP) is signal.SIG_IGN  # as under nohup
    numbers = (signal.SIGTERM, signal.SIGINT, *(() if is_hangup_ignored else (signal.SIGHUP,)))
    previous = {number: signal.signal(number, stop) for number in numbers}
    try:
        yield
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)


def _report(error: BaseException, text: str, code: int) -> int:
    """Log an error and its notes about the output; return the exit code."""
    log_to_stderr("\n  ".join((text, *getattr(error, "__notes__", ()))))
    return code
