"""Pickles of strangers are read in time and memory in proportion to their size, and those of Python as Python reads them."""

import collections
import pickle
import time
import tracemalloc
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from megatron_folders import weights, write

from megatrain.checkpoint.errors import DamagedError
from megatrain.interop.megatron.archive import Archive, Place
from megatrain.interop.megatron.inert_pickle import Record, path_of, read_pickle
from megatrain.interop.megatron.torch_dist import METADATA_NAME, TorchDistFolder


def doubled(first: bytes, pair: bytes, times: int = 60) -> bytes:
    """Return a value that contains the one before twice, `times` times; `pair` makes one of two on the stack."""
    return first + b"q\x00" + b"".join(b"h%ch%c" % (i, i) + pair + b"q%c" % (i + 1) for i in range(times))


def as_key(value: bytes) -> bytes:
    """Return a dictionary with a value as its key."""
    return b"}" + value + b"Ns."


def each(count: int, text: bytes, *more: int) -> bytes:
    """Return opcodes for each number, at most 255, with the number, and that number and each of `more`, in their places."""
    return b"".join(text % (i, *(i + one for one in more)) for i in range(count))


def sized(code: bytes, width: int, length: int, content: bytes = b"") -> bytes:
    return code + length.to_bytes(width, "little") + content


TUPLES = doubled(b")", b"\x86")
HOSTILE = {
    "tuples as a key": as_key(TUPLES),
    "a deep tuple as a key": as_key(b")" + b"\x85" * 20_000),
    "a long tuple as a key": as_key(b"(" + b"N" * 20_000 + b"t"),
    "a tuple of numbers as a key": as_key(b"K\x01K\x02\x86"),
    "an array of bytes as a key": as_key(b"C\x01a"),
    "a float as a key": as_key(b"G" + bytes(8)),
    "equal hashes": b"}(" + b"".join(
        sized(b"\x8a", 1, 12, ((2**61 - 1) * i).to_bytes(12, "little")) + b"N" for i in range(1, 20_000)
    ) + b"u.",
    "marks": b"(" * 20_000 + b".",
    "a long integer": sized(b"\x8a", 1, 255, b"\x7f" * 255) + b".",
    "a longer integer": sized(b"\x8b", 4, 1 << 20, b"\x7f" * (1 << 20)) + b".",
    "digits": b"I" + b"9" * 1_000_000 + b"\n.",
    "digits of a long": b"L" + b"9" * 1_000_000 + b"L\n.",
    "bytes beyond the end": sized(b"\x8e", 8, 1 << 62) + b".",
    "an array beyond the end": sized(b"\x96", 8, 1 << 40) + b".",
    "a text beyond the end": sized(b"\x8d", 8, (1 << 64) - 1) + b".",
    "a text of the size of memory": sized(b"X", 4, (1 << 32) - 1) + b".",
    "a part of a character": sized(b"X", 4, 3, b"\xed\xa0\x80") + b".",
    "no end of a line": b"c" + b"x" * 1_000_000,
    "a value twice": b"N2.",
    "no such memo": b"j\xff\xff\xff\xff.",
    "state of a list": b"]Nb.",
    "state of nothing": b"NNb.",
    "a call of a text": b"\x8c\x01x)R.",
    "a call without a tuple": b"cx\ny\n]R.",
    "a call of a tuple": b")\x81.",
    "a tuple of too few": b"N\x87.",
    "items of a number": b"K\x01Na.",
    "an odd number of items": b"}(Nu.",
    "nothing": b".",
    "no end": b"N",
}  # fmt: skip
UNFOLDED = {
    "tuples": TUPLES + b".",
    "a frozen set as a key": as_key(b"(" + TUPLES + b"\x91\x85"),
    "lists": b"]q\x00" + each(60, b"](h%ch%ceq%c", 0, 1) + b".",
    "lists that grow later": each(61, b"]q%c") + each(60, b"h%c(h%ch%ce", 1, 1) + b"h\x00.",
    "dictionaries": b"}q\x00" + each(60, b"}(K\x00h%cK\x01h%cuq%c", 0, 1) + b".",
    "records": b"cx\ny\nq\x00" + each(60, b"h\x00h%ch%c\x86\x81q%c", 0, 1) + b".",
    "states": b"cx\ny\n)\x81q\x00" + each(60, b"cx\ny\n)\x81h%ch%c\x86bq%c", 0, 1) + b".",
    "wide lists": b"]q\x00"
    + b"".join(b"](" + b"h%c" % i * 5000 + b"eq%c" % (i + 1) for i in range(4))
    + b".",
    "a list in itself": b"]q\x00h\x00a.",
    "a record in itself": b"cx\ny\n)\x81q\x00h\x00bh\x00.",
    "deep lists": b"]" * 20_000 + b"a" * 19_999 + b".",
    "deep tuples": b")" + b"\x85" * 20_000 + b".",
}
HARMLESS = {
    "a far memo": b"Nr\xff\xff\xff\xff.",
    "a far frame": b"\x80\x04\x95" + b"\xff" * 8 + b"N.",
    "many classes": b"".join(b"cx\ny\n" for _ in range(20_000)) + b".",
    "state of a record": b"cx\ny\n)\x81K\x01b.",
    "state twice": b"cx\ny\n)\x81K\x01b}b.",
}


@pytest.fixture
def is_small() -> Iterator[None]:
    start, (before, _) = time.process_time(), tracemalloc.start() or tracemalloc.get_traced_memory()
    yield
    peak = tracemalloc.get_traced_memory()[1] - before
    tracemalloc.stop()
    assert time.process_time() - start < 20
    assert peak < 200 << 20


@pytest.mark.usefixtures("is_small")
@pytest.mark.parametrize("name", [*HOSTILE, *UNFOLDED])
def test_hostile_pickles_are_refused(name: str) -> None:
    with pytest.raises(
        ValueError, match=f"^{'not a valid pickle' if name in HOSTILE else 'values are nested'}"
    ) as caught:
        read_pickle({**HOSTILE, **UNFOLDED}[name])
    assert len(str(caught.value)) < 400
    str(caught.value).encode()


@pytest.mark.usefixtures("is_small")
@pytest.mark.parametrize("name", HARMLESS)
def test_odd_pickles_are_small(name: str) -> None:
    read_pickle(HARMLESS[name])


PLAIN = st.recursive(
    st.none() | st.booleans() | st.integers(-(1 << 100), 1 << 100) | st.floats(allow_nan=False) | st.text() | st.binary(),
    lambda value: st.lists(value) | st.dictionaries(st.text() | st.integers(-100, 100), value) | st.tuples(value, value),
)  # fmt: skip


@given(PLAIN, st.integers(3, 5))
def test_values_are_what_python_reads(value: Any, protocol: int) -> None:
    shared = [value, value, {"again": value}]
    found = read_pickle(pickle.dumps(shared, protocol))
    assert found == shared
    assert repr(found) == repr(shared)


@pytest.mark.parametrize("protocol", range(2, 6))
def test_objects_are_records(protocol: int) -> None:
    ordered = collections.OrderedDict(a=1)
    ordered.more = {"b": 2}  # type: ignore[attr-defined]
    values = [torch.Size((3, 32)), torch.float32, {1, 2}, frozenset({3}), ordered, np.float64(3.5), range(4)]
    size, dtype, several, frozen, states, number, numbers = read_pickle(pickle.dumps(values, protocol))
    assert (path_of(size), size.arguments) == ("torch.Size", ((3, 32),))
    assert path_of(dtype) == "torch.float32"
    assert path_of(several).endswith("set")
    assert sorted(several.arguments[0]) == [1, 2]
    assert list(frozen.arguments[0]) == [3]
    assert states == {"a": 1}
    assert all(isinstance(one, Record) for one in (number, numbers))


def test_the_state_of_a_module_is_read(tmp_path: Path) -> None:
    """It is an ordered dictionary with an attribute, `_metadata`."""
    file, module = tmp_path / "state.pt", torch.nn.Linear(3, 2)
    torch.save({"model": module.state_dict()}, file)
    with Archive(file, Place(file.name, 0, file.stat().st_size)) as archive:
        model = archive.load()["model"]
        assert {name: archive.rebuilt(value).tolist() for name, value in model.items()} == {
            name: value.tolist() for name, value in module.state_dict().items()
        }


def changed_index(path: Path, change: Any) -> None:
    metadata = pickle.loads((path / METADATA_NAME).read_bytes())
    change(metadata)
    (path / METADATA_NAME).write_bytes(pickle.dumps(metadata))


def _in_a_tuple(metadata: Any) -> None:
    name: Any = ()
    for _ in range(60):
        name = (name, name)
    index = next(iter(metadata.storage_data))
    object.__setattr__(index, "fqn", name)


def _of_many_layers(metadata: Any) -> None:
    """One chunk of 2^40 layers; the file has a few kilobytes."""
    name = "decoder.layers.mlp.linear_fc2.weight"
    entry = metadata.state_dict_metadata[name]
    entry.size = torch.Size((1 << 40, *entry.size[1:]))
    entry.chunks[0].sizes = entry.size


def _all_in_one_place(metadata: Any) -> None:
    for info in metadata.storage_data.values():
        info.offset, info.length = 0, 40_000


@pytest.mark.usefixtures("is_small")
@pytest.mark.parametrize("change", [_in_a_tuple, _of_many_layers, _all_in_one_place])
def test_an_index_promises_no_more_than_its_files_have(tmp_path: Path, change: Any) -> None:
    path = write(tmp_path, weights())
    changed_index(path, change)
    with pytest.raises(DamagedError) as caught:
        TorchDistFolder(path)
    assert len(str(caught.value)) < 1000
