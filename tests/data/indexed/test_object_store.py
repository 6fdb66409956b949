"""Datasets in object stores: the same content as in a folder, copies of the index, failing reads, missing packages."""

import importlib
import itertools
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import fsspec
import numpy as np
import pytest

from megatrain.config.errors import ConfigError, InputError
from megatrain.data.indexed import object_store
from megatrain.data.indexed.merge import merge
from megatrain.data.indexed.object_store import ATTEMPTS
from megatrain.data.indexed.reader import IndexedDataset, read_description
from megatrain.data.indexed.writer import IndexedWriter
from megatrain.data.samples.sources import content_digest
from megatrain.tools.main import main as megatrain

MEMORY = fsspec.filesystem("memory")


@pytest.fixture
def prefix(tmp_path: Path) -> Path:
    """A dataset in a folder, also in fsspec's memory under the URL memory://bucket/data."""
    random = np.random.default_rng(0)
    with IndexedWriter(tmp_path / "data", "uint16") as writer:
        for _ in range(40):
            writer.add_document([random.integers(0, 99, random.integers(0, 30))])
        writer.description = {"tokenizer_type": "NullTokenizer", "sequences": 40}
    return tmp_path / "data"


@pytest.fixture
def url(prefix: Path) -> Iterator[str]:
    for suffix in (".bin", ".idx", ".json"):
        MEMORY.pipe_file(f"/bucket/data{suffix}", Path(f"{prefix}{suffix}").read_bytes())
    yield "memory://bucket/data"
    MEMORY.rm("/bucket", recursive=True)


@pytest.fixture
def waits(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    found: list[float] = []
    monkeypatch.setattr(object_store.time, "sleep", found.append)
    return found


def http_error(cause: Exception | None) -> FileNotFoundError:
    """Return the error of fsspec for an http URL that it cannot look up."""
    error = FileNotFoundError("http://host/data.bin")
    error.__cause__ = cause
    return error


def failing(monkeypatch: pytest.MonkeyPatch, method: str, failures: int, error: Exception) -> list[Any]:
    """Let a method of the store fail a number of times; return its calls."""
    calls: list[Any] = []
    whole = getattr(type(MEMORY), method)

    def request(self: Any, path: str, *args: Any, **kwargs: Any) -> Any:
        if not path.endswith(".bin"):
            return whole(self, path, *args, **kwargs)
        calls.append(path)
        if len(calls) <= failures:
            raise error
        return whole(self, path, *args, **kwargs)

    monkeypatch.setattr(type(MEMORY), method, request)
    return calls


@pytest.mark.parametrize("protocol", ["memory", "file"])
def test_a_url_has_the_content_of_the_folder(prefix: Path, url: str, tmp_path: Path, protocol: str) -> None:
    local = IndexedDataset(prefix)
    remote = IndexedDataset(
        url if protocol == "memory" else f"file://{prefix}", index_cache=str(tmp_path / "c")
    )
    assert remote.name == f"{remote.prefix}.bin"
    assert np.array_equal(remote.lengths, local.lengths)
    for sequence in range(len(local)):
        assert np.array_equal(remote.read(sequence), local.read(sequence))
    longest = int(local.lengths.argmax())
    assert np.array_equal(remote.read(longest, 3, 5), local.read(longest, 3, 5))
    assert content_digest(remote) == content_digest(local)
    assert read_description(remote.prefix) == read_description(str(prefix))
    merge([remote.prefix, prefix], tmp_path / "both", index_cache=str(tmp_path / "c"), log=lambda _: None)
    both = Path(f"{tmp_path}/both.bin").read_bytes()
    assert both == 2 * Path(f"{prefix}.bin").read_bytes()


def test_only_ranges_of_the_elements_are_read(
    url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    dataset = IndexedDataset(url, index_cache=str(tmp_path))
    ranges: list[Any] = []
    whole = type(MEMORY).cat_file
    monkeypatch.setattr(
        type(MEMORY),
        "cat_file",
        lambda self, path, start, end: ranges.append((start, end)) or whole(self, path, start, end),
    )
    longest = int(dataset.lengths.argmax())
    dataset.read(longest, 2, 4)
    start = int(dataset.offsets[longest]) + 4
    assert ranges == [(start, start + 8)]


def test_a_copy_of_the_index_is_reused_and_replaced_with_its_file(
    url: str, tmp_path: Path, prefix: Path
) -> None:
    first = IndexedDataset(url, index_cache=str(tmp_path / "c")).index_path
    time = first.stat().st_mtime_ns
    assert IndexedDataset(url, index_cache=str(tmp_path / "c")).index_path == first
    assert first.stat().st_mtime_ns == time
    with IndexedWriter(tmp_path / "other", "uint16") as writer:
        writer.add_document([[1, 2, 3]])
    for suffix in (".bin", ".idx"):
        MEMORY.pipe_file(f"/bucket/data{suffix}", Path(f"{tmp_path}/other{suffix}").read_bytes())
    changed = IndexedDataset(url, index_cache=str(tmp_path / "c"))
    assert changed.index_path != first
    assert changed.num_tokens == 3


def test_a_failed_read_is_tried_again(
    url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, waits: list[float]
) -> None:
    dataset = IndexedDataset(url, index_cache=str(tmp_path))
    longest = int(dataset.lengths.argmax())
    expected = dataset.read(longest)
    calls = failing(monkeypatch, "cat_file", ATTEMPTS - 1, OSError("connection reset"))
    assert np.array_equal(dataset.read(longest), expected)
    assert len(calls) == ATTEMPTS
    assert waits == sorted(waits)
    assert len(waits) == ATTEMPTS - 1


def test_a_read_that_keeps_failing_names_the_url(
    url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, waits: list[float]
) -> None:
    dataset = IndexedDataset(url, index_cache=str(tmp_path))
    calls = failing(monkeypatch, "cat_file", 10**6, TimeoutError("timed out"))
    with pytest.raises(
        InputError, match=rf"{url}.bin: bytes \d+ to \d+ cannot be read \({ATTEMPTS} attempts\): timed out"
    ):
        dataset.read(int(dataset.lengths.argmax()))
    assert len(calls) == ATTEMPTS


def test_a_file_that_became_shorter_is_an_error(url: str, tmp_path: Path, waits: list[float]) -> None:
    dataset = IndexedDataset(url, index_cache=str(tmp_path))
    MEMORY.pipe_file("/bucket/data.bin", b"short")
    with pytest.raises(InputError, match=r"data.bin: .* of \d+ bytes were returned"):
        dataset.read(int(np.flatnonzero(dataset.lengths)[-1]))


def test_a_missing_file_is_not_tried_again(tmp_path: Path, waits: list[float]) -> None:
    with pytest.raises(InputError, match=r"memory://nothing/data.idx: .*there is no such file"):
        IndexedDataset("memory://nothing/data", index_cache=str(tmp_path))
    assert waits == []


@pytest.mark.parametrize(
    ("url", "cache", "words"),
    [
        ("memory://bucket/data", None, "add --object-storage-cache-path FOLDER"),
        ("nosuch://bucket/data", "c", "a protocol that fsspec knows"),
        ("s3://me:secret@host/data", "c", "remove it from the URL"),
    ],
)
def test_a_url_that_cannot_be_used_has_a_remedy(url: str, cache: str | None, words: str) -> None:
    with pytest.raises(ConfigError) as raised:
        IndexedDataset(url, index_cache=cache)
    assert words in str(raised.value)
    assert "secret" not in str(raised.value)


def test_a_missing_package_is_named(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def without_store(_url: str) -> Any:
        raise ImportError("Install s3fs to access S3")

    monkeypatch.setattr("fsspec.core.url_to_fs", without_store)
    with pytest.raises(ConfigError, match="Install s3fs"):
        IndexedDataset("s3://bucket/data", index_cache=str(tmp_path))

    def without_fsspec(name: str) -> Any:
        raise ImportError(f"No module named {name!r}")

    monkeypatch.setattr(importlib, "import_module", without_fsspec)
    with pytest.raises(ConfigError, match="pip install fsspec"):
        IndexedDataset("s3://bucket/data", index_cache=str(tmp_path))


def test_inspect_reads_a_url(
    url: str, prefix: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    outputs = []
    for name in (url, str(prefix)):
        flags = ["--object-storage-cache-path", str(tmp_path / "c")]
        assert megatrain(["data", "inspect", name, "--json", *flags]) == 0
        outputs.append({**json.loads(capsys.readouterr().out), "prefix": ""})
    assert outputs[0] == outputs[1]
    assert list(itertools.islice(tmp_path.glob("c/*.idx"), 2))


def test_a_server_in_trouble_is_no_missing_file(
    url: str, monkeypatch: pytest.MonkeyPatch, waits: list[float]
) -> None:
    calls = failing(monkeypatch, "info", ATTEMPTS, http_error(OSError("connection refused")))
    with pytest.raises(InputError, match=rf"cannot be found \({ATTEMPTS} attempts\): connection refused"):
        object_store.exists(f"{url}.bin")
    assert len(calls) == ATTEMPTS == len(waits) + 1


@pytest.mark.parametrize("status", [None, 404])
def test_a_missing_file_of_a_server_is_not_tried_again(
    url: str, monkeypatch: pytest.MonkeyPatch, waits: list[float], status: int | None
) -> None:
    cause = OSError()
    cause.status = status  # type: ignore[attr-defined] (as aiohttp's errors have it)
    failing(monkeypatch, "info", 1, http_error(cause if status else None))
    assert not object_store.exists(f"{url}.bin")
    assert not waits


def test_a_copy_is_of_the_version_that_the_server_names(
    url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    info = type(MEMORY).info
    tags = iter(["v1", "v1", "v2"])
    monkeypatch.setattr(type(MEMORY), "ukey", lambda _self, path: path)  # as fsspec's of http URLs
    monkeypatch.setattr(type(MEMORY), "info", lambda self, path: {**info(self, path), "ETag": next(tags)})
    copies = {object_store.local_copy(f"{url}.idx", str(tmp_path / "c")) for _ in range(3)}
    assert len(copies) == 2


def test_an_s3_server(
    prefix: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, waits: list[float]
) -> None:
    """The same content as in a folder; a missing and a truncated object, and a server that is gone, are errors."""
    pytest.importorskip("s3fs")
    server = pytest.importorskip("moto.server").ThreadedMotoServer(ip_address="127.0.0.1", port=0)
    server.start()
    host, port = server.get_host_and_port()
    for name, value in {
        "AWS_ENDPOINT_URL": f"http://{host}:{port}", "AWS_ACCESS_KEY_ID": "id", "AWS_SECRET_ACCESS_KEY": "key",
        "AWS_MAX_ATTEMPTS": "1",
    }.items():  # fmt: skip
        monkeypatch.setenv(name, value)
    files = fsspec.filesystem("s3", skip_instance_cache=True)
    files.mkdir("bucket")
    for suffix in (".bin", ".idx"):
        files.pipe_file(f"bucket/data{suffix}", Path(f"{prefix}{suffix}").read_bytes())
        files.pipe_file(
            f"bucket/short{suffix}",
            Path(f"{prefix}{suffix}").read_bytes()[: -2 if suffix == ".bin" else None],
        )
    remote, local = (
        IndexedDataset("s3://bucket/data", index_cache=str(tmp_path / "c")),
        IndexedDataset(prefix),
    )
    assert content_digest(remote) == content_digest(local)
    with pytest.raises(InputError, match=r"s3://bucket/none\.idx: cannot be found: there is no such file"):
        IndexedDataset("s3://bucket/none", index_cache=str(tmp_path / "c"))
    with pytest.raises(InputError, match=r"s3://bucket/short\.bin: the file has"):
        IndexedDataset("s3://bucket/short", index_cache=str(tmp_path / "c"))
    server.stop()
    with pytest.raises(InputError, match=rf"s3://bucket/data\.bin: .* \({ATTEMPTS} attempts\)"):
        remote.read(int(local.lengths.argmax()))
    assert len(waits) == ATTEMPTS - 1
