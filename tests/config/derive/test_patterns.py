"""Layer patterns and windows: every spelling, and no code is run."""

import pytest

from megatrain.config.derive.patterns import PatternError, parse_layer_pattern, parse_window

YES, NO = True, False


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (None, (YES, YES, YES, YES)),
        ("2", (YES, NO, YES, NO)),
        ("4", (YES, YES, YES, NO)),
        ("1", (NO, NO, NO, NO)),
        ("[1,1,0,1]", (YES, YES, NO, YES)),
        ("[1]*3+[0]", (YES, YES, YES, NO)),
        ("([1]+[0]) * 2", (YES, NO, YES, NO)),
        ("2*[0, 1]", (NO, YES, NO, YES)),
    ],
)
def test_a_pattern_selects_layers(text: str | None, expected: tuple[bool, ...]) -> None:
    assert parse_layer_pattern(text, 4, one_means=True) == expected


def test_the_meaning_of_one_applies_to_lists_and_not_to_numbers() -> None:
    assert (
        parse_layer_pattern("[0]*3+[1]", 4, one_means=False)
        == parse_layer_pattern("4", 4, one_means=False)
        == (YES, YES, YES, NO)
    )


@pytest.mark.parametrize(
    "text",
    ["", "x", "-1", "0", "[1]", "[1]*5", "[2]*4", "[1]*4+", "[True]*4", "open('f')", "[1]*10**9", "[[1]]*4", "[-1]*4",
     "[1.0]*4", "9" * 40, "(" * 500, "[1]*99999999999", "[]*4"],
)  # fmt: skip
def test_an_invalid_pattern_is_an_error(text: str) -> None:
    with pytest.raises(PatternError):
        parse_layer_pattern(text, 4, one_means=True)


@pytest.mark.parametrize(
    ("text", "expected"),
    [(None, None), ("128,0", 128), ("(128, 0)", 128), ("-1,0", None), ("0,0", 0), ("[4,0]", 4)],
)
def test_a_window_is_the_number_of_tokens_to_the_left(text: str | None, expected: int | None) -> None:
    assert parse_window(text) == expected


@pytest.mark.parametrize("text", ["", "128", "128,1", "128,-1", "-2,0", "a,0", "1,2,3"])
def test_an_invalid_window_is_an_error(text: str) -> None:
    with pytest.raises(PatternError):
        parse_window(text)
