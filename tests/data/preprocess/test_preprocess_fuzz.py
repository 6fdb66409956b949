"""Random inputs of valid, unusual and broken lines, compared with a simple reference implementation.

`python tests/data/preprocess/test_preprocess_fuzz.py 2000` runs 2000 inputs.
"""

from __future__ import annotations

import itertools
import json
import random
import sys
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest
from everyday import one_in

sys.path.insert(0, str(Path(__file__).parents[1]))
from preprocessing import NULL, run

from megatrain.data.indexed.reader import IndexedDataset

EOD = 99
WORDS = ["1", "98", "7 7", "", " ", "0 5 9", "12\n3", "4\t4"]
BROKEN_TEXTS = ["100", "-1", "x", "1.5", "\ud800", "é"]
ODD_VALUES = [None, 5, 1.5, True, {"a": "1"}, ["1", 2], [["1"]], [None]]
BROKEN_LINES = [
    b"",
    b"   ",
    b"{",
    b"[]",
    b'"1"',
    b"null",
    b"{}",
    b'{"text": "1"',
    b'{"text": "\xff"}',
    b'{"text": "a\x00"}',
    b"\xef\xbb\xbf{}",
    b"\x85",
    b'{"text": "1"} x',
]


def a_line(rng: random.Random) -> bytes:
    """Return a random line without its line feed."""
    kind = rng.random()
    if kind < 0.1:
        return rng.choice(BROKEN_LINES)
    values = [rng.choice(WORDS) for _ in range(rng.choice([1, 1, 1, 0, 2, 3]))]
    if kind < 0.15:
        values.append(rng.choice(BROKEN_TEXTS))
    value = (
        rng.choice(ODD_VALUES)
        if kind > 0.93
        else values[0]
        if len(values) == 1 and rng.random() < 0.9
        else values
    )
    pairs = [(rng.choice(["text", "id", "text"]), value) for _ in range(rng.choice([1, 1, 2]))]
    pairs += [("id", rng.choice(WORDS))] * rng.choice([0, 1, 1, 1, 1])
    rng.shuffle(pairs)
    fields = ", ".join(f"{json.dumps(key)}: {json.dumps(item, ensure_ascii=True)}" for key, item in pairs)
    blank = rng.choice(["", "", " ", "\t"])
    return f"{blank}{{{fields}}}{blank}".encode() + b"x" * (rng.random() < 0.01)


def a_file(rng: random.Random) -> bytes:
    lines = [a_line(rng) for _ in range(rng.choice([0, 1, 2, 5, 20, 60]))]
    ends = [b"\n", b"\r\n"] if rng.random() < 0.2 else [b"\n"]
    content = b"".join(line + rng.choice(ends) for line in lines)
    return content.removesuffix(b"\n") if rng.random() < 0.3 else content


def reference(
    contents: list[bytes], keys: list[str], append_eod: bool
) -> tuple[list[list[list[list[int]]]], int]:
    """Return the documents of each key, each a list of sequences, and the number of bad lines."""
    documents: list[list[list[list[int]]]] = [[] for _ in keys]
    num_bad = 0
    for content in contents:
        lines = content.split(b"\n")
        for line in lines[:-1] if not lines[-1] else lines:
            try:
                row = json.loads(line.decode("utf-8"))
                found = [ids_of(row[key]) for key in keys]
            except (ValueError, KeyError, TypeError):
                num_bad += 1
                continue
            for document, sequences in zip(documents, found, strict=True):
                kept = [sequence for sequence in sequences if sequence]
                if kept and append_eod:
                    kept[-1] = [*kept[-1], EOD]
                document.append(kept)
    return documents, num_bad


def ids_of(value: object) -> list[list[int]]:
    texts = value if isinstance(value, list) else [value]
    sequences = []
    for text in texts:
        if not isinstance(text, str):
            raise TypeError
        ids = [int(word) for word in text.split()]
        if any(not 0 <= number < 100 for number in ids):
            raise ValueError
        text.encode()
        sequences.append(ids)
    return sequences


def check(folder: Path, seed: int) -> None:
    """Write an input, run the command, and compare the result."""
    rng = random.Random(seed)
    contents = [a_file(rng) for _ in range(rng.choice([1, 1, 2]))]
    paths = [folder / f"{seed}-{number}.jsonl" for number in range(len(contents))]
    for path, content in zip(paths, contents, strict=True):
        path.write_bytes(content)
    keys = rng.choice([["text"], ["text", "id"]])
    append_eod = rng.random() < 0.5
    documents, num_bad = reference(contents, keys, append_eod)
    policy = rng.choice(["stop", "skip", "quarantine"])
    arguments = [
        "--input",
        *paths,
        *NULL,
        "--json-keys",
        *keys,
        "--on-bad-line",
        policy,
        *["--append-eod"] * append_eod,
    ]
    prefix = folder / str(seed)
    code = run(*arguments, prefix=prefix, chunk_bytes=rng.choice([1, 50, 1 << 20]))
    has_no_tokens = not all(any(map(len, itertools.chain(*expected))) for expected in documents)
    if (policy == "stop" and num_bad) or has_no_tokens:
        assert code == 2
        assert not list(folder.glob(f"{seed}_*"))
        return
    assert code == 0
    for key, expected in zip(keys, documents, strict=True):
        dataset = IndexedDataset(f"{prefix}_{key}_document")
        boundaries = dataset.document_boundaries.tolist()
        found = [
            [dataset.read(number).tolist() for number in range(start, end)]
            for start, end in itertools.pairwise(boundaries)
        ]
        assert found == expected
        assert json.loads(Path(f"{dataset.prefix}.json").read_text())["skipped_lines"] == num_bad
    quarantine = Path(f"{prefix}.bad_lines.jsonl")
    quarantined = quarantine.read_bytes().splitlines() if quarantine.exists() else []
    assert len(quarantined) == (num_bad if policy == "quarantine" else 0)


@pytest.mark.usefixtures("without_fsync")
@pytest.mark.parametrize("hundred", one_in(10, range(10)))
def test_random_inputs(tmp_path, hundred):
    for seed in range(100 * hundred, 100 * hundred + 100):
        check(tmp_path, seed)


if __name__ == "__main__":
    with TemporaryDirectory() as name:
        for number in range(int(sys.argv[1])):
            check(Path(name), number)
