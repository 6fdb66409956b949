"""Text while tokens arrive: characters of several tokens, stop words across tokens."""

from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tiny_tokenizers import BERT_SPECIAL

from megatrain.config.schema.tokenizer import TokenizerConfig
from megatrain.data.tokenizers.build import load_tokenizer
from megatrain.inference.text_stream import TextStream


class Bytes:
    """A tokenizer whose tokens are bytes: characters may take several."""

    def encode(self, text: str) -> list[int]:
        return list(text.encode())

    def decode(self, ids: list[int]) -> str:
        return bytes(ids).decode(errors="replace")


def stream(text: str, *stop: str, prompt: str = "ab") -> tuple[TextStream, list[str]]:
    tokenizer: Any = Bytes()
    found = TextStream(tokenizer, tokenizer.encode(prompt), stop)
    pieces = []
    for token in tokenizer.encode(text):
        pieces.append(found.add(token))
        if found.is_stopped:
            break
    return found, [*pieces, found.finish()]


@given(
    st.text(max_size=30), st.text(max_size=5), st.lists(st.text("ab€", min_size=1, max_size=3), max_size=3)
)
def test_pieces_are_the_text_up_to_the_stop_word_that_is_complete_first(
    text: str, prompt: str, stop: list[str]
) -> None:
    found, pieces = stream(text, *stop, prompt=prompt)
    beginnings = (text[:length] for length in range(len(text) + 1))
    first = next((one for one in beginnings if any(word in one for word in stop)), None)
    expected = text if first is None else first[: min(first.find(word) for word in stop if word in first)]
    assert "".join(pieces) == found.text == expected
    assert found.is_stopped == (first is not None)


def test_a_character_is_shown_when_its_last_byte_is_there() -> None:
    assert stream("a€b")[1] == ["a", "", "", "€", "b", ""]


def test_a_possible_beginning_of_a_stop_word_is_held_back() -> None:
    found, pieces = stream("xaay", "aab")
    assert pieces == ["x", "", "", "aay", ""]
    assert not found.is_stopped
    found, pieces = stream("xaa", "aab")
    assert pieces == ["x", "", "", "aa"]
    assert stream("xaab", "aab")[1] == ["x", "", "", "", ""]


def test_bytes_of_no_character_are_shown_in_the_end() -> None:
    tokenizer: Any = Bytes()
    found = TextStream(tokenizer, [97])
    assert [found.add(0xE2), found.add(0x82), found.finish()] == ["", "", "\ufffd"]
    endless = TextStream(tokenizer, [97])
    assert "".join(endless.add(0xFF) for _ in range(9)) == "\ufffd" * 8


def test_numbers_have_spaces_between_them() -> None:
    tokenizer = load_tokenizer(TokenizerConfig(tokenizer_type="NullTokenizer", vocab_size=29))
    found = TextStream(tokenizer, [5, 3], ["7 8"])
    assert [found.add(1), found.add(7), found.add(28), found.add(7), found.add(8)] == [
        " 1",
        " ",
        "7 28",
        " ",
        "",
    ]
    assert found.is_stopped


@pytest.mark.parametrize("context", [0, 1, 20])
def test_the_text_does_not_depend_on_the_length_of_the_prompt(context: int) -> None:
    assert stream("né à", prompt="ü" * context)[0].text == "né à"


def test_word_pieces_arrive_with_each_character_and_sentinel(tmp_path: Path) -> None:
    file = tmp_path / "vocab.txt"
    file.write_text("\n".join([*BERT_SPECIAL, *"t',.", "do", "##n", "##ing"]))
    config = TokenizerConfig(
        tokenizer_type="BertWordPieceCase", vocab_file=str(file), tokenizer_hf_no_include_special_tokens=True
    )
    tokenizer = load_tokenizer(config)
    ids = tokenizer.encode("<extra_id_0> don't do, doing. <extra_id_1>")
    found = TextStream(tokenizer, [])
    pieces = [found.add(number) for number in ids]
    assert "".join([*pieces, found.finish()]) == tokenizer.decode(ids) == found.text
    assert found.text == "<extra_id_0> don ' t do , doing . <extra_id_1>"
