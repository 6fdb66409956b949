"""Damaged .bin and .idx pairs: each is an error with file, field and remedy, or reads as it is stored.

Three checks protect a run: opening compares both files, `inspect_datasets` compares them with their description and the
tokenizer, and reading checks every id against the vocabulary. Damage that passes all three is listed here, too.
"""

from __future__ import annotations

import json
import os
import re
import struct
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from damaged_pairs import (
    BOUNDARIES,
    BOUNDARY_0,
    CODE,
    FINGERPRINT,
    LENGTH_0,
    NUM_BOUNDARIES,
    NUM_SEQUENCES,
    OFFSET_0,
    SEQUENCES,
    VERSION,
    VOCAB,
    all_tokens,
    bin_,
    describe,
    idx,
    patch,
    problems_of,
    train_samples,
    write_pair,
)
from preprocessing import NULL, numbers, run
from recorded import write_dataset

from megatrain.config.derive.datasets import Blend
from megatrain.config.errors import InputError
from megatrain.config.facts import Facts, StoredRun
from megatrain.config.subjects.resume import data_matches_checkpoint
from megatrain.data.indexed.reader import IndexedDataset
from megatrain.data.samples.sources import inspect_datasets, open_token_ids

pytestmark = pytest.mark.usefixtures("ends_soon")

LAST = NUM_SEQUENCES - 1


@pytest.fixture
def prefix(tmp_path):
    return write_pair(tmp_path / "data")


def grow(path_of, change):
    """Return a function that shortens or lengthens a file of the pair."""

    def damage(prefix):
        content = path_of(prefix).read_bytes()
        path_of(prefix).write_bytes(content[:change] if change < 0 else content + bytes(change))

    return damage


def take_from_another(path_of, **options):
    """Return a function that replaces a file by that of another dataset."""

    def damage(prefix):
        other = write_dataset(prefix.with_name("other"), [[[1, 2, 3]], [[4], [5]]], **options)
        path_of(prefix).write_bytes(path_of(other.prefix).read_bytes())

    return damage


def swap(position, kind):
    """Return a function that swaps two adjacent numbers of an .idx."""

    def damage(prefix):
        size = struct.calcsize(kind)
        first, second = struct.unpack_from(f"<2{kind}", idx(prefix).read_bytes(), position)
        assert first != second
        assert size
        patch(position, kind, second, first)(prefix)

    return damage


def replace_by(make):
    """Return a function that replaces both files by something else."""

    def damage(prefix):
        for path in (bin_(prefix), idx(prefix)):
            path.unlink()
            make(path)

    return damage


def big_endian_index(prefix):
    content = idx(prefix).read_bytes()
    version, code, sequences, boundaries = struct.unpack_from("<QBQQ", content, VERSION)
    header = struct.pack(">QBQQ", version, code, sequences, boundaries)
    idx(prefix).write_bytes(content[:VERSION] + header + content[LENGTH_0:])


SIZES = r"data\.bin: the file has \d+ bytes, but its \.idx counts \d+"
CASES = {
    ".bin short": (grow(bin_, -2), SIZES),
    ".bin short by half an id": (grow(bin_, -1), SIZES),
    ".bin long": (grow(bin_, 2), SIZES),
    ".bin empty": (lambda prefix: bin_(prefix).write_bytes(b""), SIZES),
    ".bin missing": (lambda prefix: bin_(prefix).unlink(), r"data\.bin: there is no such file"),
    ".bin of another dataset": (take_from_another(bin_), SIZES),
    ".idx of another dataset": (take_from_another(idx), SIZES),
    ".idx missing": (lambda prefix: idx(prefix).unlink(), r"data\.idx: there is no such file"),
    ".idx empty": (lambda prefix: idx(prefix).write_bytes(b""), r"data\.idx: magic is b''"),
    ".idx short": (grow(idx, -8), r"data\.idx: the file has \d+ bytes, but its counts"),
    ".idx long": (grow(idx, 8), r"data\.idx: the file has \d+ bytes, but its counts"),
    ".idx bad magic": (patch(0, "B", 0), r"data\.idx: magic is"),
    ".idx bad version": (patch(VERSION, "Q", 2), r"data\.idx: version is 2"),
    ".idx bad dtype code": (patch(CODE, "B", 99), r"data\.idx: element type code is 99"),
    "negative length": (patch(LENGTH_0 + 4, "i", -3), r"data\.idx: length of sequence 1 is -3"),
    "pointer past end": (patch(OFFSET_0 + 8 * LAST, "q", 10**9), rf"data\.idx: offset of sequence {LAST} is 1000000000"),
    "pointers unsorted": (swap(OFFSET_0 + 8 * 3, "q"), r"data\.idx: offset of sequence 3 is"),
    "documents unsorted": (swap(BOUNDARY_0 + 8 * 2, "q"), r"data\.idx: document boundary \d is \d, less than \d"),
    "last document short": (
        patch(BOUNDARY_0 + 8 * (NUM_BOUNDARIES - 1), "q", LAST),
        rf"data\.idx: document boundaries run from 0 to {LAST}, not from 0 to {NUM_SEQUENCES}",
    ),
    "2^63 sequences": (patch(SEQUENCES, "Q", 2**63), r"data\.idx: .* 9223372036854775808 sequences"),
    "2^63 documents": (patch(BOUNDARIES, "Q", 2**63), r"data\.idx: .* 9223372036854775808 document boundaries"),
    "both counts 2^63": (patch(SEQUENCES, "Q", 2**63, 2**63), r"data\.idx: .* 9223372036854775808 sequences"),
    "dtype swap to a wider one": (patch(CODE, "B", 4), r"data\.idx: offset of sequence 1 is"),
    "dtype swap to a narrower one": (patch(CODE, "B", 1), r"data\.idx: offset of sequence 1 is"),
    "big-endian .idx": (big_endian_index, r"data\.idx: version is 72057594037927936"),
    "tokenizer fingerprint differs": (
        lambda prefix: describe(prefix, tokenizer_type="TikTokenizer", tokenizer_fingerprint="abcd" * 16),
        r"data\.bin .*TikTokenizer, fingerprint abcdabcdabcd.* --tokenizer-model",
    ),
    "id >= vocab, by the description": (
        lambda prefix: describe(prefix, largest_id=VOCAB),
        rf"data\.bin .*id {VOCAB}, outside the vocabulary of {VOCAB}",
    ),
    "directories": (replace_by(Path.mkdir), r"data\.bin: "),
    "FIFOs": (replace_by(os.mkfifo), r"data\.bin: "),
    "broken links": (replace_by(lambda path: path.symlink_to("nowhere")), r"data\.bin: "),
}  # fmt: skip


@pytest.mark.parametrize("name", CASES)
def test_a_damaged_pair_is_an_error_before_the_start(prefix, name):
    assert problems_of(prefix) == ""
    damage, pattern = CASES[name]
    damage(prefix)
    found = problems_of(prefix)
    assert re.search(pattern, found, re.DOTALL), found
    assert found.count("fix: ") == 1


@pytest.mark.parametrize("mmap", [True, False], ids=["mapped", "read"])
@pytest.mark.parametrize(
    "name", [name for name in CASES if "tokenizer" not in name and "description" not in name]
)
def test_a_damaged_pair_does_not_open(prefix, name, mmap):
    damage, pattern = CASES[name]
    damage(prefix)
    with pytest.raises(InputError, match=pattern):
        open_token_ids(str(prefix), mmap=mmap)


@pytest.mark.parametrize("suffix", [".bin", ".idx"])
def test_a_prefix_with_a_suffix_is_an_error(prefix, suffix):
    assert f"give the path without its suffix: {prefix}" in problems_of(f"{prefix}{suffix}")


def test_elements_that_are_not_integers_are_reported(tmp_path):
    write_dataset(tmp_path / "data", [[[1.0, 2.0]]], "float32")
    assert "elements are float32" in problems_of(tmp_path / "data")


@pytest.mark.skipif(os.geteuid() == 0, reason="root reads everything")
@pytest.mark.parametrize("path_of", [bin_, idx], ids=["bin", "idx"])
def test_a_file_without_read_permission_is_reported(prefix, path_of):
    path_of(prefix).chmod(0)
    assert re.search(r"data.*: .*Permission denied\n  fix: ", problems_of(prefix))


@pytest.mark.parametrize("path", ["x" * 300, "y/" * 3000], ids=["name", "path"])
def test_a_path_that_is_too_long_is_reported(path):
    assert re.search(r"File name too long\n  fix: |there is no such file", problems_of(path))


def test_a_disk_error_is_reported(prefix, monkeypatch):
    def fail(*_arguments, **_options):
        raise OSError(5, "Input/output error")

    monkeypatch.setattr(np, "memmap", fail)
    monkeypatch.setattr(np, "fromfile", fail)
    assert re.search(r"data\.(idx|bin).*Input/output error\n  fix: ", problems_of(prefix))


DESCRIPTIONS = {
    "not JSON": (b"{", "Expecting property name"),
    "empty": (b"", "Expecting value"),
    "truncated": (b'{"tokenizer_type": "Bert', "Unterminated string"),
    "not UTF-8": (b"\xff\xfe{}", "utf-8"),
    "too deep": (b"[" * 100_000, "maximum recursion depth"),
    "a list": (b"[]", "JSON object"),
    "null": (b"null", "JSON object"),
    "type of a number": (b'{"tokenizer_type": 3}', "tokenizer_type is 3 "),
    "fingerprint of a list": (b'{"tokenizer_fingerprint": []}', r"tokenizer_fingerprint is \[\] "),
    "size of text": (b'{"vocab_size": "3"}', "vocab_size is '3' "),
    "largest id of a fraction": (b'{"largest_id": 3.5}', "largest_id is 3.5 "),
    "largest id of a flag": (b'{"largest_id": true}', "largest_id is True "),
    "largest id below 0": (b'{"largest_id": -1}', "largest_id is -1 "),
    "of another dataset": (b'{"tokens": 5}', r"tokens is 5, .*data\.idx counts \d+"),
    "of another cut": (b'{"sequences": 5}', r"sequences is 5, .*data\.idx counts 12"),
}  # fmt: skip


@pytest.mark.parametrize("name", DESCRIPTIONS)
def test_a_damaged_description_is_reported(prefix, name):
    content, pattern = DESCRIPTIONS[name]
    Path(f"{prefix}.json").write_bytes(content)
    assert re.search(rf"data\.json: .*{pattern}.*\n  fix: .*without a description", problems_of(prefix))


@pytest.mark.parametrize(
    "make", [Path.mkdir, os.mkfifo, lambda path: path.symlink_to("nowhere")], ids=["dir", "FIFO", "link"]
)
def test_a_description_that_is_not_a_file_is_reported(prefix, make):
    path = Path(f"{prefix}.json")
    path.unlink()
    make(path)
    assert re.search(r"data\.json: is not a file\n  fix: ", problems_of(prefix))


def test_a_description_may_be_empty_or_missing(prefix):
    describe(
        prefix, tokenizer_type=None, tokenizer_fingerprint=None, vocab_size=None, tokens=None, largest_id=None
    )
    assert problems_of(prefix) == ""
    Path(f"{prefix}.json").unlink()
    assert problems_of(prefix) == ""


def test_a_null_tokenizer_accepts_any_data(prefix):
    assert problems_of(prefix, fingerprint=None) == ""
    assert "another tokenizer" in problems_of(prefix, fingerprint=FINGERPRINT[::-1])


def overwrite(prefix, values, dtype="<u2"):
    bin_(prefix).write_bytes(np.asarray(values, dtype).tobytes())


def stored_ids(prefix):
    return np.fromfile(bin_(prefix), "<u2")


def put_id_at_7(value):
    def damage(prefix):
        ids = stored_ids(prefix)
        ids[7] = value
        overwrite(prefix, ids)

    return damage


def as_signed(prefix):
    put_id_at_7(65535)(prefix)
    patch(CODE, "B", 3)(prefix)  # the same width, so that all sizes agree


BEYOND = rf"data\.bin: document 0 \(sequence 1, token 2\) has id {VOCAB}, outside the vocabulary of {VOCAB}"
READ_CASES = {
    "id >= vocab, undescribed": (put_id_at_7(VOCAB), BEYOND),
    "big-endian .bin": (lambda prefix: overwrite(prefix, stored_ids(prefix), ">u2"), "outside the vocabulary"),
    "dtype swap to one as wide": (as_signed, r"data\.bin: .* has id -1, outside the vocabulary"),
    ".bin of another dataset, as large": (
        lambda prefix: overwrite(prefix, stored_ids(prefix) + VOCAB), "outside the vocabulary"
    ),
}  # fmt: skip


@pytest.mark.parametrize("mmap", [True, False], ids=["mapped", "read"])
@pytest.mark.parametrize("name", READ_CASES)
def test_ids_outside_the_vocabulary_are_errors_when_they_are_read(prefix, name, mmap):
    damage, pattern = READ_CASES[name]
    damage(prefix)
    assert problems_of(prefix) == "", "all sizes agree: only reading finds it"
    samples = train_samples(prefix, mmap=mmap)
    with pytest.raises(
        InputError, match=f"{pattern}.*\n  fix: use the tokenizer that the data was made with"
    ):
        all_tokens(samples)


def facts_of(prefix):
    facts, problems = inspect_datasets(
        {"all": Blend((str(prefix),))}, vocab_size=VOCAB, tokenizer_fingerprint=FINGERPRINT
    )
    assert not problems
    return tuple(facts)


def problems_on_resume(before, now):
    config = SimpleNamespace(training=SimpleNamespace(only_evaluates=False))
    stored = StoredRun(path="c", iteration=1, consumed_train_samples=8, config={}, datasets=before)
    draft = SimpleNamespace(
        config=config,
        derived=SimpleNamespace(train_start=0),
        facts=Facts(checkpoint=stored, datasets=now),
    )
    return [str(problem) for problem in data_matches_checkpoint(draft)]


def test_another_dataset_of_equal_sizes_is_found_on_resume_by_its_digest(prefix, tmp_path):
    before = facts_of(prefix)
    other = write_pair(tmp_path / "other", seed=1)
    assert bin_(other).stat().st_size == bin_(prefix).stat().st_size
    bin_(prefix).write_bytes(bin_(other).read_bytes())
    now = facts_of(prefix)
    assert (now[0].num_sequences, now[0].num_tokens) == (before[0].num_sequences, before[0].num_tokens)
    (problem,) = problems_on_resume(before, now)
    assert re.search(r"data .*checkpoint.*\n  fix: ", problem, re.DOTALL)
    assert problems_on_resume(now, facts_of(other)) == [], "the same dataset under another path"


def test_another_dataset_of_equal_sizes_and_ids_is_read_as_it_is(prefix, tmp_path):
    """A new run cannot know that other ids were meant; it must read the stored ones."""
    other = write_pair(tmp_path / "other", seed=1)
    bin_(prefix).write_bytes(bin_(other).read_bytes())
    assert all_tokens(train_samples(prefix)) == all_tokens(train_samples(other))


def test_changed_lengths_are_found_on_resume(prefix):
    """An .idx with other sequence boundaries that still agrees with the size of the .bin."""
    before = facts_of(prefix)
    lengths = IndexedDataset(prefix).lengths.copy()
    lengths[0] += 1
    lengths[1] -= 1
    patch(LENGTH_0, "i", *lengths.tolist())(prefix)
    patch(OFFSET_0, "q", *(2 * (np.cumsum(lengths) - lengths)).tolist())(prefix)
    assert problems_of(prefix) == ""
    assert problems_on_resume(before, facts_of(prefix))


def test_an_empty_dataset_opens_and_has_no_samples(tmp_path):
    write_dataset(tmp_path / "data", [])
    assert problems_of(tmp_path / "data") == ""
    assert len(open_token_ids(str(tmp_path / "data"))) == 0


def test_a_description_of_preprocessing_is_accepted(prefix):
    dataset = IndexedDataset(prefix)
    content = {"tokenizer_fingerprint": FINGERPRINT, "sequences": len(dataset), "tokens": dataset.num_tokens}
    Path(f"{prefix}.json").write_text(
        json.dumps({**content, "largest_id": VOCAB - 1, "sources": [{"path": "x"}]})
    )
    assert problems_of(prefix) == ""


def test_a_file_of_documents_is_made_into_a_pair(tmp_path):
    """The fix, applied: what preprocess_data.py writes is a dataset."""
    documents = numbers(tmp_path / "a.jsonl", ["1 2 3", "4 5"])
    found = problems_of(documents)
    prefix = tmp_path / "a"
    assert f"preprocess_data.py --input {documents} --output-prefix {prefix} " in found
    assert run("--input", documents, *NULL, prefix=prefix) == 0
    assert f"{prefix}_text_document, " in found
    assert len(open_token_ids(f"{prefix}_text_document", mmap=True)) == 2
