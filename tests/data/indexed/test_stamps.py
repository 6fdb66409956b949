"""Starts of large datasets: what was checked once is not read again, and what has changed is."""

import os
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from megatrain.config.errors import InputError
from megatrain.data.indexed import reader
from megatrain.data.indexed.reader import HEADER, MAGIC, VERSION
from megatrain.data.indexed.stamps import WORTH_SEQUENCES, Stamp
from megatrain.data.samples import gpt_index, index_cache, sources
from megatrain.data.samples.gpt_index import LengthFacts
from megatrain.data.samples.index_cache import IndexCache, NotCachedError, Share
from megatrain.data.samples.sources import content_digest, open_token_ids

UINT16 = 8


@pytest.fixture
def prefix(tmp_path: Path) -> Path:
    """A dataset that is large enough for a stamp."""
    lengths = np.full(WORTH_SEQUENCES, 2, np.int32)
    found = tmp_path / "data" / "set"
    found.parent.mkdir()
    with found.with_suffix(".idx").open("wb") as file:
        file.write(HEADER.pack(MAGIC, VERSION, UINT16, len(lengths), len(lengths) + 1))
        lengths.tofile(file)
        np.arange(0, 4 * len(lengths), 4, dtype=np.int64).tofile(file)
        np.arange(len(lengths) + 1, dtype=np.int64).tofile(file)
    np.arange(2 * len(lengths), dtype=np.uint16).tofile(found.with_suffix(".bin"))
    return found


@pytest.fixture
def rows_read(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Rows of the index that are checked, and bytes that are digested or checksummed."""
    found: list[int] = []

    def counted(module: object, name: str, size: Callable[..., int]) -> None:
        original = getattr(module, name)

        def wrapper(*words: object) -> object:
            found.append(size(*words))
            return original(*words)

        monkeypatch.setattr(module, name, wrapper)

    counted(reader, "_check_offsets", lambda _path, lengths, *_: len(lengths))
    counted(reader, "_check_boundaries", lambda _path, boundaries, _: len(boundaries))
    counted(sources, "digest", lambda array: array.nbytes)
    counted(gpt_index, "digest", lambda array: array.nbytes)
    counted(index_cache.zlib, "crc32", len)
    return found


def facts_of(prefix: Path, cache_folder: Path | None = None) -> tuple[int, str, LengthFacts]:
    """What a rank asks about a dataset at its start."""
    opened = open_token_ids(str(prefix), cache_folder=cache_folder)
    return opened.num_tokens, content_digest(opened), LengthFacts.of(opened, range(10, WORTH_SEQUENCES))


def test_an_unchanged_dataset_is_read_once(prefix: Path, rows_read: list[int]) -> None:
    cold = facts_of(prefix)
    assert max(rows_read) >= WORTH_SEQUENCES
    rows_read.clear()
    assert facts_of(prefix) == cold
    assert sum(rows_read) < 2000, "a warm start reads the stamp alone"


@pytest.mark.parametrize("suffix", [".idx", ".bin"])
def test_a_changed_file_is_read_again(prefix: Path, suffix: str) -> None:
    num_tokens, digest, _ = facts_of(prefix)
    content = bytearray(prefix.with_suffix(suffix).read_bytes())
    content[HEADER.size + 4 * 100] ^= 1  # the length of a sequence, or a token
    prefix.with_suffix(suffix).write_bytes(content)
    if suffix == ".idx":
        with pytest.raises(InputError, match="offset of sequence 101"):
            facts_of(prefix)
    else:
        assert facts_of(prefix)[:1] == (num_tokens,)
        assert facts_of(prefix)[1] != digest


@pytest.mark.parametrize("content", [b"", b"{}", b"[" * 5000, b'{"files": [], "facts": {}, "crc32": 0}'])
def test_a_damaged_stamp_is_made_again(prefix: Path, content: bytes, rows_read: list[int]) -> None:
    expected = facts_of(prefix)
    (stamp,) = (prefix.parent / "index_cache").glob("stamp-*.json")
    stamp.write_bytes(content)
    rows_read.clear()
    assert facts_of(prefix) == expected
    assert max(rows_read) >= WORTH_SEQUENCES
    rows_read.clear()
    assert facts_of(prefix) == expected
    assert sum(rows_read) < 2000


def test_a_fact_that_was_edited_is_not_believed(prefix: Path) -> None:
    expected = facts_of(prefix)
    (stamp,) = (prefix.parent / "index_cache").glob("stamp-*.json")
    stamp.write_text(stamp.read_text().replace(f'"num_tokens": {expected[0]}', '"num_tokens": 7'))
    assert facts_of(prefix) == expected


def test_the_given_folder_has_the_stamp(prefix: Path, tmp_path: Path) -> None:
    facts_of(prefix, tmp_path / "cache")
    assert list((tmp_path / "cache").glob("stamp-*.json"))
    assert not (prefix.parent / "index_cache").exists()


def test_without_a_writable_folder_facts_are_computed(tmp_path: Path) -> None:
    file = tmp_path / "file"
    file.write_bytes(b"x")
    assert Stamp([file], [file / "folder"]).get("fact", lambda: 5) == 5


def test_a_cached_index_is_checked_once(tmp_path: Path, rows_read: list[int]) -> None:
    """A change of the file, and a copy with another time, are checked; the check is remembered."""
    arrays = {"order": np.arange(100_000)}
    cache = IndexCache(tmp_path)
    cache.get_or_build("x", {}, lambda: arrays)
    rows_read.clear()

    def found() -> int:
        read = IndexCache(tmp_path, share=Share(1, 2)).get_or_build("x", {}, dict)
        assert np.array_equal(read["order"], arrays["order"])
        total = sum(rows_read)
        rows_read.clear()
        return total

    assert found() < 2000
    (file,) = tmp_path.glob("x-*.index")
    os.utime(file, (1.5, 1.5))
    assert found() >= 800_000
    assert found() < 2000
    content = bytearray(file.read_bytes())
    content[-100] ^= 1
    file.write_bytes(content)
    with pytest.raises(NotCachedError):
        IndexCache(tmp_path, share=Share(1, 2)).get_or_build("x", {}, dict)
