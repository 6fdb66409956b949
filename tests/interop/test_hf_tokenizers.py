"""The tokenizer of an exported folder: AutoTokenizer of `transformers` gives the ids of the run's tokenizer."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from tiny_tokenizers import TEXTS, bert_file, sentencepiece_file, tiny_config

from megatrain.checkpoint.stored_tokenizer import StoredTokenizer
from megatrain.config.errors import InputError, MegatrainError
from megatrain.config.schema.tokenizer import TokenizerConfig
from megatrain.data.tokenizers.build import load_tokenizer
from megatrain.interop.hf.tokenizer_files import tokenizer_files
from megatrain.tools import compare_tokenizers as compare_module
from megatrain.tools.compare_tokenizers import compare_tokenizers

pytest.importorskip("transformers")
pytestmark = pytest.mark.filterwarnings("ignore")
MODEL = {"config.json": json.dumps({"model_type": "llama", "architectures": ["LlamaForCausalLM"]}).encode()}
"""A class of transformers of its own belongs to this model, which must not read the tokenizer."""
ADDED = ("<|im_start|>", "<|im_end|>")
TYPES: dict[str, tuple[str, dict[str, Any]]] = {
    "library": ("HuggingFaceTokenizer", {}),
    "library with added tokens": ("HuggingFaceTokenizer", {"tokenizer_special_tokens": ADDED}),
    "GPT-2": ("GPT2BPETokenizer", {}),
    "GPT-2 with added tokens": ("GPT2BPETokenizer", {"tokenizer_special_tokens": ADDED}),
    "BERT": ("BertWordPieceLowerCase", {}),
    "cased BERT with its template": (
        "BertWordPieceCase",
        {"tokenizer_hf_no_include_special_tokens": False},
    ),
    "tiktoken": ("TikTokenizer", {}),
    "tiktoken v1": ("TikTokenizer", {"tiktoken_pattern": "v1", "tiktoken_num_special_tokens": 8}),
}
SENTENCEPIECE: dict[str, dict[str, Any]] = {
    "bpe": {},
    "bpe without bytes": {"byte_fallback": False, "vocab_size": 60, "character_coverage": 0.98},
    "bpe that keeps spaces": {"remove_extra_whitespaces": False, "normalization_rule_name": "identity"},
    "bpe that maps characters and keeps spaces": {"remove_extra_whitespaces": False},
    "bpe without a prefix": {"add_dummy_prefix": False, "remove_extra_whitespaces": False},
    "bpe with symbols": {"user_defined_symbols": ["<sep>", "\n\n", "<a>"]},
    "bpe with symbols, without a prefix": {
        "user_defined_symbols": ["<sep>", "\n\n"],
        "add_dummy_prefix": False,
        "remove_extra_whitespaces": False,
    },
    "unigram": {"model_type": "unigram", "vocab_size": 330},
    "unigram without bytes": {
        "model_type": "unigram",
        "byte_fallback": False,
        "vocab_size": 70,
        "character_coverage": 0.98,
        "pad_id": 3,
    },
    "unigram with symbols": {"model_type": "unigram", "vocab_size": 330, "user_defined_symbols": ["<sep>"]},
    "characters": {"model_type": "char"},
}


def compared(config: TokenizerConfig) -> tuple[str, dict[str, bytes]]:
    """Return the sentence of the comparison, and the files."""
    tokenizer = load_tokenizer(config)
    files = tokenizer_files(StoredTokenizer(config, tokenizer, ()))
    return compare_tokenizers(MODEL | files, tokenizer, num_rows=tokenizer.vocab_size), files


@pytest.mark.parametrize("name", TYPES)
def test_every_type_is_read_to_the_same_ids(name: str, tmp_path: Path) -> None:
    kind, more = TYPES[name]
    assert "the same ids" in compared(tiny_config(kind, tmp_path, **more))[0]


@pytest.mark.parametrize("name", SENTENCEPIECE)
def test_sentencepiece_models_are_read_to_the_same_ids(name: str, tmp_path: Path) -> None:
    options = {"hard_vocab_limit": False, **SENTENCEPIECE[name]}
    model = sentencepiece_file(tmp_path, **options)
    config = TokenizerConfig(tokenizer_type="SentencePieceTokenizer", tokenizer_model=model)
    sentence, files = compared(config)
    assert "the same ids" in sentence
    keys = json.loads(files["tokenizer_config.json"])
    assert (keys["eos_token"], keys["split_special_tokens"]) == ("</s>", True)
    for file, content in files.items():  # megatrain reads the folder so, too
        (tmp_path / file).write_bytes(content)
    theirs = load_tokenizer(
        TokenizerConfig(tokenizer_type="HuggingFaceTokenizer", tokenizer_model=str(tmp_path))
    )
    ours = load_tokenizer(config)
    for text in [*TEXTS, "</s> a<s>", "x<sep>y"]:
        assert theirs.encode(text) == ours.encode(text)


def library_folder(folder: Path, **keys: Any) -> TokenizerConfig:
    """Write a tokenizer whose template begins each text with a token, and its tokenizer_config.json."""
    config = tiny_config("HuggingFaceTokenizer", folder)
    file = folder / "tokenizer.json"
    content = json.loads(file.read_text())
    token = {"id": "the", "ids": [content["model"]["vocab"]["the"]], "tokens": ["the"]}
    content["post_processor"] = {
        "type": "TemplateProcessing",
        "single": [{"SpecialToken": {"id": "the", "type_id": 0}}, {"Sequence": {"id": "A", "type_id": 0}}],
        "pair": [{"Sequence": {"id": "A", "type_id": 0}}, {"Sequence": {"id": "B", "type_id": 0}}],
        "special_tokens": {"the": token},
    }
    file.write_text(json.dumps(content))
    (folder / "tokenizer_config.json").write_text(json.dumps(keys))
    return config


@pytest.mark.parametrize("leaves_out", [False, True])
def test_a_token_before_each_text_is_added_if_the_run_adds_it(leaves_out: bool, tmp_path: Path) -> None:
    library_folder(tmp_path, add_bos_token=not leaves_out, tokenizer_class="LlamaTokenizer")
    config = TokenizerConfig(
        tokenizer_type="HuggingFaceTokenizer",
        tokenizer_model=str(tmp_path),
        tokenizer_hf_no_include_special_tokens=leaves_out,
    )
    sentence, files = compared(config)
    assert "the same ids" in sentence
    assert (files["tokenizer.json"] == (tmp_path / "tokenizer.json").read_bytes()) is not leaves_out


@pytest.mark.parametrize("is_file", [False, True])
def test_the_chat_template_is_copied(is_file: bool, tmp_path: Path) -> None:
    template = "{% for message in messages %}{{ message.content }}{% endfor %}"
    config = library_folder(tmp_path, chat_template=template, model_max_length=9, auto_map={})
    if is_file:
        (tmp_path / "chat_template.jinja").write_text(template + "x")
    blob = tmp_path / "blobs" / "5f"  # as in a cache of transformers
    blob.parent.mkdir()
    (tmp_path / "tokenizer.json").rename(blob)
    (tmp_path / "tokenizer.json").symlink_to(blob)
    _, files = compared(
        TokenizerConfig(
            tokenizer_type=config.tokenizer_type, tokenizer_model=str(tmp_path / "tokenizer.json")
        )
    )
    keys = json.loads(files["tokenizer_config.json"])
    assert (keys["chat_template"], keys["model_max_length"], "auto_map" in keys) == (template, 9, False)
    assert files.get("chat_template.jinja") == ((template + "x").encode() if is_file else None)


def test_another_id_is_found_and_the_text_is_named(tmp_path: Path) -> None:
    config = tiny_config("HuggingFaceTokenizer", tmp_path)
    tokenizer = load_tokenizer(config)
    files = MODEL | tokenizer_files(StoredTokenizer(config, tokenizer, ()))
    changed = json.loads(files["tokenizer.json"])
    changed["normalizer"] = {"type": "Lowercase"}
    files["tokenizer.json"] = json.dumps(changed).encode()
    with pytest.raises(MegatrainError, match=r"the text .The quick .* ids .* in transformers.*\n  fix: "):
        compare_tokenizers(files, tokenizer, num_rows=tokenizer.vocab_size)
    with pytest.raises(MegatrainError, match="tokens in transformers, and the embedding 9 rows"):
        compare_tokenizers(files, tokenizer, num_rows=9)


def test_a_comparison_that_cannot_be_made_is_told(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(compare_module, "find_spec", lambda _: None)
    assert "not compared: the package transformers" in compared(tiny_config("GPT2BPETokenizer", tmp_path))[0]


def test_words_as_pieces_have_no_form_there(tmp_path: Path) -> None:
    model = sentencepiece_file(tmp_path, model_type="word", hard_vocab_limit=False)
    with pytest.raises(InputError, match=r"whole words as pieces.*\n  fix: "):
        compared(TokenizerConfig(tokenizer_type="SentencePieceTokenizer", tokenizer_model=model))


def test_a_vocabulary_with_one_text_twice_has_no_form_there(tmp_path: Path) -> None:
    config = tiny_config("TikTokenizer", tmp_path, tokenizer_special_tokens=("</s>", "the"))
    with pytest.raises(InputError, match=r"the is an ordinary token .* and a special one"):
        compared(config)


def test_a_bert_vocabulary_keeps_its_end_token(tmp_path: Path) -> None:
    config = TokenizerConfig(tokenizer_type="BertWordPieceCase", vocab_file=bert_file(tmp_path))
    assert json.loads(compared(config)[1]["tokenizer_config.json"])["eos_token"] == "[SEP]"
