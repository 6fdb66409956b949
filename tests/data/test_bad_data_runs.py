"""Bad data in `pretrain.main`: exit code 2, the message on stderr, no traceback, no training."""

from __future__ import annotations

import re

import pytest
import torch  # noqa: F401 - a slow import, before the time limit of `ends_soon` starts
from damaged_pairs import VOCAB, describe, idx, write_pair

import pretrain

pytestmark = pytest.mark.usefixtures("ends_soon")

RUN = (
    "--num-layers 2 --hidden-size 16 --num-attention-heads 2 --seq-length 8 --lr 1e-3 --micro-batch-size 1"
    " --global-batch-size 2 --swiglu --normalization RMSNorm --position-embedding-type rope --device cpu"
    " --disable-bias-linear --hidden-dropout 0 --attention-dropout 0 --train-iters 2 --eval-iters 0 --ffn-hidden-size 32"
)
NULL = f"--tokenizer-type NullTokenizer --vocab-size {VOCAB}"


@pytest.fixture
def here(tmp_path, monkeypatch):
    """Datasets a and b in the working folder."""
    monkeypatch.chdir(tmp_path)
    write_pair(tmp_path / "a", seed=1)
    write_pair(tmp_path / "b", seed=2)
    (tmp_path / "words.json").write_text('{"train": ["a"],\n "valid": }')
    return tmp_path


CASES = {
    "missing .idx": (
        lambda here: idx(here / "a").unlink(), f"{NULL} --data-path a",
        r"^error: --data-path: a\.idx: there is no such file\n  fix: copy both",
    ),
    "missing validation data": (
        lambda here: None, f"{NULL} --train-data-path a --valid-data-path gone --test-data-path b",
        r"^error: --valid-data-path: gone\.bin: there is no such file",
    ),
    "id beyond the vocabulary": (
        lambda here: describe(here / "a", largest_id=VOCAB), f"{NULL} --data-path a",
        rf"^error: --data-path: a\.bin .*id {VOCAB}, outside the vocabulary of {VOCAB}\n  fix: use the tokenizer",
    ),
    "another tokenizer": (
        lambda here: None, "--tokenizer-type HuggingFaceTokenizer --tokenizer-model {golden}/tokenizer.json --data-path a",
        r"^error: --data-path: a\.bin .*BertWordPiece, fingerprint 5eed5eed5eed.*\n  fix: give --tok",
    ),
    "negative weight": (
        lambda here: None, f"{NULL} --data-path 1 a -1 b", r"^error: --data-path: .* b .*-1\n  fix: give every",
    ),
    "empty split": (
        lambda here: None, f"{NULL} --data-path a --split 99,1,0 --eval-iters 1",
        r"^error: --split '99,1,0' .*train 12, valid 0, test 0.*\n  fix: .*--split 11,1,0",
    ),
    "broken JSON of splits": (
        lambda here: None, f"{NULL} --per-split-data-args-path words.json",
        r"^error: words\.json:2: .*Expecting value at column 11\n  fix: write",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", CASES)
def test_bad_data_ends_a_run_before_it_starts(here, golden, capsys, name):
    damage, flags, pattern = CASES[name]
    damage(here)
    before = sorted(here.iterdir())
    assert pretrain.main([*RUN.split(), *flags.format(golden=golden).split()]) == 2
    captured = capsys.readouterr()
    assert re.search(pattern, captured.err), captured.err
    assert captured.err.count("fix: ") == 1
    assert "Traceback" not in captured.err
    assert re.fullmatch(r"(> importing .*\n)?", captured.out)  # logged on a busy host
    assert sorted(here.iterdir()) == before, "nothing was written"


def test_the_same_run_trains_with_valid_data(here, capsys):
    flags = f"{NULL} --data-path 1 a 2 b --split 1,0,0"
    assert pretrain.main([*RUN.split(), *flags.split()]) == 0
    assert capsys.readouterr().err == ""
