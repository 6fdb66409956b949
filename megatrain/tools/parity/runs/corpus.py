"""The datasets of real runs: small, and as awkward as real ones.

    alike    short documents that start with the same tokens, so that routers score their first tokens equally
    varied   longer documents, for blends and separate validation sets

No number of samples divides a batch, so that a validation of the whole set ends with a part of one.
"""

from __future__ import annotations

from pathlib import Path
from typing import Final

import numpy as np

from megatrain.data.indexed.writer import IndexedWriter, token_dtype

VOCAB_SIZE: Final = 101
_END: Final = VOCAB_SIZE - 1
"""End of a document, by NullTokenizer's rule."""
_START: Final = (5, 17, 5)
_SHAPES: Final = {"alike": (150, 2, 30), "varied": (40, 20, 60), "held": (23, 5, 40)}
"""Number of documents, least and most tokens of one."""


def write_corpus(folder: Path) -> None:
    """Write the datasets that `folder` lacks. They are the same in each call."""
    folder.mkdir(parents=True, exist_ok=True)
    for number, (name, (num_documents, least, most)) in enumerate(_SHAPES.items()):
        if (folder / f"{name}.idx").exists():
            continue
        rng = np.random.default_rng(number)
        with IndexedWriter(folder / name, token_dtype(VOCAB_SIZE)) as writer:
            for _ in range(num_documents):
                tokens = rng.integers(0, _END, rng.integers(least, most))
                if name == "alike":
                    tokens[: len(_START)] = _START[: len(tokens)]
                writer.add_document([[*tokens, _END]])
