"""Files of tokenizers that are missing, damaged, of another kind, or do not belong together: what is said about them."""

from __future__ import annotations

import json
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


def refusal(kind, model=None, **more):
    with pytest.raises(InputError) as error:
        load(kind, model, **more)
    return str(error.value)


def written(path, content):
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    return path


@pytest.mark.parametrize("kind", ["HuggingFaceTokenizer", "Llama2Tokenizer", "TikTokenizer"])
def test_a_missing_file_is_named(tmp_path, kind):
    assert f"{tmp_path / 'nowhere'}: there is no such file\n  fix: give --tokenizer-model" in refusal(
        kind, tmp_path / "nowhere"
    )


def test_a_name_on_the_hub_is_not_looked_up():
    text = refusal("HuggingFaceTokenizer", "meta-llama/Llama-3.1-8B")
    assert "meta-llama/Llama-3.1-8B: there is no such file" in text
    assert "download it first (hf download meta-llama/Llama-3.1-8B --include 'tokenizer*'" in text
    assert "hf download" not in refusal("HuggingFaceTokenizer", "runs/tokenizer.json")


@pytest.mark.parametrize("kind", ["Llama2Tokenizer", "TikTokenizer"])
def test_a_folder_for_a_file_is_named(tmp_path, kind):
    assert f"{tmp_path}: is a folder\n  fix: give --tokenizer-model a file" in refusal(kind, tmp_path)


def test_a_folder_says_how_to_use_what_it_holds(tmp_path):
    assert f"{tmp_path}: holds no tokenizer.json\n  fix: give --tokenizer-model a" in refusal(
        "HuggingFaceTokenizer", tmp_path
    )
    bert_file(tmp_path)
    assert (
        f"BertWordPieceCase (or LowerCase) --vocab-file {tmp_path / 'vocab.txt'}, or make one with"
        in refusal("HuggingFaceTokenizer", tmp_path)
    )
    sentencepiece_file(tmp_path)
    assert (
        f"SentencePieceTokenizer --tokenizer-model {tmp_path / 'tokenizer.model'}, or make one with"
        in refusal("HuggingFaceTokenizer", tmp_path)
    )


def test_an_older_folder_with_other_rules_for_words_is_refused(tmp_path):
    gpt2_files(tmp_path)
    written(tmp_path / "tokenizer_config.json", json.dumps({"tokenizer_class": "Qwen2Tokenizer"}))
    assert "holds no tokenizer.json\n  fix: make one with transformers: python -c" in refusal(
        "HuggingFaceTokenizer", tmp_path
    )
    written(tmp_path / "tokenizer_config.json", json.dumps({"tokenizer_class": "GPT2Tokenizer"}))
    assert load("HuggingFaceTokenizer", tmp_path).eod is not None
    written(tmp_path / "added_tokens.json", "{}")
    assert "holds no tokenizer.json" in refusal("HuggingFaceTokenizer", tmp_path)


def samples(folder: Path) -> dict[str, Path]:
    """A file of every kind."""
    (folder / "gpt2").mkdir()
    vocab, merges = gpt2_files(folder / "gpt2")
    tekken = {"config": {}, "vocab": tiktoken_entries()}
    return {
        "sentencepiece": Path(sentencepiece_file(folder)),
        "tokenizer.json": written(folder / "tokenizer.json", json.dumps({"model": {}})),
        "tiktoken": Path(tiktoken_file(folder)),
        "tekken": written(folder / "tekken.json", json.dumps(tekken)),
        "vocab.json": Path(vocab),
        "merges": Path(merges),
        "ranks": written(folder / "llama3.model", "IQ== 0\nIg== 1\n"),
        "text": Path(bert_file(folder)),
        "empty": written(folder / "empty", ""),
        "binary": written(folder / "binary", bytes(range(256))),
        "other": written(folder / "other.json", "[]"),
    }


@pytest.mark.parametrize(
    ("kind", "given", "words"),
    [
        ("HuggingFaceTokenizer", "sentencepiece", ("is a SentencePiece model, and not a tokenizer.json of the `tokenizers`"
         " library\n  fix: use --tokenizer-type SentencePieceTokenizer --tokenizer-model")),
        ("HuggingFaceTokenizer", "vocab.json", ("is a vocab.json, and not a tokenizer.json of the `tokenizers` library\n"
         "  fix: use --tokenizer-type GPT2BPETokenizer --vocab-file")),
        ("HuggingFaceTokenizer", "merges", "fix: use --tokenizer-type GPT2BPETokenizer --merge-file"),
        ("HuggingFaceTokenizer", "tekken", ("is a tekken.json, and not a tokenizer.json of the `tokenizers` library\n"
         "  fix: save the list under its key `vocab`")),
        ("HuggingFaceTokenizer", "other", "is JSON of another kind"),
        ("HuggingFaceTokenizer", "empty", "is an empty file, and not"),
        ("Llama2Tokenizer", "tokenizer.json", ("is a tokenizer.json of the `tokenizers` library, and not a SentencePiece model\n"
         "  fix: use --tokenizer-type HuggingFaceTokenizer --tokenizer-model")),
        ("Llama2Tokenizer", "ranks", ("is a rank file of tiktoken, and not a SentencePiece model\n"
         "  fix: use the tokenizer.json of the same model, with --tokenizer-type HuggingFaceTokenizer")),
        ("SentencePieceTokenizer", "binary", "is a file of unknown kind, and not a SentencePiece model"),
        ("GPTSentencePieceTokenizer", "text", "is text, and not a SentencePiece model"),
        ("TikTokenizer", "tokenizer.json", "and not a JSON list of tokens with their ranks\n  fix: use --tokenizer-type Hugg"),
        ("TikTokenizer", "tekken", "fix: save the list under its key `vocab` as a file of its own"),
        ("TikTokenizer", "other", "is JSON of another kind, and not a JSON list of tokens with their ranks"),
    ],
)  # fmt: skip
def test_a_file_of_another_kind_is_told_with_what_reads_it(tmp_path, kind, given, words):
    assert words in refusal(kind, samples(tmp_path)[given])


def test_swapped_and_foreign_vocabularies_are_told(tmp_path):
    files = samples(tmp_path)
    vocab, merges = str(files["vocab.json"]), str(files["merges"])
    assert "is a merges.txt, and not a vocab.json\n" in refusal(
        "GPT2BPETokenizer", vocab_file=merges, merge_file=vocab
    )
    assert "is a tokenizer.json of" in refusal(
        "GPT2BPETokenizer", vocab_file=str(files["tokenizer.json"]), merge_file=merges
    )
    assert "is a SentencePiece model, and not text" in refusal(
        "BertWordPieceCase", vocab_file=str(files["sentencepiece"])
    )
    assert "is no vocabulary of BERT: [UNK] [SEP] [PAD] [CLS] [MASK] missing" in refusal(
        "BertWordPieceCase", vocab_file=str(written(tmp_path / "words", "one\ntwo\n"))
    )


def test_damaged_files_are_told(tmp_path):
    files = samples(tmp_path)
    for name in ("sentencepiece", "tiktoken", "vocab.json"):
        files[name].write_bytes(files[name].read_bytes()[:-10])
    merges = str(files["merges"])
    assert "is a damaged SentencePiece model" in refusal("Llama2Tokenizer", files["sentencepiece"])
    assert "multilingual.json: cannot be read: " in refusal("TikTokenizer", files["tiktoken"])
    assert "vocab.json: cannot be read: " in refusal(
        "GPT2BPETokenizer", vocab_file=str(files["vocab.json"]), merge_file=merges
    )
    assert "cannot be read: " in refusal("HuggingFaceTokenizer", written(tmp_path / "t.json", "{"))
    assert "cannot be read: 'utf-8' codec" in refusal(
        "HuggingFaceTokenizer", written(tmp_path / "t.json", b'{"a": "\xff"}')
    )
    assert "not a tokenizer of the `tokenizers` library: " in refusal(
        "HuggingFaceTokenizer", files["tokenizer.json"]
    )
    assert "is not UTF-8 text" in refusal(
        "BertWordPieceCase", vocab_file=str(written(tmp_path / "latin", b"[PAD]\nna\xefve\n"))
    )


@pytest.mark.parametrize("content", ["[]", "{", '"text"'])
def test_a_damaged_file_of_named_tokens_is_told(tmp_path, content):
    gpt2_files(tmp_path)
    file = written(tmp_path / "special_tokens_map.json", content)
    assert refusal("HuggingFaceTokenizer", tmp_path).startswith(f"{file}: ")


def with_vocab(tmp_path, change):
    vocab, merges = gpt2_files(tmp_path)
    content = json.loads(Path(vocab).read_text(encoding="utf-8"))
    change(content)
    Path(vocab).write_text(json.dumps(content))
    return refusal("GPT2BPETokenizer", vocab_file=vocab, merge_file=merges)


def test_vocabularies_with_holes_are_told(tmp_path):
    assert "vocab.json: 1 of the 256 bytes have no token, 'x' among them" in with_vocab(
        tmp_path, lambda vocab: vocab.pop("x")
    )
    assert "'a' and 'b' both have id" in with_vocab(tmp_path, lambda vocab: vocab.update(b=vocab["a"]))
    assert "'a' has id -1" in with_vocab(tmp_path, lambda vocab: vocab.update(a=-1))


def test_merges_of_another_tokenizer_are_told(tmp_path):
    vocab, merges = gpt2_files(tmp_path)
    written(Path(merges), "#version: 0.2\na q\nq z\n")
    text = refusal("GPT2BPETokenizer", vocab_file=vocab, merge_file=merges)
    assert f"{merges}:2: 'a q' merges to or from 'aq', which {vocab} does not have" in text
    assert "fix: give --vocab-file and --merge-file of the same tokenizer" in text
    written(Path(merges), "#version: 0.2\n\na b c\n")
    assert f"{merges}:3: 'a b c' is no pair of tokens" in refusal(
        "GPT2BPETokenizer", vocab_file=vocab, merge_file=merges
    )


@pytest.mark.parametrize(
    ("place", "entry", "words"),
    [
        (1, {"rank": 1, "token_bytes": "YQ==", "token_str": "a"}, "the first 256 are the bytes, in order"),
        (257, {"rank": 9, "token_bytes": "YQ=="}, "and not a token of rank 257 with its bytes in base64\n"),
        (257, {"rank": 257, "token_bytes": "&"}, "and not a token of rank 257"),
        (257, {"rank": 257, "token_bytes": ""}, "and not a token of rank 257"),
        (257, {"rank": 257}, "and not a token of rank 257"),
        (257, "the", "entry 257 is the, and not a token"),
        (257, {"rank": 257, "token_bytes": "dGg="}, "entries 256 and 257 are the same token"),
    ],
)
def test_entries_of_tiktoken_are_checked(tmp_path, place, entry, words):
    entries = tiktoken_entries()
    entries[place] = entry
    assert words in refusal("TikTokenizer", tiktoken_file(tmp_path, entries))


@pytest.mark.parametrize(
    ("kind", "package"), [("Llama2Tokenizer", "sentencepiece"), ("TikTokenizer", "tiktoken")]
)
def test_a_missing_package_is_told_with_its_command(tmp_path, monkeypatch, kind, package):
    file = {"sentencepiece": sentencepiece_file, "tiktoken": tiktoken_file}[package](tmp_path)
    monkeypatch.setitem(sys.modules, package, None)
    with pytest.raises(
        ConfigError, match=rf"{kind} needs the package {package}(.|\n)*fix: pip install {package}"
    ):
        load(kind, file)


def test_a_list_of_words_may_begin_like_json(tmp_path):
    assert Path(bert_file(tmp_path)).read_text().startswith(BERT_SPECIAL[0])
    assert load("BertWordPieceCase", vocab_file=str(tmp_path / "vocab.txt")).pad == 0
