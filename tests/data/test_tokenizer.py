"""Tokenizers: recorded ids, special tokens, and errors that say what to do."""

from __future__ import annotations

import json

import pytest
from recorded import EXPECTED

from megatrain.config.errors import ConfigError, InputError
from megatrain.config.tokenizer import TokenizerConfig
from megatrain.data.tokenizer import load_tokenizer

RECORDED = EXPECTED["tokenizers"]["tokenizer.json"]


@pytest.fixture
def definition(golden):
    return json.loads((golden / "tokenizer.json").read_text())


def load(path):
    return load_tokenizer(TokenizerConfig(tokenizer_type="HuggingFaceTokenizer", tokenizer_model=path))


def null(vocab_size):
    return load_tokenizer(TokenizerConfig(tokenizer_type="NullTokenizer", vocab_size=vocab_size))


@pytest.mark.parametrize("name", ["", "tokenizer.json"])
def test_recorded_ids(golden, name):
    tokenizer = load(golden / name)
    assert (tokenizer.vocab_size, tokenizer.eod, tokenizer.pad) == (
        RECORDED["vocab_size"],
        RECORDED["eod"],
        RECORDED["pad"],
    )
    for case in RECORDED["encode"]:
        assert tokenizer.encode(case["text"]) == case["ids"]
        assert tokenizer.decode(case["ids"]) == case["text"]
    texts = [case["text"] for case in RECORDED["encode"]]
    assert tokenizer.encode_batch(texts) == [case["ids"] for case in RECORDED["encode"]]


def test_the_fingerprint_is_of_content_not_of_layout(tmp_path, golden, definition):
    file = tmp_path / "tokenizer.json"
    file.write_text(json.dumps(dict(reversed(definition.items())), indent=3, ensure_ascii=True))
    assert load(file).fingerprint == load(golden).fingerprint
    definition["model"]["merges"].pop()
    file.write_text(json.dumps(definition))
    assert load(file).fingerprint != load(golden).fingerprint


def test_cutting_and_filling_up_are_turned_off(tmp_path, golden, definition):
    definition["truncation"] = {
        "direction": "Right",
        "max_length": 2,
        "strategy": "LongestFirst",
        "stride": 0,
    }
    definition["padding"] = {
        "strategy": {"Fixed": 9}, "direction": "Right", "pad_to_multiple_of": None, "pad_id": 1,
        "pad_type_id": 0, "pad_token": "<|padding|>",
    }  # fmt: skip
    (tmp_path / "tokenizer.json").write_text(json.dumps(definition))
    tokenizer = load(tmp_path)
    assert tokenizer.encode("Hello, world!") == RECORDED["encode"][0]["ids"]
    assert tokenizer.fingerprint == load(golden).fingerprint


def test_the_end_of_document_is_named_or_known(tmp_path, definition):
    (tmp_path / "tokenizer.json").write_text(json.dumps(definition))
    assert (load(tmp_path).eod, load(tmp_path).pad) == (0, -1)
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"eos_token": {"content": "<|padding|>"}}))
    assert load(tmp_path).eod == 1
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"eos_token": "<nowhere>"}))
    assert load(tmp_path).eod == 0


def test_no_end_of_document_is_an_error(tmp_path, definition):
    text = json.dumps(definition).replace("<|endoftext|>", "<|nothing|>")
    (tmp_path / "tokenizer.json").write_text(text)
    with pytest.raises(
        InputError, match=r"no end-of-document token(.|\n)*fix: put .*eos_token.* into .*tokenizer_config"
    ):
        load(tmp_path)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("{", "cannot be read"),
        ("[]", "holds no JSON object"),
        ("{}", "not a tokenizer of the `tokenizers` library"),
    ],
)
def test_broken_files_are_errors(tmp_path, content, message):
    (tmp_path / "tokenizer.json").write_text(content)
    with pytest.raises(InputError, match=message):
        load(tmp_path)


def test_what_is_missing_is_named(tmp_path):
    with pytest.raises(InputError, match=r"tokenizer.json: there is no such file"):
        load(tmp_path)
    with pytest.raises(
        InputError, match=r"meta-llama/Llama-3: there is no such file(.|\n)*download it first"
    ):
        load("meta-llama/Llama-3")
    with pytest.raises(ConfigError, match="give --tokenizer-model"):
        load(None)
    with pytest.raises(ConfigError, match="use HuggingFaceTokenizer"):
        load_tokenizer(TokenizerConfig(tokenizer_type="HugingFaceTokenizer"))
    with pytest.raises(ConfigError, match="give --vocab-size"):
        null(None)


def test_the_null_tokenizer_reads_numbers():
    tokenizer = null(100)
    assert (tokenizer.vocab_size, tokenizer.eod, tokenizer.pad) == (100, 99, -1)
    assert tokenizer.encode("5 3  98\n") == [5, 3, 98]
    assert tokenizer.decode([5, 3]) == "5 3"
    with pytest.raises(ValueError, match="id 100 is outside the vocabulary of 100"):
        tokenizer.encode("100")
    assert tokenizer.fingerprint != null(101).fingerprint
