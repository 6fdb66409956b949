"""All tokenizer types: ids, special tokens, and no tokens added to a text."""

from __future__ import annotations

import hashlib
import json
import pickle
from pathlib import Path

import pytest
from recorded import EXPECTED, write_dataset
from tiny_tokenizers import (
    TEXTS,
    gpt2_files,
    sentencepiece_file,
    tiktoken_entries,
    tiny_config,
)

from megatrain.config.errors import ConfigError
from megatrain.config.schema.tokenizer import TokenizerConfig
from megatrain.data.tokenizers.build import load_tokenizer

RECORDED = EXPECTED["tokenizers"]["tokenizer.model"]
SENTENCEPIECE_TYPES = ("SentencePieceTokenizer", "GPTSentencePieceTokenizer", "Llama2Tokenizer")


TEXT_TYPES = (
    "HuggingFaceTokenizer",
    *SENTENCEPIECE_TYPES,
    "TikTokenizer",
    "GPT2BPETokenizer",
    "BertWordPieceLowerCase",
    "BertWordPieceCase",
)
LOSSLESS = ("HuggingFaceTokenizer", "TikTokenizer", "GPT2BPETokenizer")


@pytest.mark.parametrize("kind", [*TEXT_TYPES, "NullTokenizer"])
def test_every_type_implements_the_interface(tmp_path, kind):
    config = tiny_config(kind, tmp_path)
    tokenizer = load_tokenizer(config)
    texts = ["1 2 3", "", "98"] if kind == "NullTokenizer" else TEXTS
    batch = tokenizer.encode_batch(texts)
    assert batch == [tokenizer.encode(text) for text in texts]
    assert tokenizer.encode("") == []
    assert tokenizer.encode_batch([]) == []
    assert all(type(number) is int and 0 <= number < tokenizer.vocab_size for ids in batch for number in ids)
    assert tokenizer.eod is not None
    assert tokenizer.eod in tokenizer.special_ids
    unknown = (
        {1} if kind.startswith("Bert") else set()
    )  # [UNK] replaces words; other special tokens must not occur
    assert not any(set(ids) & (tokenizer.special_ids - unknown) for ids in batch)
    if kind in LOSSLESS:
        assert [tokenizer.decode(ids) for ids in batch] == texts
    again = load_tokenizer(pickle.loads(pickle.dumps(config)))
    assert again.fingerprint == tokenizer.fingerprint
    assert again.encode_batch(texts) == batch
    assert {len(digest) for digest in tokenizer.fingerprint.split(":")} == {64}


@pytest.mark.parametrize("kind", SENTENCEPIECE_TYPES)
def test_recorded_ids_of_sentencepiece(golden_text, kind):
    pytest.importorskip("sentencepiece")
    model = str(golden_text / "tokenizer.model")
    tokenizer = load_tokenizer(TokenizerConfig(tokenizer_type=kind, tokenizer_model=model))
    assert (tokenizer.vocab_size, tokenizer.eod, tokenizer.pad) == (
        RECORDED["vocab_size"],
        RECORDED["eod"],
        RECORDED["pad"],
    )
    assert tokenizer.special_ids == {0, 1, 2}
    for case in RECORDED["encode"]:
        assert tokenizer.encode(case["text"]) == case["ids"]


@pytest.mark.parametrize(
    ("file", "recorded"),
    [
        ("corpus", EXPECTED["derived_files"]["corpus_sp_text_document"]),
        ("paragraphs", EXPECTED["indexed"]["paragraphs_text_document"]),
    ],
)
def test_recorded_files_of_sentencepiece(golden_text, tmp_path, file, recorded):
    pytest.importorskip("sentencepiece")
    model = str(golden_text / "tokenizer.model")
    tokenizer = load_tokenizer(TokenizerConfig(tokenizer_type="Llama2Tokenizer", tokenizer_model=model))
    documents = []
    for line in (golden_text / f"{file}.jsonl").read_text(encoding="utf-8").split("\n")[:-1]:
        text = json.loads(line)["text"]
        sequences = [ids for ids in tokenizer.encode_batch([text] if isinstance(text, str) else text) if ids]
        if sequences:
            sequences[-1] = [*sequences[-1], tokenizer.eod]
        documents.append(sequences)
    write_dataset(tmp_path / "out", documents)
    for suffix in ("bin", "idx"):
        content = (tmp_path / f"out.{suffix}").read_bytes()
        assert hashlib.sha256(content).hexdigest() == recorded[f"{suffix}_sha256"]


def test_sentencepiece_encodes_control_pieces_as_text(tmp_path):
    model = sentencepiece_file(tmp_path, user_defined_symbols=["<code>"])
    tokenizer = load_tokenizer(TokenizerConfig(tokenizer_type="Llama2Tokenizer", tokenizer_model=model))
    assert tokenizer.eod not in tokenizer.encode("a</s>b")
    assert tokenizer.decode(tokenizer.encode("a</s>b")) == "a</s>b"
    assert 3 in tokenizer.encode("a<code>b")


def test_a_sentencepiece_model_may_have_a_pad_and_no_end(tmp_path):
    model = sentencepiece_file(tmp_path, eos_id=-1, pad_id=2)
    tokenizer = load_tokenizer(
        TokenizerConfig(tokenizer_type="SentencePieceTokenizer", tokenizer_model=model)
    )
    assert (tokenizer.eod, tokenizer.pad, tokenizer.special_ids) == (None, 2, {0, 1})


def test_gpt2_matches_its_end_token_in_text(tmp_path):
    config = tiny_config("GPT2BPETokenizer", tmp_path)
    tokenizer = load_tokenizer(config)
    vocab = json.loads(Path(config.vocab_file).read_text())
    assert tokenizer.vocab_size == len(vocab)
    assert tokenizer.eod == vocab["<|endoftext|>"]
    assert tokenizer.pad == -1
    assert tokenizer.encode("a<|endoftext|>b") == [vocab["a"], tokenizer.eod, vocab["b"]]
    assert tokenizer.decode([tokenizer.eod]) == "<|endoftext|>"


def test_gpt2_without_an_end_token_loads(tmp_path):
    vocab, merges = gpt2_files(tmp_path, end=None)
    config = TokenizerConfig(tokenizer_type="GPT2BPETokenizer", vocab_file=vocab, merge_file=merges)
    tokenizer = load_tokenizer(config)
    assert (tokenizer.eod, tokenizer.special_ids) == (None, frozenset())


def test_gpt2_gives_the_same_ids_from_all_file_formats(tmp_path):
    bare = load_tokenizer(tiny_config("GPT2BPETokenizer", tmp_path))
    folder = load_tokenizer(
        TokenizerConfig(tokenizer_type="HuggingFaceTokenizer", tokenizer_model=str(tmp_path))
    )
    assert folder.fingerprint == bare.fingerprint
    assert folder.eod == bare.eod
    whole = load_tokenizer(tiny_config("HuggingFaceTokenizer", tmp_path))
    assert whole.encode_batch(TEXTS) == folder.encode_batch(TEXTS) == bare.encode_batch(TEXTS)


def test_the_layout_of_vocab_and_merges_does_not_matter(tmp_path):
    config = tiny_config("GPT2BPETokenizer", tmp_path)
    before = load_tokenizer(config).fingerprint
    vocab, merges = Path(config.vocab_file), Path(config.merge_file)
    vocab.write_text(json.dumps(dict(reversed(json.loads(vocab.read_text()).items())), indent=1))
    lines = merges.read_text(encoding="utf-8").split("\n")
    merges.write_bytes("\r\n".join(lines[1:]).encode())  # without #version
    assert load_tokenizer(config).fingerprint == before
    merges.write_bytes("\n".join(lines[:-2]).encode())
    assert load_tokenizer(config).fingerprint != before


def test_bert_lowercases_and_splits_words(tmp_path):
    lower = load_tokenizer(tiny_config("BertWordPieceLowerCase", tmp_path))
    names = {token: number for number, token in enumerate((tmp_path / "vocab.txt").read_text().split("\n"))}
    assert lower.encode("The DOGS, naïve") == [names[word] for word in ("the", "dog", "##s", ",", "naive")]
    assert lower.encode("東 !") == [names["東"], names["[UNK]"]]
    assert lower.decode(lower.encode("The dogs")) == "the dogs"
    assert lower.encode("[SEP]") == [lower.eod] == [names["[SEP]"]]
    assert lower.pad == names["[PAD]"]
    assert lower.special_ids == {1, 2, 3, 4}
    cased = load_tokenizer(tiny_config("BertWordPieceCase", tmp_path))
    assert cased.encode("The dog") == [names["The"], names["dog"]]
    assert cased.vocab_size == lower.vocab_size + 100, "Megatron-LM adds <extra_id_0> to <extra_id_99>"
    assert cased.fingerprint != lower.fingerprint
    with_ends = tiny_config("BertWordPieceCase", tmp_path, tokenizer_hf_no_include_special_tokens=False)
    assert load_tokenizer(with_ends).encode("dog") == [names["[CLS]"], names["dog"], names["[SEP]"]]


def test_tiktoken_puts_special_tokens_first(tmp_path):
    tokenizer = load_tokenizer(tiny_config("TikTokenizer", tmp_path))
    assert tokenizer.vocab_size == 20 + len(tiktoken_entries())
    assert (tokenizer.eod, tokenizer.pad) == (2, 4)
    assert tokenizer.special_ids == {0, 1, 2, 3, 5, 6}
    assert tokenizer.encode("the dog") == [20 + 257, 20 + ord(" "), 20 + 260]
    assert tokenizer.encode("a</s><SPECIAL_7>") == [20 + ord("a"), 2, 7]
    assert tokenizer.decode([2, 20 + 257]) == "</s>the"


def test_tiktoken_patterns_split_differently(tmp_path):
    v1, v2 = (
        load_tokenizer(tiny_config("TikTokenizer", tmp_path, tiktoken_pattern=pattern))
        for pattern in ("v1", "v2")
    )
    assert v1.encode("gG") == [20 + 261]
    assert v2.encode("gG") == [20 + ord("g"), 20 + ord("G")]
    assert v1.fingerprint != v2.fingerprint


def test_tiktoken_uses_the_requested_part_of_its_file(tmp_path):
    tokenizer = load_tokenizer(tiny_config("TikTokenizer", tmp_path, vocab_size=20 + 256))
    assert tokenizer.vocab_size == 276
    assert tokenizer.encode("the") == [20 + ord(letter) for letter in "the"]
    with pytest.raises(ConfigError, match=r"--vocab-size 9999 .*262 tokens(.|\n)*use --vocab-size 282"):
        load_tokenizer(tiny_config("TikTokenizer", tmp_path, vocab_size=9999))
    with pytest.raises(ConfigError, match=r"vocabulary of 200 (.|\n)*use --vocab-size 276 or more"):
        load_tokenizer(tiny_config("TikTokenizer", tmp_path, vocab_size=200))


def test_tiktoken_accepts_other_special_tokens(tmp_path):
    tokens = ("</s>", "<code>")
    tokenizer = load_tokenizer(tiny_config("TikTokenizer", tmp_path, tokenizer_special_tokens=tokens))
    assert (tokenizer.eod, tokenizer.pad, tokenizer.special_ids) == (0, -1, {0, 1})
    assert tokenizer.encode("<code>x") == [1, 20 + ord("x")]
    assert tokenizer.fingerprint != load_tokenizer(tiny_config("TikTokenizer", tmp_path)).fingerprint


@pytest.mark.parametrize(
    ("change", "pattern"),
    [
        ({"tiktoken_num_special_tokens": 3}, r"--tiktoken-num-special-tokens 3 (.|\n)*use .* 7 or more"),
        ({"tokenizer_special_tokens": ("<code>",)}, r"--tokenizer-special-tokens <code>: </s>.*missing"),
        (
            {"tokenizer_special_tokens": ("</s>", "</s>")},
            r"</s> occurs twice\n  fix: .*every token once",
        ),
    ],
)
def test_invalid_special_tokens_of_tiktoken_are_errors(tmp_path, change, pattern):
    with pytest.raises(ConfigError, match=pattern):
        load_tokenizer(tiny_config("TikTokenizer", tmp_path, **change))
