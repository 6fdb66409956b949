"""Creates files of small tokenizers: byte-level BPE, WordPiece, SentencePiece and tiktoken; sentences of letters for BERT and T5."""

from __future__ import annotations

import base64
import io
import json
import random
from pathlib import Path
from typing import Any

import pytest
import tokenizers
from tokenizers import models, pre_tokenizers, trainers

from megatrain.config.schema.tokenizer import TokenizerConfig
from megatrain.data.indexed.writer import IndexedWriter

TEXTS = [
    "The quick brown fox jumps over the lazy dog.",
    "the lazy dog sleeps; THE DOG SLEEPS, the fox does not",
    "naïve café — 12345 东京 🙂",
    "",
    " \t two  blanks\n\nand lines\r\n",
    "def f(x):\n    return x ** 2  # camelCase HTTPServer",
]
BERT_SPECIAL = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]
LETTERS = "abcdefghijklmnopqrstuvwxyz"
WORDS = [*BERT_SPECIAL, *LETTERS, *(f"##{letter}" for letter in LETTERS)]
NUM_SENTINELS = 100
_OF_FAMILIES = {"bert": "BertWordPieceLowerCase", "t5": "BertWordPieceCase"}


def gpt2_files(folder: Path, *, end: str | None = "<|endoftext|>") -> tuple[str, str]:
    """Create vocab.json and merges.txt of byte-level BPE."""
    library = tokenizers.Tokenizer(models.BPE())
    library.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    trainer = trainers.BpeTrainer(
        vocab_size=320,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        special_tokens=[end] if end else [],
        show_progress=False,
    )
    library.train_from_iterator(TEXTS * 3, trainer)
    library.model.save(str(folder))
    return str(folder / "vocab.json"), str(folder / "merges.txt")


def bert_file(folder: Path) -> str:
    """Create vocab.txt of WordPiece."""
    letters = [*"abcdefghijklmnopqrstuvwxyzT.,;"]
    words = ["the", "fox", "dog", "lazy", "quick", "The", "##s", "##ing", "東", "naive"]
    file = folder / "vocab.txt"
    lines = [*BERT_SPECIAL, *letters, *(f"##{letter}" for letter in letters[:26] if letter != "s"), *words]
    file.write_text("".join(f"{line}\n" for line in lines), encoding="utf-8")
    return str(file)


def sentencepiece_file(folder: Path, **options: Any) -> str:
    """Train and save tokenizer.model."""
    library = pytest.importorskip("sentencepiece")
    model = io.BytesIO()
    library.SentencePieceTrainer.train(
        sentence_iterator=iter([text for text in TEXTS if text] * 10),
        model_writer=model,
        minloglevel=2,
        **{"vocab_size": 360, "model_type": "bpe", "byte_fallback": True, **options},
    )
    file = folder / "tokenizer.model"
    file.write_bytes(model.getvalue())
    return str(file)


def tiktoken_entries() -> list[dict[str, Any]]:
    """Return the bytes and a few merged tokens in TikTokenizer's format."""
    tokens = [bytes([byte]) for byte in range(256)] + [b"th", b"the", b" the", b"do", b"dog", b"gG"]
    return [
        {
            "rank": rank,
            "token_bytes": base64.b64encode(token).decode(),
            "token_str": token.decode("utf-8", "replace"),
        }
        for rank, token in enumerate(tokens)
    ]


def tiktoken_file(folder: Path, entries: list[dict[str, Any]] | None = None) -> str:
    """Create the JSON list of TikTokenizer."""
    pytest.importorskip("tiktoken")
    file = folder / "multilingual.json"
    file.write_text(json.dumps(tiktoken_entries() if entries is None else entries))
    return str(file)


def tiny_config(kind: Any, folder: Path, **more: Any) -> TokenizerConfig:
    """Create the files of a tokenizer type in a folder; return its configuration."""
    if kind == "GPT2BPETokenizer":
        vocab, merges = gpt2_files(folder)
        more = {"vocab_file": vocab, "merge_file": merges, **more}
    elif kind.startswith("BertWordPiece"):
        plain = {"tokenizer_hf_no_include_special_tokens": True}
        more = {"vocab_file": bert_file(folder), **plain, **more}
    elif kind == "TikTokenizer":
        more = {"tokenizer_model": tiktoken_file(folder), "tiktoken_num_special_tokens": 20, **more}
    elif kind == "NullTokenizer":
        more = {"vocab_size": 100, **more}
    elif kind == "HuggingFaceTokenizer":
        vocab, merges = gpt2_files(folder)
        library = tokenizers.ByteLevelBPETokenizer(vocab, merges)
        library.save(str(folder / "tokenizer.json"))
        more = {"tokenizer_model": str(folder), **more}
    else:
        more = {"tokenizer_model": sentencepiece_file(folder), **more}
    return TokenizerConfig(tokenizer_type=kind, **more)


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
        f"--tokenizer-type {_OF_FAMILIES[family]} --vocab-file {folder}/vocab.txt --vocab-size {size}"
        f" --data-path {folder}/corpus --split 8,1,1"
    ).split()
