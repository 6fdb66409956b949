"""Sentence splitting with punkt models: tiny ones made in the test instead of nltk's downloads."""

from __future__ import annotations

import re

import pytest
from preprocessing import NULL, numbers, run

from megatrain.config.errors import ConfigError
from megatrain.data.indexed.reader import IndexedDataset
from megatrain.data.preprocess import sentences
from megatrain.data.preprocess.sentences import (
    SentenceSplitter,
    SplitSettings,
    available_splitter,
    load_splitter,
)

nltk_data = pytest.importorskip("nltk.data")
punkt = pytest.importorskip("nltk.tokenize.punkt")


@pytest.fixture
def models(tmp_path, monkeypatch):
    """A folder with a model of one abbreviation, in the layout of `nltk.downloader punkt_tab`."""
    folder = tmp_path / "nltk_data" / "tokenizers" / "punkt_tab" / "english"
    folder.mkdir(parents=True)
    for name, content in (
        ("collocations.tab", ""),
        ("sent_starters.txt", ""),
        ("abbrev_types.txt", "no\n"),
        ("ortho_context.tab", ""),
    ):
        (folder / name).write_text(content)
    monkeypatch.setattr(nltk_data, "path", [str(tmp_path / "nltk_data")])
    return folder.parent


@pytest.fixture
def splitter():
    return {
        keep: SentenceSplitter(punkt.PunktSentenceTokenizer(), keep_newlines=keep) for keep in (False, True)
    }


TEXT = "One two.\n\nThree?  Four! (Five.) Six"


def test_white_space_between_sentences_is_dropped_or_kept(splitter):
    assert splitter[False](TEXT) == ["One two.", "Three?", "Four!", "(Five.)", "Six"]
    assert splitter[True](TEXT) == ["One two.\n\n", "Three?  ", "Four! ", "(Five.) ", "Six"]
    assert "".join(splitter[True](TEXT)) == TEXT


def test_white_space_at_the_end_is_dropped(splitter):
    for keep in (False, True):
        assert splitter[keep]("One.\n") == ["One."]
        assert splitter[keep]("") == []
        assert splitter[keep](" \n") == []


def test_long_texts_are_cut_first(splitter, monkeypatch):
    monkeypatch.setattr(sentences, "MAX_CHARS", 5)
    assert splitter[False]("One two. Three") == ["One t", "wo.", "T", "hree"]


def test_the_model_of_a_language_is_used(models):
    assert load_splitter(SplitSettings(lang="english", keep_newlines=False))("See no. 5. Good.") == [
        "See no. 5.",
        "Good.",
    ]


def test_each_sentence_becomes_a_sequence(models, tmp_path):
    source = numbers(tmp_path / "in.jsonl", ["7 8\n9", ["1", "2 3"], ""])
    arguments = ["--input", source, *NULL, "--split-sentences", "--append-eod"]
    assert run(*arguments, prefix=tmp_path / "out") == 0
    dataset = IndexedDataset(tmp_path / "out_text_sentence")
    assert [dataset.read(number).tolist() for number in range(len(dataset))] == [
        [7, 8, 9, 99],
        [1],
        [2, 3, 99],
    ]
    assert not list(tmp_path.glob("out_text_document*"))


def test_missing_models_are_an_error_before_any_work(models, tmp_path, capsys, monkeypatch):
    source = numbers(tmp_path / "in.jsonl", ["1"])
    arguments = ["--input", source, *NULL, "--split-sentences"]
    assert run(*arguments, "--lang", "klingon", prefix=tmp_path / "out") == 2
    assert re.search(rf"--lang klingon: {models} .*\n  fix: .*--lang english", capsys.readouterr().err)
    monkeypatch.setattr(nltk_data, "path", [str(tmp_path / "elsewhere")])
    monkeypatch.setattr(sentences, "find_spec", lambda name: None if name == "syntok" else name)
    assert run(*arguments, prefix=tmp_path / "out") == 2
    message = capsys.readouterr().err
    assert str(tmp_path / "elsewhere") in message
    assert "fix: python -m nltk.downloader punkt_tab" in message
    assert "pip install syntok" in message
    assert not list(tmp_path.glob("out*"))


def test_missing_packages_are_an_error(monkeypatch):
    monkeypatch.setattr(sentences, "find_spec", lambda _: None)
    with pytest.raises(
        ConfigError, match=r"--split-sentences needs the package nltk, or syntok.*\n  fix: pip install nltk"
    ):
        available_splitter("english")


@pytest.fixture
def without_models(monkeypatch, tmp_path):
    """A machine with nltk and syntok, and without punkt models."""
    pytest.importorskip("syntok")
    monkeypatch.setattr(nltk_data, "path", [str(tmp_path / "elsewhere")])


def test_syntok_splits_where_there_are_no_models(without_models, tmp_path, capsys):
    assert available_splitter("english") == "syntok"
    text = "Dr. Smith saw no. 5, didn't he?  He did.\n\nA last one"
    found = {
        keep: load_splitter(SplitSettings(lang="english", keep_newlines=keep, splitter="syntok"))(text)
        for keep in (False, True)
    }
    assert found[False] == ["Dr. Smith saw no. 5, didn't he?", "He did.", "A last one"]
    assert "".join(found[True]) == text
    source = numbers(tmp_path / "in.jsonl", ["7 8\n\n9", ["1", "2 3"]])
    assert run("--input", source, *NULL, "--split-sentences", prefix=tmp_path / "out") == 0
    assert "sentences are those of syntok" in capsys.readouterr().err
    dataset = IndexedDataset(tmp_path / "out_text_sentence")
    assert [dataset.read(number).tolist() for number in range(len(dataset))] == [[7, 8], [9], [1], [2, 3]]


def test_a_language_that_syntok_lacks_is_an_error(without_models):
    with pytest.raises(ConfigError, match=r"--lang french: .*\n  fix: python -m nltk.downloader punkt_tab"):
        available_splitter("french")
