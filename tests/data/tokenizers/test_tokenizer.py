"""Tokenizers: recorded ids, special tokens, and errors with remedies."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest
from recorded import EXPECTED

from megatrain.config import parse, resolve
from megatrain.config.errors import ConfigError
from megatrain.config.facts import Facts
from megatrain.config.schema.tokenizer import TokenizerConfig, is_same_tokenizer
from megatrain.data.tokenizers.build import load_tokenizer

RECORDED = EXPECTED["tokenizers"]["tokenizer.json"]


@pytest.fixture
def definition(golden):
    return json.loads((golden / "tokenizer.json").read_text())


def load(path, **more):
    path = None if path is None else str(path)
    return load_tokenizer(
        TokenizerConfig(tokenizer_type="HuggingFaceTokenizer", tokenizer_model=path, **more)
    )


def null(vocab_size, **more):
    return load_tokenizer(TokenizerConfig(tokenizer_type="NullTokenizer", vocab_size=vocab_size, **more))


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


def test_the_fingerprint_depends_on_content_not_layout(tmp_path, golden, definition):
    file = tmp_path / "tokenizer.json"
    file.write_text(json.dumps(dict(reversed(definition.items())), indent=3, ensure_ascii=True))
    assert load(file).fingerprint == load(golden).fingerprint
    definition["model"]["merges"].pop()
    file.write_text(json.dumps(definition))
    assert load(file).fingerprint != load(golden).fingerprint


def test_truncation_and_padding_are_turned_off(tmp_path, golden, definition):
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


def test_the_end_of_document_token_is_named_or_guessed(tmp_path, definition):
    (tmp_path / "tokenizer.json").write_text(json.dumps(definition))
    assert (load(tmp_path).eod, load(tmp_path).pad) == (0, -1)
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"eos_token": {"content": "<|padding|>"}}))
    assert load(tmp_path).eod == 1
    assert load(tmp_path).note is None


def test_a_guessed_end_of_document_token_is_reported(tmp_path, golden, definition):
    (tmp_path / "tokenizer.json").write_text(json.dumps(definition))
    for names in ({}, {"eos_token": None}):
        (tmp_path / "tokenizer_config.json").write_text(json.dumps(names))
        tokenizer = load(tmp_path)
        assert tokenizer.eod == 0
        assert "<|endoftext|> (id 0)" in tokenizer.note
        assert '{"eos_token": "<|endoftext|>"} to tokenizer_config.json' in tokenizer.note
    assert load(golden).note is None
    assert null(100).note is None


def test_the_end_of_document_token_may_be_missing(tmp_path, definition):
    text = json.dumps(definition).replace("<|endoftext|>", "<|nothing|>")
    (tmp_path / "tokenizer.json").write_text(text)
    tokenizer = load(tmp_path)
    assert (tokenizer.eod, tokenizer.pad, tokenizer.special_ids) == (None, -1, frozenset())
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"sep_token": "<|padding|>"}))
    assert load(tmp_path).eod == 1, "Megatron-LM uses the separator if there is no end-of-document token"


def test_the_map_of_special_tokens_is_read(tmp_path, definition):
    (tmp_path / "tokenizer.json").write_text(json.dumps(definition))
    tokens = {"eos_token": {"content": "<|padding|>"}, "pad_token": "<|endoftext|>", "bos_token": "a"}
    (tmp_path / "special_tokens_map.json").write_text(json.dumps(tokens))
    tokenizer = load(tmp_path)
    assert (tokenizer.eod, tokenizer.pad) == (1, 0)
    assert tokenizer.special_ids == {1, *tokenizer.encode("a")}


def test_the_map_overrides_a_configuration_without_added_tokens(tmp_path, definition):
    (tmp_path / "tokenizer.json").write_text(json.dumps(definition))
    (tmp_path / "special_tokens_map.json").write_text(json.dumps({"eos_token": "<|padding|>"}))
    config = {"eos_token": "<|endoftext|>"}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    assert load(tmp_path).eod == 1
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config | {"added_tokens_decoder": {}}))
    assert load(tmp_path).eod == 0


def test_a_template_is_used_unless_it_is_turned_off(tmp_path, golden, definition):
    definition["post_processor"] = {
        "type": "TemplateProcessing",
        "single": [{"SpecialToken": {"id": "<|endoftext|>", "type_id": 0}}, {"Sequence": {"id": "A", "type_id": 0}}],
        "pair": [{"Sequence": {"id": "A", "type_id": 0}}, {"Sequence": {"id": "B", "type_id": 0}}],
        "special_tokens": {"<|endoftext|>": {"id": "<|endoftext|>", "ids": [0], "tokens": ["<|endoftext|>"]}},
    }  # fmt: skip
    (tmp_path / "tokenizer.json").write_text(json.dumps(definition))
    plain = load(tmp_path, tokenizer_hf_no_include_special_tokens=True)
    assert plain.encode("Hello") == load(golden).encode("Hello")
    full = load(tmp_path)
    assert full.encode("Hello") == full.encode_batch(["Hello"])[0] == [0, *plain.encode("Hello")]
    assert full.fingerprint != plain.fingerprint


def test_special_tokens_are_appended_to_the_vocabulary(golden):
    tokenizer = load(golden, tokenizer_special_tokens=("<code>", "<|padding|>"))
    assert tokenizer.vocab_size == RECORDED["vocab_size"] + 1
    assert tokenizer.encode("<code>") == [RECORDED["vocab_size"]]
    assert tokenizer.fingerprint != load(golden).fingerprint


def test_the_fingerprints_of_old_data_and_checkpoints_are_accepted(golden):
    old = "e6ebd430588a1727f93006fc1799501c608ba2234e64e06d88d83b35ec646733"
    assert is_same_tokenizer(old, load(golden).fingerprint)
    assert not is_same_tokenizer(old[::-1], load(golden).fingerprint)
    assert null(100).fingerprint == "f280a7d914bf8461369294d29fa4465eb895ff2c08a57cb37706f1516b23a613"


def test_a_tokenizer_that_transformers_has_saved_again_is_the_same(tmp_path, definition):
    transformers = pytest.importorskip("transformers")
    (file := tmp_path / "original.json").write_text(json.dumps(definition | {"post_processor": None}))
    original = load(file)
    transformers.PreTrainedTokenizerFast(tokenizer_file=str(file), eos_token="<|endoftext|>").save_pretrained(
        tmp_path
    )
    again = load(tmp_path)
    assert again.fingerprint.split(":")[1] != original.fingerprint.split(":")[1], "the files say it otherwise"
    assert is_same_tokenizer(again.fingerprint, original.fingerprint)
    definition["model"]["merges"].reverse()
    (tmp_path / "tokenizer.json").write_text(json.dumps(definition))
    assert not is_same_tokenizer(load(tmp_path).fingerprint, original.fingerprint)


def test_a_fingerprint_is_the_same_in_another_process(golden):
    code = (
        "import sys; from megatrain.config.schema.tokenizer import TokenizerConfig as C\n"
        "from megatrain.data.tokenizers.build import load_tokenizer as load\n"
        "print(load(C(tokenizer_type='HuggingFaceTokenizer', tokenizer_model=sys.argv[1])).fingerprint)"
    )
    command = [sys.executable, "-c", code, str(golden)]
    environment = {**os.environ, "PYTHONHASHSEED": "7"}
    ended = subprocess.run(command, capture_output=True, text=True, check=True, env=environment)
    assert ended.stdout.strip() == load(golden).fingerprint


def test_a_size_is_compared_with_the_file(golden):
    assert load(golden, vocab_size=3000).vocab_size == 3000
    with pytest.raises(ConfigError, match=r"--vocab-size 100 .*3000\n  fix: leave --vocab-size out"):
        load(golden, vocab_size=100)


def test_missing_and_unknown_settings_are_reported():
    with pytest.raises(ConfigError, match=r"fix: .*--tokenizer-model.*tokenizer.json"):
        load(None)
    with pytest.raises(ConfigError, match="--tokenizer-type"):
        load_tokenizer(TokenizerConfig())
    with pytest.raises(ConfigError, match=r"HugingFaceTokenizer (.|\n)*HuggingFaceTokenizer"):
        load_tokenizer(TokenizerConfig(tokenizer_type="HugingFaceTokenizer"))
    with pytest.raises(ConfigError, match=r"NullMultimodalTokenizer (.|\n)*--tokenizer-type NullT"):
        load_tokenizer(TokenizerConfig(tokenizer_type="NullMultimodalTokenizer"))
    with pytest.raises(ConfigError, match=r"--vocab-file v .*HuggingFaceTokenizer"):
        load("x", vocab_file="v")
    with pytest.raises(ConfigError, match="--vocab-size"):
        null(None)
    with pytest.raises(ConfigError, match=r"--vocab-size 0 .*\n  fix: give a --vocab-size of 1"):
        null(0)


def test_lists_from_a_checkpoint_are_accepted_as_tuples():
    config = TokenizerConfig(tokenizer_type="NullTokenizer", vocab_size=9, tokenizer_special_tokens=[])
    assert load_tokenizer(config).vocab_size == 9


def test_the_null_tokenizer_reads_numbers():
    tokenizer = null(100)
    assert (tokenizer.vocab_size, tokenizer.eod, tokenizer.pad) == (100, 99, -1)
    assert tokenizer.encode("5 3  98\n") == [5, 3, 98]
    assert tokenizer.decode([5, 3]) == "5 3"
    with pytest.raises(ValueError, match="id 100 is outside the vocabulary of 100"):
        tokenizer.encode("100")
    assert tokenizer.fingerprint != null(101).fingerprint


def test_the_null_tokenizer_accepts_other_eod_and_pad_ids():
    tokenizer = null(100, null_tokenizer_eod_id=7, null_tokenizer_pad_id=3)
    assert (tokenizer.eod, tokenizer.pad, tokenizer.special_ids) == (7, 3, {7})
    prints = {null(100).fingerprint, tokenizer.fingerprint, null(100, null_tokenizer_eod_id=7).fingerprint}
    assert len(prints) == 3
    same = null(100, null_tokenizer_eod_id=99, null_tokenizer_pad_id=-1)
    assert same.fingerprint == null(100).fingerprint, "these are the defaults"


@pytest.mark.parametrize(
    ("flags", "facts", "eod"),
    [
        ("", Facts(), 99),
        ("--null-tokenizer-eod-id 7", Facts(), 7),
        ("--null-tokenizer-eod-id 7", Facts(vocab_size=100, eod_id=7), 7),
    ],
)
def test_a_run_uses_the_given_end_of_document_id(flags, facts, eod):
    model = (
        "--num-layers 2 --hidden-size 64 --num-attention-heads 4 --seq-length 16 --swiglu --disable-bias-linear"
        " --normalization RMSNorm --position-embedding-type rope --hidden-dropout 0 --attention-dropout 0"
    )
    run = "--lr 1e-3 --micro-batch-size 1 --train-iters 2 --eval-iters 0 --mock-data --device cpu"
    tokenizer = "--tokenizer-type NullTokenizer --vocab-size 100"
    assert resolve(parse(f"{model} {run} {tokenizer} {flags}".split()), facts).derived.eod_id == eod


@pytest.mark.parametrize("name", ["eod", "pad"])
def test_eod_and_pad_of_the_null_tokenizer_lie_in_its_vocabulary(name):
    assert null(100, **{f"null_tokenizer_{name}_id": 99}).vocab_size == 100
    pattern = rf"--null-tokenizer-{name}-id 100 .*--vocab-size 100.*\n  fix: .*101"
    with pytest.raises(ConfigError, match=pattern):
        null(100, **{f"null_tokenizer_{name}_id": 100})


def test_flags_of_the_null_tokenizer_are_errors_for_others(golden):
    with pytest.raises(ConfigError, match=r"-eod-id 5 (.|\n)*--tokenizer-type NullTokenizer"):
        load(golden, null_tokenizer_eod_id=5)
