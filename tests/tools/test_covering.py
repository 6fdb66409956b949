"""Covering arrays contain every allowed pair and no other: compared with the full product."""

from itertools import product

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatrain.tools.parity.covering_array import Partial, completed, covering_rows, pairs_of, possible_pairs


def brute_force(options, is_allowed):
    """Return the pairs of all allowed rows."""
    return {pair for row in product(*options) if is_allowed(row) for pair in pairs_of(row)}


def anything(_row: Partial) -> bool:
    return True


def test_three_options_of_three_values_need_few_of_their_27_rows():
    options = [("a", "b", "c"), ("d", "e", "f"), ("g", "h", "i")]
    rows = covering_rows(options, anything)
    assert {pair for row in rows for pair in pairs_of(row)} == brute_force(options, anything)
    assert len(rows) <= 11  # 9 is the minimum


def test_the_number_of_rows_is_logarithmic_in_the_options():
    options = [(f"{number}a", f"{number}b") for number in range(12)]
    rows = covering_rows(options, anything)
    assert {pair for row in rows for pair in pairs_of(row)} == brute_force(options, anything)
    assert len(rows) <= 10  # 6 is the minimum


def test_a_pair_that_a_third_option_excludes_is_not_possible():
    options = [("a", "b"), ("c", "d"), ("e", "f")]

    def is_allowed(row):  # a requires e, c requires f
        return not (row[0] == "a" and row[2] == "f") and not (row[1] == "c" and row[2] == "e")

    assert (0, "a", 1, "c") not in possible_pairs(options, is_allowed)
    assert completed(("a", "c", None), options, is_allowed) is None
    rows = covering_rows(options, is_allowed)
    assert {pair for row in rows for pair in pairs_of(row)} == brute_force(options, is_allowed)


def test_rows_are_deterministic():
    options = [("a", "b", "c"), ("d", "e"), ("f", "g", "h")]
    assert covering_rows(options, anything) == covering_rows(options, anything)


def test_half_of_the_rows_contain_most_of_the_pairs():
    options = [
        tuple(f"{position}{value}" for value in range(size))
        for position, size in enumerate((8, 5, 4, 2, 2, 2))
    ]
    rows = covering_rows(options, anything)
    first = {pair for row in rows[: len(rows) // 2] for pair in pairs_of(row)}
    assert len(first) > 0.7 * len(brute_force(options, anything))


@st.composite
def problems(draw):
    """Draw options and forbidden pairs of values."""
    sizes = draw(st.lists(st.integers(1, 4), min_size=2, max_size=5))
    options = [tuple(f"{position}{value}" for value in range(size)) for position, size in enumerate(sizes)]
    values = [value for option in options for value in option]
    forbidden = draw(st.sets(st.tuples(st.sampled_from(values), st.sampled_from(values)), max_size=8))
    return options, forbidden


@given(problems())
def test_exactly_the_pairs_of_allowed_rows_are_covered(problem):
    options, forbidden = problem

    def is_allowed(row):
        return not any(first in row and second in row for first, second in forbidden)

    rows = covering_rows(options, is_allowed)
    assert all(is_allowed(row) for row in rows)
    assert {pair for row in rows for pair in pairs_of(row)} == brute_force(options, is_allowed)
    assert set(possible_pairs(options, is_allowed)) == brute_force(options, is_allowed)
    assert all(row[position] in options[position] for row in rows for position in range(len(options)))


@pytest.mark.parametrize("options", [[("a",), ("b",)], [("a", "b"), ("c",)]])
def test_options_with_one_value_are_allowed(options):
    assert sorted(covering_rows(options, anything)) == sorted(product(*options))
