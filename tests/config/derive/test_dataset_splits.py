"""Splits: recorded fractions and ranges, and errors that propose a working split."""

from __future__ import annotations

import itertools

import pytest

from megatrain.config.derive.datasets import require_sequences, split_fractions, split_ranges, working_split
from megatrain.config.errors import ConfigError


def test_recorded_splits(expected):
    for case in expected["splits"]:
        fractions = split_fractions(case["split"])
        assert list(fractions) == case["normalized"]
        exists = [ends is not None for ends in case["book_ends"]]
        assert [fraction > 0 for fraction in fractions] == exists
        for num_sequences, recorded in case["ranges"].items():
            parts = split_ranges(case["split"], int(num_sequences))
            found = [None if part is None else [part.start, part.stop] for part in parts]
            assert found == recorded


@pytest.mark.parametrize(
    ("split", "message"),
    [
        ("1,2,3,4", "has 4 numbers"),
        ("", "no data"),
        ("0,0,0", "no data"),
        ("train", "no data"),
        ("9.6.9,1", "could not convert"),
    ],
)
def test_invalid_splits_are_refused(split, message):
    with pytest.raises(ConfigError, match=message):
        split_fractions(split)


def test_an_empty_split_is_an_error_if_the_run_reads_it():
    require_sequences("969,30,1", {"d.bin": 319}, (True, True, False))
    with pytest.raises(
        ConfigError, match=r"319 sequences of d.bin is train 309, valid 10, test 0: .* test"
    ) as caught:
        require_sequences("969,30,1", {"d.bin": 319}, (True, True, True))
    assert "--split 308,10,1" in str(caught.value)


def test_every_dataset_of_a_blend_must_have_sequences():
    require_sequences("90,5,5", {"a": 100, "b": 50}, (True, True, True))
    with pytest.raises(
        ConfigError, match=r"5 sequences of c is train 4.*\(1 other dataset is too small, too"
    ):
        require_sequences("90,5,5", {"a": 100, "b": 8, "c": 5}, (True, True, True))


def test_too_few_sequences_for_any_split():
    with pytest.raises(ConfigError, match="too few sequences"):
        require_sequences("1,1,1", {"d.bin": 1}, (True, True, True))


def test_the_proposed_split_works():
    for counts in itertools.product(range(4), repeat=3):
        for is_used in itertools.product((False, True), repeat=3):
            proposal = working_split(counts, is_used)
            if proposal is None:
                assert sum(is_used) > sum(counts) or not sum(counts)
                continue
            parts = split_ranges(proposal, sum(counts))
            assert all(part for part, used in zip(parts, is_used, strict=True) if used)
