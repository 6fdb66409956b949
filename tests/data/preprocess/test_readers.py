"""Readers: equal documents for every compression and chunk size, from any position, and errors for damaged files."""

from __future__ import annotations

import bz2
import gzip
import itertools
import json
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from preprocessing import NULL, run

from megatrain.config.errors import ConfigError, InputError
from megatrain.data import files
from megatrain.data.preprocess.documents import Position
from megatrain.data.preprocess.inputs import find_inputs
from megatrain.data.preprocess.readers import ChunkReader, LineBlock, whole_lines

LINES = [b'{"text": "%d %d"}\n' % (number % 98, number * 7 % 98) for number in range(3000)]
KINDS = ["jsonl", "gz", "bz2", "zst", "parquet"]


def write_lines(path: Path, kind: str, lines=LINES) -> Path:
    """Write the lines as a file of a kind: compressed files with several streams, tables with several row groups."""
    path = path.with_suffix(f".{kind}")
    half = b"".join(lines[: len(lines) // 2]), b"".join(lines[len(lines) // 2 :])
    if kind == "parquet":
        pyarrow = pytest.importorskip("pyarrow")
        parquet = pytest.importorskip("pyarrow.parquet")
        texts = [json.loads(line)["text"] for line in lines]
        table = pyarrow.table({"text": texts, "n": list(range(len(lines)))})
        parquet.write_table(table, path, row_group_size=1000, write_page_checksum=True)
    elif kind == "zst":
        zstandard = pytest.importorskip("zstandard")
        path.write_bytes(b"".join(map(zstandard.ZstdCompressor().compress, half)))
    else:
        compress = {"jsonl": bytes, "gz": gzip.compress, "bz2": bz2.compress}[kind]
        path.write_bytes(b"".join(map(compress, half)))
    return path


def reader_of(*paths, chunk_bytes=1500, keys=("text",)):
    found = find_inputs([str(path) for path in paths])
    reader = ChunkReader(files=found, json_keys=keys, max_line_bytes=10_000, chunk_bytes=chunk_bytes)
    reader.require_readable()
    return reader


def documents_of(chunks):
    return [
        (
            chunk.file,
            chunk.first + index,
            json.loads(document)["text"] if isinstance(document, bytes) else document["text"],
        )
        for chunk in chunks
        for index, document in enumerate(chunk.split())
    ]


def test_row_groups_without_rows_are_skipped(tmp_path):
    pyarrow = pytest.importorskip("pyarrow")
    parquet = pytest.importorskip("pyarrow.parquet")
    tables = [
        pyarrow.table({"text": pyarrow.array(texts, "string")}) for texts in ([], ["a"], [], [], ["b"], [])
    ]
    with parquet.ParquetWriter(tmp_path / "a.parquet", tables[0].schema) as writer:
        for table in tables:
            writer.write_table(table)
    assert parquet.ParquetFile(tmp_path / "a.parquet").num_row_groups == len(tables)
    reader = reader_of(tmp_path / "a.parquet")
    for start, expected in enumerate([["a", "b"], ["b"], []]):
        rest = documents_of(reader.chunks(Position(document=start)))
        assert [text for *_, text in rest] == expected


@pytest.mark.parametrize("kind", KINDS)
def test_any_file_is_read_from_any_boundary_on(tmp_path, kind):
    first, second = write_lines(tmp_path / "a", kind), write_lines(tmp_path / "b", kind, LINES[:50])
    reader = reader_of(first, second)
    chunks = list(reader.chunks(Position()))
    everything = documents_of(chunks)
    assert [number for _, number, _ in everything] == [*range(1, 3001), *range(1, 51)]
    assert [text for *_, text in everything] == [json.loads(line)["text"] for line in (*LINES, *LINES[:50])]
    assert len(chunks) > 10
    assert chunks[-1].end.bytes_read == first.stat().st_size + second.stat().st_size
    assert all(a.end.bytes_read <= b.end.bytes_read for a, b in itertools.pairwise(chunks))
    for number in (0, 1, 5, len(chunks) - 3, len(chunks) - 2, len(chunks) - 1):
        rest = documents_of(reader.chunks(chunks[number].end))
        assert rest == everything[len(everything) - len(rest) :]
        assert len(rest) == sum(len(chunk.split()) for chunk in chunks[number + 1 :])
    assert documents_of(reader_of(first, second, chunk_bytes=100_000).chunks(Position())) == everything


@pytest.mark.parametrize("kind", KINDS)
def test_the_output_does_not_depend_on_the_file_format(tmp_path, kind):
    for name in ("jsonl", kind):
        assert run("--input", write_lines(tmp_path / "in", name), *NULL, prefix=tmp_path / f"{name}-out") == 0
    for suffix in ("bin", "idx"):
        plain, other = (tmp_path / f"{name}-out_text_document.{suffix}" for name in ("jsonl", kind))
        assert plain.read_bytes() == other.read_bytes()


@pytest.mark.parametrize("kind", KINDS[1:])
@pytest.mark.parametrize("share", [0.3, 0.6, 0.999])
def test_a_truncated_file_is_an_error(tmp_path, kind, share):
    path = write_lines(tmp_path / "in", kind)
    content = path.read_bytes()
    path.write_bytes(content[: int(len(content) * share)])
    with pytest.raises(ConfigError, match=r"in\.\w+: cannot be (read after line \d+|opened as a Parq)"):
        list(reader_of(path).chunks(Position()))


@pytest.mark.parametrize("kind", KINDS[1:])
def test_a_damaged_file_is_an_error_with_its_position(tmp_path, kind):
    path = write_lines(tmp_path / "in", kind)
    content = bytearray(path.read_bytes())
    middle = len(content) // 2 if kind != "parquet" else 600
    content[middle : middle + 20] = bytes(20)
    path.write_bytes(content)
    with pytest.raises(InputError, match=r"in\.\w+: cannot be read after (line|row) \d+"):
        documents_of(reader_of(path).chunks(Position()))


def test_a_bad_row_is_named_by_its_number(tmp_path, capsys):
    pyarrow = pytest.importorskip("pyarrow")
    parquet = pytest.importorskip("pyarrow.parquet")
    path = tmp_path / "in.parquet"
    texts = [["1", "2 3"], ["4"], None, ["5", None]]
    parquet.write_table(pyarrow.table({"text": texts, "n": [1, 2, 3, 4]}), path)
    arguments = ["--input", path, *NULL]
    assert run(*arguments, prefix=tmp_path / "out") == 2
    error = capsys.readouterr().err
    assert error.startswith(f"error: {path}:row 3: key 'text' is null")
    assert f"\n  {path}:row 4: " in error
    assert run(*arguments, "--on-bad-line", "quarantine", prefix=tmp_path / "out") == 0
    entries = [json.loads(line) for line in (tmp_path / "out.bad_lines.jsonl").read_text().splitlines()]
    assert [entry["row"] for entry in entries] == [3, 4]
    assert json.loads(entries[1]["text"]) == {"text": ["5", None]}
    for key, reason in (
        ("n", "column 'n' has type int64"),
        ("x", "has no column 'x', only 'text', 'n'"),
    ):
        assert run(*arguments, "--json-keys", key, prefix=tmp_path / "out") == 2
        assert f"{path}: {reason}" in capsys.readouterr().err


@pytest.mark.parametrize(("kind", "package"), [("zst", "zstandard"), ("parquet", "pyarrow")])
def test_a_missing_package_is_reported_before_any_work(tmp_path, kind, package, monkeypatch):
    path = write_lines(tmp_path / "in", kind)

    def refuse(name):
        raise ImportError(f"No module named {name!r}")

    monkeypatch.setattr(files.importlib, "import_module", refuse)
    with pytest.raises(ConfigError, match=f"needs the package {package}.*\n  fix: pip install {package}"):
        reader_of(path)


def split_lines(content: bytes, limit: int) -> list[bytes | int]:
    """Return every line, or the length of a too long line with its line feed: the definition."""
    return [
        line if len(line.removesuffix(b"\n")) <= limit else len(line)
        for line in content.splitlines(keepends=True)
        if line
    ]


def flattened(blocks: list[LineBlock]) -> list[bytes | int]:
    found: list[bytes | int] = []
    for block in blocks:
        found += block.lines.splitlines(keepends=True)
        found += [block.too_long_bytes] if block.too_long_bytes else []
    return found


@settings(max_examples=300)
@given(
    st.lists(st.sampled_from([b"\n", b"a", b"bb", b"ccccc", b"a\n", b"\n\n"]), max_size=40).map(b"".join),
    st.integers(1, 7),
    st.integers(1, 12),
    st.integers(0, 6),
)
def test_lines_do_not_depend_on_the_block_size(content, block_bytes, chunk_bytes, spare):
    limit = block_bytes + spare
    parts = [content[start : start + block_bytes] for start in range(0, len(content), block_bytes)]
    blocks = list(whole_lines(parts, chunk_bytes=chunk_bytes, max_line_bytes=limit))
    assert flattened(blocks) == split_lines(content, limit)
    assert max((len(block.lines) for block in blocks), default=0) <= chunk_bytes + limit + 2 * block_bytes


def test_whole_lines_before_a_failure_are_yielded_first():
    def parts():
        yield b"one\ntwo\nthr"
        raise EOFError("cut short")

    blocks = whole_lines(parts(), chunk_bytes=1000, max_line_bytes=100)
    assert next(blocks) == LineBlock(b"one\ntwo\n")
    with pytest.raises(EOFError, match="cut short"):
        next(blocks)
