"""Building the datasets of three splits from prefixes."""

from __future__ import annotations

import numpy as np
import pytest
from recorded import write_dataset

from megatrain.config.derive.datasets import Blend
from megatrain.config.errors import ConfigError, InputError
from megatrain.data.indexed.writer import IndexedWriter
from megatrain.data.samples.build import SamplePlans, SplitBuilder
from megatrain.data.samples.gpt_dataset import SampleOptions


@pytest.fixture
def prefix(tmp_path):
    random = np.random.default_rng(7)
    write_dataset(tmp_path / "data", [[[*random.integers(1, 90, 20), 0]] for _ in range(100)])
    return str(tmp_path / "data")


def build(*prefixes, split="90,5,5", plans=((50,), (5,), (5,)), weights=None, per_split=None, **options):
    builder = SplitBuilder(SampleOptions(**({"seq_length": 8, "eod": 0, "vocab_size": 90} | options)))
    blends = per_split or {"all": Blend(tuple(map(str, prefixes)), weights)}
    train, valid, test = plans
    return builder.build(blends, split, SamplePlans(train=train, valid=valid, test=test, seed=1))


def test_splits_read_disjoint_sequences(prefix):
    splits = build(prefix)
    ranges = [
        set(samples.index.document_index.tolist()) for samples in (splits.train, splits.valid, splits.test)
    ]
    assert ranges == [set(range(90)), set(range(90, 95)), set(range(95, 100))]
    assert (len(splits.train), len(splits.valid)) == (236, 13)


def test_splits_without_requested_samples_are_not_built(prefix):
    splits = build(prefix, plans=((50,), (0,), (0,)), split="1,0,1")
    assert splits.valid is None
    assert splits.test is None


def test_a_split_with_share_0_does_not_exist(prefix):
    assert build(prefix, split="100,0,0").valid is None
    with pytest.raises(ConfigError, match=r"train 0, valid 100, test 0"):
        build(prefix, split="0,1,0")


def test_an_empty_split_is_an_error_only_if_samples_are_requested(prefix):
    assert build(prefix, split="969,30,1", plans=((5,), (5,), (0,))).test is None
    with pytest.raises(ConfigError, match=r"--split '969,30,1' .* test 0.*\n  fix: .*--split 96,3,1"):
        build(prefix, split="969,30,1")


def test_ids_are_checked_against_the_vocabulary(prefix):
    samples = build(prefix, vocab_size=40).train
    with pytest.raises(InputError, match="outside the vocabulary of 40"):
        [samples[k] for k in range(len(samples))]


def test_elements_that_are_not_integers_are_an_error(tmp_path):
    with IndexedWriter(tmp_path / "floats", "float32") as writer:
        writer.add_document([[1.5, 2.5]])
    with pytest.raises(InputError, match=r"floats\.bin.*float32"):
        build(tmp_path / "floats")


def tokens(samples, numbers):
    return [samples[k].tokens.tolist() for k in numbers]


@pytest.mark.parametrize("weights", [None, (1.0,)], ids=["plain", "weighted"])
def test_a_further_plan_does_not_change_the_first(prefix, weights):
    first = build(prefix, plans=((300,), (0,), (0,)), weights=weights).train
    both = build(prefix, plans=((300, 70), (0,), (0,)), weights=weights).train
    more = build(prefix, plans=((300, 70, 9), (0,), (0,)), weights=weights).train
    assert tokens(both, range(300)) == tokens(first, range(300))
    assert tokens(more, range(370)) == tokens(both, range(370))
    assert len(both) >= 370
    assert len(more) >= 379
    assert tokens(both, range(300, 370)) != tokens(first, range(70))


def test_a_longer_run_continues_a_blend_by_size(prefix):
    per_split = {"train": Blend((prefix, prefix))}
    long = build(per_split=per_split, plans=((200,), (0,), (0,))).train
    both = build(per_split=per_split, plans=((90, 110), (0,), (0,))).train
    assert len(both) == len(long) == 200
    assert tokens(both, range(200)) == tokens(long, range(200))


def test_each_plan_of_separate_splits_has_its_seed(prefix):
    per_split = {"train": Blend((prefix,)), "valid": Blend((prefix,))}
    splits = build(per_split=per_split, plans=((20, 20), (20,), (20,)))
    assert tokens(splits.train, range(20)) == tokens(splits.valid, range(20))
    assert tokens(splits.train, range(20, 40)) != tokens(splits.valid, range(20))
    assert splits.test is None


def test_weights_do_not_combine_with_full_validation(prefix):
    with pytest.raises(ConfigError, match=r"valid.*\n  fix: .*weights.*--full-validation"):
        build(prefix, weights=(1.0,), plans=((5,), (None,), (0,)))


def test_mock_data_needs_no_files():
    splits = SplitBuilder(SampleOptions(seq_length=64, eod=99, vocab_size=100)).build(
        {}, "", SamplePlans(train=(4,), valid=(4,), test=(4,), seed=1)
    )
    assert all(len(samples) >= 4 for samples in (splits.train, splits.valid, splits.test))
