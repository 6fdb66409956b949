"""Lengths of mock documents follow the stated distribution; other words are refused."""

import json
import re

import numpy as np
import pytest

from megatrain.config.errors import InputError
from megatrain.data.samples.mock import MockSequences, mock_lengths

LOGNORMAL = {
    "type": "lognormal",
    "min_seq_len": 4,
    "max_seq_len": 5000,
    "mean_seq_len": 200,
    "lognormal_sigma": 1.0,
}


def test_lognormal_lengths_have_the_stated_mean_and_bounds():
    lengths = mock_lengths(json.dumps(LOGNORMAL | {"mode": "distribution", "format": "thd"}), 100_000)
    assert lengths.min() >= 4
    assert lengths.max() == 5000
    assert np.mean(lengths) == pytest.approx(200, rel=0.03)
    assert np.std(np.log(lengths)) == pytest.approx(1.0, rel=0.03)


def test_a_file_and_uniform_lengths(tmp_path):
    file = tmp_path / "lengths.json"
    file.write_text(json.dumps({"type": "uniform", "min_seq_len": 3, "max_seq_len": 5}))
    assert set(mock_lengths(str(file), 1000)) == {3, 4, 5}


def test_a_mock_document_of_any_length_ends():
    source = MockSequences(
        vocab_size=50,
        eod=49,
        lengths=json.dumps({"type": "uniform", "min_seq_len": 9000, "max_seq_len": 9000}),
    )
    assert len(source.read(7)) == 9000
    assert source.read(7)[-1] == 49
    assert source.read(7, 8990, 5).tolist() == [(8991 + k) % 50 for k in range(5)]


@pytest.mark.parametrize(
    ("values", "words"),
    [
        ({"type": "pareto"}, "'pareto'"),
        ({"min_seq_len": 3}, "None"),
        ({"type": "uniform", "min_seq_len": 3}, "max_seq_len"),
        (LOGNORMAL | {"mean_seq_len": "8k"}, "mean_seq_len"),
        (LOGNORMAL | {"lognormal_sigma": float("inf")}, "lognormal_sigma"),
        (LOGNORMAL | {"lognormal_sigma": 10**400}, "lognormal_sigma"),
        (LOGNORMAL | {"mean_seq_len": float("nan")}, "mean_seq_len"),
        (LOGNORMAL | {"min_seq_len": 1}, "from 1 to 5000"),
        (LOGNORMAL | {"max_seq_len": 3}, "from 4 to 3"),
    ],
)  # fmt: skip
def test_other_words_are_refused(values, words):
    with pytest.raises(InputError, match=re.escape(words)):
        mock_lengths(json.dumps(values), 10)


def test_a_missing_file_is_named(tmp_path):
    with pytest.raises(InputError, match=r"lengths\.json"):
        mock_lengths(str(tmp_path / "lengths.json"), 10)
