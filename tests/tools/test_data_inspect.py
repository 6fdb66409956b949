"""`megatrain data inspect`, `megatrain data merge`, and their command lines."""

from __future__ import annotations

import json
import subprocess
import sys
import zlib
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from megatrain.data.indexed.reader import IndexedDataset
from megatrain.data.indexed.writer import IndexedWriter
from megatrain.tools.data import counts, inspect
from megatrain.tools.data.counts import summary
from megatrain.tools.main import main

DOCUMENTS = [[[5, 6, 9]], [], [[7], [], [8, 5, 5, 9]], [[9]]]
COUNTS = {"documents": 4, "sequences": 5, "tokens": 9, "largest_id": 9, "eod_count": 3}
MADE_WITH = {"tokenizer_type": "NullTokenizer", "tokenizer_fingerprint": "abc", "vocab_size": 10, "eod": 9}
NULL_TOKENIZER = ["--tokenizer-type", "NullTokenizer", "--vocab-size", "10"]


@pytest.fixture
def prefix(tmp_path: Path) -> str:
    return write(tmp_path / "data")


def write(
    prefix: Path,
    documents: list[Any] = DOCUMENTS,
    *,
    dtype: str = "uint16",
    modes: list[Any] | None = None,
    description: dict[str, Any] | None = None,
) -> str:
    with IndexedWriter(prefix, dtype) as writer:
        for number, document in enumerate(documents):
            writer.add_document(document, None if modes is None else modes[number])
        writer.description = description
    return str(prefix)


def inspected(capsys: pytest.CaptureFixture[str], *arguments: str, code: int = 0) -> dict[str, Any]:
    assert main(["data", "inspect", *arguments, "--json"]) == code
    (line,) = capsys.readouterr().out.splitlines()
    found: dict[str, Any] = json.loads(line)
    return found


def test_a_dataset_is_counted(prefix: str, capsys: pytest.CaptureFixture[str]) -> None:
    found = inspected(capsys, prefix)
    assert found == {
        "prefix": prefix,
        "element_type": "uint16",
        "bytes": {"bin": 18, "idx": 34 + 12 * 5 + 8 * 5},
        "documents": 4,
        "documents_without_sequences": 1,
        "sequences": 5,
        "empty_sequences": 1,
        "tokens": 9,
        "modes": None,
        "sequence_lengths": {"min": 0, "median": 1, "mean": 1.8, "p95": 4, "max": 4},
        "document_lengths": {"min": 0, "median": 1, "mean": 2.25, "p95": 5, "max": 5},
        "sequences_per_document": {"min": 0, "median": 1, "mean": 1.25, "p95": 3, "max": 3},
        "bin_crc32": zlib.crc32(Path(f"{prefix}.bin").read_bytes()),
        "idx_crc32": zlib.crc32(Path(f"{prefix}.idx").read_bytes()),
        "smallest_id": 5,
        "largest_id": 9,
        "eod": None,
        "eod_count": None,
        "description": None,
        "problems": [],
    }


def test_a_tokenizer_gives_the_end_of_document_id(prefix: str, capsys: pytest.CaptureFixture[str]) -> None:
    found = inspected(capsys, *NULL_TOKENIZER, prefix, "--document", "2")
    assert (found["eod"], found["eod_count"]) == (9, 3)
    assert found["document"] == {
        "document": 2,
        "tokens": 5,
        "sequences": [
            {"sequence": 1, "mode": None, "ids": [7]},
            {"sequence": 2, "mode": None, "ids": []},
            {"sequence": 3, "mode": None, "ids": [8, 5, 5, 9]},
        ],
        "text": "7 8 5 5 9",
    }


def test_a_description_gives_the_end_of_document_id(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    prefix = write(tmp_path / "data", description={**MADE_WITH, **COUNTS})
    assert inspected(capsys, prefix)["eod_count"] == 3
    assert main(["data", "inspect", prefix]) == 0
    assert f"description  {prefix}.json, agrees with the files" in capsys.readouterr().out


def test_an_unrelated_json_file_is_not_a_description(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    prefix = write(tmp_path / "data")
    Path(f"{prefix}.json").write_text('{"hello": 1, "eod": "none", "sources": 3}')
    assert main(["data", "inspect", prefix]) == 0
    assert f"description  none: {prefix}.json is not a description" in capsys.readouterr().out


@pytest.mark.parametrize("name", COUNTS)
def test_a_wrong_description_is_an_error(
    name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    prefix = write(tmp_path / "data", description={**MADE_WITH, **COUNTS, "vocab_size": 100, name: 77})
    assert main(["data", "inspect", prefix]) == 1
    captured = capsys.readouterr()
    assert f"{prefix}.json: {name} is 77, but the files contain {COUNTS[name]}" in captured.err
    assert "see the error below" in captured.out


@pytest.mark.parametrize("suffix", ["bin", "idx"])
def test_a_flipped_bit_is_an_error(suffix: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    modes: list[Any] = [[0] * len(document) for document in DOCUMENTS]
    prefix = write(tmp_path / "data", modes=modes, description={**MADE_WITH, **COUNTS})
    assert main(["data", "inspect", prefix]) == 0
    path = Path(f"{prefix}.{suffix}")
    content = bytearray(path.read_bytes())
    content[2 if suffix == "bin" else -1] ^= 1
    path.write_bytes(content)
    capsys.readouterr()
    assert main(["data", "inspect", prefix]) == 1
    assert f"{prefix}.json: {suffix}_crc32 is " in capsys.readouterr().err


def test_a_vocabulary_that_is_too_small_is_an_error(prefix: str, capsys: pytest.CaptureFixture[str]) -> None:
    found = inspected(capsys, prefix, "--tokenizer-type", "NullTokenizer", "--vocab-size", "9", "--document", "0", code=1)  # fmt: skip
    assert found["problems"] == [f"{prefix}.bin: largest_id is 9, but vocab_size is 9"]
    assert found["document"]["text"] is None


def test_another_tokenizer_is_an_error(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    prefix = write(tmp_path / "data", description=MADE_WITH)
    assert main(["data", "inspect", prefix, *NULL_TOKENIZER]) == 1
    assert "tokenizer_fingerprint is abc, but" in capsys.readouterr().err


def test_elements_that_are_not_integers_are_shown(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    prefix = write(tmp_path / "floats", [[[0.5, 2.0]]], dtype="float32")
    found = inspected(capsys, prefix, "--document", "0")
    assert (found["element_type"], found["largest_id"]) == ("float32", None)
    assert found["document"]["sequences"][0]["ids"] == [0.5, 2.0]
    assert main(["data", "inspect", prefix]) == 0
    assert "ids          none: elements are not integers" in capsys.readouterr().out


def test_ids_below_zero_are_an_error(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    prefix = write(tmp_path / "data", [[[3, -4]]], dtype="int32")
    assert inspected(capsys, prefix, code=1)["problems"] == [f"{prefix}.bin: smallest_id is -4, below 0"]


def test_modes_are_counted(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    prefix = write(tmp_path / "data", [[[1], [2]], [[3]]], modes=[[0, 1], [-1]])
    assert inspected(capsys, prefix)["modes"] == {"0": 1, "1": 1, "-1": 1}
    assert main(["data", "inspect", prefix, "--document", "1"]) == 0
    printed = capsys.readouterr().out
    assert "modes        mode 0: 1, mode 1: 1, mode -1: 1" in printed
    assert "document 1: 1 tokens in one sequence\n  sequence 2, mode -1, 1 tokens: 3" in printed


def test_a_dataset_without_documents_is_inspected(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    prefix = write(tmp_path / "empty", [])
    found = inspected(capsys, prefix)
    assert (found["documents"], found["document_lengths"], found["smallest_id"]) == (0, None, None)
    assert main(["data", "inspect", prefix]) == 0
    assert "ids          none: there are no tokens" in capsys.readouterr().out
    described = write(tmp_path / "described", [], description={"eod": 9, "eod_count": 0})
    assert main(["data", "inspect", described]) == 0


def test_block_sizes_do_not_change_the_result(
    prefix: str, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    whole = inspected(capsys, prefix, *NULL_TOKENIZER)
    monkeypatch.setattr(counts, "ROWS", 2)
    monkeypatch.setattr(counts, "BLOCK_BYTES", 4)
    monkeypatch.setattr(counts, "BINS", 2)
    assert inspected(capsys, prefix, *NULL_TOKENIZER) == whole


def test_a_long_count_logs_its_progress(
    prefix: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(counts, "PROGRESS_SECONDS", 0)
    monkeypatch.setattr(counts, "BLOCK_BYTES", 10)
    assert main(["data", "inspect", prefix]) == 0
    assert capsys.readouterr().err == "56% of 9 tokens read\n100% of 9 tokens read\n"


def test_a_closed_pipe_ends_the_tool_quietly(prefix: str) -> None:
    command = (
        f"{sys.executable} -m megatrain.tools.main data inspect {prefix} | true; exit ${{PIPESTATUS[0]}}"
    )
    ended = subprocess.run(["bash", "-c", command], check=False, capture_output=True, text=True)
    assert (ended.returncode, ended.stderr) == (141, "")  # as after SIGPIPE: what it was to do is not done


@pytest.mark.parametrize("largest", [1, 300, 1 << 20, 1 << 41])
def test_quantiles_are_those_of_the_sorted_lengths(largest: int) -> None:
    random = np.random.default_rng(largest)
    lengths = random.integers(0, largest, 1001)
    found = summary(lambda: iter(np.split(lengths, [100, 400])))
    assert found is not None
    ordered = np.sort(lengths)
    assert (found.min, found.median, found.p95, found.max) == (*ordered[[0, 500, 950]], ordered[-1])
    assert found.mean == pytest.approx(lengths.mean())


def test_control_characters_are_escaped() -> None:
    assert inspect.printable("a\tb\n\x1b[31mé") == "    a\tb\n    \\x1b[31mé"


def test_long_documents_are_abbreviated() -> None:
    assert inspect.shown_ids(list(range(32))).count(" ") == 31
    assert inspect.shown_ids(list(range(99))).split()[14:18] == ["14", "15", "..", "83"]


def test_text_is_decoded_from_ids(golden_text: Path, capsys: pytest.CaptureFixture[str]) -> None:
    tokenizer = golden_text / "tokenizer.json"
    flags = ["--tokenizer-type", "HuggingFaceTokenizer", "--tokenizer-model", str(tokenizer)]
    found = inspected(capsys, str(golden_text / "corpus_text_document"), "--document", "5", *flags)
    line = (golden_text / "corpus.jsonl").read_text().splitlines()[5]
    assert found["document"]["text"].startswith(json.loads(line)["text"])
    assert (found["largest_id"], found["eod_count"]) == (2999, 321)


BROKEN = {
    "no file": (["inspect", "nowhere"], "nowhere.bin: there is no such file"),
    "document beyond the end": (["inspect", "PREFIX", "--document", "4"], "give a number from 0 to 3"),
    "tokenizer without its file": (
        ["inspect", "PREFIX", "--tokenizer-type", "HuggingFaceTokenizer"],
        "--tokenizer-model",
    ),
    "not a size": (
        ["inspect", "PREFIX", "--tokenizer-type", "NullTokenizer", "--vocab-size", "x"],
        "--vocab-size x ",
    ),
    "merge into itself": (
        ["merge", "PREFIX", "--output-prefix", "PREFIX"],
        "--output-prefix",
    ),
}


@pytest.mark.parametrize("name", BROKEN)
def test_an_error_has_a_remedy(name: str, prefix: str, capsys: pytest.CaptureFixture[str]) -> None:
    arguments, part = BROKEN[name]
    assert main(["data", *(word.replace("PREFIX", prefix) for word in arguments)]) == 2
    error = capsys.readouterr().err
    assert part in error
    assert "fix:" in error
    assert "Traceback" not in error


@pytest.mark.parametrize(
    ("arguments", "part"),
    [
        ([], "the following arguments are required: ACTION"),
        (["inspect", "a", "--documnet", "3"], "--document?"),
        (["inspect", "a", "--document", "x"], "fix: give --document a whole number"),
        (["sample", "--of", "train"], "the following arguments are required: --index"),
        (["merge", "a"], "the following arguments are required: --output-prefix"),
    ],
)
def test_an_invalid_command_line_is_an_error(
    arguments: list[str], part: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["data", *arguments]) == 2
    assert part in capsys.readouterr().err


def test_merge_concatenates_datasets(prefix: str, tmp_path: Path) -> None:
    assert main(["data", "merge", prefix, prefix, "--output-prefix", str(tmp_path / "both")]) == 0
    both = IndexedDataset(tmp_path / "both")
    assert both.lengths.tolist() == [3, 1, 0, 4, 1] * 2
