"""The cache of arrays: it returns what was stored, or builds the arrays again and logs why."""

from __future__ import annotations

import errno
import json
import os
import time
import zlib
from pathlib import Path

import numpy as np
import pytest
from everyday import one_in

from megatrain.data.samples import index_cache
from megatrain.data.samples.index_cache import MAGIC, PREFIX, STALE_SECONDS, WORTH_ROWS, IndexCache

pytestmark = pytest.mark.usefixtures("ends_soon")

KEY = {"seed": 1, "lengths": "abc"}
ARRAYS = {
    "order": np.arange(77, dtype=np.uint32),
    "boundaries": np.arange(40, dtype=np.int64).reshape(20, 2) << 33,
    "none": np.empty(0, np.int16),
    "one": np.array([-5], np.int16),
}


class Cache(IndexCache):
    """A cache that records its log lines and how often arrays were built."""

    def __init__(self, folder):
        self.logged = []
        self.built = 0
        super().__init__(folder, self.logged.append)

    def get(self, key=KEY, arrays=ARRAYS):
        def build():
            self.built += 1
            return arrays

        return self.get_or_build("kind", key, build)


def test_what_was_built_is_mapped_from_its_file(tmp_path):
    cache = Cache(tmp_path)
    found = cache.get()
    assert cache.built == 1
    assert not any(array.flags.owndata or array.flags.writeable for array in found.values())
    check_equal(found)


def check_equal(found, expected=ARRAYS):
    assert list(found) == list(expected)
    for name, array in expected.items():
        assert found[name].dtype == array.dtype
        assert found[name].shape == array.shape
        assert found[name].tobytes() == array.tobytes()


@pytest.fixture
def file(tmp_path):
    """The only file of a cache folder."""
    Cache(tmp_path).get()
    (file,) = tmp_path.iterdir()
    return file


def test_stored_arrays_are_found(file):
    cache = Cache(file.parent)
    check_equal(cache.get())
    assert (cache.built, cache.logged) == (0, [])


def test_found_arrays_are_read_only(file):
    found = Cache(file.parent).get()
    with pytest.raises(ValueError, match="read-only"):
        found["order"][0] = 1


def test_equal_arrays_give_equal_files(file, tmp_path):
    Cache(tmp_path / "other").get()
    assert (tmp_path / "other" / file.name).read_bytes() == file.read_bytes()


def test_each_key_and_kind_has_its_own_file(tmp_path):
    cache = Cache(tmp_path)
    for key in ({}, {"a": 1}, {"a": "1"}, {"a": [1]}, {"b": 1}, {"a": 1, "b": 1}):
        cache.get(key)
    cache.get_or_build("other", {}, lambda: ARRAYS)
    assert len(list(tmp_path.iterdir())) == 7
    cache.get({"b": 1, "a": 1})
    assert len(list(tmp_path.iterdir())) == 7, "the order of a key's fields does not matter"


def test_only_large_indices_are_cached(tmp_path):
    assert IndexCache(tmp_path).should_cache(WORTH_ROWS)
    assert not IndexCache(tmp_path).should_cache(WORTH_ROWS - 1)
    assert not IndexCache(None).should_cache(10**12)


def check_never_wrong(file, content, *, may_be_unnoticed):
    """Check that the arrays are right with this file content: read, or built again, logged and stored."""
    whole = file.read_bytes()
    file.write_bytes(content)
    cache = Cache(file.parent)
    check_equal(cache.get())
    if cache.built:
        (line,) = cache.logged
        assert line.startswith(f"{file}: ignored and rebuilt")
        assert file.read_bytes() == whole
    else:
        assert may_be_unnoticed
        assert not cache.logged
    assert [path.name for path in file.parent.iterdir()] == [file.name]


def payload(content):
    """Return the positions of array bytes; the rest is the header and padding."""
    return {
        position
        for array in ARRAYS.values()
        if array.size
        for start in [content.find(array.tobytes())]
        for position in range(start, start + array.nbytes)
    }


@pytest.mark.usefixtures("without_fsync")
@pytest.mark.parametrize("bit", one_in(8, range(8)))
def test_a_flipped_bit_is_never_a_wrong_array(file, bit):
    content = file.read_bytes()
    arrays = payload(content)
    end_of_header = content.rfind(b"}]}") + 3
    for position in range(0, len(content), 3):
        flipped = bytearray(content)
        flipped[position] ^= 1 << bit
        is_padding = position >= end_of_header and position not in arrays
        if is_padding and position % 48:
            continue
        check_never_wrong(file, flipped, may_be_unnoticed=is_padding)
        file.write_bytes(content)


def test_a_truncated_file_is_never_a_wrong_array(file):
    content = file.read_bytes()
    for length in [*range(0, len(content), 7), len(content) - 1]:
        check_never_wrong(file, content[:length], may_be_unnoticed=False)


@pytest.mark.parametrize(
    "change",
    [
        lambda content: content + b"\0",
        lambda content: bytes(len(content)),
        lambda content: content[: len(content) // 2] + bytes(len(content) - len(content) // 2),
        lambda content: content[::-1],
        lambda content: content + content,
    ],
    ids=["longer", "zeros", "zeros in the second half", "backwards", "twice"],
)
def test_other_damage_is_never_a_wrong_array(file, change):
    check_never_wrong(file, change(file.read_bytes()), may_be_unnoticed=False)


@pytest.mark.parametrize("name", ["key", "bytes", "arrays", "name", "dtype", "shape", "start", "crc"])
@pytest.mark.parametrize("value", [None, -3, 2**70, "text", [[]], {}], ids=repr)
def test_a_header_with_another_value_is_never_a_wrong_array(file, name, value):
    content = file.read_bytes()
    _, length, _ = PREFIX.unpack_from(content)
    header = json.loads(content[PREFIX.size : PREFIX.size + length])
    (header if name in header else header["arrays"][0])[name] = value
    changed = json.dumps(header).encode()
    changed = changed[:-1] + b" " * (length - len(changed)) + changed[-1:]
    start = PREFIX.pack(MAGIC, len(changed), zlib.crc32(changed)) + changed
    file.write_bytes(start + content[len(start) :])
    cache = Cache(file.parent)
    found = cache.get()
    assert name == "name" or cache.built, "the header is wrong"
    if cache.built:
        check_equal(found)


def test_a_file_of_another_key_is_not_used(file):
    cache = Cache(file.parent)
    cache.get({"seed": 2}, {"order": np.zeros(3)})
    (other,) = set(file.parent.iterdir()) - {file}
    file.write_bytes(other.read_bytes())
    cache = Cache(file.parent)
    check_equal(cache.get())
    assert [line.startswith(f"{file}: ignored and rebuilt") for line in cache.logged] == [True]


@pytest.mark.parametrize("make", [Path.mkdir, os.mkfifo], ids=["folder", "FIFO"])
def test_a_path_that_is_not_a_file_does_not_block(file, make):
    file.unlink()
    make(file)
    cache = Cache(file.parent)
    check_equal(cache.get())
    assert "not a regular file" in cache.logged[0]
    assert not list(file.parent.glob("*.partial"))


def test_a_dangling_link_is_replaced(file, tmp_path):
    file.unlink()
    file.symlink_to(tmp_path / "nowhere")
    cache = Cache(file.parent)
    check_equal(cache.get())
    assert cache.logged == []
    check_equal(Cache(file.parent).get())


@pytest.mark.parametrize("code", [errno.EROFS, errno.EACCES, errno.ENOSPC, errno.EIO, errno.EDQUOT])
@pytest.mark.parametrize("call", ["mkdir", "open", "fsync", "replace"])
def test_a_folder_that_is_not_writable_is_reported_once(tmp_path, monkeypatch, code, call):
    def fail(*_arguments, **_options):
        raise OSError(code, os.strerror(code))

    folder = tmp_path / "cache"
    if call != "mkdir":
        folder.mkdir()
    real = Path.open
    changed = {"mkdir": (Path, fail), "fsync": (os, fail), "replace": (Path, fail)}
    changed["open"] = (Path, lambda self, mode: fail() if "w" in mode else real(self, mode))
    monkeypatch.setattr(changed[call][0], call, changed[call][1])
    cache = Cache(folder)
    check_equal(cache.get())
    check_equal(cache.get({"seed": 2}))
    (line,) = cache.logged
    assert line.startswith(f"{folder}: ")
    assert os.strerror(code) in line
    assert "--data-cache-path" in line
    assert not folder.exists() or not list(folder.iterdir())


def test_a_folder_inside_a_file_is_reported(tmp_path):
    (tmp_path / "file").write_text("")
    cache = Cache(tmp_path / "file" / "cache")
    check_equal(cache.get())
    assert "--data-cache-path" in cache.logged[-1]
    assert (tmp_path / "file").read_text() == ""


def test_an_unreadable_file_is_rebuilt(file, monkeypatch):
    def fail(_path):
        raise OSError(errno.EIO, "Input/output error")

    monkeypatch.setattr(index_cache, "open_regular", fail)
    cache = Cache(file.parent)
    check_equal(cache.get())
    assert cache.logged == [f"{file}: ignored and rebuilt: [Errno 5] Input/output error"]


def test_an_interrupted_write_leaves_no_file(tmp_path, monkeypatch):
    def stop(_descriptor):
        raise KeyboardInterrupt

    monkeypatch.setattr(os, "fsync", stop)
    with pytest.raises(KeyboardInterrupt):
        Cache(tmp_path).get()
    assert not list(tmp_path.iterdir())


def test_old_temporary_files_of_killed_jobs_are_removed(file):
    content = file.read_bytes()
    old, young = (file.with_name(f"{file.name}.host.{pid}.partial") for pid in (1, 2))
    other = file.with_name("kind-other.index.host.1.partial")
    for path in (old, young, other):
        path.write_bytes(content[:50])
    for path in (old, other):
        os.utime(path, (time.time() - STALE_SECONDS - 60,) * 2)
    file.write_bytes(content[:50])
    cache = Cache(file.parent)
    check_equal(cache.get())
    assert cache.built == 1
    assert not old.exists()
    assert young.exists(), "it may belong to a running job"
    assert other.exists(), "it belongs to another index"
    assert file.read_bytes() == content
