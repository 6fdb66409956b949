"""Tokens named by the files next to a tokenizer.json: vocabulary, roles and ids as in transformers 5.23.0, or an error."""

from __future__ import annotations

import json

import pytest
from recorded import EXPECTED
from tiny_tokenizers import gpt2_files

from megatrain.config.errors import InputError
from megatrain.config.schema.tokenizer import TokenizerConfig
from megatrain.data.tokenizers.build import load_tokenizer

CONFIG, MAP, ADDED = "tokenizer_config.json", "special_tokens_map.json", "added_tokens.json"
SIZE = EXPECTED["tokenizers"]["tokenizer.json"]["vocab_size"]
RE = 271
"""Id of `re`, an ordinary token of the vocabulary."""


def entry(token, **flags):
    return {"content": token, "single_word": False, "lstrip": False, "rstrip": False, "normalized": False, "special": True, **flags}  # fmt: skip


def load(folder):
    return load_tokenizer(TokenizerConfig(tokenizer_type="HuggingFaceTokenizer", tokenizer_model=str(folder)))


@pytest.fixture
def folder(golden, tmp_path):
    """A folder with a tokenizer.json."""
    (tmp_path / "tokenizer.json").write_bytes((golden / "tokenizer.json").read_bytes())
    return tmp_path


def write(folder, files):
    for name, content in files.items():
        (folder / name).write_text(json.dumps(content))


def load_with(folder, config):
    write(folder, {CONFIG: config})
    return load(folder)


ELSEWHERE = {
    "end": {CONFIG: {"eos_token": "<|x|>"}},
    "pad": {CONFIG: {"pad_token": "<|x|>"}},
    "end in the map": {MAP: {"eos_token": entry("<|x|>")}},
    "list": {CONFIG: {"additional_special_tokens": ["<|x|>"]}},
    "newer list": {CONFIG: {"extra_special_tokens": ["<|x|>"]}},
    "objects in a list": {CONFIG: {"extra_special_tokens": [{"__type": "AddedToken", **entry("<|x|>")}]}},
    "list of roles": {CONFIG: {"extra_special_tokens": {"image_token": "<|x|>"}}},
    "another role": {CONFIG: {"image_token": "<|x|>"}},
    "entries": {CONFIG: {"added_tokens_decoder": {str(SIZE): entry("<|x|>")}}},
    "list in the map": {MAP: {"additional_special_tokens": ["<|x|>"]}},
    "separate file": {ADDED: {"<|x|>": SIZE}},
}


@pytest.mark.parametrize("case", ELSEWHERE)
def test_a_named_token_outside_the_vocabulary_is_an_error(folder, case):
    write(folder, ELSEWHERE[case])
    with pytest.raises(InputError) as error:
        load(folder)
    (name,) = ELSEWHERE[case]
    problem, fix = str(error.value).split("\n  fix: ")
    assert problem.startswith(f"{folder / name} names '<|x|>'")
    assert str(folder / "tokenizer.json") in problem
    assert "transformers: python -c" in fix
    assert fix.endswith(f"T.from_pretrained('{folder}').save_pretrained('{folder}')\"")


def test_many_missing_tokens_are_counted_per_file(folder):
    tokens = [f"<|{number}|>" for number in range(5)]
    write(
        folder,
        {CONFIG: {"extra_special_tokens": tokens, "eos_token": tokens[0]}, MAP: {"pad_token": "<|p|>"}},
    )
    with pytest.raises(InputError) as error:
        load(folder)
    assert f"{CONFIG} names '<|0|>' and '<|1|>' and '<|2|>' and 2 more, and " in str(error.value)
    assert f"{MAP} names '<|p|>'" in str(error.value)


@pytest.mark.parametrize(
    "files",
    [
        {CONFIG: {"eos_token": "re"}},
        {CONFIG: {"additional_special_tokens": ["re"]}},
        {CONFIG: {"added_tokens_decoder": {"271": entry("re")}}},
        {MAP: {"eos_token": {"content": "re"}}},
        {ADDED: {"re": 271}},
    ],
    ids=["role", "list", "entries", "map", "separate file"],
)
def test_an_ordinary_token_that_is_named_is_matched_in_text(folder, files):
    plain = load(folder)
    assert RE not in plain.encode("return")
    write(folder, files)
    tokenizer = load(folder)
    assert tokenizer.vocab_size == SIZE
    assert tokenizer.encode("return")[0] == RE
    assert tokenizer.fingerprint != plain.fingerprint


@pytest.mark.parametrize(
    ("files", "ids"),
    [
        ({}, [222, 0, 1311]),
        ({CONFIG: {"added_tokens_decoder": {"0": entry("<|endoftext|>", lstrip=True)}}}, [0, 1311]),
        ({CONFIG: {"added_tokens_decoder": {"0": entry("<|endoftext|>", rstrip=True)}}}, [222, 0, 91]),
        ({MAP: {"eos_token": entry("<|endoftext|>", lstrip=True)}}, [222, 0, 1311]),
    ],
    ids=["none", "lstrip", "rstrip", "role"],
)
def test_the_flags_of_an_entry_strip_spaces_around_its_token(folder, files, ids):
    plain = load(folder).fingerprint
    write(folder, files)
    assert load(folder).encode(" <|endoftext|> z") == ids
    assert (load(folder).fingerprint == plain) == (ids == [222, 0, 1311])


def test_entries_equal_to_those_of_the_tokenizer_change_nothing(folder):
    plain = load(folder).fingerprint
    entries = {"0": entry("<|endoftext|>"), "1": entry("<|padding|>", special=False)}
    names = {"eos_token": "<|padding|>", "pad_token": "<|endoftext|>", "sep_token": "", "add_bos_token": True}
    write(folder, {CONFIG: names | {"added_tokens_decoder": entries}})
    tokenizer = load(folder)
    assert tokenizer.fingerprint == plain
    assert (tokenizer.eod, tokenizer.pad) == (1, 0)


def test_files_without_precedence_are_ignored(folder):
    write(folder, {CONFIG: {"added_tokens_decoder": {}}, MAP: {"eos_token": "<|x|>"}, ADDED: {"<|x|>": SIZE}})
    assert load(folder).note is not None
    write(folder, {CONFIG: {}, MAP: {}, ADDED: {"<|x|>": 1}})
    assert load(folder).vocab_size == SIZE, "the added tokens of tokenizer.json take precedence"


def test_the_padding_token_of_tokenizer_json_is_the_pad(folder):
    definition = json.loads((folder / "tokenizer.json").read_text())
    padding = {
        "strategy": "BatchLongest",
        "direction": "Right",
        "pad_to_multiple_of": None,
        "pad_id": 1,
        "pad_type_id": 0,
    }
    write(folder, {"tokenizer.json": definition | {"padding": padding | {"pad_token": "<|padding|>"}}})
    assert load(folder).pad == 1


@pytest.mark.parametrize(
    ("files", "parts"),
    [
        ({CONFIG: []}, "contains no JSON object"),
        ({CONFIG: {"added_tokens_decoder": []}}, "added_tokens_decoder is not a JSON object"),
        (
            {CONFIG: {"added_tokens_decoder": {"0": "<|x|>"}}},
            "added_tokens_decoder contains '<|x|>'",
        ),
        ({CONFIG: {"added_tokens_decoder": {"one": {}}}}, "'one' is not a token id"),
        ({ADDED: {"<|x|>": None}}, "'None' is not a token id"),
        ({ADDED: {"<|x|>": float("inf")}}, "'inf' is not a token id"),
    ],
)
def test_damaged_files_name_the_wrong_entry(folder, files, parts):
    write(folder, files)
    (name,) = files
    with pytest.raises(InputError) as error:
        load(folder)
    assert f"{folder / name}: {parts}" in str(error.value)


def test_an_old_gpt2_folder_contains_its_named_tokens(tmp_path):
    gpt2_files(tmp_path)
    write(tmp_path, {CONFIG: {"eos_token": "<|im_end|>"}})
    with pytest.raises(InputError, match=r"names '<\|im_end\|>'.*vocab.json"):
        load(tmp_path)
    plain = load_with(tmp_path, {"additional_special_tokens": []}).encode("the")
    named = load_with(tmp_path, {"additional_special_tokens": ["he"]})
    assert named.encode("the") == [*named.encode("t"), *named.encode("he")] != plain


def test_gpt2_has_no_other_end_of_document_token(tmp_path):
    vocab, merges = gpt2_files(tmp_path, end="</s>")
    config = TokenizerConfig(tokenizer_type="GPT2BPETokenizer", vocab_file=vocab, merge_file=merges)
    assert (load_tokenizer(config).eod, load_tokenizer(config).note) == (None, None)
