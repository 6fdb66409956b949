"""BERT's and T5's tokenizers held to Megatron-LM's, and the corpus that both programs make with them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from preprocessing import run

from megatrain.config.schema.tokenizer import TokenizerConfig
from megatrain.data.tokenizers.build import load_tokenizer
from megatrain.data.tokenizers.huggingface import LibraryTokenizer
from megatrain.data.tokenizers.mask_tokens import mask_vocabulary

VOCABULARIES = {"bert": "uncased", "t5": "cased"}


def flags_of(families: Path, family: str) -> dict[str, Any]:
    kind = {"bert": "BertWordPieceLowerCase", "t5": "BertWordPieceCase"}[family]
    file = families / "sentences" / f"vocab-{VOCABULARIES[family]}.txt"
    return {"tokenizer_type": kind, "vocab_file": str(file)}


@pytest.mark.parametrize("family", VOCABULARIES)
def test_ids_equal_the_recorded_ones(families: Path, family: str) -> None:
    recorded = json.loads((families / "sentences" / "masked.json").read_text())["tokenizers"][family]
    config = flags_of(families, family)
    assert recorded["class"] == config["tokenizer_type"]
    with_special = load_tokenizer(TokenizerConfig(**config))
    without = load_tokenizer(TokenizerConfig(**config, tokenizer_hf_no_include_special_tokens=True))
    for tokenizer, name in ((with_special, "encode"), (without, "encode_without_special_tokens")):
        assert tokenizer.vocab_size == recorded["vocab_size"]
        assert (tokenizer.pad, tokenizer.eod) == (recorded["pad"], recorded["eod"])
        for text, ids in recorded[name]:
            assert tokenizer.encode(text) == ids
            assert tokenizer.encode_batch([text]) == [ids]
    assert isinstance(with_special, LibraryTokenizer)
    assert with_special.role_ids["unk_token"] == recorded["unk"]
    found = mask_vocabulary(with_special, needs_sentinels=family == "t5")
    assert (found.cls, found.sep, found.mask) == (recorded["cls"], recorded["sep"], recorded["mask"])
    assert (found.cls, found.sep) == (recorded["bos"], recorded["eos"])
    sentinels = found.sentinels
    summary = [sentinels[0], sentinels[-1], len(sentinels)] if sentinels else []
    assert summary == recorded["additional_special_tokens_ids"]


@pytest.mark.parametrize("family", VOCABULARIES)
def test_the_corpus_has_the_recorded_bytes(families: Path, family: str, tmp_path: Path) -> None:
    sentences, config = families / "sentences", flags_of(families, family)
    tokenizer = ["--tokenizer-type", config["tokenizer_type"], "--vocab-file", config["vocab_file"]]
    arguments = ["--input", str(sentences / "sentences.jsonl"), *tokenizer]
    assert run(*arguments, "--tokenizer-hf-no-include-special-tokens", prefix=tmp_path / "out") == 0
    for suffix in ("bin", "idx"):
        recorded = sentences / f"sentences_{VOCABULARIES[family]}.{suffix}"
        assert (tmp_path / f"out_text_document.{suffix}").read_bytes() == recorded.read_bytes()
