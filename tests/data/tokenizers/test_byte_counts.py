"""Bytes of tokens: exact for byte-level tokenizers; SentencePiece counts the space that it adds."""

from pathlib import Path

import pytest
from tiny_tokenizers import TEXTS, bert_file, gpt2_files, sentencepiece_file, tiktoken_entries

from megatrain.config.schema.tokenizer import TokenizerConfig
from megatrain.data.tokenizers.build import load_tokenizer
from megatrain.data.tokenizers.byte_counts import token_byte_counts


@pytest.mark.parametrize("kind", ["GPT2BPETokenizer", "SentencePieceTokenizer", "TikTokenizer"])
def test_the_bytes_of_tokens_add_up_to_the_bytes_of_the_text(tmp_path: Path, kind: str) -> None:
    if kind == "GPT2BPETokenizer":
        vocab, merges = gpt2_files(tmp_path)
        config = TokenizerConfig(tokenizer_type=kind, vocab_file=vocab, merge_file=merges)
    elif kind == "TikTokenizer":
        pytest.importorskip("tiktoken")
        import json

        file = tmp_path / "tiktoken.json"
        file.write_text(json.dumps(tiktoken_entries()))
        config = TokenizerConfig(tokenizer_type=kind, tokenizer_model=str(file))
    else:
        model = sentencepiece_file(
            tmp_path, normalization_rule_name="identity", remove_extra_whitespaces=False
        )
        config = TokenizerConfig(tokenizer_type=kind, tokenizer_model=model)
    tokenizer = load_tokenizer(config)
    counts = token_byte_counts(tokenizer)
    assert counts is not None
    added = kind == "SentencePieceTokenizer"
    for text in filter(None, TEXTS):
        assert sum(counts[one] for one in tokenizer.encode(text)) == len(text.encode()) + added
    assert tokenizer.eod is None or counts[tokenizer.eod] == 0


def test_word_pieces_count_a_space_before_words_and_numbers_have_no_text(tmp_path: Path) -> None:
    config = TokenizerConfig(tokenizer_type="BertWordPieceLowerCase", vocab_file=bert_file(tmp_path))
    tokenizer = load_tokenizer(config)
    counts = token_byte_counts(tokenizer)
    assert counts is not None
    assert sum(counts[one] for one in tokenizer.encode("the dogs")) == len(" the dogs")
    assert (
        token_byte_counts(load_tokenizer(TokenizerConfig(tokenizer_type="NullTokenizer", vocab_size=5)))
        is None
    )
