"""Errors of tokenizer files that are missing, damaged, of another kind, or do not belong together."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

import pytest
from tiny_tokenizers import (
    BERT_SPECIAL,
    bert_file,
    gpt2_files,
    sentencepiece_file,
    tiktoken_entries,
    tiktoken_file,
)

from megatrain.config.errors import ConfigError, InputError
from megatrain.config.schema.tokenizer import TokenizerConfig
from megatrain.data.tokenizers.build import load_tokenizer


def load(kind, model=None, **more):
    model = None if model is None else str(model)
    return load_tokenizer(TokenizerConfig(tokenizer_type=kind, tokenizer_model=model, **more))


def error_of(kind, model=None, **more):
    with pytest.raises(InputError) as error:
        load(kind, model, **more)
    return str(error.value)


def write_file(path, content):
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    return path


@pytest.mark.parametrize("kind", ["HuggingFaceTokenizer", "Llama2Tokenizer", "TikTokenizer"])
def test_a_missing_file_is_reported(tmp_path, kind):
    assert f"{tmp_path / 'nowhere'}: there is no such file\n  fix: give --tokenizer-model" in error_of(
        kind, tmp_path / "nowhere"
    )


def test_a_name_on_the_hub_is_not_downloaded():
    text = error_of("HuggingFaceTokenizer", "meta-llama/Llama-3.1-8B")
    assert "meta-llama/Llama-3.1-8B: " in text
    assert "download it first (hf download meta-llama/Llama-3.1-8B --include 'tokenizer*'" in text
    assert "hf download" not in error_of("HuggingFaceTokenizer", "runs/tokenizer.json")


@pytest.mark.parametrize("kind", ["Llama2Tokenizer", "TikTokenizer"])
def test_a_folder_in_place_of_a_file_is_reported(tmp_path, kind):
    assert f"{tmp_path}: is a folder\n  fix: give --tokenizer-model a file" in error_of(kind, tmp_path)


def test_the_error_of_a_folder_depends_on_its_files(tmp_path):
    assert f"{tmp_path}: contains no tokenizer.json\n  fix: give --tokenizer-model a" in error_of(
        "HuggingFaceTokenizer", tmp_path
    )
    bert_file(tmp_path)
    assert (
        f"BertWordPieceCase (or LowerCase) --vocab-file {tmp_path / 'vocab.txt'}, or make one with"
        in error_of("HuggingFaceTokenizer", tmp_path)
    )
    sentencepiece_file(tmp_path)
    assert (
        f"SentencePieceTokenizer --tokenizer-model {tmp_path / 'tokenizer.model'}, or make one with"
        in error_of("HuggingFaceTokenizer", tmp_path)
    )


def test_an_old_folder_of_another_tokenizer_class_is_an_error(tmp_path):
    gpt2_files(tmp_path)
    write_file(tmp_path / "tokenizer_config.json", json.dumps({"tokenizer_class": "Qwen2Tokenizer"}))
    assert "contains no tokenizer.json\n  fix: make one with transformers: python -c" in error_of(
        "HuggingFaceTokenizer", tmp_path
    )
    write_file(tmp_path / "tokenizer_config.json", json.dumps({"tokenizer_class": "GPT2Tokenizer"}))
    assert load("HuggingFaceTokenizer", tmp_path).eod is not None
    write_file(tmp_path / "added_tokens.json", "{}")
    assert "contains no tokenizer.json" in error_of("HuggingFaceTokenizer", tmp_path)


def samples(folder: Path) -> dict[str, Path]:
    """Create a file of every kind."""
    (folder / "gpt2").mkdir()
    vocab, merges = gpt2_files(folder / "gpt2")
    tekken = {"config": {}, "vocab": tiktoken_entries()}
    return {
        "sentencepiece": Path(sentencepiece_file(folder)),
        "tokenizer.json": write_file(folder / "tokenizer.json", json.dumps({"model": {}})),
        "tiktoken": Path(tiktoken_file(folder)),
        "tekken": write_file(folder / "tekken.json", json.dumps(tekken)),
        "vocab.json": Path(vocab),
        "merges": Path(merges),
        "ranks": write_file(folder / "llama3.model", "IQ== 0\nIg== 1\n"),
        "text": Path(bert_file(folder)),
        "empty": write_file(folder / "empty", ""),
        "binary": write_file(folder / "binary", bytes(range(256))),
        "other": write_file(folder / "other.json", "[]"),
    }


@pytest.mark.parametrize(
    ("kind", "given", "parts"),
    [
        ("HuggingFaceTokenizer", "sentencepiece", ("is a SentencePiece model, not a tokenizer.json of the `tokenizers`"
         " library\n  fix: use --tokenizer-type SentencePieceTokenizer --tokenizer-model")),
        ("HuggingFaceTokenizer", "vocab.json", ("is a vocab.json, not a tokenizer.json of the `tokenizers` library\n"
         "  fix: use --tokenizer-type GPT2BPETokenizer --vocab-file")),
        ("HuggingFaceTokenizer", "merges", "fix: use --tokenizer-type GPT2BPETokenizer --merge-file"),
        ("HuggingFaceTokenizer", "tekken", ("is a tekken.json, not a tokenizer.json of the `tokenizers` library\n"
         "  fix: save the list under its key `vocab`")),
        ("HuggingFaceTokenizer", "other", "is JSON of another kind"),
        ("HuggingFaceTokenizer", "empty", "is an empty file, not"),
        ("Llama2Tokenizer", "tokenizer.json", ("is a tokenizer.json of the `tokenizers` library, not a SentencePiece model\n"
         "  fix: use --tokenizer-type HuggingFaceTokenizer --tokenizer-model")),
        ("Llama2Tokenizer", "ranks", ("is a rank file of tiktoken, not a SentencePiece model\n"
         "  fix: use the tokenizer.json of the same model, with --tokenizer-type HuggingFaceTokenizer")),
        ("SentencePieceTokenizer", "binary", "is a file of unknown kind, not a SentencePiece model"),
        ("GPTSentencePieceTokenizer", "text", "is a text file, not a SentencePiece model"),
        ("TikTokenizer", "tokenizer.json", "not a JSON list of tokens with their ranks\n  fix: use --tokenizer-type Hugg"),
        ("TikTokenizer", "tekken", "fix: save the list under its key `vocab` as a separate file"),
        ("TikTokenizer", "other", "is JSON of another kind, not a JSON list of tokens with their ranks"),
    ],
)  # fmt: skip
def test_a_file_of_another_kind_is_reported_with_its_tokenizer_type(tmp_path, kind, given, parts):
    assert parts in error_of(kind, samples(tmp_path)[given])


def test_swapped_and_foreign_vocabularies_are_reported(tmp_path):
    files = samples(tmp_path)
    vocab, merges = str(files["vocab.json"]), str(files["merges"])
    assert "is a merges.txt, not a vocab.json\n" in error_of(
        "GPT2BPETokenizer", vocab_file=merges, merge_file=vocab
    )
    assert "is a tokenizer.json of" in error_of(
        "GPT2BPETokenizer", vocab_file=str(files["tokenizer.json"]), merge_file=merges
    )
    assert "is a SentencePiece model, not a text file" in error_of(
        "BertWordPieceCase", vocab_file=str(files["sentencepiece"])
    )
    assert "is not a BERT vocabulary: [UNK] [SEP] [PAD] [CLS] [MASK] missing" in error_of(
        "BertWordPieceCase", vocab_file=str(write_file(tmp_path / "words", "one\ntwo\n"))
    )


def test_damaged_files_are_reported(tmp_path):
    files = samples(tmp_path)
    for name in ("sentencepiece", "tiktoken", "vocab.json"):
        files[name].write_bytes(files[name].read_bytes()[:-10])
    merges = str(files["merges"])
    assert "is a damaged SentencePiece model" in error_of("Llama2Tokenizer", files["sentencepiece"])
    assert "multilingual.json: cannot be read: " in error_of("TikTokenizer", files["tiktoken"])
    assert "vocab.json: cannot be read: " in error_of(
        "GPT2BPETokenizer", vocab_file=str(files["vocab.json"]), merge_file=merges
    )
    assert "cannot be read: " in error_of("HuggingFaceTokenizer", write_file(tmp_path / "t.json", "{"))
    assert "cannot be read: 'utf-8' codec" in error_of(
        "HuggingFaceTokenizer", write_file(tmp_path / "t.json", b'{"a": "\xff"}')
    )
    assert "not a tokenizer of the `tokenizers` library: " in error_of(
        "HuggingFaceTokenizer", files["tokenizer.json"]
    )
    assert "is not UTF-8 text" in error_of(
        "BertWordPieceCase", vocab_file=str(write_file(tmp_path / "latin", b"[PAD]\nna\xefve\n"))
    )


@pytest.mark.parametrize("content", ["[]", "{", '"text"'])
def test_a_damaged_file_of_special_tokens_is_reported(tmp_path, content):
    gpt2_files(tmp_path)
    file = write_file(tmp_path / "special_tokens_map.json", content)
    assert error_of("HuggingFaceTokenizer", tmp_path).startswith(f"{file}: ")


def with_vocab(tmp_path, change):
    vocab, merges = gpt2_files(tmp_path)
    content = json.loads(Path(vocab).read_text(encoding="utf-8"))
    change(content)
    Path(vocab).write_text(json.dumps(content))
    return error_of("GPT2BPETokenizer", vocab_file=vocab, merge_file=merges)


def test_incomplete_vocabularies_are_reported(tmp_path):
    assert "vocab.json: 1 of the 256 bytes have no token, such as 'x'" in with_vocab(
        tmp_path, lambda vocab: vocab.pop("x")
    )
    assert "'a' and 'b' both have id" in with_vocab(tmp_path, lambda vocab: vocab.update(b=vocab["a"]))
    assert "'a' has id -1" in with_vocab(tmp_path, lambda vocab: vocab.update(a=-1))


def test_merges_of_another_tokenizer_are_reported(tmp_path):
    vocab, merges = gpt2_files(tmp_path)
    write_file(Path(merges), "#version: 0.2\na q\nq z\n")
    text = error_of("GPT2BPETokenizer", vocab_file=vocab, merge_file=merges)
    assert f"{merges}:2: 'a q' merges to or from 'aq', which {vocab} lacks" in text
    assert "fix: give --vocab-file and --merge-file of the same tokenizer" in text
    write_file(Path(merges), "#version: 0.2\n\na b c\n")
    assert f"{merges}:3: 'a b c' is not a pair of tokens" in error_of(
        "GPT2BPETokenizer", vocab_file=vocab, merge_file=merges
    )


@pytest.mark.parametrize(
    ("index", "entry", "parts"),
    [
        (
            1,
            {"rank": 1, "token_bytes": "YQ==", "token_str": "a"},
            "the first 256 must be the bytes, in order",
        ),
        (257, {"rank": 9, "token_bytes": "YQ=="}, "not a token of rank 257 with its bytes in base64\n"),
        (257, {"rank": 257, "token_bytes": "&"}, "not a token of rank 257"),
        (257, {"rank": 257, "token_bytes": ""}, "not a token of rank 257"),
        (257, {"rank": 257}, "not a token of rank 257"),
        (257, "the", "entry 257 is the, not a token"),
        (257, {"rank": 257, "token_bytes": "dGg="}, "entries 256 and 257 are the same token"),
    ],
)
def test_entries_of_tiktoken_are_checked(tmp_path, index, entry, parts):
    entries = tiktoken_entries()
    entries[index] = entry
    assert parts in error_of("TikTokenizer", tiktoken_file(tmp_path, entries))


@pytest.mark.parametrize(
    ("kind", "package"), [("Llama2Tokenizer", "sentencepiece"), ("TikTokenizer", "tiktoken")]
)
def test_a_missing_package_is_reported_with_its_command(tmp_path, monkeypatch, kind, package):
    file = {"sentencepiece": sentencepiece_file, "tiktoken": tiktoken_file}[package](tmp_path)
    monkeypatch.setitem(sys.modules, package, None)
    with pytest.raises(
        ConfigError, match=rf"{kind} needs the package {package}(.|\n)*fix: pip install {package}"
    ):
        load(kind, file)


def test_a_list_of_words_may_begin_like_json(tmp_path):
    assert Path(bert_file(tmp_path)).read_text().startswith(BERT_SPECIAL[0])
    assert load("BertWordPieceCase", vocab_file=str(tmp_path / "vocab.txt")).pad == 0


@pytest.mark.parametrize("kind", ["HuggingFaceTokenizer", "Llama2Tokenizer", "TikTokenizer"])
def test_a_pipe_is_not_read(tmp_path, kind):
    """A checkpoint may name its tokenizer: reading a pipe or a device would never end."""
    os.mkfifo(tmp_path / "pipe")
    assert "is not a regular file\n  fix: give --tokenizer-model a file" in error_of(kind, tmp_path / "pipe")
