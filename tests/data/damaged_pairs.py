"""A valid pair of .bin and .idx, ways to damage it, and the checks of a run: shared by the tests of damaged data."""

from __future__ import annotations

import json
import struct
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
from recorded import write_dataset

from megatrain.config.derive.datasets import Blend
from megatrain.data.samples.build import SamplePlans, SplitBuilder
from megatrain.data.samples.gpt_dataset import SampleOptions
from megatrain.data.samples.sources import inspect_datasets

if TYPE_CHECKING:
    from collections.abc import Callable

    from megatrain.data.samples.dataset import SampleDataset

VOCAB = 100
FINGERPRINT = "5eed" * 16
NUM_SEQUENCES, NUM_BOUNDARIES = 12, 7
VERSION, CODE, SEQUENCES, BOUNDARIES = 9, 17, 18, 26
"""Offsets of header fields in an .idx."""
LENGTH_0 = 34
OFFSET_0 = LENGTH_0 + 4 * NUM_SEQUENCES
BOUNDARY_0 = OFFSET_0 + 8 * NUM_SEQUENCES


def write_pair(prefix: Path, *, seed: int = 0, dtype: str = "uint16", with_description: bool = True) -> Path:
    """Write six documents of two sequences of 5 to 11 tokens: the same lengths, but other ids for each seed."""
    random = np.random.default_rng(seed)
    documents = [
        [random.integers(0, VOCAB, 5 + (2 * i + j) % 7).tolist() for j in range(2)] for i in range(6)
    ]
    dataset = write_dataset(prefix, documents, dtype)
    assert len(dataset) == NUM_SEQUENCES
    if with_description:
        describe(prefix, tokenizer_type="BertWordPiece", tokenizer_fingerprint=FINGERPRINT, vocab_size=VOCAB)
    return prefix


def describe(prefix: Path, **content: object) -> None:
    """Write the description of a dataset."""
    Path(f"{prefix}.json").write_text(json.dumps(content))


def idx(prefix: Path) -> Path:
    return Path(f"{prefix}.idx")


def bin_(prefix: Path) -> Path:
    return Path(f"{prefix}.bin")


def patch(position: int, kind: str, *values: int) -> Callable[[Path], None]:
    """Return a function that writes numbers into an .idx."""

    def damage(prefix: Path) -> None:
        content = bytearray(idx(prefix).read_bytes())
        struct.pack_into(f"<{len(values)}{kind}", content, position, *values)
        idx(prefix).write_bytes(content)

    return damage


def problems_of(prefix: str | Path, *, vocab_size: int = VOCAB, fingerprint: str | None = FINGERPRINT) -> str:
    """Return all problems that a run reports about a dataset before it starts."""
    blends = {"all": Blend((str(prefix),))}
    _, problems = inspect_datasets(blends, vocab_size=vocab_size, tokenizer_fingerprint=fingerprint)
    return "\n".join(map(str, problems))


def train_samples(prefix: str | Path, *, mmap: bool = True, vocab_size: int | None = VOCAB) -> SampleDataset:
    """Return two epochs of training samples of 8 tokens."""
    builder = SplitBuilder(SampleOptions(seq_length=8, eod=0, vocab_size=vocab_size), mmap=mmap)
    plans = SamplePlans(train=(20,), valid=(0,), test=(0,), seed=1)
    train = builder.build({"all": Blend((str(prefix),))}, "1,0,0", plans).train
    assert train is not None
    return train


def all_tokens(samples: SampleDataset) -> list[list[int]]:
    """Return the tokens of all samples, each with its last label."""
    return [
        [*sample.tokens.tolist(), int(sample.labels[-1])]
        for sample in map(samples.__getitem__, range(len(samples)))
    ]
