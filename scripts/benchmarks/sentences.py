"""Random documents of sentences and a vocabulary, for the benchmark cases of BERT and T5, which have no mock data."""

from __future__ import annotations

from pathlib import Path

import numpy as np
from roofline import WORDS

from megatrain.data.indexed.writer import IndexedWriter

_SPECIAL = ("[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]")


def flags_of_sentences(folder: Path, *, documents: int = 600, sentences: int = 80) -> list[str]:
    """Write documents of sentences of 8 to 40 words into a folder; return the flags that read them."""
    random = np.random.default_rng(0)
    vocabulary = folder / "vocabulary.txt"
    vocabulary.write_text("\n".join([*_SPECIAL, *(f"w{k}" for k in range(WORDS - len(_SPECIAL)))]) + "\n")
    with IndexedWriter(folder / "sentences", np.uint16) as writer:
        for _ in range(documents):
            lengths = random.integers(8, 41, sentences)
            writer.add_document([random.integers(len(_SPECIAL), WORDS, length) for length in lengths])
    return ["--vocab-file", str(vocabulary), "--data-path", str(folder / "sentences")]
