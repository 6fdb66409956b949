"""`megatrain data sample` and `index` with the sentences of BERT and T5."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from tiny_tokenizers import WORDS

from megatrain.data.indexed.writer import IndexedWriter
from megatrain.tools.main import main

MODEL = (
    "--num-layers 2 --hidden-size 32 --num-attention-heads 4 --max-position-embeddings 32 --seq-length 32 --lr 1e-3"
    " --micro-batch-size 2 --global-batch-size 4 --train-iters 5 --eval-iters 1 --eval-interval 5 --device cpu --seed 11"
)
FAMILIES = {
    "bert": "--model-family bert --tokenizer-type BertWordPieceLowerCase",
    "t5": "--model-family t5 --decoder-seq-length 12 --tokenizer-type BertWordPieceCase",
}


@pytest.fixture
def flags(tmp_path: Path) -> str:
    """The flags of a run with 40 documents of four sentences each, without those of the family."""
    (tmp_path / "vocab.txt").write_text("\n".join(WORDS) + "\n")
    with IndexedWriter(tmp_path / "corpus", "uint16") as writer:
        for number in range(40):
            writer.add_document([[5 + (number + k) % 26, 31 + k, 8, 9 + k] * 2 for k in range(4)])
    return f"{MODEL} --vocab-file {tmp_path}/vocab.txt --data-path {tmp_path}/corpus --split 8,1,1"


@pytest.mark.parametrize("family", FAMILIES)
def test_a_sample_is_printed(family: str, flags: str, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["data", "sample", *FAMILIES[family].split(), *flags.split(), "--of", "train", "--index", "3"]
    assert main([*arguments, "--json"]) == 0
    arrays = json.loads(capsys.readouterr().out)
    assert main(arguments) == 0
    printed = capsys.readouterr().out
    assert "train sample 3 of " in printed
    assert "corpus, document " in printed
    if family == "bert":
        assert (
            f"tokens         {sum(arrays['padding_mask'])} of 32; loss on {sum(arrays['loss_mask'])}"
            in printed
        )
        assert printed.count(" is ") == sum(arrays["loss_mask"]) > 0
        assert ("swapped" if arrays["is_random"] else "in order") in printed
        assert "[CLS]" in printed
    else:
        assert f"encoder        {sum(arrays['enc_mask'])} tokens of 32" in printed
        assert f"decoder        {sum(arrays['loss_mask'])} tokens of 12" in printed
        assert printed.count("<extra_id_0>") == 2


@pytest.mark.parametrize("family", FAMILIES)
def test_indices_are_listed(
    family: str, flags: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = ["data", "index", *FAMILIES[family].split(), *flags.split()]
    assert main([*arguments, "--data-cache-path", str(tmp_path)]) == 0
    train = capsys.readouterr().out.splitlines()[1].split()
    assert train[:4] == ["train", "11", "128", "1,024"]


@pytest.mark.parametrize(
    ("flag", "value", "problem", "remedy"),
    [
        ("--mock-data", "", "--mock-data has no sentences", "--data-path"),
        ("--split", "98,1,1", "--split '98,1,1' of the 40 documents", "--split 38,1,1"),
        (
            "--decoder-seq-length",
            "2",
            "more than --decoder-seq-length 2",
            "use --decoder-seq-length 9 or more",
        ),
        ("--tokenizer-type", "NullTokenizer", "has no token [CLS]", "BertWordPieceCase"),
    ],
)
def test_errors_name_the_flag_and_the_remedy(
    flag: str, value: str, problem: str, remedy: str, flags: str, capsys: pytest.CaptureFixture[str]
) -> None:
    words = f"{FAMILIES['t5']} {flags}".split()
    if flag == "--mock-data":
        del words[words.index("--data-path") :]
    if value == "NullTokenizer":
        at = words.index("--vocab-file")
        words[at : at + 2] = ["--vocab-size", "80"]
    assert main(["data", "sample", *words, flag, *value.split(), "--of", "train", "--index", "0"]) == 2
    message = capsys.readouterr().err
    assert problem in message
    assert remedy in message.partition("fix:")[2]
