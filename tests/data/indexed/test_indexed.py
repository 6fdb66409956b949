"""Indexed files: recorded files are read exactly, and damaged files are errors with the reason."""

from __future__ import annotations

import os
import struct
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from recorded import GOLDEN, check_array, digest

from megatrain.config.errors import InputError
from megatrain.data.indexed.reader import IndexedDataset
from megatrain.data.indexed.writer import IndexedWriter, token_dtype

if TYPE_CHECKING:
    from collections.abc import Callable

WITHOUT_TEXT = [f"dtypes/{path.stem}" for path in sorted((GOLDEN / "dtypes").glob("*.idx"))] + ["modes_int32"]
WITH_TEXT = ["corpus_text_document", "paragraphs_text_document", "multi_int32"]


def check_reads(dataset, recorded):
    for read in recorded["reads"]:
        sequence = dataset.read(read["sequence"])
        assert len(sequence) == read["length"]
        if "values" in read:
            assert sequence.tolist() == read["values"]
        else:
            assert digest(sequence) == read["sha256"]
            assert sequence[:8].tolist() == read["first"]
        if "get" in read:
            offset, length = read["get"]["offset"], read["get"]["length"]
            assert digest(dataset.read(read["sequence"], offset, length)) == read["get"]["sha256"]
            assert digest(dataset.read(read["sequence"], offset)) == read["get"]["tail_sha256"]
        if "mode" in read:
            assert dataset.modes[read["sequence"]] == read["mode"]


def check_dataset(dataset, recorded):
    assert dataset.dtype.name == recorded["dtype"]
    assert len(dataset) == recorded["num_sequences"]
    assert dataset.num_documents == recorded["num_documents"]
    assert dataset.num_tokens == recorded["num_tokens"]
    check_array(dataset.lengths, recorded["sequence_lengths"])
    check_array(dataset.offsets, recorded["sequence_pointers"])
    check_array(dataset.document_boundaries, recorded["document_indices"])
    assert (None if dataset.modes is None else dataset.modes.tolist()) == recorded.get("sequence_modes")
    check_reads(dataset, recorded)


@pytest.mark.parametrize("mmap", [True, False])
@pytest.mark.parametrize("name", WITHOUT_TEXT)
def test_reads_recorded_files(golden, expected, name, mmap):
    check_dataset(IndexedDataset(golden / name, mmap=mmap), expected["indexed"][name])


@pytest.mark.parametrize("mmap", [True, False])
@pytest.mark.parametrize("name", WITH_TEXT)
def test_reads_recorded_text(golden_text, expected, name, mmap):
    check_dataset(IndexedDataset(golden_text / name, mmap=mmap), expected["indexed"][name])


def test_writes_recorded_files(golden_text, tmp_path):
    for name in [*WITHOUT_TEXT, *WITH_TEXT]:
        source = IndexedDataset(golden_text / name)
        with IndexedWriter(tmp_path / "copy", source.dtype) as writer:
            for start, end in zip(
                source.document_boundaries[:-1], source.document_boundaries[1:], strict=True
            ):
                modes = None if source.modes is None else source.modes[start:end].tolist()
                writer.add_document([source.read(number) for number in range(start, end)], modes)
        for suffix in (".bin", ".idx"):
            assert (tmp_path / f"copy{suffix}").read_bytes() == Path(
                f"{golden_text / name}{suffix}"
            ).read_bytes()


@settings(max_examples=60)
@given(st.lists(st.lists(st.lists(st.integers(-(2**31), 2**31 - 1), max_size=5), max_size=4), max_size=6))
def test_any_documents_are_read_back(tmp_path_factory, documents):
    prefix = tmp_path_factory.mktemp("any") / "data"
    with IndexedWriter(prefix, "int32") as writer:
        for document in documents:
            writer.add_document(document)
    dataset = IndexedDataset(prefix)
    sequences = [sequence for document in documents for sequence in document]
    owners = [number for number, document in enumerate(documents) for _ in document]
    assert [dataset.read(number).tolist() for number in range(len(dataset))] == sequences
    assert [dataset.document_of(number) for number in range(len(dataset))] == owners
    assert np.diff(dataset.document_boundaries).tolist() == [len(document) for document in documents]


@pytest.fixture
def prefix(tmp_path):
    with IndexedWriter(tmp_path / "data", "uint16") as writer:
        writer.add_document([[1, 2, 3], [4]])
        writer.add_document([[5, 6]])
    return tmp_path / "data"


def patch_index(prefix: Path, position: int, kind: str, value: int) -> None:
    path = Path(f"{prefix}.idx")
    content = bytearray(path.read_bytes())
    struct.pack_into(kind, content, position, value)
    path.write_bytes(content)


def cut(suffix: str, change: int) -> Callable[[Path], None]:
    """Return a function that shortens or lengthens a file."""

    def damage(prefix: Path) -> None:
        path = Path(f"{prefix}{suffix}")
        content = path.read_bytes()
        path.write_bytes(content[:change] if change < 0 else content + b"\0" * change)

    return damage


def patch(position: int, kind: str, value: int) -> Callable[[Path], None]:
    return lambda prefix: patch_index(prefix, position, kind, value)


LENGTHS, OFFSETS, BOUNDARIES = 34, 34 + 4 * 3, 34 + 12 * 3
DAMAGES: dict[str, tuple[Callable[[Path], None], str]] = {
    "magic": (patch(0, "<B", 0), r"data.idx: magic is "),
    "empty index": (lambda prefix: Path(f"{prefix}.idx").write_bytes(b""), r"data.idx: magic is b''"),
    "header cut": (
        lambda prefix: Path(f"{prefix}.idx").write_bytes(b"MMIDIDX\0\0abc"),
        "ends after 12 of 34 bytes",
    ),
    "version": (patch(9, "<Q", 2), r"data.idx: version is 2"),
    "type code 0": (patch(17, "<B", 0), r"type code is 0; .*1 uint8"),
    "type code 9": (patch(17, "<B", 9), r"type code is 9"),
    "other type": (patch(17, "<B", 4), r"data.idx: offset of sequence 1 is 6"),
    "one sequence more": (patch(18, "<Q", 4), r"data.idx: the file has 94 bytes.* 4 sequences"),
    "2^63 sequences": (patch(18, "<Q", 2**63), r"9223372036854775808 sequences"),
    "2^64 - 1 boundaries": (patch(26, "<Q", 2**64 - 1), r"18446744073709551615 document boundaries"),
    "no boundaries": (patch(26, "<Q", 0), r"document boundaries is 0"),
    "negative length": (patch(LENGTHS + 4, "<i", -1), r"length of sequence 1 is -1"),
    "longer sequence": (patch(LENGTHS, "<i", 4), r"offset of sequence 1 is 6; .* end at byte 8"),
    "longest last sequence": (patch(LENGTHS + 8, "<i", 2**31 - 1), r"data.bin: the file has 12 bytes"),
    "offset": (patch(OFFSETS + 16, "<q", 10), r"offset of sequence 2 is 10; .* end at byte 8"),
    "negative offset": (patch(OFFSETS, "<q", -2), r"offset of sequence 0 is -2"),
    "first boundary": (patch(BOUNDARIES, "<q", 1), r"boundaries run from 1 to 3"),
    "last boundary": (patch(BOUNDARIES + 16, "<q", 2), r"boundaries run from 0 to 2"),
    "decreasing boundary": (patch(BOUNDARIES + 8, "<q", 5), r"document boundary 2 is 3, .* 5"),
    "index cut": (
        cut(".idx", -1),
        r"data.idx: the file has 93 bytes, but its counts .* need 94 \(97 with modes\)",
    ),
    "index longer": (cut(".idx", 2), r"data.idx: the file has 96 bytes"),
    "bin cut": (
        cut(".bin", -1),
        r"data.bin: the file has 11 bytes, but its .idx counts 12 \(6 elements of uint16\)",
    ),
    "bin longer": (cut(".bin", 2), r"data.bin: the file has 14 bytes"),
    "bin empty": (lambda prefix: Path(f"{prefix}.bin").write_bytes(b""), r"data.bin: the file has 0 bytes"),
    "no bin": (
        lambda prefix: Path(f"{prefix}.bin").unlink(),
        r"data.bin: there is no such file\n  fix: copy both",
    ),
    "no index": (lambda prefix: Path(f"{prefix}.idx").unlink(), r"data.idx: there is no such file"),
}


@pytest.mark.parametrize("mmap", [True, False])
@pytest.mark.parametrize("damage", DAMAGES)
def test_damaged_files_are_errors(prefix, damage, mmap):
    change, pattern = DAMAGES[damage]
    IndexedDataset(prefix, mmap=mmap)
    change(prefix)
    with pytest.raises(InputError, match=pattern):
        IndexedDataset(prefix, mmap=mmap)


def test_every_byte_of_the_index_matters(prefix):
    path = Path(f"{prefix}.idx")
    content = path.read_bytes()
    for position in range(len(content)):
        path.write_bytes(content[:position] + bytes([content[position] ^ 0x40]) + content[position + 1 :])
        with pytest.raises(InputError, match=r"data\.(idx|bin): "):
            IndexedDataset(prefix)


def test_a_missing_dataset_names_similar_ones(prefix):
    with pytest.raises(
        InputError, match=r"dato.bin: there is no such file \(nor .idx\)\n  fix: .* contains data"
    ):
        IndexedDataset(prefix.with_name("dato"))
    with pytest.raises(InputError, match="without its suffix"):
        IndexedDataset(f"{prefix}.bin")
    with pytest.raises(InputError, match="deeper does not exist"):
        IndexedDataset(prefix / "deeper" / "data")
    (prefix.parent / "bare").mkdir()
    with pytest.raises(InputError, match=r"fix: give the prefix .* preprocess_data\.py"):
        IndexedDataset(prefix.parent / "bare" / "data")


def test_reads_outside_a_sequence_are_errors(prefix):
    dataset = IndexedDataset(prefix)
    for arguments in [(3,), (-1,), (0, 4), (0, -1), (0, 1, 3), (0, 0, -1)]:
        with pytest.raises(IndexError):
            dataset.read(*arguments)


@pytest.mark.parametrize("mmap", [True, False])
def test_a_file_that_shrinks_while_open_is_an_error(prefix, mmap):
    dataset = IndexedDataset(prefix, mmap=mmap)
    os.truncate(f"{prefix}.bin", 4)
    with pytest.raises(InputError, match=r"ends at byte 4; .*truncated"):
        dataset.read(0)


def write_and_fail(prefix):
    with IndexedWriter(prefix, "int32") as writer:
        writer.add_document([[1]])
        raise RuntimeError


def test_an_error_leaves_the_old_files_and_no_new_ones(prefix):
    before = {path.name: path.read_bytes() for path in prefix.parent.iterdir()}
    with pytest.raises(RuntimeError):
        write_and_fail(prefix)
    assert {path.name: path.read_bytes() for path in prefix.parent.iterdir()} == before


def test_a_failure_during_the_renames_leaves_no_mixed_dataset(prefix, monkeypatch):
    real = Path.replace

    def fail_on_index(self, target):
        if str(target).endswith(".idx"):
            raise OSError(28, "No space left on device")
        return real(self, target)

    monkeypatch.setattr(Path, "replace", fail_on_index)
    with pytest.raises(OSError, match="No space"), IndexedWriter(prefix, "int32") as writer:
        writer.add_document([[1]])
    assert [path.name for path in prefix.parent.iterdir()] == ["data.bin"]
    with pytest.raises(InputError, match=r"data\.idx: there is no such file"):
        IndexedDataset(prefix)


def test_ids_that_do_not_fit_are_errors(tmp_path):
    for value in (65536, -1):
        with (
            pytest.raises(InputError, match=f"id {value} does not fit.*uint16"),
            IndexedWriter(tmp_path / "d", "u2") as writer,
        ):
            writer.add_document([[1, value]])
    assert not list(tmp_path.iterdir())


def test_a_missing_folder_is_created_and_an_impossible_one_is_an_error(tmp_path):
    with IndexedWriter(tmp_path / "new" / "data", "u2"):
        pass
    assert (tmp_path / "new" / "data.idx").exists()
    (tmp_path / "no").write_text("a file")
    with pytest.raises(InputError, match="cannot be written"), IndexedWriter(tmp_path / "no" / "data", "u2"):
        pass


def test_element_type_follows_the_vocabulary(expected):
    for case in expected["tokenizers"]["optimal_dtype"]:
        assert token_dtype(case["vocab_size"]).name == case["dtype"]
