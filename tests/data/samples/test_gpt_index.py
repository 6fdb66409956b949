"""Document, sample and shuffle indices: recorded ones, and properties for any lengths."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from recorded import EXPECTED, GPT_CASES, check_array, recorded_lengths

from megatrain.config.derive.datasets import SPLIT_NAMES, split_ranges
from megatrain.config.errors import ConfigError
from megatrain.data.samples import gpt_index
from megatrain.data.samples.gpt_index import build_index, build_sample_index

WALKS = EXPECTED["sample_index_walk"]
USES_DEFAULTS = {"add_extra_token_to_sequence": True, "drop_last_partial_sequence": True}
SPLITS = [
    pytest.param(case, name, id=f"{case['name']}-{name}")
    for case in GPT_CASES
    for name in SPLIT_NAMES
    if case["splits"][name]
]


@pytest.mark.parametrize(("case", "name"), SPLITS)
def test_recorded_order(case, name):
    recorded = case["splits"][name]
    lengths = recorded_lengths(case["dataset"])
    part = split_ranges(case["split"], len(lengths))[SPLIT_NAMES.index(name)]
    assert [part.start, part.stop] == recorded["sequence_range"]
    assert lengths[part.start : part.stop].sum() == recorded["tokens_per_epoch"]
    index = build_index(
        lengths,
        part,
        seq_length=case["sequence_length"],
        seed=case["seed"],
        num_samples=recorded["num_samples_requested"],
    )
    assert index.epochs.count == recorded["num_epochs"]
    assert index.epochs.is_last_separate == recorded["separate_final_epoch"]
    assert len(index) == recorded["length"]
    for array in ("document_index", "sample_index", "shuffle_index"):
        check_array(getattr(index, array), recorded[array])
        assert getattr(index, array).dtype.name == recorded[array]["dtype"]


@pytest.mark.parametrize(
    "walk",
    [walk for walk in WALKS["small"] + WALKS["float32_rounding"] if walk.items() >= USES_DEFAULTS.items()],
)
def test_recorded_sample_indices(walk):
    found = build_sample_index(
        np.array(walk["sequence_lengths"]),
        np.array(walk["document_index"]),
        walk["sequence_length"],
    )
    if isinstance(walk["sample_index"], list):
        assert found.tolist() == walk["sample_index"]
    else:
        check_array(found, walk["sample_index"])


def walked(lengths, order, seq_length):
    """Return the sample boundaries, found by counting tokens one by one."""
    places = [
        (position, offset) for position, number in enumerate(order) for offset in range(lengths[number])
    ]
    count = (len(places) - 1) // seq_length
    return [(0, 0)] + [places[j * seq_length] for j in range(1, count + 1)]


@settings(max_examples=200)
@given(
    lengths=st.lists(st.integers(0, 9), min_size=1, max_size=12).filter(any),
    seq_length=st.integers(1, 7),
    num_samples=st.none() | st.integers(0, 40),
    seed=st.integers(0, 2**32 - 1),
)
def test_any_index_covers_all_tokens(lengths, seq_length, num_samples, seed):
    index = build_index(
        np.array(lengths, np.int32),
        range(len(lengths)),
        seq_length=seq_length,
        seed=seed,
        num_samples=num_samples,
    )
    assert len(index) >= (num_samples or 0)
    assert sorted(index.document_index) == sorted(list(range(len(lengths))) * index.epochs.count)
    assert sorted(index.shuffle_index) == list(range(len(index)))
    assert [tuple(row) for row in index.sample_index.tolist()] == walked(
        lengths, index.document_index, seq_length
    )


@pytest.mark.parametrize("lengths", [[7, 0, 30, 5, 1, 0, 0, 12], [4] * 9, [0, 0, 0, 0, 1, 9]])
def test_boundaries_are_the_same_in_blocks_of_sequences(monkeypatch, lengths):
    monkeypatch.setattr(gpt_index, "BLOCK_SEQUENCES", 2)
    order = np.random.default_rng(1).permutation(len(lengths))
    found = build_sample_index(np.array(lengths, np.int32), order, 4)
    assert [tuple(row) for row in found.tolist()] == walked(lengths, order, 4)


def test_splits_of_one_dataset_do_not_share_their_generator():
    lengths = np.full(40, 10, np.int32)
    orders = [
        build_index(lengths, part, seq_length=4, seed=3, num_samples=None).document_index - part.start
        for part in (range(20), range(20, 40))
    ]
    assert orders[0].tolist() == orders[1].tolist()


@pytest.mark.parametrize("part", [range(2, 2), range(1, 3)])
def test_a_range_without_tokens_is_an_error(part):
    with pytest.raises(ConfigError, match="contain no tokens"):
        build_index(np.array([3, 0, 0, 4], np.int32), part, seq_length=2, seed=1, num_samples=1)


def test_the_number_of_epochs_is_the_smallest_that_suffices():
    lengths = np.array([5, 8], np.int32)
    for num_samples, seq_length in itertools.product(range(30), (1, 3, 14)):
        index = build_index(lengths, range(2), seq_length=seq_length, seed=1, num_samples=num_samples)
        needed = num_samples * seq_length + 1
        assert index.epochs.count * 13 >= needed
        assert index.epochs.count == 1 or (index.epochs.count - 1) * 13 < needed
