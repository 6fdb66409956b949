"""Every pair that can meet meets, and only such: against the full product."""

from itertools import product

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatrain.tools.parity.covering_array import Partial, completed, covering_rows, pairs_of, possible_pairs


def brute_force(options, is_allowed):
    """The pairs of all allowed rows."""
    return {pair for row in product(*options) if is_allowed(row) for pair in pairs_of(row)}


def anything(_row: Partial) -> bool:
    return True


def test_three_options_of_three_values_take_few_of_their_27_rows():
    options = [("a", "b", "c"), ("d", "e", "f"), ("g", "h", "i")]
    rows = covering_rows(options, anything)
    assert {pair for row in rows for pair in pairs_of(row)} == brute_force(options, anything)
    assert len(rows) <= 11  # 9 is the least


def test_many_options_of_two_values_take_rows_by_their_logarithm():
    options = [(f"{number}a", f"{number}b") for number in range(12)]
    rows = covering_rows(options, anything)
    assert {pair for row in rows for pair in pairs_of(row)} == brute_force(options, anything)
    assert len(rows) <= 10  # 6 is the least


def test_a_pair_that_a_third_option_rules_out_is_none():
    options = [("a", "b"), ("c", "d"), ("e", "f")]

    def is_allowed(row):  # a wants e, c wants f
        return not (row[0] == "a" and row[2] == "f") and not (row[1] == "c" and row[2] == "e")

    assert (0, "a", 1, "c") not in possible_pairs(options, is_allowed)
    assert completed(("a", "c", None), options, is_allowed) is None
    rows = covering_rows(options, is_allowed)
    assert {pair for row in rows for pair in pairs_of(row)} == brute_force(options, is_allowed)


def test_equal_questions_have_equal_answers():
    options = [("a", "b", "c"), ("d", "e"), ("f", "g", "h")]
    assert covering_rows(options, anything) == covering_rows(options, anything)


def test_half_of_the_rows_hold_most_of_the_pairs():
    options = [
        tuple(f"{place}{value}" for value in range(size)) for place, size in enumerate((8, 5, 4, 2, 2, 2))
    ]
    rows = covering_rows(options, anything)
    first = {pair for row in rows[: len(rows) // 2] for pair in pairs_of(row)}
    assert len(first) > 0.7 * len(brute_force(options, anything))


@st.composite
def questions(draw):
    """Options, and pairs of values that are forbidden."""
    sizes = draw(st.lists(st.integers(1, 4), min_size=2, max_size=5))
    options = [tuple(f"{place}{value}" for value in range(size)) for place, size in enumerate(sizes)]
    values = [value for option in options for value in option]
    forbidden = draw(st.sets(st.tuples(st.sampled_from(values), st.sampled_from(values)), max_size=8))
    return options, forbidden


@given(questions())
def test_exactly_the_pairs_of_allowed_rows_meet(question):
    options, forbidden = question

    def is_allowed(row):
        return not any(first in row and second in row for first, second in forbidden)

    rows = covering_rows(options, is_allowed)
    assert all(is_allowed(row) for row in rows)
    assert {pair for row in rows for pair in pairs_of(row)} == brute_force(options, is_allowed)
    assert set(possible_pairs(options, is_allowed)) == brute_force(options, is_allowed)
    assert all(row[place] in options[place] for row in rows for place in range(len(options)))


@pytest.mark.parametrize("options", [[("a",), ("b",)], [("a", "b"), ("c",)]])
def test_options_without_a_choice_have_their_rows(options):
    assert sorted(covering_rows(options, anything)) == sorted(product(*options))
