"""Plain text files and folders of them: a document per file or per line, in a defined order."""

from __future__ import annotations

import gzip
import itertools
import json

import pytest
from preprocessing import NULL, content_of, run

from megatrain.config.errors import MegatrainError
from megatrain.data.indexed.reader import IndexedDataset
from megatrain.data.preprocess.documents import Position
from megatrain.data.preprocess.inputs import find_inputs
from megatrain.data.preprocess.readers import ChunkReader

pytestmark = pytest.mark.usefixtures("without_fsync")


def documents_of(prefix):
    """Return the ids of each document."""
    dataset = IndexedDataset(f"{prefix}_text_document")
    ids = [list(map(int, dataset.read(number))) for number in range(len(dataset.lengths))]
    boundaries = [int(boundary) for boundary in dataset.document_boundaries]
    return [list(itertools.chain.from_iterable(ids[a:b])) for a, b in itertools.pairwise(boundaries)]


def write_folder(folder):
    """Write files whose sorted order differs from the order of their names alone; return the expected documents."""
    (folder / "b" / "deep").mkdir(parents=True)
    (folder / "a.txt").write_text("1 2\n3\n")
    (folder / "b" / "deep" / "x.txt.gz").write_bytes(gzip.compress(b"4\n"))
    (folder / "b" / "a.md").write_text("5 6")
    (folder / "b.txt").write_text("")
    (folder / "c.jsonl").write_text('{"text": "7"}\n{"text": "8"}\n')
    (folder / ".hidden.txt").write_text("99")
    (folder / "picture.png").write_bytes(b"\x89PNG")
    return [[1, 2, 3], [5, 6], [4], [], [7], [8]]


def test_a_folder_is_read_recursively_in_sorted_order(tmp_path, capsys):
    expected = write_folder(tmp_path / "in")
    assert run("--input", tmp_path / "in", *NULL, prefix=tmp_path / "out") == 0
    assert documents_of(tmp_path / "out") == expected
    message = capsys.readouterr().err
    assert "not read: 1 file (1 of .png)" in message
    description = json.loads((tmp_path / "out_text_document.json").read_text())
    read = [path for path in (tmp_path / "in").rglob("[a-z]*.*") if path.suffix not in {".png", ""}]
    num_bytes = sum(path.stat().st_size for path in read)
    assert description["sources"] == [{"path": str(tmp_path / "in"), "files": 5, "bytes": num_bytes}]


def test_a_document_may_be_a_line(tmp_path):
    (tmp_path / "in.txt").write_bytes(b"\xef\xbb\xbf1 2\r\n\n  \n3")
    assert (
        run("--input", tmp_path / "in.txt", "--text-documents", "line", *NULL, prefix=tmp_path / "out") == 0
    )
    assert documents_of(tmp_path / "out") == [[1, 2], [], [], [3]]


def test_a_format_can_be_given_for_any_name(tmp_path):
    (tmp_path / "in").mkdir()
    (tmp_path / "in" / "notes").write_text("1 2")
    (tmp_path / "in" / "x.jsonl").write_text("3")
    assert run("--input", tmp_path / "in", "--input-format", "text", *NULL, prefix=tmp_path / "out") == 0
    assert documents_of(tmp_path / "out") == [[1, 2], [3]]
    (tmp_path / "lines.txt").write_text('{"text": "4"}\n')
    arguments = ["--input", tmp_path / "lines.txt", "--input-format", "jsonl", *NULL]
    assert run(*arguments, prefix=tmp_path / "lines") == 0
    assert documents_of(tmp_path / "lines") == [[4]]


ERRORS = {
    "folder of other files": ({"in/a.png": b"x"}, ["in"], "in: is a folder without a file of .jsonl"),
    "lines of JSON": ({"a.txt": b'{"text": "1"}\n'}, ["a.txt"], "a.txt: has the suffix of a text file, but"),
    "JSON array after a BOM": (
        {"a.json": b'\xef\xbb\xbf[{"text": "1"}]'},
        ["a.json"],
        "a.json: is a JSON array; JSON Lines",
    ),
    "JSON array": ({"a.json": b'[\n  {"text": "1"}\n]'}, ["a.json"], "a.json: is a JSON array; JSON Lines"),
    "two keys": ({"a.txt": b"1"}, ["a.txt", "--json-keys", "a", "b"], "a.txt: is text, which has no keys"),
    "not UTF-8": ({"a.txt": b"1\n2 \xff"}, ["a.txt"], "a.txt: not UTF-8: byte 0xff at line 2, position 4"),
    "not UTF-8 in a line": (
        {"a.txt": b"1\n2 \xff"},
        ["a.txt", "--text-documents", "line"],
        "a.txt:2: not UTF-8: byte 0xff at position 2 of the line",
    ),
    "UTF-16": ({"a.txt": "1 2".encode("utf-16")}, ["a.txt"], "a.txt: is UTF-16, not UTF-8"),
    "too long": (
        {"a.txt": b"1 " * 600_000},
        ["a.txt", "--max-line-mb", "1"],
        "a.txt: longer than --max-line-mb 1: 1200000 bytes\n  fix: raise --max-line-mb",
    ),
    "truncated": ({"a.txt.gz": gzip.compress(b"1 2 3")[:-4]}, ["a.txt.gz"], "a.txt.gz: cannot be read: "),
    "empty": ({"a.txt": b"", "b.txt": b"\n"}, ["a.txt", "b.txt"], "would be empty: --input has 2 documents"),
    "object store": ({"a.txt": b"1"}, ["s3://bucket/a.txt"], "s3:/bucket/a.txt: object stores are not read"),
    "twice": ({"in/a.txt": b"1"}, ["in", "in/a.txt"], "in/a.txt: is given twice"),
}


@pytest.mark.parametrize("name", ERRORS)
def test_invalid_text_is_an_error_that_names_the_file(tmp_path, capsys, monkeypatch, name):
    files, arguments, message = ERRORS[name]
    monkeypatch.chdir(tmp_path)
    for path, content in files.items():
        (tmp_path / path).parent.mkdir(exist_ok=True)
        (tmp_path / path).write_bytes(content)
    assert run("--input", *arguments, *NULL, prefix=tmp_path / "out") == 2
    printed = capsys.readouterr().err
    assert message in printed
    assert "fix: " in printed
    assert not list(tmp_path.glob("out*"))


def test_a_bad_text_file_can_be_skipped_or_quarantined(tmp_path, capsys):
    folder = tmp_path / "in"
    folder.mkdir()
    for name, content in {"a": b"1", "b": b"\xff", "c": b"2", "d": b"7 " * 600_000}.items():
        (folder / f"{name}.txt").write_bytes(content)
    arguments = ["--input", folder, "--on-bad-line", "quarantine", "--max-line-mb", 1, *NULL]
    assert run(*arguments, prefix=tmp_path / "out") == 0
    assert documents_of(tmp_path / "out") == [[1], [2]]
    entries = [json.loads(line) for line in (tmp_path / "out.bad_lines.jsonl").read_text().splitlines()]
    assert [entry["file"] for entry in entries] == [str(folder / "b.txt"), str(folder / "d.txt")]
    assert (entries[0]["base64"], entries[1]["bytes"]) == ("/w==", 1_200_000)


def test_a_flag_for_text_is_reported_without_text_files(tmp_path, capsys):
    (tmp_path / "in.jsonl").write_text('{"text": "1"}\n')
    assert (
        run("--input", tmp_path / "in.jsonl", "--text-documents", "line", *NULL, prefix=tmp_path / "out") == 0
    )
    assert "--text-documents has no effect" in capsys.readouterr().err


@pytest.mark.parametrize("unit", ["file", "line"])
def test_text_is_read_from_any_boundary_on(tmp_path, unit):
    for number in range(6):
        content = b"".join(b"%d %d\n" % (number, line) for line in range(50))
        (tmp_path / f"{number}.txt.gz").write_bytes(gzip.compress(content))
    reader = ChunkReader(
        files=find_inputs([str(tmp_path)]),
        json_keys=("text",),
        max_line_bytes=10_000,
        chunk_bytes=100,
        text_documents=unit,
    )
    whole = list(reader.chunks(Position()))
    assert sum(len(chunk.split()) for chunk in whole) == (6 if unit == "file" else 300)
    for number, chunk in enumerate(whole):
        assert list(reader.chunks(chunk.end)) == whole[number + 1 :]


def test_an_interrupted_run_over_a_folder_resumes(tmp_path, capsys):
    """The bytes equal those of an uninterrupted run; a file that was added starts it again."""
    folder = tmp_path / "in"
    folder.mkdir()
    for number in range(20):
        (folder / f"{number:02}.txt").write_text(f"{number} {number}\n")
    (tmp_path / "whole").mkdir()
    options = {"journal_seconds": 0.0}
    assert run("--input", folder, *NULL, prefix=tmp_path / "whole" / "out") == 0
    (folder / "10.txt").write_bytes(b"\xff")
    arguments = ["--input", folder, *NULL]
    assert run(*arguments, prefix=tmp_path / "out", **options) == 2
    assert "10 documents are done and kept" in capsys.readouterr().err
    (folder / "10.txt").write_text("10 10\n")
    assert run(*arguments, prefix=tmp_path / "out", **options) == 0
    assert "cannot continue, starting over: it had other settings: --input" in capsys.readouterr().err
    assert content_of(tmp_path) == content_of(tmp_path / "whole")


class StopsAfter:
    """A stand-in for `Workers` that fails after some chunks."""

    def __init__(self, _num_workers, make):
        self.work = make()

    def __enter__(self):
        return self

    def __exit__(self, *_):
        pass

    def map(self, items, **_):
        for number, item in enumerate(items):
            if number == 7:
                raise MegatrainError("stopped", fix="resume")
            yield self.work(item)


def test_a_stopped_run_over_a_folder_resumes_at_the_next_file(tmp_path, capsys):
    folder = tmp_path / "in"
    folder.mkdir()
    for number in range(20):
        (folder / f"{number:02}.txt").write_text(f"{number} {number}\n" * number)
    (tmp_path / "whole").mkdir()
    arguments = ["--input", folder, "--append-eod", *NULL]
    assert run(*arguments, prefix=tmp_path / "whole" / "out") == 0
    assert run(*arguments, prefix=tmp_path / "out", workers_type=StopsAfter, journal_seconds=0.0) == 1
    capsys.readouterr()
    assert run(*arguments, prefix=tmp_path / "out") == 0
    assert "resuming an interrupted run after 7 documents" in capsys.readouterr().err
    assert content_of(tmp_path) == content_of(tmp_path / "whole")
