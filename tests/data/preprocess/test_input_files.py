"""Unusual and damaged input files, by name: each gives the right documents, or an error and no output.

A case writes one or more files, and the expected documents or the message of the error. A case that does not end in
time fails. Sizes are scaled down where the name has a second size.
"""

from __future__ import annotations

import gzip
import itertools
import json
import os
import resource
import signal
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from preprocessing import NULL, InlineWorkers, run

from megatrain.data.indexed.reader import IndexedDataset

if TYPE_CHECKING:
    from collections.abc import Callable

GOOD = b'{"text": "1 2"}\n'
SECONDS = 60


@dataclass(frozen=True)
class Case:
    """`write` creates the input at a path; `error` is a part of the message, {file} being that path; `tokens` per document."""

    write: Callable[[Path], object]
    error: str = ""
    tokens: tuple[int, ...] = ()
    name: str = "in.jsonl"
    flags: tuple[object, ...] = ()
    workers: type = InlineWorkers


def containing(*lines: bytes) -> Callable[[Path], object]:
    return lambda path: path.write_bytes(b"".join(lines))


def text_of(num_bytes: int) -> bytes:
    return b'{"text": "' + b"7 " * (num_bytes // 2) + b'"}\n'


def bad(line: bytes, reason: str) -> Case:
    """Return a case with this line between two good ones."""
    return Case(containing(GOOD, line, b"\n", GOOD), "{file}:2: " + reason)


def value(text: bytes, reason: str) -> Case:
    return bad(b'{"text": %s}' % text, f"key 'text' is {reason}, not a string")


def write_sparse(path: Path) -> None:
    """Write a line of 2 GB, which takes no space on the disk, between two good ones."""
    path.write_bytes(GOOD)
    os.truncate(path, 2 << 30)
    with path.open("ab") as file:
        file.write(b"\n" + GOOD)


def fifo(path: Path) -> None:
    os.mkfifo(path)


def two_links(path: Path) -> None:
    path.with_name("real.jsonl").write_bytes(GOOD)
    path.symlink_to("real.jsonl")


def bad_crc(path: Path) -> None:
    content = bytearray(gzip.compress(GOOD * 1000))
    content[-6] ^= 1
    path.write_bytes(content)


def damaged_middle(path: Path) -> None:
    """Write an uncompressed gzip file whose second block has an invalid type."""
    content = bytearray(gzip.compress(GOOD * 20_000, 0))
    header = 10
    first_block_bytes = int.from_bytes(content[header + 1 : header + 3], "little")
    content[header + 5 + first_block_bytes] = 0b111
    path.write_bytes(content)


class AppendsWhileRead(InlineWorkers):
    def map(self, items, **_):
        for item in items:
            with Path(item.file).open("ab") as file:
                file.write(GOOD)
            yield self.work(item)


class Truncates(InlineWorkers):
    def map(self, items, **_):
        for item in items:
            os.truncate(item.file, 300_005)
            yield self.work(item)


class Removes(InlineWorkers):
    def map(self, items, **_):
        for item in items:
            Path(item.file).unlink(missing_ok=True)
            yield self.work(item)


SKIP = ("--on-bad-line", "skip")
CASES = {
    "bad JSON": bad(b'{"text": "1" 2}', "not JSON: Expecting ',' delimiter at column 14"),
    "truncated last line": Case(containing(GOOD, b'{"text": "2'), "{file}:2: not JSON: Unterminated string"),
    "blank line": bad(b"", "blank line"),
    "spaces only": bad(b" \t ", "blank line"),
    "no-break spaces only": bad("\u00a0".encode(), "blank line"),
    "BOM": Case(containing(b"\xef\xbb\xbf", GOOD), tokens=(2,)),
    "BOM of a second file": Case(containing(b"\xef\xbb\xbf", GOOD, b"\xef\xbb\xbf", GOOD), tokens=(2, 2)),
    "BOM alone": Case(containing(b"\xef\xbb\xbf\n"), "{file}:1: blank line"),
    "UTF-16": Case(lambda path: path.write_text('{"text": "1"}\n', "utf-16"), "{file}: is UTF-16, not UTF-8"),
    "UTF-16 without mark": Case(
        lambda path: path.write_text('{"text": "1"}\n', "utf-16-be"), "{file}: is UTF-16"
    ),
    "lone bytes": bad(b'{"text": "\xff"}', "not UTF-8: byte 0xff at position 10"),
    "lone surrogate": bad(b'{"text": "\\ud800"}', "key 'text' contains half of a surrogate pair"),
    "NUL bytes": bad(b'{"text": "1\x002"}', "not JSON: Invalid control character at column 12"),
    "NUL line": bad(bytes(100), "not JSON: Expecting value at column 1"),
    "CRLF": Case(containing(b'{"text": "1 2"}\r\n{"text": "3"}\r\n'), tokens=(2, 1)),
    "carriage returns only": Case(
        containing(b'{"text": "1"}\r{"text": "2"}\r'), "{file}:1: not JSON: Extra data"
    ),
    "key missing": bad(b'{"body": "1", "n": 2}', "key 'text' is missing; the keys are 'body', 'n'"),
    "null": value(b"null", "null"),
    "number": value(b"5", "a number"),
    "boolean": value(b"true", "a boolean"),
    "nested": value(b'{"a": "1"}', "an object"),
    "list with a number": value(b'["1", 2]', "a list with a number"),
    "list in a list": value(b'[["1"]]', "a list with a list"),
    "not an object": bad(b'"1 2"', "is a string, not an object"),
    "list of strings": Case(containing(b'{"text": ["1 2", "", "3"]}\n'), tokens=(3,)),
    "duplicate key": Case(containing(b'{"text": "1 2 3", "text": "4"}\n'), tokens=(1,)),
    "empty text": Case(containing(b'{"text": ""}\n', GOOD), tokens=(0, 2)),
    "empty list": Case(containing(b'{"text": []}\n', GOOD), tokens=(0, 2)),
    "spaces as text": Case(containing(b'{"text": "  "}\n', GOOD), tokens=(0, 2)),
    "nested too deeply": bad(b'{"text": ' + b"[" * 100_000, "not usable JSON: nested too deeply"),
    "empty file": Case(containing(), "would be empty: --input has 0 documents"),
    "no newline at end": Case(containing(GOOD, b'{"text": "3"}'), tokens=(2, 1)),
    "1 MB line": Case(containing(GOOD, text_of(1_000_000), GOOD), tokens=(2, 500_000, 2)),
    "100 MB line (2 MB, above a limit of 1)": Case(
        containing(GOOD, text_of(2_000_000), GOOD),
        "{file}:2: longer than --max-line-mb 1: 2000013 bytes",
        flags=("--max-line-mb", 1),
    ),
    "100 MB line skipped (2 MB)": Case(
        containing(GOOD, text_of(2_000_000), GOOD, text_of(2_000_000)[:-1]),
        tokens=(2, 2),
        flags=("--max-line-mb", 1, *SKIP),
    ),
    "line as long as the limit": Case(
        containing(GOOD, text_of(1_000_000 - 12), GOOD), tokens=(2, 499_994, 2), flags=("--max-line-mb", 1)
    ),
    "line one longer than the limit": Case(
        containing(GOOD, text_of(1_000_000 - 12)[:-1], b" \n"), "{file}:2: longer", flags=("--max-line-mb", 1)
    ),
    "1e6 empty documents (1e5)": Case(
        containing(b'{"text": ""}\n' * 100_000, GOOD), tokens=(*(0,) * 100_000, 2)
    ),
    "folder": Case(lambda path: path.mkdir(), "{file}: is a folder"),
    "FIFO": Case(fifo, "{file}: is a pipe"),
    "broken link": Case(lambda path: path.symlink_to("gone"), "{file}: is a broken link to gone"),
    "missing": Case(lambda path: path.with_name("in.json").touch(), "{file}: there is no such file"),
    "changed while read": Case(
        containing(GOOD * 50_000), "{file}: changed while it was read", workers=AppendsWhileRead
    ),
    "truncated while read": Case(
        containing(GOOD * 50_000), "{file}: changed while it was read", workers=Truncates
    ),
    "removed while read": Case(
        containing(GOOD * 50_000), "{file}: was removed while it was read", workers=Removes
    ),
    "gz": Case(lambda path: path.write_bytes(gzip.compress(GOOD) * 2), tokens=(2, 2), name="in.jsonl.gz"),
    "gz truncated": Case(
        lambda path: path.write_bytes(gzip.compress(GOOD * 1000)[:-9]),
        "{file}: cannot be read after line 1000: Compressed file ended",
        name="in.jsonl.gz",
    ),
    "gz bad CRC": Case(
        bad_crc, "{file}: cannot be read after line 1000: CRC check failed", name="in.jsonl.gz"
    ),
    "gz damaged": Case(damaged_middle, "{file}: cannot be read after line ", name="in.jsonl.gz"),
    "gz that is plain text": Case(
        containing(GOOD), "{file}: is not a .gz file: it begins with b'{\"te'", name="in.jsonl.gz"
    ),
    "gz that is empty": Case(containing(), "{file}: is empty, which no .gz file can be", name="in.jsonl.gz"),
    "zst that is gz": Case(
        lambda path: path.write_bytes(gzip.compress(GOOD)),
        "{file}: is not a .zst file: it contains gz data",
        name="in.zst",
    ),
    "wrong extension": Case(lambda path: path.write_bytes(gzip.compress(GOOD)), "{file}: contains gz data"),
    "zero files by glob": Case(lambda path: None, "--input {file}: no file matches", name="in*.jsonl"),
    "same file twice": Case(
        containing(GOOD), "{file}: is given twice", flags=("--input", "{file}", "{file}")
    ),
    "same file by a link": Case(
        two_links, "is given twice ({file} is the same file)", flags=("--input", "{file}", "{real}")
    ),
}


def too_slow(*_):
    raise AssertionError(f"not done after {SECONDS} s")


@pytest.fixture(autouse=True)
def _time_limit():
    before = signal.signal(signal.SIGALRM, too_slow)
    signal.alarm(SECONDS)
    yield
    signal.alarm(0)
    signal.signal(signal.SIGALRM, before)


@pytest.mark.parametrize("name", CASES)
def test_an_input_file_gives_its_documents_or_an_error(tmp_path, capsys, name):
    case = CASES[name]
    source = tmp_path / "in" / case.name
    source.parent.mkdir()
    case.write(source)
    flags = [str(flag).format(file=source, real=source.with_name("real.jsonl")) for flag in case.flags]
    options = {"workers_type": case.workers, "chunk_bytes": 1 << 16, "journal_seconds": 1e9}
    flags += ["--log-interval", 10**9]  # otherwise a progress line may come before the error on a busy host
    code = run("--input", source, *NULL, *flags, prefix=tmp_path / "out", **options)
    message = capsys.readouterr().err
    if case.error:
        assert code == 2
        assert message.startswith("error: ")
        assert case.error.replace("{file}", str(source)) in message
        assert "\n  fix: " in message
        assert [path.name for path in tmp_path.iterdir()] == ["in"], "no output is left"
    else:
        assert code == 0, message
        dataset = IndexedDataset(tmp_path / "out_text_document")
        boundaries = dataset.document_boundaries
        lengths = tuple(int(dataset.lengths[a:b].sum()) for a, b in itertools.pairwise(boundaries))
        assert lengths == case.tokens


def test_a_line_of_2_gb_is_not_read_into_memory(tmp_path, capsys):
    source = tmp_path / "in.jsonl"
    write_sparse(source)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    arguments = ["--input", source, *NULL, "--on-bad-line", "quarantine", "--max-line-mb", 1]
    assert run(*arguments, prefix=tmp_path / "out") == 0
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 50_000
    assert f"skipped: {source}:2: longer than --max-line-mb 1: 2147483633 bytes" in capsys.readouterr().err
    assert IndexedDataset(tmp_path / "out_text_document").num_tokens == 4
    entry = json.loads((tmp_path / "out.bad_lines.jsonl").read_text())
    assert (entry["offset"], entry["bytes"]) == (16, 2147483633)


def test_an_unreadable_file_is_reported(tmp_path, capsys, monkeypatch):
    source = tmp_path / "in.jsonl"
    source.write_bytes(GOOD)
    source.chmod(0)
    if os.geteuid() == 0:  # root may read everything
        real = Path.open

        def refused(self, *arguments, **named):
            if self == source:
                raise PermissionError(13, "Permission denied", str(self))
            return real(self, *arguments, **named)

        monkeypatch.setattr(Path, "open", refused)
    assert run("--input", source, *NULL, prefix=tmp_path / "out") == 2
    assert f"{source}: cannot be read: Permission denied" in capsys.readouterr().err


def test_all_invalid_inputs_are_reported_at_once(tmp_path, capsys):
    good, folder, gone = tmp_path / "good.jsonl", tmp_path / "folder", tmp_path / "gone"
    good.write_bytes(GOOD)
    folder.mkdir()
    arguments = ["--input", good, folder, gone, good, tmp_path / "*.gz"]
    assert run(*arguments, *NULL, prefix=tmp_path / "out") == 2
    message = capsys.readouterr().err
    for part in (
        f"{folder}: is a folder",
        f"{gone}: there is no",
        f"{good}: is given twice",
        "no file matches",
    ):
        assert part in message
    assert message.count("fix:") == 4
