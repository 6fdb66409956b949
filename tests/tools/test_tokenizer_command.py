"""`megatrain tokenizer`: what it trains loads here and in transformers, and the comparison counts tokens."""

from __future__ import annotations

import itertools
import json
import re
from pathlib import Path

import pytest

from megatrain.config.schema.tokenizer import TokenizerConfig
from megatrain.data.tokenizers.build import load_tokenizer
from megatrain.tools.main import main

KINDS = ("byte-level", "bpe", "wordpiece", "unigram")
README = Path(__file__).parents[2] / "README.md"
TEXTS = [
    "the layout of the training run",
    *filter(str.strip, README.read_text(encoding="utf-8").splitlines()),
]


@pytest.fixture
def corpus(tmp_path: Path) -> Path:
    path = tmp_path / "corpus.jsonl"
    path.write_text("".join(json.dumps({"text": text}) + "\n" for text in TEXTS))
    return path


def train(corpus: Path, *more: str) -> int:
    folder = str(corpus.parent / "tokenizer")
    return main(
        ["tokenizer", "train", "--input", str(corpus), "--output", folder, "--vocab-size", "600", *more]
    )


@pytest.mark.parametrize("kind", KINDS)
def test_a_trained_tokenizer_loads(corpus: Path, kind: str) -> None:
    assert train(corpus, "--kind", kind, "--special-tokens", "<fim_prefix>") == 0
    folder = corpus.parent / "tokenizer"
    ours = load_tokenizer(TokenizerConfig(tokenizer_type="HuggingFaceTokenizer", tokenizer_model=str(folder)))
    assert (ours.eod, ours.note) == (0, None)
    assert len(ours.encode("<fim_prefix>")) == 1
    ids = ours.encode(TEXTS[0])
    assert len(ids) < len(TEXTS[0]) / 2
    if kind == "wordpiece":
        lines = (folder / "vocab.txt").read_text().splitlines()
        assert [lines[number] for number in ours.encode("[MASK] the")] == ["[MASK]", "the"]
    else:
        assert ours.decode(ids) == TEXTS[0]
    if kind == "byte-level":
        assert ours.decode(ours.encode("naïve 🙂\n")) == "naïve 🙂\n"


@pytest.mark.nightly  # the import takes seconds
@pytest.mark.parametrize("kind", KINDS)
def test_transformers_reads_the_files(corpus: Path, kind: str) -> None:
    transformers = pytest.importorskip("transformers")
    assert train(corpus, "--kind", kind) == 0
    folder = str(corpus.parent / "tokenizer")
    ours = load_tokenizer(TokenizerConfig(tokenizer_type="HuggingFaceTokenizer", tokenizer_model=folder))
    theirs = transformers.AutoTokenizer.from_pretrained(folder)
    assert theirs(TEXTS[0], add_special_tokens=False)["input_ids"] == ours.encode(TEXTS[0])
    assert theirs.eos_token == "<|endoftext|>"


def test_dirty_lines_are_named_or_skipped(corpus: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with corpus.open("a") as file:
        file.write('{"text": 3}\nnot JSON\n')
    assert train(corpus) == 2
    error = capsys.readouterr().err
    assert re.search(
        rf"error: {corpus}:{len(TEXTS) + 1}: .*\n  {corpus}:{len(TEXTS) + 2}: not .*\n  2 bad lines in all",
        error,
    )
    assert not (corpus.parent / "tokenizer").exists()
    assert train(corpus, "--on-bad-line", "skip") == 0
    assert f"skipped: {corpus}:{len(TEXTS) + 1}" in capsys.readouterr().err


def test_tokenizers_are_compared_by_tokens_per_byte(corpus: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert train(corpus) == 0
    folder = str(corpus.parent / "tokenizer")
    capsys.readouterr()
    assert main(["tokenizer", "compare", "--input", str(corpus), "--max-mb", "0.001", folder]) == 0
    ours = load_tokenizer(TokenizerConfig(tokenizer_type="HuggingFaceTokenizer", tokenizer_model=folder))
    sizes = [len(text.encode()) for text in TEXTS]
    count = next(number for number, size in enumerate(itertools.accumulate(sizes), 1) if size >= 1000)
    num_tokens, num_bytes = sum(map(len, map(ours.encode, TEXTS[:count]))), sum(sizes[:count])
    row = capsys.readouterr().out.splitlines()[2].split()
    assert row == [
        str(ours.vocab_size),
        str(num_tokens),
        f"{num_tokens / num_bytes:.4f}",
        f"{num_bytes / num_tokens:.3f}",
        "100.0%",
        folder,
    ]


def test_a_vocabulary_below_the_given_tokens_is_refused(
    corpus: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert train(corpus, "--vocab-size", "100") == 2
    assert "fix: use more than 257" in capsys.readouterr().err
