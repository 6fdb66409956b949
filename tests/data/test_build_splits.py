"""From a prefix to the samples of three splits."""

from __future__ import annotations

import numpy as np
import pytest
from recorded import write_dataset

from megatrain.config.errors import ConfigError, InputError
from megatrain.data.build import build_splits
from megatrain.data.indexed_writer import IndexedWriter


@pytest.fixture
def prefix(tmp_path):
    random = np.random.default_rng(7)
    write_dataset(tmp_path / "data", [[[*random.integers(1, 90, 20), 0]] for _ in range(100)])
    return str(tmp_path / "data")


def build(prefix, **options):
    defaults = {
        "split": "90,5,5",
        "seq_length": 8,
        "seed": 1,
        "requested": (50, 5, 5),
        "vocab_size": 90,
        "eod": 0,
    }
    return build_splits(prefix, **(defaults | options))


def test_splits_take_their_own_sequences(prefix):
    splits = build(prefix)
    ranges = [
        set(samples.index.document_index.tolist()) for samples in (splits.train, splits.valid, splits.test)
    ]
    assert ranges == [set(range(90)), set(range(90, 95)), set(range(95, 100))]
    assert (len(splits.train), len(splits.valid)) == (236, 13)


def test_what_is_not_asked_for_is_not_built(prefix):
    splits = build(prefix, requested=(50, 0, 0), split="1,0,1")
    assert splits.valid is None
    assert splits.test is None


def test_a_split_without_share_does_not_exist(prefix):
    assert build(prefix, split="100,0,0").valid is None
    with pytest.raises(ConfigError, match=r"train 0, valid 100, test 0: samples are asked of train"):
        build(prefix, split="0,1,0")


def test_an_empty_split_is_an_error_only_if_it_is_asked_for(prefix):
    assert build(prefix, split="969,30,1", requested=(5, 5, 0)).test is None
    with pytest.raises(
        ConfigError, match=r"--split '969,30,1' .* test 0.* asked of test.*\n  fix: --split 96,3,1"
    ):
        build(prefix, split="969,30,1")


def test_ids_are_held_against_the_vocabulary(prefix):
    samples = build(prefix, vocab_size=40).train
    with pytest.raises(InputError, match="outside the vocabulary of 40"):
        [samples[k] for k in range(len(samples))]


def test_a_pad_that_ends_documents_pads_nothing(prefix):
    plain = build(prefix, pad=0).train
    assert all(plain[k].loss_mask.all() for k in range(len(plain)))
    ambiguous = build(prefix, pad=0, allow_ambiguous_pad_tokens=True).train
    assert not all(ambiguous[k].loss_mask.all() for k in range(len(ambiguous)))


def test_numbers_that_are_no_ids_are_refused(tmp_path):
    with IndexedWriter(tmp_path / "floats", "float32") as writer:
        writer.add_document([[1.5, 2.5]])
    with pytest.raises(InputError, match="elements are float32"):
        build(tmp_path / "floats")
