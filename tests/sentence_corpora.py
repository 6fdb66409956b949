"""Generated sentences for BERT and T5: a vocabulary of letters, and documents of random words of them."""

from __future__ import annotations

import random
from pathlib import Path

from megatrain.data.indexed.writer import IndexedWriter

LETTERS = "abcdefghijklmnopqrstuvwxyz"
WORDS = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *LETTERS, *(f"##{letter}" for letter in LETTERS)]
NUM_SENTINELS = 100
TOKENIZERS = {"bert": "BertWordPieceLowerCase", "t5": "BertWordPieceCase"}


def write_corpus(folder: Path, *, num_documents: int, num_letters: int = 26) -> None:
    """Write vocab.txt, corpus.bin and corpus.idx; a document has 3 to 6 sentences of 2 to 6 words of the first letters."""
    (folder / "vocab.txt").write_text("\n".join(WORDS) + "\n")
    chance, first = random.Random(1), WORDS.index("a")
    with IndexedWriter(folder / "corpus", "uint16") as writer:
        for _ in range(num_documents):
            writer.add_document(
                [
                    [
                        token
                        for _ in range(chance.randint(2, 6))
                        for token in (
                            first + chance.randrange(num_letters),
                            first + 26 + chance.randrange(num_letters),
                        )
                    ]
                    for _ in range(chance.randint(3, 6))
                ]
            )


def data_flags(folder: Path, family: str) -> list[str]:
    """Return the flags of the data and the tokenizer of a family."""
    size = len(WORDS) + (NUM_SENTINELS if family == "t5" else 0)
    return (
        f"--tokenizer-type {TOKENIZERS[family]} --vocab-file {folder}/vocab.txt --vocab-size {size}"
        f" --data-path {folder}/corpus --split 8,1,1"
    ).split()
